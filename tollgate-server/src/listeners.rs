//! The listeners of the decision service and the admin listener. They start with the server and change when the rule
//! file is reloaded.
//!
//! A change is prepared first: new addresses are bound, and the files that settings name are read. If that fails,
//! everything stays unchanged. A listener with other settings on the same address takes over the socket, so that no
//! connection is refused. Clients of the listener before are asked to reconnect, and then have the new settings.

mod running;
mod wanted;

use std::fmt;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tollgate::Gate;
use tollgate::rules::file::Parsed;
use tollgate::rules::file::internal::Listener;

use self::running::{Running, Starting};
use self::wanted::{Wanted, unprotected_listener, wanted};
pub(crate) use self::wanted::{problems, wants_service};
use crate::decisions::Decisions;
use crate::descriptors::{self, Plan, TooFewDescriptors};
use crate::gateway::Gateway;
use crate::learning::Learners;
use crate::listening::ListenError;
use crate::notice;
use crate::readiness::Readiness;
use crate::reload::{CliOverrides, Reloads};
use crate::service;
use crate::service::Stop;
use crate::service::surfaces::{Surface, Surfaces};
use crate::service::throttle::Throttles;

/// The state that all listeners share.
pub(crate) struct Shared {
    pub(crate) gate: Gate,
    pub(crate) throttles: Arc<Throttles>,
    pub(crate) decisions: Arc<Decisions>,
    pub(crate) surfaces: Arc<Surfaces>,
    pub(crate) readiness: Arc<Readiness>,
    pub(crate) reloads: Arc<Reloads>,
    pub(crate) learners: Arc<Learners>,
}

/// The listeners of the server.
pub(crate) struct Listeners {
    shared: Shared,
    overrides: CliOverrides,
    /// The descriptors at the start, which the gateway keeps.
    at_start: Descriptors,
    state: Mutex<State>,
}

struct State {
    running: Vec<Running>,
    /// Listeners that have stopped, while they drain their connections.
    draining: Vec<JoinHandle<()>>,
    descriptors: Descriptors,
    is_stopping: bool,
}

/// File descriptors, and the listeners that they are divided between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptors {
    surfaces: descriptors::Surfaces,
    pub(crate) plan: Plan,
}

/// A change of listeners that can be applied.
pub(crate) struct Prepared {
    starting: Vec<Starting>,
    stopping: Vec<(Surface, Stop)>,
    descriptors: Descriptors,
}

/// Why listeners cannot be used.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// A setting, or a file that it names.
    Unusable(String),
    Listen(ListenError),
    Descriptors(TooFewDescriptors),
}

impl fmt::Display for Refusal {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unusable(problem) => out.write_str(problem),
            Self::Listen(problem) => write!(out, "{problem}: {}", problem.fix()),
            Self::Descriptors(too_few) => too_few.fmt(out),
        }
    }
}

/// Checks the listeners of a file before the start, without binding them, and divides the descriptors.
pub(crate) fn check(file: &Parsed, overrides: &CliOverrides) -> Result<Descriptors, Refusal> {
    if let Some(problem) = unprotected_listener(file, overrides) {
        return Err(Refusal::Unusable(problem.to_string()));
    }
    let all = wanted(file, overrides);
    for one in &all {
        one.tokens(file.folder())?;
    }
    let gateway = file.gateway.as_ref();
    let workers = gateway.map_or(0, Gateway::workers);
    let max_connections = gateway.and_then(|gateway| gateway.max_connections);
    Descriptors::divide(wanted::shares(&all, descriptors::Surfaces { workers, max_connections, ..Default::default() }))
}

impl Descriptors {
    fn divide(surfaces: descriptors::Surfaces) -> Result<Self, Refusal> {
        let plan = descriptors::plan(surfaces).map_err(Refusal::Descriptors)?;
        Ok(Self { surfaces, plan })
    }
}

impl Listeners {
    /// Creates the listeners of a server. None runs yet.
    pub(crate) fn new(shared: Shared, overrides: CliOverrides, at_start: Descriptors) -> Self {
        let (running, draining) = (Vec::new(), Vec::new());
        let state = State { running, draining, descriptors: at_start, is_stopping: false };
        Self { shared, overrides, at_start, state: Mutex::new(state) }
    }

    /// Prepares the listeners of a file for [`change`](Self::change).
    pub(crate) async fn prepare(&self, file: &Parsed) -> Result<Prepared, Refusal> {
        if let Some(problem) = unprotected_listener(file, &self.overrides) {
            return Err(Refusal::Unusable(problem.to_string()));
        }
        let all = wanted(file, &self.overrides);
        let (there, before) = {
            let state = self.state();
            (state.running.iter().map(There::of).collect::<Vec<_>>(), state.descriptors)
        };
        // The gateway keeps the layout of its start.
        let surfaces = wanted::shares(&all, self.at_start.surfaces);
        let descriptors = if surfaces == before.surfaces { before } else { Descriptors::divide(surfaces)? };
        let mut starting = Vec::new();
        for one in all.iter().filter(|one| !there.iter().any(|there| there.is(one))) {
            let (tokens, tls) = (one.tokens(file.folder())?, one.tls(file.folder())?);
            let (socket, bound) = match socket_of(one, &all, &there) {
                Some(there) => (Arc::clone(&there.socket), there.bound),
                None => bind(one, &there).await?,
            };
            let max_connections = one.max_connections(&descriptors.plan);
            let Wanted { surface, listener, .. } = one.clone();
            starting.push(Starting { surface, listener, socket, bound, max_connections, tokens, tls });
        }
        let gone = there.iter().filter(|there| !all.iter().any(|one| there.is(one)));
        let stopping = gone.map(|there| {
            let is_taken = starting.iter().any(|one| Arc::ptr_eq(&one.socket, &there.socket));
            (there.surface, if is_taken { Stop::HandOver } else { Stop::Close })
        });
        Ok(Prepared { stopping: stopping.collect(), starting, descriptors })
    }

    /// Applies a change, and logs it.
    pub(crate) fn change(&self, prepared: Prepared) {
        let is_divided_again = prepared.descriptors != self.state().descriptors;
        if let Some(changes) = self.apply(prepared) {
            changes.iter().for_each(notice::log);
        }
        let (at_start, now) = (self.at_start.plan, self.state().descriptors.plan);
        let is_short = now.gateway < at_start.gateway || now.upstreams < at_start.upstreams;
        if is_divided_again && is_short && self.at_start.surfaces.workers > 0 {
            notice::warn(
                "the gateway keeps the share of open files that it had without the new listeners: restart the server \
                 to divide them again",
            );
        }
    }

    /// Starts the listeners of the server. The admin listener can be started before the others.
    pub(crate) fn start(&self, prepared: Prepared) {
        // The first line of the server names the listeners.
        _ = self.apply(prepared);
    }

    /// Applies a change, and describes it. Returns `None` if the server stops.
    fn apply(&self, prepared: Prepared) -> Option<Vec<String>> {
        let Prepared { starting, stopping, descriptors } = prepared;
        let mut state = self.state();
        if state.is_stopping {
            return None;
        }
        state.draining.retain(|task| !task.is_finished());
        state.descriptors = descriptors;
        let mut changes = Vec::new();
        for (surface, stop) in stopping {
            let Some(index) = state.running.iter().position(|running| running.surface == surface) else { continue };
            let before = state.running.remove(index);
            let url = before.url();
            changes.push(match starting.iter().find(|one| one.surface == surface) {
                Some(next) if Arc::ptr_eq(&next.socket, &before.socket) => {
                    format!("{surface} has new settings, and its clients reconnect")
                }
                _ => format!("{surface} no longer listens on {url}"),
            });
            state.draining.push(before.stop(stop));
        }
        for one in starting {
            let running = one.start(&self.shared);
            changes.push(format!("{} listens on {}", running.surface, running.url()));
            state.running.push(running);
        }
        Some(changes)
    }

    /// Returns a description of each listener, for the line that announces the start.
    pub(crate) fn descriptions(&self) -> Vec<String> {
        let order = [Surface::Http, Surface::Resp, Surface::Grpc, Surface::Admin];
        let state = self.state();
        let of = |surface| state.running.iter().find(move |running| running.surface == surface);
        order.into_iter().filter_map(of).map(Running::description).collect()
    }

    /// Begins to stop the decision service. Nothing can be changed after that.
    pub(crate) fn begin_stop(&self) {
        let mut state = self.state();
        state.is_stopping = true;
        let all = std::mem::take(&mut state.running);
        let (admin, service): (Vec<_>, Vec<_>) = all.into_iter().partition(|one| one.surface == Surface::Admin);
        state.running = admin;
        state.draining.extend(service.into_iter().map(|running| running.stop(Stop::Close)));
    }

    /// Waits until all listeners that were stopped have drained their connections.
    pub(crate) async fn drained(&self) {
        let draining = std::mem::take(&mut self.state().draining);
        for task in draining {
            // A panic has already been reported.
            _ = task.await;
        }
    }

    /// Stops the admin listener, which is the last one, so that `/readyz` can report that the server stops.
    pub(crate) async fn stop_admin(&self) {
        let admin = std::mem::take(&mut self.state().running);
        for running in admin {
            _ = running.stop(Stop::Close).await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Prepared {
    /// Separates the start of the admin listener from the rest.
    pub(crate) fn split_admin(self) -> (Self, Self) {
        let Self { starting, stopping, descriptors } = self;
        let (admin, rest) = starting.into_iter().partition(|one| one.surface == Surface::Admin);
        (Self { starting: admin, stopping: Vec::new(), descriptors }, Self { starting: rest, stopping, descriptors })
    }
}

/// A listener that runs.
struct There {
    surface: Surface,
    listener: Listener,
    socket: Arc<TcpListener>,
    bound: SocketAddr,
}

impl There {
    fn of(running: &Running) -> Self {
        let Running { surface, listener, socket, bound, .. } = running;
        Self { surface: *surface, listener: listener.clone(), socket: Arc::clone(socket), bound: *bound }
    }

    /// Returns whether it already is as wanted.
    fn is(&self, wanted: &Wanted) -> bool {
        self.surface == wanted.surface && self.listener == wanted.listener
    }
}

/// Returns the listener whose socket a new one takes over: it has the same address. That of another protocol must have
/// given up the address.
fn socket_of<'t>(one: &Wanted, all: &[Wanted], there: &'t [There]) -> Option<&'t There> {
    let address = &one.listener.listen;
    let has_address = |there: &&There| there.listener.listen == *address;
    let own = there.iter().filter(has_address).find(|there| there.surface == one.surface);
    own.or_else(|| {
        let wants_address = all.iter().filter(|other| other.listener.listen == *address).count();
        let is_free = wants_address == 1 && !address.as_str().ends_with(":0");
        there.iter().filter(has_address).find(|_| is_free)
    })
}

async fn bind(one: &Wanted, there: &[There]) -> Result<(Arc<TcpListener>, SocketAddr), Refusal> {
    let address = one.listener.listen.as_str();
    let setting = one.setting;
    let cannot_listen = |source: std::io::Error| {
        let port = address.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
        let own = there.iter().find(|there| Some(there.bound.port()) == port);
        match own.filter(|_| source.kind() == ErrorKind::AddrInUse) {
            Some(own) => Refusal::Unusable(format!(
                "{setting}: cannot listen on {address} while {} of this server listens on {}: choose another port, or \
                 restart the server",
                own.surface, own.bound
            )),
            None => Refusal::Listen(ListenError { setting, address: address.to_owned(), source }),
        }
    };
    let listener = service::bind(address).await.map_err(cannot_listen)?;
    let bound = listener.local_addr().map_err(cannot_listen)?;
    Ok((Arc::new(listener), bound))
}
