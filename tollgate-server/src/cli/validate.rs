//! `tollgate validate`: checks rule files. An invalid file exits with 1, one that cannot be read with 2.

use std::path::{Path, PathBuf};

use serde::Serialize;
use tollgate_config::internal::SettingError;
use tollgate_config::{LoadError, OpenError, Parsed, Problem, Problems, Severity};

use super::{Completion, Error, print};
use crate::{config, listeners};

pub(super) const EXAMPLES: &str = "\
Examples:
  tollgate validate tollgate.yaml
  tollgate validate --strict --json rules/*.yaml";

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Rule files
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Treat warnings as errors
    #[arg(long)]
    strict: bool,
    /// Print problems as a JSON array
    #[arg(long)]
    json: bool,
}

/// A problem in the output of `--json`.
#[derive(Serialize)]
struct ProblemJson<'a> {
    file: &'a str,
    line: u32,
    column: u32,
    severity: &'static str,
    text: &'a str,
    message: &'a str,
    fix: &'a str,
}

/// The result for one file.
struct Report {
    file: String,
    limits: usize,
    verdict: Verdict,
    /// All problems, warnings included.
    problems: Vec<Problems>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Valid,
    Invalid,
}

pub(super) async fn run(arguments: &Arguments) -> Result<Completion, Error> {
    let mut reports = Vec::with_capacity(arguments.files.len());
    for path in &arguments.files {
        let mut report = report(path).await?;
        if arguments.strict && report.count(Severity::Warning) > 0 {
            report.verdict = Verdict::Invalid;
        }
        reports.push(report);
    }
    if arguments.json {
        let problems: Vec<ProblemJson<'_>> = reports.iter().flat_map(Report::json).collect();
        print(serde_json::to_string_pretty(&problems).unwrap_or_default())?;
    } else {
        reports.iter().try_for_each(|report| print(report.text()))?;
    }
    let valid = reports.iter().all(|report| report.verdict == Verdict::Valid);
    Ok(if valid { Completion::Positive } else { Completion::Negative })
}

async fn report(path: &Path) -> Result<Report, Error> {
    let file = path.display().to_string();
    let invalid = |problems| Report { file: file.clone(), limits: 0, verdict: Verdict::Invalid, problems };
    let parsed = match config::load_once(path) {
        Ok(parsed) => parsed,
        Err(LoadError::Refused(problems)) => return Ok(invalid(vec![problems])),
        Err(error) => return Err(Error::Load(error)),
    };
    let (limits, warnings) = (parsed.limits.len() + parsed.envoy_rules().len(), parsed.warnings().clone());
    let listeners = listeners::problems(&parsed);
    Ok(match (usable(&parsed).await, listeners) {
        (Ok(()), None) => Report { limits, verdict: Verdict::Valid, ..invalid(vec![warnings]) },
        (Ok(()), Some(problems)) => invalid(vec![warnings, problems]),
        (Err(error), listeners) => {
            let others = listeners.into_iter();
            invalid([warnings, problems_of(&parsed, error)].into_iter().chain(others).collect())
        }
    })
}

/// Checks that a server could start with it: the files that it names exist, and the limits fit in memory. Redis is not
/// contacted.
pub(super) async fn usable(parsed: &Parsed) -> Result<(), OpenError> {
    config::compile(parsed, None)?;
    parsed.named_redis_settings()?;
    match parsed.redis_settings()? {
        None => tollgate_config::open_gate(parsed).await.map(drop),
        Some(_) => Ok(()),
    }
}

/// Returns the problems of a file that cannot be opened, at the positions of their settings.
fn problems_of(parsed: &Parsed, error: OpenError) -> Problems {
    match error {
        OpenError::Rules(problems) => problems,
        OpenError::Limits(error) => {
            let limit = error.limit().map_or_else(String::new, |limit| format!("limit `{limit}`: "));
            let problem = format!("{limit}{}", error.problem());
            parsed.problems([SettingError::new(problem, error.fix()).of(error.field())])
        }
        other => parsed.problems([SettingError::new(other.to_string(), "correct the store").of("store")]),
    }
}

impl Report {
    fn text(&self) -> String {
        let mut lines: Vec<String> = Vec::new();
        let found = self.problems.iter().filter(|problems| problems.iter().next().is_some());
        lines.extend(found.map(Problems::to_string));
        let (errors, warnings) = (self.count(Severity::Error), self.count(Severity::Warning));
        let found = [counted(errors, "error"), counted(warnings, "warning")].into_iter().flatten();
        let found = found.collect::<Vec<_>>().join(", ");
        lines.push(match self.verdict {
            Verdict::Invalid => format!("{}: not valid: {found}", self.file),
            Verdict::Valid if found.is_empty() => format!("{}: valid, {}", self.file, self.limits()),
            Verdict::Valid => format!("{}: valid, {}, {found}", self.file, self.limits()),
        });
        lines.join("\n")
    }

    fn limits(&self) -> String {
        counted(self.limits, "limit").unwrap_or_else(|| "no limits".to_owned())
    }

    fn count(&self, severity: Severity) -> usize {
        let count = self.problems.iter().flat_map(Problems::iter).filter(|one| one.severity() == severity).count();
        if severity == Severity::Warning {
            return count;
        }
        count + self.problems.iter().map(Problems::more).sum::<usize>()
    }

    fn json(&self) -> impl Iterator<Item = ProblemJson<'_>> {
        self.problems.iter().flat_map(Problems::iter).map(ProblemJson::of)
    }
}

impl<'a> ProblemJson<'a> {
    fn of(problem: &'a Problem) -> Self {
        let at = problem.position();
        let severity = if problem.severity() == Severity::Warning { "warning" } else { "error" };
        let (text, message, fix) = (problem.text(), problem.message(), problem.fix());
        Self { file: problem.file(), line: at.line, column: at.column, severity, text, message, fix }
    }
}

fn counted(count: usize, noun: &str) -> Option<String> {
    match count {
        0 => None,
        1 => Some(format!("1 {noun}")),
        _ => Some(format!("{count} {noun}s")),
    }
}
