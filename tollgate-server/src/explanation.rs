//! Explains which limits apply to a request, what they would decide, and which route serves it: for `tollgate explain` and
//! for the admin API. Nothing is counted, and no upstream is contacted.

mod json;
mod overall;

use std::net::IpAddr;

use axum::http::{HeaderMap, HeaderName, Method, Uri, header as header_names};
use tollgate_config::internal::{HeaderFrom, HeaderSource, HeaderValueRule, KeyPart, RouteRule};
use tollgate_config::{Parsed, Problems};
use tollgate_rules::internal::{CleanPath, HeaderFacts, Unreadable, check_host, check_method};
use tollgate_rules::{Explanation, Facts, Gate, PathReading};

pub(crate) use self::json::Json;
pub(crate) use self::overall::{Overall, counts_after, policy};
use crate::gateway;
use crate::learning::Learners;

/// A request to explain.
#[derive(Debug, Default)]
pub(crate) struct RequestDescription {
    pub(crate) method: String,
    /// With its query.
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) ip: Option<IpAddr>,
    pub(crate) descriptors: Vec<(String, String)>,
    pub(crate) domain: Option<String>,
}

/// Source of the counts in the explanation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counts {
    /// A new limiter: only the server itself can read its in-memory store.
    Fresh,
    /// The store.
    Live,
    /// None: the store does not answer.
    Unknown,
}

/// Where the gateway would send the request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Routed<'a> {
    /// The file has no gateway, or the request is a check for the decision service.
    NoGateway,
    NoRoute,
    By(&'a RouteRule),
}

/// Everything that the output shows.
pub(crate) struct Explained<'a> {
    pub(crate) request: &'a RequestDescription,
    pub(crate) routed: Routed<'a>,
    pub(crate) file: &'a Parsed,
    pub(crate) explanation: Explanation,
    pub(crate) overall: Overall,
    pub(crate) counts: Counts,
    pub(crate) learners: &'a Learners,
    /// Headers that the gateway drops, so that limits do not see them.
    pub(crate) dropped: Vec<HeaderName>,
    /// Headers that the route sets to facts about the request.
    pub(crate) fact_headers: Vec<FactHeader<'a>>,
}

/// A header that a route sets to a fact about the request.
pub(crate) struct FactHeader<'a> {
    pub(crate) name: &'a str,
    pub(crate) source: &'a HeaderSource,
    pub(crate) value: FactValue,
}

/// The value of a header that a route sets to a fact about the request.
pub(crate) enum FactValue {
    Known(String),
    /// The request lacks the fact, so the header is removed.
    Missing,
    /// The description of the request lacks the fact, which the gateway would know.
    Unknown,
}

impl RequestDescription {
    /// Checks the method and the path. Returns the problem and its fix.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Self { method, path, .. } = self;
        if Method::from_bytes(method.as_bytes()).is_err() {
            return Err(format!("`{method}` is not an HTTP method: use one such as GET"));
        }
        if path.starts_with('/') {
            return Ok(());
        }
        let url = path.parse::<Uri>().ok().filter(|uri| uri.scheme().is_some());
        Err(match url.as_ref().and_then(|url| url.authority().zip(url.path_and_query())) {
            Some((host, target)) => {
                format!("`{path}` is a URL: use its path, {target}, and pass its host with -H 'host: {host}'")
            }
            None => format!("the path `{path}` does not begin with a slash: use /{path}"),
        })
    }

    /// Explains the request by the rules and the counts of a gate. `file` is the rule file of these rules.
    pub(crate) async fn explain<'a>(
        &'a self,
        file: &'a Parsed,
        (gate, counts): (&Gate, Counts),
        learners: &'a Learners,
    ) -> Result<Explained<'a>, Problems> {
        let mut headers = self.headers.clone();
        if !self.is_service_check() {
            gateway::drop_headers(file, &mut headers, self.ip)?;
        }
        let dropped = self.headers.keys().filter(|name| !headers.contains_key(*name)).cloned().collect();
        let routed = self.routed(file, &headers)?;
        let explanation = self.explain_limits(gate, &headers, (routed, path_reading(file, routed))).await;
        let counts = match gate.redis() {
            None => counts,
            Some(store) if store.is_store_available() => Counts::Live,
            Some(_) => Counts::Unknown,
        };
        let fact_headers = self.fact_headers(gate, &headers, routed, explanation.limit.as_deref());
        let mut overall = Overall::of(&explanation, file);
        if let Err(problem) = self.check_readable(file, routed, &headers) {
            overall.refuse_unreadable(&problem);
        }
        Ok(Explained { request: self, routed, file, explanation, overall, counts, learners, dropped, fact_headers })
    }

    /// Returns whether this is a check for the decision service.
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
        let mut hosts = headers.get_all(header_names::HOST).iter();
        hosts.next().map_or(Ok(()), |host| check_host(host.as_bytes()))?;
        if hosts.next().is_some() {
            return Err(Unreadable::SeveralHosts);
        }
        CleanPath::new(path)?.forwarded(path_reading(file, routed)).map(|_| ())
    }

    fn routed<'f>(&self, file: &'f Parsed, headers: &HeaderMap) -> Result<Routed<'f>, Problems> {
        let Some(gateway) = file.gateway.as_ref().filter(|_| !self.is_service_check()) else {
            return Ok(Routed::NoGateway);
        };
        let routes = file.routes()?;
        let reading = PathReading { case: path_reading(file, Routed::NoRoute).case, ..PathReading::AS_WRITTEN };
        let target = self.forwarded(reading);
        let target = target.as_deref().unwrap_or(&self.path);
        let found = routes.find(&Facts::new(&self.method, target).headers(headers).path_reading(reading));
        Ok(found.and_then(|number| gateway.routes.get(number)).map_or(Routed::NoRoute, Routed::By))
    }

    /// Returns the headers that the route sets to facts about the request. Its facts here have no certificate.
    fn fact_headers<'f>(
        &self,
        gate: &Gate,
        headers: &HeaderMap,
        routed: Routed<'f>,
        limit: Option<&str>,
    ) -> Vec<FactHeader<'f>> {
        let Routed::By(route) = routed else { return Vec::new() };
        let mut facts = Facts::new(&self.method, &self.path).headers(headers).route(route.name());
        if let Some(address) = self.ip {
            facts = facts.peer(address);
        }
        let rules = gate.rules();
        let facts = HeaderFacts::new(&rules, &facts, limit);
        let is_echo = route.upstream.iter().flatten().any(|upstream| upstream.url.is_echo());
        let set = route.request_headers.set.iter().filter(|_| route.respond.is_none() && !is_echo);
        let is_unknown = |source: &HeaderSource| {
            source.is_of_certificate() || self.ip.is_none() && matches!(source, HeaderSource::Part(KeyPart::Ip { .. }))
        };
        set.filter_map(|(name, value)| match value {
            HeaderValueRule::From(HeaderFrom { from, .. }) => {
                let value = match facts.value(&from.compile()) {
                    Some(value) => FactValue::Known(value),
                    None if is_unknown(from) => FactValue::Unknown,
                    None => FactValue::Missing,
                };
                Some(FactHeader { name, source: from, value })
            }
            _ => None,
        })
        .collect()
    }

    async fn explain_limits(
        &self,
        gate: &Gate,
        headers: &HeaderMap,
        (routed, reading): (Routed<'_>, PathReading),
    ) -> Explanation {
        let explaining = {
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
            gate.explain(&facts)
        };
        explaining.await
    }
}

/// Returns how the upstreams of the route read paths, or the default of the gateway without a route.
pub(crate) fn path_reading(file: &Parsed, routed: Routed<'_>) -> PathReading {
    let gateway =
        file.gateway.as_ref().map_or_else(PathReading::default, |gateway| gateway.paths.over(PathReading::default()));
    match routed {
        Routed::By(route) => route.paths.over(gateway),
        Routed::NoGateway | Routed::NoRoute => gateway,
    }
}
