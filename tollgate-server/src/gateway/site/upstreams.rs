//! The upstreams of a site, each once, however many routes lead to it: as they are checked, and as people are told of
//! them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tollgate::rules::file::internal::HealthCheckRule;

use super::super::target::Target;
use super::{Route, Site};
use crate::limit_summary::span;
use crate::notice::join_up_to;

/// As many routes as fit a line. Whoever has more knows which.
const MAX_ROUTES: usize = 5;

/// An upstream, and what people know it by.
#[derive(Clone)]
pub(in super::super) struct Named {
    pub(in super::super) target: Arc<Target>,
    /// How it is asked whether it is well; the first route that wants that says it.
    pub(in super::super) check: Option<HealthCheckRule>,
    /// The routes that lead to it. Several may have one name: those of other hosts or methods, say.
    ways: Vec<Way>,
}

/// A route, as one of its upstreams sees it.
#[derive(Clone)]
struct Way {
    route: String,
    leads_elsewhere: bool,
}

impl Site {
    pub(in super::super) fn upstreams(&self) -> Vec<Named> {
        let mut found: Vec<Named> = Vec::new();
        for route in &self.routes {
            for (number, target) in route.targets().enumerate() {
                if route.targets().take(number).any(|before| Arc::ptr_eq(before, target)) {
                    continue;
                }
                let at = found.iter().position(|one| Arc::ptr_eq(&one.target, target)).unwrap_or_else(|| {
                    found.push(Named::new(target));
                    found.len() - 1
                });
                found[at].add(route);
            }
        }
        found
    }
}

impl Named {
    fn new(target: &Arc<Target>) -> Self {
        Self { target: Arc::clone(target), check: None, ways: Vec::new() }
    }

    /// A route that leads to it.
    fn add(&mut self, route: &Route) {
        self.check = self.check.take().or_else(|| route.health_check.clone());
        let leads_elsewhere = route.targets().any(|other| !Arc::ptr_eq(other, &self.target));
        self.ways.push(Way { route: route.name.clone(), leads_elsewhere });
    }

    /// What becomes of requests while it is not well, for so long if that is known.
    pub(in super::super) fn consequence(&self, lasts: Option<Duration>) -> String {
        let lasts = lasts.map(|lasts| format!(" for {}", span(lasts))).unwrap_or_default();
        let spared = format!("it gets no requests{lasts} while another upstream is well");
        match &*self.routes(|way| !way.leads_elsewhere) {
            [] => spared,
            // Another route of that name may have another.
            only if only.len() < self.ways.len() => {
                format!("{spared}, but for those of {} where there is no other", listed(only))
            }
            [_] => "it still gets requests, as the only upstream of its route".to_owned(),
            _ => "it still gets requests, as the only upstream of its routes".to_owned(),
        }
    }

    fn routes(&self, which: impl Fn(&Way) -> bool) -> Vec<&str> {
        self.ways.iter().filter(|way| which(way)).map(|way| way.route.as_str()).collect()
    }
}

impl fmt::Display for Named {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = &self.target.address;
        write!(out, "upstream {}:{} of {}", address.host, address.port, listed(&self.routes(|_| true)))
    }
}

/// Names of routes, each once.
pub(super) fn listed(routes: &[&str]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for name in routes {
        if !names.contains(name) {
            names.push(name);
        }
    }
    let noun = if names.len() == 1 { "route" } else { "routes" };
    format!("{noun} {}", join_up_to(&names, MAX_ROUTES))
}
