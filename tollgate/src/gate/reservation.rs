//! Reservations that leave the process: units that are taken now and settled later with a token, on any node.
//!
//! The token is self-contained and signed, so no node has to remember a reservation. On Redis, nodes share the signing
//! secret, and a key marks a reservation as settled in the same script call that gives units back. In memory, the
//! secret belongs to the process, which keeps the ids of open reservations (ADR 27).
//!
//! Not here: reservations within a process, which need no token: see [`Outcome::settle`].
//!
//! A store in memory keeps the ids of reservations that are neither settled nor expired. An id that is missing is
//! settled. Nothing is forgotten: when the bound is reached, new reservations are refused.
//!
//! A token is bytes with a signature, in base64url:
//!
//! | bytes | |
//! |---|---|
//! | 1 | version: 1 |
//! | 8 | id of the signing secret |
//! | 16 | random id of the reservation |
//! | 8 | expiry in microseconds, by the clock of the store |
//! | 8 | offset of the wall clock, in memory |
//! | 1 | whether a charge follows |
//! | | charge: name of the limit, name of the variant or nothing, key (each after its length in 2 bytes), units, time |
//! | 32 | HMAC-SHA256 of everything before |
//!
//! Numbers are big-endian. The content is signed, not encrypted: a holder of the token can read it.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

use super::check::charged_to_store;
use super::outcome::Outcome;
use super::report::KeySource;
use super::store::StoreUnavailable;
use super::{Gate, State};
use crate::limiter::Limiter;
use crate::limiter::reservation::{ReservedCharge, Settlement};
use crate::open_charges::Held;
use crate::rules::{KeyError, NamedRule};
use crate::store::memory::HashedHit;
use crate::units::Timestamp;

/// The longest time until a reservation expires: a day. Settled and open reservations are kept until then.
pub const MAX_RESERVATION: Duration = Duration::from_secs(24 * 60 * 60);

/// The result of [`Gate::reserve_by_name`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Reserved {
    /// The outcome of the check that took the units.
    pub outcome: Outcome,
    /// The token to settle the reservation with. `None` if the check was refused.
    pub token: Option<String>,
}

/// The reason that a reservation cannot be made or settled.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReservationError {
    /// The token is malformed, or was changed.
    Invalid,
    /// The token was signed with another secret: by another process in memory, or by nodes on another Redis.
    Foreign,
    /// Too many reservations of this process are open.
    TooMany,
    /// The name of the limit is too long for a token.
    TooLong,
    /// The operating system returned no random numbers.
    NoRandomness,
    /// The store did not reply in time. The reservation may have been settled nevertheless.
    Store(StoreUnavailable),
}

impl fmt::Display for ReservationError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid => out.write_str("the reservation is not valid: send it exactly as it was returned"),
            Self::Foreign => out.write_str(
                "the reservation was made by another process or on another Redis: settle it where it was made",
            ),
            Self::TooMany => {
                out.write_str("too many reservations are open: settle them, or let them expire sooner, and try again")
            }
            Self::TooLong => out.write_str("the name of the limit is too long for a reservation: shorten it"),
            Self::NoRandomness => out.write_str("the operating system has no random numbers: try again later"),
            Self::Store(error) => error.fmt(out),
        }
    }
}

impl std::error::Error for ReservationError {}

impl From<StoreUnavailable> for ReservationError {
    fn from(error: StoreUnavailable) -> Self {
        Self::Store(error)
    }
}

/// The secrets and the open reservations of a store.
#[derive(Default)]
pub(super) struct Reservations {
    in_memory: OnceLock<Arc<Signer>>,
    open: OpenReservations,
    #[cfg(feature = "redis")]
    on_redis: on_redis::SharedSecret,
}

impl Reservations {
    fn signer_in_memory(&self) -> Result<Arc<Signer>, ReservationError> {
        if let Some(signer) = self.in_memory.get() {
            return Ok(signer.clone());
        }
        let signer = Arc::new(Signer::new(&random()?));
        Ok(self.in_memory.get_or_init(|| signer).clone())
    }
}

/// A reservation that is not made until it is awaited: see [`Gate::reserve_by_name`].
type Reserving = Pin<Box<dyn Future<Output = Result<Reserved, ReservationError>> + Send>>;

impl Gate {
    /// Takes `cost` units of a key of the rule named `rule` now, to correct or give back later with a token.
    ///
    /// Any process whose gate is on the same Redis can settle the token, once, until it expires after `expires_after`,
    /// at most [`MAX_RESERVATION`]. In memory, only this process can. A reservation that is not settled keeps its cost.
    /// Units of shadow rules, and units that were counted locally while Redis failed, are not corrected.
    ///
    /// In memory, the future is ready at once.
    ///
    /// ```
    /// use tollgate::rules::{KeyPart, Rule, RuleSet};
    /// use tollgate::{Gate, Limit, MINUTE, SlidingWindowLog};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let tokens = Rule::new(Limit::new("tokens", SlidingWindowLog::new(1000, MINUTE))?).key(KeyPart::header("x-user-id"));
    /// let gate = Gate::in_memory(RuleSet::builder().rule(tokens).build()?)?;
    /// let reserved = gate.reserve_by_name("tokens", &[b"ann"], 800, MINUTE).expect("the rule exists").await?;
    /// // … the work turns out to cost 300 …
    /// gate.settle_token(&reserved.token.expect("800 of 1000 fit"), 300).await?;
    /// let left = gate.check_by_name("tokens", &[b"ann"], 0).expect("the rule exists").outcome().await;
    /// assert_eq!(left.decision().map(|decision| decision.remaining()), Some(700));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If there is no such rule or plan, or no request can have the key.
    pub fn reserve_by_name<'a>(
        &self,
        rule: impl Into<NamedRule<'a>>,
        key: &[&[u8]],
        cost: u64,
        expires_after: Duration,
    ) -> Result<Reserving, KeyError> {
        let state = self.0.state.load_full();
        let key = state.rules.named_key(rule.into(), key)?.into_owned();
        Ok(Box::pin(async move {
            let signer = state.signer().await?;
            let (id, expires_after) = (random()?, expires_after.min(MAX_RESERVATION));
            let limiter = state.store.in_memory();
            if let Some(now) = limiter.map(Limiter::now)
                && !state.reservations.open.add(id, now.saturating_add(expires_after).as_micros(), now.as_micros())
            {
                return Err(ReservationError::TooMany);
            }
            let mut outcome = Outcome::unlimited(state.clone());
            match outcome.check_named(&key, cost) {
                Some(remote) => outcome = outcome.complete(charged_to_store(remote)).await,
                None => outcome.count_limited(|| KeySource::Named(&key)),
            }
            if !outcome.is_allowed() {
                state.reservations.open.remove(id);
                return Ok(Reserved { outcome, token: None });
            }
            let token = outcome.reservation(id, &signer, expires_after);
            match signer.sign(&token) {
                Ok(token) => {
                    if let (Some(limiter), Some(decision)) = (state.store.in_memory(), outcome.decision.as_ref()) {
                        let until = decision.at.saturating_add(expires_after);
                        state.reservations.open.hold(id, limiter.open(outcome.hits.hashed(), decision, until));
                    }
                    Ok(Reserved { outcome, token: Some(token) })
                }
                Err(error) => {
                    outcome.refund().await;
                    state.reservations.open.remove(id);
                    Err(error)
                }
            }
        }))
    }

    /// Settles a reservation at its actual cost: a lower cost gives back the difference, as far as it still counts, and
    /// of a higher cost the difference is counted in full: units beyond the quota are owed. 0 gives back everything.
    ///
    /// Each token is settled once. Later calls, on any node, return [`Settlement::AlreadySettled`].
    ///
    /// # Errors
    ///
    /// If the token is not valid here, or if the store does not reply in time. The reservation then keeps its cost,
    /// unless the store executed the call without confirming it: try again, and [`Settlement::AlreadySettled`] means
    /// success.
    pub async fn settle_token(&self, token: &str, actual: u64) -> Result<Settlement, ReservationError> {
        let state = self.0.state.load_full();
        let signer = state.signer().await?;
        let token = signer.verify(token)?;
        match state.store.in_memory() {
            Some(limiter) => Ok(state.settle_in_memory(limiter, &signer, &token, actual)),
            None => state.settle_on_redis(token, actual).await,
        }
    }
}

impl State {
    async fn signer(&self) -> Result<Arc<Signer>, ReservationError> {
        #[cfg(feature = "redis")]
        if let Some(limiter) = self.store.on_redis() {
            return self.reservations.on_redis.signer(limiter).await;
        }
        self.reservations.signer_in_memory()
    }

    fn settle_in_memory(&self, limiter: &Limiter, signer: &Signer, token: &Token, actual: u64) -> Settlement {
        if limiter.now().as_micros() >= token.expires_at {
            return Settlement::Expired;
        }
        let Some(held) = self.reservations.open.remove(token.id) else { return Settlement::AlreadySettled };
        let Some(charge) = &token.charge else { return Settlement::Settled };
        let variant = charge.variant.as_deref().and_then(|variant| limiter.variant(&charge.limit, variant));
        // A limit that was removed counts nothing any more.
        let Some(limit) = variant.or_else(|| limiter.id(&charge.limit)) else { return Settlement::Settled };
        let Ok(masked) = charge.key.as_slice().try_into().map(u64::from_be_bytes) else { return Settlement::Settled };
        let hit = HashedHit { limit, fingerprint: masked ^ signer.mask(token.id), cost: charge.units };
        // A token is for one limit.
        let still_counts = held.is_none_or(|held| held.close_all());
        let taken = (Timestamp::from_micros(charge.at), token.wall_offset);
        limiter.settle_hashed(&[hit], taken, actual, |_| still_counts)
    }

    #[cfg(feature = "redis")]
    async fn settle_on_redis(&self, token: Token, actual: u64) -> Result<Settlement, ReservationError> {
        let Some(limiter) = self.store.on_redis() else { return Err(ReservationError::Foreign) };
        let expires_at = Timestamp::from_micros(token.expires_at);
        let Some(charge) = &token.charge else {
            let is_expired = self.store.now() >= expires_at;
            return Ok(if is_expired { Settlement::Expired } else { Settlement::Settled });
        };
        let settled = limiter.settle_reserved(charge, &token.id, expires_at, actual).await;
        settled.map_err(|error| StoreUnavailable::new(error).into())
    }

    #[cfg(not(feature = "redis"))]
    async fn settle_on_redis(&self, _: Token, _: u64) -> Result<Settlement, ReservationError> {
        Err(ReservationError::Foreign)
    }
}

impl Outcome {
    /// Returns the content of the token for the units that the outcome has taken.
    fn reservation(&self, id: [u8; 16], signer: &Signer, expires_after: Duration) -> Token {
        let State { store, rules, .. } = &*self.state;
        let is_ban = |limit| rules.ban(rules.owner(limit)) == Some(limit);
        let decision = self.decision.as_ref();
        if let (Some(limiter), Some(decision)) = (store.in_memory(), decision) {
            let hit = self.hits.hashed().iter().find(|hit| !is_ban(hit.limit));
            let charge = hit.and_then(|hit| {
                let limit = limiter.limit(hit.limit)?;
                Some(ReservedCharge {
                    limit: limit.name().to_owned(),
                    variant: limit.variant().map(str::to_owned),
                    key: (hit.fingerprint ^ signer.mask(id)).to_be_bytes().to_vec(),
                    units: hit.cost,
                    at: decision.at.as_micros(),
                })
            });
            let expires_at = decision.at.saturating_add(expires_after).as_micros();
            return Token { id, expires_at, wall_offset: decision.wall_offset, charge };
        }
        #[cfg(feature = "redis")]
        let charge = store.on_redis().and_then(|limiter| limiter.reserved_charge(self.hits.on_redis(), is_ban));
        #[cfg(not(feature = "redis"))]
        let charge = None;
        let begin = match (&charge, store.in_memory()) {
            (Some(ReservedCharge { at, .. }), _) => Timestamp::from_micros(*at),
            (None, Some(limiter)) => limiter.now(),
            (None, None) => store.now(),
        };
        Token { id, expires_at: begin.saturating_add(expires_after).as_micros(), wall_offset: 0, charge }
    }
}

#[cfg(feature = "redis")]
mod on_redis {
    //! The signing secret that nodes on one Redis share.

    use std::sync::{Arc, Mutex, PoisonError};
    use std::time::Duration;

    use tokio::time::Instant;

    use super::{ReservationError, Secret, Signer, StoreUnavailable, random};
    use crate::redis::RedisLimiter;

    /// The secret is read again after this time, in case that Redis lost it and another node replaced it.
    const READ_EVERY: Duration = Duration::from_secs(60);

    #[derive(Default)]
    pub(super) struct SharedSecret(Mutex<Option<Known>>);

    #[derive(Clone)]
    struct Known {
        secret: Secret,
        signer: Arc<Signer>,
        read_at: Instant,
    }

    impl SharedSecret {
        /// Returns the signer. The first node creates the secret, and a node that knows it restores it if it was lost.
        pub(super) async fn signer(&self, limiter: &RedisLimiter) -> Result<Arc<Signer>, ReservationError> {
            let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(known) = &known
                && known.read_at.elapsed() < READ_EVERY
            {
                return Ok(known.signer.clone());
            }
            let proposal = known.as_ref().map_or_else(random, |known| Ok(known.secret))?;
            match limiter.reservation_secret(&proposal).await {
                Ok(secret) => {
                    let signer = Arc::new(Signer::new(&secret));
                    let known = Known { secret, signer: signer.clone(), read_at: Instant::now() };
                    *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(known);
                    Ok(signer)
                }
                Err(error) => match known {
                    Some(known) => Ok(known.signer),
                    None => Err(StoreUnavailable::new(error).into()),
                },
            }
        }
    }
}

/// The most open reservations: about 10 MiB.
const MAX_OPEN: usize = 100_000;

#[derive(Default)]
struct OpenReservations(Mutex<Open>);

#[derive(Default)]
struct Open {
    /// When each expires, and its units, which are pending until then.
    expiries: HashMap<ReservationId, (u64, Option<Held>), ahash::RandomState>,
    by_expiry: BTreeSet<(u64, ReservationId)>,
}

impl OpenReservations {
    /// Adds a reservation. Returns `false` if there are too many.
    pub(super) fn add(&self, id: ReservationId, expires_at: u64, now: u64) -> bool {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((expires_at, expired)) = open.by_expiry.first().copied()
            && expires_at <= now
        {
            open.by_expiry.pop_first();
            open.expiries.remove(&expired);
        }
        if open.expiries.len() >= MAX_OPEN {
            return false;
        }
        open.expiries.insert(id, (expires_at, None));
        open.by_expiry.insert((expires_at, id));
        true
    }

    /// Keeps the units of a reservation pending until it is removed or expires.
    fn hold(&self, id: ReservationId, held: Held) {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, pending)) = open.expiries.get_mut(&id) {
            *pending = Some(held);
        }
    }

    /// Removes a reservation. Returns its units to the first caller only.
    pub(super) fn remove(&self, id: ReservationId) -> Option<Option<Held>> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (expires_at, held) = open.expiries.remove(&id)?;
        open.by_expiry.remove(&(expires_at, id));
        Some(held)
    }
}

/// The longest token that is read. Longer than any token that is issued: names of limits are short, and keys are
/// fingerprints in memory and bounded on Redis.
const MAX_TOKEN_CHARS: usize = 4096;
const VERSION: u8 = 1;
const TAG_BYTES: usize = 32;

type Secret = [u8; 32];
type ReservationId = [u8; 16];

/// The content of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Token {
    pub(super) id: ReservationId,
    expires_at: u64,
    pub(super) wall_offset: i64,
    /// The units that were taken, if any.
    pub(super) charge: Option<ReservedCharge>,
}

/// Signs and verifies tokens.
struct Signer {
    key: hmac::Key,
    id: [u8; 8],
}

impl Signer {
    pub(super) fn new(secret: &Secret) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
        let mut id = [0; 8];
        id.copy_from_slice(&hmac::sign(&key, b"id").as_ref()[..8]);
        Self { key, id }
    }

    /// Returns 8 bytes that hide the fingerprint of a key: a holder of the token must not learn it.
    fn mask(&self, id: ReservationId) -> u64 {
        let tag = hmac::sign(&self.key, &[b"mask", &id[..]].concat());
        let mut mask = [0; 8];
        mask.copy_from_slice(&tag.as_ref()[..8]);
        u64::from_be_bytes(mask)
    }

    /// Returns the token as text, or an error if it would be too long.
    fn sign(&self, token: &Token) -> Result<String, ReservationError> {
        let mut bytes = vec![VERSION];
        bytes.extend(self.id);
        bytes.extend(token.id);
        bytes.extend(token.expires_at.to_be_bytes());
        bytes.extend(token.wall_offset.to_be_bytes());
        bytes.push(u8::from(token.charge.is_some()));
        if let Some(charge) = &token.charge {
            let variant = charge.variant.as_deref().unwrap_or_default();
            for text in [charge.limit.as_bytes(), variant.as_bytes(), &charge.key] {
                let length = u16::try_from(text.len()).map_err(|_| ReservationError::TooLong)?;
                bytes.extend(length.to_be_bytes());
                bytes.extend_from_slice(text);
            }
            bytes.extend(charge.units.to_be_bytes());
            bytes.extend(charge.at.to_be_bytes());
        }
        let tag = hmac::sign(&self.key, &bytes);
        bytes.extend_from_slice(tag.as_ref());
        let text = URL_SAFE_NO_PAD.encode(bytes);
        if text.len() > MAX_TOKEN_CHARS { Err(ReservationError::TooLong) } else { Ok(text) }
    }

    fn verify(&self, text: &str) -> Result<Token, ReservationError> {
        if text.len() > MAX_TOKEN_CHARS {
            return Err(ReservationError::Invalid);
        }
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| ReservationError::Invalid)?;
        let signed = bytes.len().checked_sub(TAG_BYTES).ok_or(ReservationError::Invalid)?;
        let (signed, tag) = bytes.split_at(signed);
        let mut reader = Reader(signed);
        if reader.array::<1>()? != [VERSION] {
            return Err(ReservationError::Invalid);
        }
        if reader.array::<8>()? != self.id {
            return Err(ReservationError::Foreign);
        }
        hmac::verify(&self.key, signed, tag).map_err(|_| ReservationError::Invalid)?;
        let id = reader.array()?;
        let expires_at = u64::from_be_bytes(reader.array()?);
        let wall_offset = i64::from_be_bytes(reader.array()?);
        let charge = match reader.array()? {
            [0] => None,
            _ => Some(reader.charge()?),
        };
        if reader.0.is_empty() {
            Ok(Token { id, expires_at, wall_offset, charge })
        } else {
            Err(ReservationError::Invalid)
        }
    }
}

/// Returns random bytes. Without them, no token is safe.
pub(super) fn random<const N: usize>() -> Result<[u8; N], ReservationError> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| ReservationError::NoRandomness)?;
    Ok(bytes)
}

/// The bytes that are not read yet.
struct Reader<'t>(&'t [u8]);

impl<'t> Reader<'t> {
    fn bytes(&mut self, count: usize) -> Result<&'t [u8], ReservationError> {
        let (read, rest) = self.0.split_at_checked(count).ok_or(ReservationError::Invalid)?;
        self.0 = rest;
        Ok(read)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ReservationError> {
        self.bytes(N)?.try_into().map_err(|_| ReservationError::Invalid)
    }

    fn text(&mut self) -> Result<&'t [u8], ReservationError> {
        let length = u16::from_be_bytes(self.array()?);
        self.bytes(length.into())
    }

    fn name(&mut self) -> Result<String, ReservationError> {
        String::from_utf8(self.text()?.to_vec()).map_err(|_| ReservationError::Invalid)
    }

    fn charge(&mut self) -> Result<ReservedCharge, ReservationError> {
        let (limit, variant, key) = (self.name()?, self.name()?, self.text()?.to_vec());
        let variant = Some(variant).filter(|variant| !variant.is_empty());
        let (units, at) = (u64::from_be_bytes(self.array()?), u64::from_be_bytes(self.array()?));
        Ok(ReservedCharge { limit, variant, key, units, at })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn new_reservations_are_refused_when_too_many_are_open() {
        let open = OpenReservations::default();
        let id = |number: usize| (number as u128).to_be_bytes();
        assert!((0..MAX_OPEN).all(|number| open.add(id(number), 100, 0)));
        assert!(!open.add(id(MAX_OPEN), 100, 99));
        assert!(open.remove(id(5)).is_some() && open.remove(id(5)).is_none());
        assert!(open.add(id(MAX_OPEN), 200, 99));
        assert!(open.add(id(MAX_OPEN + 1), 200, 100), "the others have expired");
        assert!(open.remove(id(6)).is_none() && open.remove(id(MAX_OPEN)).is_some());
    }

    fn token() -> impl Strategy<Value = Token> {
        let charge = (".{0,20}", proptest::option::of(".{1,9}"), proptest::collection::vec(any::<u8>(), 0..200));
        let charge = (charge, any::<u64>(), any::<u64>())
            .prop_map(|((limit, variant, key), units, at)| ReservedCharge { limit, variant, key, units, at });
        (any::<ReservationId>(), any::<u64>(), any::<i64>(), proptest::option::of(charge))
            .prop_map(|(id, expires_at, wall_offset, charge)| Token { id, expires_at, wall_offset, charge })
    }

    proptest! {
        #[test]
        fn a_signed_token_is_read_as_it_was_written(token in token()) {
            let signer = Signer::new(&[7; 32]);
            prop_assert_eq!(signer.verify(&signer.sign(&token).unwrap()).unwrap(), token);
        }

        #[test]
        fn a_changed_or_foreign_token_is_refused(token in token(), position in any::<usize>(), flip in 1_u8..) {
            let signer = Signer::new(&[7; 32]);
            let text = signer.sign(&token).unwrap();
            prop_assert_eq!(Signer::new(&[8; 32]).verify(&text).unwrap_err(), ReservationError::Foreign);
            let mut bytes = URL_SAFE_NO_PAD.decode(&text).unwrap();
            let position = position % bytes.len();
            bytes[position] ^= flip;
            let changed = signer.verify(&URL_SAFE_NO_PAD.encode(&bytes)).unwrap_err();
            let expected =
                if (1..9).contains(&position) { ReservationError::Foreign } else { ReservationError::Invalid };
            prop_assert_eq!(changed, expected);
        }

        #[test]
        fn no_text_panics(text in ".{0,300}") {
            prop_assert!(Signer::new(&[7; 32]).verify(&text).is_err());
        }
    }
}
