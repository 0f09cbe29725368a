//! The `tollgate` command. Everything it does is in [`cli`]; only `main` ends the process.

mod builtin;
mod cli;
mod service;
mod shutdown;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

/// Wrong usage or configuration. 1 is kept for commands whose answer can be no.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    match cli::run(cli::Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody is left to tell when even stderr is closed.
            let _ = writeln!(std::io::stderr(), "tollgate: {error}");
            ExitCode::from(EXIT_USAGE)
        }
    }
}
