//! Lines for whoever runs the server, on stderr. What a command answers goes to stdout instead.

use std::fmt::Display;
use std::io::{Write, stderr};

use tollgate::rules::file::Problems;

/// Says something worth to know. Nobody is left to tell when even stderr is closed.
pub(crate) fn tell(line: impl Display) {
    _ = writeln!(stderr(), "tollgate: {line}");
}

/// Says something that may not be meant so.
pub(crate) fn warn(line: impl Display) {
    tell(format_args!("warning: {line}"));
}

/// Says what is wrong with a rule file, one problem to a line: `file:line:column` first, where editors look for it.
pub(crate) fn tell_problems(problems: &Problems) {
    if problems.iter().next().is_some() {
        _ = writeln!(stderr(), "{problems}");
    }
}
