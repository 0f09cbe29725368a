//! Real proxies and clients that nobody here wrote, with the configurations and programs of `docs/integrations`.
//!
//! `tools/install-peers` installs them. A test skips what is missing, except with `CI=true`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::disallowed_methods, reason = "other processes are waited for, by their own clocks")]

mod http;
mod page;
mod peer;
mod programs;
mod prometheus;
mod proxies;
mod schemathesis;
mod transactions;
