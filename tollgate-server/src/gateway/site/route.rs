//! A route: its settings, its upstreams, the attempts of a request at them, and the path that they get.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{Response, StatusCode, Uri};
use smallvec::SmallVec;
use tollgate_config::internal::{
    Balance, HealthCheckRule, HostHeader, Redirects, RespondRule, RewriteRule, RouteRule, SettingError, UpstreamRule,
};
use tollgate_net::deadline::{Tick, Ticks, Wait};
use tollgate_rules::internal::{CleanPath, without_case, without_names_of};
use tollgate_rules::{PathCase, PathReading};

use super::Carryover;
use crate::gateway::deadline::UpstreamDeadline;
use crate::gateway::failure::{Failure, Fault};
use crate::gateway::head::headers::{self, Edits};
use crate::gateway::tally::RouteTally;
use crate::gateway::upstream::conn::{Repeatable, ReusePolicy};
use crate::gateway::upstream::ejection::EjectPolicy;
use crate::gateway::upstream::tls::UpstreamTls;
use crate::gateway::upstream::{ConnPool, EjectionCounts, RouteUpstream, Target, UpstreamAddress, UpstreamProtocol};

/// A route.
pub(in crate::gateway) struct Route {
    pub(in crate::gateway) name: String,
    pub(in crate::gateway) action: RouteAction,
    path_rewrite: PathRewrite,
    redirects: Redirects,
    pub(super) path_reading: PathReading,
    pub(in crate::gateway) host: HostHeader,
    /// Shared, because a body on its way to an upstream refers to them.
    pub(in crate::gateway) request_edits: Arc<Edits>,
    /// Shared, because a body on its way to a client refers to them.
    pub(in crate::gateway) response_edits: Arc<Edits>,
    pub(in crate::gateway) timeout: Wait,
    pub(in crate::gateway) connect_timeout: Duration,
    pub(in crate::gateway) retries: u8,
    pub(in crate::gateway) reuse: ReusePolicy,
    pub(in crate::gateway) health_check: Option<HealthCheckRule>,
    balance: Balance,
    turn: AtomicUsize,
    pub(super) tallies: Tallies,
}

/// The counters of a route, by worker.
pub(super) type Tallies = Arc<[Arc<RouteTally>]>;

/// The action of a route.
pub(in crate::gateway) enum RouteAction {
    Upstreams(Box<[Arc<RouteUpstream>]>),
    Respond(Response<Bytes>),
    Echo,
}

/// Returns the response of a rule.
fn fixed_response(rule: &RespondRule) -> Response<Bytes> {
    let status = StatusCode::from_u16(rule.status).unwrap_or_default();
    let body = if headers::lacks_body(status) { Bytes::new() } else { Bytes::from(rule.body.clone()) };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers::map(&rule.headers);
    response
}

impl Route {
    pub(super) fn new(
        rule: &RouteRule,
        folder: &Path,
        path_reading: PathReading,
        carryover: &mut Carryover,
    ) -> Result<Self, SettingError> {
        let upstreams: Vec<&UpstreamRule> = rule.upstream.iter().flatten().collect();
        let action = match (&*upstreams, &rule.respond) {
            (_, Some(respond)) => RouteAction::Respond(fixed_response(respond)),
            ([one], None) if one.url.is_echo() => RouteAction::Echo,
            (several, None) => {
                let eject = EjectPolicy::new(&rule.eject);
                let mut upstreams: Vec<Arc<RouteUpstream>> = Vec::new();
                for upstream in several {
                    let (weight, prefix) = (upstream.weight, prefix(upstream));
                    let target = target(upstream, rule, folder, carryover)?;
                    let same = upstreams.iter().find(|other| Arc::ptr_eq(&other.target, &target));
                    let ejection = match same {
                        Some(same) => Arc::clone(&same.ejection),
                        None => carryover.ejection(rule.name(), &target),
                    };
                    upstreams.push(Arc::new(RouteUpstream { target, weight, prefix, eject, ejection }));
                }
                RouteAction::Upstreams(upstreams.into())
            }
        };
        Ok(Self {
            name: rule.name().to_owned(),
            action,
            path_rewrite: PathRewrite::of(rule, path_reading)?,
            redirects: rule.redirects,
            path_reading: rule.paths.over(path_reading),
            host: rule.host,
            request_edits: Arc::new(Edits::of_requests(&rule.request_headers)),
            response_edits: Arc::new(Edits::of_responses(&rule.response_headers)),
            timeout: Wait::at_least(rule.timeout.duration()),
            connect_timeout: rule.connect_timeout.duration(),
            retries: rule.retries,
            reuse: ReusePolicy::new(&rule.upstream_connections),
            health_check: rule.health_check.clone(),
            balance: rule.balance,
            turn: AtomicUsize::new(0),
            tallies: carryover.tallies(rule.name()),
        })
    }

    /// Returns the `Location` for the client, of a response of that upstream, unless it stays. `https_host` is the host
    /// that the client has requested over TLS: an upstream without TLS uses it with the other scheme.
    pub(in crate::gateway) fn location(
        &self,
        upstream: &RouteUpstream,
        https_host: Option<&[u8]>,
        value: &[u8],
    ) -> Option<String> {
        let (value, target) = (str::from_utf8(value).ok()?, &upstream.target);
        let is_tls = target.address.scheme == UpstreamProtocol::Tls;
        let (own_scheme, port) = if is_tls { ("https", ":443") } else { ("http", ":80") };
        let is_own = |scheme: &str, authority: &str| {
            let is = |host: &[u8]| host.eq_ignore_ascii_case(authority.as_bytes());
            let without_port = authority.strip_suffix(port).unwrap_or(authority);
            scheme.eq_ignore_ascii_case(own_scheme)
                && (target.host.as_bytes().eq_ignore_ascii_case(without_port.as_bytes())
                    || !is_tls && https_host.is_some_and(is))
        };
        let rewrites = self.redirects == Redirects::Rewrite;
        rewrites.then(|| self.path_rewrite.location(upstream.prefix.as_deref(), value, is_own)).flatten()
    }

    /// Returns the counters of a worker.
    pub(in crate::gateway) fn tally(&self, worker: usize) -> &Arc<RouteTally> {
        &self.tallies[worker]
    }

    pub(in crate::gateway) fn tallies(&self) -> impl Iterator<Item = &RouteTally> {
        self.tallies.iter().map(|tally| &**tally)
    }

    pub(in crate::gateway) fn upstreams(&self) -> &[Arc<RouteUpstream>] {
        match &self.action {
            RouteAction::Upstreams(upstreams) => upstreams,
            RouteAction::Respond(_) | RouteAction::Echo => &[],
        }
    }

    pub(in crate::gateway) fn targets(&self) -> impl Iterator<Item = &Arc<Target>> {
        self.upstreams().iter().map(|upstream| &upstream.target)
    }

    /// Returns the number of healthy upstreams, as far as requests and checks show.
    pub(in crate::gateway) fn healthy_upstreams(&self) -> usize {
        self.upstreams().iter().filter(|upstream| upstream.is_likely_healthy()).count()
    }

    /// Returns whether an upstream can switch to another protocol.
    pub(in crate::gateway) fn can_upgrade(&self) -> bool {
        self.targets().any(|target| target.address.scheme != UpstreamProtocol::Http2)
    }

    /// Returns the numbers of the upstreams that use HTTP/2 with prior knowledge.
    pub(in crate::gateway) fn http2_upstreams(&self) -> impl Iterator<Item = usize> {
        let is_http2 = |target: &Arc<Target>| target.address.scheme == UpstreamProtocol::Http2;
        self.targets().enumerate().filter(move |(_, target)| is_http2(target)).map(|(number, _)| number)
    }

    /// Returns whether upstreams may get a different path than the client sent.
    pub(in crate::gateway) fn changes_paths(&self) -> bool {
        let has_prefixes = || self.upstreams().iter().any(|upstream| upstream.prefix.is_some());
        self.path_rewrite.is_active() || has_prefixes()
    }

    pub(in crate::gateway) fn has_several(&self) -> bool {
        self.upstreams().len() > 1
    }

    /// Returns whether a repeatable request is sent again that was lost with its connection. On a new connection to the only
    /// upstream it is not: it may be what broke the connection.
    pub(in crate::gateway) fn repeats_lost(&self, is_reused: bool) -> bool {
        is_reused || self.has_several()
    }

    /// Chooses an upstream that was not tried yet; one that was, if there is no other. Returns `None` only for a route
    /// without upstreams, or if all are excluded: files with an empty list, or with weights of 0, are refused.
    fn choose(&self, excluded: &[usize], tried: &[usize], now: Tick) -> Option<(usize, &Arc<RouteUpstream>)> {
        let upstreams = self.upstreams();
        if let [only] = upstreams {
            return Some((0, only));
        }
        let turn = self.turn.fetch_add(1, Relaxed);
        let numbers = (0..upstreams.len()).map(|step| (turn + step) % upstreams.len());
        let numbers = numbers.filter(|number| !excluded.contains(number));
        let healthy = |number: &usize| upstreams[*number].is_healthy(now);
        let fresh = |number: &usize| !tried.contains(number);
        // If no upstream is healthy, any may be chosen.
        let candidates = numbers.clone().filter(fresh).filter(healthy);
        let chosen = self.best(candidates, turn).or_else(|| self.best(numbers.clone().filter(fresh), turn));
        let number = chosen.or_else(|| self.best(numbers, turn))?;
        Some((number, &upstreams[number]))
    }

    fn best(&self, candidates: impl Iterator<Item = usize> + Clone, turn: usize) -> Option<usize> {
        let upstreams = self.upstreams();
        match self.balance {
            Balance::RoundRobin => {
                let all: u64 = candidates.clone().map(|number| u64::from(upstreams[number].weight)).sum();
                let mut left = (turn as u64).checked_rem(all)?;
                let mut sorted: smallvec::SmallVec<[usize; 8]> = candidates.collect();
                sorted.sort_unstable();
                sorted.into_iter().find(|number| {
                    let weight = u64::from(upstreams[*number].weight);
                    let found = left < weight;
                    left = left.saturating_sub(weight);
                    found
                })
            }
            // The fewest requests relative to the weight, counting this one. Ties are broken by turn.
            _ => candidates.min_by(|one, other| {
                let load = |number: usize| u64::from(upstreams[number].target.active() + 1);
                let weight = |number: usize| u64::from(upstreams[number].weight);
                (load(*one) * weight(*other)).cmp(&(load(*other) * weight(*one)))
            }),
        }
    }

    /// Returns the URI for an upstream.
    pub(in crate::gateway) fn rewritten_uri(&self, upstream: &RouteUpstream, uri: &Uri) -> Result<Uri, Failure> {
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
    let host = uri.host().ok_or_else(bad)?.to_owned();
    // Another route may have the same upstream. Nevertheless these settings have to be valid.
    let tls = tls.map(|tls| UpstreamTls::new(tls, &host, folder)).transpose()?;
    let address = UpstreamAddress {
        scheme,
        host,
        port: uri.port_u16().unwrap_or(default_port),
        tls: tls.as_ref().map(|tls| tls.identity.clone()),
    };
    if let Some(target) = carryover.targets.get(&address) {
        return Ok(Arc::clone(target));
    }
    let target = Arc::new(Target::new(address.clone(), tls, carryover.workers).ok_or_else(bad)?);
    carryover.targets.insert(address, Arc::clone(&target));
    Ok(target)
}

/// The attempts of a request.
#[derive(Default)]
pub(in crate::gateway) struct Attempts {
    /// The numbers of upstreams that cannot serve the request.
    excluded: SmallVec<[usize; 2]>,
    tried: SmallVec<[usize; 4]>,
    /// The upstream that is tried next, if that is decided.
    next: Option<usize>,
}

impl Attempts {
    /// Starts without upstreams that cannot serve the request.
    pub(in crate::gateway) fn without(excluded: impl Iterator<Item = usize>) -> Self {
        Self { excluded: excluded.collect(), ..Self::default() }
    }

    /// Chooses the next upstream.
    pub(in crate::gateway) fn choose<'r>(
        &mut self,
        route: &'r Route,
        worker: usize,
        now: Tick,
    ) -> Option<(&'r RouteUpstream, UpstreamAttempt)> {
        let decided = self.next.take().and_then(|number| Some((number, route.upstreams().get(number)?)));
        let (number, upstream) = decided.or_else(|| route.choose(&self.excluded, &self.tried, now))?;
        self.tried.push(number);
        Some((upstream, UpstreamAttempt::new(upstream, route, worker)))
    }

    /// Returns the upstream that was chosen last.
    pub(in crate::gateway) fn current<'r>(&self, route: &'r Route) -> Option<&'r RouteUpstream> {
        self.tried.last().and_then(|number| Some(&**route.upstreams().get(*number)?))
    }

    /// Makes the upstream that was chosen last the next one: it was not sent anything.
    pub(in crate::gateway) fn undo_last(&mut self) {
        self.next = self.tried.pop();
    }

    /// Excludes the upstream that was chosen last: it cannot serve the request. Returns false, and excludes none, if no
    /// other is left.
    pub(in crate::gateway) fn exclude_last(&mut self, route: &Route) -> bool {
        if self.excluded.len() + 1 >= route.upstreams().len() {
            self.excluded.clear();
            return false;
        }
        self.excluded.extend(self.tried.pop());
        true
    }

    /// Records that an attempt has failed. Returns whether another one follows, which it can only if the request is
    /// repeatable.
    pub(in crate::gateway) fn note_failed(
        &self,
        route: &Route,
        fault: &Fault,
        repeatable: Repeatable,
        (worker, now): (usize, Tick),
    ) -> bool {
        let failure = fault.failure();
        if failure.is_upstreams() || failure.is_gateways() {
            self.current(route).into_iter().for_each(|upstream| upstream.note_failure(fault, now));
        }
        let tally = route.tally(worker);
        tally.note_failure(failure);
        let may_retry = self.tried.len() <= usize::from(route.retries) && !would_fail_again(failure, route);
        let retries = may_retry && repeatable == Repeatable::Yes;
        if retries {
            tally.note_retry();
        }
        retries
    }
}

/// Returns whether another attempt is pointless: the route has one upstream, and it cannot be reached.
fn would_fail_again(failure: Failure, route: &Route) -> bool {
    let is_unreached = matches!(failure, Failure::CannotConnect | Failure::BadCertificate | Failure::ConnectTimeout)
        || failure.is_gateways();
    is_unreached && !route.has_several()
}

/// An attempt of a request at an upstream. Counts as a request in flight of the upstream until it is dropped.
pub(in crate::gateway) struct UpstreamAttempt {
    pub(in crate::gateway) upstream: Arc<RouteUpstream>,
    /// The ejections of the upstream before the request was sent.
    pub(in crate::gateway) sent_after: EjectionCounts,
    /// The state of the client's body, unless the server of HTTP/1 sends it.
    pub(in crate::gateway) deadline: Option<Arc<UpstreamDeadline>>,
    pub(in crate::gateway) timeout: Wait,
    reuse: ReusePolicy,
    worker: usize,
}

impl UpstreamAttempt {
    fn new(upstream: &Arc<RouteUpstream>, route: &Route, worker: usize) -> Self {
        upstream.target.begin();
        let Route { timeout, reuse, .. } = *route;
        let sent_after = upstream.ejection_counts();
        Self { upstream: Arc::clone(upstream), sent_after, deadline: None, timeout, reuse, worker }
    }

    /// Returns whether the upstream has not read the client's body in time.
    pub(in crate::gateway) fn is_late(&self) -> bool {
        self.deadline.as_ref().is_none_or(|deadline| deadline.ticks_left() == 0)
    }

    /// Returns whether the client's body was cut off, which closes the connection or resets the stream.
    pub(in crate::gateway) fn has_broken_body(&self) -> bool {
        self.body_failure().is_some()
    }

    pub(in crate::gateway) fn body_failure(&self) -> Option<Failure> {
        self.deadline.as_ref()?.body_failure()
    }

    /// Returns the pool of its connection.
    pub(in crate::gateway) fn pool(&self, ticks: &Arc<Ticks>) -> ConnPool {
        let (target, ticks) = (Arc::clone(&self.upstream.target), Arc::clone(ticks));
        ConnPool { target, worker: self.worker, policy: self.reuse, ticks }
    }
}

impl Drop for UpstreamAttempt {
    fn drop(&mut self) {
        self.upstream.target.end();
    }
}

/// The path changes of a route.
pub(super) struct PathRewrite {
    strip_prefix: Option<String>,
    rewrite: Option<RewriteRule>,
    case: PathCase,
}

impl PathRewrite {
    /// Creates the path changes of a route. The gateway's settings choose the route, and the route's settings describe
    /// its upstreams: if either ignores case, so do the changes. Otherwise a path in another case would match the route
    /// and escape its changes.
    ///
    /// # Errors
    ///
    /// Fails if the pattern takes too much memory without regard to case.
    pub(super) fn of(rule: &RouteRule, gateway: PathReading) -> Result<Self, SettingError> {
        let cases = [gateway.case, rule.paths.over(gateway).case];
        let ignores_case = cases.contains(&PathCase::Insensitive);
        let mut rewrite = rule.rewrite.clone();
        if let Some(rewrite) = rewrite.as_mut().filter(|_| ignores_case) {
            rewrite.pattern = rewrite.pattern.case_insensitive().ok_or_else(|| {
                SettingError::new(
                    "the pattern takes too much memory with `paths.case: insensitive`",
                    "write a shorter one, or one with fewer repetitions",
                )
                .of("pattern")
                .of("rewrite")
            })?;
        }
        Ok(Self {
            strip_prefix: rule.strip_prefix.as_ref().map(|path| path.as_str().trim_end_matches('/').to_owned()),
            rewrite,
            case: if ignores_case { PathCase::Insensitive } else { PathCase::Sensitive },
        })
    }

    /// Returns whether paths may be changed.
    pub(super) fn is_active(&self) -> bool {
        self.strip_prefix.is_some() || self.rewrite.is_some()
    }

    /// Returns the URI for an upstream with that prefix. The path must be normalized: with `..` in it, it could leave
    /// the prefix of the upstream's URL.
    pub(super) fn apply(&self, prefix: Option<&str>, uri: &Uri) -> Result<Uri, Failure> {
        if !(self.is_active() || prefix.is_some()) || uri.path() == "*" {
            return Ok(uri.clone());
        }
        let mut path = uri.path().to_owned();
        if let Some(rest) = self.strip_prefix.as_ref().and_then(|prefix| stripped(&path, prefix, self.case)) {
            path = rest.to_owned();
        }
        let mut added = None;
        if let Some(rewrite) = &self.rewrite
            && let Some((rewritten, query)) = rewrite.pattern.rewrite(&path, &rewrite.to)
        {
            (path, added) = (rewritten, query);
            // Groups that are joined could leave the path that the file names.
            if path.split('/').any(|segment| matches!(segment, "." | "..")) || CleanPath::new(&path).is_err() {
                return Err(Failure::NoRoute);
            }
        }
        if !path.starts_with('/') {
            path.insert(0, '/');
        }
        if let Some(prefix) = prefix {
            path.insert_str(0, prefix);
        }
        let given = match &added {
            Some(added) => uri.query().map(|query| without_names_of(added, query)).filter(|query| !query.is_empty()),
            None => uri.query().map(str::to_owned),
        };
        for query in [added, given].into_iter().flatten() {
            path.push(if path.contains('?') { '&' } else { '?' });
            path.push_str(&query);
        }
        with_path(uri, path)
    }
}

impl PathRewrite {
    /// Returns the changed `Location`. Returns `None` if it is for another host, needs no change, cannot be mapped back,
    /// or is not a valid URL (browsers remove tabs, which could change its host).
    /// `is_own` returns whether a scheme and an authority are the upstream's.
    pub(super) fn location(
        &self,
        prefix: Option<&str>,
        value: &str,
        is_own: impl FnOnce(&str, &str) -> bool,
    ) -> Option<String> {
        if !value.bytes().all(|byte| byte.is_ascii_graphic()) {
            return None;
        }
        let local = match value.split_once("://") {
            _ if value.starts_with('/') => Some(value).filter(|path| !path.starts_with("//"))?,
            Some((scheme, rest)) => {
                let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
                Some(path).filter(|_| is_own(scheme, authority))?
            }
            None => return None,
        };
        let (path, rest) = local.split_at(local.find(['?', '#']).unwrap_or(local.len()));
        let path = if path.is_empty() { "/" } else { path };
        // A path beside that of the upstream's URL is not reachable through the gateway.
        let path = prefix.map_or(Some(path), |prefix| stripped(path, prefix, PathCase::Sensitive))?;
        // An upstream that knows the prefix has written it. What a pattern has replaced is not known.
        let lacks_prefix = |prefix: &&String| self.rewrite.is_none() && stripped(path, prefix, self.case).is_none();
        let prefix = self.strip_prefix.as_ref().filter(lacks_prefix).map_or("", String::as_str);
        let location = [prefix, path, rest].concat();
        // Two slashes would begin a host name.
        let is_path = !location.starts_with("//") && !location.starts_with("/\\");
        (is_path && location != value).then_some(location)
    }
}

/// Returns the path of an upstream's URL, which is prepended to the request's.
pub(super) fn prefix(rule: &UpstreamRule) -> Option<String> {
    let uri = rule.url.as_str().parse::<Uri>().ok()?;
    Some(uri.path().trim_end_matches('/').to_owned()).filter(|path| !path.is_empty())
}

/// Returns the URLs that the upstreams of a route get for a path. Returns the URLs of the file if the path cannot be
/// requested.
pub(crate) fn upstream_urls(rule: &RouteRule, reading: PathReading, path: &str) -> Vec<String> {
    let clean = |path: &str| {
        let (path, query) = path.split_once('?').map_or((path, None), |(path, query)| (path, Some(query)));
        let clean = CleanPath::new(path).ok()?;
        let forwarded = clean.forwarded(rule.paths.over(reading)).ok()?.into_owned();
        query.map_or(forwarded.clone(), |query| format!("{forwarded}?{query}")).parse::<Uri>().ok()
    };
    let (paths, uri) = (PathRewrite::of(rule, reading).ok(), clean(path));
    let upstreams = rule.upstream.iter().flatten();
    let apply = |upstream: &UpstreamRule| {
        let url = upstream.url.as_str();
        let prefix = prefix(upstream);
        let path = paths.as_ref()?.apply(prefix.as_deref(), uri.as_ref()?).ok()?;
        let origin = url.trim_end_matches('/');
        let origin = origin.strip_suffix(prefix.as_deref().unwrap_or_default()).unwrap_or(origin);
        (!upstream.url.is_echo()).then(|| format!("{origin}{path}"))
    };
    upstreams.map(|upstream| apply(upstream).unwrap_or_else(|| upstream.url.as_str().to_owned())).collect()
}

/// Replaces the path and query. Fails if they are too long for a URI: the unchanged path could reach something that the
/// change protects.
pub(super) fn with_path(uri: &Uri, path: String) -> Result<Uri, Failure> {
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::try_from(path).map_err(|_| Failure::NoRoute)?);
    Uri::from_parts(parts).map_err(|_| Failure::NoRoute)
}

/// Removes whole segments from the start of a path.
fn stripped<'p>(path: &'p str, prefix: &str, case: PathCase) -> Option<&'p str> {
    // Without case, other letters may take other numbers of bytes.
    let slashes = prefix.matches('/').count();
    let end = path.match_indices('/').nth(slashes).map_or(path.len(), |(slash, _)| slash);
    let (beginning, rest) = path.split_at(end);
    let is_prefix = match case {
        PathCase::Insensitive => without_case(beginning) == without_case(prefix),
        _ => beginning == prefix,
    };
    let rest = Some(rest).filter(|rest| is_prefix && (rest.is_empty() || rest.starts_with('/')))?;
    Some(if rest.is_empty() { "/" } else { rest })
}
