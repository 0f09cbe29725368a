//! Problem details (RFC 9457).

use serde::Serialize;

use super::answer::Answer;

/// The members of RFC 9457, and `violated-policies` of draft-ietf-httpapi-ratelimit-headers. There is no `instance`:
/// one refusal is like another.
#[derive(Serialize)]
pub(super) struct Problem<'a> {
    r#type: &'static str,
    title: &'static str,
    status: u16,
    detail: &'a str,
    /// By the names that `RateLimit-Policy` has, so that a client can put them together.
    #[serde(rename = "violated-policies", skip_serializing_if = "Option::is_none")]
    violated_policies: Option<[&'a str; 1]>,
}

/// The type that says no more than the status does.
const STATUS_ONLY: &str = "about:blank";

impl<'a> Problem<'a> {
    pub(super) fn new(answer: &Answer<'a>, detail: &'a str) -> Self {
        let (r#type, title) = answer.refusal.problem_type();
        let violated = answer.policy.filter(|_| r#type != STATUS_ONLY);
        Self {
            r#type,
            title,
            status: answer.refusal.status().as_u16(),
            detail,
            violated_policies: violated.map(|policy| [policy.ascii_name()]),
        }
    }
}
