//! The `tollgate` command. The subcommands are in [`cli`]; only `main` ends the process.

mod admin;
mod builtin;
mod cli;
mod config;
mod counter;
mod decisions;
mod descriptors;
mod gateway;
mod limit_summary;
mod listeners;
mod listening;
mod metrics;
mod notice;
mod readiness;
mod reload;
mod seconds;
mod service;
mod shutdown;
mod state;
mod threads;

use std::process::ExitCode;

use clap::Parser;

use self::cli::{Cli, Completion};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The command ran, and its answer is no: a file is not valid, a request is refused.
const EXIT_NEGATIVE: u8 = 1;
/// The command could not run: wrong usage or configuration.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    match cli::run(Cli::parse()) {
        Ok(Completion::Positive) => ExitCode::SUCCESS,
        Ok(Completion::Negative) => ExitCode::from(EXIT_NEGATIVE),
        Err(error) => {
            error.log();
            ExitCode::from(EXIT_USAGE)
        }
    }
}
