//! Keys that callers name: in lists and overrides, in checks by name, in bans, and in views of keys.
//!
//! Requests are counted by the normal form of their key. A [`Piece`] is the normal form of one part, and only
//! [`KeyPart`](super::KeyPart) makes one, from a request or from a value that a caller names. Everything that looks up or counts a key
//! by name needs a [`NamedKey`], so no caller can forget to normalize.

use std::fmt;

use smallvec::SmallVec;
use tollgate::{Key, LimitId};

use super::key_part::Piece;
use super::{PathReading, RuleSet};
use crate::rule::Rule;
use crate::set::MAX_KEY_PARTS;

/// The longest part of a caller's text in an error.
const MAX_SHOWN_CHARS: usize = 60;

/// The most plans in an error.
const MAX_SHOWN_PLANS: usize = 20;

/// The parts of one key.
pub(crate) type Pieces<'r> = SmallVec<[Piece<'r>; 3]>;

/// A key by every reading of its path, and by every name of the client. Nearly always there is one.
#[derive(Debug, Default)]
pub(crate) struct KeyReadings<'r> {
    /// The key that is counted.
    pub(super) first: Pieces<'r>,
    /// The keys of other readings, whose numbers, blocks and bans apply too.
    pub(super) others: Vec<Pieces<'r>>,
    /// Each of these keys by the other fingerprint of the client's certificate, in the same order. They name the same
    /// client, so that an exemption of one of them is enough. Empty if the client has one name.
    names: SmallVec<[Pieces<'r>; 1]>,
    /// The limit of the request's plan, if no list or override came first.
    pub(super) plan: Option<LimitId>,
}

/// The keys that a request has beside the one that is counted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OtherKeys<'k, 'r> {
    readings: &'k [Pieces<'r>],
    names: &'k [Pieces<'r>],
}

impl<'k, 'r> OtherKeys<'k, 'r> {
    /// Returns the keys of the other readings of the path.
    pub(crate) fn readings(self) -> &'k [Pieces<'r>] {
        self.readings
    }

    /// Returns every key that a caller may have named for this client.
    pub(crate) fn all(self) -> impl Iterator<Item = &'k Pieces<'r>> {
        self.readings.iter().chain(self.names)
    }
}

impl<'r> KeyReadings<'r> {
    /// Returns the parts of the key that is counted.
    pub(crate) fn counted(&self) -> &[Piece<'r>] {
        &self.first
    }

    /// Returns the keys that are not counted.
    pub(crate) fn others(&self) -> OtherKeys<'_, 'r> {
        OtherKeys { readings: &self.others, names: &self.names }
    }

    /// Returns the parts of the key that is counted, as text.
    pub(crate) fn texts(&self) -> Vec<String> {
        self.first.iter().map(|piece| String::from_utf8_lossy(piece.as_bytes()).into_owned()).collect()
    }

    /// Returns the keys of all readings. Each has one name of the client or two.
    pub(super) fn by_reading(&self) -> impl Iterator<Item = impl Iterator<Item = &[Piece<'r>]>> {
        let readings = std::iter::once(&self.first).chain(&self.others);
        readings.enumerate().map(|(number, key)| std::iter::once(key).chain(self.names.get(number)).map(|key| &**key))
    }

    /// Adds the key of another reading, unless it is known.
    pub(super) fn add_other(&mut self, pieces: Pieces<'r>) {
        let is_known = self.first == pieces || self.others.contains(&pieces);
        if !is_known {
            self.others.push(pieces);
        }
    }

    /// Adds the other name of the client to every reading. `other` returns it for the parts that have one.
    #[cold]
    pub(super) fn add_names(&mut self, other: impl Fn(usize) -> Option<Piece<'r>>) {
        let renamed = |key: &Pieces<'r>| {
            let pieces = key.iter().enumerate();
            pieces.map(|(number, piece)| other(number).unwrap_or_else(|| piece.clone())).collect()
        };
        self.names = std::iter::once(&self.first).chain(&self.others).map(renamed).collect();
    }
}

/// Calls `with` with the key made of `pieces`.
pub(crate) fn with_key<T>(pieces: &[Piece<'_>], with: impl FnOnce(Key<'_>) -> T) -> T {
    match pieces {
        [one] => with(Key::from(one.as_bytes())),
        several => {
            let parts: SmallVec<[&[u8]; MAX_KEY_PARTS]> = several.iter().map(Piece::as_bytes).collect();
            with(Key::byte_parts(&parts))
        }
    }
}

/// A rule that a caller names, with the plan whose numbers apply to the key. A name alone, which a string converts to,
/// has no plan: then that of the key's last request applies, if this process remembers one, or else the rule's own
/// numbers.
///
/// ```
/// use tollgate_rules::{KeyPart, NamedRule, Rule, RuleSet};
/// use tollgate::{FixedWindow, Limit, HOUR};
/// use tollgate_rules::Gate;
///
/// let per_user = Rule::new(Limit::new("per-user", FixedWindow::new(10, HOUR))?)
///     .key(KeyPart::header("x-user-id"))
///     .plan(KeyPart::header("x-plan"))
///     .plan_limit("pro", FixedWindow::new(100, HOUR));
/// let gate = Gate::in_memory(RuleSet::builder().rule(per_user).build()?)?;
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let remaining = async |rule: NamedRule<'_>| {
///     let outcome = gate.check_by_name(rule, &[b"ann"], 5).expect("the rule and the plan exist").outcome().await;
///     outcome.decision().map(|decision| decision.remaining())
/// };
/// assert_eq!(remaining("per-user".into()).await, Some(5));
/// // A key has one count under all plans.
/// assert_eq!(remaining(NamedRule::new("per-user").plan("pro")).await, Some(90));
/// # });
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedRule<'a> {
    name: &'a str,
    plan: Option<&'a str>,
}

impl<'a> NamedRule<'a> {
    /// Names a rule.
    #[must_use]
    pub fn new(name: &'a str) -> Self {
        Self { name, plan: None }
    }

    /// Sets the plan of the key, as a request would name it. A key that has numbers for itself keeps them.
    #[must_use]
    pub fn plan(self, plan: impl Into<Option<&'a str>>) -> Self {
        Self { plan: plan.into(), ..self }
    }
}

impl<'a> From<&'a str> for NamedRule<'a> {
    fn from(name: &'a str) -> Self {
        Self::new(name)
    }
}

impl<'a> From<&'a String> for NamedRule<'a> {
    fn from(name: &'a String) -> Self {
        Self::new(name)
    }
}

/// A key of a rule in normal form. Only [`RuleSet::named_key`] makes one.
#[derive(Debug)]
pub(crate) struct NamedKey<'k> {
    pub(super) rule: u32,
    /// The limit of the plan that the caller names, or else of the last request of the key.
    pub(super) plan: Option<LimitId>,
    pub(super) readings: KeyReadings<'k>,
}

impl<'k> NamedKey<'k> {
    /// Returns the number of the rule.
    pub(crate) fn rule(&self) -> u32 {
        self.rule
    }

    pub(crate) fn readings(&self) -> &KeyReadings<'k> {
        &self.readings
    }

    pub(crate) fn into_owned(self) -> NamedKey<'static> {
        let owned = |pieces: Pieces<'_>| pieces.into_iter().map(Piece::into_owned).collect();
        let KeyReadings { first, others, names, plan } = self.readings;
        let others = others.into_iter().map(owned).collect();
        let readings = KeyReadings { first: owned(first), others, names: names.into_iter().map(owned).collect(), plan };
        NamedKey { rule: self.rule, plan: self.plan, readings }
    }
}

impl RuleSet {
    /// Normalizes a key that a caller names.
    ///
    /// # Errors
    ///
    /// If there is no such rule or plan, or no request can have the key.
    pub(crate) fn named_key<'k>(&self, rule: NamedRule<'_>, parts: &[&'k [u8]]) -> Result<NamedKey<'k>, KeyError> {
        let NamedRule { name, plan } = rule;
        let number = self.number(name).ok_or_else(|| KeyError::UnknownRule { rule: name.to_owned() })?;
        let plan = plan.map(|plan| self.named_plan(number, plan)).transpose()?;
        let readings = self.rule(number).named_key(parts, self.path_reading())?;
        let plan = plan.or_else(|| self.last_plan(number, readings.counted()));
        Ok(NamedKey { rule: number, plan, readings })
    }

    /// Checks that a request can have a key.
    ///
    /// # Errors
    ///
    /// If there is no rule named `rule`, it has no such plan, its key has another number of parts, or no request can have
    /// one of the values.
    pub fn check_key<'a>(&self, rule: impl Into<NamedRule<'a>>, parts: &[&[u8]]) -> Result<(), KeyError> {
        self.named_key(rule.into(), parts).map(drop)
    }
}

impl Rule {
    /// Normalizes a key of this rule.
    pub(super) fn named_key<'k>(&self, values: &[&'k [u8]], reading: PathReading) -> Result<KeyReadings<'k>, KeyError> {
        if values.len() != self.key.len() {
            return Err(KeyError::PartCount {
                rule: self.name().to_owned(),
                given: values.len(),
                parts: self.key.iter().map(ToString::to_string).collect(),
            });
        }
        let named = |index: usize| {
            let named = self.key[index].named(values[index], self.missing, reading);
            named.map_err(|InvalidPart { problem, fix }| KeyError::InvalidValue {
                rule: self.name().to_owned(),
                part: index,
                problem,
                fix,
            })
        };
        let mut key = KeyReadings::default();
        let mut count = 1;
        for index in 0..values.len() {
            let readings = named(index)?;
            count = count.max(readings.len());
            key.first.extend(readings.into_iter().next());
        }
        for number in 1..count {
            let mut other = Pieces::new();
            for index in 0..values.len() {
                let mut readings = named(index)?;
                // Only a path has several readings.
                let own = if number < readings.len() { number } else { 0 };
                other.push(readings.swap_remove(own));
            }
            key.add_other(other);
        }
        Ok(key)
    }
}

/// The reason that a key cannot be named.
///
/// `Display` describes the problem and the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyError {
    /// No rule has this name.
    UnknownRule {
        /// The name.
        rule: String,
    },
    /// The rule has no numbers for this plan.
    UnknownPlan {
        /// The name of the rule.
        rule: String,
        /// The plan.
        plan: String,
        /// The plans that the rule has numbers for.
        plans: Vec<String>,
    },
    /// The key has another number of parts than the key of the rule.
    PartCount {
        /// The name of the rule.
        rule: String,
        /// The number of parts that were given.
        given: usize,
        /// The parts of the rule's key.
        parts: Vec<String>,
    },
    /// No request can have this value, such as `not-an-ip` for an address.
    InvalidValue {
        /// The name of the rule.
        rule: String,
        /// The index of the part.
        part: usize,
        /// The problem, with the value.
        problem: String,
        /// The fix.
        fix: String,
    },
}

impl KeyError {
    /// Returns the problem.
    #[must_use]
    pub fn problem(&self) -> String {
        match self {
            Self::UnknownRule { rule } => format!("no rule is named `{}`", shown(rule.as_bytes())),
            Self::UnknownPlan { rule, plan, plans } if plans.is_empty() => {
                format!("`{rule}` has no plans, but the plan `{}` is given", shown(plan.as_bytes()))
            }
            Self::UnknownPlan { rule, plan, .. } => {
                format!("`{rule}` has no numbers for a plan `{}`", shown(plan.as_bytes()))
            }
            Self::PartCount { rule, given, parts } if parts.is_empty() => {
                format!("the key has {}, but `{rule}` has no key", counted(*given))
            }
            Self::PartCount { rule, given, parts } => {
                format!("the key has {}, but that of `{rule}` has {}", counted(*given), counted(parts.len()))
            }
            Self::InvalidValue { problem, .. } => problem.clone(),
        }
    }

    /// Returns the fix.
    #[must_use]
    pub fn fix(&self) -> String {
        match self {
            Self::UnknownRule { .. } => "use the name of a rule in the rule set".to_owned(),
            Self::UnknownPlan { plans, .. } if plans.is_empty() => "leave it out".to_owned(),
            Self::UnknownPlan { plans, .. } => {
                let more = if plans.len() > MAX_SHOWN_PLANS { ", …" } else { "" };
                let known = plans[..plans.len().min(MAX_SHOWN_PLANS)].join(", ");
                format!("use {known}{more}, or leave it out")
            }
            Self::PartCount { parts, .. } if parts.is_empty() => "leave it out".to_owned(),
            Self::PartCount { parts, .. } => format!("give {}", parts.join(", ")),
            Self::InvalidValue { fix, .. } => fix.clone(),
        }
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.problem(), self.fix())
    }
}

impl std::error::Error for KeyError {}

/// Returns a number of parts as text.
pub fn counted(parts: usize) -> String {
    if parts == 1 { "1 part".to_owned() } else { format!("{parts} parts") }
}

/// The reason that no request has a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidPart {
    /// The problem, with the value.
    pub problem: String,
    /// How to correct it.
    pub fix: String,
}

impl InvalidPart {
    /// Creates the description of an invalid part.
    pub fn new(problem: String, fix: impl Into<String>) -> Self {
        Self { problem, fix: fix.into() }
    }
}

/// Returns a caller's text for an error: printable and short.
pub(super) fn shown(value: &[u8]) -> String {
    let text = String::from_utf8_lossy(value);
    let mut shown: String = text.chars().take(MAX_SHOWN_CHARS).flat_map(char::escape_debug).collect();
    if text.chars().nth(MAX_SHOWN_CHARS).is_some() {
        shown.push('…');
    }
    shown
}
