//! The gateway as operators see it: its metrics, its access log, its health, and the files that deploy it.

mod access_log;
mod admin;
mod deployment;
mod metrics;
