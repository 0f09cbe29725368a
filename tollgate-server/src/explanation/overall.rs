//! The answer to the client, from all limits together.

use axum::http::{HeaderMap, StatusCode, header};
use tollgate::Decision;
use tollgate_config::Parsed;
use tollgate_config::internal::{CountRule, FailurePolicy};
use tollgate_http::{Body, Refusal, RefusalBuilder, UnreadableRequest};
use tollgate_rules::internal::Unreadable;
use tollgate_rules::{Explanation, RuleExplained, RuleState};

pub(crate) struct Overall {
    pub(crate) allowed: bool,
    /// The limit that decides the answer.
    pub(crate) limit: Option<String>,
    pub(crate) refusal: Option<Refusal>,
    /// The status of a refusal.
    pub(crate) status: Option<StatusCode>,
    /// Whole seconds, as in the header.
    pub(crate) retry_after: Option<u64>,
}

impl Overall {
    pub(crate) fn of(explanation: &Explanation, file: &Parsed) -> Self {
        let mut limit = explanation.limit.clone();
        let mut refusal = explanation.refusal.clone();
        // If the store does not answer, the policy of the limit decides; only a denial is certain.
        if refusal.is_none()
            && let Some(name) = denied_by_policy(explanation, file)
        {
            (limit, refusal) = (Some(name.to_owned()), Some(Refusal::StoreUnavailable));
        }
        let decision = limit.as_deref().and_then(|name| decision_of(explanation, name));
        let answered = refusal.as_ref().map(|refusal| answer(refusal, decision));
        Self {
            allowed: refusal.is_none(),
            status: answered.map(|(status, _)| status),
            retry_after: answered.and_then(|(_, retry_after)| retry_after),
            limit,
            refusal,
        }
    }
}

impl Overall {
    /// Replaces the answer: the gateway refuses the request before any limit.
    pub(crate) fn refuse_unreadable(&mut self, problem: &Unreadable) {
        let refusal = Refusal::Unreadable(Box::new(UnreadableRequest::new(problem.reason(), problem.to_string())));
        *self = Self {
            allowed: false,
            limit: None,
            status: Some(refusal.status()),
            retry_after: None,
            refusal: Some(refusal),
        };
    }
}

/// Returns the status and the `Retry-After` of the response.
fn answer(refusal: &Refusal, decision: Option<&Decision>) -> (StatusCode, Option<u64>) {
    let mut answer = RefusalBuilder::new(refusal);
    if let Some(decision) = decision {
        answer = answer.decision(decision);
    }
    let response = answer.response(&Body::Json, &HeaderMap::new());
    let retry_after = response.headers().get(header::RETRY_AFTER);
    (response.status(), retry_after.and_then(|value| value.to_str().ok()?.parse().ok()))
}

fn decision_of<'e>(explanation: &'e Explanation, name: &str) -> Option<&'e Decision> {
    explanation.rules.iter().find(|rule| rule.name == name).and_then(|rule| match &rule.state {
        RuleState::Counted { decision, .. } => decision.as_ref(),
        RuleState::InFlight { decision, .. } => Some(decision),
        _ => None,
    })
}

fn denied_by_policy<'e>(explanation: &'e Explanation, file: &Parsed) -> Option<&'e str> {
    let undecided = |rule: &&RuleExplained| matches!(rule.state, RuleState::Counted { decision: None, .. });
    let enforced = explanation.rules.iter().filter(|rule| !rule.shadow);
    let names = enforced.filter(undecided).map(|rule| rule.name.as_str());
    names.into_iter().find(|name| policy(file, name) == FailurePolicy::Deny)
}

/// Returns the limit's policy for a failing store.
pub(crate) fn policy(file: &Parsed, name: &str) -> FailurePolicy {
    let limit = file.limits.iter().find(|limit| limit.name.as_str() == name);
    limit.and_then(|limit| limit.on_store_failure).unwrap_or(file.on_store_failure)
}

/// Returns whether a limit counts requests only after their responses.
pub(crate) fn counts_after(file: &Parsed, name: &str) -> bool {
    let limit = file.limits.iter().find(|limit| limit.name.as_str() == name);
    limit.and_then(|limit| limit.count.as_ref()).is_some_and(CountRule::is_after)
}

/// The name of a refusal in `/v1/check`.
pub(super) use crate::service::http::reason;
