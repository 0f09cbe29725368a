//! What the tests of all members share: processes, Redis servers, ports, temporary directories, waiting.
//!
//! Everything here is real: processes and sockets, no mocks. Failures panic with a message about the cause, because a
//! test that cannot go on has failed. Processes end when their owner is dropped, so do not keep one in a `static`.

pub mod port;
pub mod process;
pub mod redis;
pub mod wait;
