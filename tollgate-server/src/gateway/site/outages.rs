//! Outages: routes with several upstreams, none of which is healthy. Logged once at the start and once at the end.
//!
//! Upstreams that fail for one cause fail and recover together, so that none is the last to fail or the first to
//! recover. So the routes are observed, not the upstreams.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::super::deadline::Tick;
use super::upstreams::route_list;
use super::{Route, Site};
use crate::notice::Level;

/// The names of routes whose outage was logged. Of several routes with the same name, one is enough.
#[derive(Default)]
pub(in super::super) struct Outages(BTreeSet<String>);

impl Outages {
    /// Returns log lines with their levels for the changes since the last call. The site may have been replaced since.
    pub(in super::super) fn update(&mut self, site: &Site, now: Tick) -> impl Iterator<Item = (Level, String)> {
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
