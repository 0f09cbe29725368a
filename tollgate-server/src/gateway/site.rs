//! The routes and settings of a rule file, ready to serve requests. Replaced as a whole on reload.

mod rewrite;
mod upstreams;

use std::borrow::Cow;
use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, Response, StatusCode, Uri};
use tollgate::internal::{CleanPath, Unreadable};
use tollgate::rules::file::internal::{
    AccessLogRule, Balance, HealthCheckRule, HostHeader, RespondRule, RouteRule, SettingError, UnderscoreHeaders,
    UpstreamHeader, UpstreamRule,
};
use tollgate::rules::file::{Parsed, Problems};
use tollgate::rules::{EncodedSlash, Facts, PathParameters, PathReading, Routes, TrustedProxies};

pub(super) use self::rewrite::Edits;
pub(crate) use self::rewrite::upstream_urls;
use self::rewrite::{PathRewrite, with_path};
pub(super) use self::upstreams::{Outages, RoutedUpstream};
use super::access_log::AccessLog;
use super::deadline::{ClientTimeouts, Tick, Wait};
use super::failure::Failure;
use super::head::headers::HeaderFilter;
use super::listener::tls::Tls;
use super::tally::RouteTally;
use super::upstream::reuse::ReusePolicy;
use super::upstream::tls::UpstreamTls;
use super::upstream::{Eject, Target, UpstreamAddress, UpstreamProtocol};

/// The settings that can change while the gateway runs.
pub(super) struct Site {
    pub(super) routes: Vec<Route>,
    found: Routes,
    /// How upstreams interpret paths, unless their route overrides it.
    path_reading: PathReading,
    pub(super) proxies: TrustedProxies,
    /// How headers with an underscore in their name are treated.
    pub(super) underscores: UnderscoreHeaders,
    upstream_headers: Vec<UpstreamHeader>,
    /// The maximum number of connections per client address; by default a share of all.
    pub(super) max_per_address: Option<u32>,
    pub(super) max_body: u64,
    pub(super) max_head: usize,
    pub(super) max_queued: u32,
    pub(super) timeouts: ClientTimeouts,
    /// The idle timeout of upgraded connections.
    pub(super) upgraded: Wait,
    /// The access log, if there is one.
    pub(super) log: Option<Arc<AccessLog>>,
}

/// A route.
pub(super) struct Route {
    pub(super) name: String,
    pub(super) action: RouteAction,
    path_rewrite: PathRewrite,
    pub(super) path_reading: PathReading,
    pub(super) host: HostHeader,
    pub(super) request_edits: Edits,
    pub(super) response_edits: Edits,
    pub(super) timeout: Wait,
    pub(super) connect_timeout: Duration,
    pub(super) retries: u8,
    pub(super) eject: Eject,
    pub(super) reuse: ReusePolicy,
    health_check: Option<HealthCheckRule>,
    balance: Balance,
    turn: AtomicUsize,
    tallies: Tallies,
}

/// The counters of a route, by worker.
type Tallies = Arc<[Arc<RouteTally>]>;

/// What a route does with a request.
pub(super) enum RouteAction {
    Upstreams(Box<[WeightedUpstream]>),
    Respond(FixedResponse),
    Echo,
}

/// An upstream with the settings of one route.
pub(super) struct WeightedUpstream {
    pub(super) target: Arc<Target>,
    weight: u32,
    /// The path of its URL, which is prepended to the request's. URLs that differ only in the path share a target.
    prefix: Option<String>,
}

impl WeightedUpstream {
    fn new(target: Arc<Target>, rule: &UpstreamRule) -> Self {
        Self { target, weight: rule.weight, prefix: rewrite::prefix(rule) }
    }
}

/// A response with fixed content.
pub(super) struct FixedResponse {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl FixedResponse {
    fn new(rule: &RespondRule) -> Self {
        let status = StatusCode::from_u16(rule.status).unwrap_or_default();
        let has_body = ![StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status);
        let body = if has_body { Bytes::from(rule.body.clone()) } else { Bytes::new() };
        Self { status, headers: rewrite::map(&rule.headers), body }
    }

    pub(super) fn response(&self) -> Response<Bytes> {
        let mut response = Response::new(self.body.clone());
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers.clone();
        response
    }
}

/// The state that a site takes over from the previous one.
struct Carryover {
    workers: usize,
    /// The upstreams by address, so that their connections stay open.
    targets: HashMap<UpstreamAddress, Arc<Target>>,
    /// The counters by route name, so that they keep counting.
    tallies: HashMap<String, Tallies>,
}

impl Carryover {
    fn of(before: Option<&Site>, workers: usize) -> Self {
        let mut carryover = Self { workers, targets: HashMap::new(), tallies: HashMap::new() };
        for route in before.into_iter().flat_map(|before| &before.routes) {
            carryover.tallies.insert(route.name.clone(), Arc::clone(&route.tallies));
            carryover.targets.extend(route.targets().map(|target| (target.address.clone(), Arc::clone(target))));
        }
        carryover
    }

    fn tallies(&mut self, name: &str) -> Tallies {
        let new = || (0..self.workers).map(|_| Arc::new(RouteTally::new(name))).collect();
        Arc::clone(self.tallies.entry(name.to_owned()).or_insert_with(new))
    }
}

impl Site {
    /// Creates a site from a rule file. Upstreams and counters of the previous site are taken over. Lost lines of the
    /// access log are counted in `lost`.
    pub(super) fn new(
        file: &Parsed,
        before: Option<&Self>,
        workers: usize,
        lost: &Arc<AtomicU64>,
    ) -> Result<Self, Problems> {
        let gateway = file.gateway.clone().unwrap_or_default();
        let found = file.routes()?;
        let mut carryover = Carryover::of(before, workers);
        let path_reading = gateway.paths.over(PathReading::default());
        let mut routes = Vec::new();
        let refused = |error| file.problems([error]);
        for (index, rule) in gateway.routes.iter().enumerate() {
            let route = Route::new(rule, file.folder(), path_reading, &mut carryover);
            routes.push(route.map_err(|error| refused(of_route(error, index)))?);
        }
        Ok(Self {
            routes,
            found,
            path_reading,
            proxies: file.trusted_proxies()?,
            underscores: gateway.underscore_headers,
            upstream_headers: gateway.tell_upstreams.clone(),
            max_per_address: gateway.max_connections_per_address,
            max_body: gateway.max_body.map_or(u64::MAX, |size| size.bytes()),
            max_head: usize::try_from(gateway.max_head.bytes()).unwrap_or(usize::MAX),
            max_queued: gateway.max_queued,
            timeouts: ClientTimeouts::of(&gateway.timeouts),
            upgraded: Wait::at_least(gateway.timeouts.upgraded.duration()),
            log: match &gateway.access_log {
                Some(rule) => {
                    let log = log(rule, before, || AccessLog::open(rule, file.folder(), workers, lost));
                    Some(log.map_err(|error| refused(error.of("access_log").of("gateway")))?)
                }
                None => None,
            },
        })
    }

    /// Returns everything that would prevent the gateway from serving this file at these addresses, without opening
    /// anything: problems with the files that it names, and upstreams that are the gateway itself. Problems with the
    /// rules are reported elsewhere.
    pub(super) fn errors(file: &Parsed, listens: &[String]) -> Vec<SettingError> {
        let Some(gateway) = &file.gateway else { return Vec::new() };
        let mut carryover = Carryover::of(None, 1);
        let mut found = Vec::new();
        let path_reading = gateway.paths.over(PathReading::default());
        for (index, rule) in gateway.routes.iter().enumerate() {
            let errors = match Route::new(rule, file.folder(), path_reading, &mut carryover) {
                Ok(route) => upstreams::errors(&route, listens),
                Err(error) => vec![error],
            };
            found.extend(errors.into_iter().map(|error| of_route(error, index)));
        }
        let of_tls = gateway.tls.iter().filter_map(|tls| Tls::new(tls, file.folder(), "gateway.tls").err()).flatten();
        found.extend(of_tls.map(|error| error.of("tls").of("gateway")));
        found
    }

    /// Returns the index of the route for a request with a normalized, unambiguous path.
    pub(super) fn find(&self, facts: &Facts<'_>) -> Option<usize> {
        self.found.find(&facts.path_reading(PathReading { case: self.path_reading.case, ..PathReading::AS_WRITTEN }))
    }

    /// Finds the route of a request, and the target for limits and upstreams. `find` returns the route for a path and
    /// query. The target is `None` if it is the client's.
    pub(super) fn normalize(
        &self,
        uri: &Uri,
        find: impl Fn(&str) -> Option<usize>,
    ) -> Result<(Option<usize>, Option<Uri>), Unreadable> {
        let path = CleanPath::new(uri.path())?;
        if is_normal(uri, &path) {
            return Ok((find(uri.path_and_query().map_or("/", PathAndQuery::as_str)), None));
        }
        let route = find(&with_query(&self.routing_path(&path)?, uri));
        // The path is valid in a URI, but it may be too long. Then there is no route.
        Ok(match with_path(uri, with_query(&self.forwarded_path(&path, route)?, uri)) {
            Ok(uri) => (route, Some(uri)),
            Err(_) => (None, None),
        })
    }

    /// Returns the target for limits and the upstreams of a route, unless it is the client's.
    pub(super) fn normalized_for(&self, uri: &Uri, route: Option<usize>) -> Option<Uri> {
        let path = CleanPath::new(uri.path()).ok().filter(|path| !is_normal(uri, path))?;
        with_path(uri, with_query(&self.forwarded_path(&path, route).ok()?, uri)).ok()
    }

    /// Returns the path that determines the route. The route's own settings are not known yet, so the gateway's
    /// settings apply, and nothing is refused before the route is found.
    fn routing_path<'p>(&self, path: &'p CleanPath<'_>) -> Result<Cow<'p, str>, Unreadable> {
        let mut reading = self.path_reading;
        if reading.encoded_slash == EncodedSlash::Refuse {
            reading.encoded_slash = EncodedSlash::Keep;
        }
        if reading.parameters == PathParameters::Refuse {
            reading.parameters = PathParameters::Keep;
        }
        path.forwarded(reading)
    }

    /// Returns the path for the upstreams of a route.
    ///
    /// # Errors
    ///
    /// Fails if the route refuses something in the path.
    fn forwarded_path<'p>(&self, path: &'p CleanPath<'_>, route: Option<usize>) -> Result<Cow<'p, str>, Unreadable> {
        path.forwarded(route.map_or(self.path_reading, |number| self.routes[number].path_reading))
    }

    /// Adds the route to the facts of a request.
    pub(super) fn with_route<'s: 'f, 'f>(&'s self, facts: Facts<'f>, route: Option<usize>) -> Facts<'f> {
        match route {
            Some(number) => {
                let route = &self.routes[number];
                facts.route(&route.name).path_reading(route.path_reading)
            }
            None => facts.path_reading(self.path_reading),
        }
    }

    /// Returns the filter for the headers of requests from that address.
    pub(super) fn header_filter(&self, peer: IpAddr) -> HeaderFilter<'_> {
        HeaderFilter::new(self.underscores, &self.proxies, peer)
    }

    pub(super) fn adds_header(&self, header: UpstreamHeader) -> bool {
        self.upstream_headers.contains(&header)
    }
}

/// Returns whether a target needs no change for limits and upstreams. [`Uri::path`] returns `/` for a target without a
/// path, but nothing would be sent.
fn is_normal(uri: &Uri, path: &CleanPath<'_>) -> bool {
    let has_path = uri.path_and_query().is_some_and(|target| match target.as_str() {
        // The text hides the difference; the comparison shows it.
        "/" => *target == PathAndQuery::from_static("/"),
        text => text.starts_with(['/', '*']),
    });
    has_path && path.is_unchanged()
}

/// Returns a path with the query of a target.
fn with_query(path: &str, uri: &Uri) -> String {
    uri.query().map_or_else(|| path.to_owned(), |query| [path, "?", query].concat())
}

fn of_route(error: SettingError, index: usize) -> SettingError {
    error.of(index).of("routes").of("gateway")
}

/// Returns the previous access log if its settings are unchanged, or opens a new one.
fn log(
    rule: &AccessLogRule,
    before: Option<&Site>,
    open: impl FnOnce() -> Result<AccessLog, SettingError>,
) -> Result<Arc<AccessLog>, SettingError> {
    match before.and_then(|before| before.log.as_ref()).filter(|log| log.matches_rule(rule)) {
        Some(log) => {
            // The file may have been renamed before the reload.
            log.reopen();
            Ok(Arc::clone(log))
        }
        None => open().map(Arc::new),
    }
}

impl Route {
    fn new(
        rule: &RouteRule,
        folder: &Path,
        path_reading: PathReading,
        carryover: &mut Carryover,
    ) -> Result<Self, SettingError> {
        let upstreams: Vec<&UpstreamRule> = rule.upstream.iter().flatten().collect();
        let action = match (&*upstreams, &rule.respond) {
            (_, Some(respond)) => RouteAction::Respond(FixedResponse::new(respond)),
            ([one], None) if one.url.is_echo() => RouteAction::Echo,
            (several, None) => {
                let mut weighted = Vec::new();
                for upstream in several {
                    let target = target(upstream, rule, folder, carryover)?;
                    weighted.push(WeightedUpstream::new(target, upstream));
                }
                RouteAction::Upstreams(weighted.into())
            }
        };
        Ok(Self {
            name: rule.name().to_owned(),
            action,
            path_rewrite: PathRewrite::of(rule, path_reading)?,
            path_reading: rule.paths.over(path_reading),
            host: rule.host,
            request_edits: Edits::new(&rule.request_headers),
            response_edits: Edits::new(&rule.response_headers),
            timeout: Wait::at_least(rule.timeout.duration()),
            connect_timeout: rule.connect_timeout.duration(),
            retries: rule.retries,
            eject: Eject::new(&rule.eject),
            reuse: ReusePolicy::new(&rule.upstream_connections),
            health_check: rule.health_check.clone(),
            balance: rule.balance,
            turn: AtomicUsize::new(0),
            tallies: carryover.tallies(rule.name()),
        })
    }

    /// Returns the counters of a worker.
    pub(super) fn tally(&self, worker: usize) -> &Arc<RouteTally> {
        &self.tallies[worker]
    }

    pub(super) fn tallies(&self) -> impl Iterator<Item = &RouteTally> {
        self.tallies.iter().map(|tally| &**tally)
    }

    fn weighted(&self) -> &[WeightedUpstream] {
        match &self.action {
            RouteAction::Upstreams(targets) => targets,
            RouteAction::Respond(_) | RouteAction::Echo => &[],
        }
    }

    pub(super) fn targets(&self) -> impl Iterator<Item = &Arc<Target>> {
        self.weighted().iter().map(|weighted| &weighted.target)
    }

    /// Returns the number of healthy upstreams, as far as requests and checks show.
    pub(super) fn healthy_upstreams(&self, now: Tick) -> usize {
        self.targets().filter(|target| target.is_likely_healthy(now)).count()
    }

    pub(super) fn upstream(&self, number: usize) -> Option<&WeightedUpstream> {
        self.weighted().get(number)
    }

    /// Returns whether an upstream can switch to another protocol.
    pub(super) fn can_upgrade(&self) -> bool {
        self.targets().any(|target| target.address.scheme != UpstreamProtocol::Http2)
    }

    /// Returns the numbers of the upstreams that use HTTP/2 with prior knowledge.
    pub(super) fn http2_upstreams(&self) -> impl Iterator<Item = usize> {
        let is_http2 = |target: &Arc<Target>| target.address.scheme == UpstreamProtocol::Http2;
        self.targets().enumerate().filter(move |(_, target)| is_http2(target)).map(|(number, _)| number)
    }

    /// Returns whether upstreams may get a different path than the client sent.
    pub(super) fn changes_paths(&self) -> bool {
        let has_prefixes = || self.weighted().iter().any(|upstream| upstream.prefix.is_some());
        self.path_rewrite.is_active() || has_prefixes()
    }

    pub(super) fn has_several(&self) -> bool {
        self.weighted().len() > 1
    }

    /// Chooses an upstream that was not tried yet; one that was, if there is no other. Returns `None` only for a route
    /// without upstreams: files with an empty list, or with weights of 0, are refused.
    pub(super) fn choose(&self, tried: &[usize], now: Tick) -> Option<(usize, &WeightedUpstream)> {
        let weighted = self.weighted();
        if let [only] = weighted {
            return Some((0, only));
        }
        let turn = self.turn.fetch_add(1, Relaxed);
        let numbers = (0..weighted.len()).map(|step| (turn + step) % weighted.len());
        let healthy = |number: &usize| weighted[*number].target.is_healthy(now);
        let fresh = |number: &usize| !tried.contains(number);
        // If no upstream is healthy, any may be chosen.
        let candidates = numbers.clone().filter(fresh).filter(healthy);
        let chosen = self.best(candidates, turn).or_else(|| self.best(numbers.clone().filter(fresh), turn));
        let number = chosen.or_else(|| self.best(numbers, turn))?;
        weighted[number].target.note_tried(now);
        Some((number, &weighted[number]))
    }

    fn best(&self, candidates: impl Iterator<Item = usize> + Clone, turn: usize) -> Option<usize> {
        let weighted = self.weighted();
        match self.balance {
            Balance::RoundRobin => {
                let all: u64 = candidates.clone().map(|number| u64::from(weighted[number].weight)).sum();
                let mut left = (turn as u64).checked_rem(all)?;
                let mut sorted: smallvec::SmallVec<[usize; 8]> = candidates.collect();
                sorted.sort_unstable();
                sorted.into_iter().find(|number| {
                    let weight = u64::from(weighted[*number].weight);
                    let found = left < weight;
                    left = left.saturating_sub(weight);
                    found
                })
            }
            // The fewest requests relative to the weight, counting this one. Ties are broken by turn.
            _ => candidates.min_by(|one, other| {
                let load = |number: usize| u64::from(weighted[number].target.active() + 1);
                let weight = |number: usize| u64::from(weighted[number].weight);
                (load(*one) * weight(*other)).cmp(&(load(*other) * weight(*one)))
            }),
        }
    }

    /// Returns the URI for an upstream.
    pub(super) fn rewritten_uri(&self, upstream: &WeightedUpstream, uri: &Uri) -> Result<Uri, Failure> {
        self.path_rewrite.apply(upstream.prefix.as_deref(), uri)
    }
}

/// Returns the upstream of that URL, taken over from the previous site if possible.
fn target(
    upstream: &UpstreamRule,
    rule: &RouteRule,
    folder: &Path,
    carryover: &mut Carryover,
) -> Result<Arc<Target>, SettingError> {
    let text = upstream.url.as_str();
    let bad = || {
        SettingError::new(format!("upstream {text} is not a URL"), "use one such as http://127.0.0.1:8081")
            .of("upstream")
    };
    let uri: Uri = text.parse().map_err(|_| bad())?;
    let (scheme, default_port) = match uri.scheme_str() {
        Some("https") => (UpstreamProtocol::Tls, 443),
        Some("h2c") => (UpstreamProtocol::Http2, 80),
        _ => (UpstreamProtocol::Http1, 80),
    };
    let tls = (scheme == UpstreamProtocol::Tls).then_some(&rule.upstream_tls);
    let address = UpstreamAddress {
        scheme,
        host: uri.host().ok_or_else(bad)?.to_owned(),
        port: uri.port_u16().unwrap_or(default_port),
        ca: tls.and_then(|tls| std::fs::read(folder.join(tls.ca.as_ref()?)).ok()),
        server_name: tls.and_then(|tls| tls.server_name.clone()),
    };
    if let Some(target) = carryover.targets.get(&address) {
        return Ok(Arc::clone(target));
    }
    let tls = tls.map(|tls| UpstreamTls::new(tls, &address.host, folder)).transpose()?;
    let target = Arc::new(Target::new(address.clone(), tls, carryover.workers).ok_or_else(bad)?);
    carryover.targets.insert(address, Arc::clone(&target));
    Ok(target)
}
