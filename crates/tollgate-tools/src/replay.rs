//! Replays access logs through rules, in the time of the log.
//!
//! The gate is the one that serves requests. Its store is in memory, and its clock shows the time of the line. Memory does
//! not grow with the log: keys are counted in tables of bounded size, and the most limited ones in a sketch.
//!
//! Deliberately not here: reading logs, which `access_log` does, and output, which `report` and `text` do.

mod distinct;
mod missing_parts;
mod report;
mod routes;
mod tally;
mod text;
mod threshold;

use std::hash::{BuildHasher, Hasher as _};
use std::net::IpAddr;
use std::rc::Rc;

use futures_util::FutureExt as _;
use http::{HeaderMap, StatusCode};
use tollgate::internal::is_control_or_format;
use tollgate::{Limiter, ManualClock, Timestamp};
use tollgate_config::OpenError;
use tollgate_config::Parsed;
use tollgate_rules::internal::{CachedGate, CountedAs};
use tollgate_rules::{Check, Gate, Outcome};
use tollgate_rules::{Facts, RuleSet};
use tollgate_telemetry::top_keys::TopKeys;

pub(super) use self::distinct::{DistinctKeys, Flag, KeyCount};
use self::missing_parts::MissingParts;
pub use self::report::{NamedFile, ReportOptions, Verdict};
use self::routes::RouteFinder;
use self::tally::{KeyTally, LimitTally, Totals};
pub use self::threshold::Threshold;
use super::access_log::Record;

/// The memory for keys of each rule set. A million keys of a limit take 23 to 46 MB.
const STORE_BYTES: usize = 96 << 20;
/// The number of keys among which the most limited ones are found.
const TOP_KEYS: usize = 1000;
/// The secret of the hashes is fixed, so that a log always gives the same numbers.
const HASH_SEED: [u64; 4] = [0x746f_6c6c, 0x6761_7465, 0x7265_706c, 0x6179_6564];
/// The longest key that is shown.
const MAX_KEY_CHARS: usize = 100;

/// A replay of logs through one or two rule sets.
pub struct Replay {
    config: RulesReplay,
    against: Option<RulesReplay>,
    /// The addresses of clients, with the rule sets that denied them.
    clients: DistinctKeys,
    hasher: ahash::RandomState,
    first: Option<Timestamp>,
    last: Timestamp,
    requests: u64,
    /// Requests that were answered with 429 when they were logged.
    logged_denials: u64,
    comparison: Comparison,
}

/// Requests that two rule sets decided differently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Comparison {
    /// Requests that the rules deny, and the others admit.
    newly_denied: u64,
    /// Requests that the rules admit, and the others deny.
    newly_admitted: u64,
}

impl Replay {
    /// Creates a replay through the rules of a file, compared with those of another.
    pub fn new(config: &Parsed, against: Option<&Parsed>) -> Result<Self, OpenError> {
        let sets = 1 + config.compile()?.names().count() + against.map_or(Ok(0), count_rules)?;
        Ok(Self {
            config: RulesReplay::new(config, sets)?,
            against: against.map(|file| RulesReplay::new(file, sets)).transpose()?,
            clients: DistinctKeys::one_of(sets),
            hasher: ahash::RandomState::with_seeds(1, 2, 3, 4),
            first: None,
            last: Timestamp::EPOCH,
            requests: 0,
            logged_denials: 0,
            comparison: Comparison::default(),
        })
    }

    /// Decides a request.
    pub fn add(&mut self, record: &Record) {
        let Self { config, against, clients, comparison, .. } = self;
        let time = record.time();
        // A log whose parts are in the wrong order goes back in time.
        self.first = Some(self.first.map_or(time, |first| first.min(time)));
        self.last = self.last.max(time);
        self.requests += 1;
        let status = record.status().and_then(|status| StatusCode::from_u16(status).ok());
        self.logged_denials += u64::from(status == Some(StatusCode::TOO_MANY_REQUESTS));
        let check = |rules: &mut RulesReplay| {
            rules.missing_parts.see(record);
            record.with_facts(|facts| rules.check(facts, time, status))
        };
        let (is_admitted, is_admitted_by_other) = (check(config), against.as_mut().map(check));
        if let Some(client) = record.client() {
            let fingerprint = fingerprint_of(&self.hasher, client);
            clients.add(fingerprint);
            if !is_admitted {
                clients.flag(fingerprint, Flag::Denied);
            }
            if is_admitted_by_other == Some(false) {
                clients.flag(fingerprint, Flag::DeniedByOther);
            }
        }
        comparison.newly_denied += u64::from(!is_admitted && is_admitted_by_other == Some(true));
        comparison.newly_admitted += u64::from(is_admitted && is_admitted_by_other == Some(false));
    }

    /// Returns the number of requests so far.
    pub fn requests(&self) -> u64 {
        self.requests
    }
}

fn count_rules(file: &Parsed) -> Result<usize, OpenError> {
    Ok(file.compile()?.names().count())
}

fn fingerprint_of(hasher: &ahash::RandomState, client: IpAddr) -> u64 {
    let mut hash = hasher.build_hasher();
    match client.to_canonical() {
        IpAddr::V4(address) => hash.write_u32(address.to_bits()),
        IpAddr::V6(address) => hash.write_u128(address.to_bits()),
    }
    hash.finish()
}

/// One rule set with its tallies.
struct RulesReplay {
    gate: Gate,
    cached: CachedGate,
    clock: ManualClock,
    now: Timestamp,
    max_memory: usize,
    /// Keys that were evicted and requests that were denied for lack of memory, before counts started again.
    earlier_overflow: KeyOverflow,
    rules: RuleSet,
    routes: Option<Rc<RouteFinder>>,
    missing_parts: MissingParts,
    limits: Vec<LimitTally>,
    totals: Totals,
    top_keys: TopKeys<KeyTally>,
}

impl RulesReplay {
    fn new(file: &Parsed, sets: usize) -> Result<Self, OpenError> {
        let rules = file.compile()?;
        let clock = ManualClock::at(Timestamp::EPOCH);
        let bytes = file.max_memory.map_or(STORE_BYTES, |size| usize::try_from(size.bytes()).unwrap_or(usize::MAX));
        let gate = gate(&rules, bytes, &clock)?;
        Ok(Self {
            cached: gate.cached(),
            gate,
            clock,
            now: Timestamp::EPOCH,
            max_memory: bytes,
            earlier_overflow: KeyOverflow::default(),
            routes: RouteFinder::new(file)?.map(Rc::new),
            missing_parts: MissingParts::new(&rules),
            limits: rules.names().map(|_| LimitTally::new(DistinctKeys::one_of(sets))).collect(),
            rules,
            totals: Totals::default(),
            top_keys: TopKeys::new(TOP_KEYS),
        })
    }

    /// Decides a request. Returns whether it is admitted.
    fn check(&mut self, facts: &Facts<'_>, time: Timestamp, status: Option<StatusCode>) -> bool {
        if self.now != time {
            let is_back = time < self.now;
            self.now = time;
            self.clock.set(time);
            if is_back {
                self.start_again();
            }
        }
        let routes = self.routes.clone();
        let facts = &routes.as_ref().map_or(*facts, |routes| routes.route(facts));
        // A store in memory answers at once.
        let Check::Ready(outcome) = self.cached.check(facts) else { return true };
        self.totals.add(&outcome);
        self.tally(&outcome, facts);
        if let Some(status) = status
            && outcome.awaits_response()
        {
            _ = outcome.settle_response(status, &HeaderMap::new()).now_or_never();
        }
        outcome.is_allowed()
    }

    /// Starts all counts from zero where the time of a log goes back: those of the future would deny everything until
    /// time has caught up. The report warns of such a log.
    #[cold]
    fn start_again(&mut self) {
        // The same rules fit into the same memory.
        let Ok(gate) = gate(&self.rules, self.max_memory, &self.clock) else { return };
        self.earlier_overflow = self.overflow();
        self.cached = gate.cached();
        self.gate = gate;
    }

    fn overflow(&self) -> KeyOverflow {
        let limiter = self.gate.memory();
        let overflows = limiter.iter().flat_map(|limiter| limiter.ids().map(move |id| limiter.overflow(id)));
        overflows.fold(self.earlier_overflow, |sum, of| KeyOverflow {
            evicted: sum.evicted + of.evicted,
            denied: sum.denied + of.denied,
        })
    }

    fn tally(&mut self, outcome: &Outcome, facts: &Facts<'_>) {
        let (time, is_allowed) = (self.now, outcome.is_allowed());
        let decided_by = outcome.deciding_rule().filter(|_| !is_allowed);
        if let Some(rule) = decided_by
            && outcome.decision().is_none()
            && let Some(limit) = self.limits.get_mut(rule as usize)
        {
            limit.refuse();
        }
        for hit in outcome.counted() {
            let Some(limit) = self.limits.get_mut(hit.rule as usize) else { continue };
            let may_be_known = limit.keys.add(hit.fingerprint);
            let key = hit.fingerprint ^ u64::from(hit.rule).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let is_denied = match hit.counted_as {
                CountedAs::Enforced => decided_by == Some(hit.rule),
                CountedAs::ShadowAllowed => false,
                CountedAs::ShadowDenied => true,
            };
            if is_denied {
                limit.deny(time);
                limit.keys.flag(hit.fingerprint, Flag::Denied);
                let name = || KeyTally::new(hit.rule, key_text(&self.rules, hit.rule, facts), time);
                self.top_keys.add(key, name).deny(time);
                continue;
            }
            limit.pass(is_allowed || hit.counted_as != CountedAs::Enforced);
            if may_be_known && let Some(known) = self.top_keys.get_mut(key) {
                known.offered += 1;
            }
        }
    }
}

/// The effects of too little memory for keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct KeyOverflow {
    evicted: u64,
    denied: u64,
}

fn gate(rules: &RuleSet, max_memory: usize, clock: &ManualClock) -> Result<Gate, tollgate::InvalidLimit> {
    let limiter = Limiter::builder().max_memory(max_memory).clock(clock.clone()).hash_seed(HASH_SEED);
    Gate::with_limiter(rules.clone(), limiter)
}

/// Returns the key by which a rule counts a request, for people.
fn key_text(rules: &RuleSet, rule: u32, facts: &Facts<'_>) -> String {
    let parts = rules.key_of(rule, facts).unwrap_or_default();
    if parts.is_empty() {
        return "all requests".to_owned();
    }
    let text = parts.join(", ");
    let mut shown: String = text.chars().take(MAX_KEY_CHARS).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown.replace(is_control_or_format, "\u{fffd}")
}
