//! Requests to the decision service that no limit applies to, and plans that no limit has numbers for.
//!
//! Nearly always a name is misspelled, and the program that asks would never notice: the request is allowed, or counted by
//! other numbers. So each is counted, reported in the response, and logged once per name. With `service.unknown: deny`,
//! it is denied.
//!
//! Names are those of descriptors, and of plans: programs and operators choose them, not users. But a program may send
//! what users send, so the number of names is bounded.

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use tollgate_rules::UnknownPlan;

use crate::notice;
use crate::page::Page;
use crate::words::quoted;

/// The most names that are logged.
const MAX_NAMES: usize = 100;

/// A question that is answered without the limit, or the numbers, that the client probably means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// No limit applies to the request.
    Request,
    /// A limit has no numbers for the plan of the request.
    Plan(UnknownPlan),
}

impl Unknown {
    /// Returns the reason of a refusal.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Request => "no_limit",
            Self::Plan(_) => "unknown_plan",
        }
    }
}

/// Writes the problem and the fix, for the client.
impl fmt::Display for Unknown {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request => out.write_str(
                "no limit applies to this request: check the names of its descriptors and headers, its domain, and \
                 `match` of the limits",
            ),
            Self::Plan(UnknownPlan { rule, plan }) => write!(
                out,
                "the limit {} has no numbers for the plan {}, so its own apply: check the name of the plan, or add it to \
                 `overrides`",
                quoted(rule),
                quoted(plan)
            ),
        }
    }
}

/// Counts unknown requests and plans, and logs each name once.
#[derive(Debug, Default)]
pub struct Unknowns {
    requests: AtomicU64,
    plans: AtomicU64,
    logged: Mutex<HashSet<String>>,
}

impl Unknowns {
    /// Counts a question. `descriptors` are the names of the request's descriptors.
    pub fn count<'n>(&self, unknown: &Unknown, descriptors: impl Iterator<Item = &'n str>) {
        match unknown {
            Unknown::Request => {
                self.requests.fetch_add(1, Relaxed);
                let mut names: Vec<&str> = descriptors.collect();
                names.sort_unstable();
                let with = match &names[..] {
                    [] => "without descriptors".to_owned(),
                    names => format!("with the descriptors {}", quoted(&names.join(", "))),
                };
                self.log_once(&with, || {
                    format!(
                        "no limit applies to a request {with} that the decision service was asked about: check the names \
                         that the program sends, and `match` and `key` of the limits"
                    )
                });
            }
            Unknown::Plan(plan) => {
                self.plans.fetch_add(1, Relaxed);
                self.log_once(&format!("{} {}", plan.rule, plan.plan), || unknown.to_string());
            }
        }
    }

    fn log_once(&self, name: &str, message: impl FnOnce() -> String) {
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.len() >= MAX_NAMES || logged.contains(name) {
            return;
        }
        logged.insert(name.to_owned());
        let more = if logged.len() == MAX_NAMES { "; further names are not logged" } else { "" };
        notice::warn(format_args!("{}{more}", message()));
    }

    /// Writes the counts.
    pub fn write_metrics(&self, page: &mut Page<'_>) -> fmt::Result {
        let rows = [("request", &self.requests), ("plan", &self.plans)];
        let rows = rows.into_iter().map(|(kind, count)| ([("kind", kind)], count.load(Relaxed)));
        let help = "Questions to the decision service that no limit applies to, or whose plan is unknown, by kind";
        page.counters("tollgate_service_unknown", help, rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::notice::captured::lines_of;

    #[test]
    fn each_name_is_logged_once_up_to_a_bound() {
        let unknowns = Unknowns::default();
        let lines = lines_of(|| {
            for _ in 0..2 {
                unknowns.count(&Unknown::Request, ["usr", "path"].into_iter());
                unknowns.count(&Unknown::Request, [].into_iter());
                let plan = UnknownPlan { rule: "per-user".to_owned(), plan: "por".to_owned() };
                unknowns.count(&Unknown::Plan(plan), [].into_iter());
            }
        });
        insta::assert_snapshot!(lines);
        let lines = lines_of(|| {
            (0..2 * MAX_NAMES).for_each(|name| unknowns.count(&Unknown::Request, [&*name.to_string()].into_iter()));
        });
        assert_eq!(lines.lines().count(), MAX_NAMES - 3);
        assert!(lines.trim_end().ends_with("further names are not logged"), "{lines}");
    }
}
