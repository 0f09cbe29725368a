//! Errors of commands: what is wrong, and the fix.

use std::fmt;
use std::io;
use std::path::PathBuf;

use tollgate::redis::{ConnectError, PublishError};
use tollgate_config::LoadError;
use tollgate_config::OpenError;
use tollgate_net::descriptors;
use tollgate_net::listening::ListenError;
use tollgate_telemetry::notice;

use crate::control::ControlError;
use crate::gateway::StartError;
use crate::listeners::Refusal;
use crate::state::StateError;
use crate::threads;

#[derive(Debug)]
pub(crate) enum Error {
    Load(LoadError),
    Open(OpenError),
    NothingToServe {
        config: PathBuf,
    },
    NoFleet {
        config: PathBuf,
    },
    Connect(ConnectError),
    Publish(PublishError),
    Request(String),
    Usage(String),
    Gateway(StartError),
    Listen(ListenError),
    Descriptors(descriptors::TooFewDescriptors),
    Threads(threads::TooFewThreads),
    State(StateError),
    Control(ControlError),
    Runtime(io::Error),
    /// The answer could not be written to stdout.
    Output(io::Error),
}

impl Error {
    /// Unwraps the errors of a gate, which have nothing to do with the state file.
    pub(crate) fn from_state(error: StateError) -> Self {
        match error {
            StateError::Open(error) => Self::Open(error),
            error => Self::State(error),
        }
    }

    /// Writes it to stderr. Each problem of a file is a line that begins with its position.
    pub(crate) fn log(&self) {
        match self {
            Self::Load(LoadError::Refused(problems))
            | Self::Open(OpenError::Rules(problems))
            | Self::Gateway(StartError::Refused(problems)) => notice::log_problems(problems),
            error => notice::error(error),
        }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Unusable(problem) => Self::Usage(problem),
            Refusal::Listen(problem) => Self::Listen(problem),
            Refusal::Descriptors(too_few) => Self::Descriptors(too_few),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Load(LoadError::Refused(problems))
            | Self::Open(OpenError::Rules(problems))
            | Self::Gateway(StartError::Refused(problems)) => problems.fmt(out),
            Self::Load(error) => error.fmt(out),
            Self::Open(error) => error.fmt(out),
            Self::NothingToServe { config } => write!(
                out,
                "{} configures nothing to serve: add `gateway: {{ routes: [...] }}`, or a listener of the decision \
                 service, such as `service: {{ http: 127.0.0.1:8090 }}`, `grpc` or `resp`",
                config.display()
            ),
            Self::NoFleet { config } => write!(
                out,
                "the store is in memory, and other nodes cannot see it: name a Redis with --store, or in {} as `store: redis://127.0.0.1:6379`",
                config.display()
            ),
            Self::Connect(error) => write!(out, "store: {error}"),
            Self::Publish(error) => error.fmt(out),
            Self::Request(problem) | Self::Usage(problem) => out.write_str(problem),
            Self::Gateway(StartError::Listen(problem)) | Self::Listen(problem) => {
                write!(out, "{problem}: {}", problem.fix_at_start())
            }
            Self::Gateway(StartError::Runtime(source)) => cannot_start(source, out),
            Self::Descriptors(too_few) => too_few.fmt(out),
            Self::Threads(too_few) => too_few.fmt(out),
            Self::State(error) => error.fmt(out),
            Self::Control(error) => error.fmt(out),
            Self::Runtime(source) => cannot_start(source, out),
            Self::Output(source) => {
                write!(out, "cannot write the answer to stdout: {source}: free space there, or send it to another file")
            }
        }
    }
}

fn cannot_start(source: &io::Error, out: &mut fmt::Formatter<'_>) -> fmt::Result {
    write!(out, "cannot start: {source}: raise the limits on threads and file descriptors")
}
