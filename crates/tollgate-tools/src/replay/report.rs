//! The result of a replay, as `--json` prints it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use tollgate::Timestamp;
use tollgate_config::Parsed;
use tollgate_telemetry::seconds::Seconds;
use tollgate_telemetry::top_keys::TopKey;

use super::tally::{Denials, KeyTally};
use super::threshold::{Metric, Share, Threshold};
use super::{Comparison, KeyOverflow, Replay, RulesReplay};
use crate::access_log::{AccessLog, FileSummary, MERGE_FIX, rfc3339};

/// The result of a replay.
#[derive(Serialize)]
pub struct Report {
    /// Reasons not to believe the numbers, in sentences.
    pub(super) warnings: Vec<String>,
    pub(super) files: Vec<FileReport>,
    /// The times of the first and the last request.
    pub(super) from: String,
    pub(super) to: String,
    pub(super) seconds: Seconds,
    pub(super) requests: u64,
    /// Requests that were answered with 429 when they were logged.
    pub(super) logged_denials: u64,
    pub(super) clients: Clients,
    pub(super) rules: RulesReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) against: Option<AgainstReport>,
    pub(super) thresholds: Vec<ThresholdReport>,
    /// What the numbers do not show, in sentences.
    pub(super) notes: Vec<String>,
}

/// How a file was read.
#[derive(Serialize)]
pub(super) struct FileReport {
    pub(super) path: String,
    pub(super) lines: u64,
    pub(super) requests: u64,
    pub(super) formats: BTreeMap<&'static str, u64>,
    pub(super) without_request: u64,
    pub(super) unreadable: u64,
    pub(super) too_long: u64,
    /// The first unreadable lines.
    pub(super) unreadable_lines: Vec<UnreadableLine>,
    pub(super) out_of_order: u64,
    pub(super) misdated: u64,
    pub(super) largest_step_back: Seconds,
    /// Requests that are older than one before them by more than a minute.
    pub(super) went_back: u64,
    pub(super) time_jumps: u64,
    /// Why the file could not be read to its end.
    pub(super) problem: Option<String>,
}

#[derive(Serialize)]
pub(super) struct UnreadableLine {
    pub(super) line: u64,
    pub(super) text: String,
}

/// Clients by address.
#[derive(Clone, Copy, Serialize)]
pub(super) struct Clients {
    pub(super) seen: u64,
    /// Clients of which at least one request was denied or refused.
    pub(super) denied: u64,
    /// Whether the numbers are exact, not estimated from a sample.
    pub(super) exact: bool,
}

/// The decisions of one rule set.
#[derive(Serialize)]
pub(super) struct RulesReport {
    pub(super) file: String,
    pub(super) admitted: u64,
    pub(super) denied: u64,
    pub(super) refused: u64,
    pub(super) delayed: u64,
    pub(super) limits: Vec<LimitReport>,
    pub(super) most_limited: Vec<KeyReport>,
}

#[derive(Serialize)]
pub(super) struct LimitReport {
    pub(super) limit: String,
    pub(super) shadow: bool,
    pub(super) offered: u64,
    pub(super) admitted: u64,
    pub(super) denied: u64,
    pub(super) denied_by_others: u64,
    pub(super) refused: u64,
    pub(super) keys: u64,
    pub(super) denied_keys: u64,
    pub(super) keys_exact: bool,
    pub(super) first_denial: Option<String>,
    pub(super) last_denial: Option<String>,
    pub(super) peak_minute: Option<PeakMinute>,
}

#[derive(Serialize)]
pub(super) struct PeakMinute {
    pub(super) from: String,
    pub(super) denied: u64,
}

#[derive(Serialize)]
pub(super) struct KeyReport {
    pub(super) limit: String,
    pub(super) key: String,
    /// Requests since the first denial.
    pub(super) offered: u64,
    pub(super) denied: u64,
    /// The most by which `denied` may be too high.
    pub(super) denied_error: u64,
    pub(super) first_denial: String,
    pub(super) last_denial: String,
}

/// The rules that the rules are compared with.
#[derive(Serialize)]
pub(super) struct AgainstReport {
    #[serde(flatten)]
    pub(super) rules: RulesReport,
    #[serde(flatten)]
    pub(super) comparison: Comparison,
    pub(super) clients_denied: u64,
    pub(super) clients_newly_denied: u64,
}

#[derive(Serialize)]
pub(super) struct ThresholdReport {
    pub(super) threshold: String,
    pub(super) value: u64,
    pub(super) percent: f64,
    /// `None` if the log does not allow to judge.
    pub(super) crossed: Option<bool>,
}

/// A rule file with its path.
#[derive(Clone, Copy)]
pub struct NamedFile<'a> {
    /// The path as given.
    pub path: &'a Path,
    /// The parsed file.
    pub file: &'a Parsed,
}

/// Choices of the user.
pub struct ReportOptions<'a> {
    /// The rules that are replayed.
    pub config: NamedFile<'a>,
    /// The rules that they are compared with.
    pub against: Option<NamedFile<'a>>,
    /// The bounds of the report.
    pub thresholds: &'a [Threshold],
    /// The number of keys to list.
    pub top: usize,
}

/// Whether thresholds are crossed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No threshold was crossed.
    Within,
    /// At least one threshold was crossed.
    Crossed,
    /// The numbers are not those of the whole log in its order, for this reason.
    Unknown(String),
}

impl Report {
    /// Returns whether a threshold is crossed.
    pub fn verdict(&self) -> Verdict {
        match self.warnings.first() {
            _ if self.thresholds.is_empty() => Verdict::Within,
            Some(warning) => Verdict::Unknown(warning.clone()),
            None if self.thresholds.iter().any(|threshold| threshold.crossed == Some(true)) => Verdict::Crossed,
            None => Verdict::Within,
        }
    }

    /// Returns the reasons not to believe the numbers.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

/// Returns the warnings about a file.
fn warnings(file: &FileSummary) -> impl Iterator<Item = String> {
    let disorder = (!file.is_in_order()).then(|| {
        let disorder = file.describe_disorder();
        format!("{disorder}; counts start from zero where time goes back, so the numbers are too low: {MERGE_FIX}")
    });
    let problem = file.problem.as_ref().map(|problem| {
        format!(
            "{} could not be read to its end ({problem}), and the numbers are those of what could be read: check that \
             the file is complete",
            file.path.display()
        )
    });
    disorder.into_iter().chain(problem)
}

impl Replay {
    /// Returns the result.
    pub fn report(&self, log: &AccessLog, options: &ReportOptions<'_>) -> Report {
        let clients = self.clients.count();
        let against = self.against.as_ref().zip(options.against).map(|(against, file)| AgainstReport {
            rules: against.report(file, options.top),
            comparison: self.comparison,
            clients_denied: clients.denied_by_other,
            clients_newly_denied: clients.newly_denied,
        });
        let rules = self.config.report(options.config, options.top);
        let first = self.first.unwrap_or_default();
        let mut report = Report {
            warnings: log.files().flat_map(warnings).collect(),
            files: log.files().map(FileReport::of).collect(),
            from: rfc3339(first),
            to: rfc3339(self.last),
            seconds: Seconds(Duration::from_micros(self.last.as_micros().saturating_sub(first.as_micros()))),
            requests: self.requests,
            logged_denials: self.logged_denials,
            clients: Clients { seen: clients.keys, denied: clients.denied, exact: clients.exact },
            rules,
            against,
            thresholds: Vec::new(),
            notes: self.notes(options),
        };
        report.thresholds = options.thresholds.iter().map(|threshold| report.judge(threshold)).collect();
        report
    }

    fn notes(&self, options: &ReportOptions<'_>) -> Vec<String> {
        let mut notes = Vec::new();
        let both = [Some((&self.config, options.config)), self.against.as_ref().zip(options.against)];
        for (replay, NamedFile { file, .. }) in both.into_iter().flatten() {
            if !file.store.is_memory() {
                notes.push(
                    "the store is not used: counts are kept in memory, as if all requests reached one node".into(),
                );
            }
            for limit in file.limits.iter().filter(|limit| limit.enabled) {
                let name = limit.name.as_str();
                if let Some(learn) = limit.learn() {
                    let (quota, from) = (limit.quota_name(), learn.from);
                    notes.push(format!(
                        "limit {name} learns its {quota}, and is replayed with the number that it starts from, {from}: \
                         put another in `from` to replay it"
                    ));
                }
                if limit.in_flight.is_some() {
                    notes.push(format!(
                        "limit {name} limits requests in flight and is not replayed: a log does not show which overlap"
                    ));
                }
                if limit.settle.is_some() {
                    notes.push(format!(
                        "limit {name} is settled by a response header, which logs do not have: `cost` is counted"
                    ));
                }
            }
            notes.extend(replay.missing_parts.notes());
            notes.extend(replay.memory_note());
        }
        let mut seen = BTreeSet::new();
        notes.retain(|note| seen.insert(note.clone()));
        notes
    }
}

impl RulesReplay {
    fn report(&self, NamedFile { path, file }: NamedFile<'_>, top: usize) -> RulesReport {
        let names: Vec<&str> = self.rules.names().collect();
        let rule_of = |name: &str| file.limits.iter().find(|limit| limit.name.as_str() == name);
        let limits = names.iter().zip(&self.limits).filter(|(name, tally)| {
            let is_replayed = rule_of(name).is_some_and(|rule| rule.enabled && rule.in_flight.is_none());
            is_replayed || tally.offered > 0
        });
        let limits = limits.map(|(name, tally)| {
            let keys = tally.keys.count();
            let time = |of: fn(&Denials) -> Timestamp| tally.denials.as_ref().map(|denials| rfc3339(of(denials)));
            LimitReport {
                limit: (*name).to_owned(),
                shadow: rule_of(name).is_some_and(|rule| rule.shadow),
                offered: tally.offered,
                admitted: tally.admitted,
                denied: tally.denied,
                denied_by_others: tally.denied_by_others,
                refused: tally.refused,
                keys: keys.keys,
                denied_keys: keys.denied,
                keys_exact: keys.exact,
                first_denial: time(|denials| denials.first),
                last_denial: time(|denials| denials.last),
                peak_minute: tally
                    .denials
                    .map(|Denials { peak: (from, denied), .. }| PeakMinute { from: rfc3339(from), denied }),
            }
        });
        let mut most_limited = self.top_keys.top(usize::MAX);
        // Fingerprints are random, so they must not decide the order.
        let rank = |top: &TopKey<'_, KeyTally>| (Reverse(top.count), top.error, top.value.rule);
        most_limited.sort_by(|one, other| (rank(one), &one.value.key).cmp(&(rank(other), &other.value.key)));
        let most_limited = most_limited.into_iter().take(top).map(|top| {
            let KeyTally { rule, key, offered, first, last } = top.value;
            KeyReport {
                limit: names.get(*rule as usize).copied().unwrap_or_default().to_owned(),
                key: key.clone(),
                offered: *offered,
                denied: top.count,
                denied_error: top.error,
                first_denial: rfc3339(*first),
                last_denial: rfc3339(*last),
            }
        });
        RulesReport {
            file: path.display().to_string(),
            admitted: self.totals.admitted,
            denied: self.totals.denied,
            refused: self.totals.refused,
            delayed: self.totals.delayed,
            limits: limits.collect(),
            most_limited: most_limited.collect(),
        }
    }

    /// Describes a lack of memory for keys.
    fn memory_note(&self) -> Option<String> {
        let KeyOverflow { evicted, denied } = self.overflow();
        (evicted > 0 || denied > 0).then(|| {
            format!(
                "the memory for keys was full: {evicted} keys were evicted and {denied} requests with new keys were \
                 denied: raise `max_memory` in the rule file"
            )
        })
    }
}

impl Report {
    fn judge(&self, threshold: &Threshold) -> ThresholdReport {
        let share = match &threshold.metric {
            Metric::Denied => Share { part: self.rules.denied + self.rules.refused, whole: self.requests },
            Metric::DeniedBy(name) => {
                let limit = self.rules.limits.iter().find(|limit| limit.limit == *name);
                limit.map_or(Share { part: 0, whole: 0 }, |limit| Share {
                    part: limit.denied + limit.refused,
                    whole: limit.offered,
                })
            }
            Metric::Clients => Share { part: self.clients.denied, whole: self.clients.seen },
            Metric::NewlyDenied => {
                let newly_denied = self.against.as_ref().map_or(0, |against| against.comparison.newly_denied);
                Share { part: newly_denied, whole: self.requests }
            }
        };
        ThresholdReport {
            threshold: threshold.to_string(),
            value: share.part,
            percent: share.percent(),
            crossed: self.warnings.is_empty().then(|| threshold.is_crossed_by(share)),
        }
    }
}

impl FileReport {
    fn of(summary: &FileSummary) -> Self {
        let disorder = summary.disorder;
        let lines = summary.bad_lines.iter();
        Self {
            path: summary.path.display().to_string(),
            lines: summary.lines,
            requests: summary.requests,
            formats: summary.formats.iter().map(|(format, lines)| (format.name(), lines)).collect(),
            without_request: summary.without_request,
            unreadable: summary.unreadable,
            too_long: summary.too_long,
            unreadable_lines: lines.map(|bad| UnreadableLine { line: bad.number, text: bad.text.clone() }).collect(),
            out_of_order: disorder.out_of_order,
            misdated: disorder.misdated,
            went_back: disorder.went_back,
            largest_step_back: Seconds(Duration::from_micros(disorder.largest_step_back_micros)),
            time_jumps: disorder.jumps,
            problem: summary.problem.clone(),
        }
    }
}
