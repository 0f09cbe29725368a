//! `tollgate explain`: shows which limits apply to a request, what they would decide, and which route serves it.
//!
//! Nothing is counted, and no upstream is contacted.

mod address;
mod json;
mod overall;
mod text;

use std::net::IpAddr;
use std::path::PathBuf;

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header as header_names};
use tollgate::internal::{CleanPath, Unreadable, check_host, check_method};
use tollgate::rules::file::Parsed;
use tollgate::rules::file::internal::RouteRule;
use tollgate::rules::{Facts, PathReading};
use tollgate::{Explanation, Gate};

use self::overall::Overall;
use super::{Completion, ConfigArgument, Error, StoreArgument, load, print};
use crate::learning::Learners;
use crate::{gateway, notice};

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

/// Source of the counts in the explanation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counts {
    /// A new limiter: only the server itself can read its in-memory store.
    Fresh,
    /// The store.
    Live,
    /// None: the store does not answer.
    Unknown,
}

/// Where the gateway would send the request.
#[derive(Clone, Copy, Debug)]
enum Routed<'a> {
    /// The file has no gateway, or the request is a check for the decision service.
    NoGateway,
    NoRoute,
    By(&'a RouteRule),
}

/// Everything that the output shows.
struct Explained<'a> {
    arguments: &'a Arguments,
    routed: Routed<'a>,
    file: &'a Parsed,
    explanation: Explanation,
    overall: Overall,
    counts: Counts,
    learners: &'a Learners,
}

pub(super) async fn run(arguments: &Arguments) -> Result<Completion, Error> {
    arguments.check()?;
    let file = arguments.store.apply_to(load(&arguments.config.config)?)?;
    let learners = Learners::restored(arguments.state.as_deref());
    let (mut file, learned) = learners.attach(file);
    learners.commit(learned);
    let gate = Gate::open(&file).await.map_err(Error::Open)?;
    let redis = gate.redis().filter(|redis| learners.are_any() && redis.is_store_available());
    // While Redis fails, the numbers in force are as unknown as the counts.
    if let Some(redis) = redis
        && learners.load(&redis).await.is_ok()
    {
        (file, _) = learners.attach(file);
        let rules = file.compile().map_err(|problems| Error::Open(problems.into()))?;
        gate.replace(rules).map_err(|error| Error::Open(error.into()))?;
    }
    let mut headers: HeaderMap = arguments.headers.iter().cloned().collect();
    if !arguments.is_service_check() {
        drop_headers(&file, &mut headers, arguments.ip)?;
    }
    let routed = arguments.routed(&file, &headers)?;
    let explanation = arguments.explain(&gate, &headers, (routed, path_reading(&file, routed))).await;
    let counts = match gate.redis() {
        None => Counts::Fresh,
        Some(store) if store.is_store_available() => Counts::Live,
        Some(_) => Counts::Unknown,
    };
    let mut overall = Overall::of(&explanation, &file);
    if let Err(problem) = arguments.check_readable(&file, routed, &headers) {
        overall.refuse_unreadable(&problem);
    }
    let explained = Explained { arguments, routed, file: &file, explanation, overall, counts, learners: &learners };
    print(if arguments.json { json::show(&explained) } else { text::show(&explained) });
    Ok(if explained.overall.allowed { Completion::Positive } else { Completion::Negative })
}

impl Arguments {
    /// Checks the method and the path.
    fn check(&self) -> Result<(), Error> {
        let Self { method, path, .. } = self;
        if Method::from_bytes(method.as_bytes()).is_err() {
            return Err(Error::Request(format!("`{method}` is not an HTTP method: use one such as GET")));
        }
        let upper = method.to_ascii_uppercase();
        if *method != upper && METHODS.contains(&&*upper) {
            notice::warn(format_args!("methods are case-sensitive, and {method} is not {upper}: use {upper}"));
        }
        if path.starts_with('/') {
            return Ok(());
        }
        let url = path.parse::<Uri>().ok().filter(|uri| uri.scheme().is_some());
        Err(Error::Request(match url.as_ref().and_then(|url| url.authority().zip(url.path_and_query())) {
            Some((host, target)) => {
                format!("`{path}` is a URL: use its path, {target}, and pass its host with -H 'host: {host}'")
            }
            None => format!("the path `{path}` does not begin with a slash: use /{path}"),
        }))
    }

    /// Returns whether the arguments describe a check for the decision service.
    fn is_service_check(&self) -> bool {
        self.domain.is_some() || !self.descriptors.is_empty()
    }

    /// Returns the path and query that the gateway forwards and limits count by, or `None` if it refuses the path.
    fn forwarded(&self, reading: PathReading) -> Option<String> {
        let (path, query) = self.path.split_once('?').map_or((&*self.path, None), |(path, query)| (path, Some(query)));
        let path = CleanPath::new(path).ok()?;
        let path = path.forwarded(reading).ok()?;
        Some(query.map_or(path.to_string(), |query| format!("{path}?{query}")))
    }

    /// Checks that the request has a single reading, as the gateway does before any limit.
    fn check_readable(&self, file: &Parsed, routed: Routed<'_>, headers: &HeaderMap) -> Result<(), Unreadable> {
        if matches!(routed, Routed::NoGateway) {
            return Ok(());
        }
        let path = self.path.split('?').next().unwrap_or_default();
        check_method(&self.method, path)?;
        headers.get(header_names::HOST).map_or(Ok(()), |host| check_host(host.as_bytes()))?;
        CleanPath::new(path)?.forwarded(path_reading(file, routed)).map(|_| ())
    }

    fn routed<'f>(&self, file: &'f Parsed, headers: &HeaderMap) -> Result<Routed<'f>, Error> {
        let Some(gateway) = file.gateway.as_ref().filter(|_| !self.is_service_check()) else {
            return Ok(Routed::NoGateway);
        };
        let routes = file.routes().map_err(|problems| Error::Open(problems.into()))?;
        let reading = PathReading { case: path_reading(file, Routed::NoRoute).case, ..PathReading::AS_WRITTEN };
        let target = self.forwarded(reading);
        let target = target.as_deref().unwrap_or(&self.path);
        let found = routes.find(&Facts::new(&self.method, target).headers(headers).path_reading(reading));
        Ok(found.and_then(|number| gateway.routes.get(number)).map_or(Routed::NoRoute, Routed::By))
    }

    async fn explain(
        &self,
        gate: &Gate,
        headers: &HeaderMap,
        (routed, reading): (Routed<'_>, PathReading),
    ) -> Explanation {
        let descriptors: Vec<(&str, &str)> =
            self.descriptors.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let target = self.forwarded(reading).filter(|_| !matches!(routed, Routed::NoGateway));
        let target = target.as_deref().unwrap_or(&self.path);
        let mut facts = Facts::new(&self.method, target).headers(headers).descriptors(&descriptors);
        if let Routed::By(route) = routed {
            facts = facts.route(route.name()).path_reading(reading);
        }
        if let Some(address) = self.ip {
            facts = facts.peer(address);
        }
        if let Some(domain) = &self.domain {
            facts = facts.domain(domain);
        }
        gate.explain(&facts).await
    }
}

/// Removes the headers that the gateway of the file would drop, and warns of them.
fn drop_headers(file: &Parsed, headers: &mut HeaderMap, peer: Option<IpAddr>) -> Result<(), Error> {
    let sent: Vec<HeaderName> = headers.keys().cloned().collect();
    gateway::drop_headers(file, headers, peer).map_err(|problems| Error::Open(problems.into()))?;
    for name in sent.iter().filter(|name| !headers.contains_key(*name)) {
        notice::warn(format_args!("the gateway drops the header {name}, so limits do not see it"));
    }
    Ok(())
}

/// Returns how the upstreams of the route read paths, or the default of the gateway without a route.
fn path_reading(file: &Parsed, routed: Routed<'_>) -> PathReading {
    let gateway =
        file.gateway.as_ref().map_or_else(PathReading::default, |gateway| gateway.paths.over(PathReading::default()));
    match routed {
        Routed::By(route) => route.paths.over(gateway),
        Routed::NoGateway | Routed::NoRoute => gateway,
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
