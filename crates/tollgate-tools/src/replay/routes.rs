//! The routes of the gateway, which a rule can count by.

use tollgate_config::{Parsed, Problems};
use tollgate_rules::{Facts, PathReading, Routes};

/// Finds the route that would serve a request.
pub(super) struct RouteFinder {
    routes: Routes,
    /// The name of each route, and how its upstreams read paths.
    named: Vec<(String, PathReading)>,
    reading: PathReading,
}

impl RouteFinder {
    /// Returns the routes of a file, or `None` if it has none.
    pub(super) fn new(file: &Parsed) -> Result<Option<Self>, Problems> {
        let Some(gateway) = &file.gateway else { return Ok(None) };
        let default = gateway.paths.over(PathReading::default());
        let named: Vec<_> =
            gateway.routes.iter().map(|route| (route.name().to_owned(), route.paths.over(default))).collect();
        let reading = PathReading { case: default.case, ..PathReading::AS_WRITTEN };
        Ok(Some(Self { routes: file.routes()?, named, reading }).filter(|finder| !finder.named.is_empty()))
    }

    /// Returns the facts with the route, if there is one.
    pub(super) fn route<'a>(&'a self, facts: &Facts<'a>) -> Facts<'a> {
        let found = self.routes.find(&facts.path_reading(self.reading));
        match found.and_then(|number| self.named.get(number)) {
            Some((name, reading)) => facts.route(name).path_reading(*reading),
            None => *facts,
        }
    }
}
