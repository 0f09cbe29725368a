//! The effect of a missing client address: `explain` was called without `--ip`.

use tollgate_config::internal::{KeyPart, LimitRule};
use tollgate_http::Refusal;
use tollgate_rules::{RuleExplained, RuleState};
use tollgate_telemetry::notice;

use crate::explanation::Explained;

/// The most names in one sentence.
const MAX_NAMES: usize = 3;

/// The effect on a limit by ip, in the singular and in the plural.
#[derive(Clone, Copy, PartialEq, Eq)]
struct AddressEffect(&'static str, &'static str);

const COUNTED: AddressEffect = AddressEffect("counts it as anonymous", "count it as anonymous");
const REFUSED: AddressEffect = AddressEffect("refuses it", "refuse it");
const SKIPPED: AddressEffect = AddressEffect("does not apply", "do not apply");

/// Returns parts of a sentence, or none if no limit needs the address of this request.
pub(super) fn effects_without_address(explained: &Explained<'_>) -> Vec<String> {
    if explained.request.ip.is_some() {
        return Vec::new();
    }
    let limits = || explained.file.limits.iter().zip(&explained.explanation.rules);
    let by_ip: Vec<(&str, AddressEffect)> =
        limits().filter_map(|(limit, rule)| Some((&*rule.name, effect_of(limit, rule)?))).collect();
    let mut parts = match by_ip.split_first() {
        None => Vec::new(),
        Some(((_, effect), rest)) if rest.iter().all(|(_, other)| other == effect) => {
            vec![format!("limits by ip {}", effect.1)]
        }
        Some(_) => [COUNTED, REFUSED, SKIPPED].into_iter().filter_map(|effect| describe(effect, &by_ip)).collect(),
    };
    let has_list = |(limit, rule): (&LimitRule, &RuleExplained)| {
        let is_matched = !matches!(rule.state, RuleState::NotMatched(_));
        is_matched && (!limit.exempt.ips.is_empty() || !limit.blocked.ips.is_empty())
    };
    if limits().any(has_list) {
        parts.push("no list of ips contains it".to_owned());
    }
    parts
}

fn effect_of(limit: &LimitRule, rule: &RuleExplained) -> Option<AddressEffect> {
    let is_by_ip = limit.key.iter().flatten().any(|part| matches!(part, KeyPart::Ip { .. }));
    let is_ip = |part: &str| part == "ip" || part.starts_with("ip/");
    match &rule.state {
        RuleState::Counted { .. } | RuleState::InFlight { .. } if is_by_ip => Some(COUNTED),
        RuleState::Refused(Refusal::KeyMissing { part }) if is_ip(part) => Some(REFUSED),
        RuleState::KeyMissing(part) if is_ip(part) => Some(SKIPPED),
        // Does not apply, or was decided before the key was needed.
        _ => None,
    }
}

/// Describes the limits with this effect, if there are any.
fn describe(effect: AddressEffect, by_ip: &[(&str, AddressEffect)]) -> Option<String> {
    let names: Vec<&str> = by_ip.iter().filter(|(_, other)| *other == effect).map(|(name, _)| *name).collect();
    let verb = match names.len() {
        0 => return None,
        1 => effect.0,
        _ => effect.1,
    };
    Some(format!("{} {verb}", notice::join_up_to(&names, MAX_NAMES)))
}
