//! `tollgate explain`: shows which limits apply to a request, what they would decide, and which route serves it.
//!
//! Nothing is counted, and no upstream is contacted.

mod address;
mod text;

use std::net::IpAddr;
use std::path::PathBuf;

use axum::http::{HeaderName, HeaderValue};
use tollgate_config::Parsed;
use tollgate_telemetry::notice;

use super::{Completion, ConfigArgument, Error, StoreArgument, load_once, print};
use crate::explanation::{Counts, Json, RequestDescription};
use crate::learning::Learners;

/// Methods that are probably meant when they are written in lower case.
const METHODS: [&str; 8] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"];

pub(super) const EXAMPLES: &str = "\
Examples:
  tollgate explain --config tollgate.yaml GET /api/items -H 'X-User-Id: 42' --ip 192.0.2.7
  tollgate explain --config tollgate.yaml POST /login --json
  tollgate explain --config tollgate.yaml GET / --domain mail --descriptor plan=free";

#[derive(clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    config: ConfigArgument,
    #[command(flatten)]
    store: StoreArgument,
    /// Method of the request
    method: String,
    /// Path of the request, with its query
    path: String,
    /// Header of the request, such as 'X-User-Id: 42'; repeatable
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE", value_parser = header)]
    headers: Vec<(HeaderName, HeaderValue)>,
    /// IP address of the client
    #[arg(long, value_name = "ADDR", value_parser = address)]
    ip: Option<IpAddr>,
    /// Descriptor of a check by the decision service; repeatable
    #[arg(long = "descriptor", value_name = "NAME=VALUE", value_parser = descriptor)]
    descriptors: Vec<(String, String)>,
    /// Domain of a check by the decision service
    #[arg(long)]
    domain: Option<String>,
    /// State file of the server, for the numbers that limits have learned; only for the in-memory store
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// Print the explanation as JSON
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(arguments: &Arguments) -> Result<Completion, Error> {
    let request = arguments.request();
    request.check().map_err(Error::Request)?;
    arguments.warn_of_case();
    let file = arguments.store.apply_to(load_once(&arguments.config.config)?)?;
    let learners = arguments.learners(&file)?;
    let (mut file, learned) = learners.attach(file);
    learners.commit(learned);
    let gate = tollgate_config::open_gate(&file).await.map_err(Error::Open)?;
    let redis = gate.redis().filter(|redis| learners.are_any() && redis.is_store_available());
    // While Redis fails, the numbers in force are as unknown as the counts.
    if let Some(redis) = redis
        && learners.load(&redis).await.is_ok()
    {
        (file, _) = learners.attach(file);
        let rules = file.compile().map_err(|problems| Error::Open(problems.into()))?;
        gate.replace(rules).map_err(|error| Error::Open(error.into()))?;
    }
    let explained = request.explain(&file, (&gate, Counts::Fresh), &learners).await;
    let explained = explained.map_err(|problems| Error::Open(problems.into()))?;
    for name in &explained.dropped {
        notice::warn(format_args!("the gateway drops the header {name}, so limits do not see it"));
    }
    print(if arguments.json { Json::of(&explained).pretty() } else { text::show(&explained) })?;
    Ok(if explained.overall.allowed { Completion::Positive } else { Completion::Negative })
}

impl Arguments {
    /// Returns what limits have learned, as far as a file of the server has it.
    fn learners(&self, file: &Parsed) -> Result<Learners, Error> {
        let Some(state) = &self.state else { return Ok(Learners::default()) };
        if !file.store.is_memory() {
            return Err(Error::Usage(
                "--state is only for the in-memory store, because Redis keeps what limits have learned: remove it, or use \
                 `store: memory`"
                    .to_owned(),
            ));
        }
        if !file.limits.iter().any(|limit| limit.learn().is_some()) {
            notice::warn("--state has no effect, because no limit of the file learns: remove it");
            return Ok(Learners::default());
        }
        Learners::of_server(state).map_err(Error::State)
    }

    fn request(&self) -> RequestDescription {
        RequestDescription {
            method: self.method.clone(),
            path: self.path.clone(),
            headers: self.headers.iter().cloned().collect(),
            ip: self.ip,
            descriptors: self.descriptors.clone(),
            domain: self.domain.clone(),
        }
    }

    /// Warns of a method in lower case that is probably meant in upper case.
    fn warn_of_case(&self) {
        let method = &self.method;
        let upper = method.to_ascii_uppercase();
        if *method != upper && METHODS.contains(&&*upper) {
            notice::warn(format_args!("methods are case-sensitive, and {method} is not {upper}: use {upper}"));
        }
    }
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = text.split_once(':').ok_or("it has no colon: write 'name: value'")?;
    let parsed = name.trim().parse().map_err(|_| format!("`{name}` is not a header name: write 'name: value'"))?;
    let value = HeaderValue::from_bytes(value.trim().as_bytes());
    Ok((parsed, value.map_err(|_| "the value has control characters: remove them")?))
}

fn address(text: &str) -> Result<IpAddr, &'static str> {
    text.parse().map_err(|_| "it is not an IP address: use one such as 192.0.2.7 or 2001:db8::7")
}

fn descriptor(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("it has no equals sign: write name=value")?;
    Ok((name.to_owned(), value.to_owned()))
}
