//! Checks the health of upstreams periodically, and logs ejections and outages of routes.
//!
//! Workers only record that an upstream is ejected: a thread that serves requests must not wait for a terminal.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use http::header::{HOST, USER_AGENT};
use http::{HeaderValue, Request};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tollgate_config::internal::HealthCheckRule;
use tollgate_net::deadline::{Tick, Ticks, Wait};
use tollgate_telemetry::limit_summary::span;
use tollgate_telemetry::notice::{Field, Level, join_up_to};

use super::conn::{Delivery, Http1Conn, Repeatable, Usage};
use super::connect::{self, ConnUse, Dialled};
use super::ejection::{Cause, Change};
use super::slots::{UpstreamSlot, UpstreamSlots};
use super::{RouteUpstream, Target, http2_pool};
use crate::gateway::failure::Fault;
use crate::gateway::head::headers;
use crate::gateway::http1::sender;
use crate::gateway::site::{Route, Site};

/// The maximum number of route names in a log line.
const MAX_ROUTES: usize = 5;

/// Checks the upstreams of a site until it is replaced, then those of the next. Ends with the gateway's runtime.
pub(in crate::gateway) async fn run(site: Arc<ArcSwap<Site>>, ticks: Arc<Ticks>, slots: Arc<UpstreamSlots>) {
    let mut outages = Outages::default();
    let mut exhaustion = Exhaustion::default();
    loop {
        let now = site.load_full();
        let mut checks = JoinSet::new();
        let upstreams = now.upstreams();
        for upstream in &upstreams {
            match &upstream.check {
                Some(rule) => {
                    let shared = (Arc::clone(&ticks), Arc::clone(&slots));
                    checks.spawn(check(upstream.clone(), rule.clone(), shared));
                }
                // Otherwise the last result of a check that was removed would stay in force.
                None => upstream.target.set_passes_checks(true),
            }
        }
        // A site lives for hours, so it is enough to look for a new one now and then.
        while Arc::ptr_eq(&now, &site.load()) {
            sleep(POLL_EVERY).await;
            upstreams.iter().for_each(log_ejections);
            outages.update(&now, ticks.now()).for_each(|(level, line)| level.log(line, &[]));
            exhaustion.report(&upstreams, ticks.now());
        }
    }
}

const POLL_EVERY: Duration = Duration::from_secs(1);

/// Logs that the gateway itself lacks resources for connections.
#[derive(Default)]
struct Exhaustion {
    quiet_until: Tick,
}

impl Exhaustion {
    /// The interval of the log lines while the problem lasts.
    const EVERY: Duration = Duration::from_secs(60);

    fn report(&mut self, upstreams: &[RoutedUpstream], now: Tick) {
        for upstream in upstreams {
            if let Some(exhausted) = upstream.target.take_exhausted()
                && self.quiet_until <= now
            {
                let message = format_args!("no connection to {upstream}, which is not at fault: {exhausted}");
                Level::Warning.log(message, &upstream.fields());
                self.quiet_until = Wait::at_least(Self::EVERY).from(now);
            }
        }
    }
}

/// Logs changes of an upstream's ejections: at most one line per route and call, however many requests fail.
fn log_ejections(upstream: &RoutedUpstream) {
    if let Some(change) = upstream.target.connecting.take_change() {
        // A route may still count other failures, and has a line of its own when these end.
        let is_concerned = |route: &&RouteRef| change != Change::Recovered || route.upstream.ejection.is_proven();
        let routes: Vec<RouteRef> = upstream.routes.iter().filter(is_concerned).cloned().collect();
        if !routes.is_empty() {
            log_change(&RoutedUpstream { routes, ..upstream.clone() }, &change);
        }
    }
    let mut changes: Vec<(Change, RoutedUpstream)> = Vec::new();
    for route in &upstream.routes {
        let Some(change) = route.upstream.ejection.take_change() else { continue };
        match changes.iter_mut().find(|(other, _)| *other == change) {
            Some((_, of)) => of.routes.push(route.clone()),
            None => changes.push((change, RoutedUpstream { routes: vec![route.clone()], ..upstream.clone() })),
        }
    }
    changes.iter().for_each(|(change, upstream)| log_change(upstream, change));
}

fn log_change(upstream: &RoutedUpstream, change: &Change) {
    match change {
        Change::Ejected(Cause { failures, lasts, fault }) => {
            let failed = if *failures == 1 { "failed".to_owned() } else { format!("failed {failures} times in a row") };
            let consequence = upstream.consequence(Some(*lasts));
            let message = format_args!("{upstream} {failed}: {fault}; {consequence}");
            Level::Warning.log(message, &upstream.fields());
        }
        Change::Recovered if upstream.target.passes_checks() => {
            let message = format_args!("{upstream} answers requests again, and gets its share of them");
            Level::Info.log(message, &upstream.fields());
        }
        Change::Recovered => {
            let consequence = upstream.consequence(None);
            let message = format_args!("{upstream} answers requests again, but fails its health checks; {consequence}");
            Level::Warning.log(message, &upstream.fields());
        }
    }
}

async fn check(upstream: RoutedUpstream, rule: HealthCheckRule, (ticks, slots): (Arc<Ticks>, Arc<UpstreamSlots>)) {
    let target = &upstream.target;
    let (mut is_healthy, mut streak) = (target.passes_checks(), 0);
    loop {
        let (within, started) = (rule.timeout.duration(), ticks.now());
        let answer = timeout(within, probe(target, rule.path.as_str(), &ticks, slots.take_for_check())).await;
        let fault = answer.unwrap_or(Err(Fault::LateForCheck(within))).err();
        if let Some(exhausted) = fault.as_ref().and_then(Fault::exhausted) {
            // This says nothing about the upstream.
            target.note_exhausted(exhausted);
            sleep(rule.every.duration()).await;
            continue;
        }
        if fault.is_none() {
            target.connecting.note_passed_check(started);
            upstream.routes.iter().for_each(|route| route.upstream.ejection.note_passed_check(started));
        }
        streak = if fault.is_none() == is_healthy { 0 } else { streak + 1 };
        let enough = if is_healthy { rule.unhealthy_after } else { rule.healthy_after };
        if streak >= enough {
            (is_healthy, streak) = (fault.is_none(), 0);
            target.set_passes_checks(is_healthy);
            match fault {
                Some(fault) => log_failed_check(&upstream, rule.path.as_str(), &fault),
                None => log_passed_check(&upstream, ticks.now()),
            }
        }
        sleep(rule.every.duration()).await;
    }
}

fn log_failed_check(upstream: &RoutedUpstream, path: &str, fault: &Fault) {
    let consequence = upstream.consequence(None);
    let message = format_args!("{upstream} fails its health check of {path}: {fault}; {consequence}");
    Level::Warning.log(message, &upstream.fields());
}

fn log_passed_check(upstream: &RoutedUpstream, now: Tick) {
    let routes = upstream.routes.iter().cloned();
    let (ejected, healthy) = routes.partition::<Vec<_>, _>(|route| route.upstream.is_ejected(now));
    if !healthy.is_empty() {
        let upstream = RoutedUpstream { routes: healthy, ..upstream.clone() };
        let message = format_args!("{upstream} passes its health checks again, and gets its share of requests");
        Level::Info.log(message, &upstream.fields());
    }
    if !ejected.is_empty() {
        let upstream = RoutedUpstream { routes: ejected, ..upstream.clone() };
        let consequence = upstream.consequence(None);
        let message =
            format_args!("{upstream} passes its health checks again, but requests have failed there; {consequence}");
        Level::Warning.log(message, &upstream.fields());
    }
}

/// The user agent of health checks.
const OUR_NAME: &str = "tollgate-health";

/// Sends a health check on a new connection. Succeeds on a 2xx or 3xx status.
async fn probe(target: &Target, path: &str, ticks: &Arc<Ticks>, slot: UpstreamSlot) -> Result<(), Fault> {
    let now = ticks.now();
    let status = match connect::dial(target, ConnUse::Request, now, slot).await? {
        Dialled::Http1(io, ip) => {
            let mut conn = Box::new(Http1Conn::new(io, Usage::new(now, target.origin(ip))));
            let write = |out: &mut Vec<u8>| {
                out.extend_from_slice(format!("GET {path} HTTP/1.1\r\n").as_bytes());
                headers::put(out, USER_AGENT.as_str(), OUR_NAME.as_bytes());
                headers::put(out, HOST.as_str(), target.host.as_bytes());
                out.extend_from_slice(b"\r\n");
                Ok(())
            };
            sender::send(&mut conn, Delivery::default().begin(), write).await?;
            let received = sender::receive(conn, None, (false, Repeatable::No), None).await;
            received.map_err(|error| error.fault)?.status()
        }
        Dialled::Http2(io, _) => {
            let mut request = Request::new(());
            if let Ok(uri) = path.parse() {
                *request.uri_mut() = uri;
            }
            request.headers_mut().insert(USER_AGENT, HeaderValue::from_static(OUR_NAME));
            target.set_http2_target(&mut request);
            let (mut sender, connection) = http2_pool::handshake(io).await?;
            let (mut response, _) = sender.send_request(request, true)?;
            let response = tokio::select! {
                response = &mut response => response,
                // The error of the connection is that of the response, unless the response has arrived.
                _ = connection => response.await,
            };
            response?.status()
        }
    };
    if status.is_success() || status.is_redirection() { Ok(()) } else { Err(Fault::Status(status)) }
}

/// An upstream and the routes that use it.
#[derive(Clone)]
struct RoutedUpstream {
    target: Arc<Target>,
    /// The health check, from the first route that has one.
    check: Option<HealthCheckRule>,
    /// The routes that use it. Several may have the same name.
    routes: Vec<RouteRef>,
}

/// A route that uses an upstream.
#[derive(Clone)]
struct RouteRef {
    name: String,
    upstream: Arc<RouteUpstream>,
    has_other_upstreams: bool,
}

impl Site {
    /// Returns the upstreams of all routes.
    fn upstreams(&self) -> Vec<RoutedUpstream> {
        let mut found: Vec<RoutedUpstream> = Vec::new();
        for route in &self.routes {
            for (number, upstream) in route.upstreams().iter().enumerate() {
                let target = &upstream.target;
                if route.targets().take(number).any(|before| Arc::ptr_eq(before, target)) {
                    continue;
                }
                let at = found.iter().position(|one| Arc::ptr_eq(&one.target, target)).unwrap_or_else(|| {
                    found.push(RoutedUpstream { target: Arc::clone(target), check: None, routes: Vec::new() });
                    found.len() - 1
                });
                found[at].add(route, upstream);
            }
        }
        found
    }
}

impl RoutedUpstream {
    /// Adds a route that uses it.
    fn add(&mut self, route: &Route, upstream: &Arc<RouteUpstream>) {
        self.check = self.check.take().or_else(|| route.health_check.clone());
        let has_other_upstreams = route.targets().any(|other| !Arc::ptr_eq(other, &self.target));
        let (name, upstream) = (route.name.clone(), Arc::clone(upstream));
        self.routes.push(RouteRef { name, upstream, has_other_upstreams });
    }

    /// Returns the fields of its log lines.
    fn fields(&self) -> [Field; 2] {
        let address = &self.target.address;
        let routes: Vec<&str> = self.route_names(|_| true).into_iter().take(MAX_ROUTES).collect();
        [("upstream", format!("{}:{}", address.host, address.port).into()), ("routes", routes.into())]
    }

    /// Describes what happens to requests while it is unhealthy, for this long if that is known.
    fn consequence(&self, lasts: Option<Duration>) -> String {
        let lasts = lasts.map(|lasts| format!(" for {}", span(lasts))).unwrap_or_default();
        let spared = format!("it gets no requests{lasts} while another upstream is healthy");
        match &*self.route_names(|route_ref| !route_ref.has_other_upstreams) {
            [] => spared,
            // Another route of that name may have another upstream.
            only if only.len() < self.routes.len() => {
                format!("{spared}, except for {} where it is the only one", route_list(only))
            }
            [_] => "it still gets requests, as the only upstream of its route".to_owned(),
            _ => "it still gets requests, as the only upstream of its routes".to_owned(),
        }
    }

    fn route_names(&self, which: impl Fn(&RouteRef) -> bool) -> Vec<&str> {
        self.routes.iter().filter(|route_ref| which(route_ref)).map(|route_ref| route_ref.name.as_str()).collect()
    }
}

impl fmt::Display for RoutedUpstream {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = &self.target.address;
        write!(out, "upstream {}:{} of {}", address.host, address.port, route_list(&self.route_names(|_| true)))
    }
}

/// Joins route names without duplicates.
fn route_list(route_names: &[&str]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for name in route_names {
        if !names.contains(name) {
            names.push(name);
        }
    }
    let noun = if names.len() == 1 { "route" } else { "routes" };
    format!("{noun} {}", join_up_to(&names, MAX_ROUTES))
}

/// The names of routes whose outage was logged. Of several routes with the same name, one is enough.
#[derive(Default)]
struct Outages(BTreeSet<String>);

impl Outages {
    /// Returns log lines with their levels for the changes since the last call. The site may have been replaced since.
    fn update(&mut self, site: &Site, now: Tick) -> impl Iterator<Item = (Level, String)> {
        let down = || site.routes.iter().filter(|route| route.is_down(now));
        let before = std::mem::replace(&mut self.0, down().map(|route| route.name.clone()).collect());
        let (some, none): (Vec<&Route>, Vec<&Route>) = down()
            .filter(|route| !before.contains(&route.name))
            .partition(|route| route.upstreams().iter().any(|upstream| upstream.is_healthy(now)));
        let is_back = |route: &&Route| {
            let is_over = before.contains(&route.name) && !self.0.contains(&route.name);
            // A route with new upstreams has not recovered until one of them is proven healthy.
            is_over && route.has_proven(now)
        };
        let back = site.routes.iter().filter(is_back).collect();
        let began =
            |go: &'static str| move |of| (Level::Warning, format!("no upstream of {of} is healthy: requests go {go}"));
        let lines = [
            names(none).map(began("to all of them")),
            names(some).map(began("first to those whose ejection is over")),
            names(back).map(|of| match of.starts_with("routes ") {
                true => (Level::Info, format!("{of} have a healthy upstream again")),
                false => (Level::Info, format!("{of} has a healthy upstream again")),
            }),
        ];
        lines.into_iter().flatten()
    }
}

fn names(routes: Vec<&Route>) -> Option<String> {
    let names: Vec<&str> = routes.into_iter().map(|route| route.name.as_str()).collect();
    (!names.is_empty()).then(|| route_list(&names))
}

impl Route {
    /// Returns whether it has several upstreams and none is healthy. For a single upstream, the log line about its
    /// ejection covers the consequences.
    fn is_down(&self, now: Tick) -> bool {
        let mut targets = self.targets();
        let first = targets.next();
        let has_choice = first.is_some_and(|first| targets.any(|other| !Arc::ptr_eq(first, other)));
        has_choice && !self.has_proven(now)
    }

    /// Returns whether one of its upstreams is healthy for the log: after an ejection it gets requests again, but one of
    /// them has to succeed first.
    fn has_proven(&self, now: Tick) -> bool {
        self.upstreams().iter().any(|upstream| upstream.is_healthy(now) && upstream.is_proven())
    }
}
