//! Errors of upstreams, described for operators. Clients get fewer details ([`Failure`]), and metrics count them by
//! kind.

use std::fmt;
use std::time::Duration;

use http::StatusCode;

use super::connect::{ConnectError, Exhausted};
use super::failure::Failure;
use crate::limit_summary::span;

#[derive(Debug)]
pub(super) enum Fault {
    /// No connection could be opened, or it broke.
    Unreached(ConnectError),
    /// The upstream sent no valid response.
    Failed(Failure),
    /// The upstream did not finish its response in time.
    Stalled,
    /// The upstream responded with an error status.
    Status(StatusCode),
    /// A health check took too long.
    LateForCheck(Duration),
}

impl Fault {
    /// Returns whether the upstream is at fault, not the request or its client.
    pub(super) fn is_upstreams(&self) -> bool {
        self.failure().is_upstreams()
    }

    /// Returns the resource that the gateway has run out of, if that is the cause.
    pub(super) fn exhausted(&self) -> Option<Exhausted> {
        match self {
            Self::Unreached(error) => error.exhausted(),
            Self::Failed(_) | Self::Stalled | Self::Status(_) | Self::LateForCheck(_) => None,
        }
    }

    /// Returns the failure that the client is sent.
    pub(super) fn failure(&self) -> Failure {
        match self {
            Self::Unreached(ConnectError::Exhausted(Exhausted::UpstreamConnections)) => Failure::UpstreamConnections,
            Self::Unreached(error) if error.exhausted().is_some() => Failure::Exhausted,
            Self::Unreached(ConnectError::Timeout) => Failure::ConnectTimeout,
            Self::Unreached(ConnectError::Tls(fault)) if fault.is_certificates() => Failure::BadCertificate,
            Self::Unreached(_) => Failure::CannotConnect,
            Self::Failed(failure) => *failure,
            Self::Status(_) => Failure::BadAnswer,
            Self::Stalled | Self::LateForCheck(_) => Failure::UpstreamTimeout,
        }
    }
}

impl From<Failure> for Fault {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<ConnectError> for Fault {
    fn from(error: ConnectError) -> Self {
        Self::Unreached(error)
    }
}

impl From<hyper::Error> for Fault {
    fn from(error: hyper::Error) -> Self {
        Self::Unreached(error.into())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreached(error) => error.fmt(out),
            Self::Stalled => out.write_str("no more of its response within the route's timeout"),
            Self::Status(status) => write!(out, "it responded with {}", status.as_u16()),
            Self::LateForCheck(within) => write!(out, "no response within {}", span(*within)),
            Self::Failed(failure) => out.write_str(match failure {
                Failure::Disconnected => "it closed the connection before the end of its response",
                Failure::BadAnswer => "its response is invalid",
                Failure::LongAnswerHead => "its response has more than 100 headers, or more than 64 KiB of headers",
                Failure::RefusedAnswerHead => {
                    "its response has more than 64 KiB of headers, or headers that HTTP/2 forbids"
                }
                Failure::UpstreamTimeout => "no response within the route's timeout",
                _ => "it cannot be used",
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_upstreams_are_described_for_operators() {
        let exhausted = [
            Exhausted::UpstreamConnections,
            Exhausted::Descriptors,
            Exhausted::SystemDescriptors,
            Exhausted::LocalAddresses,
            Exhausted::Memory,
        ];
        let failures = [
            Failure::Disconnected,
            Failure::BadAnswer,
            Failure::LongAnswerHead,
            Failure::RefusedAnswerHead,
            Failure::UpstreamTimeout,
        ];
        let others = [
            ConnectError::Timeout.into(),
            Fault::Stalled,
            Fault::Status(StatusCode::SERVICE_UNAVAILABLE),
            Fault::LateForCheck(Duration::from_millis(200)),
        ];
        let faults = exhausted.map(|exhausted| Fault::from(ConnectError::Exhausted(exhausted))).into_iter();
        let faults = faults.chain(failures.map(Fault::from)).chain(others);
        insta::assert_snapshot!(faults.map(|fault| fault.to_string()).collect::<Vec<_>>().join("\n"));
    }
}
