//! What an upstream failed at, for people: requests are told less of it, and metrics count it by kind.

use std::fmt;
use std::time::Duration;

use http::StatusCode;

use super::connect::{ConnectError, Exhausted};
use super::failure::Failure;
use crate::limit_summary::span;

#[derive(Debug)]
pub(super) enum Fault {
    /// There was no connection to it, or none that held.
    Unreached(ConnectError),
    /// There was one, and no answer that could be passed on.
    Failed(Failure),
    /// It stopped in the middle of its answer, and did not go on in time.
    Stalled,
    /// It answered that it is not well.
    Status(StatusCode),
    /// A check took longer than it may.
    LateForCheck(Duration),
}

impl Fault {
    /// Whether a request has no answer because of its upstreams, and not of itself or its client.
    pub(super) fn is_upstreams(&self) -> bool {
        self.failure().is_upstreams()
    }

    /// What the gateway has run out of, if that is the cause.
    pub(super) fn exhausted(&self) -> Option<Exhausted> {
        match self {
            Self::Unreached(error) => error.exhausted(),
            Self::Failed(_) | Self::Stalled | Self::Status(_) | Self::LateForCheck(_) => None,
        }
    }

    /// What the request is told that met it.
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
            Self::Stalled => out.write_str("no more of its answer within the timeout of the route"),
            Self::Status(status) => write!(out, "it answered with {}", status.as_u16()),
            Self::LateForCheck(within) => write!(out, "no answer within {}", span(*within)),
            Self::Failed(failure) => out.write_str(match failure {
                Failure::Disconnected => "it hung up before the end of its answer",
                Failure::BadAnswer => "its answer makes no sense",
                Failure::LongAnswerHead => "its answer has more than 100 headers, or more than 64 KiB of them",
                Failure::RefusedAnswerHead => {
                    "its answer has more than 64 KiB of headers, or some that HTTP/2 does not allow"
                }
                Failure::UpstreamTimeout => "no answer within the timeout of the route",
                _ => "it cannot be asked",
            }),
        }
    }
}
