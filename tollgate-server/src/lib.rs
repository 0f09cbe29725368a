//! The `tollgate` command, as a library so that the fuzzer can reach its parsers. It has no stable API: use the binary, or
//! the crate `tollgate`.

mod admin;
mod atomic_file;
mod bans;
mod builtin;
mod cli;
mod config;
mod control;
mod explanation;
#[doc(hidden)]
pub mod fuzzing;
mod gateway;
mod learning;
mod listeners;
mod metrics;
mod net_settings;
mod openapi;
mod readiness;
mod reload;
mod server_state;
mod service;
mod service_manager;
mod shutdown;
mod state;
mod threads;

use std::process::ExitCode;

use self::cli::Completion;

/// The command ran, and its answer is no: a file is not valid, a request is refused.
const EXIT_NEGATIVE: u8 = 1;
/// The command could not run: wrong usage or configuration.
const EXIT_USAGE: u8 = 2;

/// Runs the command that the arguments of the process name, and returns its exit code.
#[doc(hidden)]
#[must_use]
pub fn main() -> ExitCode {
    let cli = match cli::parse() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    match cli::run(cli) {
        Ok(Completion::Positive) => ExitCode::SUCCESS,
        Ok(Completion::Negative) => ExitCode::from(EXIT_NEGATIVE),
        Err(error) => {
            error.log();
            ExitCode::from(EXIT_USAGE)
        }
    }
}
