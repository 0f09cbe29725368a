//! Log lines that unit tests compare with snapshots, so that a later change of words is one command.

use std::cell::RefCell;
use std::fmt::Display;

use super::Level;

thread_local! {
    static LINES: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Returns the lines that `log` writes on this thread, each with its level and without its time.
pub fn lines_of(log: impl FnOnce()) -> String {
    LINES.set(Some(Vec::new()));
    log();
    LINES.take().unwrap_or_default().join("\n")
}

/// Keeps a line if the lines of this thread are captured.
pub(super) fn keep(level: Level, message: &impl Display) -> bool {
    LINES.with_borrow_mut(|lines| lines.as_mut().map(|lines| lines.push(format!("{level:?}: {message}"))).is_some())
}
