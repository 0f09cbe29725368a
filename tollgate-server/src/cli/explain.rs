//! `tollgate explain`: what the limits of a rule file would make of a request, and which route the gateway would take.
//! Nothing is taken for it, and nobody is asked.

mod address;
mod json;
mod overall;
mod text;

use std::net::IpAddr;

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header as header_names};
use tollgate::internal::{CleanPath, Unreadable, check_host, check_method};
use tollgate::rules::file::Parsed;
use tollgate::rules::file::internal::RouteRule;
use tollgate::rules::{Facts, PathReading};
use tollgate::{Explanation, Gate};

use self::overall::Overall;
use super::{Completion, ConfigArgument, Error, StoreArgument, load, print};
use crate::{gateway, notice};

/// Those that people mean when they write them in small letters.
const METHODS: [&str; 8] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"];

#[derive(clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    config: ConfigArgument,
    #[command(flatten)]
    store: StoreArgument,
    /// The method of the request
    method: String,
    /// The path of the request, with its query if it has one
    path: String,
    /// A header of the request, such as 'X-User-Id: 42'; may be given several times
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE", value_parser = header)]
    headers: Vec<(HeaderName, HeaderValue)>,
    /// The address that the request came from
    #[arg(long, value_name = "ADDR", value_parser = address)]
    ip: Option<IpAddr>,
    /// A descriptor, as a client of the decision service gives it; may be given several times
    #[arg(long = "descriptor", value_name = "NAME=VALUE", value_parser = descriptor)]
    descriptors: Vec<(String, String)>,
    /// The domain that a client of the decision service names
    #[arg(long)]
    domain: Option<String>,
    /// The explanation as JSON, for programs
    #[arg(long)]
    json: bool,
}

/// Whose counts the explanation tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counts {
    /// Those of a limiter that has just begun: only the server that has the memory could tell its own.
    Fresh,
    /// Those of the store, at this moment.
    Live,
    /// Nobody's: the store does not answer.
    Unknown,
}

/// Where the gateway would send the request.
#[derive(Clone, Copy, Debug)]
enum Routed<'a> {
    /// The file has no gateway, or it is a question that only the decision service is asked.
    NoGateway,
    NoRoute,
    By(&'a RouteRule),
}

/// What is to be shown.
struct Explained<'a> {
    arguments: &'a Arguments,
    routed: Routed<'a>,
    file: &'a Parsed,
    explanation: Explanation,
    overall: Overall,
    counts: Counts,
}

pub(super) async fn run(arguments: &Arguments) -> Result<Completion, Error> {
    arguments.check()?;
    let file = arguments.store.apply_to(load(&arguments.config.config)?)?;
    let gate = Gate::open(&file).await.map_err(Error::Open)?;
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
    let explained = Explained { arguments, routed, file: &file, explanation, overall, counts };
    print(if arguments.json { json::show(&explained) } else { text::show(&explained) });
    Ok(if explained.overall.allowed { Completion::Positive } else { Completion::Negative })
}

impl Arguments {
    /// Whether it can be a request that a client sends.
    fn check(&self) -> Result<(), Error> {
        let Self { method, path, .. } = self;
        if Method::from_bytes(method.as_bytes()).is_err() {
            return Err(Error::Request(format!("`{method}` is no method; write one such as GET")));
        }
        let upper = method.to_ascii_uppercase();
        if *method != upper && METHODS.contains(&&*upper) {
            notice::warn(format_args!("methods are case-sensitive, and {method} is not {upper}; write {upper}"));
        }
        if path.starts_with('/') {
            return Ok(());
        }
        let url = path.parse::<Uri>().ok().filter(|uri| uri.scheme().is_some());
        Err(Error::Request(match url.as_ref().and_then(|url| url.authority().zip(url.path_and_query())) {
            Some((host, target)) => {
                format!("`{path}` is a URL; write its path, {target}, and give its host with -H 'host: {host}'")
            }
            None => format!("the path `{path}` does not begin with a slash; write /{path}"),
        }))
    }

    /// Whether only the decision service is asked this.
    fn is_service_check(&self) -> bool {
        self.domain.is_some() || !self.descriptors.is_empty()
    }

    /// The path and query that the gateway forwards, by which limits count; `None` if it refuses the path.
    fn forwarded(&self, reading: PathReading) -> Option<String> {
        let (path, query) = self.path.split_once('?').map_or((&*self.path, None), |(path, query)| (path, Some(query)));
        let path = CleanPath::new(path).ok()?;
        let path = path.forwarded(reading).ok()?;
        Some(query.map_or(path.to_string(), |query| format!("{path}?{query}")))
    }

    /// Whether the gateway could read the request in one way, before any limit looks at it.
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

/// How the upstreams of a route read paths; as the gateway has it where there is none.
fn path_reading(file: &Parsed, routed: Routed<'_>) -> PathReading {
    let gateway =
        file.gateway.as_ref().map_or_else(PathReading::default, |gateway| gateway.paths.over(PathReading::default()));
    match routed {
        Routed::By(route) => route.paths.over(gateway),
        Routed::NoGateway | Routed::NoRoute => gateway,
    }
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = text.split_once(':').ok_or("there is no colon in it; write 'name: value'")?;
    let parsed = name.trim().parse().map_err(|_| format!("`{name}` is no name of a header; write 'name: value'"))?;
    let value = HeaderValue::from_bytes(value.trim().as_bytes());
    Ok((parsed, value.map_err(|_| "the value has control characters; write it without")?))
}

fn address(text: &str) -> Result<IpAddr, &'static str> {
    text.parse().map_err(|_| "it is no IP address; write one such as 192.0.2.7 or 2001:db8::7")
}

fn descriptor(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("there is no equals sign in it; write name=value")?;
    Ok((name.to_owned(), value.to_owned()))
}
