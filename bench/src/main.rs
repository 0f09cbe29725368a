//! Comparisons of tollgate with its peers. Every benchmark prints tables and ends with the lines
//! `MACHINE processor` and `RESULT name=value name=value …`. This file only reads the command line; a benchmark is a module.

mod chart;
mod clock;
mod contender;
mod cores;
mod gateway;
mod learning;
mod memory;
mod options;
mod programs;
mod race;
mod redis;
mod report;
mod rules;
mod server;
mod service;
mod tokens;
mod tools;
mod tower;
mod traffic;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "bench", about = "Compares tollgate with its peers")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Chart(chart::Args),
    Gateway(gateway::Args),
    Learning(learning::Args),
    Memory(memory::Args),
    Redis(redis::Args),
    Rules(rules::Args),
    Service(service::Args),
    Tools(tools::Args),
    Tower(tower::Args),
    /// One measurement that needs a process of its own; `memory` starts it
    #[command(hide = true)]
    MemoryChild(memory::child::Args),
    /// A gRPC server that decides nothing; `service` starts it
    #[command(hide = true)]
    EmptyHandler(service::empty_handler::Args),
}

/// A tool is missing and must be installed first.
const EXIT_MISSING: u8 = 2;

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Chart(args) => chart::run(&args),
        Command::Gateway(args) => gateway::run(&args),
        Command::Learning(args) => learning::run(&args),
        Command::Memory(args) => memory::run(&args),
        Command::MemoryChild(args) => memory::child::run(&args),
        Command::Redis(args) => redis::run(&args),
        Command::Rules(args) => rules::run(&args),
        Command::Service(args) => service::run(&args),
        Command::Tools(args) => tools::run(&args),
        Command::EmptyHandler(args) => service::empty_handler::run(&args),
        Command::Tower(args) => tower::run(&args),
    };
    let Err(error) = done else {
        return ExitCode::SUCCESS;
    };
    report::error(format_args!("{error:#}"));
    if error.is::<redis::NoServer>() || error.is::<programs::Missing>() {
        ExitCode::from(EXIT_MISSING)
    } else {
        ExitCode::FAILURE
    }
}
