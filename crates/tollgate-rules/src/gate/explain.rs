//! Explains how each rule would decide a request, without counting it.

use std::pin::Pin;
use std::time::Duration;

use tollgate::{Decision, Hit};
use tollgate_http::Refusal;

use super::store::Hits;
use super::{Gate, State, in_flight};
use crate::{
    Facts, FailedExpression, FailedExpressions, KeyError, KeyReadings, Mode, NamedKey, NamedRule, Request, RuleHit,
    RuleMatch, RuleSet, TokenStatus, with_key,
};

/// How the rules would decide a request. Nothing is counted.
///
/// ```
/// use tollgate_rules::{Facts, Match, Rule, RuleSet};
/// use tollgate::{FixedWindow, Limit, MINUTE};
/// use tollgate_rules::{Gate, RuleState};
///
/// # async fn example() -> Result<(), tollgate::InvalidLimit> {
/// let search = Rule::new(Limit::new("search", FixedWindow::new(10, MINUTE))?)
///     .matching(Match::everything().path("/search/**"));
/// let gate = Gate::in_memory(RuleSet::builder().rule(search).build()?)?;
/// let explanation = gate.explain(&Facts::new("GET", "/login")).await;
/// assert!(explanation.allowed);
/// assert!(matches!(explanation.rules[0].state, RuleState::NotMatched(_)));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct Explanation {
    /// One entry per rule, in the order of the rules.
    pub rules: Vec<RuleExplained>,
    /// `true` if the request would be allowed.
    pub allowed: bool,
    /// The limit that the response would name.
    pub limit: Option<String>,
    /// The reason for which the request would be refused.
    pub refusal: Option<Refusal>,
    /// The result of verifying the request's token, if a rule needs it.
    pub token: TokenStatus,
}

/// How one rule would decide a request.
#[derive(Debug)]
#[non_exhaustive]
pub struct RuleExplained {
    /// The name of its limit.
    pub name: String,
    /// `true` if the rule is in shadow mode: it counts, but never refuses.
    pub shadow: bool,
    /// How the rule applies to the request.
    pub state: RuleState,
    /// The rule's expressions that failed for this request.
    pub failed_expressions: Vec<FailedExpression>,
}

/// How a rule applies to a request.
#[derive(Debug)]
#[non_exhaustive]
pub enum RuleState {
    /// The rule is disabled.
    Disabled,
    /// The rule does not match the request, for the given reason.
    NotMatched(String),
    /// The rule does not apply because the request lacks this part of the key.
    KeyMissing(String),
    /// The rule matches, but the request is exempt.
    Exempt,
    /// The rule refuses the request regardless of the remaining quota.
    Refused(Refusal),
    /// The rule limits the requests in flight per key.
    InFlight {
        /// The parts of the key.
        key: Vec<String>,
        /// Requests of the key that are in flight now.
        in_flight: u64,
        /// The decision that the request would get.
        decision: Decision,
        /// The time for which an operator has banned the key.
        banned_for: Option<Duration>,
    },
    /// The rule counts the request.
    Counted {
        /// The parts of the key.
        key: Vec<String>,
        /// Units that the request would take.
        cost: u64,
        /// The decision that the request would get; `None` if the store cannot be reached.
        decision: Option<Decision>,
        /// The time for which the key is still banned.
        banned_for: Option<Duration>,
    },
}

/// How a rule applies to a request, with the hits to peek at.
struct Inspected {
    rule_state: RuleState,
    limit: Option<Hits>,
    ban: Option<Hits>,
    /// `true` if the rule decides before the request's token is verified.
    early: bool,
    failed: Vec<FailedExpression>,
}

impl Gate {
    /// Explains how the current rules would decide a request. Nothing is counted.
    pub fn explain(&self, facts: &Facts<'_>) -> impl Future<Output = Explanation> + Send + use<> {
        let state = self.0.state.load_full();
        let (inspected, token): (Vec<Inspected>, TokenStatus) = {
            let failed = FailedExpressions::default();
            let request = state.rules.request(facts).recording(&failed);
            let inspect = |number| {
                let inspected = state.inspect(number, &request);
                Inspected { failed: failed.take(), ..inspected }
            };
            let inspected = explained(&state.rules).map(inspect).collect();
            (inspected, request.token_status())
        };
        async move {
            let mut rules = Vec::with_capacity(inspected.len());
            let early: Vec<bool> = inspected.iter().map(|inspected| inspected.early).collect();
            for (number, inspected) in explained(&state.rules).zip(inspected) {
                let name = state.rules.name(number).to_owned();
                let shadow = state.rules.rule(number).mode == Mode::Shadow;
                let (rule_state, failed_expressions) = state.resolve(inspected).await;
                rules.push(RuleExplained { name, shadow, state: rule_state, failed_expressions });
            }
            Explanation::of(rules, &early, token)
        }
    }
}

impl Gate {
    /// Explains the state of a key of the rule named `rule`: the decision on a request that costs nothing, or one unit if
    /// nothing is left. Nothing is counted.
    ///
    /// # Errors
    ///
    /// If there is no such rule or plan, or no request can have the key.
    #[doc(hidden)]
    pub fn explain_key<'a>(
        &self,
        rule: impl Into<NamedRule<'a>>,
        key: &[&[u8]],
    ) -> Result<Pin<Box<dyn Future<Output = RuleExplained> + Send>>, KeyError> {
        let state = self.0.state.load_full();
        let key = state.rules.named_key(rule.into(), key)?;
        let number = key.rule();
        let [inspected, next] = [0, 1].map(|cost| state.inspect_key(&key, cost));
        Ok(Box::pin(async move {
            let (mut rule_state, failed_expressions) = state.resolve(inspected).await;
            if matches!(&rule_state, RuleState::Counted { decision: Some(decision), .. } if decision.remaining() == 0) {
                (rule_state, _) = state.resolve(next).await;
            }
            let name = state.rules.name(number).to_owned();
            let shadow = state.rules.rule(number).mode == Mode::Shadow;
            RuleExplained { name, shadow, state: rule_state, failed_expressions }
        }))
    }
}

/// Returns the rules that requests can match.
fn explained(rules: &RuleSet) -> impl Iterator<Item = u32> {
    (0..rules.len()).filter(|number| !rules.is_by_name_only(*number))
}

impl State {
    fn inspect(&self, number: u32, request: &Request<'_>) -> Inspected {
        let mut key = KeyReadings::default();
        let early = self.rules.is_early(number, request);
        let rule_state = match self.rules.check_rule(number, request, &mut key) {
            RuleMatch::NotMatched(miss) => RuleState::NotMatched(miss.to_string()),
            RuleMatch::Disabled => RuleState::Disabled,
            RuleMatch::KeyMissing(part) => RuleState::KeyMissing(part.to_string()),
            RuleMatch::Exempt => RuleState::Exempt,
            RuleMatch::Refused(_, refused) => RuleState::Refused(refused.into()),
            RuleMatch::Hit(rule_hit) => return Inspected { early, ..self.inspect_hit(&rule_hit, &key) },
        };
        Inspected { rule_state, limit: None, ban: None, early, failed: Vec::new() }
    }

    fn inspect_key(&self, key: &NamedKey<'_>, cost: u64) -> Inspected {
        let rule_state = match self.rules.check_named(key, cost) {
            RuleMatch::Hit(rule_hit) => return self.inspect_hit(&rule_hit, key.readings()),
            RuleMatch::Exempt if self.rules.is_in_flight(key.rule()) => {
                let limit = self.rules.in_flight_limit_of_key(key);
                let mode = self.rules.rule(key.rule()).mode;
                let rule_hit = RuleHit { rule: key.rule(), limit, ban: None, cost, mode, is_in_flight: true };
                return self.inspect_hit(&rule_hit, key.readings());
            }
            RuleMatch::Disabled => RuleState::Disabled,
            RuleMatch::Refused(_, refused) => RuleState::Refused(refused.into()),
            _ => RuleState::Exempt,
        };
        Inspected { rule_state, limit: None, ban: None, early: false, failed: Vec::new() }
    }

    fn inspect_hit(&self, rule_hit: &RuleHit, key: &KeyReadings<'_>) -> Inspected {
        let (rule, key_text) = (rule_hit.rule, key.texts());
        let others = key.others().all().map(|other| with_key(other, |key| self.banned_for(rule, key)));
        let others = others.max().flatten();
        with_key(key.counted(), |counted| {
            let banned_for = self.banned_for(rule, counted).max(others);
            if rule_hit.is_in_flight {
                let in_flight = self.in_flight.count(rule, counted);
                let decision = in_flight::decision(self, rule_hit.limit, in_flight);
                let rule_state = RuleState::InFlight { key: key_text, in_flight, decision, banned_for };
                return Inspected { rule_state, limit: None, ban: None, early: false, failed: Vec::new() };
            }
            let rule_state = RuleState::Counted { key: key_text, cost: rule_hit.cost, decision: None, banned_for };
            let mut limit = self.store.no_hits();
            self.store.add_hit(&mut limit, Hit::new(rule_hit.limit, counted).cost(rule_hit.cost));
            let ban = rule_hit.ban.map(|ban| {
                let mut hits = self.store.no_hits();
                self.store.add_hit(&mut hits, Hit::new(ban, counted).cost(0));
                for other in key.others().readings() {
                    with_key(other, |key| self.store.add_hit(&mut hits, Hit::new(ban, key).cost(0)));
                }
                hits
            });
            Inspected { rule_state, limit: Some(limit), ban, early: false, failed: Vec::new() }
        })
    }

    async fn resolve(&self, inspected: Inspected) -> (RuleState, Vec<FailedExpression>) {
        let Inspected { mut rule_state, limit, ban, failed, .. } = inspected;
        if let RuleState::Counted { decision, banned_for, .. } = &mut rule_state {
            if let Some(limit) = limit {
                *decision = self.store.peek(&limit).await;
            }
            if let Some(ban) = ban {
                let left = self.store.peek(&ban).await.and_then(|decision| decision.retry_after());
                *banned_for = left.max(*banned_for);
            }
        }
        (rule_state, failed)
    }
}

impl Explanation {
    fn of(rules: Vec<RuleExplained>, early: &[bool], token: TokenStatus) -> Self {
        // Rules that read no token decide first. If they refuse, the others are not checked.
        let first = most_restrictive(rules.iter().zip(early).filter(|(_, early)| **early).map(|(rule, _)| rule));
        let decided = first.filter(|(_, refusal)| refusal.is_some()).or_else(|| most_restrictive(rules.iter()));
        let (limit, refusal) = match decided {
            Some((name, refusal)) => (Some(name), refusal),
            None => (None, None),
        };
        Self { rules, allowed: refusal.is_none(), limit, refusal, token }
    }
}

/// Returns the limit that the response would name, and the reason of a refusal.
fn most_restrictive<'r>(rules: impl Iterator<Item = &'r RuleExplained> + Clone) -> Option<(String, Option<Refusal>)> {
    let enforced = || rules.clone().filter(|rule| !rule.shadow);
    // In the order in which a request is checked: unconditional refusals, in-flight limits, bans, denials, and finally
    // the limit with the smallest share left.
    let refused = enforced().find_map(|rule| match &rule.state {
        RuleState::Refused(refusal) => Some((rule.name.clone(), Some(refusal.clone()))),
        _ => None,
    });
    let full = || {
        enforced().find_map(|rule| match &rule.state {
            RuleState::InFlight { decision, .. } if !decision.is_allowed() => {
                Some((rule.name.clone(), Some(Refusal::Limited)))
            }
            _ => None,
        })
    };
    let banned = || {
        enforced().find_map(|rule| match &rule.state {
            RuleState::Counted { banned_for: Some(left), .. } | RuleState::InFlight { banned_for: Some(left), .. } => {
                Some((rule.name.clone(), Some(Refusal::Banned { retry_after: *left })))
            }
            _ => None,
        })
    };
    let counted = || {
        let decided = enforced().filter_map(|rule| match &rule.state {
            RuleState::Counted { decision: Some(decision), .. } => Some((rule.name.clone(), *decision)),
            _ => None,
        });
        let is_first = |one: Decision, other: Decision| one.most_restrictive(other).limit() == one.limit();
        let most_restrictive = decided.reduce(|one, other| if is_first(one.1, other.1) { one } else { other });
        most_restrictive.map(|(name, decision)| (name, (!decision.is_allowed()).then_some(Refusal::Limited)))
    };
    refused.or_else(full).or_else(banned).or_else(counted)
}
