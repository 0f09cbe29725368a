//! Properties that hold for any bytes that reach Tollgate from outside: the rule file, paths, forwarding headers,
//! cookies and queries, tokens, expressions, files of envoyproxy/ratelimit, requests to the decision service,
//! replies of Redis, and messages of HTTP/1, which hyper and llhttp must read as the gateway does.
//!
//! Each target is a function that takes bytes and panics if a property does not hold. It uses only the public API of
//! the libraries, some items of their `internal`, and `fuzzing` of the server. Where a result can be computed in a second,
//! simpler way, both results are compared.
//!
//! `make fuzz` runs all targets, each for `FUZZ_SECONDS` (60); `make fuzz-jwt` runs one. Inputs that fail are saved in
//! `fuzz/artifacts/`, and `cargo fuzz run --sanitizer none --features libfuzzer TARGET FILE` repeats one. Once the
//! cause is fixed, move the input to `fuzz/seeds/TARGET/`, under a name that describes it. `cargo test` in this folder,
//! part of `make test`, replays all seeds and needs no fuzzer.
//!
//! Deliberately not here: sanitizers. This project has no `unsafe`, except to call llhttp, and without sanitizers a stable
//! toolchain is enough.

#![forbid(unsafe_code)]

mod access_log;
mod cookies;
mod descriptors;
mod envoy_rule_file;
mod expressions;
mod forwarded;
mod gates;
mod http1;
mod http1_messages;
mod http_body;
mod hyper_conn;
mod jwt;
mod normal_forms;
mod paths;
mod redis_replies;
mod refusals;
mod resp;
mod rule_file;

pub use self::access_log::access_log;
pub use self::cookies::cookies;
pub use self::descriptors::descriptors;
pub use self::envoy_rule_file::envoy_rule_file;
pub use self::expressions::expressions;
pub use self::forwarded::forwarded;
pub use self::http_body::http_body;
pub use self::http1::{connection, request_body, request_head, response_body, response_head};
pub use self::jwt::jwt;
pub use self::normal_forms::normal_forms;
pub use self::paths::paths;
pub use self::redis_replies::redis_replies;
pub use self::resp::resp;
pub use self::rule_file::rule_file;

/// A target: its name, which is also the name of its seed folder, and the function that checks its properties.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 18] = [
    ("rule_file", rule_file),
    ("paths", paths),
    ("forwarded", forwarded),
    ("cookies", cookies),
    ("normal_forms", normal_forms),
    ("jwt", jwt),
    ("expressions", expressions),
    ("envoy_rule_file", envoy_rule_file),
    ("resp", resp),
    ("redis_replies", redis_replies),
    ("http_body", http_body),
    ("descriptors", descriptors),
    ("access_log", access_log),
    ("request_head", request_head),
    ("request_body", request_body),
    ("response_head", response_head),
    ("response_body", response_body),
    ("connection", connection),
];
