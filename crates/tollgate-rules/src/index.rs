//! Finds the rules that may match a request, without checking every rule.
//!
//! A rule is indexed by its path, by its host, or as always matching. A rule with a path and a host is indexed by the
//! one that fewer rules share. The index returns candidates: the indexed condition holds, except for the case of a
//! path, and the other conditions are checked afterwards.

use std::borrow::Cow;
use std::collections::HashMap;

use smallvec::SmallVec;

use super::host::HostGlob;
use super::normal::host::MAX_HOST_BYTES;
use super::normal::path::{Readings, without_case};
use super::path::{PathGlob, Segment, first_segment, wildcard};

/// Numbers of rules in ascending order. A request rarely has more.
pub(super) type Candidates = SmallVec<[u32; 16]>;

/// Rules by path, by host, and the rest.
#[derive(Debug, Default)]
pub(super) struct Index {
    paths: Paths,
    hosts: HashMap<Box<str>, Vec<u32>, ahash::RandomState>,
    wildcard_hosts: HashMap<Box<str>, Vec<u32>, ahash::RandomState>,
    always: Vec<u32>,
    /// The number of rules that are not indexed.
    never: usize,
    /// One entry per rule.
    indexed_by: Vec<IndexedBy>,
}

/// The condition by which a rule is indexed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IndexedBy {
    Path,
    Host,
    Always,
    /// Not indexed: the rule is checked by its name only.
    Never,
}

/// The part of a rule that the index needs.
pub(super) struct Indexed<'a> {
    pub(super) paths: &'a [PathGlob],
    pub(super) hosts: &'a [HostGlob],
    pub(super) by_name_only: bool,
}

impl Index {
    /// Builds an index of rules, which are numbered in their order.
    pub(super) fn new(rules: &[Indexed<'_>]) -> Self {
        let mut index = Self::default();
        let mut on_path: HashMap<String, usize> = HashMap::new();
        let mut on_host: HashMap<&str, usize> = HashMap::new();
        for rule in rules {
            rule.paths.iter().for_each(|glob| *on_path.entry(glob.to_string()).or_default() += 1);
            rule.hosts.iter().for_each(|glob| *on_host.entry(&glob.name).or_default() += 1);
        }
        for (number, rule) in (0..).zip(rules) {
            let by_path = !rule.paths.is_empty() && !rule.paths.iter().any(PathGlob::is_everything);
            let rules_on_path = rule.paths.iter().map(|glob| on_path[&glob.to_string()]).max().unwrap_or(0);
            let rules_on_host = rule.hosts.iter().map(|glob| on_host[&*glob.name]).max().unwrap_or(usize::MAX);
            let indexed_by = match (by_path, rule.hosts.is_empty()) {
                _ if rule.by_name_only => IndexedBy::Never,
                (true, true) => IndexedBy::Path,
                (true, false) if rules_on_path <= rules_on_host => IndexedBy::Path,
                (_, false) => IndexedBy::Host,
                (false, true) => IndexedBy::Always,
            };
            match indexed_by {
                IndexedBy::Path => rule.paths.iter().for_each(|glob| index.paths.insert(glob, number)),
                IndexedBy::Host => rule.hosts.iter().for_each(|glob| index.insert_host(glob, number)),
                IndexedBy::Always => index.always.push(number),
                IndexedBy::Never => index.never += 1,
            }
            index.indexed_by.push(indexed_by);
        }
        index
    }

    /// Returns the condition by which each rule is indexed, in the order of the rules.
    pub(super) fn indexed_by(&self) -> &[IndexedBy] {
        &self.indexed_by
    }

    fn insert_host(&mut self, glob: &HostGlob, number: u32) {
        let hosts = if glob.is_wildcard { &mut self.wildcard_hosts } else { &mut self.hosts };
        hosts.entry(glob.name.clone()).or_default().push(number);
    }

    /// Returns all indexed rules, if none is indexed by a path or a host.
    #[inline]
    pub(super) fn all_always(&self) -> Option<&[u32]> {
        (self.always.len() + self.never == self.indexed_by.len()).then_some(&self.always)
    }

    /// Returns `true` if a rule is indexed by its path.
    pub(super) fn has_paths(&self) -> bool {
        !self.paths.nodes.is_empty()
    }

    /// Returns the rules that may match a request with these path readings and this host, which is in lower case. Each is
    /// read only if rules are indexed by it.
    pub(super) fn candidates<'r, 'p: 'r>(
        &self,
        paths: impl FnOnce() -> Option<&'r Readings<'p>>,
        host: impl FnOnce() -> Option<Cow<'r, str>>,
    ) -> Candidates {
        let mut found = Candidates::from_slice(&self.always);
        if let Some(root) = self.paths.nodes.first() {
            let readings = paths();
            for path in readings.map_or(&[][..], Readings::as_slice) {
                let (lower, folded): (SmallVec<[u8; 256]>, String);
                let path = if !readings.is_some_and(Readings::has_upper_case) {
                    path
                } else if path.contains('%') {
                    folded = without_case(path);
                    &folded
                } else {
                    lower = path.bytes().map(|byte| byte.to_ascii_lowercase()).collect();
                    // Only ASCII letters changed, so the bytes are still valid UTF-8.
                    std::str::from_utf8(&lower).unwrap_or(path)
                };
                self.paths.visit(root, path, &mut Walk { found: &mut found, passed: SmallVec::new() });
            }
        }
        let has_hosts = !(self.hosts.is_empty() && self.wildcard_hosts.is_empty());
        // A longer host is invalid. Reading it has recorded that, and the request will be refused.
        if let Some(host) = has_hosts.then(host).flatten().filter(|host| host.len() <= MAX_HOST_BYTES) {
            found.extend(self.hosts.get(&*host).into_iter().flatten().copied());
            if !self.wildcard_hosts.is_empty() {
                for (dot, _) in host.match_indices('.').filter(|(dot, _)| *dot > 0) {
                    found.extend(self.wildcard_hosts.get(&host[dot + 1..]).into_iter().flatten().copied());
                }
            }
        }
        if found.len() > self.always.len() {
            found.sort_unstable();
            found.dedup();
        }
        found
    }
}

/// A tree of path segments without case. The first node is the root.
#[derive(Debug, Default)]
struct Paths {
    nodes: Vec<Node>,
}

#[derive(Debug, Default)]
struct Node {
    literals: Literals,
    patterns: Vec<(Box<str>, usize)>,
    one: Option<usize>,
    any: Option<usize>,
    /// The rules whose glob ends here.
    ends: Vec<u32>,
}

/// The child nodes of literal segments.
#[derive(Debug, Default)]
struct Literals {
    /// Used as long as there are only a few.
    few: Vec<(Box<str>, usize)>,
    many: HashMap<Box<str>, usize, ahash::RandomState>,
}

impl Literals {
    /// This many strings are compared in the time that one hash takes.
    const FEW: usize = 4;

    fn get_or_insert(&mut self, text: &str, new: usize) -> usize {
        if let Some(known) = self.get(text) {
            return known;
        }
        if self.many.is_empty() && self.few.len() < Self::FEW {
            self.few.push((text.into(), new));
        } else {
            self.many.extend(self.few.drain(..));
            self.many.insert(text.into(), new);
        }
        new
    }

    fn get(&self, text: &str) -> Option<usize> {
        if self.many.is_empty() {
            self.few.iter().find(|(known, _)| **known == *text).map(|(_, node)| *node)
        } else {
            self.many.get(text).copied()
        }
    }

    fn is_empty(&self) -> bool {
        self.few.is_empty() && self.many.is_empty()
    }
}

impl Paths {
    fn insert(&mut self, glob: &PathGlob, number: u32) {
        if self.nodes.is_empty() {
            self.nodes.push(Node::default());
        }
        let mut at = 0;
        for segment in &glob.segments {
            let new = self.nodes.len();
            let node = &mut self.nodes[at];
            let next = match segment {
                Segment::Literal(text) => node.literals.get_or_insert(&without_case(text), new),
                Segment::One => *node.one.get_or_insert(new),
                Segment::Any => *node.any.get_or_insert(new),
                Segment::Pattern(text) => {
                    let text = without_case(text).into_boxed_str();
                    match node.patterns.iter().find(|(pattern, _)| *pattern == text) {
                        Some((_, child)) => *child,
                        None => {
                            node.patterns.push((text, new));
                            new
                        }
                    }
                }
            };
            if next == new {
                self.nodes.push(Node::default());
            }
            at = next;
        }
        self.nodes[at].ends.push(number);
    }

    fn visit(&self, node: &Node, path: &str, walk: &mut Walk<'_>) {
        if let Some(any) = node.any {
            self.visit_any(any, path, walk);
        }
        let Some((segment, rest)) = first_segment(path) else {
            walk.found.extend_from_slice(&node.ends);
            return;
        };
        if let Some(child) = node.literals.get(segment) {
            self.visit(&self.nodes[child], rest, walk);
        }
        if let Some(child) = node.one {
            self.visit(&self.nodes[child], rest, walk);
        }
        for (pattern, child) in &node.patterns {
            if wildcard(pattern.as_bytes(), segment.as_bytes()) {
                self.visit(&self.nodes[*child], rest, walk);
            }
        }
    }

    /// Visits a node after `**`, with every suffix of the path. No glob has two `**` in a row.
    fn visit_any(&self, any: usize, path: &str, walk: &mut Walk<'_>) {
        // An earlier visit with at least as much of the path left has found everything already.
        match walk.passed.iter_mut().find(|(node, _)| *node == any) {
            Some((_, left)) if *left >= path.len() => return,
            Some((_, left)) => *left = path.len(),
            None => {
                walk.passed.push((any, path.len()));
                walk.found.extend_from_slice(&self.nodes[any].ends);
            }
        }
        let node = &self.nodes[any];
        if node.literals.is_empty() && node.patterns.is_empty() && node.one.is_none() {
            return;
        }
        let mut rest = path;
        while let Some((_, after)) = first_segment(rest) {
            self.visit(node, rest, walk);
            rest = after;
        }
    }
}

/// One traversal of the tree.
struct Walk<'f> {
    found: &'f mut Candidates,
    /// The nodes after a `**` that were visited, with the length of the path left there. Bounds the work for paths that
    /// repeat one segment.
    passed: SmallVec<[(usize, usize); 4]>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{PathCase, PathReading};

    fn readings(path: &str) -> Readings<'_> {
        Readings::new(path, PathReading::default()).unwrap()
    }

    fn segment() -> impl Strategy<Value = String> {
        prop_oneof![3 => "[abA]{1,2}", 1 => Just("*".to_owned()), 1 => "[ab]\\*", 1 => Just("**".to_owned())]
    }

    fn globs() -> impl Strategy<Value = Vec<PathGlob>> {
        let glob = proptest::collection::vec(segment(), 0..5);
        proptest::collection::vec(glob.prop_map(|segments| format!("/{}", segments.join("/"))), 0..3)
            .prop_map(|texts| texts.iter().filter_map(|text| text.parse().ok()).collect())
    }

    fn hosts() -> impl Strategy<Value = Vec<HostGlob>> {
        proptest::collection::vec("(\\*\\.)?[ab]\\.c", 0..3)
            .prop_map(|texts| texts.iter().filter_map(|text| text.parse().ok()).collect())
    }

    proptest! {
        #[test]
        fn candidates_hold_every_rule_that_matches(
            rules in proptest::collection::vec((globs(), hosts()), 0..12),
            path in proptest::collection::vec("[abA]{1,2}", 0..5), host in "([ab]\\.)?[abAB]\\.c",
        ) {
            let path = format!("/{}", path.join("/"));
            let indexed: Vec<Indexed<'_>> =
                rules.iter().map(|(paths, hosts)| Indexed { paths, hosts, by_name_only: false }).collect();
            let index = Index::new(&indexed);
            let readings = readings(&path);
            let found = index.candidates(|| Some(&readings), || Some(host.to_ascii_lowercase().into()));
            prop_assert!(found.windows(2).all(|pair| pair[0] < pair[1]), "{found:?}");
            for (number, (paths, hosts)) in (0..).zip(&rules) {
                let on_path = paths.is_empty() || paths.iter().any(|glob| glob.matches(&path));
                let lower = path.to_ascii_lowercase();
                let near_path = paths.iter().any(|glob| glob.matches_reading(&lower, PathCase::Insensitive));
                let on_host = hosts.is_empty() || hosts.iter().any(|glob| glob.matches(&host));
                if on_path && on_host {
                    prop_assert!(found.contains(&number), "{number} of {found:?}");
                }
                if found.contains(&number) {
                    match index.indexed_by()[number as usize] {
                        IndexedBy::Path => prop_assert!(near_path),
                        IndexedBy::Host => prop_assert!(on_host),
                        IndexedBy::Always | IndexedBy::Never => {}
                    }
                }
            }
        }
    }

    #[test]
    fn a_path_that_repeats_one_segment_finds_each_rule_once() {
        let globs: [PathGlob; 2] = ["/**/a/**".parse().unwrap(), "/**/*/a/r7".parse().unwrap()];
        let indexed: Vec<_> = (0..100).map(|_| Indexed { paths: &globs, hosts: &[], by_name_only: false }).collect();
        let index = Index::new(&indexed);
        let path = format!("{}/r7", "/a".repeat(30_000));
        let readings = readings(&path);
        let mut found = Candidates::new();
        index.paths.visit(&index.paths.nodes[0], &path, &mut Walk { found: &mut found, passed: SmallVec::new() });
        assert_eq!(found.len(), 200);
        assert_eq!(index.candidates(|| Some(&readings), || None).len(), 100);
    }

    #[test]
    fn a_thousand_paths_or_hosts_leave_few_candidates() {
        let paths: Vec<[PathGlob; 1]> = (0..1000).map(|n| [format!("/api/r{n}/**").parse().unwrap()]).collect();
        let hosts: Vec<[HostGlob; 1]> = (0..1000).map(|n| [format!("h{n}.example.com").parse().unwrap()]).collect();
        let same: [PathGlob; 1] = ["/api/**".parse().unwrap()];
        let by_path: Vec<_> = paths.iter().map(|paths| Indexed { paths, hosts: &[], by_name_only: false }).collect();
        let path = readings("/api/r7/x");
        assert_eq!(Index::new(&by_path).candidates(|| Some(&path), || None).as_slice(), [7]);
        let by_host: Vec<_> = hosts.iter().map(|hosts| Indexed { paths: &same, hosts, by_name_only: false }).collect();
        let path = readings("/api/x");
        assert_eq!(Index::new(&by_host).candidates(|| Some(&path), || Some("h7.example.com".into())).as_slice(), [7]);
    }
}
