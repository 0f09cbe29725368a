//! Tools around limits that need no server.

pub(crate) mod access_log;
pub(crate) mod replay;
pub(crate) mod simulate;
pub(crate) mod suggest;
