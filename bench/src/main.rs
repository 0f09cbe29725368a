//! Comparisons of tollgate with its peers. Every benchmark prints tables and ends with one line,
//! `RESULT name=value name=value …`. This file only reads the command line; a benchmark is a module.

mod clock;
mod contender;
mod memory;
mod race;
mod report;
mod traffic;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "bench", about = "Compares tollgate with its peers")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Memory(memory::Args),
    /// One measurement that needs a process of its own; `memory` starts it
    #[command(hide = true)]
    MemoryChild(memory::child::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Memory(args) => memory::run(&args),
        Command::MemoryChild(args) => memory::child::run(&args),
    }
}
