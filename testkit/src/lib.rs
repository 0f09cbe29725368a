//! What the tests of all members share: servers, clients, upstreams, certificates, ports, temporary directories.
//!
//! Everything here is real: processes and sockets, no mocks. Failures panic with a message about the cause, because a
//! test that cannot go on has failed. Processes end when their owner is dropped, so do not keep one in a `static`.
//!
//! | module | purpose |
//! |---|---|
//! | [`redis`] | Redis or Valkey servers: single, with TLS, with Sentinel, as a cluster; the network to them |
//! | [`tollgate`] | the built binary as a process or a command; [`gateway`] and [`service`] are its two roles |
//! | [`client`] | a client of every protocol; runs a test over HTTP/1 and HTTP/2, with and without TLS |
//! | [`http1`], [`http2`] | its connections; that of HTTP/1 can send any bytes and sees every byte of a response |
//! | [`metrics`] | servers that together have every metric |
//! | [`upstream`] | servers behind a gateway |
//! | [`certificates`] | authorities and the certificates that they issue |
//! | [`window`] | windows that do not end while a test runs |
//! | [`port`], [`process`], [`folder`], [`wait`], [`skip`] | what the others are made of |

pub mod certificates;
pub mod client;
pub mod folder;
pub mod gateway;
pub mod http1;
pub mod http2;
pub mod metrics;
pub mod port;
pub mod process;
pub mod redis;
pub mod service;
pub mod skip;
pub mod tollgate;
pub mod upstream;
pub mod wait;
pub mod window;
