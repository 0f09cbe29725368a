//! What Tollgate's servers report about themselves: log lines, counters, decisions by limit, spans, and the keys that are
//! limited most.
//!
//! The gateway and the decision service write to the same counters and the same log, and neither knows the other. So both
//! are here, below them. The registry that collects all metrics, `/metrics` and the admin API are above, in the server.
//!
//! Deliberately not here: sockets, requests, the command line, and the decision whether anybody may see a key.
//!
//! The crate is for the binary `tollgate` and has no stable API.

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
