//! Finds the limit of a descriptor in configuration of envoyproxy/ratelimit.
//!
//! Each domain is a tree of descriptor entries, and the nodes with a rate limit name the rule that counts for it. The
//! lookup is that of envoyproxy/ratelimit: at each level the entry `key_value` is tried first, then the wildcards in the
//! order of the file, then the `key` alone, and a limit applies only to descriptors that end at its level.
//!
//! Deliberately not here: reading files, which `tollgate-config` does, and decisions.

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use smallvec::SmallVec;

/// The domains of a rule set. Clones are cheap.
#[derive(Clone, Debug, Default)]
pub struct Domains(Arc<HashMap<Box<str>, DescriptorNode, ahash::RandomState>>);

/// A level of a domain: the entries that may come next, and the limit of descriptors that end here.
#[derive(Debug, Default)]
pub struct DescriptorNode {
    /// Sorted by `joined`.
    children: Vec<Child>,
    /// Patterns with their child, in the order of the file.
    wildcards: Vec<(Box<[Box<str>]>, usize)>,
    limit: Option<Arc<DescriptorLimit>>,
}

/// An entry of a level.
#[derive(Debug)]
pub struct Child {
    /// `key_value`, or `key` if the entry has no value.
    joined: Box<str>,
    key: Box<str>,
    counting: Counting,
    node: DescriptorNode,
}

/// How an entry counts values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counting {
    /// All values that match count together.
    Together,
    /// Each value counts by itself, so it is a part of the key.
    EachValue,
}

/// The rate limit of a descriptor.
#[derive(Debug)]
pub struct DescriptorLimit {
    /// The name of the rule that counts. Unlimited descriptors have none.
    pub rule: Option<Box<str>>,
    /// The name that the configuration gives to the limit, or an empty text.
    pub name: Box<str>,
    /// The configured number. Descriptors with 0 are always denied.
    pub requests_per_unit: u32,
    /// The configured unit. Unlimited descriptors have none.
    pub unit: Option<Unit>,
    /// Whether a denial only counts towards the request if all other descriptors in quota mode are denied, too.
    pub quota_mode: bool,
    /// The names of the limits that this one replaces if they match another descriptor of the same request.
    pub replaces: Box<[Box<str>]>,
    /// Metadata for the response.
    pub metadata: Option<Value>,
}

/// The unit of time of a rate limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// One second.
    Second,
    /// 60 seconds.
    Minute,
    /// 60 minutes.
    Hour,
    /// 24 hours.
    Day,
    /// 7 days, counted from the Unix epoch.
    Week,
    /// 30 days, counted from the Unix epoch.
    Month,
    /// 365 days, counted from the Unix epoch.
    Year,
}

impl Unit {
    /// Every unit.
    pub const ALL: [Self; 7] = [Self::Second, Self::Minute, Self::Hour, Self::Day, Self::Week, Self::Month, Self::Year];

    /// Returns the name in a file.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Second => "second",
            Self::Minute => "minute",
            Self::Hour => "hour",
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
            Self::Year => "year",
        }
    }

    /// Returns the unit of this name, in any case.
    #[must_use]
    pub fn named(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|unit| unit.as_str().eq_ignore_ascii_case(text))
    }

    /// Returns its length.
    #[must_use]
    pub const fn duration(self) -> Duration {
        const DAY: u64 = 24 * 60 * 60;
        Duration::from_secs(match self {
            Self::Second => 1,
            Self::Minute => 60,
            Self::Hour => 60 * 60,
            Self::Day => DAY,
            Self::Week => 7 * DAY,
            Self::Month => 30 * DAY,
            Self::Year => 365 * DAY,
        })
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}

/// The limit of a descriptor, and the key to count.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FoundLimit<'e> {
    /// The limit.
    pub limit: Arc<DescriptorLimit>,
    /// The parts of the key, for a check by the name of the rule.
    pub key: SmallVec<[Cow<'e, str>; 3]>,
}

/// What the configuration says about a descriptor.
#[derive(Clone, Debug)]
pub enum DescriptorMatch<'e> {
    /// Nothing: no limit of the configuration applies.
    NoLimit,
    /// The descriptor is allowed without counting.
    Unlimited(Arc<DescriptorLimit>),
    /// The limit of another descriptor in the request replaces this one.
    Replaced(Arc<DescriptorLimit>),
    /// The rule of the limit counts the descriptor.
    Limited(FoundLimit<'e>),
}

impl Domains {
    /// Creates domains from their names and descriptors.
    pub fn new(domains: impl IntoIterator<Item = (Box<str>, DescriptorNode)>) -> Self {
        Self(Arc::new(domains.into_iter().collect()))
    }

    /// Returns whether there is no domain.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether a domain is configured.
    #[must_use]
    pub fn contains(&self, domain: &str) -> bool {
        self.0.contains_key(domain)
    }

    /// Returns the limit of a descriptor, which is a list of keys and values.
    #[must_use]
    pub fn find<'e>(
        &self,
        domain: &str,
        entries: impl IntoIterator<Item = (&'e str, &'e str)>,
    ) -> Option<FoundLimit<'e>> {
        let mut node = self.0.get(domain)?;
        let mut parts = SmallVec::new();
        for (key, value) in entries {
            let child = node.child(key, value)?;
            if child.counting == Counting::EachValue {
                parts.push(child.part(key, value));
            }
            node = &child.node;
        }
        let limit = Arc::clone(node.limit.as_ref()?);
        Some(FoundLimit { limit, key: parts })
    }

    /// Returns the matches of all descriptors of a request, in their order. Limits that another one replaces are found.
    #[must_use]
    pub fn find_all<'e, D>(&self, domain: &str, descriptors: impl IntoIterator<Item = D>) -> Vec<DescriptorMatch<'e>>
    where
        D: IntoIterator<Item = (&'e str, &'e str)>,
    {
        let found: Vec<_> = descriptors.into_iter().map(|entries| self.find(domain, entries)).collect();
        let replaces = |name: &str| {
            let replacing = found.iter().flatten().flat_map(|found| &found.limit.replaces);
            !name.is_empty() && replacing.into_iter().any(|replaced| **replaced == *name)
        };
        let replaced: SmallVec<[bool; 8]> =
            found.iter().map(|found| found.as_ref().is_some_and(|found| replaces(&found.limit.name))).collect();
        let matched = found.into_iter().zip(replaced).map(|(found, is_replaced)| match found {
            None => DescriptorMatch::NoLimit,
            // As in envoyproxy/ratelimit, a name on an unlimited descriptor has no effect.
            Some(found) if found.limit.rule.is_none() => DescriptorMatch::Unlimited(found.limit),
            Some(found) if is_replaced => DescriptorMatch::Replaced(found.limit),
            Some(found) => DescriptorMatch::Limited(found),
        });
        matched.collect()
    }
}

impl DescriptorNode {
    /// Returns a node with these entries, in the order of the file. No two of them have the same key and value.
    pub fn new(mut children: Vec<Child>, limit: Option<DescriptorLimit>) -> Self {
        let patterns: Vec<Box<str>> =
            children.iter().filter(|child| child.joined.contains('*')).map(|child| child.joined.clone()).collect();
        children.sort_unstable_by(|one, other| one.joined.cmp(&other.joined));
        let index_of = |pattern: &str| children.binary_search_by(|child| (*child.joined).cmp(pattern)).ok();
        let wildcards = patterns
            .iter()
            .filter_map(|pattern| Some((pattern.split('*').map(Into::into).collect(), index_of(pattern)?)))
            .collect();
        Self { children, wildcards, limit: limit.map(Arc::new) }
    }

    fn child(&self, key: &str, value: &str) -> Option<&Child> {
        let exact = self.children.binary_search_by(|child| compare_joined(&child.joined, key, value));
        let index = exact
            .ok()
            .or_else(|| self.wildcard(key, value))
            .or_else(|| self.children.binary_search_by(|child| (*child.joined).cmp(key)).ok())?;
        self.children.get(index)
    }

    fn wildcard(&self, key: &str, value: &str) -> Option<usize> {
        if self.wildcards.is_empty() {
            return None;
        }
        let entry = format!("{key}_{value}");
        self.wildcards.iter().find(|(parts, _)| matches_wildcard(parts, &entry)).map(|(_, child)| *child)
    }
}

impl Child {
    /// Creates a child from the entry that leads to it.
    pub fn new(key: &str, value: &str, counting: Counting, node: DescriptorNode) -> Self {
        Self { joined: joined(key, value).into(), key: key.into(), counting, node }
    }

    /// Returns the part of the key for an entry that matches. It contains the entry's key where that can differ.
    fn part<'e>(&self, key: &'e str, value: &'e str) -> Cow<'e, str> {
        if *self.key == *key { Cow::Borrowed(value) } else { Cow::Owned(format!("{key}_{value}")) }
    }
}

/// Returns the name of an entry in the tree and in messages.
pub fn joined(key: &str, value: &str) -> String {
    if value.is_empty() { key.to_owned() } else { format!("{key}_{value}") }
}

/// Compares a text with `key_value`, without joining them.
fn compare_joined(text: &str, key: &str, value: &str) -> Ordering {
    let text = text.as_bytes();
    let (start, rest) = text.split_at(text.len().min(key.len()));
    start.cmp(key.as_bytes()).then_with(|| match rest.split_first() {
        None => Ordering::Less,
        Some((first, rest)) => first.cmp(&b'_').then_with(|| rest.cmp(value.as_bytes())),
    })
}

/// Returns whether a text matches a pattern, which is given as the texts between its asterisks. Each asterisk matches any
/// number of characters.
pub fn matches_wildcard<P: AsRef<str>>(parts: &[P], text: &str) -> bool {
    let [first, middle @ .., last] = parts else {
        return parts.first().is_some_and(|only| only.as_ref() == text);
    };
    let rest = text.strip_prefix(first.as_ref()).and_then(|rest| rest.strip_suffix(last.as_ref()));
    let found = middle.iter().try_fold(rest, |rest, part| Some(rest?.split_once(part.as_ref()).map(|(_, rest)| rest)));
    found.flatten().is_some()
}
