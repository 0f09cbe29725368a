//! The distinct upstreams of a site and the routes that use them, for health checks and log lines.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tollgate::rules::file::internal::HealthCheckRule;

use super::super::target::Target;
use super::{Route, Site};
use crate::limit_summary::span;
use crate::notice::{Field, join_up_to};

/// The maximum number of route names in a log line.
const MAX_ROUTES: usize = 5;

/// An upstream and the routes that use it.
#[derive(Clone)]
pub(in super::super) struct RoutedUpstream {
    pub(in super::super) target: Arc<Target>,
    /// The health check, from the first route that has one.
    pub(in super::super) check: Option<HealthCheckRule>,
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
    pub(in super::super) fn upstreams(&self) -> Vec<RoutedUpstream> {
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
    pub(in super::super) fn fields(&self) -> [Field; 2] {
        let address = &self.target.address;
        let routes: Vec<&str> = self.route_names(|_| true).into_iter().take(MAX_ROUTES).collect();
        [("upstream", format!("{}:{}", address.host, address.port).into()), ("routes", routes.into())]
    }

    /// Describes what happens to requests while it is unhealthy, for this long if that is known.
    pub(in super::super) fn consequence(&self, lasts: Option<Duration>) -> String {
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
