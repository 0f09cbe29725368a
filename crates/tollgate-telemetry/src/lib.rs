//! Telemetry of Tollgate's servers: log lines, counters, decisions by limit, spans, and the keys that are limited most.
//!
//! The gateway and the decision service write to the same counters and the same log, and do not depend on each other. So
//! the counters and the log are in a crate below them. The registry of all metrics, `/metrics` and the admin API are in the
//! server.
//!
//! Deliberately not here: listeners, requests, the command line, and the decision who may see a key.
//!
//! The crate is for the binary `tollgate` and its sibling crates, and has no stable API.

#![forbid(unsafe_code)]

pub mod counter;
pub mod decisions;
pub mod limit_summary;
pub mod limited;
pub mod notice;
pub mod page;
pub mod seconds;
pub mod top_keys;
pub mod traces;
pub mod unknown;
pub mod words;
