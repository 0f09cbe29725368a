//! Division by a constant number, by multiplication.

/// A divisor with its inverse. A 64-bit division takes tens of cycles on many processors, a multiplication three, and
/// every decision divides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Divisor {
    by: u64,
    inverse: u64,
}

impl Divisor {
    pub(super) fn new(by: u64) -> Self {
        Self { by, inverse: u64::MAX / by }
    }

    pub(super) fn get(self) -> u64 {
        self.by
    }

    /// Returns quotient and remainder. The inverse is less than one `by`-th too small, so the first guess of the
    /// quotient is right or one too small.
    #[inline(always)]
    pub(super) fn divide(self, number: u64) -> (u64, u64) {
        let guess = ((u128::from(number) * u128::from(self.inverse)) >> u64::BITS) as u64;
        let rest = number - guess * self.by;
        if rest >= self.by { (guess + 1, rest - self.by) } else { (guess, rest) }
    }

    /// Divides and rounds down, where the quotient is known to fit.
    #[inline(always)]
    pub(super) fn div(self, number: u128) -> u64 {
        u64::try_from(number).map_or_else(|_| super::div_wide(number, self.by), |number| self.divide(number).0)
    }

    /// Divides and rounds up, where the quotient is known to fit.
    #[inline(always)]
    pub(super) fn div_ceil(self, number: u128) -> u64 {
        match u64::try_from(number) {
            Ok(number) => {
                let (quotient, rest) = self.divide(number);
                quotient + u64::from(rest > 0)
            }
            Err(_) => super::div_wide(number + u128::from(self.by - 1), self.by),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Divisor;

    proptest! {
        #[test]
        fn a_divisor_divides_exactly(
            number: u64, by in 1..=u64::MAX, shifts in (0_u32..64, 0_u32..64), near in -1_i64..=1,
        ) {
            let (number, by) = (number >> shifts.0, (by >> shifts.1).max(1));
            // Also next to a multiple, where a guess that is too small shows.
            for number in [number, (number / by * by).wrapping_add_signed(near), u64::MAX, 0] {
                prop_assert_eq!(Divisor::new(by).divide(number), (number / by, number % by));
                prop_assert_eq!(Divisor::new(by).div(number.into()), number / by);
                prop_assert_eq!(Divisor::new(by).div_ceil(number.into()), number.div_ceil(by));
            }
        }
    }
}
