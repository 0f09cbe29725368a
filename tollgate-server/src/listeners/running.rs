//! A listener that runs.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::{oneshot, watch};
use tokio::task::{AbortHandle, JoinHandle};
use tollgate_config::internal::{HostGlob, Listener};
use tollgate_net::listening::Stop;
use tollgate_net::passed_sockets::Owner;
use tollgate_net::tls::{CertificateReloads, Tls, TlsInUse};

use super::Socket;
use crate::admin::{self, Access, Admin};
use crate::server_state::ServerState;
use crate::service::grpc::GrpcState;
use crate::service::http::ServiceState;
use crate::service::resp::Engine;
use crate::service::surfaces::{Surface, Surfaces};
use crate::service::tokens::Tokens;
use crate::service::{self, Hosts, Options};

/// A listener that is ready to start.
pub(super) struct Starting {
    pub(super) surface: Surface,
    pub(super) listener: Listener,
    pub(super) socket: Socket,
    pub(super) max_connections: u32,
    pub(super) tokens: Option<Arc<Tokens>>,
    pub(super) tls: Option<Tls>,
}

/// A listener that runs.
pub(super) struct Running {
    pub(super) surface: Surface,
    /// Its settings.
    pub(super) listener: Listener,
    pub(super) socket: Socket,
    /// Stops it, and reports back once it accepts nothing with these settings.
    stop: oneshot::Sender<(Stop, oneshot::Sender<()>)>,
    task: JoinHandle<()>,
    /// Whether clients can use the admin API on it.
    pub(super) serves_api: bool,
    /// Reads its certificates again when they change.
    certificates: Option<AbortHandle>,
}

impl Starting {
    pub(super) fn start(self, shared: &ServerState) -> Running {
        let Self { surface, listener, socket, max_connections, tokens, tls } = self;
        let bound = socket.bound;
        if let Some(tokens) = &tokens {
            shared.surfaces.watch_tokens(surface, tokens);
        }
        let (tls, certificates) = tls.map(|tls| watched(tls, bound, &shared.surfaces)).unzip();
        let options = Options { max_connections, tls, ..Options::of(&listener) };
        let options = options.with_surface(surface, &shared.surfaces);
        let (stop, stopped) = oneshot::channel();
        let stopped = async {
            // Nothing is accepted after this has been polled, so the sender is dropped at the right moment.
            stopped.await.map_or(Stop::Close, |(stop, _accepts_nothing)| stop)
        };
        let accepting = Arc::clone(&socket.listener);
        let (gate, decisions) = (shared.gate.clone(), Arc::clone(&shared.decisions));
        let throttles = Arc::clone(&shared.throttles);
        let hosts = |setting| {
            let listed = listener.hosts.iter().map(HostGlob::as_str);
            Hosts::new(setting, listed, Some(&listener.listen))
        };
        let mut serves_api = false;
        let task = match surface {
            Surface::Http | Surface::Authorize => {
                let state = ServiceState { gate, decisions, tokens };
                let access = (options, hosts("service.http.hosts"));
                tokio::spawn(service::http::run(accepting, state, access, stopped))
            }
            Surface::Grpc => {
                let state = GrpcState { gate, decisions, throttles, tokens };
                let readiness = Arc::clone(&shared.readiness);
                tokio::spawn(service::grpc::run(accepting, state, (options, readiness), stopped))
            }
            Surface::Resp => {
                let engine = Engine { gate, throttles, decisions, tokens };
                tokio::spawn(service::resp::run(accepting, engine, options, stopped))
            }
            Surface::Admin => {
                let access = match tokens {
                    Some(tokens) => Access::Tokens(tokens),
                    None if listener.requires_certificates() => Access::Certificates,
                    None if bound.ip().to_canonical().is_loopback() => Access::Local,
                    None => Access::Closed,
                };
                serves_api = !matches!(access, Access::Closed);
                let state = Admin::new(shared, access);
                tokio::spawn(admin::run(accepting, state, (options, hosts("admin.hosts")), stopped))
            }
        };
        Running { surface, listener, socket, stop, task, serves_api, certificates }
    }
}

/// A listener that stops.
pub(super) struct Stopping {
    /// Ends when the connections are drained.
    pub(super) task: JoinHandle<()>,
    /// Resolves when a listener that hands its socket over accepts nothing more.
    pub(super) accepts_nothing: oneshot::Receiver<()>,
}

/// Reads certificates again when they change, and reports them in the metrics. Returns those in use.
fn watched(tls: Tls, bound: SocketAddr, surfaces: &Surfaces) -> (watch::Receiver<TlsInUse>, AbortHandle) {
    let reloads = Arc::new(CertificateReloads::of(&tls));
    surfaces.watch_certificates(bound, &reloads);
    let (sender, in_use) = watch::channel(tls.in_use.clone());
    let watch = tokio::spawn(tls.watch_files(move |next| _ = sender.send_replace(next), reloads));
    (in_use, watch.abort_handle())
}

impl Running {
    /// Begins to stop it.
    pub(super) fn stop(self, how: Stop) -> Stopping {
        let how = match (how, self.socket.owner) {
            // The connections in its queue are for the next process.
            (Stop::Close, Owner::ServiceManager) => Stop::HandOver,
            (how, _) => how,
        };
        // The task has the only other reference to the socket, and closes it.
        drop(self.socket);
        let (sender, accepts_nothing) = oneshot::channel();
        // A listener that has failed cannot be stopped.
        _ = self.stop.send((how, sender));
        if let Some(certificates) = self.certificates {
            certificates.abort();
        }
        Stopping { task: self.task, accepts_nothing }
    }

    /// Returns the address with its scheme.
    pub(super) fn url(&self) -> String {
        let scheme = match (self.surface, self.listener.tls.is_some()) {
            (Surface::Resp, false) => "redis",
            (Surface::Resp, true) => "rediss",
            (Surface::Grpc, false) => "grpc",
            (Surface::Grpc, true) => "grpcs",
            (Surface::Http | Surface::Authorize | Surface::Admin, false) => "http",
            (Surface::Http | Surface::Authorize | Surface::Admin, true) => "https",
        };
        format!("{scheme}://{}", self.socket.bound)
    }

    /// Describes it for the line that announces the start.
    pub(super) fn description(&self) -> String {
        let url = self.url();
        match self.surface {
            Surface::Http | Surface::Authorize => format!("decisions POST {url}/v1/check"),
            Surface::Grpc | Surface::Resp => format!("decisions {url}"),
            Surface::Admin => format!("admin {url}/"),
        }
    }
}
