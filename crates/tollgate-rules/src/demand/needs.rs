//! A histogram of needs.

use std::fmt;

use tollgate::internal::MAX_QUOTA;

/// Buckets of each power of two, as a power of two itself: a bucket is at most 1/64 of its values wide.
const PRECISION: u32 = 6;

/// Needs below this have a bucket each.
const EXACT_BELOW: u64 = 2 << PRECISION;

/// The number of buckets up to the largest quota.
const BUCKETS: usize = bucket(MAX_QUOTA) as usize + 1;

/// Returns the bucket of a need.
pub(super) const fn bucket(need: u64) -> u16 {
    let need = if need > MAX_QUOTA { MAX_QUOTA } else { need };
    if need < EXACT_BELOW {
        return need as u16;
    }
    let shift = need.ilog2() - PRECISION;
    ((shift as u64) << PRECISION) as u16 + (need >> shift) as u16
}

/// Returns the largest need of a bucket.
pub(super) const fn largest(bucket: u16) -> u64 {
    let bucket = bucket as u64;
    if bucket < EXACT_BELOW {
        return bucket;
    }
    let shift = (bucket >> PRECISION) - 1;
    let top = bucket - (shift << PRECISION);
    let largest = ((top + 1) << shift) - 1;
    if largest > MAX_QUOTA { MAX_QUOTA } else { largest }
}

/// The share of clients that a number leaves untouched: more than 0 and less than 1, in millionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cover(u32);

impl Cover {
    const WHOLE: u32 = 1_000_000;

    /// Creates a cover from a share such as 0.999. Returns `None` unless the share is between 0 and 1, after rounding to
    /// millionths.
    #[must_use]
    pub fn new(share: f64) -> Option<Self> {
        let millionths = (share * f64::from(Self::WHOLE)).round();
        let is_inside = millionths >= 1.0 && millionths < f64::from(Self::WHOLE);
        is_inside.then_some(Self(millionths as u32))
    }

    /// Returns the share in millionths.
    #[must_use]
    pub const fn millionths(self) -> u32 {
        self.0
    }

    /// Returns how many of `clients` may be touched.
    #[must_use]
    pub fn may_touch(self, clients: u64) -> u64 {
        let touched = u128::from(clients) * u128::from(Self::WHOLE - self.0) / u128::from(Self::WHOLE);
        touched as u64
    }
}

/// Prints a percentage such as `99.9 %`.
impl fmt::Display for Cover {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.0 / 10_000, self.0 % 10_000);
        match format!("{rest:04}").trim_end_matches('0') {
            "" => write!(out, "{whole} %"),
            rest => write!(out, "{whole}.{rest} %"),
        }
    }
}

/// A histogram of the needs of clients. Needs below 128 are exact; larger ones are rounded up by less than 1.6 %.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Needs {
    counts: Box<[u32]>,
    clients: u64,
}

impl Default for Needs {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS].into(), clients: 0 }
    }
}

impl Needs {
    /// Adds the need of a client.
    pub fn add(&mut self, need: u64) {
        self.add_bucket(bucket(need));
    }

    pub(super) fn add_bucket(&mut self, bucket: u16) {
        if let Some(count) = self.counts.get_mut(usize::from(bucket)) {
            *count = count.saturating_add(1);
            self.clients += 1;
        }
    }

    /// Adds the needs of other clients.
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count = count.saturating_add(*more);
        }
        self.clients += other.clients;
    }

    /// Returns the number of clients.
    #[must_use]
    pub fn clients(&self) -> u64 {
        self.clients
    }

    /// Returns the smallest limit that leaves the share `cover` of the clients untouched, rounded up to the bounds of the
    /// histogram. Returns `None` without clients.
    #[must_use]
    pub fn quantile(&self, cover: Cover) -> Option<u64> {
        self.limit_touching(cover.may_touch(self.clients))
    }

    /// Returns the largest need, rounded up to the bounds of the histogram. Returns `None` without clients.
    #[must_use]
    pub fn max(&self) -> Option<u64> {
        self.limit_touching(0)
    }

    /// Returns the number of clients whose need exceeds `limit`. Clients whose need is rounded up to more than `limit`
    /// count.
    #[must_use]
    pub fn above(&self, limit: u64) -> u64 {
        self.buckets().filter(|(need, _)| *need > limit).map(|(_, count)| count).sum()
    }

    /// Returns the needs in ascending order, each with the number of clients that have it.
    pub fn buckets(&self) -> impl DoubleEndedIterator<Item = (u64, u64)> {
        let counts = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        counts.map(|(bucket, count)| (largest(bucket as u16), u64::from(*count)))
    }

    /// Returns the smallest limit that touches at most `touched` clients.
    fn limit_touching(&self, touched: u64) -> Option<u64> {
        let mut above = 0;
        for (need, count) in self.buckets().rev() {
            above += count;
            if above > touched {
                return Some(need);
            }
        }
        None
    }
}

impl FromIterator<u64> for Needs {
    fn from_iter<I: IntoIterator<Item = u64>>(needs: I) -> Self {
        let mut histogram = Self::default();
        needs.into_iter().for_each(|need| histogram.add(need));
        histogram
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn buckets_are_narrow_and_in_order(need in 0..=MAX_QUOTA) {
            let upper = largest(bucket(need));
            prop_assert!(need <= upper && (upper - need) * 64 < need.max(1), "{need} is rounded up to {upper}");
            prop_assert!(need == 0 || bucket(need - 1) <= bucket(need));
            prop_assert_eq!(bucket(upper), bucket(need));
        }

        #[test]
        fn quantile_leaves_the_share_untouched(
            needs in prop::collection::vec(0u64..100_000, 1..300),
            millionths in 1u32..1_000_000,
        ) {
            let cover = Cover(millionths);
            let histogram: Needs = needs.iter().copied().collect();
            let limit = histogram.quantile(cover).unwrap();
            let touched = |limit: u64| needs.iter().filter(|need| **need > limit).count() as u64;
            prop_assert!(touched(limit) <= cover.may_touch(needs.len() as u64));
            // A limit that is smaller by more than the width of a bucket touches too many.
            if limit > 0 {
                let lower = limit - limit / 64 - 1;
                prop_assert!(touched(lower) > cover.may_touch(needs.len() as u64));
            }
        }

        #[test]
        fn merging_is_commutative(a in prop::collection::vec(any::<u64>(), 0..50), b in prop::collection::vec(any::<u64>(), 0..50)) {
            let of = |needs: &[u64]| needs.iter().copied().collect::<Needs>();
            let (mut both, mut reverse) = (of(&a), of(&b));
            both.merge(&of(&b));
            reverse.merge(&of(&a));
            prop_assert_eq!(&both, &reverse);
            prop_assert_eq!(both, of(&[a, b].concat()));
        }
    }

    #[test]
    fn cover_is_more_than_nothing_and_less_than_everything() {
        for share in [0.0, 1.0, -0.5, 1.5, f64::NAN, f64::INFINITY, 0.000_000_1, 0.999_999_9] {
            assert_eq!(Cover::new(share), None, "{share}");
        }
        let shown = [0.999, 0.5, 0.99, 0.999_999].map(|share| Cover::new(share).unwrap().to_string());
        assert_eq!(shown, ["99.9 %", "50 %", "99 %", "99.9999 %"]);
        assert_eq!(Cover::new(0.999).unwrap().may_touch(3_210), 3);
    }

    #[test]
    fn no_clients_have_no_quantile() {
        assert_eq!(Needs::default().quantile(Cover(999_000)), None);
        assert_eq!(Needs::default().max(), None);
    }
}
