//! The command line: arguments, subcommands and the errors that end them.

mod control;
mod error;
mod explain;
mod files;
mod init;
mod publish;
mod replay;
mod serve;
mod simulate;
mod top;
mod validate;

use std::fmt::Display;
use std::io::{self, Write};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use clap::{Parser, Subcommand};
use tollgate_config::Parsed;
use tollgate_net::passed_sockets::PassedSockets;
use tollgate_telemetry::notice;

pub(crate) use self::error::Error;
use crate::control::Request;
use crate::{EXIT_USAGE, config, threads};

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
  tollgate replay --config tollgate.yaml a.log   show what the limits would have done to the requests of a log
  tollgate top                                   show who is limited right now by a running server";

#[derive(Subcommand)]
enum Command {
    /// Run the gateway, the decision service (POST /v1/check), metrics and health checks
    #[command(after_help = serve::EXAMPLES)]
    Serve(serve::Arguments),
    /// Read the rule file of a running server again, and print the changes or the problems
    #[command(after_help = control::RELOAD_EXAMPLES)]
    Reload(control::Arguments),
    /// Replace a running server by a new process, without refusing a connection
    #[command(after_help = control::RESTART_EXAMPLES)]
    Restart(control::Arguments),
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
    /// Show who is limited right now, and the state of a running server
    #[command(after_help = top::EXAMPLES)]
    Top(top::Arguments),
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
    let passed = match &cli.command {
        Command::Serve(_) => PassedSockets::from_service_manager().map_err(Error::Usage)?,
        _ => PassedSockets::default(),
    };
    threads::check(threads::runtime_workers()).map_err(Error::Threads)?;
    let runtime = tokio::runtime::Runtime::new().map_err(Error::Runtime)?;
    let outcome = runtime.block_on(async {
        match cli.command {
            Command::Serve(arguments) => serve::run(arguments, passed).await.map(|()| Completion::Positive),
            Command::Reload(arguments) => control::run(&arguments, Request::Reload).await,
            Command::Restart(arguments) => control::run(&arguments, Request::Restart).await,
            Command::Validate(arguments) => validate::run(&arguments).await,
            Command::Explain(arguments) => explain::run(&arguments).await,
            Command::Publish(arguments) => publish::run(&arguments).await,
            Command::Replay(arguments) => replay::run(&arguments),
            Command::Top(arguments) => top::run(arguments).await,
            Command::Init(arguments) => init::run(&arguments).await,
            Command::Schema => files::schema(),
            Command::Completions(arguments) => files::completions(&arguments),
            Command::Man(arguments) => files::man(&arguments),
            Command::Simulate(arguments) => simulate::run(&arguments),
        }
    });
    runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    outcome
}

/// Reads the rule file of a command that needs it once, and logs its warnings.
fn load_once(path: &Path) -> Result<Parsed, Error> {
    let parsed = config::load_once(path).map_err(Error::Load)?;
    notice::log_problems(parsed.warnings());
    Ok(parsed)
}

/// Prints a command's answer, and ends it with a line feed.
fn print(answer: impl Display) -> Result<(), Error> {
    print_bytes(format!("{answer}\n").as_bytes())
}

/// Prints text that ends with a line feed. A closed pipe is not an error: its reader has read enough.
fn print_bytes(text: &[u8]) -> Result<(), Error> {
    let mut stdout = io::stdout().lock();
    written(stdout.write_all(text).and_then(|()| stdout.flush()))
}

/// Returns the error of writing to stdout, unless its reader has read enough.
fn written(result: io::Result<()>) -> Result<(), Error> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Error::Output(error)),
        _ => Ok(()),
    }
}

/// Parses the arguments of the process. Otherwise returns the exit code: help and the version were printed, or the usage
/// is wrong.
pub(crate) fn parse() -> Result<Cli, ExitCode> {
    Cli::try_parse().map_err(|error| {
        let printed = error.print().and_then(|()| io::stdout().flush());
        match written(printed) {
            Err(unwritten) if !error.use_stderr() => {
                unwritten.log();
                ExitCode::from(EXIT_USAGE)
            }
            _ => ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(EXIT_USAGE)),
        }
    })
}

/// Returns a parser of whole numbers in a range.
fn whole_number<T>(range: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| format!("write a whole number from {} to {}", range.start(), range.end()))
    }
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
