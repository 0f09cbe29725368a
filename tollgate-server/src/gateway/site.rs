//! The routes and settings of a rule file, ready to serve requests. Replaced as a whole on reload.

mod route;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use http::Uri;
use http::uri::PathAndQuery;
use tollgate_config::internal::{AccessLogRule, SettingError, UnderscoreHeaders, UpstreamHeader};
use tollgate_config::{Parsed, Problems};
use tollgate_net::deadline::Wait;
use tollgate_rules::internal::{CleanPath, Unreadable};
use tollgate_rules::{EncodedSlash, Facts, PathParameters, PathReading, Routes, TrustedProxies};

use self::route::Tallies;
pub(crate) use self::route::upstream_urls;
use self::route::with_path;
pub(super) use self::route::{Attempts, Route, RouteAction, UpstreamAttempt};
use super::access_log::AccessLog;
use super::deadline::ClientTimeouts;
use super::head::headers::HeaderFilter;
use super::tally::RouteTally;
use super::upstream::ejection::Ejection;
use super::upstream::{Target, UpstreamAddress};
use crate::net_settings;

/// The settings that can change while the gateway runs.
pub(super) struct Site {
    pub(super) routes: Vec<Route>,
    found: Routes,
    /// How upstreams interpret paths, unless their route overrides it.
    path_reading: PathReading,
    pub(super) proxies: TrustedProxies,
    /// How headers with an underscore, a dot or the like in their name are treated.
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

/// The state that a site takes over from the previous one.
struct Carryover {
    workers: usize,
    /// The upstreams by address, so that their connections stay open.
    targets: HashMap<UpstreamAddress, Arc<Target>>,
    /// The ejections by route name and upstream. Routes with the same name are in the order of the file.
    ejections: HashMap<(String, UpstreamAddress), VecDeque<Arc<Ejection>>>,
    /// The counters by route name, so that they keep counting.
    tallies: HashMap<String, Tallies>,
}

impl Carryover {
    fn of(before: Option<&Site>, workers: usize) -> Self {
        let mut carryover =
            Self { workers, targets: HashMap::new(), ejections: HashMap::new(), tallies: HashMap::new() };
        for route in before.into_iter().flat_map(|before| &before.routes) {
            carryover.tallies.insert(route.name.clone(), Arc::clone(&route.tallies));
            for upstream in route.upstreams() {
                let address = &upstream.target.address;
                carryover.targets.insert(address.clone(), Arc::clone(&upstream.target));
                let ejections = carryover.ejections.entry((route.name.clone(), address.clone())).or_default();
                // URLs of a route that differ only in the path share it.
                if !ejections.back().is_some_and(|last| Arc::ptr_eq(last, &upstream.ejection)) {
                    ejections.push_back(Arc::clone(&upstream.ejection));
                }
            }
        }
        carryover
    }

    /// Returns the ejection of an upstream by the next route of that name.
    fn ejection(&mut self, name: &str, target: &Target) -> Arc<Ejection> {
        let before = self.ejections.get_mut(&(name.to_owned(), target.address.clone()));
        before.and_then(VecDeque::pop_front).unwrap_or_default()
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
                Ok(route) => loops(&route, listens),
                Err(error) => vec![error],
            };
            found.extend(errors.into_iter().map(|error| of_route(error, index)));
        }
        let of_tls =
            gateway.tls.iter().filter_map(|tls| net_settings::tls(tls, file.folder(), "gateway.tls").err()).flatten();
        found.extend(of_tls.map(|error| error.of("tls").of("gateway")));
        found
    }

    /// Closes connections to upstreams that the next site does not have. Requests in flight may keep this site for long.
    pub(super) fn retire(&self, next: &Self) {
        let kept: HashSet<_> = next.routes.iter().flat_map(Route::targets).map(Arc::as_ptr).collect();
        let targets = self.routes.iter().flat_map(Route::targets);
        targets.filter(|target| !kept.contains(&Arc::as_ptr(target))).for_each(|target| target.retire());
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
    pub(super) fn header_filter(&self, peer: Option<IpAddr>) -> HeaderFilter<'_> {
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

/// Returns an error for each upstream of a route that is one of the gateway's listen addresses.
fn loops(route: &Route, listens: &[String]) -> Vec<SettingError> {
    let upstreams = route.targets().enumerate();
    let itself = upstreams.filter_map(|(index, target)| {
        let listen = listens.iter().find(|listen| is_itself(target, listen))?;
        let address = &target.address;
        let message = format!(
            "the upstream {}:{} is the gateway itself, which listens on {listen}: requests would be forwarded in a loop",
            address.host, address.port
        );
        let error =
            SettingError::new(message, "name the service behind the gateway, or change gateway.listen");
        Some(error.of("url").of(index).of("upstream"))
    });
    itself.collect()
}

fn is_itself(target: &Target, listen: &str) -> bool {
    let Some((host, port)) = listen.rsplit_once(':') else { return false };
    port.parse() == Ok(target.address.port) && is_reached(host, &target.address.host)
}

/// Returns whether a connection to `target` reaches a listener on `listening`.
fn is_reached(listening: &str, target: &str) -> bool {
    if listening.eq_ignore_ascii_case(target) {
        return true;
    }
    let (listening, target) = (addresses(listening), addresses(target));
    target.iter().any(|target| {
        // A connection to the unspecified address goes to the loopback address.
        let target = if target.is_unspecified() { loopback(target) } else { *target };
        listening.iter().any(|listening| match listening {
            IpAddr::V4(all) if all.is_unspecified() => target.is_ipv4() && target.is_loopback(),
            // On Linux, it accepts IPv4, too.
            IpAddr::V6(all) if all.is_unspecified() => target.is_loopback(),
            one => *one == target,
        })
    })
}

fn addresses(host: &str) -> Vec<IpAddr> {
    if host.eq_ignore_ascii_case("localhost") {
        return vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    }
    host.trim_matches(['[', ']']).parse().into_iter().collect()
}

fn loopback(like: &IpAddr) -> IpAddr {
    if like.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcard_listener_is_reached_by_every_local_address() {
        for (listening, target) in [
            ("127.0.0.1", "127.0.0.1"),
            ("127.0.0.1", "localhost"),
            ("127.0.0.1", "0.0.0.0"),
            ("localhost", "127.0.0.1"),
            ("localhost", "LOCALHOST"),
            ("[::1]", "[::1]"),
            ("[::1]", "[0:0::1]"),
            ("0.0.0.0", "127.0.0.1"),
            ("0.0.0.0", "127.0.0.2"),
            ("0.0.0.0", "0.0.0.0"),
            ("0.0.0.0", "localhost"),
            ("[::]", "[::1]"),
            ("[::]", "127.0.0.1"),
            ("[::]", "localhost"),
            ("gateway.internal", "gateway.internal"),
            ("192.0.2.1", "192.0.2.1"),
        ] {
            assert!(is_reached(listening, target), "{listening} {target}");
        }
        for (listening, target) in [
            ("127.0.0.1", "127.0.0.2"),
            ("127.0.0.1", "[::1]"),
            ("0.0.0.0", "[::1]"),
            ("0.0.0.0", "192.0.2.1"),
            ("192.0.2.1", "127.0.0.1"),
            ("gateway.internal", "api.internal"),
        ] {
            assert!(!is_reached(listening, target), "{listening} {target}");
        }
    }
}
