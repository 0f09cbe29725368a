//! What a person types, and what they read when it cannot be done.

mod error;
mod explain;
mod publish;
mod serve;
mod validate;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Parser, Subcommand};
use tollgate::rules::file::Parsed;

pub(crate) use self::error::Error;
use crate::{config, notice, threads};

/// How long the end may wait for whoever still looks at a file. Nothing is lost with it.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(500);

/// Exact, fast and bounded rate limiting.
///
/// Exit codes: 0, 1 when the answer is no, 2 for wrong usage or configuration.
#[derive(Parser)]
#[command(name = "tollgate", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serves what a rule file names: the gateway, rate limit decisions over HTTP (POST /v1/check), metrics and health
    Serve(serve::Arguments),
    /// Says whether rule files are valid, and everything that is wrong with them
    Validate(validate::Arguments),
    /// Shows what the limits of a rule file would make of a request
    Explain(explain::Arguments),
    /// Publishes a rule file to every node that shares its Redis
    Publish(publish::Arguments),
}

/// What a command answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Completion {
    Positive,
    Negative,
}

/// Does what the command line asks; for `serve`, until a signal ends it.
pub(crate) fn run(cli: Cli) -> Result<Completion, Error> {
    threads::check(threads::runtime_workers()).map_err(Error::Threads)?;
    let runtime = tokio::runtime::Runtime::new().map_err(Error::Runtime)?;
    let outcome = runtime.block_on(async {
        match cli.command {
            Command::Serve(arguments) => serve::run(arguments).await.map(|()| Completion::Positive),
            Command::Validate(arguments) => validate::run(&arguments).await,
            Command::Explain(arguments) => explain::run(&arguments).await,
            Command::Publish(arguments) => publish::run(&arguments).await,
        }
    });
    runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    outcome
}

/// The rule file, with its warnings told.
fn load(path: &Path) -> Result<Parsed, Error> {
    let parsed = config::load(path).map_err(Error::Load)?;
    notice::log_problems(parsed.warnings());
    Ok(parsed)
}

/// Says a command's answer. A closed stdout is no reason to fail: whoever closed it has read enough.
fn print(answer: impl std::fmt::Display) {
    _ = writeln!(io::stdout(), "{answer}");
}

/// `--config FILE`, where it is needed.
#[derive(clap::Args)]
struct ConfigArgument {
    /// The rule file
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

/// `--store URL`. It may have a login, which then need not be in the rule file.
#[derive(clap::Args)]
struct StoreArgument {
    /// Where counts are kept, whatever the rule file says: memory, redis://host:6379, …
    #[arg(long, value_name = "URL", env = "TOLLGATE_STORE", hide_env_values = true)]
    store: Option<String>,
}

impl StoreArgument {
    /// The file with this store, if one is given.
    fn apply_to(&self, file: Parsed) -> Result<Parsed, Error> {
        match &self.store {
            Some(store) => {
                file.with_store(store).map_err(|problem| Error::Usage(format!("--store or TOLLGATE_STORE: {problem}")))
            }
            None => Ok(file),
        }
    }
}
