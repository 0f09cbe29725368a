//! The upstreams of a site for log lines, outages of routes, and upstreams that are the gateway itself.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use tollgate::rules::file::internal::{HealthCheckRule, SettingError};

use super::{Route, Site};
use crate::gateway::deadline::Tick;
use crate::gateway::upstream::Target;
use crate::limit_summary::span;
use crate::notice::{Field, Level, join_up_to};

/// The maximum number of route names in a log line.
const MAX_ROUTES: usize = 5;

/// An upstream and the routes that use it.
#[derive(Clone)]
pub(in crate::gateway) struct RoutedUpstream {
    pub(in crate::gateway) target: Arc<Target>,
    /// The health check, from the first route that has one.
    pub(in crate::gateway) check: Option<HealthCheckRule>,
    /// The routes that use it. Several may have the same name.
    routes: Vec<RouteRef>,
}

/// A route that uses an upstream.
#[derive(Clone)]
struct RouteRef {
    route: String,
    has_other_upstreams: bool,
}

impl Site {
    pub(in crate::gateway) fn upstreams(&self) -> Vec<RoutedUpstream> {
        let mut found: Vec<RoutedUpstream> = Vec::new();
        for route in &self.routes {
            for (number, target) in route.targets().enumerate() {
                if route.targets().take(number).any(|before| Arc::ptr_eq(before, target)) {
                    continue;
                }
                let at = found.iter().position(|one| Arc::ptr_eq(&one.target, target)).unwrap_or_else(|| {
                    found.push(RoutedUpstream::new(target));
                    found.len() - 1
                });
                found[at].add(route);
            }
        }
        found
    }
}

impl RoutedUpstream {
    fn new(target: &Arc<Target>) -> Self {
        Self { target: Arc::clone(target), check: None, routes: Vec::new() }
    }

    /// Adds a route that uses it.
    fn add(&mut self, route: &Route) {
        self.check = self.check.take().or_else(|| route.health_check.clone());
        let has_other_upstreams = route.targets().any(|other| !Arc::ptr_eq(other, &self.target));
        self.routes.push(RouteRef { route: route.name.clone(), has_other_upstreams });
    }

    /// Returns the fields of its log lines.
    pub(in crate::gateway) fn fields(&self) -> [Field; 2] {
        let address = &self.target.address;
        let routes: Vec<&str> = self.route_names(|_| true).into_iter().take(MAX_ROUTES).collect();
        [("upstream", format!("{}:{}", address.host, address.port).into()), ("routes", routes.into())]
    }

    /// Describes what happens to requests while it is unhealthy, for this long if that is known.
    pub(in crate::gateway) fn consequence(&self, lasts: Option<Duration>) -> String {
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
        self.routes.iter().filter(|route_ref| which(route_ref)).map(|route_ref| route_ref.route.as_str()).collect()
    }
}

impl fmt::Display for RoutedUpstream {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = &self.target.address;
        write!(out, "upstream {}:{} of {}", address.host, address.port, route_list(&self.route_names(|_| true)))
    }
}

/// Joins route names without duplicates.
pub(super) fn route_list(route_names: &[&str]) -> String {
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
pub(in crate::gateway) struct Outages(BTreeSet<String>);

impl Outages {
    /// Returns log lines with their levels for the changes since the last call. The site may have been replaced since.
    pub(in crate::gateway) fn update(&mut self, site: &Site, now: Tick) -> impl Iterator<Item = (Level, String)> {
        let down = || site.routes.iter().filter(|route| route.is_down(now));
        let before = std::mem::replace(&mut self.0, down().map(|route| route.name.clone()).collect());
        let (some, none): (Vec<&Route>, Vec<&Route>) = down()
            .filter(|route| !before.contains(&route.name))
            .partition(|route| route.targets().any(|target| target.is_healthy(now)));
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

    fn has_proven(&self, now: Tick) -> bool {
        self.targets().any(|target| target.is_proven_healthy(now))
    }
}

/// Returns an error for each upstream of a route that is one of the gateway's listen addresses.
pub(super) fn errors(route: &Route, listens: &[String]) -> Vec<SettingError> {
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
