//! Reservations that leave the process: units that are taken now and settled later with a token, on any node.
//!
//! The token is self-contained and signed, so no node has to remember a reservation. On Redis, nodes share the signing
//! secret, and a key marks a reservation as settled in the same script call that gives units back. In memory, the
//! secret belongs to the process, which keeps the ids of open reservations (ADR 27).
//!
//! Open reservations in memory move to the process that continues after this one (ADR 43): see `open` and `carried`.
//!
//! Not here: reservations within a process, which need no token: see [`Outcome::settle`].
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

mod carried;
mod open;

use std::collections::HashSet;
use std::fmt;
use std::io::{self, Write};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use tollgate::internal::{HashedHit, ReservedCharge};
use tollgate::{Limiter, Settlement, Timestamp};

use self::carried::{Former, Shift};
pub(super) use self::open::Carrying;
use self::open::{Claim, OpenReservations, ReservedUnits};
use super::check::charged_to_store;
use super::outcome::Outcome;
use super::report::KeySource;
use super::store::StoreUnavailable;
use super::{Gate, State};
use crate::{KeyError, NamedRule};

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
    /// The token was signed with another secret, by another process in memory or by nodes on another Redis, or the process
    /// that signed it has not handed the reservation over to this one.
    Foreign,
    /// This process has handed the reservation over to another one, which settles it.
    HandedOver,
    /// The limit of the reservation is not among the rules. The reservation stays open, in case that it comes back.
    LimitRemoved {
        /// The name of the limit.
        limit: String,
    },
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
            Self::HandedOver => {
                out.write_str("the reservation was handed over to a new process: settle it on a new connection")
            }
            Self::LimitRemoved { limit } => {
                write!(out, "the limit `{limit}` of the reservation no longer exists: its cost stays taken")
            }
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
    /// The processes before this one whose reservations were open.
    former: Vec<Former>,
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

    /// Returns the token that this process or one before it has signed.
    fn verify_in_memory(&self, text: &str) -> Result<Verified, ReservationError> {
        let own = self.signer_in_memory()?;
        let own = (own, Shift::default(), true);
        let former = self.former.iter().map(|former| (former.signer.clone(), former.shift, false));
        for (signer, shift, is_own) in std::iter::once(own).chain(former) {
            match signer.verify(text) {
                Err(ReservationError::Foreign) => {}
                verified => return verified.map(|token| Verified { token, signer, shift, is_own }),
            }
        }
        Err(ReservationError::Foreign)
    }
}

/// A token with a valid signature.
struct Verified {
    token: Token,
    signer: Arc<Signer>,
    shift: Shift,
    /// Whether this process has signed it.
    is_own: bool,
}

/// A reservation that is not made until it is awaited: see [`Gate::reserve_by_name`].
type Reserving = Pin<Box<dyn Future<Output = Result<Reserved, ReservationError>> + Send>>;

impl Gate {
    /// Takes `cost` units of a key of the rule named `rule` now, to correct or give back later with a token.
    ///
    /// Any process whose gate is on the same Redis can settle the token, once, until it expires after `expires_after`,
    /// at most [`MAX_RESERVATION`]. In memory, only this process can, or one that [takes over](Self::offer_snapshot) from it.
    /// A reservation that is not settled keeps its cost.
    /// Units of shadow rules, and units that were counted locally while Redis failed, are not corrected.
    ///
    /// In memory, the future is ready at once.
    ///
    /// ```
    /// use tollgate_rules::{KeyPart, Rule, RuleSet};
    /// use tollgate::{Limit, SlidingWindowLog, MINUTE};
    /// use tollgate_rules::Gate;
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
            if let Some(now) = limiter.map(Limiter::now) {
                let expires_at = now.saturating_add(expires_after);
                state.reservations.open.add(id, expires_at.as_micros(), now.as_micros())?;
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
                    if state.store.in_memory().is_some() {
                        state.reservations.open.made(id, outcome.reserved_units(expires_after));
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
        let Some(limiter) = state.store.in_memory() else {
            let token = state.signer().await?.verify(token)?;
            return state.settle_on_redis(token, actual).await;
        };
        let verified = state.reservations.verify_in_memory(token)?;
        if !verified.is_own {
            state.reservations.open.accepted().await;
        }
        state.settle_in_memory(limiter, &verified, actual)
    }

    /// Writes a snapshot with the open reservations for a process that takes over from this one, which continues until then.
    /// Returns the number of keys, or `None` if they are on Redis.
    ///
    /// A gate that is [restored](Self::restore) from this snapshot settles no reservation of this one, and lets settlements
    /// wait, until it [accepts](Self::accept_reservations) those that this one has [released](Self::release_reservations).
    /// Every token is settled in one of the two. Reservations that are made after this call, and those that are settled
    /// between the two, are settled here only.
    ///
    /// The snapshot contains the secret that signs tokens: protect it like a password.
    ///
    /// # Errors
    ///
    /// If writing to `out` fails. Nothing changes then.
    pub fn offer_snapshot(&self, out: impl Write) -> io::Result<Option<u64>> {
        self.snapshot_carrying(Carrying::Offered, out)
    }

    /// Writes a snapshot with the open reservations, which end here. A gate that is [restored](Self::restore) from it settles
    /// them instead. For a process that ends. Returns the number of keys, or `None` if they are on Redis.
    ///
    /// The snapshot contains the secret that signs tokens: protect it like a password. Restore it once: of two gates, each
    /// would settle the reservations once.
    ///
    /// # Errors
    ///
    /// If writing to `out` fails. The open reservations then keep their cost.
    ///
    /// ```
    /// use tollgate_rules::{KeyPart, Rule, RuleSet};
    /// use tollgate::{FixedWindow, Limit, Limiter, Settlement, MINUTE};
    /// use tollgate_rules::Gate;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limit = Limit::new("tokens", FixedWindow::new(1000, MINUTE).from_first_request())?;
    /// let rules = RuleSet::builder().rule(Rule::new(limit).key(KeyPart::header("x-user-id"))).build()?;
    /// let gate = Gate::in_memory(rules.clone())?;
    /// let reserved = gate.reserve_by_name("tokens", &[b"ann"], 800, MINUTE).expect("the rule exists").await?;
    /// let mut snapshot = Vec::new();
    /// gate.last_snapshot(&mut snapshot)?;
    /// // … in another process …
    /// let (gate, _) = Gate::restore(rules, Limiter::builder(), &*snapshot)?;
    /// let settled = gate.settle_token(&reserved.token.expect("800 of 1000 fit"), 300).await?;
    /// assert_eq!(settled, Settlement::Settled);
    /// # Ok(())
    /// # }
    /// ```
    pub fn last_snapshot(&self, out: impl Write) -> io::Result<Option<u64>> {
        self.snapshot_carrying(Carrying::Released, out)
    }

    fn snapshot_carrying(&self, carrying: Carrying, out: impl Write) -> io::Result<Option<u64>> {
        let state = self.0.state.load_full();
        let Some(limiter) = state.store.in_memory() else { return Ok(None) };
        // The counts are written afterwards, so that they contain the units of each reservation.
        let carried = |wall_offset| state.reservations.carried(carrying, wall_offset);
        limiter.snapshot_with(out, carried).map(Some)
    }

    /// Ends the open reservations of the last [`offer_snapshot`](Self::offer_snapshot), except those that were settled since.
    /// Returns a text for [`accept_reservations`](Self::accept_reservations) of the gate that takes over.
    #[must_use = "the reservations end here, and another gate can settle them only with this"]
    pub fn release_reservations(&self) -> Vec<u8> {
        self.0.state.load().reservations.open.release().into_iter().flatten().collect()
    }

    /// Allows to settle the reservations that another gate has [released](Self::release_reservations), of those in the snapshot
    /// that this one was restored from. The others keep their cost; without any text, all do.
    pub fn accept_reservations(&self, released: &[u8]) {
        let released: HashSet<ReservationId> = released.as_chunks().0.iter().copied().collect();
        self.0.state.load().reservations.open.accept(&released);
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

    fn settle_in_memory(
        &self,
        limiter: &Limiter,
        Verified { token, signer, shift, is_own }: &Verified,
        actual: u64,
    ) -> Result<Settlement, ReservationError> {
        if limiter.now() >= shift.time(token.expires_at) {
            return Ok(Settlement::Expired);
        }
        let limit = match &token.charge {
            None => None,
            Some(charge) => {
                let variant = charge.variant.as_deref().and_then(|variant| limiter.variant(&charge.limit, variant));
                let limit = variant.or_else(|| limiter.id(&charge.limit));
                Some((charge, limit.ok_or_else(|| ReservationError::removed(charge))?))
            }
        };
        let units = match self.reservations.open.claim(token.id, *is_own) {
            Claim::Claimed(units) => units,
            Claim::Settled => return Ok(Settlement::AlreadySettled),
            Claim::Unknown => return Err(ReservationError::Foreign),
            Claim::Released => return Err(ReservationError::HandedOver),
        };
        let Some((charge, limit)) = limit else { return Ok(Settlement::Settled) };
        let masked = charge.key.as_slice().try_into().map_err(|_| ReservationError::Invalid)?;
        let hit =
            HashedHit { limit, fingerprint: u64::from_be_bytes(masked) ^ signer.mask(token.id), cost: charge.units };
        let taken = (shift.time(charge.at), shift.wall_offset(token.wall_offset));
        let still_counts = units.close(limiter.open_key(hit));
        // A token is for one limit.
        Ok(limiter.settle_hashed(&[hit], taken, actual, |_| still_counts))
    }

    #[cfg(feature = "redis")]
    async fn settle_on_redis(&self, token: Token, actual: u64) -> Result<Settlement, ReservationError> {
        let Some(limiter) = self.store.on_redis() else { return Err(ReservationError::Foreign) };
        let expires_at = Timestamp::from_micros(token.expires_at);
        let Some(charge) = &token.charge else {
            let is_expired = self.store.now() >= expires_at;
            return Ok(if is_expired { Settlement::Expired } else { Settlement::Settled });
        };
        // Nodes that have other rules meanwhile may have the limit, so the reservation stays open.
        if limiter.id(&charge.limit).is_none() {
            return Err(ReservationError::removed(charge));
        }
        let settled = limiter.settle_reserved(charge, &token.id, expires_at, actual).await;
        settled.map_err(|error| StoreUnavailable::new(error).into())
    }

    #[cfg(not(feature = "redis"))]
    async fn settle_on_redis(&self, _: Token, _: u64) -> Result<Settlement, ReservationError> {
        Err(ReservationError::Foreign)
    }
}

impl ReservationError {
    fn removed(charge: &ReservedCharge) -> Self {
        Self::LimitRemoved { limit: charge.limit.clone() }
    }
}

impl Outcome {
    /// Returns the units that the outcome has taken in memory, which are pending from now on.
    fn reserved_units(&self, expires_after: Duration) -> ReservedUnits {
        let (Some(limiter), Some(decision)) = (self.state.store.in_memory(), &self.decision) else {
            return ReservedUnits::default();
        };
        let until = decision.at.saturating_add(expires_after);
        self.reserved_hit()
            .map_or_else(ReservedUnits::default, |hit| ReservedUnits::taken(limiter, hit, decision.at, until))
    }

    /// Returns the hit in memory whose units a token is for.
    fn reserved_hit(&self) -> Option<HashedHit> {
        let rules = &self.state.rules;
        let is_ban = |limit| rules.ban(rules.owner(limit)) == Some(limit);
        self.hits.hashed().iter().find(|hit| !is_ban(hit.limit)).copied()
    }

    /// Returns the content of the token for the units that the outcome has taken.
    fn reservation(&self, id: [u8; 16], signer: &Signer, expires_after: Duration) -> Token {
        let store = &self.state.store;
        let decision = self.decision.as_ref();
        if let (Some(limiter), Some(decision)) = (store.in_memory(), decision) {
            let charge = self.reserved_hit().and_then(|hit| {
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
        let charge = store.on_redis().and_then(|limiter| {
            let rules = &self.state.rules;
            limiter.reserved_charge(self.hits.on_redis(), |limit| rules.ban(rules.owner(limit)) == Some(limit))
        });
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
    use tollgate::redis::RedisLimiter;

    use super::{ReservationError, Secret, Signer, StoreUnavailable, random};

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
    secret: Secret,
    key: hmac::Key,
    id: [u8; 8],
}

impl Signer {
    pub(super) fn new(secret: &Secret) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
        let mut id = [0; 8];
        id.copy_from_slice(&hmac::sign(&key, b"id").as_ref()[..8]);
        Self { secret: *secret, key, id }
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
