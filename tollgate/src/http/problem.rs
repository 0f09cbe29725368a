//! Problem details (RFC 9457).

use serde::Serialize;

use super::refusal_builder::RefusalBuilder;

/// The members of RFC 9457, and `violated-policies` of draft-ietf-httpapi-ratelimit-headers. There is no `instance`,
/// because refusals have no identity of their own.
#[derive(Serialize)]
pub(super) struct Problem<'a> {
    r#type: &'static str,
    title: &'static str,
    status: u16,
    detail: &'a str,
    /// Names of policies as in `RateLimit-Policy`, so that a client can match them.
    #[serde(rename = "violated-policies", skip_serializing_if = "Option::is_none")]
    violated_policies: Option<[&'a str; 1]>,
}

/// The problem type that adds nothing to the status.
const STATUS_ONLY: &str = "about:blank";

impl<'a> Problem<'a> {
    pub(super) fn new(answer: &RefusalBuilder<'a>, detail: &'a str) -> Self {
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
