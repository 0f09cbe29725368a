//! Finds routes that no request reaches because other routes cover them, and prefixes that no path of a glob begins
//! with.
//!
//! It reports no false positives, but it misses some cases, such as a route that several others cover only together.

use std::cmp::Ordering;

use super::path::{PathGlob, Segment, wildcard};
use super::routes::specific;
use super::{Match, PathCase};

/// Files that people write need some thousand steps. The comparison stops after this many, without a warning.
const MAX_STEPS: usize = 20_000_000;

/// With more combinations of hosts and paths than this, routes are not compared.
const MAX_PARTS: usize = 10_000;

/// A route that no request reaches, and a route that covers it, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shadowed {
    pub(super) route: usize,
    pub(super) by: usize,
}

/// One host and one path of a route.
struct Part {
    route: usize,
    matching: Match,
    /// The path in a form that is easy to compare.
    path: Vec<Segment>,
}

impl Part {
    fn new((route, matching): (usize, Match)) -> Self {
        let path = matching.paths.first().map(|glob| in_order(&glob.segments)).unwrap_or_default();
        Self { route, matching, path }
    }

    fn goes_before(&self, other: &Self, steps: &mut Steps) -> bool {
        steps.take(self.path.len() + other.path.len())
            && specific(&self.matching, &other.matching).then(self.route.cmp(&other.route)) == Ordering::Less
    }
}

/// Returns the routes that no request reaches, in their order.
pub(super) fn shadowed(routes: &[Match]) -> Vec<Shadowed> {
    let combinations = |route: &Match| route.hosts.len().max(1).saturating_mul(route.paths.len().max(1));
    if routes.iter().map(combinations).fold(0, usize::saturating_add) > MAX_PARTS {
        return Vec::new();
    }
    let apart = routes.iter().enumerate();
    let apart = apart.flat_map(|(number, route)| route.clone().split().into_iter().map(move |one| (number, one)));
    let parts: Vec<Part> = apart.map(Part::new).collect();
    let mut steps = Steps(MAX_STEPS);
    let mut covering = |part: &Part| {
        let others = parts.iter().filter(|other| other.route != part.route);
        let mut found = others.filter(|other| covers(other, part, &mut steps) && other.goes_before(part, &mut steps));
        found.next().map(|other| other.route)
    };
    let of_one_route = parts.chunk_by(|one, next| one.route == next.route);
    let shadows = of_one_route.filter_map(|parts| {
        let by: Option<Vec<usize>> = parts.iter().map(&mut covering).collect();
        Some(Shadowed { route: parts[0].route, by: *by?.first()? })
    });
    shadows.collect()
}

/// Returns `true` if a path that matches the glob can begin with these whole segments.
pub(super) fn can_begin_with(glob: &PathGlob, prefix: &str) -> bool {
    let wanted = prefix.split('/').filter(|segment| !segment.is_empty());
    let mut globs = glob.segments.iter().map(Some).chain(std::iter::repeat(None));
    // After a `**`, everything is possible.
    let mut pairs = wanted.zip(&mut globs).take_while(|(_, glob)| !matches!(glob, Some(Segment::Any)));
    pairs.all(|(wanted, glob)| glob.is_some_and(|glob| glob.matches(wanted, PathCase::Sensitive)))
}

/// The remaining number of comparisons.
struct Steps(usize);

impl Steps {
    fn take(&mut self, steps: usize) -> bool {
        let left = self.0.checked_sub(steps);
        self.0 = left.unwrap_or(0);
        left.is_some()
    }
}

/// Returns `true` if every request that matches `other` matches `one` too.
fn covers(one: &Part, other: &Part, steps: &mut Steps) -> bool {
    if !steps.take(1) {
        return false;
    }
    // A case-sensitive route leaves the other cases to a case-insensitive one.
    let covers_case = one.matching.ignores_path_case
        || !other.matching.ignores_path_case
        || one.path.iter().all(|segment| matches!(segment, Segment::One | Segment::Any));
    let path = one.matching.paths.is_empty()
        || (!other.matching.paths.is_empty() && covers_case && covers_path(&one.path, &other.path, steps));
    let (one, other) = (&one.matching, &other.matching);
    let host = match (one.hosts.first(), other.hosts.first()) {
        (None, _) => true,
        (Some(_), None) => false,
        (Some(one), Some(other)) => one == other || (one.is_wildcard && one.matches(&other.name)),
    };
    let nothing_else = one.conditions.is_empty() && (one.domain.is_none() || one.domain == other.domain);
    path && host && nothing_else && covers_methods(one, other, steps) && covers_headers(one, other, steps)
}

fn covers_methods(one: &Match, other: &Match, steps: &mut Steps) -> bool {
    one.methods.is_empty()
        || (!other.methods.is_empty()
            && steps.take(one.methods.len().saturating_mul(other.methods.len()))
            && other.methods.iter().all(|method| one.methods.contains(method)))
}

fn covers_headers(one: &Match, other: &Match, steps: &mut Steps) -> bool {
    one.headers.iter().all(|(name, value)| {
        steps.take(other.headers.len())
            && other.headers.iter().any(|(also, narrower)| also == name && narrower_text(value, narrower, steps))
    })
}

/// Returns `true` if a pattern matches everything that a narrower one matches. A star is matched only by a star.
fn narrower_text(pattern: &str, narrower: &str, steps: &mut Steps) -> bool {
    steps.take(pattern.len().saturating_mul(narrower.len())) && wildcard(pattern.as_bytes(), narrower.as_bytes())
}

/// Moves each `**` behind adjacent `*`s: `/**/*` becomes `/*/**`.
fn in_order(segments: &[Segment]) -> Vec<Segment> {
    let mut ordered = Vec::with_capacity(segments.len());
    for run in segments.chunk_by(|one, next| is_open(one) && is_open(next)) {
        ordered.extend(run.iter().filter(|segment| !matches!(segment, Segment::Any)).cloned());
        ordered.extend(run.iter().find(|segment| matches!(segment, Segment::Any)).cloned());
    }
    ordered
}

fn is_open(segment: &Segment) -> bool {
    matches!(segment, Segment::One | Segment::Any)
}

/// Returns `true` if every path that matches `others` matches `globs`.
fn covers_path(globs: &[Segment], others: &[Segment], steps: &mut Steps) -> bool {
    let (mut globs, mut others) = (globs, others);
    while let Some((glob, further)) = globs.split_first() {
        if !steps.take(1) {
            return false;
        }
        if matches!(glob, Segment::Any) {
            return further.is_empty() || (0..=others.len()).any(|skip| covers_path(further, &others[skip..], steps));
        }
        let Some((other, rest)) = others.split_first() else { return false };
        let is_covered = match (glob, other) {
            (_, Segment::Any) => false,
            (Segment::Literal(one), Segment::Literal(other)) => one == other,
            (Segment::Pattern(one), Segment::Literal(other) | Segment::Pattern(other)) => {
                narrower_text(one, other, steps)
            }
            (Segment::One, _) => true,
            _ => false,
        };
        if !is_covered {
            return false;
        }
        (globs, others) = (further, rest);
    }
    others.is_empty()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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
        let routes: Vec<Match> = routes.iter().map(route).collect();
        shadowed(&routes).into_iter().map(|Shadowed { route, by }| (route, by)).collect()
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

    proptest! {
        #[test]
        fn covered_paths_are_matched(
            one in "(/(a|b|a\\*|\\*b|\\*|\\*\\*)){1,4}",
            other in "(/(a|b|a\\*|\\*b|\\*|\\*\\*)){1,4}",
            paths in prop::collection::vec("(/[ab]{1,2}){0,4}", 20),
        ) {
            let (Ok(one), Ok(other)) = (one.parse::<PathGlob>(), other.parse::<PathGlob>()) else { return Ok(()) };
            if covers_path(&in_order(&one.segments), &in_order(&other.segments), &mut Steps(MAX_STEPS)) {
                for path in paths.iter().filter(|path| other.matches(path)) {
                    prop_assert!(one.matches(path), "{one} {other} {path}");
                }
            }
        }
    }
}
