//! The limits of a limiter: base limits that apply to every key, and variants and bans that only hits use.

use crate::algorithm::{Algorithm, Ban};
use crate::decision::{Generation, LimitId};
use crate::error::InvalidLimit;
use crate::limit::{Limit, check_name};

/// Most limits in one limiter. Each takes 8 to 64 KiB before its first key, and more with hundreds of segments.
const MAX_LIMITS: usize = 10_000;

/// The limits of a limiter, with variants and bans: see [`LimiterBuilder::limits`](crate::LimiterBuilder::limits) and
/// [`Limiter::with_limits`].
///
/// ```
/// use tollgate::{FixedWindow, Hit, Limit, LimitSet, Limiter, MINUTE};
///
/// let limits = LimitSet::new()
///     .limit(Limit::new("per-user", FixedWindow::new(10, MINUTE))?)
///     .variant("gold", Limit::new("per-user", FixedWindow::new(1000, MINUTE))?);
/// let limiter = Limiter::builder().limits(limits).build()?;
/// assert_eq!(limiter.check("ann").remaining(), 9);
/// // Ann buys the gold plan. Her first request counts there too.
/// let gold = limiter.variant("per-user", "gold").unwrap();
/// assert_eq!(limiter.decide_now(&[Hit::new(gold, "ann")]).remaining(), 998);
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
///
/// [`Limiter::with_limits`]: crate::Limiter::with_limits
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct LimitSet {
    limits: Vec<Limit>,
    /// Variants and bans.
    variants: Vec<Limit>,
    /// Set for rules, which may all be removed. Otherwise a limiter without limits is a mistake.
    allows_empty: bool,
    /// The generation of the ids, if it is that of a rule set or of whole limits.
    generation: Option<Generation>,
    /// The error of the first invalid ban.
    problem: Option<InvalidLimit>,
}

impl LimitSet {
    /// Creates a set without limits.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a limit, which applies to every key. Each limit needs its own name.
    pub fn limit(mut self, limit: Limit) -> Self {
        self.limits.push(limit);
        self
    }

    /// Adds a variant of a limit: other numbers under the same limit name and algorithm, for a plan or a single key.
    ///
    /// `limit` must have the name and algorithm of a limit in this set; `name` is the name of the variant. A variant
    /// applies only to hits that use its id: see [`Limiter::variant`](crate::Limiter::variant).
    ///
    /// Spent units count in all variants of a limit, whatever their windows and rates are. They are converted to the
    /// numbers of the variant that is checked, as [`Limiter::with_limits`] describes. At no time can a client
    /// that alternates between two variants take more at once than either allows. Units that were refilled under one
    /// variant stay refilled under the other. While a key's state belongs to a variant with another window,
    /// `retry_after` may be too short, because charges may still count there.
    ///
    /// [`Limiter::with_limits`]: crate::Limiter::with_limits
    pub fn variant(mut self, name: impl Into<String>, limit: Limit) -> Self {
        self.variants.push(limit.with_variant(name.into()));
        self
    }

    /// Adds a ban. It may have the name of a limit, and then has the store and the failure policy of that limit. A ban
    /// applies only to hits that use its id: see [`Limiter::ban`](crate::Limiter::ban). Each ban needs its own name. An
    /// invalid name or number is reported when the limiter is built.
    ///
    /// A limit is not taken for a ban:
    ///
    /// ```compile_fail,E0061
    /// use tollgate::{FixedWindow, Limit, LimitSet, MINUTE};
    ///
    /// let login = Limit::new("login", FixedWindow::new(5, MINUTE)).unwrap();
    /// let limits = LimitSet::new().limit(login.clone()).ban(login);
    /// ```
    pub fn ban(mut self, name: impl Into<String>, ban: Ban) -> Self {
        match Limit::ban(name, ban) {
            Ok(ban) => self.variants.push(ban),
            Err(problem) => self.problem = self.problem.or(Some(problem)),
        }
        self
    }

    /// Creates a set of the limits of rules and their variants, in the order of their ids.
    #[doc(hidden)]
    pub fn from_rules(limits: &[Limit], variants: &[Limit], generation: Generation) -> Self {
        let (limits, variants) = (limits.to_vec(), variants.to_vec());
        Self { limits, variants, allows_empty: true, generation: Some(generation), problem: None }
    }

    /// Sets the generation of the ids, so that limiters with a share of these limits have the same ids.
    #[cfg(feature = "redis")]
    pub(crate) fn with_generation(self) -> Self {
        Self { generation: Some(self.own_generation()), ..self }
    }

    /// Returns the generation of the ids.
    fn own_generation(&self) -> Generation {
        let name = |limit: &Limit| {
            let is_ban = matches!(limit.algorithm(), Algorithm::Ban(_));
            (limit.name().to_owned(), limit.variant().map(str::to_owned), is_ban)
        };
        let names = |limits: &[Limit]| limits.iter().map(name).collect::<Vec<_>>();
        self.generation.unwrap_or_else(|| Generation::of_names((names(&self.limits), names(&self.variants))))
    }

    /// Returns the share of each limit for one process that counts by itself. `nodes` returns the number of processes
    /// that share a limit.
    #[cfg(feature = "redis")]
    pub(crate) fn share(&self, nodes: impl Fn(&Limit) -> u32) -> Self {
        let share = |limits: &[Limit]| limits.iter().map(|limit| limit.share(nodes(limit))).collect();
        Self { limits: share(&self.limits), variants: share(&self.variants), ..self.clone() }
    }

    /// Checks that there are limits, not too many, and that their names are unique.
    pub(crate) fn checked(mut self) -> Result<Checked, InvalidLimit> {
        if let Some(problem) = self.problem {
            return Err(problem);
        }
        if self.limits.is_empty() && !self.allows_empty {
            return Err(InvalidLimit::new("limits", "the limiter has no limit".into(), "add one with `limit`"));
        }
        let count = self.limits.len() + self.variants.len();
        if count > MAX_LIMITS {
            let problem = format!("{count} limits exceed the maximum of {MAX_LIMITS}");
            return Err(InvalidLimit::new("limits", problem, "use one limit with many keys instead of many limits"));
        }
        let mut by_name: Vec<&Limit> = self.limits.iter().collect();
        by_name.sort_unstable_by_key(|limit| limit.name());
        if let Some(twice) = by_name.windows(2).find(|pair| pair[0].name() == pair[1].name()) {
            let problem = format!("two limits are named `{}`", twice[0].name());
            return Err(InvalidLimit::new("name", problem, "give each limit its own name"));
        }
        let mut bans = Vec::new();
        for variant in &mut self.variants {
            if variant.variant().is_some() || !matches!(variant.algorithm(), Algorithm::Ban(_)) {
                check_variant(variant, &by_name)?;
                continue;
            }
            if let Ok(found) = by_name.binary_search_by_key(&variant.name(), |limit| limit.name()) {
                *variant = variant.clone().with_settings_of(by_name[found]);
            }
            bans.push(variant.name().to_owned());
        }
        bans.sort_unstable();
        if let Some(twice) = bans.windows(2).find(|pair| pair[0] == pair[1]) {
            let problem = format!("two bans are named `{}`", twice[0]);
            return Err(InvalidLimit::new("name", problem, "give each ban its own name"));
        }
        let mut variants: Vec<(&str, &str)> =
            self.variants.iter().filter_map(|limit| Some((limit.name(), limit.variant()?))).collect();
        variants.sort_unstable();
        if let Some(twice) = variants.windows(2).find(|pair| pair[0] == pair[1]) {
            let problem = format!("two variants of `{}` are named `{}`", twice[0].0, twice[0].1);
            return Err(InvalidLimit::new("variant", problem, "give each variant its own name"));
        }
        let base_count = self.limits.len();
        let generation = self.own_generation();
        Ok(Checked { limits: self.limits.into_iter().chain(self.variants).collect(), base_count, generation })
    }
}

fn check_variant(variant: &Limit, by_name: &[&Limit]) -> Result<(), InvalidLimit> {
    let name = variant.name();
    if matches!(variant.algorithm(), Algorithm::Ban(_)) {
        let problem = "a ban is not a variant of a limit".into();
        return Err(InvalidLimit::new("algorithm", problem, "add it with `ban`").of_limit(name));
    }
    if let Some(variant) = variant.variant() {
        check_name(variant).map_err(|error| error.of_limit(name))?;
    }
    let Ok(found) = by_name.binary_search_by_key(&name, |limit| limit.name()) else {
        let problem = format!("a variant names the limit `{name}`, which does not exist");
        return Err(InvalidLimit::new("name", problem, "add the limit itself with `limit`"));
    };
    if !by_name[found].is_variant_of(variant) {
        let problem = format!("a variant of `{name}` uses another algorithm");
        return Err(InvalidLimit::new("algorithm", problem, "use the algorithm of the limit with other numbers"));
    }
    Ok(())
}

impl From<Vec<Limit>> for LimitSet {
    fn from(limits: Vec<Limit>) -> Self {
        Self { limits, ..Self::default() }
    }
}

/// Checked limits, in the order of their ids.
pub(crate) struct Checked {
    pub(crate) limits: Vec<Limit>,
    /// Number of limits that apply to every key. They come first; variants and bans follow.
    pub(crate) base_count: usize,
    /// The generation of the ids.
    pub(crate) generation: Generation,
}

/// Returns the ids of the limits at these positions.
pub(crate) fn ids(positions: std::ops::Range<usize>, generation: Generation) -> impl Iterator<Item = LimitId> {
    (positions.start as u32..positions.end as u32).map(move |position| LimitId::new(position, generation))
}
