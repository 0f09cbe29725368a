//! The gateway as its clients and upstreams see it: a separate process between real sockets.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::disallowed_methods, reason = "other processes are waited for, by their own clocks")]

mod abandoned;
mod broken_responses;
mod buffers;
mod counted_responses;
mod denials;
mod descriptors;
mod fact_headers;
mod failing_upstreams;
mod forwarding;
mod grpc;
mod http1_upstreams;
mod http2;
mod http2_deadlines;
mod http2_endings;
mod http2_misuse;
mod http2_sharing;
mod http2_upstreams;
mod kept_charges;
mod lifecycle;
mod messages;
mod normal_form;
mod on_redis;
mod outages;
mod per_address;
mod redirects;
mod repeated_refusals;
mod request_ids;
mod response_heads;
mod routing;
mod self_proxy;
mod slow_clients;
mod smuggling;
mod soak;
mod streaming;
mod tls;
mod tokens;
mod upgrades;
mod uploads;
mod upstream_addresses;
mod upstream_health;
mod upstream_reuse;
mod upstream_tls;
