//! The listeners of the decision service and the admin listener. They start with the server and change when the rule
//! file is reloaded.
//!
//! A change is prepared first: new addresses are bound, and the files that settings name are read. If that fails,
//! everything stays unchanged. A listener with other settings on the same address takes over the socket, so that no
//! connection is refused. Clients of the listener before are asked to reconnect, and then have the new settings.

mod running;
mod wanted;

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tollgate_config::Parsed;
use tollgate_config::internal::Listener;
use tollgate_net::descriptors::{self, Plan, TooFewDescriptors};
use tollgate_net::listening::Stop;
use tollgate_net::listening::{Ending, ListenError};
use tollgate_net::passed_sockets::{ListenerName, Owner, PassedSocket, PassedSockets};
use tollgate_rules::internal::limited::KeyTexts;
use tollgate_telemetry::notice;

use self::running::{Running, Starting, Stopping};
use self::wanted::{Wanted, unprotected_listener, wanted};
pub(crate) use self::wanted::{problems, wants_service};
use crate::gateway::Gateway;
use crate::reload::changes::CliOverrides;
use crate::server_state::ServerState;
use crate::service;
use crate::service::surfaces::Surface;

/// The listeners of the server.
pub(crate) struct Listeners {
    shared: ServerState,
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
    shows_keys: bool,
}

/// A change of listeners that has been applied.
struct Applied {
    /// Descriptions of it.
    changes: Vec<String>,
    /// Each resolves when a listener whose socket another one has accepts nothing more.
    handed_over: Vec<oneshot::Receiver<()>>,
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
    pub(crate) fn new(shared: ServerState, overrides: CliOverrides, at_start: Descriptors) -> Self {
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
            let socket = match socket_of(one, &all, &there) {
                Some(there) => there.socket.clone(),
                None => bind(one, &there, &self.shared.passed).await?,
            };
            let max_connections = one.max_connections(&descriptors.plan);
            let Wanted { surface, listener, .. } = one.clone();
            starting.push(Starting { surface, listener, socket, max_connections, tokens, tls });
        }
        let gone = there.iter().filter(|there| !all.iter().any(|one| there.is(one)));
        let stopping = gone.map(|there| {
            let is_taken = starting.iter().any(|one| one.socket.is(&there.socket));
            (there.surface, if is_taken { Stop::HandOver } else { Stop::Close })
        });
        let shows_keys = file.admin.as_ref().is_some_and(|admin| admin.show_keys);
        Ok(Prepared { stopping: stopping.collect(), starting, descriptors, shows_keys })
    }

    /// Applies a change, and logs it. After that, no connection to the same address is accepted with the settings before.
    pub(crate) async fn change(&self, prepared: Prepared) {
        let is_divided_again = prepared.descriptors != self.state().descriptors;
        if let Some(Applied { changes, handed_over }) = self.apply(prepared) {
            for accepts_nothing in handed_over {
                // The listener drops the sender.
                _ = accepts_nothing.await;
            }
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

    /// Applies a change. Returns `None` if the server stops.
    fn apply(&self, prepared: Prepared) -> Option<Applied> {
        let Prepared { starting, stopping, descriptors, shows_keys } = prepared;
        let mut state = self.state();
        if state.is_stopping {
            return None;
        }
        self.shared.key_display.set(shows_keys);
        state.draining.retain(|task| !task.is_finished());
        state.descriptors = descriptors;
        let (mut changes, mut handed_over) = (Vec::new(), Vec::new());
        for (surface, stop) in stopping {
            let Some(index) = state.running.iter().position(|running| running.surface == surface) else { continue };
            let before = state.running.remove(index);
            let url = before.url();
            let next = starting.iter().find(|one| one.surface == surface);
            let keeps_socket = next.is_some_and(|next| next.socket.is(&before.socket));
            changes.push(if keeps_socket { changed_text(surface) } else { stopped_text(surface, &url) });
            let Stopping { task, accepts_nothing } = before.stop(stop);
            state.draining.push(task);
            if stop == Stop::HandOver {
                handed_over.push(accepts_nothing);
            }
        }
        for one in starting {
            let running = one.start(&self.shared);
            changes.push(started_text(running.surface, &running.url()));
            state.running.push(running);
        }
        self.shared.listening.set(urls(&state.running));
        // Keys are counted only if someone can ask for them.
        let texts = if shows_keys { KeyTexts::Kept } else { KeyTexts::Hashed };
        self.shared.limited.count(state.running.iter().any(|one| one.serves_api).then_some(texts));
        Some(Applied { changes, handed_over })
    }

    /// Returns a description of each listener, for the line that announces the start.
    pub(crate) fn descriptions(&self) -> Vec<String> {
        let order = [Surface::Http, Surface::Resp, Surface::Grpc, Surface::Admin];
        let state = self.state();
        let of = |surface| state.running.iter().find(move |running| running.surface == surface);
        order.into_iter().filter_map(of).map(Running::description).collect()
    }

    /// Returns copies of the sockets, for another process. It gets those of the service manager elsewhere.
    pub(crate) fn sockets(&self) -> io::Result<Vec<PassedSocket>> {
        let state = self.state();
        let own = state.running.iter().filter(|one| one.socket.owner == Owner::Server);
        own.map(|one| {
            let socket = one.socket.listener.as_fd().try_clone_to_owned()?;
            let (key, address) = (one.surface.to_string(), one.listener.listen.as_str().to_owned());
            PassedSocket::new(socket.into(), Owner::Server, Some(ListenerName { key, address }))
        })
        .collect()
    }

    /// Begins to stop the decision service. Nothing can be changed after that. The admin listener continues, unless
    /// another process has taken over.
    pub(crate) fn begin_stop(&self, ending: &Ending) {
        let mut state = self.state();
        state.is_stopping = true;
        let all = std::mem::take(&mut state.running);
        let continues = |one: &Running| one.surface == Surface::Admin && *ending == Ending::Stop;
        let (admin, stopping): (Vec<_>, Vec<_>) = all.into_iter().partition(continues);
        state.running = admin;
        self.shared.listening.set(urls(&state.running));
        let stopping = stopping.into_iter().map(|running| {
            let how = ending.of(running.socket.bound);
            running.stop(how).task
        });
        state.draining.extend(stopping);
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
            _ = running.stop(Stop::Close).task.await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the listeners with their URLs.
fn urls(running: &[Running]) -> Vec<(Surface, String)> {
    running.iter().map(|one| (one.surface, one.url())).collect()
}

impl Prepared {
    /// Separates the start of the admin listener from the rest.
    pub(crate) fn split_admin(self) -> (Self, Self) {
        let Self { starting, stopping, descriptors, shows_keys } = self;
        let (admin, rest) = starting.into_iter().partition(|one| one.surface == Surface::Admin);
        let admin = Self { starting: admin, stopping: Vec::new(), descriptors, shows_keys };
        (admin, Self { starting: rest, stopping, descriptors, shows_keys })
    }

    /// Joins them again.
    pub(crate) fn with(mut self, admin: Self) -> Self {
        self.starting.extend(admin.starting);
        self
    }
}

/// A listener that runs.
struct There {
    surface: Surface,
    listener: Listener,
    socket: Socket,
}

/// The socket of a listener.
#[derive(Clone)]
struct Socket {
    listener: Arc<TcpListener>,
    bound: SocketAddr,
    owner: Owner,
}

impl Socket {
    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.listener, &other.listener)
    }
}

impl There {
    fn of(running: &Running) -> Self {
        let Running { surface, listener, socket, .. } = running;
        Self { surface: *surface, listener: listener.clone(), socket: socket.clone() }
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

fn changed_text(surface: Surface) -> String {
    format!("{surface} has new settings, and its clients reconnect")
}

fn stopped_text(surface: Surface, url: &str) -> String {
    format!("{surface} no longer listens on {url}")
}

fn started_text(surface: Surface, url: &str) -> String {
    format!("{surface} listens on {url}")
}

async fn bind(one: &Wanted, there: &[There], passed: &PassedSockets) -> Result<Socket, Refusal> {
    let address = one.listener.listen.as_str();
    let setting = one.setting;
    let cannot_listen = |source: std::io::Error| {
        let port = address.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
        let own = there.iter().find(|there| Some(there.socket.bound.port()) == port);
        match own.filter(|_| source.kind() == ErrorKind::AddrInUse) {
            Some(own) => Refusal::Unusable(format!(
                "{setting}: cannot listen on {address} while {} of this server listens on {}: choose another port, or \
                 restart the server",
                own.surface, own.socket.bound
            )),
            None => Refusal::Listen(ListenError { setting, address: address.to_owned(), source }),
        }
    };
    let found = passed.find(&one.surface.to_string(), address).await.map_err(cannot_listen)?;
    // A listener accepts from one socket. Several with one address come from a unit with `ReusePort=`.
    let found = found.and_then(|mut found| found.sockets.pop().map(|socket| (socket, found.owner)));
    let (listener, owner) = match found {
        Some((socket, owner)) => (TcpListener::from_std(socket).map_err(cannot_listen)?, owner),
        None => (service::bind(address).await.map_err(cannot_listen)?, Owner::Server),
    };
    let bound = listener.local_addr().map_err(cannot_listen)?;
    Ok(Socket { listener: Arc::new(listener), bound, owner })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_listeners_are_described() {
        let lines = [
            changed_text(Surface::Http),
            stopped_text(Surface::Grpc, "grpc://127.0.0.1:8081"),
            started_text(Surface::Admin, "http://127.0.0.1:8099"),
        ];
        insta::assert_snapshot!(lines.join("\n"));
    }
}
