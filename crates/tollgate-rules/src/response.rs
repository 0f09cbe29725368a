//! How the response to a request affects its cost: whether it counts at all, and the actual cost.
//!
//! Not here: refunds and charges. See [`Outcome::settle_response`](crate::Outcome::settle_response).

use http::{HeaderMap, HeaderName, StatusCode};
use smallvec::SmallVec;
use tollgate_http::internal::http_status_of_grpc;

use super::normal::header::trimmed;

/// A set of response statuses, for example those that count against a limit.
///
/// ```
/// use http::StatusCode;
/// use tollgate_rules::StatusSet;
///
/// let refused_logins = StatusSet::none().status(StatusCode::UNAUTHORIZED).status(StatusCode::FORBIDDEN);
/// assert!(refused_logins.contains(StatusCode::UNAUTHORIZED) && !refused_logins.contains(StatusCode::OK));
/// assert!(StatusSet::failures().contains(StatusCode::BAD_GATEWAY));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct StatusSet {
    /// The first and the last status of each range.
    ranges: SmallVec<[(u16, u16); 2]>,
}

/// Statuses have three digits.
const FIRST: u16 = 100;
const LAST: u16 = 999;
/// The first status of an error.
const FIRST_FAILURE: u16 = 400;

impl StatusSet {
    /// Returns the set of all statuses.
    pub fn all() -> Self {
        Self::none().range(FIRST, LAST)
    }

    /// Returns the set of statuses of 400 and above.
    pub fn failures() -> Self {
        Self::none().range(FIRST_FAILURE, LAST)
    }

    /// Returns the set of statuses below 400.
    pub fn successes() -> Self {
        Self::none().range(FIRST, FIRST_FAILURE - 1)
    }

    /// Returns the empty set.
    pub fn none() -> Self {
        Self { ranges: SmallVec::new() }
    }

    /// Adds a status.
    pub fn status(self, status: StatusCode) -> Self {
        self.range(status.as_u16(), status.as_u16())
    }

    /// Adds all statuses of the same class: with 500, all from 500 to 599.
    pub fn class(self, status: StatusCode) -> Self {
        let first = status.as_u16() / 100 * 100;
        self.range(first, first + 99)
    }

    fn range(mut self, first: u16, last: u16) -> Self {
        self.ranges.push((first, last));
        self
    }

    /// Returns `true` if the set is empty.
    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Returns `true` if the set contains `status`.
    #[must_use]
    pub fn contains(&self, status: StatusCode) -> bool {
        self.ranges.iter().any(|(first, last)| (*first..=*last).contains(&status.as_u16()))
    }
}

/// How a rule settles a request by its response. Most rules do not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ResponseSettlement {
    /// The statuses that count; all if `None`.
    pub(super) count: Option<StatusSet>,
    /// The response header that contains the actual cost.
    pub(super) settle_by: Option<HeaderName>,
    /// When a request is counted.
    pub(super) when: CountWhen,
}

/// When a request is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "file", derive(serde::Deserialize, schemars::JsonSchema), serde(rename_all = "snake_case"))]
pub enum CountWhen {
    /// When it arrives. A response that does not count gives its units back.
    #[default]
    Arrival,
    /// After its response. Requests that run at the same time do not count against each other.
    After,
}

impl ResponseSettlement {
    /// Returns `true` if a response can change the cost of a request.
    pub(super) fn is_needed(&self) -> bool {
        self.count.is_some() || self.settle_by.is_some() || self.is_deferred()
    }

    /// Returns `true` if requests are counted only after their responses.
    pub(super) fn is_deferred(&self) -> bool {
        self.when == CountWhen::After
    }

    /// Returns the actual cost of a request with this response, or `None` if the cost does not change.
    pub(crate) fn actual(&self, status: StatusCode, headers: &HeaderMap) -> Option<u64> {
        if self.count.as_ref().is_some_and(|count| !count.contains(status_to_count(status, headers))) {
            return Some(0);
        }
        // Several costs are none.
        let mut values = headers.get_all(self.settle_by.as_ref()?).iter().map(|value| whole_number(value.as_bytes()));
        let first = values.next()??;
        values.all(|other| other == Some(first)).then_some(first)
    }
}

/// Returns the status of a response, or that of the error in a gRPC response, whose own status is 200.
fn status_to_count(status: StatusCode, headers: &HeaderMap) -> StatusCode {
    let of_grpc = if status == StatusCode::OK { http_status_of_grpc(headers) } else { None };
    of_grpc.unwrap_or(status)
}

/// Returns the whole number that a value consists of. Signs, separators and exponents are not accepted: servers disagree
/// on what they mean.
pub(super) fn whole_number(value: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(trimmed(value)).ok()?;
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn heard(response_settlement: &ResponseSettlement, status: u16, cost: Option<&[u8]>) -> Option<u64> {
        let mut headers = HeaderMap::new();
        headers.extend(cost.map(|cost| (HeaderName::from_static("x-cost"), HeaderValue::from_bytes(cost).unwrap())));
        response_settlement.actual(StatusCode::from_u16(status).unwrap(), &headers)
    }

    #[test]
    fn a_status_counts_if_it_is_listed_or_of_a_class_that_is() {
        let answers = |answers: StatusSet| {
            let all = [100, 200, 302, 399, 400, 401, 404, 499, 500, 599, 999];
            all.into_iter()
                .filter(|status| answers.contains(StatusCode::from_u16(*status).unwrap()))
                .collect::<Vec<_>>()
        };
        assert_eq!(answers(StatusSet::all()).len(), 11);
        assert_eq!(answers(StatusSet::successes()), [100, 200, 302, 399]);
        assert_eq!(answers(StatusSet::failures()), [400, 401, 404, 499, 500, 599, 999]);
        let listed = StatusSet::none().status(StatusCode::UNAUTHORIZED).class(StatusCode::BAD_GATEWAY);
        assert_eq!(answers(listed), [401, 500, 599]);
    }

    #[test]
    fn an_error_of_grpc_counts_as_the_status_that_corresponds_to_it() {
        let count = Some(StatusSet::none().status(StatusCode::UNAUTHORIZED).class(StatusCode::BAD_GATEWAY));
        let failures = ResponseSettlement { count, ..ResponseSettlement::default() };
        let counts = |status: u16, kind: &'static str, code: &'static str| {
            let pairs = [("content-type", kind), ("grpc-status", code)];
            let headers = pairs.map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
            let status = StatusCode::from_u16(status).unwrap();
            failures.actual(status, &headers.into_iter().collect()).is_none()
        };
        let counted = ["2", "4", "12", "13", "14", "15", "16", "17", "", "x"];
        assert!(counted.iter().all(|code| counts(200, "application/grpc", code)));
        assert!(counts(200, "Application/gRPC-Web+proto", "16"));
        let others = ["0", "1", "3", "5", "6", "7", "8", "9", "10", "11"];
        assert!(!others.iter().any(|code| counts(200, "application/grpc+proto", code)));
        assert!(!counts(200, "text/plain", "16"), "not a response of gRPC");
        assert!(!counts(404, "application/grpc", "16") && counts(502, "application/grpc", "0"));
    }

    #[test]
    fn other_values_than_whole_numbers_leave_the_estimate() {
        let settles =
            ResponseSettlement { settle_by: Some(HeaderName::from_static("x-cost")), ..ResponseSettlement::default() };
        assert_eq!(heard(&settles, 200, Some(b"12")), Some(12));
        assert_eq!(heard(&settles, 500, Some(b" 0 ")), Some(0));
        let garbage: [&[u8]; 9] = [b"", b" ", b"-1", b"+1", b"1.5", b"1e3", b"many", b"\xff", b"99999999999999999999"];
        for garbage in garbage {
            assert_eq!(heard(&settles, 200, Some(garbage)), None, "{garbage:?}");
        }
        assert_eq!(heard(&settles, 200, None), None);
    }

    #[test]
    fn a_response_that_does_not_count_costs_nothing() {
        let both = ResponseSettlement {
            count: Some(StatusSet::successes()),
            settle_by: Some(HeaderName::from_static("x-cost")),
            ..ResponseSettlement::default()
        };
        assert_eq!(heard(&both, 200, Some(b"12")), Some(12));
        assert_eq!(heard(&both, 500, Some(b"12")), Some(0));
        assert_eq!(heard(&both, 200, None), None);
    }
}
