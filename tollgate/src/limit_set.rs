//! The limits of a limiter: those that are asked for every key, and those beside them that only a hit names.

use crate::algorithm::Algorithm;
use crate::error::InvalidLimit;
use crate::limit::{Limit, LimitId};

/// Limits in one limiter: each takes 8 to 64 KiB before it has a single key, more with hundreds of segments.
const MAX_LIMITS: usize = 10_000;

/// Limits to make a limiter of, or to change the limits of one to: see [`Limiter::with_limits`].
///
/// ```
/// use tollgate::{FixedWindow, Hit, Limit, LimitSet, Limiter, MINUTE};
///
/// let limits = LimitSet::new()
///     .limit(Limit::new("per-user", FixedWindow::new(10, MINUTE))?)
///     .variant(Limit::new("per-user", FixedWindow::new(1000, MINUTE))?);
/// let limiter = Limiter::builder().limits(limits).build()?;
/// assert_eq!(limiter.check("ann").remaining(), 9);
/// // Ann buys a plan: what she has spent counts there too.
/// let plan = limiter.variants().next().unwrap();
/// assert_eq!(limiter.decide_now(&[Hit::new(plan, "ann")]).remaining(), 998);
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
///
/// [`Limiter::with_limits`]: crate::Limiter::with_limits
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct LimitSet {
    limits: Vec<Limit>,
    variants: Vec<Limit>,
    /// Rules may all have been taken away; else a limiter without limits is a mistake.
    allows_empty: bool,
}

impl LimitSet {
    /// No limits yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a limit. Names must differ.
    pub fn limit(mut self, limit: Limit) -> Self {
        self.limits.push(limit);
        self
    }

    /// Adds other numbers for a limit that is in the set, under its name and with its algorithm: for a plan, or for a
    /// single key. Only hits ask for it, by the id that [`beside`](crate::Limiter::beside) tells.
    ///
    /// What a key has spent counts in all variants of a limit, in units, whatever their windows and rates are: it is
    /// converted to the numbers that ask, as [`Limiter::with_limits`] describes. A client that alternates between
    /// two variants gets no more than either allows. While its state is that of another variant with another window, the
    /// `retry_after` of a denial may be too short: the charges may still count there.
    ///
    /// [`Limiter::with_limits`]: crate::Limiter::with_limits
    pub fn variant(mut self, limit: Limit) -> Self {
        self.variants.push(limit);
        self
    }

    /// Adds a ban, under the name of a limit or one of its own. Only hits ask for it, by the id that
    /// [`beside`](crate::Limiter::beside) tells.
    pub fn ban(mut self, ban: Limit) -> Self {
        self.variants.push(ban);
        self
    }

    /// The limits of rules, and those beside them, in the order of their ids.
    #[cfg(feature = "rules")]
    pub(crate) fn from_rules(limits: &[Limit], variants: &[Limit]) -> Self {
        Self { limits: limits.to_vec(), variants: variants.to_vec(), allows_empty: true }
    }

    /// The share of each limit that one node takes while it decides by itself. `nodes` returns how many nodes share a limit.
    #[cfg(feature = "redis")]
    pub(crate) fn share(&self, nodes: impl Fn(&Limit) -> u32) -> Self {
        let share = |limits: &[Limit]| limits.iter().map(|limit| limit.share(nodes(limit))).collect();
        Self { limits: share(&self.limits), variants: share(&self.variants), allows_empty: self.allows_empty }
    }

    /// Sees to it that there are limits, not too many of them, and that names say which is which.
    pub(crate) fn checked(self) -> Result<Checked, InvalidLimit> {
        if self.limits.is_empty() && !self.allows_empty {
            return Err(InvalidLimit::new("limits", "there is no limit".into(), "add one"));
        }
        let count = self.limits.len() + self.variants.len();
        if count > MAX_LIMITS {
            let problem = format!("{count} limits are more than 10000");
            return Err(InvalidLimit::new("limits", problem, "count by key rather than by limit"));
        }
        let mut by_name: Vec<&Limit> = self.limits.iter().collect();
        by_name.sort_unstable_by_key(|limit| limit.name());
        if let Some(twice) = by_name.windows(2).find(|pair| pair[0].name() == pair[1].name()) {
            let problem = format!("two limits are named `{}`", twice[0].name());
            return Err(InvalidLimit::new("name", problem, "give each limit a name of its own"));
        }
        for limit in self.variants.iter().filter(|limit| !matches!(limit.algorithm(), Algorithm::Ban(_))) {
            check_variant(limit, &by_name)?;
        }
        let base_count = self.limits.len();
        Ok(Checked { limits: self.limits.into_iter().chain(self.variants).collect(), base_count })
    }
}

fn check_variant(variant: &Limit, by_name: &[&Limit]) -> Result<(), InvalidLimit> {
    let name = variant.name();
    let Ok(found) = by_name.binary_search_by_key(&name, |limit| limit.name()) else {
        let problem = format!("there is no limit `{name}` for this to be a variant of");
        return Err(InvalidLimit::new("name", problem, "add the limit itself too"));
    };
    if !by_name[found].is_variant_of(variant) {
        let problem = format!("a variant of `{name}` counts by another algorithm");
        return Err(InvalidLimit::new("algorithm", problem, "use the algorithm of the limit, with other numbers"));
    }
    Ok(())
}

impl From<Vec<Limit>> for LimitSet {
    fn from(limits: Vec<Limit>) -> Self {
        Self { limits, ..Self::default() }
    }
}

/// Limits that make sense together, in the order of their ids.
pub(crate) struct Checked {
    pub(crate) limits: Vec<Limit>,
    /// So many of them, the first ones, are asked for every key.
    pub(crate) base_count: usize,
}

/// The ids of limits from one position to another.
pub(crate) fn ids(positions: std::ops::Range<usize>) -> impl Iterator<Item = LimitId> {
    (positions.start as u32..positions.end as u32).map(LimitId)
}
