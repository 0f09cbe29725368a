//! Routes that lead to several upstreams, none of which is well: told once when that begins, and once when it is over.
//!
//! Upstreams that fail for one cause fail together, and return together: none of them is the last to go, or the first to
//! be back. So it is the routes that are looked at.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::super::ticks::Tick;
use super::upstreams::route_list;
use super::{Route, Site};

/// The names of routes of which people were told that no upstream is well. Of several routes with one name, one is
/// enough for that.
#[derive(Default)]
pub(in super::super) struct Outages(BTreeSet<String>);

impl Outages {
    /// What is new since the last look. The site may be another by now.
    pub(in super::super) fn update(&mut self, site: &Site, now: Tick) -> impl Iterator<Item = String> {
        let down = || site.routes.iter().filter(|route| route.is_down(now));
        let before = std::mem::replace(&mut self.0, down().map(|route| route.name.clone()).collect());
        let (some, none): (Vec<&Route>, Vec<&Route>) = down()
            .filter(|route| !before.contains(&route.name))
            .partition(|route| route.targets().any(|target| target.is_healthy(now)));
        let is_back = |route: &&Route| {
            let is_over = before.contains(&route.name) && !self.0.contains(&route.name);
            // One that leads elsewhere now may be no better there.
            is_over && route.has_proven(now)
        };
        let back = site.routes.iter().filter(is_back).collect();
        let began = |go: &'static str| move |of| format!("no upstream of {of} is well now: requests go {go}");
        let lines = [
            names(none).map(began("to all of them")),
            names(some).map(began("first to those whose ejection is over")),
            names(back).map(|of| format!("there is a well upstream again for {of}")),
        ];
        lines.into_iter().flatten()
    }
}

fn names(routes: Vec<&Route>) -> Option<String> {
    let names: Vec<&str> = routes.into_iter().map(|route| route.name.as_str()).collect();
    (!names.is_empty()).then(|| route_list(&names))
}

impl Route {
    /// Whether it has a choice of upstreams, and none that is well. Of the only one of a route it is told what that means.
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
