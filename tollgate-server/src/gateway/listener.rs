//! The listeners of the gateway. On reload, new ports are bound before removed ones are closed.

mod connection;
pub(crate) mod tls;
pub(in crate::gateway) mod workers;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio_rustls::TlsAcceptor;
use tollgate::rules::file::Parsed;
use tollgate::rules::file::internal::{Address, GatewayRule, SettingError};

use self::connection::ListenerConfig;
use self::tls::{CertificateReloads, Tls};
use self::workers::{Command, Listening, WorkerHandle};
use super::StartError;
use crate::listening::{Flag, ListenError, Setting};
use crate::passed_sockets::{ListenerName, Owner, PassedSocket, PassedSockets};
use crate::service::Stop;

/// A bound port. Dropping it closes the listener, once all waiting connections are accepted.
pub(super) struct Port {
    /// The configured address.
    pub(super) configured: String,
    pub(super) bound: SocketAddr,
    /// The key of its listener, for another process.
    key: &'static str,
    sockets: Vec<TcpListener>,
    owner: Owner,
    config: Arc<ArcSwap<ListenerConfig>>,
    watcher: Option<AbortHandle>,
    reloads: Arc<CertificateReloads>,
    until: watch::Sender<Stop>,
}

impl Port {
    /// Returns the scheme and the bound address.
    pub(super) fn address(&self) -> (&'static str, SocketAddr) {
        (if self.config.load().tls.is_some() { "https" } else { "http" }, self.bound)
    }

    /// Returns copies of its sockets, for another process. It gets those of the service manager elsewhere.
    pub(super) fn copies(&self) -> io::Result<Vec<PassedSocket>> {
        let own = self.sockets.iter().filter(|_| self.owner == Owner::Server);
        own.map(|socket| {
            let listener = ListenerName { key: self.key.to_owned(), address: self.configured.clone() };
            PassedSocket::new(socket.try_clone()?, Owner::Server, Some(listener))
        })
        .collect()
    }

    /// Accepts no more connections: another process does.
    pub(super) fn hand_over(&self) {
        self.until.send_replace(Stop::TakenOver);
    }

    /// Returns the certificate reloads of a TLS listener.
    pub(super) fn certificate_reloads(&self) -> Option<(SocketAddr, Arc<CertificateReloads>)> {
        self.config.load().tls.is_some().then(|| (self.bound, Arc::clone(&self.reloads)))
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        if let Some(watcher) = &self.watcher {
            watcher.abort();
        }
    }
}

/// A port to be opened.
pub(super) struct NextPort {
    configured: String,
    key: &'static str,
    config: ListenerConfig,
    tls: Option<Tls>,
    /// The bound sockets; `None` if the port is open already.
    listening: Option<Listening>,
}

/// Binds the configured addresses that are not bound yet.
pub(super) async fn prepare(
    file: &Parsed,
    listen: Option<&Address>,
    bound_already: &[String],
    (workers, passed): (usize, &PassedSockets),
) -> Result<Vec<NextPort>, StartError> {
    let rule = file.gateway.clone().unwrap_or_default();
    let mut ports = Vec::new();
    for ListenAddress { address: configured, setting, key, is_tls } in listen_addresses(&rule, listen) {
        let tls = rule.tls.as_ref().filter(|_| is_tls).map(|tls| Tls::new(tls, file.folder(), "gateway.tls"));
        let of_tls = |errors: Vec<SettingError>| errors.into_iter().map(|error| error.of("tls").of("gateway"));
        let tls = tls.transpose().map_err(|errors| StartError::Refused(file.problems(of_tls(errors))))?;
        let acceptor = tls.as_ref().map(|tls| tls.acceptor.clone());
        let config = ListenerConfig { proxy_protocol: rule.proxy_protocol, tls: acceptor };
        let listening = if bound_already.contains(&configured) {
            None
        } else {
            let bound = match passed.find(key, &configured).await {
                Ok(Some(sockets)) => Listening::assign(sockets, workers),
                Ok(None) => Listening::bind(&configured, workers).await,
                Err(error) => Err(error),
            };
            let cannot_listen = |source| ListenError { setting, address: configured.clone(), source };
            Some(bound.map_err(|source| StartError::Listen(cannot_listen(source)))?)
        };
        ports.push(NextPort { configured, key, config, tls, listening });
    }
    Ok(ports)
}

/// The keys of the addresses.
const KEY: &str = "gateway.listen";
const TLS_KEY: &str = "gateway.tls.listen";

/// A configured address.
pub(super) struct ListenAddress {
    pub(super) address: String,
    setting: Setting,
    key: &'static str,
    is_tls: bool,
}

/// Returns the configured addresses.
pub(super) fn listen_addresses(rule: &GatewayRule, listen: Option<&Address>) -> Vec<ListenAddress> {
    let listen_address = |address: &Address, setting, is_tls| {
        let key = if is_tls && rule.tls.as_ref().is_some_and(|tls| tls.listen.is_some()) { TLS_KEY } else { KEY };
        ListenAddress { address: address.as_str().to_owned(), setting, key, is_tls }
    };
    let setting = Setting::key_or_flag(KEY, Flag::LISTEN, listen);
    let address = listen.unwrap_or(&rule.listen);
    match rule.tls.as_ref().map(|tls| &tls.listen) {
        None => vec![listen_address(address, setting, false)],
        Some(None) => vec![listen_address(address, setting, true)],
        Some(Some(tls_listen)) => {
            vec![listen_address(address, setting, false), listen_address(tls_listen, Setting::Key(TLS_KEY, None), true)]
        }
    }
}

/// Opens the next ports, and closes those that are not among them.
pub(super) fn open(next: Vec<NextPort>, mut before: Vec<Port>, workers: &[WorkerHandle]) -> Vec<Port> {
    let mut ports = Vec::new();
    for NextPort { configured, key, config, tls, listening } in next {
        let kept = before.iter().position(|port| port.configured == configured).map(|found| before.swap_remove(found));
        let watch_files = |config: &Arc<ArcSwap<ListenerConfig>>, reloads: &Arc<CertificateReloads>| {
            reloads.note_good(&tls.as_ref().map(|tls| Arc::clone(&tls.validities)).unwrap_or_default());
            let (config, reloads) = (Arc::clone(config), Arc::clone(reloads));
            let apply = move |tls: TlsAcceptor| {
                config.rcu(|before| ListenerConfig { proxy_protocol: before.proxy_protocol, tls: Some(tls.clone()) });
            };
            tls.map(|tls| tokio::spawn(tls.watch_files(apply, reloads)).abort_handle())
        };
        match (listening, kept) {
            (Some(listening), _) => {
                let Listening { sockets, accepting, bound, owner } = listening;
                let (until, ends) = watch::channel(match owner {
                    Owner::Server => Stop::Close,
                    // The connections in its queue are for the next process.
                    Owner::ServiceManager => Stop::HandOver,
                });
                let config = Arc::new(ArcSwap::from_pointee(config));
                for (worker, socket) in accepting {
                    let command = Command::Listen { socket, config: Arc::clone(&config), until: ends.clone() };
                    // A worker accepts commands for as long as it runs.
                    _ = workers[worker].commands.send(command);
                }
                let reloads = Arc::default();
                let watcher = watch_files(&config, &reloads);
                ports.push(Port { configured, bound, key, sockets, owner, config, watcher, reloads, until });
            }
            (None, Some(mut port)) => {
                // Otherwise the old task could apply the old files again.
                if let Some(old) = port.watcher.take() {
                    old.abort();
                }
                port.config.store(Arc::new(config));
                port.watcher = watch_files(&port.config, &port.reloads);
                ports.push(port);
            }
            // The port was open when it was prepared, and only this function closes ports.
            (None, None) => {}
        }
    }
    ports
}
