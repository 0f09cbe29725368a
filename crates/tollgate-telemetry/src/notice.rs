//! Log lines on stderr for operators. The answer of a command goes to stdout instead.
//!
//! The lines of `serve` have a time and a level, as text or as JSON. The other commands are for people at a terminal: their
//! lines begin with `tollgate: `, and problems of a rule file with `file:line:column`, as editors expect.

#[cfg(any(test, feature = "captured"))]
pub mod captured;
mod line;
mod monitor;

use std::fmt::Display;
use std::io::{Write, stderr};
use std::sync::OnceLock;

use serde_json::Value;
use tollgate::OnStoreFailure;
use tollgate_config::{Problem, Problems, Severity};

use self::line::{Form, render};
pub use self::line::{Level, LogFormat};
pub use self::monitor::{monitor_memory, monitor_store, warn_if_store_unavailable};
use crate::seconds::since_epoch;

/// A field of a JSON line, such as `limit` or `upstream`. The message has the same fact in words.
pub type Field = (&'static str, Value);

/// The form of all lines. Plain until a server starts.
static FORM: OnceLock<Form> = OnceLock::new();

/// Sets the form of the lines of a server. The first call counts.
pub fn start(format: LogFormat) {
    let form = FORM.get_or_init(|| Form::of(format));
    if *form == Form::Json {
        // One line of JSON in place of the lines of the standard library.
        std::panic::set_hook(Box::new(|panic| error(panic)));
    }
}

fn form() -> Form {
    FORM.get().copied().unwrap_or(Form::Plain)
}

impl Level {
    /// Logs an event with fields for the JSON form. A closed stderr is ignored.
    pub fn log(self, message: impl Display, fields: &[Field]) {
        #[cfg(any(test, feature = "captured"))]
        if captured::keep(self, &message) {
            return;
        }
        let line = render(form(), self, since_epoch(), &message, fields);
        // In one call, so that lines of several threads and processes do not mix.
        _ = stderr().write_all(line.as_bytes());
    }
}

/// Logs an event.
pub fn log(message: impl Display) {
    Level::Info.log(message, &[]);
}

/// Logs a warning.
pub fn warn(message: impl Display) {
    Level::Warning.log(message, &[]);
}

/// Logs a failure that needs an operator.
pub fn error(message: impl Display) {
    Level::Error.log(message, &[]);
}

/// Logs a change that a person or a program made through the API: what, by whom, and its subject. The fields are part
/// of the message too. Keys of users must be hashed, unless the rule file allows showing them.
pub fn audit(action: &str, who: impl Display, fields: &[Field]) {
    let mut message = format!("audit: {action} by {who}");
    for (index, (name, value)) in fields.iter().enumerate() {
        message.push_str(if index == 0 { ": " } else { ", " });
        message.push_str(name);
        message.push(' ');
        message.push_str(&value.to_string());
    }
    let mut all = vec![("audit", Value::from(action)), ("who", Value::from(who.to_string()))];
    all.extend_from_slice(fields);
    Level::Info.log(message, &all);
}

/// Logs the problems of a rule file, one per line. Each begins with `file:line:column`.
pub fn log_problems(problems: &Problems) {
    if problems.iter().next().is_none() {
        return;
    }
    if form() == Form::Plain {
        _ = writeln!(stderr(), "{problems}");
        return;
    }
    problems.iter().for_each(log_problem);
    if problems.more() > 0 {
        error(format_args!("and {} more problems", problems.more()));
    }
}

fn log_problem(problem: &Problem) {
    let level = if problem.severity() == Severity::Warning { Level::Warning } else { Level::Error };
    let (file, at) = (problem.file(), problem.position());
    let (line, column) = (at.line, at.column);
    let fields = [("file", file.into()), ("line", line.into()), ("column", column.into())];
    level.log(format_args!("{file}:{line}:{column}: {}: {}", problem.message(), problem.fix()), &fields);
}

/// Returns the line about the start of the server for stdout: JSON if the log is.
pub fn start_line(message: &str) -> String {
    match form() {
        Form::Json => render(Form::Json, Level::Info, since_epoch(), &message, &[]).trim_end().to_owned(),
        _ => message.to_owned(),
    }
}

/// Joins up to `max` names, and adds the number of the others.
pub fn join_up_to(names: &[impl AsRef<str>], max: usize) -> String {
    let listed: Vec<&str> = names.iter().take(max).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(max) {
        0 => listed.join(", "),
        more => format!("{} and {more} more", listed.join(", ")),
    }
}

/// Returns the name of the policy in a rule file.
pub fn policy_name(policy: OnStoreFailure) -> &'static str {
    match policy {
        OnStoreFailure::Allow => "allow",
        OnStoreFailure::Deny => "deny",
        _ => "local",
    }
}
