//! The state that the decision service, the admin API and the metrics share.

use std::sync::{Arc, Mutex, PoisonError};

use tollgate_net::passed_sockets::PassedSockets;
use tollgate_rules::Gate;
use tollgate_telemetry::decisions::Decisions;
use tollgate_telemetry::limited::Limited;

use crate::admin::key_hash::KeyDisplay;
use crate::bans::Bans;
use crate::learning::Learners;
use crate::readiness::Readiness;
use crate::reload::reloads::Reloads;
use crate::service::surfaces::{Surface, Surfaces};
use crate::service::throttle::Throttles;

/// The state that all listeners share.
#[derive(Clone)]
pub(crate) struct ServerState {
    pub(crate) gate: Gate,
    pub(crate) throttles: Arc<Throttles>,
    /// Decisions of the decision service. The gateway has its own.
    pub(crate) decisions: Arc<Decisions>,
    /// Connections of the decision service and the admin listener.
    pub(crate) surfaces: Arc<Surfaces>,
    pub(crate) readiness: Arc<Readiness>,
    pub(crate) reloads: Arc<Reloads>,
    /// The limits that learn.
    pub(crate) learners: Arc<Learners>,
    pub(crate) listening: Arc<Listening>,
    /// The bans of operators.
    pub(crate) bans: Arc<Bans>,
    /// Whether the admin API shows keys.
    pub(crate) key_display: Arc<KeyDisplay>,
    /// The keys that the admin API lists.
    pub(crate) limited: Arc<Limited>,
    /// The start of the server, in seconds since the Unix epoch.
    pub(crate) started_at: f64,
    /// Sockets that listeners use in place of their own.
    pub(crate) passed: Arc<PassedSockets>,
}

/// The listeners that run, for the admin API.
#[derive(Debug, Default)]
pub(crate) struct Listening(Mutex<Vec<(Surface, String)>>);

impl Listening {
    /// Returns the listeners with their URLs.
    pub(crate) fn all(&self) -> Vec<(Surface, String)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set(&self, all: Vec<(Surface, String)>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = all;
    }
}
