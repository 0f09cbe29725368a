//! What becomes of the state of keys when the numbers of a limit change while it is in use.
//!
//! The words of a key mean the same to two limits that count by the same windows, or that are both buckets, whatever
//! their quotas are. Where the words also have room for the new numbers, the new limit takes on the layout of the old
//! one and both act on the same words. Elsewhere a new limit starts anew: to convert words that others are changing
//! would lose what they change.

use super::packing::{Pair, bits_for};
use super::{Compiled, Rules, sliding_window_counter::Counter};

impl Compiled {
    /// The same limit in the layout of an older one, if the words that the older one wrote mean the same to it.
    ///
    /// Which of the five algorithms it is does not show here: both buckets are meters.
    pub(crate) fn laid_out_as(&self, old: &Self) -> Option<Self> {
        if let (Some(old), Some(largest)) = (old.meter_packing(), self.largest_part()) {
            return old.holds(largest).then(|| self.with_packing(old));
        }
        match (self, old) {
            (Self::Interval(new), Self::Interval(old)) if new.period == old.period => {
                old.packing.holds(new.capacity).then(|| self.with_packing(old.packing))
            }
            (Self::ClockWindow(new), Self::ClockWindow(old)) if new.window == old.window => {
                old.packing.holds(new.limit).then(|| self.with_packing(old.packing))
            }
            (Self::OpenedWindow(new), Self::OpenedWindow(old)) if new.window == old.window => {
                old.packing.holds(new.limit).then(|| self.with_packing(old.packing))
            }
            (Self::Counter(new), Self::Counter(old)) if (new.window, new.segments) == (old.window, old.segments) => {
                let Counter { index_bits, count_bits, .. } = *old;
                let fits = bits_for(new.limit) <= count_bits;
                fits.then(|| Self::Counter(Counter { index_bits, count_bits, ..new.clone() }))
            }
            (Self::Log(new), Self::Log(old)) => new.laid_out_as(old).map(Self::Log),
            (Self::Strikes(new), Self::Strikes(old)) => {
                old.packing.holds(new.most_marks()).then(|| self.with_packing(old.packing))
            }
            _ => None,
        }
    }

    /// Whether two limits may have one table at the same time: a key that is at rest by one of them may be forgotten,
    /// so it has to be at rest by the other.
    pub(crate) fn rests_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Interval(one), Self::Interval(other)) => one.portion == other.portion,
            (Self::Strikes(one), Self::Strikes(other)) => (one.within, one.lasts) == (other.within, other.lasts),
            _ => true,
        }
    }

    fn meter_packing(&self) -> Option<Pair> {
        match self {
            Self::Meter(meter) => Some(meter.packing),
            Self::WideMeter(meter) => Some(meter.packing),
            _ => None,
        }
    }

    /// Of a meter, the largest part of a microsecond that it tells.
    fn largest_part(&self) -> Option<u64> {
        match self {
            Self::Meter(meter) => Some(meter.units - 1),
            Self::WideMeter(meter) => Some(meter.units - 1),
            _ => None,
        }
    }

    /// Of limits that keep two numbers, the same limit with those kept in that way.
    pub(super) fn with_packing(&self, packing: Pair) -> Self {
        let mut same = self.clone();
        match &mut same {
            Self::Meter(rules) => rules.packing = packing,
            Self::WideMeter(rules) => rules.packing = packing,
            Self::Interval(rules) => rules.packing = packing,
            Self::ClockWindow(rules) => rules.packing = packing,
            Self::OpenedWindow(rules) => rules.packing = packing,
            Self::Strikes(rules) => rules.packing = packing,
            Self::Log(_) | Self::Counter(_) => {}
        }
        same
    }

    pub(crate) fn words(&self) -> usize {
        super::with_rules!(self, rules => rules.words())
    }

    pub(crate) fn free_bits(&self) -> u32 {
        super::with_rules!(self, rules => rules.free_bits())
    }
}
