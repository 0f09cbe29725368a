//! The command line: arguments, subcommands and the errors that end them.

mod error;
mod explain;
mod files;
mod init;
mod publish;
mod replay;
mod serve;
mod simulate;
mod validate;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Parser, Subcommand};
use tollgate::rules::file::Parsed;

pub(crate) use self::error::Error;
use crate::{config, notice, threads};

/// The longest wait at exit for threads that are still reading a file. They hold nothing that could be lost.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(500);

/// A rate limiter: a gateway, a decision service over HTTP, and tools for rule files
///
/// Exit codes: 0 for success, 1 if the answer is no (a file is not valid, a request is refused), 2 for wrong usage or
/// configuration.
#[derive(Parser)]
#[command(name = "tollgate", version, arg_required_else_help = true, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  tollgate init                                  a commented rule file, from a few questions
  tollgate serve                                 a gateway with built-in rules, in front of a built-in echo server
  tollgate serve --config tollgate.yaml          the gateway and the services of a rule file
  tollgate validate tollgate.yaml                check a rule file
  tollgate explain --config tollgate.yaml GET /  show which limits apply to a request
  tollgate simulate --limit 100 --window 1m      compare the five algorithms on the same traffic
  tollgate replay --config tollgate.yaml a.log   show what the limits would have done to the requests of a log";

#[derive(Subcommand)]
enum Command {
    /// Run the gateway, the decision service (POST /v1/check), metrics and health checks
    #[command(after_help = serve::EXAMPLES)]
    Serve(serve::Arguments),
    /// Check rule files and list every problem
    #[command(after_help = validate::EXAMPLES)]
    Validate(validate::Arguments),
    /// Show which limits apply to a request, and what they would decide
    #[command(after_help = explain::EXAMPLES)]
    Explain(explain::Arguments),
    /// Publish a rule file to all nodes that share its Redis
    #[command(after_help = publish::EXAMPLES)]
    Publish(publish::Arguments),
    /// Show what limits would have done to the requests of access logs
    #[command(after_help = replay::EXAMPLES)]
    Replay(replay::Arguments),
    /// Write a commented rule file to start from
    #[command(after_help = init::EXAMPLES)]
    Init(init::Arguments),
    /// Print the JSON Schema of the rule file, for editors
    #[command(after_help = files::SCHEMA_EXAMPLES)]
    Schema,
    /// Print a completion script for a shell
    #[command(after_help = files::COMPLETIONS_EXAMPLES)]
    Completions(files::CompletionsArguments),
    /// Print the manual page, or write the pages of all commands to a directory
    #[command(after_help = files::MAN_EXAMPLES)]
    Man(files::ManArguments),
    /// Compare the algorithms, or the limits of a rule file, on simulated traffic
    #[command(after_help = simulate::EXAMPLES)]
    Simulate(simulate::Arguments),
}

/// The answer of a command, which becomes its exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Completion {
    Positive,
    Negative,
}

/// Runs the subcommand; `serve` runs until a signal ends it.
pub(crate) fn run(cli: Cli) -> Result<Completion, Error> {
    threads::check(threads::runtime_workers()).map_err(Error::Threads)?;
    let runtime = tokio::runtime::Runtime::new().map_err(Error::Runtime)?;
    let outcome = runtime.block_on(async {
        match cli.command {
            Command::Serve(arguments) => serve::run(arguments).await.map(|()| Completion::Positive),
            Command::Validate(arguments) => validate::run(&arguments).await,
            Command::Explain(arguments) => explain::run(&arguments).await,
            Command::Publish(arguments) => publish::run(&arguments).await,
            Command::Replay(arguments) => replay::run(&arguments),
            Command::Init(arguments) => init::run(&arguments).await,
            Command::Schema => Ok(files::schema()),
            Command::Completions(arguments) => Ok(files::completions(&arguments)),
            Command::Man(arguments) => files::man(&arguments),
            Command::Simulate(arguments) => simulate::run(&arguments),
        }
    });
    runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    outcome
}

/// Reads the rule file and logs its warnings.
fn load(path: &Path) -> Result<Parsed, Error> {
    let parsed = config::load(path).map_err(Error::Load)?;
    notice::log_problems(parsed.warnings());
    Ok(parsed)
}

/// Prints a command's answer. A closed stdout is not an error: its reader has read enough.
fn print(answer: impl std::fmt::Display) {
    _ = writeln!(io::stdout(), "{answer}");
}

/// A required `--config FILE`.
#[derive(clap::Args)]
struct ConfigArgument {
    /// Rule file
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

/// `--store URL`. It may contain credentials, which keeps them out of the rule file.
#[derive(clap::Args)]
struct StoreArgument {
    /// Store to use instead of the one in the rule file: memory, redis://host:6379, …
    #[arg(long, value_name = "URL", env = "TOLLGATE_STORE", hide_env_values = true)]
    store: Option<String>,
}

impl StoreArgument {
    /// Returns the file with this store, if one is given.
    fn apply_to(&self, file: Parsed) -> Result<Parsed, Error> {
        match &self.store {
            Some(store) => {
                file.with_store(store).map_err(|problem| Error::Usage(format!("--store or TOLLGATE_STORE: {problem}")))
            }
            None => Ok(file),
        }
    }
}
