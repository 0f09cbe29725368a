//! Request data from servers without a known framework: none.

use http::{Extensions, Request, StatusCode};

pub(super) use super::peer::peer;
use crate::gate::InFlightPermit;

/// Routes are known only with the feature `axum`.
pub(super) fn route(_: &Extensions) -> Option<&str> {
    None
}

/// A connection that a handler takes over. Only hyper's are supported, with the feature `axum`.
pub(super) enum Tunnel {}

impl Tunnel {
    pub(super) fn is_requested(_: &Extensions) -> bool {
        false
    }

    pub(super) fn before<B>(_: &mut Request<B>) -> Option<Self> {
        None
    }

    pub(super) fn is_opened_by(&self, _: StatusCode) -> bool {
        match *self {}
    }

    pub(super) fn open(self, _: Option<InFlightPermit>) {
        match self {}
    }
}
