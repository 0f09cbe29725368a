//! The gateway as operators see it: its metrics, its access log, its health, and the files that deploy it.

#[path = "../common/process.rs"]
mod common;
mod process;

mod access_log;
mod admin;
mod deployment;
mod metrics;
