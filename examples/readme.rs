//! The Rust code of the README and of `docs/`, compiled and run as tests.

#[doc = include_str!("../README.md")]
pub struct Readme;

#[doc = include_str!("../docs/library.md")]
pub struct Library;

#[doc = include_str!("../docs/middleware.md")]
pub struct Middleware;

#[doc = include_str!("../docs/algorithms.md")]
pub struct Algorithms;

#[doc = include_str!("../docs/redis.md")]
pub struct Redis;

#[doc = include_str!("../docs/migrating/governor.md")]
pub struct MovingFromGovernor;

#[doc = include_str!("../docs/migrating/bucket4j.md")]
pub struct MovingFromBucket4j;
