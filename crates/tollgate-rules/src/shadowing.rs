//! Finds routes that no request reaches because other routes cover them, and prefixes that no path of a glob begins
//! with.
//!
//! It reports no false positives, but it misses some cases, such as a route that several others cover only together.

use std::cmp::Ordering;

use super::coverage::{Part, Steps, count_parts, covers_apart_from_methods};
use super::path::{PathGlob, Segment};
use super::routes::specific;
use super::{Match, PathCase, head};

/// With more combinations of hosts and paths than this, routes are not compared.
const MAX_PARTS: usize = 10_000;

/// A route that no request reaches, and a route that covers it, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shadowed {
    /// The index of the route that no request reaches.
    pub route: usize,
    /// The index of the route that gets its requests.
    pub by: usize,
}

impl Part {
    fn goes_before(&self, other: &Self, steps: &mut Steps) -> bool {
        steps.take(self.path.len() + other.path.len())
            && specific(&self.matching, &other.matching).then(self.number.cmp(&other.number)) == Ordering::Less
    }
}

/// Returns the routes that no request reaches, in their order.
pub fn shadowed(routes: &[Match]) -> Vec<Shadowed> {
    if routes.iter().map(count_parts).fold(0, usize::saturating_add) > MAX_PARTS {
        return Vec::new();
    }
    let mut parts: Vec<Part> =
        routes.iter().enumerate().flat_map(|(number, route)| Part::all_of(number, route)).collect();
    head::add_to_routes(&mut parts);
    let mut steps = Steps::default();
    let mut covering = |part: &Part| {
        let others = parts.iter().filter(|other| other.number != part.number);
        let mut found = others.filter(|other| covers(other, part, &mut steps) && other.goes_before(part, &mut steps));
        found.next().map(|other| other.number)
    };
    let of_one_route = parts.chunk_by(|one, next| one.number == next.number);
    let shadows = of_one_route.filter_map(|parts| {
        let by: Option<Vec<usize>> = parts.iter().map(&mut covering).collect();
        Some(Shadowed { route: parts[0].number, by: *by?.first()? })
    });
    shadows.collect()
}

/// Returns `true` if a path that matches the glob can begin with these whole segments.
pub fn can_begin_with(glob: &PathGlob, prefix: &str) -> bool {
    let wanted = prefix.split('/').filter(|segment| !segment.is_empty());
    let mut globs = glob.segments.iter().map(Some).chain(std::iter::repeat(None));
    // After a `**`, everything is possible.
    let mut pairs = wanted.zip(&mut globs).take_while(|(_, glob)| !matches!(glob, Some(Segment::Any)));
    pairs.all(|(wanted, glob)| glob.is_some_and(|glob| glob.matches(wanted, PathCase::Sensitive)))
}

/// Returns `true` if every request that matches `other` matches `one` too.
fn covers(one: &Part, other: &Part, steps: &mut Steps) -> bool {
    covers_apart_from_methods(one, other, steps) && covers_methods(&one.matching, &other.matching, steps)
}

fn covers_methods(one: &Match, other: &Match, steps: &mut Steps) -> bool {
    one.methods.is_empty()
        || (!other.methods.is_empty()
            && steps.take(one.methods.len().saturating_mul(other.methods.len()))
            && other.methods.iter().all(|method| one.methods.iter().any(|named| named.eq_ignore_ascii_case(method))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(routes: &[&str]) -> Vec<(usize, usize)> {
        let route = |text: &&str| {
            text.split(' ').fold(Match::everything(), |route, word| match word.split_once('=') {
                Some((name, value)) => route.header(name, value),
                None if word.starts_with('/') => route.path(word),
                None if word.chars().all(char::is_uppercase) => route.method(word),
                None => route.host(word),
            })
        };
        shadowed(&routes.iter().map(route).collect::<Vec<_>>())
            .into_iter()
            .map(|Shadowed { route, by }| (route, by))
            .collect()
    }

    #[test]
    fn a_route_is_shadowed_by_one_that_goes_first_and_matches_as_much() {
        assert_eq!(found(&["GET POST /a", "GET /a"]), [(1, 0)]);
        assert_eq!(found(&["GET /a", "GET POST /a"]), []);
        assert_eq!(found(&["/a x-v=*", "/a x-v=1"]), [(1, 0)]);
        assert_eq!(found(&["/a x-v=1", "/a x-v=*"]), []);
        assert_eq!(found(&["/a/**/*", "/a/*/**"]), [(0, 1)]);
        assert_eq!(found(&["/a/v*", "/a/*v*"]), [(0, 1)]);
        assert_eq!(found(&["h /a h.example", "GET h /a"]), []);
        assert_eq!(found(&["h GET POST /**", "h i GET /**"]), []);
        assert_eq!(found(&["h i GET POST /**", "h i GET /**"]), [(1, 0)]);
    }

    #[test]
    fn a_route_for_head_is_shadowed_only_by_one_that_names_head() {
        assert_eq!(found(&["GET /a", "HEAD /a"]), []);
        assert_eq!(found(&["GET HEAD /a", "HEAD /a"]), [(1, 0)]);
        assert_eq!(found(&["GET /a", "GET HEAD /a"]), []);
        assert_eq!(found(&["GET /a", "HEAD /a x-v=1"]), []);
        assert_eq!(found(&["GET HEAD /a", "GET /a"]), [(1, 0)]);
        assert_eq!(found(&["GET /a/v*", "HEAD /a/*v*"]), []);
    }

    #[test]
    fn a_case_insensitive_route_gets_the_other_cases() {
        let route = |path: &str| Match::everything().path(path);
        let count = |routes: &[Match]| shadowed(routes).len();
        assert_eq!(count(&[route("/a/**"), route("/a/**").ignoring_path_case()]), 0);
        assert_eq!(count(&[route("/a/**").ignoring_path_case(), route("/a/**")]), 1);
        assert_eq!(count(&[route("/**"), route("/**").ignoring_path_case()]), 1);
    }

    #[test]
    fn more_specific_routes_are_reached() {
        assert_eq!(found(&["/**", "/a/**", "/a/*", "/a/b", "*.h /**", "a.h /**", "GET /a/b", "GET /a/b x=1"]), []);
    }

    #[test]
    fn impossible_prefixes_are_found() {
        let can = |glob: &str, prefix: &str| can_begin_with(&glob.parse().unwrap(), prefix);
        for (glob, prefix) in [
            ("/api/**", "/api"),
            ("/api/**", "/api/v1"),
            ("/**", "/api"),
            ("/*/x", "/api"),
            ("/v*/x", "/v1/x"),
            ("/api", "/api"),
            ("/a/**/b", "/a/x/y/z"),
            ("/x", "/"),
        ] {
            assert!(can(glob, prefix), "{glob} {prefix}");
        }
        for (glob, prefix) in [("/api/**", "/ap"), ("/api", "/api/v1"), ("/v*/x", "/w1"), ("/", "/api")] {
            assert!(!can(glob, prefix), "{glob} {prefix}");
        }
    }
}
