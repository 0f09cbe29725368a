//! What any server tells of a request: nothing of its own.

use http::Extensions;

pub(super) use super::peer::peer;

/// Routes are a server's own.
pub(super) fn route(_: &Extensions) -> Option<&str> {
    None
}
