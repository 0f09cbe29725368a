//! The listeners of the gateway. On reload, new ports are bound before removed ones are closed.

use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio_rustls::TlsAcceptor;
use tollgate::rules::file::Parsed;
use tollgate::rules::file::internal::{Address, GatewayRule, SettingError};

use super::StartError;
use super::connection::ListenerConfig;
use super::tls::{CertificateReloads, Tls};
use super::workers::{Command, Listening, WorkerHandle};
use crate::listening::{Flag, ListenError, Setting};

/// A bound port. Dropping it closes the listener, once all waiting connections are accepted.
pub(super) struct Port {
    /// The configured address.
    pub(super) configured: String,
    bound: SocketAddr,
    config: Arc<ArcSwap<ListenerConfig>>,
    watcher: Option<AbortHandle>,
    reloads: Arc<CertificateReloads>,
    _until: watch::Sender<()>,
}

impl Port {
    /// Returns the scheme and the bound address.
    pub(super) fn address(&self) -> (&'static str, SocketAddr) {
        (if self.config.load().tls.is_some() { "https" } else { "http" }, self.bound)
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
    workers: usize,
) -> Result<Vec<NextPort>, StartError> {
    let rule = file.gateway.clone().unwrap_or_default();
    let mut ports = Vec::new();
    for ListenAddress { address: configured, setting, is_tls } in listen_addresses(&rule, listen) {
        let tls = rule.tls.as_ref().filter(|_| is_tls).map(|tls| Tls::new(tls, file.folder(), "gateway.tls"));
        let of_tls = |errors: Vec<SettingError>| errors.into_iter().map(|error| error.of("tls").of("gateway"));
        let tls = tls.transpose().map_err(|errors| StartError::Refused(file.problems(of_tls(errors))))?;
        let acceptor = tls.as_ref().map(|tls| tls.acceptor.clone());
        let config = ListenerConfig { proxy_protocol: rule.proxy_protocol, tls: acceptor };
        let listening = if bound_already.contains(&configured) {
            None
        } else {
            let bound = Listening::bind(&configured, workers).await;
            let cannot_listen = |source| ListenError { setting, address: configured.clone(), source };
            Some(bound.map_err(|source| StartError::Listen(cannot_listen(source)))?)
        };
        ports.push(NextPort { configured, config, tls, listening });
    }
    Ok(ports)
}

/// A configured address.
pub(super) struct ListenAddress {
    pub(super) address: String,
    setting: Setting,
    is_tls: bool,
}

/// Returns the configured addresses.
pub(super) fn listen_addresses(rule: &GatewayRule, listen: Option<&Address>) -> Vec<ListenAddress> {
    let listen_address =
        |address: &Address, setting, is_tls| ListenAddress { address: address.as_str().to_owned(), setting, is_tls };
    let setting = Setting::key_or_flag("gateway.listen", Flag::LISTEN, listen);
    let address = listen.unwrap_or(&rule.listen);
    match rule.tls.as_ref().map(|tls| &tls.listen) {
        None => vec![listen_address(address, setting, false)],
        Some(None) => vec![listen_address(address, setting, true)],
        Some(Some(tls_listen)) => {
            vec![
                listen_address(address, setting, false),
                listen_address(tls_listen, Setting::Key("gateway.tls.listen", None), true),
            ]
        }
    }
}

/// Opens the next ports, and closes those that are not among them.
pub(super) fn open(next: Vec<NextPort>, mut before: Vec<Port>, workers: &[WorkerHandle]) -> Vec<Port> {
    let mut ports = Vec::new();
    for NextPort { configured, config, tls, listening } in next {
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
                let (until, ends) = watch::channel(());
                let config = Arc::new(ArcSwap::from_pointee(config));
                for (worker, socket) in workers.iter().zip(listening.sockets) {
                    let command = Command::Listen { socket, config: Arc::clone(&config), until: ends.clone() };
                    // A worker accepts commands for as long as it runs.
                    _ = worker.commands.send(command);
                }
                let reloads = Arc::default();
                let watcher = watch_files(&config, &reloads);
                ports.push(Port { configured, bound: listening.bound, config, watcher, reloads, _until: until });
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
