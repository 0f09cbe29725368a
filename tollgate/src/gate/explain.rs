//! What rules would make of a request, one by one, without asking anything of anybody.

use std::time::Duration;

use smallvec::SmallVec;

use super::store::Hits;
use super::{Gate, State, in_flight};
use crate::decision::Decision;
use crate::http::Refusal;
use crate::key::Key;
use crate::limiter::Hit;
use crate::rules::{
    Facts, FailedExpression, FailedExpressions, Finding, Met, Mode, Piece, Pieces, Request, TokenStatus,
};

/// What rules would make of a request. Nothing is taken for it.
#[derive(Debug)]
#[non_exhaustive]
pub struct Explanation {
    /// One for each rule, in their order.
    pub rules: Vec<RuleExplained>,
    /// Whether the request would pass.
    pub allowed: bool,
    /// The limit that would be named in the answer.
    pub limit: Option<String>,
    /// Why it would be refused.
    pub refusal: Option<Refusal>,
    /// What came of its token, if a rule needed to know.
    pub token: TokenStatus,
}

/// What one rule would make of a request.
#[derive(Debug)]
#[non_exhaustive]
pub struct RuleExplained {
    /// The name of its limit.
    pub name: String,
    /// Whether it only watches.
    pub shadow: bool,
    /// Where the request stands with it.
    pub state: RuleState,
    /// Its expressions that failed for the request.
    pub failed_expressions: Vec<FailedExpression>,
}

/// Where a request stands with a rule.
#[derive(Debug)]
#[non_exhaustive]
pub enum RuleState {
    /// The rule is disabled.
    Disabled,
    /// The rule is not for it, and why.
    NotMatched(String),
    /// The rule is not for it, because it lacks this part of the key.
    KeyMissing(String),
    /// The rule is for it, but lets it pass.
    Exempt,
    /// The rule refuses it, whatever is left.
    Refused(Refusal),
    /// The rule bounds how many of its key are in flight.
    InFlight {
        /// The parts of its key.
        key: Vec<String>,
        /// How many are.
        in_flight: u64,
        /// What would be decided.
        decision: Decision,
    },
    /// The rule counts it.
    Counted {
        /// The parts of its key.
        key: Vec<String>,
        /// What it would take.
        cost: u64,
        /// What would be decided; `None` if the store cannot tell.
        decision: Option<Decision>,
        /// How long its key is banned yet.
        banned_for: Option<Duration>,
    },
}

/// A rule's rule_state, and what to inspect up for it.
struct Inspected {
    rule_state: RuleState,
    limit: Option<Hits>,
    ban: Option<Hits>,
    /// Whether the rule decides before the token of the request is verified.
    early: bool,
    failed: Vec<FailedExpression>,
}

impl Gate {
    /// What the rules in force would make of a request. Nothing is taken.
    pub fn explain(&self, facts: &Facts<'_>) -> impl Future<Output = Explanation> + Send + use<> {
        let state = self.0.state.load_full();
        let (inspected, token): (Vec<Inspected>, TokenStatus) = {
            let failed = FailedExpressions::default();
            let request = state.rules.request(facts).recording(&failed);
            let inspect = |number| {
                let inspected = state.inspect(number, &request);
                Inspected { failed: failed.take(), ..inspected }
            };
            let inspected = (0..state.rules.len()).map(inspect).collect();
            (inspected, request.token_status())
        };
        async move {
            let mut rules = Vec::with_capacity(inspected.len());
            let early: Vec<bool> = inspected.iter().map(|inspected| inspected.early).collect();
            for (number, inspected) in (0..).zip(inspected) {
                let name = state.rules.name(number).to_owned();
                let shadow = state.rules.rule(number).mode == Mode::Shadow;
                let (rule_state, failed_expressions) = state.resolve(inspected).await;
                rules.push(RuleExplained { name, shadow, state: rule_state, failed_expressions });
            }
            Explanation::of(rules, &early, token)
        }
    }
}

impl State {
    fn inspect(&self, number: u32, request: &Request<'_>) -> Inspected {
        let mut pieces = Pieces::new();
        let early = self.rules.is_early(number, request);
        let rule_state = match self.rules.meet(number, request, &mut pieces) {
            Met::Not(miss) => RuleState::NotMatched(miss.to_string()),
            Met::Disabled => RuleState::Disabled,
            Met::Lacks(part) => RuleState::KeyMissing(part.to_string()),
            Met::Exempt => RuleState::Exempt,
            Met::Refused(_, refused) => RuleState::Refused(refused.into()),
            Met::Hit(finding) => return Inspected { early, ..self.inspect_hit(&finding, &pieces) },
        };
        Inspected { rule_state, limit: None, ban: None, early, failed: Vec::new() }
    }

    fn inspect_hit(&self, finding: &Finding, pieces: &[Piece<'_>]) -> Inspected {
        let slices: SmallVec<[&[u8]; 8]> = pieces.iter().map(Piece::as_bytes).collect();
        let key = Key::byte_parts(&slices);
        let hits_of = |limit, cost| {
            let mut hits = self.store.no_hits();
            self.store.add_hit(&mut hits, Hit::new(limit, key).cost(cost));
            hits
        };
        let text = |slice: &&[u8]| String::from_utf8_lossy(slice).into_owned();
        let key_text = slices.iter().map(text).collect();
        if finding.is_in_flight {
            let in_flight = self.in_flight.count(finding.rule, key);
            let decision = in_flight::decision(self, finding.limit, in_flight);
            let rule_state = RuleState::InFlight { key: key_text, in_flight, decision };
            return Inspected { rule_state, limit: None, ban: None, early: false, failed: Vec::new() };
        }
        let rule_state = RuleState::Counted { key: key_text, cost: finding.cost, decision: None, banned_for: None };
        let ban = finding.ban.map(|ban| hits_of(ban, 0));
        Inspected {
            rule_state,
            limit: Some(hits_of(finding.limit, finding.cost)),
            ban,
            early: false,
            failed: Vec::new(),
        }
    }

    async fn resolve(&self, inspected: Inspected) -> (RuleState, Vec<FailedExpression>) {
        let Inspected { mut rule_state, limit, ban, failed, .. } = inspected;
        if let RuleState::Counted { decision, banned_for, .. } = &mut rule_state {
            if let Some(limit) = limit {
                *decision = self.store.peek(&limit).await;
            }
            if let Some(ban) = ban {
                *banned_for = self.store.peek(&ban).await.and_then(|decision| decision.retry_after());
            }
        }
        (rule_state, failed)
    }
}

impl Explanation {
    fn of(rules: Vec<RuleExplained>, early: &[bool], token: TokenStatus) -> Self {
        // The rules that read no token decide first, and those that read one are not asked if they refuse.
        let first = most_restrictive(rules.iter().zip(early).filter(|(_, early)| **early).map(|(rule, _)| rule));
        let decided = first.filter(|(_, refusal)| refusal.is_some()).or_else(|| most_restrictive(rules.iter()));
        let (limit, refusal) = match decided {
            Some((name, refusal)) => (Some(name), refusal),
            None => (None, None),
        };
        Self { rules, allowed: refusal.is_none(), limit, refusal, token }
    }
}

/// The limit that an answer would name, and why it would refuse.
fn most_restrictive<'r>(rules: impl Iterator<Item = &'r RuleExplained> + Clone) -> Option<(String, Option<Refusal>)> {
    let enforced = || rules.clone().filter(|rule| !rule.shadow);
    // As a request meets them: a rule that refuses whatever is left, then permits, bans and denials, then who
    // has the least share left.
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
            RuleState::Counted { banned_for: Some(left), .. } => {
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
