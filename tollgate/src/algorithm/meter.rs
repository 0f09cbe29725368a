//! The arithmetic of token buckets and leaky buckets: a debt that is paid off at a steady rate (GCRA).
//!
//! A token bucket with three tokens spent and a leaky bucket that holds three units are the same state. One timestamp
//! describes it: the time at which the debt will be paid off (GCRA's theoretical arrival time). If it has passed, the
//! key is at rest.
//!
//! Exactness: with a rate of `n` units in `d` microseconds, reduced, one unit is worth `d / n` microseconds. So
//! the time is stored in whole microseconds and in `n`-ths of one, debts are counted in `n`-ths, and state is never
//! rounded. Only returned times are, up to the microsecond at which they become true.
//!
//! A debt may exceed the capacity: it was made under a larger one, of a variant of the limit or before a reload, and
//! stays until the rate has paid it off. A clock that steps back makes a debt look larger than the largest capacity
//! that the key's state has seen. Such a debt is cut to that capacity, so no quota is created and no key waits longer
//! than one refill of it.

use std::ops::{Add, Sub};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::arithmetic::{Divisor, Fit, Pair};
use super::{Charge, Compiled, LimitAlgorithm, MAX_COUNTED, Owed, StateWords, Step, div, div_ceil};
use crate::decision::{Admission, Verdict};
use crate::rate::gcd;
use crate::units::{MAX_SPAN, Timestamp};

#[derive(Clone, Debug)]
pub(crate) struct Meter<D> {
    pub(super) capacity: u64,
    /// Units that are paid off in `micros`; the fraction is reduced.
    pub(super) units: u64,
    pub(super) micros: u64,
    /// The debt of a full bucket, in `units`-ths of a microsecond.
    pub(super) full: D,
    /// The largest debt that any configuration of the limit can have caused. A larger one means that the clock stepped
    /// back.
    pub(super) most: D,
    /// The largest quota of the limit as of now: a reload may have raised it since `most` was computed.
    ceiling: Option<Arc<AtomicU64>>,
    /// The time that one unit adds to the time of rest.
    step: Moment,
    by_units: Divisor,
    by_micros: Divisor,
    /// The longest delay in a queue; `None` without a queue.
    pub(super) max_wait: Option<u64>,
    pub(super) packing: Pair,
}

/// The integer type of debts: 64 bits if they suffice for 35 years, as they do unless the reduced rate has more than
/// 8,191 units, or 128.
pub(crate) trait Debt: Copy + Ord + Add<Output = Self> + Sub<Output = Self> {
    const ZERO: Self;

    /// Returns the product, or more than any bucket holds if it does not fit.
    fn product(a: u64, b: u64) -> Self;
    fn plus(self, parts: u64) -> Self;
    fn div(self, by: Divisor) -> u64;
    fn div_ceil(self, by: Divisor) -> u64;
    fn wide(self) -> u128;
}

impl Debt for u64 {
    const ZERO: Self = 0;

    #[inline(always)]
    fn product(a: u64, b: u64) -> Self {
        a.saturating_mul(b)
    }

    #[inline(always)]
    fn plus(self, parts: u64) -> Self {
        self.saturating_add(parts)
    }

    #[inline(always)]
    fn div(self, by: Divisor) -> u64 {
        by.divide(self).0
    }

    #[inline(always)]
    fn div_ceil(self, by: Divisor) -> u64 {
        let (quotient, rest) = by.divide(self);
        quotient + u64::from(rest > 0)
    }

    #[inline(always)]
    fn wide(self) -> u128 {
        self.into()
    }
}

impl Debt for u128 {
    const ZERO: Self = 0;

    fn product(a: u64, b: u64) -> Self {
        Self::from(a) * Self::from(b)
    }

    fn plus(self, parts: u64) -> Self {
        self + Self::from(parts)
    }

    fn div(self, by: Divisor) -> u64 {
        div(self, by.get())
    }

    fn div_ceil(self, by: Divisor) -> u64 {
        div_ceil(self, by.get())
    }

    fn wide(self) -> u128 {
        self
    }
}

/// A time or a span, in microseconds and `units`-ths of a microsecond.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    micros: u64,
    parts: u64,
}

/// Compiles checked numbers: all are positive, and a full bucket is paid off within `MAX_SPAN`.
pub(super) fn compile(capacity: u64, count: u64, period: u64, max_wait: Option<u64>) -> Compiled {
    let common = gcd(count, period);
    compile_reduced(Reduced { capacity, units: count / common, micros: period / common, max_wait }, capacity)
}

/// The numbers of a bucket, its rate reduced.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Reduced {
    pub(super) capacity: u64,
    pub(super) units: u64,
    pub(super) micros: u64,
    pub(super) max_wait: Option<u64>,
}

/// Compiles a bucket whose keys may owe up to `ceiling` units, though never for longer than the longest window.
pub(super) fn compile_reduced(numbers: Reduced, ceiling: u64) -> Compiled {
    let Reduced { capacity, units, micros, .. } = numbers;
    let full = u128::from(capacity) * u128::from(micros);
    let longest = MAX_SPAN.as_micros() * u128::from(units);
    let most = (u128::from(ceiling) * u128::from(micros)).min(longest).max(full);
    // A debt and the cost that is added to it are each paid off within the longest window.
    match (u64::try_from(full), u64::try_from(most)) {
        (Ok(full), Ok(most)) if longest <= u128::from(u64::MAX / 2) => Compiled::Meter(Meter::new(numbers, full, most)),
        _ => Compiled::WideMeter(Meter::new(numbers, full, most)),
    }
}

impl<D: Debt> Meter<D> {
    fn new(numbers: Reduced, full: D, most: D) -> Self {
        let Reduced { capacity, units, micros, max_wait } = numbers;
        let latest = Timestamp::MAX.as_micros() + MAX_SPAN.as_micros() as u64;
        let step = Moment { micros: micros / units, parts: micros % units };
        let (by_units, by_micros) = (Divisor::new(units), Divisor::new(micros));
        let packing = Pair::new(latest, units - 1);
        Self { capacity, units, micros, full, most, ceiling: None, step, by_units, by_micros, max_wait, packing }
    }

    pub(super) fn watch_ceiling(&mut self, ceiling: Arc<AtomicU64>) {
        self.ceiling = Some(ceiling);
    }

    /// Returns the largest debt that any configuration of the limit can have caused so far.
    fn most_now(&self) -> D {
        let ceiling = self.ceiling.as_ref().map_or(0, |ceiling| ceiling.load(Ordering::Acquire));
        let longest = D::product(MAX_SPAN.as_micros() as u64, self.units);
        D::product(ceiling, self.micros).min(longest).max(self.most)
    }

    /// Handles a debt above the known maximum. If it also exceeds the current one, the clock has stepped back.
    #[cold]
    #[inline(never)]
    fn large_debt(&self, debt: D) -> (D, bool) {
        let most = self.most_now();
        if debt > most { (most, true) } else { (debt, false) }
    }

    pub(super) fn numbers(&self) -> Reduced {
        Reduced { capacity: self.capacity, units: self.units, micros: self.micros, max_wait: self.max_wait }
    }

    /// Returns the debt at `now`, in `units`-ths of a microsecond.
    pub(super) fn debt_at(&self, cells: &impl StateWords, now: u64) -> u128 {
        self.debt(self.load(cells), now).0.wide()
    }

    /// Charges a key at rest with a debt at `now`. There is no room for more than the largest debt.
    pub(super) fn set_debt(&self, cells: &impl StateWords, debt: u128, now: u64) -> Fit {
        let most = self.most_now().wide();
        if debt > 0 {
            self.apply(cells, self.moment_of(debt.min(most), now));
        }
        Fit::of(debt <= most)
    }

    #[inline(always)]
    fn load(&self, cells: &impl StateWords) -> Moment {
        let (micros, parts) = self.packing.load(cells);
        Moment { micros, parts }
    }

    /// Returns the debt at `now`, and whether it was cut because the clock has stepped back.
    #[inline(always)]
    fn debt(&self, rest: Moment, now: u64) -> (D, bool) {
        if rest.micros < now {
            return (D::ZERO, false);
        }
        let debt = D::product(rest.micros - now, self.units).plus(rest.parts);
        if debt > self.most { self.large_debt(debt) } else { (debt, false) }
    }

    fn moment_of(&self, debt: u128, now: u64) -> Moment {
        let micros = div(debt, self.units);
        let parts = debt - u128::from(micros) * u128::from(self.units);
        Moment { micros: now + micros, parts: parts as u64 }
    }

    /// Returns the time of rest after `cost` is added to the debt. Adding one unit needs no division.
    #[inline(always)]
    fn add(&self, rest: Moment, cost: u64) -> Moment {
        let step = match cost {
            1 => self.step,
            _ => self.moment_of(u128::from(cost) * u128::from(self.micros), 0),
        };
        let parts = rest.parts + step.parts;
        let carry = u64::from(parts >= self.units);
        Moment { micros: rest.micros + step.micros + carry, parts: parts - carry * self.units }
    }

    #[inline(always)]
    fn remaining(&self, debt: D) -> u64 {
        match self.max_wait {
            Some(max_wait) if debt.div_ceil(self.by_units) > max_wait => 0,
            _ if debt >= self.full => 0,
            _ => (self.full - debt).div(self.by_micros),
        }
    }
}

impl<D: Debt> LimitAlgorithm for Meter<D> {
    type Edit = Moment;

    fn words(&self) -> usize {
        self.packing.words()
    }

    fn free_bits(&self) -> u32 {
        self.packing.free_bits()
    }

    #[inline(always)]
    fn decide(&self, cells: &impl StateWords, now: u64, cost: u64) -> Step<Moment> {
        let rest = self.load(cells);
        let (debt, cut) = self.debt(rest, now);
        let rest = match debt {
            zero if zero == D::ZERO => Moment { micros: now, parts: 0 },
            _ if cut => self.moment_of(debt.wide(), now),
            _ => rest,
        };
        let wait = rest.micros - now + u64::from(rest.parts > 0);
        let edit = cut.then_some(rest);
        if cost == 0 {
            let delay = if self.max_wait.is_some() { wait } else { 0 };
            let verdict =
                Verdict { admission: Admission::Allowed { delay }, remaining: self.remaining(debt), reset_after: wait };
            return Step { verdict, edit };
        }
        if cost > self.capacity {
            return Step { verdict: super::never_fits(self.remaining(debt), wait), edit };
        }
        let after = debt + D::product(cost, self.micros);
        let delay = if self.max_wait.is_some() { wait } else { 0 };
        let late = delay.saturating_sub(self.max_wait.unwrap_or(0));
        if after > self.full || late > 0 {
            let overflow = if after > self.full { (after - self.full).div_ceil(self.by_units) } else { 0 };
            let retry_after = overflow.max(late);
            return Step { verdict: super::denied(retry_after, self.remaining(debt), wait), edit };
        }
        let rest = self.add(rest, cost);
        let reset_after = rest.micros - now + u64::from(rest.parts > 0);
        let verdict =
            Verdict { admission: Admission::Allowed { delay }, remaining: self.remaining(after), reset_after };
        Step { verdict, edit: Some(rest) }
    }

    /// Gives back the part of a charge that has not been paid off since. The rest may have paid off charges of other
    /// requests, so giving it back would create quota.
    fn refund(&self, cells: &impl StateWords, now: u64, charge: Charge) -> Option<Moment> {
        // Later requests in the queue already have their delays, so a position cannot be reused. If the clock has
        // stepped back, the amount paid off since the charge is unknown.
        if self.max_wait.is_some() || now < charge.at {
            return None;
        }
        let debt = self.debt(self.load(cells), now).0.wide();
        let charged = u128::from(charge.cost) * u128::from(self.micros);
        let paid = u128::from(now - charge.at) * u128::from(self.units);
        let owed = charged.saturating_sub(paid).min(debt);
        (owed > 0).then(|| self.moment_of(debt - owed, now))
    }

    /// Adds to the debt, up to the largest that the rate pays off in the longest window.
    fn owe(&self, cells: &impl StateWords, now: u64, units: u64) -> Option<Owed<Moment>> {
        let debt = self.debt(self.load(cells), now).0.wide();
        let micros = u128::from(self.micros);
        let longest = MAX_SPAN.as_micros() * u128::from(self.units);
        let most = longest.min(u128::from(MAX_COUNTED) * micros).saturating_sub(debt) / micros;
        let counted = units.min(u64::try_from(most).unwrap_or(u64::MAX));
        let after = debt + u128::from(counted) * micros;
        let ceiling = u64::try_from(after.div_ceil(micros)).unwrap_or(u64::MAX);
        Some(Owed { edit: self.moment_of(after, now), counted, ceiling })
    }

    #[inline(always)]
    fn apply(&self, cells: &impl StateWords, edit: Moment) {
        self.packing.store(cells, edit.micros, edit.parts);
    }

    fn is_idle(&self, cells: &impl StateWords, now: u64) -> bool {
        let rest = self.load(cells);
        rest.micros < now || (rest.micros == now && rest.parts == 0)
    }

    /// Takes the later time of rest.
    fn cover(&self, floor: &impl StateWords, state: &impl StateWords, now: u64) -> bool {
        let [one, other] = [self.load(floor), self.load(state)];
        let later = if (one.micros, one.parts) > (other.micros, other.parts) { one } else { other };
        let (debt, stepped_back) = self.debt(later, now);
        let is_covered = !stepped_back && debt.wide() * 2 < self.full.wide();
        if is_covered {
            self.apply(floor, later);
        }
        is_covered
    }
}
