//! What must hold for any bytes that reach Tollgate from outside: the rule file, paths, forwarding headers, cookies
//! and queries, tokens, and expressions.
//!
//! Each target is a function from bytes to nothing that panics when a property is broken. They use the library as
//! users do, by its public API alone. Where an answer can be computed in a second, simpler way, it is, and the two are
//! compared.
//!
//! `make fuzz` runs all targets, each for `FUZZ_SECONDS` (60); `make fuzz-jwt` runs one. What they find lies in
//! `fuzz/artifacts/`, and `cargo fuzz run --sanitizer none --features libfuzzer TARGET FILE` repeats it. Once it is
//! mended, the input goes to `fuzz/seeds/TARGET/` under a name that says what it was. `cargo test` in this folder,
//! part of `make test`, replays all seeds and needs no fuzzer.
//!
//! Deliberately not here: sanitizers. There is no `unsafe` in this project, and without them a stable toolchain does.

#![forbid(unsafe_code)]

mod asking;
mod cookies;
mod expressions;
mod forwarded;
mod jwt;
mod paths;
mod refusals;
mod rule_file;

pub use self::cookies::cookies;
pub use self::expressions::expressions;
pub use self::forwarded::forwarded;
pub use self::jwt::jwt;
pub use self::paths::paths;
pub use self::rule_file::rule_file;

/// A target: its name, which its folder of seeds has too, and its properties.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 6] = [
    ("rule_file", rule_file),
    ("paths", paths),
    ("forwarded", forwarded),
    ("cookies", cookies),
    ("jwt", jwt),
    ("expressions", expressions),
];
