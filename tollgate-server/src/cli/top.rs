//! `tollgate top`: a live view of a server in the terminal, from its admin API.

mod client;
mod screen;
mod view;

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use self::client::{Client, ClientError};
use super::{Completion, Error, print};

pub(super) const EXAMPLES: &str = "\
Examples:
  tollgate top                                           the server on this machine
  tollgate top https://10.0.0.5:8099 --token-file token  another server
  tollgate top --limit per-user --over 1h                the keys of one limit
  tollgate top --once --kind near-limit                  print the tables once
  tollgate top --json | jq '.top.keys[].key'             for a program";

/// The longest wait for the first rates: a server measures them over a second.
const FIRST_RATES: Duration = Duration::from_secs(3);
/// The pause between two questions for them.
const RATES_PAUSE: Duration = Duration::from_millis(250);

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Address of the admin listener
    #[arg(value_name = "URL", default_value = "http://127.0.0.1:8099")]
    url: String,
    /// File whose first line is a token of the server's admin.tokens_file
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// PEM file with the certificate authorities of an https URL, instead of the public ones
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Show the keys of this limit only
    #[arg(long, value_name = "NAME")]
    limit: Option<String>,
    /// Window of the listed keys
    #[arg(long, value_enum, default_value_t = Over::Minute)]
    over: Over,
    /// Kind of the requests that keys are listed by
    #[arg(long, value_enum, default_value_t = Kind::Denied)]
    kind: Kind,
    /// Nodes whose keys are listed: the server, or all nodes on its Redis
    #[arg(long, value_enum, default_value_t = Scope::Node)]
    scope: Scope,
    /// Time between two updates
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = interval, conflicts_with_all = ["once", "json"])]
    interval: Duration,
    /// Print the tables once, as without a terminal
    #[arg(long)]
    once: bool,
    /// Print the answers of the server once, as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Over {
    #[value(name = "1m")]
    Minute,
    #[value(name = "1h")]
    Hour,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Refused with 429: over the limit, or banned; neither blocked (403) nor refused because the store fails (503)
    Denied,
    /// Over a limit in shadow mode, and not refused
    #[value(alias = "shadow_denied")]
    ShadowDenied,
    /// Allowed, with less than 10 % of the quota left
    #[value(alias = "near_limit")]
    NearLimit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Scope {
    Node,
    Fleet,
}

/// The keys that are shown.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Query {
    over: Over,
    kind: Kind,
    scope: Scope,
    limit: Option<String>,
    count: usize,
}

impl Query {
    fn target(&self) -> String {
        const PATH: &str = "/v1/top?";
        let mut query = form_urlencoded::Serializer::for_suffix(PATH.to_owned(), PATH.len());
        query.append_pair("over", self.over.as_str()).append_pair("kind", self.kind.as_str());
        query.append_pair("scope", self.scope.as_str()).append_pair("count", &self.count.to_string());
        if let Some(limit) = &self.limit {
            query.append_pair("limit", limit);
        }
        query.finish()
    }
}

impl Over {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Minute => "1m",
            Self::Hour => "1h",
        }
    }
}

impl Kind {
    const ALL: [Self; 3] = [Self::Denied, Self::ShadowDenied, Self::NearLimit];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Denied => "denied",
            Self::ShadowDenied => "shadow_denied",
            Self::NearLimit => "near_limit",
        }
    }

    /// Returns the kind that is this many places later.
    fn later_by(self, places: usize) -> Self {
        Self::ALL[(self as usize + places) % Self::ALL.len()]
    }
}

impl Scope {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Fleet => "fleet",
        }
    }
}

/// The answers of the server at one time.
#[derive(Clone, Debug)]
struct Snapshot {
    status: Value,
    live: Value,
    top: Value,
}

pub(super) async fn run(arguments: Arguments) -> Result<Completion, Error> {
    let Arguments { url, token_file, ca, limit, over, kind, scope, interval, once, json } = arguments;
    let client = Client::new(&url, token_file.as_deref(), ca.as_deref()).map_err(Error::Usage)?;
    let query = Query { over, kind, scope, limit, count: if once || json { 20 } else { 100 } };
    if json || once || !is_terminal() {
        let snapshot = once_with_rates(&client, &query).await.map_err(|error| Error::Request(error.to_string()))?;
        if json {
            let Snapshot { status, live, top } = snapshot;
            print(json!({ "status": status, "live": live, "top": top }))?;
        } else {
            print(view::whole(&snapshot, client.url()).trim_end())?;
        }
        return Ok(Completion::Positive);
    }
    screen::run(client, query, interval).await?;
    Ok(Completion::Positive)
}

fn is_terminal() -> bool {
    io::stdout().is_terminal()
        && io::stdin().is_terminal()
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Returns a snapshot with rates, which a server has a second after the first question for them.
async fn once_with_rates(client: &Client, query: &Query) -> Result<Snapshot, ClientError> {
    let end = Instant::now() + FIRST_RATES;
    loop {
        let snapshot = client.snapshot(query).await?;
        let has_rates = snapshot.live["interval"].as_f64().is_some_and(|interval| interval > 0.0);
        if has_rates || Instant::now() >= end {
            return Ok(snapshot);
        }
        sleep(RATES_PAUSE).await;
    }
}

fn interval(text: &str) -> Result<Duration, String> {
    match super::simulate::duration(text)? {
        interval if interval < Duration::from_millis(100) => Err("shorter than 100ms: use 1s, or more".to_owned()),
        interval if interval > Duration::from_secs(3600) => Err("longer than an hour: use 1h at most".to_owned()),
        interval => Ok(interval),
    }
}
