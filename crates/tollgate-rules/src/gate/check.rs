//! Checks a request: collects the hits of its rules, takes its permits, and has the store decide.
//!
//! The last part is the fast path of the tower layer for a single limit per client address, in memory: `layer1_ns` of
//! the benchmark `tower`.

use std::pin::Pin;

use super::State;
use super::deferred::defer_in_memory;
use tollgate::{Decision, Hit, Key, LimitId, Limiter, Source};

#[cfg(feature = "redis")]
use super::deferred::defer_on_redis;
use super::in_flight::{self, Full, InFlight, InFlightLimits, TakenPermits};
use super::key_bans::BannedHit;
use super::outcome::{Outcome, PendingChecks, SelectedBy};
use super::store::{Hits, Store};
#[cfg(feature = "redis")]
use tollgate::internal::redis::RedisHits;
#[cfg(feature = "redis")]
use tollgate::redis::RedisLimiter;

use crate::{Facts, Mode, NamedKey, OtherKeys, Phase, Request, RuleHit, RuleMatch, with_key};
#[cfg(feature = "redis")]
use futures_util::future::{join, join_all};

impl Outcome {
    /// Checks a request. Returns `Some` if a remote store has to decide; see [`complete`](Self::complete).
    ///
    /// It works in place because an outcome is large, and every request has one.
    #[inline]
    #[doc(hidden)]
    pub fn check(&mut self, facts: &Facts<'_>) -> Option<RemoteCheck> {
        // The response of a request that is served elsewhere is unknown.
        if self.state.rules.have_deferred() && !facts.is_served_elsewhere() {
            self.selected_by = SelectedBy::RulesUntilResponse;
        }
        if self.state.rules.read_tokens() {
            return check_in_phases(self, facts);
        }
        let Self { state, hits, .. } = &mut *self;
        let mut collector = CheckCollector::new(state, hits);
        let found = state.rules.find(&state.rules.request(facts), |hit, key, others| collector.add(hit, key, others));
        let (pending, banned) = collector.finish();
        match found {
            Ok(()) if banned.is_some() => {
                banned.iter().for_each(|banned| self.refuse_banned(banned));
                None
            }
            Ok(()) => match pending {
                Some(pending) if !pending.permits.is_empty() => check_with_permits(self, pending, facts),
                pending => check_store(self, pending),
            },
            Err((rule, refused)) => {
                self.refused_by(rule, refused);
                None
            }
        }
    }

    /// Adds a strike to every ban that applies to a request which was refused before any rule was checked.
    pub(super) fn strike(&mut self, facts: &Facts<'_>) -> Option<RemoteCheck> {
        let Self { state, hits, .. } = &mut *self;
        let State { rules, store, .. } = &**state;
        rules.find_bans(&rules.request(facts), |ban, key| store.add_hit(hits, Hit::new(ban, key).cost(1)));
        match &self.state.store {
            Store::Memory(limiter) => {
                // Each by itself: a strike on a banned key is denied, and must not void the others.
                let decisions = self.hits.hashed().iter().map(|hit| limiter.decide_hashed(std::slice::from_ref(hit)));
                if let Some(decision) = decisions.reduce(Decision::most_restrictive) {
                    self.decided(None, decision);
                }
                None
            }
            #[cfg(feature = "redis")]
            Store::Redis(limiter) => (self.hits.len() > 0).then(|| RemoteCheck::new(limiter, Open::Strikes)),
        }
    }

    /// Checks a key that a caller names.
    pub(super) fn check_named(&mut self, key: &NamedKey<'_>, cost: u64) -> Option<RemoteCheck> {
        let pending = self.collect_named(key, cost);
        if !self.is_allowed() || (pending.is_none() && self.hits.len() == 0) {
            return None;
        }
        check_store(self, pending)
    }

    /// Collects the hits on a key that a caller names.
    pub(super) fn collect_named(&mut self, key: &NamedKey<'_>, cost: u64) -> Option<Box<PendingChecks>> {
        self.selected_by = SelectedBy::Name;
        let Self { state, hits, .. } = &mut *self;
        let mut collector = CheckCollector::new(state, hits);
        match state.rules.check_named(key, cost) {
            RuleMatch::Hit(rule_hit) => {
                with_key(key.readings().counted(), |counted| {
                    collector.add(&rule_hit, counted, key.readings().others())
                });
            }
            RuleMatch::Refused(number, refused) => {
                self.refused_by(Some(number), refused);
                return None;
            }
            RuleMatch::NotMatched(_) | RuleMatch::Disabled | RuleMatch::KeyMissing(_) | RuleMatch::Exempt => {
                return None;
            }
        }
        let (pending, banned) = collector.finish();
        if let Some(banned) = &banned {
            self.refuse_banned(banned);
            return None;
        }
        pending
    }

    /// Completes the check on a remote store.
    #[doc(hidden)]
    pub fn complete(self, remote: RemoteCheck) -> Pin<Box<dyn Future<Output = Self> + Send>> {
        #[cfg(feature = "redis")]
        return Box::pin(check_redis(self, remote));
        #[cfg(not(feature = "redis"))]
        match remote {}
    }
}

/// Collects the checks of a request.
pub(super) struct CheckCollector<'s> {
    store: &'s Store,
    in_flight: &'s InFlight,
    enforced: &'s mut Hits,
    /// Checks of bans come last, so that the limit is reported where both have everything left.
    bans: Option<Hits>,
    pending: Option<Box<PendingChecks>>,
    /// The state, if operators have banned keys.
    with_bans: Option<&'s State>,
    banned: Option<BannedHit>,
}

impl<'s> CheckCollector<'s> {
    /// Creates a collector that adds the hits of enforced rules to `enforced`.
    #[inline]
    pub(super) fn new(state: &'s State, enforced: &'s mut Hits) -> Self {
        let State { store, in_flight, .. } = state;
        let with_bans = state.bans.as_ref().map(|_| state);
        Self { store, in_flight, enforced, bans: None, pending: None, with_bans, banned: None }
    }

    /// Continues with the checks collected before.
    fn resume(state: &'s State, enforced: &'s mut Hits, pending: Option<Box<PendingChecks>>) -> Self {
        Self { pending, ..Self::new(state, enforced) }
    }

    /// Adds the hit of a rule, and the bans of its key and of the keys of other readings. A limit bans the key that it
    /// counts, so other names of the client have no such ban.
    #[inline(always)]
    pub(super) fn add(&mut self, rule_hit: &RuleHit, key: Key<'_>, others: OtherKeys<'_, '_>) {
        if let Some(state) = self.with_bans
            && let Some(banned) = state.find_ban(rule_hit, key, others)
        {
            self.banned = Some(banned.longer(self.banned.take()));
        }
        if rule_hit.is_in_flight || rule_hit.mode == Mode::Shadow {
            return self.add_extra(rule_hit, key);
        }
        self.store.add_hit(self.enforced, Hit::new(rule_hit.limit, key).cost(rule_hit.cost));
        if let Some(ban) = rule_hit.ban {
            self.add_ban(ban, key);
            others.readings().iter().for_each(|other| with_key(other, |key| self.add_ban(ban, key)));
        }
    }

    #[inline(never)]
    fn add_ban(&mut self, ban: LimitId, key: Key<'_>) {
        let bans = self.bans.get_or_insert_with(|| self.store.no_hits());
        self.store.add_hit(bans, Hit::new(ban, key).cost(0));
    }

    #[inline(never)]
    fn add_extra(&mut self, rule_hit: &RuleHit, key: Key<'_>) {
        let pending = self.pending.get_or_insert_default();
        if rule_hit.is_in_flight {
            if rule_hit.mode == Mode::Enforced {
                pending.in_flight.push(rule_hit.limit);
            }
            return pending.permits.push(self.in_flight.request_permit(rule_hit, key));
        }
        let mut shadow_hits = self.store.no_hits();
        self.store.add_hit(&mut shadow_hits, Hit::new(rule_hit.limit, key).cost(rule_hit.cost));
        pending.shadow_hits.push((rule_hit.rule, shadow_hits));
    }

    /// Returns the checks beside those of the enforced rules, and the ban of a key that an operator has set.
    #[inline(always)]
    pub(super) fn finish(self) -> (Option<Box<PendingChecks>>, Option<BannedHit>) {
        if let Some(bans) = self.bans {
            self.enforced.append(bans);
        }
        (self.pending, self.banned)
    }
}

/// Checks a store in memory: the enforced rules unless they are known to deny, the shadow rules, and the strikes for a
/// denial. `each` has the decisions of single hits, where they are known.
#[inline(always)]
fn decide_now(
    outcome: &Outcome,
    limiter: &Limiter,
    pending: Option<&mut PendingChecks>,
    denied: Option<Decision>,
    each: &[Option<Decision>],
) -> Decision {
    let decide = |hits: &Hits| limiter.decide_hashed(hits.hashed());
    let decision = match denied {
        Some(denied) => denied,
        None => decide(&outcome.hits),
    };
    if let Some(pending) = pending {
        pending.shadow_decisions = pending.shadow_hits.iter().map(|(rule, hits)| (*rule, decide(hits))).collect();
    }
    if !decision.is_allowed() && outcome.state.rules.have_bans() {
        return strike_in_memory(outcome, limiter, decision, each);
    }
    decision
}

/// A hit whose limit has a ban: its position, its limit, and the ban.
type HitWithBan = (usize, LimitId, LimitId);

/// Returns the hits of a denied request whose limits have bans. A limit that denies the request by itself gets a
/// strike, whichever denial is reported. If a ban is reported, its key is banned already, and a strike would change
/// nothing.
fn hits_with_bans<'o>(outcome: &'o Outcome, reported: &Decision) -> impl Iterator<Item = HitWithBan> + use<'o> {
    let (rules, reported) = (&outcome.state.rules, *reported);
    let has_bans = rules.have_bans() && reported.source() != Source::Policy;
    outcome.hits.costs().enumerate().filter(move |_| has_bans).filter_map(move |(position, (limit, _))| {
        let ban = rules.ban(rules.owner(limit))?;
        (ban != limit && reported.limit() != Some(ban)).then_some((position, limit, ban))
    })
}

/// Returns whether the decision of a limit is a strike. A store failure is not, and neither is a denial for lack of room:
/// other keys have spent that quota. Pending units may be given back.
fn is_strike(own: &Decision) -> bool {
    !own.is_allowed() && !own.lacks_room() && !own.is_pending() && own.source() != Source::Policy
}

/// Adds a strike to the ban of every limit that denies the request by itself. Returns the decision to report. Each
/// strike is a request of its own: one on a banned key is denied, and must not void the others.
#[inline(never)]
fn strike_in_memory(outcome: &Outcome, limiter: &Limiter, denied: Decision, each: &[Option<Decision>]) -> Decision {
    let mut reported = denied;
    for (position, limit, ban) in hits_with_bans(outcome, &denied) {
        let own = match each.get(position) {
            Some(Some(own)) => *own,
            _ if denied.limit() == Some(limit) => denied,
            _ => limiter.peek_hashed(outcome.hits.hashed().get(position..=position).unwrap_or_default()),
        };
        if is_strike(&own) {
            let strike = limiter.decide_hashed(outcome.hits.only(ban, 1).hashed());
            reported = struck(outcome, reported, &strike);
        }
    }
    reported
}

/// Returns the decision to report to a client that was denied and got a strike for it. If this strike caused a ban, or
/// the key was banned before, the ban is reported in place of a denial by its limit, and in place of a shorter denial by
/// another limit. A denial from the denial cache does not know about bans.
fn struck(outcome: &Outcome, denied: Decision, strike: &Decision) -> Decision {
    let ban = match strike.source() {
        Source::Policy => return denied,
        _ if !strike.is_allowed() => *strike,
        _ if strike.remaining() == 0 => strike.denied_until_reset(),
        _ => return denied,
    };
    let rule = |decision: &Decision| decision.limit().map(|limit| outcome.state.rules.owner(limit));
    if rule(&denied) == rule(&ban) { ban } else { denied.most_restrictive(ban) }
}

/// Checks a request once it has its permits.
fn check_with_permits(
    outcome: &mut Outcome,
    mut pending: Box<PendingChecks>,
    facts: &Facts<'_>,
) -> Option<RemoteCheck> {
    match take_permits(&outcome.state, &mut pending, facts) {
        Ok(()) => check_store(outcome, Some(pending)),
        Err(full) => refuse_full(outcome, &full, std::mem::take(&mut pending.in_flight)),
    }
}

/// Refuses a request because too many are in flight. It takes nothing from other limits, but those that would deny it as
/// well count their strikes.
#[cold]
#[inline(never)]
fn refuse_full(outcome: &mut Outcome, full: &Full, in_flight: InFlightLimits) -> Option<RemoteCheck> {
    outcome.refuse_full(full, in_flight);
    hits_with_bans(outcome, &full.decision).next()?;
    match &outcome.state.store {
        Store::Memory(limiter) => {
            let decision = strike_in_memory(outcome, limiter, full.decision, &[]);
            outcome.report(decision);
            None
        }
        #[cfg(feature = "redis")]
        Store::Redis(limiter) => {
            let has_strikes = bans_to_strike(outcome, limiter, &full.decision).next().is_some();
            has_strikes.then(|| RemoteCheck::new(limiter, Open::Denied(full.decision)))
        }
    }
}

/// Takes all further permits that a request needs, or none.
fn take_permits(state: &State, pending: &mut PendingChecks, facts: &Facts<'_>) -> Result<(), Full> {
    let requests = std::mem::take(&mut pending.permits);
    // The end of such a request is unknown.
    if facts.is_served_elsewhere() {
        pending.in_flight.clear();
        return Ok(());
    }
    if requests.is_empty() {
        return Ok(());
    }
    let TakenPermits { permit, shadow_decisions } = in_flight::take(state, &requests)?;
    match &mut pending.taken {
        Some(before) => {
            before.permit.extend(permit);
            before.shadow_decisions.extend(shadow_decisions);
        }
        none => *none = Some(TakenPermits { permit, shadow_decisions }),
    }
    Ok(())
}

/// The result of one phase.
enum Gathered {
    /// Strikes may be left for a remote store.
    Refused(Option<RemoteCheck>),
    Open(Option<Box<PendingChecks>>),
}

/// Checks a request in two phases if some rules read a token: first the rules that do not, then, unless they refuse,
/// all the others. Returns `Some` if a remote store has to decide.
///
/// A request that is refused in the first phase gets the same response as from all rules, and its token is not
/// verified. Rules that read claims do not count it, not even shadow rules. If one of them would deny it for longer,
/// the client does not learn that.
#[inline(never)]
fn check_in_phases(outcome: &mut Outcome, facts: &Facts<'_>) -> Option<RemoteCheck> {
    let state = &*outcome.state.clone();
    let request = state.rules.request(facts);
    let mut pending = None;
    if state.rules.refuse_early() {
        pending = match gather(outcome, state, &request, Phase::WithoutToken, None) {
            Gathered::Refused(remote) => return remote,
            Gathered::Open(pending) => pending,
        };
        if let Some(denied) = state.store.refuse(&outcome.hits) {
            return check_after_decision(outcome, pending, denied, &[]);
        }
    }
    let gathered = gather(outcome, state, &request, Phase::WithToken, pending);
    outcome.token = request.token_status();
    outcome.signatures_verified = request.signatures_verified();
    match gathered {
        Gathered::Refused(remote) => remote,
        Gathered::Open(pending) => {
            outcome.hits.sort_by_key(|limit| rank(state, limit));
            check_store(outcome, pending)
        }
    }
}

/// Collects the checks of one phase, and takes the request's permits.
fn gather(
    outcome: &mut Outcome,
    state: &State,
    request: &Request<'_>,
    phase: Phase,
    pending: Option<Box<PendingChecks>>,
) -> Gathered {
    let mut collector = CheckCollector::resume(state, &mut outcome.hits, pending);
    let found = state.rules.find_in(phase, request, &mut |rule_hit, key, others| collector.add(rule_hit, key, others));
    let (mut pending, banned) = collector.finish();
    if let Err((rule, refused)) = found {
        outcome.refused_by(rule, refused);
        return Gathered::Refused(None);
    }
    if let Some(banned) = &banned {
        outcome.refuse_banned(banned);
        return Gathered::Refused(None);
    }
    if let Some(pending) = &mut pending
        && let Err(full) = take_permits(state, pending, request.facts())
    {
        return Gathered::Refused(refuse_full(outcome, &full, std::mem::take(&mut pending.in_flight)));
    }
    Gathered::Open(pending)
}

/// Orders limits by rule, with bans last. Of equal decisions, the first is reported.
fn rank(state: &State, limit: LimitId) -> (bool, u32) {
    let rule = state.rules.owner(limit);
    (state.rules.ban(rule) == Some(limit), rule)
}

/// Checks a request, unless a remote store has to decide.
#[inline(always)]
pub(super) fn check_store(outcome: &mut Outcome, pending: Option<Box<PendingChecks>>) -> Option<RemoteCheck> {
    check_unless_known(outcome, pending, None, &[])
}

/// Continues after the decision of the enforced rules, for example by [`Store::refuse`]: checks the shadow rules and
/// adds the strikes for a denial. `each` has the decisions of single hits in memory, where they are known.
pub(super) fn check_after_decision(
    outcome: &mut Outcome,
    pending: Option<Box<PendingChecks>>,
    decision: Decision,
    each: &[Option<Decision>],
) -> Option<RemoteCheck> {
    check_unless_known(outcome, pending, Some(decision), each)
}

/// Checks what is still open. `denied` is the decision of the enforced rules, if it is known.
#[inline(always)]
fn check_unless_known(
    outcome: &mut Outcome,
    mut pending: Option<Box<PendingChecks>>,
    denied: Option<Decision>,
    each: &[Option<Decision>],
) -> Option<RemoteCheck> {
    if outcome.selected_by == SelectedBy::RulesUntilResponse {
        defer_in_memory(outcome, &mut pending, denied.is_some());
    }
    let decision = match &outcome.state.store {
        Store::Memory(limiter) => decide_now(outcome, limiter, pending.as_deref_mut(), denied, each),
        #[cfg(feature = "redis")]
        Store::Redis(limiter) => {
            let has_shadow = pending.as_ref().is_some_and(|pending| !pending.shadow_hits.is_empty());
            let has_hits = match &denied {
                Some(denied) => !denied.is_allowed() && bans_to_strike(outcome, limiter, denied).next().is_some(),
                None => outcome.hits.costs().next().is_some(),
            };
            if has_shadow || has_hits {
                let open = denied.map_or(Open::Enforced, Open::Denied);
                return Some(RemoteCheck { pending, ..RemoteCheck::new(limiter, open) });
            }
            denied.unwrap_or_else(|| Decision::without_limit(limiter.now()))
        }
    };
    outcome.decided(pending, decision);
    None
}

/// A check that Redis has to decide. Without the feature `redis` no check is remote.
#[cfg(feature = "redis")]
pub struct RemoteCheck {
    pub(super) pending: Option<Box<PendingChecks>>,
    pub(super) limiter: RedisLimiter,
    pub(super) open: Open,
    pub(super) charge: ChargeTo,
}

/// The part of a check that Redis has to decide, apart from shadow rules.
#[cfg(feature = "redis")]
#[derive(Clone, Copy)]
pub(super) enum Open {
    /// The enforced rules.
    Enforced,
    /// The strikes for the decision of the enforced rules, if it is a denial.
    Denied(Decision),
    /// Strikes, each by itself.
    Strikes,
}

#[cfg(feature = "redis")]
impl RemoteCheck {
    pub(super) fn new(limiter: &RedisLimiter, open: Open) -> Self {
        Self { pending: None, limiter: limiter.clone(), open, charge: ChargeTo::Any }
    }
}

/// A check that a remote store has to decide, which there is only with the feature `redis`.
#[cfg(not(feature = "redis"))]
pub enum RemoteCheck {}

/// The places that a check may take units from.
#[cfg(feature = "redis")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ChargeTo {
    /// A lease of this process if the limit is leased and its cost cannot change, or else the store.
    Any,
    /// The store only: another process may settle the cost.
    #[cfg(feature = "file")]
    Store,
}

/// Charges a check to the store only, so that any process can settle it.
#[cfg(feature = "file")]
pub(super) fn charged_to_store(remote: RemoteCheck) -> RemoteCheck {
    #[cfg(feature = "redis")]
    let remote = RemoteCheck { charge: ChargeTo::Store, ..remote };
    remote
}

/// Completes a check on Redis.
#[cfg(feature = "redis")]
pub(super) async fn check_redis(mut outcome: Outcome, remote: RemoteCheck) -> Outcome {
    let RemoteCheck { mut pending, limiter, open, charge } = remote;
    let is_denied = !matches!(open, Open::Enforced);
    let may_defer = outcome.selected_by == SelectedBy::RulesUntilResponse;
    let has_failed = may_defer && !defer_on_redis(&mut outcome, &mut pending, is_denied).await;
    let state = outcome.state.clone();
    let decide = |hits: &Hits| {
        let mut hits = match hits {
            Hits::Redis(hits) => (**hits).clone(),
            Hits::Memory(_) => RedisHits::new(),
        };
        // A cost that may change later is charged to the store rather than to a lease: only the store knows what is
        // left.
        let may_change = |limit| charge != ChargeTo::Any || state.rules.may_change(state.rules.owner(limit));
        tollgate::internal::redis::take_from_store(&mut hits, may_change);
        let limiter = limiter.clone();
        async move {
            match has_failed {
                true => limiter.decide_without_store(hits),
                false => limiter.decide_hits(hits).await,
            }
        }
    };
    // Send all checks at once, so that they share a round trip.
    let shadow_hits = pending.iter().flat_map(|pending| &pending.shadow_hits).map(|(rule, hits)| {
        let decided = decide(hits);
        async move { (*rule, decided.await) }
    });
    let enforced = async {
        match open {
            Open::Denied(denied) => (denied, None),
            Open::Enforced => {
                let (decision, charged) = decide(&outcome.hits).await;
                (decision, Some(charged))
            }
            Open::Strikes => {
                let strikes = outcome.hits.on_redis().iter().cloned().map(|hit| RedisHits::from_iter([hit]));
                let decided = join_all(strikes.map(|strike| limiter.clone().decide_hits(strike))).await;
                let decision = decided.into_iter().map(|(decision, _)| decision).reduce(Decision::most_restrictive);
                (decision.unwrap_or_else(|| Decision::without_limit(limiter.now())), None)
            }
        }
    };
    let ((mut decision, charged), shadow_decisions) = join(enforced, join_all(shadow_hits)).await;
    if let Some(charged) = charged {
        outcome.hits.set_charged(charged);
    }
    if !decision.is_allowed() && !matches!(open, Open::Strikes) {
        decision = strike_on_redis(&outcome, &limiter, decision).await;
    }
    if let Some(pending) = &mut pending {
        let shadow_decisions = shadow_decisions.into_iter().zip(&mut pending.shadow_hits).map(
            |((rule, (decision, charged)), shadow_hits)| {
                shadow_hits.1.set_charged(charged);
                (rule, decision)
            },
        );
        pending.shadow_decisions = shadow_decisions.collect();
    }
    if outcome.is_allowed() {
        outcome.decided(pending, decision);
        if matches!(open, Open::Enforced) && !decision.is_allowed() {
            outcome.hits.show_as_not_taken();
        }
    } else {
        // Too many requests are in flight, which strikes do not change.
        outcome.report(decision);
    }
    #[cfg(feature = "file")]
    outcome.count_limited_on_redis();
    outcome
}

/// Returns the bans that get a strike for a denied request: those of the limits that deny it by themselves, as far as
/// this process knows without a call. The store decides every limit of a request that it denies. If this process denied
/// the request, so that a flood or a shed load costs no calls, it knows the denials in its cache.
#[cfg(feature = "redis")]
fn bans_to_strike<'o>(
    outcome: &'o Outcome,
    limiter: &'o RedisLimiter,
    denied: &Decision,
) -> impl Iterator<Item = LimitId> + 'o {
    let denied = *denied;
    hits_with_bans(outcome, &denied).filter_map(move |(position, limit, ban)| {
        let hit = outcome.hits.on_redis().get(position)?;
        if tollgate::internal::redis::may_be_pending(hit) {
            return None;
        }
        let own = match tollgate::internal::redis::decided(hit) {
            _ if denied.limit() == Some(limit) => denied,
            Some(own) => *own,
            None => limiter.known_denial_of(hit)?,
        };
        is_strike(&own).then_some(ban)
    })
}

/// Adds a strike to the ban of every limit that denies the request by itself, as [`strike_in_memory`] does.
#[cfg(feature = "redis")]
async fn strike_on_redis(outcome: &Outcome, limiter: &RedisLimiter, denied: Decision) -> Decision {
    let only = |ban| tollgate::internal::redis::only(outcome.hits.on_redis(), ban, 1);
    let strikes: Vec<RedisHits> = bans_to_strike(outcome, limiter, &denied).map(only).collect();
    if strikes.is_empty() {
        return denied;
    }
    let decided = join_all(strikes.into_iter().map(|strike| limiter.clone().decide_hits(strike)));
    // Spawned, so that a client that disconnects before the response gets its strikes too.
    let struck_bans = tokio::spawn(decided).await.unwrap_or_default();
    struck_bans.iter().fold(denied, |reported, (strike, _)| struck(outcome, reported, strike))
}

/// A single limit per client address, in memory: the fast path of the tower layer.
///
/// An [`Outcome`] supports everything a caller may do with it, so it is large. The tower layer carries the result of
/// each request to the service and back, and moves it more often than it reads it. [`Admitted`] therefore holds only
/// the fields that the response headers need.
pub(crate) mod by_address {
    use std::net::IpAddr;
    use std::sync::Arc;

    use http::HeaderMap;
    use tollgate::internal::{Admission, HashedHit, Verdict};
    use tollgate::{Decision, Hit, Key, Limiter, Source, Timestamp};

    use crate::PerAddress;
    use crate::gate::{Gate, Outcome, State};

    /// A request that one in-memory limit allowed without delay.
    pub struct Admitted {
        state: Arc<State>,
        hit: HashedHit,
        at: Timestamp,
        wall_offset: i64,
        remaining: u64,
        reset_after: u64,
    }

    /// The result of checking a request by its address alone.
    pub enum ByAddress {
        /// The request was allowed at once.
        Admitted(Admitted),
        /// The request was denied, or has to be delayed.
        Decided(Box<Outcome>),
        /// The rules need more than the address.
        Unchecked(Unchecked),
    }

    /// The rules by which a request is still to be checked.
    pub struct Unchecked(Arc<State>);

    impl Gate {
        /// Checks a request by its address, if the rules need nothing else.
        #[doc(hidden)]
        #[inline]
        pub fn check_by_address(&self, peer: impl FnOnce() -> Option<IpAddr>) -> ByAddress {
            let state = self.0.state.load_full();
            let (Some(rule), Some(limiter), None) = (state.rules.per_address(), state.store.in_memory(), &state.bans)
            else {
                return ByAddress::Unchecked(Unchecked(state));
            };
            // The rules decide how to treat a request of unknown address.
            let Some(peer) = peer() else { return ByAddress::Unchecked(Unchecked(state)) };
            let (hit, decision) = decide(limiter, rule, peer);
            let Verdict { admission, remaining, reset_after } = decision.verdict;
            if admission == AT_ONCE {
                let Decision { at, wall_offset, .. } = decision;
                return ByAddress::Admitted(Admitted { state, hit, at, wall_offset, remaining, reset_after });
            }
            ByAddress::Decided(outcome_of(state, hit, decision))
        }
    }

    impl Unchecked {
        /// Returns an outcome that is not checked yet. It is boxed because it is large.
        #[inline]
        pub fn outcome(self) -> Box<Outcome> {
            Box::new(Outcome::unlimited(self.0))
        }
    }

    /// The verdict on most requests.
    const AT_ONCE: Admission = Admission::Allowed { delay: 0 };

    #[inline(never)]
    fn decide(limiter: &Limiter, rule: PerAddress, peer: IpAddr) -> (HashedHit, Decision) {
        let text = rule.group.text(peer);
        let hit = limiter.hash_hit(&Hit::new(rule.limit, Key::from(text.as_bytes())).cost(rule.cost));
        (hit, limiter.decide_one_hashed(hit))
    }

    #[cold]
    #[inline(never)]
    fn outcome_of(state: Arc<State>, hit: HashedHit, decision: Decision) -> Box<Outcome> {
        let mut outcome = Unchecked(state).outcome();
        outcome.hits.push(hit);
        outcome.decided(None, decision);
        outcome
    }

    impl Admitted {
        #[inline(always)]
        fn decision(&self) -> Decision {
            let Self { state, hit, at, wall_offset, remaining, reset_after } = self;
            let verdict = Verdict { admission: AT_ONCE, remaining: *remaining, reset_after: *reset_after };
            Decision {
                limit: Some(hit.limit),
                quota: state.rules.policy(hit.limit).quota(),
                cost: hit.cost,
                at: *at,
                wall_offset: *wall_offset,
                source: Source::Store,
                verdict,
            }
        }

        /// Writes the same headers as [`Outcome::write_headers`].
        #[inline]
        pub fn write_headers(&self, headers: &mut HeaderMap) {
            self.state.rules.policy(self.hit.limit).merge(&self.decision(), headers);
        }

        /// Builds the full outcome, for the rarely used operations.
        #[cold]
        #[inline(never)]
        pub fn into_outcome(self) -> Box<Outcome> {
            let decision = self.decision();
            outcome_of(self.state, self.hit, decision)
        }
    }
}
