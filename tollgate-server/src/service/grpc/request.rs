//! The descriptors of a request, and how each is checked.

use std::time::Duration;

use futures_util::future::join_all;
use smallvec::SmallVec;
use tollgate::Decision;
use tollgate_http::Refusal;
use tollgate_rules::internal::envoy::{DescriptorMatch, FoundLimit};
use tollgate_rules::{Checks, Gate, JointCheck, Outcome};
use tollgate_rules::{Facts, RuleSet};
use tollgate_telemetry::unknown::Unknown;
use tonic::Status;

use crate::service::envoy;
use crate::service::error_body::quoted;
use crate::service::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use crate::service::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use crate::service::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use crate::service::proto::envoy::r#type::v3::RateLimitUnit;
use crate::service::throttle::{Numbers, Throttled, Throttles};

/// The most descriptors of a request. Envoy sends one for each action of a route, which are a few.
const MAX_DESCRIPTORS: usize = 100;

/// The most entries of a descriptor.
const MAX_ENTRIES: usize = 50;

/// The descriptors of a request.
pub(super) struct Descriptors<'r> {
    pub(super) domain: &'r str,
    pub(super) each: Vec<Descriptor<'r>>,
}

pub(super) struct Descriptor<'r> {
    entries: SmallVec<[(&'r str, &'r str); 4]>,
    cost: u64,
    /// Whether the request sets the number of hits.
    is_explicit: bool,
    is_refund: bool,
    pub(super) target: Target<'r>,
}

/// The limits that a descriptor is checked against.
pub(super) enum Target<'r> {
    /// The limits of the rule file that match.
    Rules,
    /// A limit of envoyproxy/ratelimit's configuration.
    Found(FoundLimit<'r>),
    /// None: the configuration allows the descriptor.
    Unlimited,
    /// None: the limit of another descriptor replaces its limit.
    Replaced,
    /// The limit in the descriptor.
    Override(RateLimitOverride, Duration),
}

/// Descriptors in quota mode that exceed their limits while others do not, with their outcomes. They deny nothing.
#[derive(Default)]
pub(super) struct Denials(pub(super) Vec<(usize, Outcome)>);

/// The decision of the limit in a descriptor. `None` if that allows no requests at all.
pub(super) struct Overridden {
    pub(super) index: usize,
    pub(super) decision: Option<Decision>,
}

impl Overridden {
    pub(super) fn is_allowed(&self) -> bool {
        self.decision.as_ref().is_some_and(Decision::is_allowed)
    }
}

impl<'r> Descriptors<'r> {
    /// Reads a request, and finds the limits of its descriptors.
    ///
    /// # Errors
    ///
    /// If a field is missing, invalid or too long.
    pub(super) fn read(rules: &RuleSet, request: &'r RateLimitRequest) -> Result<Self, Status> {
        let RateLimitRequest { domain, descriptors, hits_addend } = request;
        if domain.is_empty() {
            return Err(Status::invalid_argument("rate limit domain must not be empty: set `domain`"));
        }
        if descriptors.is_empty() {
            let message = "rate limit descriptor list must not be empty: send at least one descriptor";
            return Err(Status::invalid_argument(message));
        }
        if descriptors.len() > MAX_DESCRIPTORS {
            return Err(Status::invalid_argument(format!(
                "the request has {} descriptors, more than {MAX_DESCRIPTORS}: send several requests",
                descriptors.len()
            )));
        }
        let is_configured = rules.domains().contains(domain);
        let mut found = match is_configured {
            true => envoy::find_all(rules, domain, descriptors),
            false => Vec::new(),
        }
        .into_iter();
        // A request cannot ask for no hits, because 0 is what clients send that do not set the field.
        let cost = Some(u64::from(*hits_addend)).filter(|hits| *hits > 0);
        let each = descriptors.iter().enumerate().map(|(index, descriptor)| {
            let found = found.next().unwrap_or(DescriptorMatch::NoLimit);
            Descriptor::read(descriptor, found, cost)
                .map_err(|problem| Status::invalid_argument(format!("descriptors[{index}]{problem}")))
        });
        Ok(Self { domain, each: each.collect::<Result<_, _>>()? })
    }

    /// Returns whether one check decides the request: no descriptor is a refund, has no hits or has hits that were spent
    /// already, and limits are neither in descriptors nor in quota mode.
    pub(super) fn are_plain(&self, rules: &RuleSet) -> bool {
        let is_plain = |one: &Descriptor<'_>| {
            let is_counted = one.is_counted() && !one.is_spent() && !one.is_quota();
            is_counted && !matches!(one.target, Target::Override(..))
        };
        !rules.have_deferred() && self.each.iter().all(is_plain)
    }

    /// Returns the descriptors that no limit of the rule file applies to, or whose plan is unknown. Those that
    /// `is_counted` are known to have a limit. A limit of envoyproxy/ratelimit's files is what it names.
    pub(super) fn unknown<'d>(
        &'d self,
        rules: &'d RuleSet,
        is_counted: impl Fn(usize) -> bool + 'd,
    ) -> impl Iterator<Item = (usize, Unknown)> + 'd {
        let of_rules = self.each.iter().enumerate().filter(|(_, one)| matches!(one.target, Target::Rules));
        of_rules.filter_map(move |(index, one)| {
            let facts = Facts::of_descriptor(self.domain, &one.entries);
            let unknown = match rules.unknown_plan(&facts) {
                Some(plan) => Unknown::Plan(plan),
                None if is_counted(index) || rules.apply_to(&facts) => return None,
                None => Unknown::Request,
            };
            Some((index, unknown))
        })
    }

    /// Returns the positions of the descriptors that are checked together.
    pub(super) fn checked<'d>(&'d self, denials: &'d Denials) -> impl Iterator<Item = usize> + 'd {
        let is_denied = |index: usize| denials.0.iter().any(|(denied, _)| *denied == index);
        let checked = self.each.iter().enumerate().filter(|(_, descriptor)| descriptor.is_checked());
        checked.map(|(index, _)| index).filter(move |index| !is_denied(*index))
    }

    /// Checks all descriptors but those of `denials`. A refund only peeks. A check without hits is denied while its key
    /// owes units.
    pub(super) fn check(&self, gate: &Gate, denials: &Denials) -> Result<Checks, Status> {
        let checked = self.checked(denials).map(|index| &self.each[index]);
        let checked: SmallVec<[_; 4]> = checked.map(|one| (one, if one.is_refund { 0 } else { one.cost })).collect();
        let looks: SmallVec<[bool; 4]> = checked.iter().map(|(one, _)| one.is_look()).collect();
        self.with_checks(checked, |checks| gate.check_together_unless_owing(checks, |position| looks[position]))
            .map_err(|_| changed())
    }

    /// Charges hits that were spent already and that the decision has not taken: those of `denials`, and all if the
    /// request was denied. Returns the positions of their descriptors.
    pub(super) async fn charge(
        &self,
        gate: &Gate,
        denials: &Denials,
        is_allowed: bool,
    ) -> Result<SmallVec<[usize; 2]>, Status> {
        let denied = denials.0.iter().map(|(index, _)| *index);
        let others = self.checked(denials).filter(|_| !is_allowed);
        let untaken = denied.chain(others).filter(|index| self.each[*index].is_counted());
        let late = gate.rules().have_deferred();
        let charged: SmallVec<[usize; 2]> = untaken.filter(|index| late || self.each[*index].is_spent()).collect();
        let charges = charged.iter().map(|index| (&self.each[*index], self.each[*index].cost)).collect();
        let charges = self.with_checks(charges, |checks| {
            let each = checks.iter().zip(&charged);
            each.map(|(check, index)| gate.charge_check(check, self.each[*index].is_spent()))
                .collect::<Result<Vec<_>, _>>()
        });
        join_all(charges.map_err(|_| changed())?).await;
        Ok(charged.into_iter().filter(|index| self.each[*index].is_spent()).collect())
    }

    /// Checks that limits could read all descriptors. A value that is ambiguous is an error of the question, not a denial.
    pub(super) fn check_readable(&self, denials: &Denials, outcomes: &[Outcome]) -> Result<(), Status> {
        let refused = self.checked(denials).zip(outcomes).filter(|(_, outcome)| !outcome.is_allowed());
        for (index, outcome) in refused {
            if let Some(Refusal::Unreadable(descriptor)) = outcome.refusal() {
                return Err(Status::invalid_argument(format!("descriptors[{index}]: {}", descriptor.message)));
            }
        }
        Ok(())
    }

    /// Gives the hits of refunds back.
    pub(super) async fn refund(&self, gate: &Gate) -> Result<(), Status> {
        let refunds: SmallVec<[_; 4]> =
            self.each.iter().filter(|one| one.is_refund && one.is_checked()).map(|one| (one, one.cost)).collect();
        if refunds.is_empty() {
            return Ok(());
        }
        let refunds = self.with_checks(refunds, |checks| {
            checks.iter().map(|check| gate.refund_check(check)).collect::<Result<Vec<_>, _>>()
        });
        let refunded = join_all(refunds.map_err(|_| changed())?).await;
        refunded.into_iter().collect::<Result<(), _>>().map_err(|error| Status::unavailable(error.to_string()))
    }

    /// Calls `with` with the checks of descriptors, at these costs.
    fn with_checks<T>(
        &self,
        checked: SmallVec<[(&Descriptor<'_>, u64); 4]>,
        with: impl FnOnce(&[JointCheck<'_>]) -> T,
    ) -> T {
        let facts: SmallVec<[Facts<'_>; 2]> = checked
            .iter()
            // The empty method and the root match only limits that name neither.
            .map(|(one, cost)| Facts::of_descriptor(self.domain, &one.entries).cost(*cost))
            .collect();
        let keys: SmallVec<[SmallVec<[&[u8]; 3]>; 2]> = checked
            .iter()
            .map(|(one, _)| match &one.target {
                Target::Found(found) => found.key.iter().map(|part| part.as_bytes()).collect(),
                _ => SmallVec::new(),
            })
            .collect();
        let checks: SmallVec<[JointCheck<'_>; 4]> = checked
            .iter()
            .zip(facts.iter().zip(&keys))
            .map(|((one, cost), (facts, key))| match one.rule() {
                Some(rule) => JointCheck::Named { rule, key, cost: *cost },
                None => JointCheck::Request(facts),
            })
            .collect();
        with(&checks)
    }

    /// Checks the limits in descriptors. If the request is denied already, nothing is taken. Of several, all are looked
    /// at first, so that a denial by one takes nothing from the others, unless a concurrent request comes in between.
    pub(super) async fn check_overrides(
        &self,
        throttles: &Throttles,
        mut is_allowed: bool,
    ) -> Result<Vec<Overridden>, Status> {
        let overrides: SmallVec<[(usize, &Descriptor<'_>, Option<Numbers>); 2]> = self
            .each
            .iter()
            .enumerate()
            .filter_map(|(index, one)| match one.target {
                Target::Override(RateLimitOverride { requests_per_unit, .. }, period) => {
                    let count = u64::from(requests_per_unit);
                    Some((index, one, (count > 0).then_some(Numbers { capacity: count, count, period })))
                }
                _ => None,
            })
            .collect();
        let mut denied = None;
        if is_allowed && overrides.len() > 1 {
            for (index, one, numbers) in &overrides {
                let peeked = self.throttle(throttles, (*index, one, *numbers), 0).await?;
                if peeked.is_none_or(|decision| decision.remaining() < one.cost) {
                    (denied, is_allowed) = (Some(*index), false);
                    break;
                }
            }
        }
        let mut decided = Vec::new();
        for (index, one, numbers) in overrides {
            let cost = if is_allowed || denied == Some(index) { one.cost } else { 0 };
            let decision = self.throttle(throttles, (index, one, numbers), cost).await?;
            let overridden = Overridden { index, decision };
            is_allowed &= overridden.is_allowed();
            decided.push(overridden);
        }
        Ok(decided)
    }

    /// Checks the limit in a descriptor. Returns `None` if it allows no request at all.
    async fn throttle(
        &self,
        throttles: &Throttles,
        (index, one, numbers): (usize, &Descriptor<'_>, Option<Numbers>),
        cost: u64,
    ) -> Result<Option<Decision>, Status> {
        let Some(numbers) = numbers else { return Ok(None) };
        let throttled = throttles
            .descriptors
            .check(numbers, &self.key(one), cost)
            .map_err(|error| Status::resource_exhausted(format!("descriptors[{index}].limit: {error}")))?;
        Ok(Some(match throttled {
            Throttled::Ready(decision) => decision,
            Throttled::Pending(decision) => decision.await,
        }))
    }

    /// Returns the key of the limit in a descriptor. Lengths separate its parts.
    fn key(&self, descriptor: &Descriptor<'_>) -> Vec<u8> {
        let mut key = Vec::new();
        let entries = descriptor.entries.iter().flat_map(|(name, value)| [*name, *value]);
        for part in std::iter::once(self.domain).chain(entries) {
            key.extend((part.len() as u64).to_le_bytes());
            key.extend(part.as_bytes());
        }
        key
    }

    /// Returns the outcomes that count as decisions: those that do not only peek.
    pub(super) fn counted<'o>(
        &'o self,
        denials: &'o Denials,
        outcomes: &'o [Outcome],
    ) -> impl Iterator<Item = &'o Outcome> {
        let counted = self.checked(denials).zip(outcomes).filter(|(index, _)| self.each[*index].is_counted());
        counted.map(|(_, outcome)| outcome)
    }
}

impl<'r> Descriptor<'r> {
    fn read(
        descriptor: &'r RateLimitDescriptor,
        found: DescriptorMatch<'r>,
        cost: Option<u64>,
    ) -> Result<Self, String> {
        let RateLimitDescriptor { entries, limit, hits_addend, is_negative_hits } = descriptor;
        if entries.is_empty() {
            return Err(" has no entries: send at least one".to_owned());
        }
        if entries.len() > MAX_ENTRIES {
            return Err(format!(" has {} entries, more than {MAX_ENTRIES}: send fewer", entries.len()));
        }
        if let Some(index) = entries.iter().position(|entry| entry.key.is_empty()) {
            return Err(format!(".entries[{index}].key is empty: name the entry"));
        }
        if *is_negative_hits && limit.is_some() {
            return Err(" has both is_negative_hits and limit: refund limits of the rule file only".to_owned());
        }
        let target = match (limit, found) {
            (Some(limit), _) => Target::Override(*limit, period(limit)?),
            (None, DescriptorMatch::NoLimit) => Target::Rules,
            (None, DescriptorMatch::Unlimited(_)) => Target::Unlimited,
            (None, DescriptorMatch::Replaced(_)) => Target::Replaced,
            (None, DescriptorMatch::Limited(found)) => Target::Found(found),
        };
        let entries = entries.iter().map(|entry| (entry.key.as_str(), entry.value.as_str())).collect();
        let hits = hits_addend.or(cost);
        Ok(Self { entries, cost: hits.unwrap_or(1), is_explicit: hits.is_some(), is_refund: *is_negative_hits, target })
    }

    /// Returns the names of the entries.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|(name, _)| *name)
    }

    /// Returns the number of hits.
    pub(super) fn hits(&self) -> u64 {
        self.cost
    }

    /// Returns whether the check takes units.
    fn is_counted(&self) -> bool {
        self.cost > 0 && !self.is_refund
    }

    /// Returns whether the descriptor only checks if its key has exceeded its limit.
    fn is_look(&self) -> bool {
        self.cost == 0 && !self.is_refund
    }

    /// Returns whether the hits count as spent already, because the request sets their number. Charges that are known only
    /// after the response have to count in full, and ratelimit counts every hit.
    fn is_spent(&self) -> bool {
        self.is_explicit && self.is_counted() && matches!(self.target, Target::Found(_))
    }

    /// Returns whether limits of the rule file, or of envoyproxy/ratelimit's files, count the descriptor.
    fn is_checked(&self) -> bool {
        matches!(self.target, Target::Rules | Target::Found(_))
    }

    /// Returns the name of the rule to check, if the configuration names one.
    fn rule(&self) -> Option<&str> {
        match &self.target {
            Target::Found(found) => found.limit.rule.as_deref(),
            _ => None,
        }
    }

    pub(super) fn is_quota(&self) -> bool {
        matches!(&self.target, Target::Found(found) if found.limit.quota_mode)
    }
}

/// Reports a rule that the lookup found and the check did not. Both use the same rules, so this is a defect.
fn changed() -> Status {
    Status::unavailable("the limits have changed during the request: send it again")
}

/// Returns the length of the unit of an override.
fn period(limit: &RateLimitOverride) -> Result<Duration, String> {
    const DAY: u64 = 24 * 60 * 60;
    Ok(Duration::from_secs(match RateLimitUnit::try_from(limit.unit) {
        Ok(RateLimitUnit::Second) => 1,
        Ok(RateLimitUnit::Minute) => 60,
        Ok(RateLimitUnit::Hour) => 60 * 60,
        Ok(RateLimitUnit::Day) => DAY,
        Ok(RateLimitUnit::Month) => 30 * DAY,
        Ok(RateLimitUnit::Year) => 365 * DAY,
        Ok(RateLimitUnit::Unknown) | Err(_) => {
            let unit = quoted(&limit.unit.to_string());
            return Err(format!(".limit.unit is {unit}: use SECOND, MINUTE, HOUR, DAY, MONTH or YEAR"));
        }
    }))
}

impl Denials {
    /// Sets denied descriptors in quota mode aside, if only those are denied and not all of them. Returns whether the
    /// others have to be checked again.
    pub(super) fn add_quota_denials(&mut self, descriptors: &Descriptors<'_>, outcomes: &mut Vec<Outcome>) -> bool {
        if outcomes.iter().all(Outcome::is_allowed) {
            return false;
        }
        let checked: Vec<usize> = descriptors.checked(self).collect();
        let is_denied = |(_, outcome): &(&usize, &Outcome)| !outcome.is_allowed();
        let denied = || checked.iter().zip(&*outcomes).filter(is_denied).map(|(index, _)| &descriptors.each[*index]);
        let quotas = descriptors.each.iter().filter(|descriptor| descriptor.is_quota()).count();
        if !denied().all(Descriptor::is_quota) || self.0.len() + denied().count() == quotas {
            return false;
        }
        let all = checked.into_iter().zip(std::mem::take(outcomes));
        self.0.extend(all.filter(|(_, outcome)| !outcome.is_allowed()));
        true
    }
}
