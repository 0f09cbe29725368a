//! A process that the server itself has started, in place of the one that the test started.

use std::process::{Command, Output};

/// A server that `tollgate restart` has started. It is killed when the test ends.
pub(crate) struct Successor {
    pub(crate) id: u32,
    /// The process that it has taken over from.
    pub(crate) before: u32,
}

impl Successor {
    /// Reads the output of `tollgate restart`, which must have succeeded.
    #[track_caller]
    pub(crate) fn from(output: &Output) -> Self {
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
        let numbers: Vec<u32> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [id, before] = numbers[..] else { panic!("no process in {said:?}") };
        Self { id, before }
    }

    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("sh").args(["-c", &format!("kill -{name} {}", self.id)]).status();
        assert!(sent.expect("sh runs").success());
    }

    /// Returns whether it still runs.
    pub(crate) fn runs(&self) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/stat", self.id)).unwrap_or_default();
        // A process that has ended stays as a zombie until its parent asks for it.
        status.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        // It may have ended.
        _ = Command::new("sh").args(["-c", &format!("kill -KILL {} 2>/dev/null", self.id)]).status();
    }
}
