//! The contenders. Each is used as its documentation shows, with its fastest documented settings. The whole result is
//! kept from the optimiser, so that no contender can skip work.
//!
//! All have the same limit. On the allow path it is a burst of 10^9 units, refilled by one unit per second: no key is
//! ever exhausted, and a key that spent [`FILL_COST`] units stays live for an hour, so no store can drop it. On the
//! deny path it is one request per hour.

mod floors;
mod gcra;
mod governor;
mod limitador;
pub(crate) mod mixed;
mod throttlecrab;
pub(crate) mod tollgate;

use std::hint::black_box;
use std::time::Duration;

use crate::traffic::Batch;

const ALLOW_BURST: u32 = 1_000_000_000;
const ALLOW_PERIOD: Duration = Duration::from_secs(1);
const DENY_BURST: u32 = 1;
const DENY_PERIOD: Duration = Duration::from_secs(3600);

/// The units that filling spends per key on the allow path: an hour's worth, so that every key stays live.
const FILL_COST: u32 = 3600;

/// The arguments for building a contender.
#[derive(Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) path: Path,
    /// For contenders that need the number of keys in advance.
    pub(crate) keys: usize,
}

/// The decision on every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    Allow,
    Deny,
}

impl Path {
    /// The maximum burst.
    fn burst(self) -> u32 {
        match self {
            Self::Allow => ALLOW_BURST,
            Self::Deny => DENY_BURST,
        }
    }

    /// The time in which one unit is refilled.
    fn period(self) -> Duration {
        match self {
            Self::Allow => ALLOW_PERIOD,
            Self::Deny => DENY_PERIOD,
        }
    }
}

/// A limiter under test. Keys are `&String` since governor's are.
#[expect(clippy::ptr_arg, reason = "governor compares owned keys, and all get the same")]
pub(crate) trait Contender: Sync {
    /// Takes one unit; returns whether it was allowed.
    fn decide(&self, key: &String) -> bool;

    /// Takes several units at once.
    fn spend(&self, key: &String, cost: u32) -> bool;

    /// The memory that the store itself reports, if it does.
    fn claimed_bytes(&self) -> Option<usize> {
        None
    }

    /// Takes a unit for each key of a batch; returns how many were allowed. One copy of this loop per contender, so
    /// that
    /// `decide` is inlined into it and not called through a table.
    fn run(&self, batch: Batch<'_>) -> usize {
        let decide = |key: &String| usize::from(black_box(self.decide(black_box(key))));
        match batch {
            Batch::Arriving(names) => names.iter().map(decide).sum(),
            Batch::Scattered { names, picks } => picks.iter().map(|pick| decide(&names[*pick as usize])).sum(),
        }
    }
}

/// One kind of contender, before it is built.
#[derive(Clone, Copy)]
pub(crate) struct Entrant {
    pub(crate) name: &'static str,
    pub(crate) build: fn(Setup) -> Box<dyn Contender>,
    /// The units that filling spends per key on the allow path.
    fill_cost: u32,
}

impl Entrant {
    const fn new(name: &'static str, build: fn(Setup) -> Box<dyn Contender>) -> Self {
        Self { name, build, fill_cost: FILL_COST }
    }

    /// For limits too small for [`FILL_COST`], whose keys stay live for a window anyway.
    const fn filled_by_one(mut self) -> Self {
        self.fill_cost = 1;
        self
    }

    /// Brings a key into the state that the path needs: live, or exhausted.
    pub(crate) fn prime(&self, contender: &dyn Contender, path: Path, key: &String) {
        let ready = match path {
            Path::Allow => contender.spend(key, self.fill_cost),
            // throttlecrab lets a few more through than its burst.
            Path::Deny => (0..8).any(|_| !contender.decide(key)),
        };
        assert!(ready, "{} could not bring {key} to the {path:?} path", self.name);
    }
}

/// The floors, tollgate's token bucket, and the peers.
pub(crate) const FIELD: [Entrant; 7] = [
    Entrant::new(HASH_ONLY, |setup| Box::new(floors::HashOnly::new(setup))),
    Entrant::new("floor: hash, slot, CAS", |setup| Box::new(floors::OneSlot::new(setup))),
    Entrant::new(TOLLGATE, tollgate::token_bucket),
    Entrant::new(GOVERNOR, |setup| Box::new(governor::Governor::new(setup))),
    Entrant::new(GCRA, |setup| Box::new(gcra::Gcra::new(setup))),
    Entrant::new(THROTTLECRAB, |setup| Box::new(throttlecrab::Throttlecrab::new(setup))),
    Entrant::new(LIMITADOR, |setup| Box::new(limitador::Limitador::new(setup))),
];

pub(crate) const HASH_ONLY: &str = "floor: hash only";
pub(crate) const TOLLGATE: &str = "tollgate";
/// The baseline of all ratios.
pub(crate) const GOVERNOR: &str = "governor";
pub(crate) const GCRA: &str = "gcra";
pub(crate) const THROTTLECRAB: &str = "throttlecrab";
pub(crate) const LIMITADOR: &str = "limitador";

/// An entrant of the field or one of tollgate's algorithms.
pub(crate) fn by_name(name: &str) -> Option<Entrant> {
    let algorithms = tollgate::ALGORITHMS.iter().chain(&tollgate::LOGS);
    FIELD.iter().chain(algorithms).find(|entrant| entrant.name == name).copied()
}
