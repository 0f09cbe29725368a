//! Sockets of Tollgate's servers: passed sockets, the PROXY header, TLS, descriptors and deadlines.
//!
//! The gateway, the decision service and the admin listener need the same of a socket, so it is here once. Settings are
//! plain structs, which the server makes from the rule file.
//!
//! Deliberately not here: HTTP, limits, the rule file and the command line.
//!
//! The crate is for the binary `tollgate` and its sibling crates, and has no stable API.

#![forbid(unsafe_code)]

pub mod deadline;
pub mod descriptors;
pub mod listening;
pub mod passed_sockets;
pub mod pem;
pub mod proxy_protocol;
pub mod stream;
pub mod tls;
