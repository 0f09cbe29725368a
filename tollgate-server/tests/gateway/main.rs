//! The gateway as its clients and upstreams meet it: a process of its own between real sockets.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::disallowed_methods, reason = "other processes are waited for, by their own clocks")]

mod certificates;
mod client;
#[path = "../common/process.rs"]
mod common;
mod process;
/// A Redis, as the tests of the server have it.
#[path = "../common/redis.rs"]
mod redis;
mod upstream;

mod abandoned;
mod answer_heads;
mod answers_counted;
mod broken_answers;
mod buffers;
mod circles;
mod denials;
mod descriptors;
mod failing_upstreams;
mod forwarding;
mod grpc;
mod http2;
mod http2_deadlines;
mod http2_misuse;
mod http2_sharing;
mod lifecycle;
mod messages;
mod normal_form;
mod on_redis;
mod outages;
mod per_address;
mod refused_again;
mod routing;
mod slow_clients;
mod smuggling;
mod soak;
mod streaming;
mod tls;
mod tokens;
mod upgrades;
mod upstream_addresses;
mod upstream_health;
mod upstream_reuse;
mod upstream_tls;
mod ways;
