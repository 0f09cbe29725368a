//! Tools around limits that need no server: access logs, their replay through rules, simulations, and suggested limits.
//!
//! They decide with the same gate as the servers, on a clock that follows the requests, so the decisions are those of a
//! server. Memory is bounded, however long a log is.
//!
//! Deliberately not here: the arguments of the commands, the terminal, and sockets.
//!
//! The crate is for the binary `tollgate` and has no stable API.

#![forbid(unsafe_code)]

pub mod access_log;
pub mod replay;
pub mod simulate;
pub mod suggest;
