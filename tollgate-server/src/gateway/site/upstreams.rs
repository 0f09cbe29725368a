//! The upstreams of a site, each once, however many routes lead to it: as they are checked, and as people are told of
//! them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tollgate::rules::file::HealthCheckRule;

use super::super::target::Target;
use super::super::ticks::Tick;
use super::{Route, Site};
use crate::limits_told::span;
use crate::notice::some_of;

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
    /// Where else it leads.
    others: Vec<Arc<Target>>,
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
        let others = route.targets().filter(|other| !Arc::ptr_eq(other, &self.target)).cloned().collect();
        self.ways.push(Way { route: route.name.clone(), others });
    }

    /// What becomes of requests while it is not well, for so long if that is known.
    pub(in super::super) fn consequence(&self, lasts: Option<Duration>, now: Tick) -> String {
        let lasts = lasts.map(|lasts| format!(" for {}", span(lasts))).unwrap_or_default();
        let spared = format!("it gets no requests{lasts} while another upstream is well");
        let (only, down) = (self.routes(Way::leads_nowhere_else), self.routes(|way| way.has_no_other_well(now)));
        let is_spared = only.len() + down.len() < self.ways.len();
        let kept = match (&*only, is_spared) {
            ([], true) => Some(spared),
            ([], false) => None,
            // Another route of that name may have another.
            (only, true) => Some(format!("{spared}, but for those of {} where there is no other", listed(only))),
            (only, false) => {
                let whose = match only {
                    _ if !down.is_empty() => listed(only),
                    [_] => "its route".to_owned(),
                    _ => "its routes".to_owned(),
                };
                Some(format!("it still gets requests, as the only upstream of {whose}"))
            }
        };
        let lost = || format!("no upstream of {} is well now: requests go to all of them", listed(&down));
        let lost = (!down.is_empty()).then(lost);
        kept.into_iter().chain(lost).collect::<Vec<_>>().join("; ")
    }

    /// What more there is to tell of its return: the routes that had no upstream that was well.
    pub(in super::super) fn saved(&self, now: Tick) -> String {
        let saved = self.routes(|way| way.has_no_other_well(now));
        if saved.is_empty() || !self.target.is_surely_well(now) {
            return String::new();
        }
        format!("; it is the first upstream of {} that is well again", listed(&saved))
    }

    fn routes(&self, which: impl Fn(&Way) -> bool) -> Vec<&str> {
        self.ways.iter().filter(|way| which(way)).map(|way| way.route.as_str()).collect()
    }
}

impl Way {
    fn leads_nowhere_else(&self) -> bool {
        self.others.is_empty()
    }

    /// Whether it leads elsewhere, but only to what is not well either.
    fn has_no_other_well(&self, now: Tick) -> bool {
        !self.leads_nowhere_else() && !self.others.iter().any(|other| other.is_surely_well(now))
    }
}

impl fmt::Display for Named {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = &self.target.address;
        write!(out, "upstream {}:{} of {}", address.host, address.port, listed(&self.routes(|_| true)))
    }
}

/// Names of routes, each once.
fn listed(routes: &[&str]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for name in routes {
        if !names.contains(name) {
            names.push(name);
        }
    }
    let noun = if names.len() == 1 { "route" } else { "routes" };
    format!("{noun} {}", some_of(&names, MAX_ROUTES))
}
