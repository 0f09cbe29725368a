//! `tollgate reload` and `tollgate restart`: commands to a running server. One that fails exits with 1, and the server
//! continues as before.

use std::path::PathBuf;

use tollgate_telemetry::notice;

use super::{Completion, Error, print};
use crate::control::{self, Answer, Request};

pub(super) const RELOAD_EXAMPLES: &str = "\
Examples:
  tollgate reload --control /run/tollgate/control";

pub(super) const RESTART_EXAMPLES: &str = "\
Examples:
  tollgate restart --control /run/tollgate/control";

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Control socket of the server: the --control of `tollgate serve`
    #[arg(long, value_name = "PATH", env = "TOLLGATE_CONTROL")]
    control: PathBuf,
}

pub(super) async fn run(arguments: &Arguments, request: Request) -> Result<Completion, Error> {
    match control::ask(&arguments.control, request).await.map_err(Error::Control)? {
        Answer::Done(message) => print(message).map(|()| Completion::Positive),
        Answer::Failed(problem) => {
            notice::error(problem);
            Ok(Completion::Negative)
        }
    }
}
