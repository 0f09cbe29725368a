//! The `tollgate` command. Everything it does is in [`cli`]; only `main` ends the process.

mod admin;
mod builtin;
mod cli;
mod config;
mod counter;
mod decisions;
mod descriptors;
mod gateway;
mod limits_told;
mod listening;
mod metrics;
mod notice;
mod reload;
mod seconds;
mod service;
mod shutdown;
mod standing;
mod state;
mod threads;

use std::process::ExitCode;

use clap::Parser;

use self::cli::{Cli, Completion};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The answer is no.
const EXIT_NO: u8 = 1;
/// Wrong usage or configuration.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    match cli::run(Cli::parse()) {
        Ok(Completion::Yes) => ExitCode::SUCCESS,
        Ok(Completion::No) => ExitCode::from(EXIT_NO),
        Err(error) => {
            error.tell();
            ExitCode::from(EXIT_USAGE)
        }
    }
}
