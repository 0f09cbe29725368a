//! Open reservations in a snapshot, for the process that continues after this one.
//!
//! The tokens stay the same. So a snapshot has the secrets that signed them, and how the clock of the process that signed
//! relates to the wall clock. The secrets are those of former processes too, as long as reservations of theirs are open.
//! Each process signs new tokens with its own secret, so it knows which tokens it has made.
//!
//! | bytes | |
//! |---|---|
//! | 1 | 0: the reservations are released · 1: they are offered |
//! | 4 | number of secrets |
//! | 32 | for each: the secret |
//! | 8 | added to the time of a token for that of the wall clock |
//! | 8 | added to the offset of the wall clock in a token for 0, unless the wall clock was stepped since |
//! | 4 | number of reservations |
//! | 16, 8 | for each: the id, and the expiry by the wall clock |
//! | 1 | 0: no limit counts it · 1: a limit does · 2: nothing of it can be given back |
//! | | for 1: name of the limit (after its length in 2 bytes), fingerprint of the key, units, time by the wall clock |
//!
//! Numbers are big-endian, as in tokens.

use std::sync::Arc;

use tollgate::internal::{Charge, HashedHit};
use tollgate::{Limiter, Timestamp};

use super::open::{Carried, Carrying, MAX_OPEN, OpenReservations, ReservedUnits, TakenUnits};
use super::{Reader, ReservationError, Reservations, Signer};

/// A process before this one, whose reservations were taken over.
pub(super) struct Former {
    pub(super) signer: Arc<Signer>,
    pub(super) shift: Shift,
}

/// The differences between the times in a token and those of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shift {
    time: i64,
    wall_offset: i64,
}

impl Shift {
    pub(super) fn time(self, micros: u64) -> Timestamp {
        Timestamp::from_micros(micros).offset_by(self.time)
    }

    pub(super) fn wall_offset(self, micros: i64) -> i64 {
        micros.saturating_add(self.wall_offset)
    }
}

/// The longest step back of the wall clock, in microseconds, after which reservations give units back: clocks of machines are
/// corrected by less.
const MAX_SET_BACK: i64 = 1_000_000;

const NOT_COUNTED: u8 = 0;
const COUNTED: u8 = 1;
const COUNTS_NO_MORE: u8 = 2;

impl Reservations {
    /// Writes the open reservations. Returns nothing if there are none. `wall_offset` is that of now.
    pub(in crate::gate) fn carried(&self, carrying: Carrying, wall_offset: i64) -> Vec<u8> {
        let former = self.former.iter().map(|former| (former.signer.clone(), former.shift));
        let own = self.in_memory.get().map(|signer| (signer.clone(), Shift::default()));
        let mut groups: Vec<_> = former.chain(own).map(|(signer, shift)| (signer, shift, 0_u32, Vec::new())).collect();
        let by_wall = |micros| Timestamp::from_micros(micros).offset_by(wall_offset).as_micros().to_be_bytes();
        self.open.carry(carrying, |from, id, expires_at, units| {
            let Some((_, _, count, bytes)) = groups.get_mut(from.unwrap_or(self.former.len())) else { return };
            *count += 1;
            bytes.extend(id);
            bytes.extend(by_wall(expires_at));
            let named = units.taken.as_ref().and_then(|taken| {
                let length = u16::try_from(taken.limit.name().len()).ok()?;
                Some((taken, length))
            });
            match named {
                _ if units.count_no_more() => bytes.push(COUNTS_NO_MORE),
                None => bytes.push(NOT_COUNTED),
                Some((TakenUnits { limit, fingerprint, charge }, length)) => {
                    bytes.push(COUNTED);
                    bytes.extend(length.to_be_bytes());
                    bytes.extend(limit.name().as_bytes());
                    bytes.extend(fingerprint.to_be_bytes());
                    bytes.extend(charge.cost.to_be_bytes());
                    bytes.extend(by_wall(charge.at));
                }
            }
        });
        groups.retain(|(_, _, count, _)| *count > 0);
        if groups.is_empty() {
            return Vec::new();
        }
        let mut bytes = vec![u8::from(carrying == Carrying::Offered)];
        bytes.extend((groups.len() as u32).to_be_bytes());
        for (signer, shift, count, group) in groups {
            bytes.extend(signer.secret);
            bytes.extend(shift.time.saturating_add(wall_offset).to_be_bytes());
            bytes.extend(shift.wall_offset.saturating_sub(wall_offset).to_be_bytes());
            bytes.extend(count.to_be_bytes());
            bytes.extend(group);
        }
        bytes
    }

    /// Reads the reservations of a snapshot that `limiter` was restored from. `from_wall` is added to the time of the wall
    /// clock for that of the limiter.
    pub(in crate::gate) fn taken_over(
        carried: &[u8],
        from_wall: i64,
        limiter: &Limiter,
    ) -> Result<Self, ReservationError> {
        if carried.is_empty() {
            return Ok(Self::default());
        }
        let mut reader = Reader(carried);
        let carrying = match reader.array()? {
            [0] => Carrying::Released,
            [1] => Carrying::Offered,
            _ => return Err(ReservationError::Invalid),
        };
        let wall_offset = limiter.wall_offset();
        // If the wall clock was set back since, the time of a charge among those of the counts is unknown.
        let set_back = from_wall.saturating_add(wall_offset).saturating_neg();
        let is_time_known = set_back <= MAX_SET_BACK;
        let (mut former, mut open) = (Vec::new(), Vec::new());
        for from in 0..u32::from_be_bytes(reader.array()?) as usize {
            let signer = Arc::new(Signer::new(&reader.array()?));
            let time = i64::from_be_bytes(reader.array()?).saturating_add(from_wall);
            let shift = Shift { time, wall_offset: i64::from_be_bytes(reader.array()?).saturating_add(wall_offset) };
            former.push(Former { signer, shift });
            for _ in 0..u32::from_be_bytes(reader.array()?) {
                if open.len() >= MAX_OPEN {
                    return Err(ReservationError::Invalid);
                }
                let mut carried = reader.carried(from_wall, limiter)?;
                if !is_time_known {
                    carried.units = ReservedUnits::that_count_no_more();
                }
                open.push((from, carried));
            }
        }
        if !reader.0.is_empty() {
            return Err(ReservationError::Invalid);
        }
        let open = OpenReservations::taken_over(carrying, open.into_iter());
        Ok(Self { former, open, ..Self::default() })
    }
}

impl Reader<'_> {
    fn carried(&mut self, from_wall: i64, limiter: &Limiter) -> Result<Carried, ReservationError> {
        let id = self.array()?;
        let expires_at = self.wall_time(from_wall)?;
        let units = match self.array()? {
            [NOT_COUNTED] => ReservedUnits::default(),
            [COUNTS_NO_MORE] => ReservedUnits::that_count_no_more(),
            [COUNTED] => {
                let (limit, fingerprint) = (self.name()?, u64::from_be_bytes(self.array()?));
                let (cost, at) = (u64::from_be_bytes(self.array()?), self.wall_time(from_wall)?);
                let hit = limiter.id(&limit).map(|limit| HashedHit { limit, fingerprint, cost });
                // The limit may have been removed, and the key may have found no memory here or before. To give units back
                // that it does not count would create quota.
                match hit.filter(|hit| limiter.has_spent(*hit)) {
                    Some(hit) => ReservedUnits::taken(limiter, hit, at, expires_at),
                    None => ReservedUnits::that_count_no_more(),
                }
            }
            _ => return Err(ReservationError::Invalid),
        };
        Ok(Carried { id, expires_at: expires_at.as_micros(), units })
    }

    /// Reads a time of the wall clock. Returns the time of this process.
    fn wall_time(&mut self, from_wall: i64) -> Result<Timestamp, ReservationError> {
        Ok(Timestamp::from_micros(u64::from_be_bytes(self.array()?)).offset_by(from_wall))
    }
}

impl ReservedUnits {
    fn that_count_no_more() -> Self {
        Self { count_no_more: true, ..Self::default() }
    }

    /// Returns units that `hit` has taken at `at`. They are pending until then.
    pub(super) fn taken(limiter: &Limiter, hit: HashedHit, at: Timestamp, until: Timestamp) -> Self {
        let charge = Charge { at: at.as_micros(), cost: hit.cost };
        let taken = limiter.limit(hit.limit).cloned();
        let taken = taken.map(|limit| TakenUnits { limit, fingerprint: hit.fingerprint, charge });
        Self { taken, held: Some(limiter.open_at(&[hit], at, until)), count_no_more: false }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tollgate::{FixedWindow, Limit, MINUTE, ManualClock, Settlement};

    use super::*;
    use crate::gate::{Gate, State};
    use crate::{Rule, RuleSet};

    #[tokio::test]
    async fn units_of_a_key_that_found_no_memory_are_not_given_back() {
        let clock = ManualClock::at(Timestamp::from_secs(1_700_000_000));
        let gate = || {
            let limit = Limit::new("tokens", FixedWindow::new(100, MINUTE)).unwrap();
            let rules = RuleSet::builder().rule(Rule::new(limit)).build().unwrap();
            Gate::with_limiter(rules, Limiter::builder().clock(clock.clone()).hash_seed([7; 4])).unwrap()
        };
        let before = gate();
        let reserved = before.reserve_by_name("tokens", &[], 80, MINUTE).expect("the rule exists").await.unwrap();
        let carried = before.0.state.load().reservations.carried(Carrying::Released, 0);
        let after = gate();
        after.change(|state| {
            let limiter = state.store.in_memory().expect("it is in memory");
            let reservations = Reservations::taken_over(&carried, 0, limiter).unwrap();
            State {
                reservations: Arc::new(reservations),
                ..State::after(state, state.rules.clone(), state.store.clone())
            }
        });
        let check = async |cost| after.check_by_name("tokens", &[], cost).expect("the rule exists").outcome().await;
        assert!(check(90).await.is_allowed());
        let settled = after.settle_token(&reserved.token.expect("80 of 100 fit"), 0).await;
        assert_eq!(settled, Ok(Settlement::Settled));
        assert_eq!(check(0).await.decision().unwrap().remaining(), 10);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(version in 0_u8..2, secrets in 0_u32..3, bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let limiter = Limiter::new(Limit::new("limit", FixedWindow::new(10, MINUTE)).unwrap());
            let bytes = [&[version][..], &secrets.to_be_bytes(), &bytes].concat();
            prop_assert_eq!(Reservations::taken_over(&bytes, i64::MIN, &limiter).is_ok(), secrets == 0 && bytes.len() == 5);
        }
    }
}
