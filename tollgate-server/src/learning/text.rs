//! Log lines about limits that learn, and the lines of `explain`.

use std::path::Path;
use std::time::Duration;

use tollgate_rules::internal::demand::{Evaluation, Learning, Phase};

use super::LearningState;

/// Returns the line about a move.
pub(super) fn moved(name: &str, state: &LearningState, evaluation: &Evaluation) -> String {
    let (before, after) = evaluation.moved.unwrap_or_default();
    let quota = state.quota_name;
    let change = if state.is_shadow { "would move " } else { "" };
    format!("limit {name}: {quota} {change}{before} → {after}, {}", why(&state.learning, evaluation))
}

/// Returns the line about denials that surge, or no longer do.
pub(super) fn frozen(name: &str, evaluation: &Evaluation) -> String {
    let (denied, seen) = (grouped(evaluation.activity.denied), grouped(evaluation.activity.seen));
    match evaluation.phase {
        Phase::Frozen => format!(
            "limit {name}: learning is frozen while denials surge: {denied} of {seen} clients were denied in the last minutes"
        ),
        _ => format!("limit {name}: learning continues: {denied} of {seen} clients were denied in the last minutes"),
    }
}

/// Returns the line about a saved state that does not fit the limit.
pub(super) fn started_again(name: &str) -> String {
    format!("limit {name}: learning starts again, because the limit measures something else than before")
}

/// Returns the warning about a state on Redis that cannot be read.
pub(super) fn damaged(name: &str) -> String {
    format!("limit {name}: what was learned on Redis is damaged, and is replaced by what this node knows")
}

/// Returns the warning about a file that cannot be used. It is kept as `rejected`, if it was renamed.
pub(super) fn damaged_file(path: &Path, rejected: Option<&Path>) -> String {
    let path = path.display();
    match rejected {
        Some(rejected) => format!(
            "{path} is damaged and not used, so limits that learn start with their smallest numbers: it is kept as {}; \
             restore the file from a backup and restart, or raise `from` until they have learned again",
            rejected.display()
        ),
        None => format!(
            "{path} is damaged, so the numbers that limits have learned are unknown: see tollgate_learned_value in the \
             metrics of the server"
        ),
    }
}

/// Returns the warning of `explain` about a server that has not kept what it learned.
pub(super) fn missing_file(path: &Path) -> String {
    format!(
        "there is no {}, so the numbers that limits have learned are unknown: name the --state file of the server, which \
         writes what it learns beside it every five minutes and when it stops",
        path.display()
    )
}

/// Returns the reason for a number.
fn why(learning: &Learning, evaluation: &Evaluation) -> String {
    let settings = learning.settings();
    let (clients, over) = (grouped(evaluation.clients), span(settings.over));
    let need = evaluation.target.map_or_else(|| "nothing".to_owned(), grouped);
    let bound = match evaluation.target {
        Some(target) if target == settings.to => ", the largest number allowed",
        Some(target) if target == settings.from => ", the smallest number allowed",
        _ => "",
    };
    format!("{} of {clients} clients over {over} need {need} or less{bound}", settings.cover)
}

/// Returns the name of a phase.
pub(super) fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Collecting => "collecting",
        Phase::Frozen => "frozen",
        Phase::Following => "following",
    }
}

/// Returns the number in force and the reason, for `explain`.
pub(super) fn explain(LearningState { learning, quota_name: quota, is_shadow, .. }: &LearningState) -> String {
    let settings = learning.settings();
    let bounds = format!("learns between {} and {}", settings.from, settings.to);
    let shadow = if *is_shadow { format!(" (shadow: {} stays in force)", settings.from) } else { String::new() };
    let state = match learning.last() {
        None => "the server has the number in force in tollgate_learned_value, and saves it next to the `--state` file"
            .to_owned(),
        Some(last) if last.phase == Phase::Collecting => format!(
            "{} is in force until {} clients have returned after {}; {} of {} so far",
            learning.value(),
            grouped(settings.clients_needed()),
            span(settings.first_observation()),
            grouped(last.clients),
            grouped(last.seen)
        ),
        Some(last) if last.phase == Phase::Frozen => {
            format!("now {}, frozen while denials surge; {}", learning.value(), why(learning, last))
        }
        Some(last) => format!("now {}; {}", learning.value(), why(learning, last)),
    };
    format!("{quota} {bounds}{shadow}: {state}")
}

/// Formats a duration in days, hours, minutes or seconds.
fn span(span: Duration) -> String {
    let seconds = span.as_secs();
    match [(86_400, "d"), (3_600, "h"), (60, "m")]
        .into_iter()
        .find(|(unit, _)| seconds >= *unit && seconds.is_multiple_of(*unit))
    {
        Some((unit, name)) => format!("{}{name}", seconds / unit),
        None => format!("{seconds}s"),
    }
}

/// Formats a number with commas between thousands.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_durations_are_easy_to_read() {
        assert_eq!([7, 999, 1000, 1_234_567].map(grouped), ["7", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [604_800, 5400, 3600, 61].map(|seconds| span(Duration::from_secs(seconds))),
            ["7d", "90m", "1h", "61s"]
        );
    }
}
