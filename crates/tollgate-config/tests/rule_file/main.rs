//! The rule file: accepted files, rejected files, and the messages.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod compiled;
mod dropped_headers;
mod envoy;
mod expressions;
mod good;
mod hostile;
mod learning;
mod messages;
mod migrating;
mod normal_form;
mod phases;
mod schema;
mod store;
mod tokens;
