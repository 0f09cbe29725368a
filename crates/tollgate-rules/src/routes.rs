//! Selects the route that serves a request: the most specific one that matches.
//!
//! Routes are compared by host (a name before a wildcard, longer before shorter, any host before none), then by path
//! (segment by segment: text, then text with `*`, then `*`, then `**`; longer before shorter), then by whether they
//! have methods, then by the number of headers. Equal routes keep their order. A route for GET serves HEAD too, unless
//! another route names HEAD and serves the same requests.

use std::cmp::{Ordering, Reverse};

use tollgate::InvalidLimit;

use super::client::TrustedProxies;
use super::coverage::Part;
use super::host::HostGlob;
use super::index::{Index, Indexed, IndexedBy};
use super::matching::Known;
use super::path::{PathGlob, Segment};
use super::{Facts, Match, PathReading, Request, head};

/// Routes, most specific first.
///
/// ```
/// use tollgate_rules::{Facts, Match, Routes};
///
/// let all = Match::everything().path("/**");
/// let users = Match::everything().path("/users/*");
/// let me = Match::everything().path("/users/me");
/// let routes = Routes::new([all, users, me])?;
/// assert_eq!(routes.find(&Facts::new("GET", "/users/me")), Some(2));
/// assert_eq!(routes.find(&Facts::new("GET", "/users/42?full=1")), Some(1));
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
#[derive(Debug, Default)]
pub struct Routes {
    /// One entry for each host and path of each route, with the number of the route.
    entries: Box<[Entry]>,
    index: Index,
    /// Routes do not depend on the client, so no proxies are needed.
    nobody: TrustedProxies,
}

#[derive(Debug)]
struct Entry {
    matching: Match,
    /// Conditions that are known to hold for requests that the index finds.
    known: Known,
    number: usize,
}

impl Routes {
    /// Creates a routing table. Routes are numbered in their order.
    ///
    /// # Errors
    ///
    /// If a path, a host or a header name is invalid.
    pub fn new(routes: impl IntoIterator<Item = Match>) -> Result<Self, InvalidLimit> {
        let routes: Vec<Match> = routes.into_iter().collect();
        if let Some(problem) = routes.iter().find_map(Match::problem) {
            return Err(problem.clone());
        }
        let mut parts: Vec<Part> =
            routes.iter().enumerate().flat_map(|(number, one)| Part::all_of(number, one)).collect();
        head::add_to_routes(&mut parts);
        let mut entries: Vec<(Match, usize)> = parts.into_iter().map(|part| (part.matching, part.number)).collect();
        // A stable sort keeps equal routes in their order.
        entries.sort_by(|(one, _), (other, _)| specific(one, other));
        let indexed: Vec<Indexed<'_>> = entries
            .iter()
            .map(|(one, _)| Indexed { paths: &one.paths, hosts: &one.hosts, by_name_only: false })
            .collect();
        let index = Index::new(&indexed);
        let entry = |((matching, number), by): ((Match, usize), &IndexedBy)| {
            let known = matching.known_if_found_by(*by);
            Entry { matching, known, number }
        };
        let entries = entries.into_iter().zip(index.indexed_by()).map(entry).collect();
        Ok(Self { entries, index, nobody: TrustedProxies::default() })
    }

    /// Returns the number of the route that serves a request.
    #[must_use]
    pub fn find(&self, facts: &Facts<'_>) -> Option<usize> {
        let request = Request::new(facts, PathReading::default(), &self.nobody, None);
        let doubts_paths = self.index.has_paths() && request.has_upper_case_path();
        let serves = |entry: &&Entry| {
            let known = if doubts_paths { Known::Nothing } else { entry.known };
            entry.matching.first_miss(&request, known).is_none()
        };
        let found = match self.index.all_always() {
            Some(_) => self.entries.iter().find(serves),
            None => {
                let candidates = self.index.candidates(|| request.readings(), || request.host());
                candidates.into_iter().map(|number| &self.entries[number as usize]).find(serves)
            }
        };
        found.map(|entry| entry.number)
    }
}

/// Compares two matches. The more specific one is less, so that it comes first.
pub(super) fn specific(one: &Match, other: &Match) -> Ordering {
    let by_host = rank_of_host(one.hosts.first()).cmp(&rank_of_host(other.hosts.first()));
    let by_path = || compare_paths(one.paths.first(), other.paths.first());
    by_host.then_with(by_path).then_with(|| one.narrowness().cmp(&other.narrowness()))
}

fn rank_of_host(host: Option<&HostGlob>) -> (u8, Reverse<usize>) {
    match host {
        Some(host) if !host.is_wildcard => (0, Reverse(0)),
        Some(host) => (1, Reverse(host.name.len())),
        None => (2, Reverse(0)),
    }
}

fn compare_paths(one: Option<&PathGlob>, other: Option<&PathGlob>) -> Ordering {
    let segments = |glob: Option<&PathGlob>| glob.map_or(Vec::new(), |glob| glob.segments.iter().map(rank).collect());
    let (mut one, mut other) = (segments(one), segments(other));
    // The end of a path is more specific than `**`, and less specific than anything else.
    one.push((END, Reverse(0)));
    other.push((END, Reverse(0)));
    one.cmp(&other)
}

const END: u8 = 3;

fn rank(segment: &Segment) -> (u8, Reverse<usize>) {
    match segment {
        Segment::Literal(_) => (0, Reverse(0)),
        Segment::Pattern(text) => (1, Reverse(text.len())),
        Segment::One => (2, Reverse(0)),
        Segment::Any => (END + 1, Reverse(0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(text: &str) -> Match {
        let mut route = Match::everything();
        for word in text.split(' ') {
            route = match word.chars().next() {
                Some('/') => route.path(word),
                Some('x') => route.header(word, "*"),
                Some(letter) if letter.is_ascii_uppercase() => route.method(word),
                _ => route.host(word),
            };
        }
        route
    }

    fn found<'t>(routes: &[&'t str], facts: &Facts<'_>) -> Option<&'t str> {
        let found = Routes::new(routes.iter().map(|text| route(text))).unwrap().find(facts);
        // The order of the file matters only among equal routes.
        let turned = Routes::new(routes.iter().rev().map(|text| route(text))).unwrap().find(facts);
        assert_eq!(found, turned.map(|number| routes.len() - 1 - number));
        found.map(|number| routes[number])
    }

    #[test]
    fn the_most_specific_route_serves_whatever_the_order() {
        let routes = [
            "/**",
            "/api/**",
            "/api/*",
            "/api/v*",
            "/api/v1",
            "/api/v1/**",
            "/api/*/users",
            "GET /api/v1",
            "GET /api/v1 x-beta",
            "*.example.com /**",
            "*.api.example.com /**",
            "www.example.com /**",
        ];
        for (path, host, wanted) in [
            ("/", "h", Some("/**")),
            ("/api", "h", Some("/api/**")),
            ("/api/x", "h", Some("/api/*")),
            ("/api/v2", "h", Some("/api/v*")),
            ("/api/v1", "h", Some("GET /api/v1")),
            ("/api/v1/x", "h", Some("/api/v1/**")),
            ("/api/v1/users", "h", Some("/api/v1/**")),
            ("/api/v2/users", "h", Some("/api/*/users")),
            ("/api/v1", "a.example.com", Some("*.example.com /**")),
            ("/api/v1", "a.api.example.com", Some("*.api.example.com /**")),
            ("/api/v1", "WWW.example.com:8080", Some("www.example.com /**")),
        ] {
            assert_eq!(found(&routes, &Facts::new("GET", path).host(host)), wanted, "{path} {host}");
        }
        assert_eq!(found(&routes, &Facts::new("POST", "/api/v1").host("h")), Some("/api/v1"));
        let headers = http::HeaderMap::from_iter([(http::HeaderName::from_static("x-beta"), "1".parse().unwrap())]);
        let facts = Facts::new("GET", "/api/v1").host("h").headers(&headers);
        assert_eq!(found(&routes, &facts), Some("GET /api/v1 x-beta"));
    }

    #[test]
    fn a_route_that_ignores_case_is_found_in_any_case() {
        let routes = Routes::new([
            route("/**"),
            route("/Api/** /v*/x").ignoring_path_case(),
            route("/api/exact"),
            route("h.example /own/**").ignoring_path_case(),
        ])
        .expect("the routes are valid");
        let found = |path: &str, host: &str| routes.find(&Facts::new("GET", path).host(host));
        for path in ["/api/x", "/API/x", "/Api", "/V1/X", "/v1/x", "/api/EXACT"] {
            assert_eq!(found(path, "h"), Some(1), "{path}");
        }
        assert_eq!(found("/api/exact", "h"), Some(2));
        assert_eq!(found("/APIS/x", "h"), Some(0));
        assert_eq!((found("/OWN/a", "h.example"), found("/own/A", "h.example")), (Some(3), Some(3)));
    }

    #[test]
    fn a_request_without_a_matching_route_has_none() {
        assert_eq!(found(&["/a/**", "b.example /b"], &Facts::new("GET", "/b").host("c.example")), None);
        assert_eq!(found(&[], &Facts::new("GET", "/")), None);
    }

    #[test]
    fn a_route_for_get_serves_head_unless_another_names_it_and_matches_as_much() {
        let served = |routes: &[&'static str]| found(routes, &Facts::new("HEAD", "/a/b").host("h"));
        assert_eq!(served(&["GET /a/**", "/a/**"]), Some("GET /a/**"));
        assert_eq!(served(&["POST /a/**", "/**"]), Some("/**"));
        assert_eq!(served(&["GET /a/**", "HEAD /a/**"]), Some("HEAD /a/**"));
        assert_eq!(served(&["GET /a/*", "HEAD /**"]), Some("HEAD /**"));
        assert_eq!(served(&["GET /a/*", "HEAD /health"]), Some("GET /a/*"));
        assert_eq!(served(&["GET /a/** /b", "HEAD /a/**"]), Some("HEAD /a/**"));
        assert_eq!(served(&["GET /a/** /b", "HEAD /b"]), Some("GET /a/** /b"));
        assert_eq!(served(&["GET /a/**", "HEAD /a/** xbeta"]), Some("GET /a/**"), "without the header");
    }

    #[test]
    fn each_path_and_host_of_a_route_is_ranked_by_itself() {
        let routes = ["/a /b/**", "/b/c /**", "v.example w.example /a"];
        assert_eq!(found(&routes, &Facts::new("GET", "/a")), Some("/a /b/**"));
        assert_eq!(found(&routes, &Facts::new("GET", "/b/c")), Some("/b/c /**"));
        assert_eq!(found(&routes, &Facts::new("GET", "/b/d")), Some("/a /b/**"));
        assert_eq!(found(&routes, &Facts::new("GET", "/a").host("w.example")), Some("v.example w.example /a"));
    }
}
