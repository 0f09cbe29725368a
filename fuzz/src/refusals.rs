//! Properties of every problem that is reported about a rule file.

use tollgate_config::{Problem, Problems, Severity};

/// Checks the problems of a file that was refused.
pub(crate) fn check_refusal(problems: &Problems, text: &str) {
    assert!(problems.iter().any(|problem| problem.severity() == Severity::Error), "refused without a reason");
    check(problems, text);
}

/// Checks the problems of a file that was accepted.
pub(crate) fn check_warnings(problems: &Problems, text: &str) {
    assert!(problems.iter().all(|problem| problem.severity() == Severity::Warning), "taken in spite of {problems}");
    check(problems, text);
}

fn check(problems: &Problems, text: &str) {
    let lines = lines(text);
    for problem in problems.iter() {
        assert!(!problem.message().trim().is_empty(), "nothing is said at {:?}", problem.position());
        assert!(!problem.fix().trim().is_empty(), "no fix for {problem}");
        check_position(problem, &lines);
        // A message is printed to a terminal or a log, in one line.
        assert!(!problem.to_string().contains(char::is_control), "{:?}", problem.to_string());
        assert!(!problem.text().contains(char::is_control), "{:?}", problem.text());
    }
    let order: Vec<_> = problems.iter().map(Problem::position).collect();
    assert!(order.is_sorted(), "not in the order of the file: {problems}");
}

/// Checks that the position is in the file, or directly after the end of a line, where something may be missing.
fn check_position(problem: &Problem, lines: &[&str]) {
    let position = problem.position();
    let (line, column) = (position.line as usize, position.column as usize);
    assert!((1..=lines.len()).contains(&line), "{problem}: there are {} lines", lines.len());
    let width = lines[line - 1].chars().count();
    assert!((1..=width + 1).contains(&column), "{problem}: the line has {width} characters");
}

/// Splits a text into lines as YAML does: at a line feed, a carriage return, or both together. There is always a last
/// line.
fn lines(text: &str) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(end) = rest.find(['\n', '\r']) {
        lines.push(&rest[..end]);
        rest = &rest[end..];
        rest = rest.strip_prefix("\r\n").unwrap_or_else(|| &rest[1..]);
    }
    lines.push(rest);
    lines
}
