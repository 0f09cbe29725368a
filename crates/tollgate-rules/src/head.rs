//! GET includes HEAD: services answer HEAD with their handlers for GET, so HEAD would get past a limit for GET.
//!
//! A rule for GET leaves HEAD to another rule that names it and not GET, but only to one that counts every request which
//! the rule for GET would count, by the same key, and refuses those that it would refuse. A rule for HEAD on another path,
//! or one that skips some clients, takes nothing from it. Neither does a rule that takes no units from some requests, or
//! gives them back after some responses.

use super::coverage::{Part, Steps, count_parts, covers_apart_from_methods};
use super::matching::Match;
use super::rule::{Missing, Mode, Rule};

const HEAD: &str = "HEAD";

/// Rules with more combinations of hosts and paths are not compared: they count HEAD.
const MAX_PARTS: usize = 10_000;

/// Adds HEAD to rules for GET, unless another rule counts the same requests for HEAD.
pub(super) fn add_to_rules(rules: &mut [Rule]) {
    let naming = || rules.iter().enumerate().filter(|(_, rule)| names(&rule.matching, HEAD));
    let parts_of = |(number, rule): (usize, &Rule)| Part::all_of(number, &rule.matching);
    let is_small = naming().map(|(_, rule)| count_parts(&rule.matching)).fold(0, usize::saturating_add) <= MAX_PARTS;
    let heads: Vec<Part> = if is_small { naming().flat_map(parts_of).collect() } else { Vec::new() };
    let mut steps = Steps::default();
    let mut is_replaced = |number: usize, rule: &Rule| {
        let others: Vec<&Part> = heads.iter().filter(|other| replaces(&rules[other.number], rule)).collect();
        let mut covered = |part: Part| others.iter().any(|other| covers_apart_from_methods(other, &part, &mut steps));
        !others.is_empty()
            && count_parts(&rule.matching) <= MAX_PARTS
            && Part::all_of(number, &rule.matching).all(&mut covered)
    };
    let lacking = rules.iter().enumerate().filter(|(_, rule)| names_only_get(&rule.matching));
    let lacking: Vec<usize> = lacking.filter(|(number, rule)| !is_replaced(*number, rule)).map(|pair| pair.0).collect();
    lacking.into_iter().for_each(|number| rules[number].matching.methods.push(HEAD.into()));
}

/// Adds HEAD to routes for GET, unless another route serves the same requests for HEAD.
pub(super) fn add_to_routes(parts: &mut [Part]) {
    let heads: Vec<usize> = (0..parts.len()).filter(|number| names(&parts[*number].matching, HEAD)).collect();
    let mut steps = Steps::default();
    let mut is_replaced =
        |part: &Part| heads.iter().any(|head| covers_apart_from_methods(&parts[*head], part, &mut steps));
    let lacking = parts.iter().enumerate().filter(|(_, part)| names_only_get(&part.matching));
    let lacking: Vec<usize> = lacking.filter(|(_, part)| !is_replaced(part)).map(|(number, _)| number).collect();
    lacking.into_iter().for_each(|number| parts[number].matching.methods.push(HEAD.into()));
}

/// Returns `true` if `other` counts all requests that it matches, in the way in which `rule` would, and refuses those that
/// `rule` would refuse whatever is left of the quota.
fn replaces(other: &Rule, rule: &Rule) -> bool {
    let is_in_force = other.mode == Mode::Enforced || (other.mode == Mode::Shadow && rule.mode == Mode::Shadow);
    let needs_no_descriptor = !other.key.iter().any(|part| part.is_descriptor());
    let skips_none = needs_no_descriptor && (other.missing != Missing::Skip || other.key.is_empty());
    let settles_alike = !other.response_settlement.is_needed() || other.response_settlement == rule.response_settlement;
    // A rule for both methods is not about HEAD, and its key or its numbers may be those of all clients together.
    let is_for_head = !names(&other.matching, "GET");
    let counts_by_same_key =
        other.key.len() == rule.key.len() && other.key.iter().zip(&rule.key).all(|(one, other)| one.is_same(other));
    let denies_missing = rule.missing != Missing::Deny || other.missing == Missing::Deny || rule.key.is_empty();
    let bans = rule.ban.is_none() || other.ban == rule.ban;
    is_in_force
        && is_for_head
        && counts_by_same_key
        && denies_missing
        && rule.blocked.is_empty()
        && bans
        && skips_none
        && settles_alike
        && !other.cost.may_be_zero()
        && other.exempt.is_empty()
        && !other.by_name_only
        && other.is_in_flight() == rule.is_in_flight()
}

fn names_only_get(matching: &Match) -> bool {
    names(matching, "GET") && !names(matching, HEAD)
}

fn names(matching: &Match, method: &str) -> bool {
    matching.methods.iter().any(|named| named.eq_ignore_ascii_case(method))
}
