//! What the other crates of this workspace need of this one and users do not.
//!
//! **Not part of the public API.** Anything in here can change or disappear in any release, and is not covered by
//! semantic versioning.

pub use crate::grpc::http_status as http_status_of_grpc;
pub use crate::headers::{HeaderLine, HeaderValues, is_folded_by_servers, is_forwarding_header, reads_as};
pub use crate::policy::percent_encoded;
pub use crate::refusal::{Challenge, UNKNOWN_ADDRESS};
pub use crate::response::{ReusedResponse, WrittenResponse};
