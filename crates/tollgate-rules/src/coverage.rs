//! Compares two matches: whether every request that one matches is matched by the other too.
//!
//! `true` is always right. Some matches that cover each other are not recognized, such as expressions.

use super::Match;
use super::path::{Segment, wildcard};

/// Files that people write need some thousand steps. The comparison stops after this many, without a warning.
const MAX_STEPS: usize = 20_000_000;

/// One host and one path of a match.
pub(super) struct Part {
    /// The number of the match.
    pub(super) number: usize,
    pub(super) matching: Match,
    /// The path in a form that is easy to compare.
    pub(super) path: Vec<Segment>,
}

impl Part {
    /// Returns the parts of a match.
    pub(super) fn all_of(number: usize, matching: &Match) -> impl Iterator<Item = Self> + use<> {
        matching.clone().split().into_iter().map(move |matching| {
            let path = matching.paths.first().map(|glob| in_order(&glob.segments)).unwrap_or_default();
            Self { number, matching, path }
        })
    }
}

/// Returns the number of combinations of a host and a path.
pub(super) fn count_parts(matching: &Match) -> usize {
    matching.hosts.len().max(1).saturating_mul(matching.paths.len().max(1))
}

/// The remaining number of comparisons.
pub(super) struct Steps(usize);

impl Default for Steps {
    fn default() -> Self {
        Self(MAX_STEPS)
    }
}

impl Steps {
    pub(super) fn take(&mut self, steps: usize) -> bool {
        let left = self.0.checked_sub(steps);
        self.0 = left.unwrap_or(0);
        left.is_some()
    }
}

/// Returns `true` if every request that matches `other` would match `one` too, if they had the same methods.
pub(super) fn covers_apart_from_methods(one: &Part, other: &Part, steps: &mut Steps) -> bool {
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
    path && host && nothing_else && covers_headers(one, other, steps)
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
    use std::cell::Cell;

    use proptest::prelude::*;
    use proptest::test_runner::{Config, TestRunner};

    use super::*;
    use crate::PathGlob;

    #[test]
    fn covered_paths_are_matched() {
        let glob = "(/(a|b|a\\*|\\*b|\\*|\\*\\*)){1,4}";
        let globs_and_paths = (glob, glob, prop::collection::vec("(/[ab]{1,2}){0,4}", 20));
        let compared = Cell::new(0);
        let mut runner = TestRunner::new(Config { cases: 4096, failure_persistence: None, ..Config::default() });
        let outcome = runner.run(&globs_and_paths, |(one, other, paths)| {
            let (Ok(one), Ok(other)) = (one.parse::<PathGlob>(), other.parse::<PathGlob>()) else { return Ok(()) };
            if covers_path(&in_order(&one.segments), &in_order(&other.segments), &mut Steps::default()) {
                for path in paths.iter().filter(|path| other.matches(path)) {
                    prop_assert!(one.matches(path), "{one} {other} {path}");
                    compared.set(compared.get() + u32::from(one != other));
                }
            }
            Ok(())
        });
        assert_eq!(outcome, Ok(()));
        // Two globs at random rarely cover each other.
        assert!(compared.get() > 500, "only {} paths were compared", compared.get());
    }
}
