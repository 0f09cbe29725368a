//! The built binary as a separate process: names of `testkit` for tests that have not moved to it.

#![allow(unused_imports, reason = "each test crate uses what it needs")]

pub(crate) use testkit::folder::{folder, folder_with};
pub(crate) use testkit::tollgate::{Process, RULES, run_in};
pub(crate) use testkit::wait::{PATIENCE, wait_until};
