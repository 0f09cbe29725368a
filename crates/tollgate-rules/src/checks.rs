//! Checks of rules: settings that would limit nothing, or that would refuse every request.
//!
//! Rules made in code and those of a rule file pass the same checks. [`check`] examines a whole rule. A rule file calls the
//! single checks before, to report all problems with their positions.

use std::collections::HashSet;

use tollgate::{Algorithm, InvalidLimit};

use super::key_part::{KeyPart, Source};
use super::rule::{Bound, CostSource, Missing, Numbers, OverrideTarget, Rule};

/// Cookies, query parameters, claims and constants have shorter names in practice, and a key has a bound.
const MAX_NAME: usize = 256;

/// Checks a rule, apart from the keys that it lists: see [`Rule::named_key`].
pub(super) fn check(rule: &Rule, has_tokens: bool) -> Result<(), InvalidLimit> {
    key(rule, has_tokens)?;
    lists(rule)?;
    overrides(rule)?;
    match &rule.bound {
        Bound::Rate(limit) => numbers(rule, limit.algorithm()),
        Bound::InFlight { .. } => Ok(()),
    }
}

fn key(rule: &Rule, has_tokens: bool) -> Result<(), InvalidLimit> {
    if rule.key.is_empty() && rule.missing != Missing::default() {
        return missing_without_key();
    }
    // Rules of envoyproxy/ratelimit, which match a domain, may repeat a descriptor, and bound its texts themselves.
    if rule.matching.domain.is_some() {
        return Ok(());
    }
    for (position, part) in rule.key.iter().enumerate() {
        if rule.key[..position].iter().any(|other| other.is_same(part)) {
            let problem = format!("duplicate key part `{part}`");
            return Err(InvalidLimit::new("key", problem, "remove one of them"));
        }
    }
    for (field, part) in rule.key.iter().map(|part| ("key", part)).chain(rule.plan.iter().map(|part| ("plan", part))) {
        key_part(field, part)?;
        if field == "plan" && !may_name_plan(part) {
            let problem = format!("`{part}` is not a source of a plan");
            return Err(InvalidLimit::new(field, problem, "use a header, a claim, a descriptor or `KeyPart::custom`"));
        }
        if part.reads_token() && !has_tokens {
            let fix = "use `KeyPart::custom` with a claim that you have verified";
            return Err(InvalidLimit::new(field, "tokens cannot be verified by rules in code".into(), fix));
        }
    }
    Ok(())
}

fn key_part(field: &'static str, part: &KeyPart) -> Result<(), InvalidLimit> {
    let (kind, name) = match &part.0 {
        Source::Cookie(name) => ("cookie", name),
        Source::Query(name) => ("query", name),
        Source::Jwt(name) => ("jwt", name),
        Source::Descriptor(name) => ("descriptor", name),
        Source::Constant(name) => ("const", name),
        _ => return Ok(()),
    };
    key_name(field, kind, name)
}

/// Returns `true` for the sources that a rule file allows, and for closures. The header `Host` is the host.
fn may_name_plan(part: &KeyPart) -> bool {
    use Source::{Custom, Descriptor, Header, Host, Invalid, Jwt};
    matches!(part.0, Header(_) | Host | Jwt(_) | Descriptor(_) | Custom(_) | Invalid(_))
}

/// Checks the name in a key part, after `kind:` in a rule file.
pub fn key_name(field: &'static str, kind: &str, name: &str) -> Result<(), InvalidLimit> {
    if name.is_empty() {
        return Err(InvalidLimit::new(field, format!("`{kind}:` has no name after it"), format!("write {kind}:NAME")));
    }
    if name.len() > MAX_NAME {
        let problem = format!("the name after `{kind}:` has {} bytes", name.len());
        return Err(InvalidLimit::new(field, problem, format!("use {MAX_NAME} bytes or less")));
    }
    if name.chars().any(char::is_control) {
        let problem = format!("the name after `{kind}:` contains a control character");
        return Err(InvalidLimit::new(field, problem, "use printable characters"));
    }
    Ok(())
}

/// Returns the error of `missing` without a key.
pub fn missing_without_key() -> Result<(), InvalidLimit> {
    let problem = "`missing` has no effect without a key".into();
    Err(InvalidLimit::new("missing", problem, "add a `key`, or remove it"))
}

fn lists(rule: &Rule) -> Result<(), InvalidLimit> {
    if rule.exempt.has_every_address() { every_address_exempt() } else { Ok(()) }
}

/// Returns the error of a limit that exempts all IPv4 and all IPv6 addresses.
pub fn every_address_exempt() -> Result<(), InvalidLimit> {
    let problem = "no request reaches this limit, because every address is exempt".into();
    Err(InvalidLimit::new("exempt", problem, "exempt fewer, or remove the limit"))
}

fn overrides(rule: &Rule) -> Result<(), InvalidLimit> {
    let mut plans = HashSet::new();
    for (target, _) in &rule.overrides {
        let OverrideTarget::Plan(plan) = target else { continue };
        if rule.plan.is_none() {
            let fix = "add the source of the plan with `Rule::plan`";
            return Err(InvalidLimit::new("overrides", PLAN_MISSING.into(), fix));
        }
        if !plans.insert(plan) {
            let problem = format!("two overrides are for the plan `{}`", plan.escape_debug());
            return Err(InvalidLimit::new("overrides", problem, "remove one of them"));
        }
    }
    Ok(())
}

/// The problem of an override for a plan in a limit without `plan`.
pub const PLAN_MISSING: &str = "this override never applies, because the limit has no `plan`";

fn numbers(rule: &Rule, algorithm: &Algorithm) -> Result<(), InvalidLimit> {
    let settlement = &rule.response_settlement;
    if matches!(algorithm, Algorithm::LeakyBucket(bucket) if bucket.queues()) {
        if settlement.is_deferred() {
            return after_with_queue();
        }
        for (field, is_there) in [("count", settlement.count.is_some()), ("settle", settlement.settle_by.is_some())] {
            if is_there {
                return no_effect_with_queue(field);
            }
        }
    }
    if settlement.count.as_ref().is_some_and(super::StatusSet::is_empty) {
        let problem = "the limit counts no response".into();
        return Err(InvalidLimit::new("count", problem, "name a status that counts, or remove the limit"));
    }
    let CostSource::Constant(cost) = rule.cost.0 else { return Ok(()) };
    constant_cost(cost)?;
    cost_fits(cost, algorithm.quota(), quota_name(algorithm))?;
    rule.overrides.iter().try_for_each(|(_, numbers)| match numbers {
        // A quota of 0 is not valid by itself.
        Numbers::Rate(numbers) if numbers.quota() > 0 => override_fits(cost, numbers.quota(), quota_name(numbers)),
        Numbers::Rate(_) | Numbers::InFlight(_) => Ok(()),
    })
}

/// Returns the error of `count` or `settle` in a limit with a queue.
pub fn no_effect_with_queue(field: &'static str) -> Result<(), InvalidLimit> {
    let problem = format!("`{field}` has no effect with `overflow: queue`, which gives nothing back");
    Err(InvalidLimit::new(field, problem, "use `overflow: reject`, or remove it"))
}

/// Returns the error of `when: after` in a limit with a queue.
pub fn after_with_queue() -> Result<(), InvalidLimit> {
    let problem = "`when: after` cannot be used with `overflow: queue`, where a request queues when it arrives".into();
    Err(InvalidLimit::new("count", problem, "use `overflow: reject`, or remove `count`"))
}

/// Returns the name of the quota of an algorithm.
fn quota_name(algorithm: &Algorithm) -> &'static str {
    match algorithm {
        Algorithm::TokenBucket(_) | Algorithm::LeakyBucket(_) => "capacity",
        _ => "limit",
    }
}

/// Checks that a constant cost counts.
pub fn constant_cost(cost: u64) -> Result<(), InvalidLimit> {
    match cost {
        0 => Err(InvalidLimit::new("cost", "cost 0 counts nothing".into(), "use 1 or more, or remove the limit")),
        _ => Ok(()),
    }
}

/// Checks that a request of a constant cost fits into the quota, whose name is `key`.
pub fn cost_fits(cost: u64, quota: u64, key: &str) -> Result<(), InvalidLimit> {
    if cost <= quota {
        return Ok(());
    }
    let problem = format!("cost {cost} is above the {key} of {quota}, so no request ever passes");
    Err(InvalidLimit::new("cost", problem, format!("lower the cost, or raise {key}")))
}

/// Checks that a request of a constant cost fits into the quota of an override, whose name is `key`.
pub fn override_fits(cost: u64, quota: u64, key: &str) -> Result<(), InvalidLimit> {
    if cost <= quota {
        return Ok(());
    }
    let problem = format!("{key} {quota} is below the cost of {cost}, so no request ever passes");
    Err(InvalidLimit::new("overrides", problem, format!("raise {key} to {cost} or more")))
}
