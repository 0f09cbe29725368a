//! `tollgate validate`: checks rule files. An invalid file exits with 1, one that cannot be read with 2.

use std::path::{Path, PathBuf};

use serde::Serialize;
use tollgate::rules::file::{LoadError, Parsed, Problem, Problems, Severity};
use tollgate::{Gate, OpenError};

use super::{Completion, Error, print};
use crate::config;
use crate::listeners::unprotected_listener;
use crate::reload::CliOverrides;

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
    /// A problem without a position in the file.
    whole: Option<String>,
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
        print(serde_json::to_string_pretty(&problems).unwrap_or_default());
    } else {
        reports.iter().for_each(|report| print(report.text()));
    }
    let valid = reports.iter().all(|report| report.verdict == Verdict::Valid);
    Ok(if valid { Completion::Positive } else { Completion::Negative })
}

async fn report(path: &Path) -> Result<Report, Error> {
    let file = path.display().to_string();
    let invalid = |problems| Report { file: file.clone(), limits: 0, verdict: Verdict::Invalid, problems, whole: None };
    let parsed = match config::load(path) {
        Ok(parsed) => parsed,
        Err(LoadError::Refused(problems)) => return Ok(invalid(vec![problems])),
        Err(error) => return Err(Error::Load(error)),
    };
    let (limits, warnings) = (parsed.limits.len() + parsed.envoy_rules().len(), parsed.warnings().clone());
    let unprotected = unprotected_listener(&parsed, &CliOverrides::default());
    Ok(match usable(&parsed).await {
        Ok(()) if unprotected.is_some() => Report { whole: unprotected, ..invalid(vec![warnings]) },
        Ok(()) => Report { limits, verdict: Verdict::Valid, ..invalid(vec![warnings]) },
        Err(OpenError::Rules(problems)) => invalid(vec![warnings, problems]),
        Err(error) => Report { whole: Some(error.to_string()), ..invalid(vec![warnings]) },
    })
}

/// Checks that a server could start with it: the files that it names exist, and the limits fit in memory. Redis is not
/// contacted.
pub(super) async fn usable(parsed: &Parsed) -> Result<(), OpenError> {
    config::compile(parsed, None)?;
    parsed.named_redis_settings()?;
    match parsed.redis_settings()? {
        None => Gate::open(parsed).await.map(drop),
        Some(_) => Ok(()),
    }
}

impl Report {
    fn text(&self) -> String {
        let mut lines: Vec<String> = Vec::new();
        let found = self.problems.iter().filter(|problems| problems.iter().next().is_some());
        lines.extend(found.map(Problems::to_string));
        lines.extend(self.whole.iter().map(|problem| format!("{}: {problem}", self.file)));
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
        count + self.problems.iter().map(Problems::more).sum::<usize>() + usize::from(self.whole.is_some())
    }

    fn json(&self) -> impl Iterator<Item = ProblemJson<'_>> {
        let whole = self.whole.iter().map(|problem| {
            let (message, fix) = problem.split_once("; ").or_else(|| problem.split_once(": ")).unwrap_or((problem, ""));
            ProblemJson { file: &self.file, line: 1, column: 1, severity: "error", text: "", message, fix }
        });
        self.problems.iter().flat_map(Problems::iter).map(ProblemJson::of).chain(whole)
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
