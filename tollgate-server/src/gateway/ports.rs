//! Where connections are taken. A port that a new file names is bound before one that it no longer names is closed.

use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tollgate::rules::file::Parsed;
use tollgate::rules::file::internal::{Address, GatewayRule, SettingError};

use super::StartError;
use super::connection::Begins;
use super::tls::{CertificateReloads, Tls};
use super::workers::{Listening, Order, Running};
use crate::listening::{Flag, ListenError, Setting};

/// A port that is listened on. Dropped, it is closed once nobody waits there.
pub(super) struct Port {
    /// Its address as it was written.
    pub(super) written: String,
    bound: SocketAddr,
    begins: Arc<ArcSwap<Begins>>,
    following: Option<AbortHandle>,
    reloads: Arc<CertificateReloads>,
    _until: watch::Sender<()>,
}

impl Port {
    /// What is spoken there, and where that is.
    pub(super) fn address(&self) -> (&'static str, SocketAddr) {
        (if self.begins.load().tls.is_some() { "https" } else { "http" }, self.bound)
    }

    /// Where TLS is spoken: what became of its certificates.
    pub(super) fn certificate_reloads(&self) -> Option<(SocketAddr, &CertificateReloads)> {
        self.begins.load().tls.is_some().then_some((self.bound, &*self.reloads))
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        if let Some(following) = &self.following {
            following.abort();
        }
    }
}

/// A port that is to be listened on.
pub(super) struct NextPort {
    written: String,
    begins: Begins,
    tls: Option<Tls>,
    /// Unless it is listened on already.
    listening: Option<Listening>,
}

/// Binds what a file names and is not there yet.
pub(super) async fn prepare(
    file: &Parsed,
    listen: Option<&Address>,
    there: &[String],
    workers: usize,
) -> Result<Vec<NextPort>, StartError> {
    let rule = file.gateway.clone().unwrap_or_default();
    let mut ports = Vec::new();
    for Place { address: written, setting, is_tls } in places(&rule, listen) {
        let tls = rule.tls.as_ref().filter(|_| is_tls).map(|tls| Tls::new(tls, file.folder()));
        let of_tls = |errors: Vec<SettingError>| errors.into_iter().map(|error| error.of("tls").of("gateway"));
        let tls = tls.transpose().map_err(|errors| StartError::Refused(file.problems(of_tls(errors))))?;
        let acceptor = tls.as_ref().map(|tls| tls.acceptor.clone());
        let begins = Begins { proxy_protocol: rule.proxy_protocol, tls: acceptor };
        let listening = if there.contains(&written) {
            None
        } else {
            let bound = Listening::bind(&written, workers).await;
            let cannot_listen = |source| ListenError { setting, address: written.clone(), source };
            Some(bound.map_err(|source| StartError::Listen(cannot_listen(source)))?)
        };
        ports.push(NextPort { written, begins, tls, listening });
    }
    Ok(ports)
}

/// Where connections are to be taken.
pub(super) struct Place {
    pub(super) address: String,
    setting: Setting,
    is_tls: bool,
}

/// The places that connections are taken at.
pub(super) fn places(rule: &GatewayRule, listen: Option<&Address>) -> Vec<Place> {
    let place = |address: &Address, setting, is_tls| Place { address: address.as_str().to_owned(), setting, is_tls };
    let setting = Setting::key_or_flag("gateway.listen", Flag::LISTEN, listen);
    let address = listen.unwrap_or(&rule.listen);
    match rule.tls.as_ref().map(|tls| &tls.listen) {
        None => vec![place(address, setting, false)],
        Some(None) => vec![place(address, setting, true)],
        Some(Some(beside)) => {
            vec![place(address, setting, false), place(beside, Setting::Key("gateway.tls.listen", None), true)]
        }
    }
}

/// Takes connections at these ports, and no longer at those of before that are not among them.
pub(super) fn open(next: Vec<NextPort>, mut before: Vec<Port>, workers: &[Running]) -> Vec<Port> {
    let mut ports = Vec::new();
    for NextPort { written, begins, tls, listening } in next {
        let kept = before.iter().position(|port| port.written == written).map(|found| before.swap_remove(found));
        let follow = |begins: &Arc<ArcSwap<Begins>>, reloads: &Arc<CertificateReloads>| {
            reloads.note_good(&tls.as_ref().map(|tls| Arc::clone(&tls.validities)).unwrap_or_default());
            tls.map(|tls| tokio::spawn(tls.follow(Arc::clone(begins), Arc::clone(reloads))).abort_handle())
        };
        match (listening, kept) {
            (Some(listening), _) => {
                let (until, ends) = watch::channel(());
                let begins = Arc::new(ArcSwap::from_pointee(begins));
                for (worker, socket) in workers.iter().zip(listening.sockets) {
                    let order = Order::Listen { socket, begins: Arc::clone(&begins), until: ends.clone() };
                    // A worker takes orders for as long as it runs.
                    _ = worker.orders.send(order);
                }
                let reloads = Arc::default();
                let following = follow(&begins, &reloads);
                ports.push(Port { written, bound: listening.bound, begins, following, reloads, _until: until });
            }
            (None, Some(mut port)) => {
                // Whoever follows the files of before must not put them in force again.
                if let Some(old) = port.following.take() {
                    old.abort();
                }
                port.begins.store(Arc::new(begins));
                port.following = follow(&port.begins, &port.reloads);
                ports.push(port);
            }
            // It was there when it was asked, and only this takes ports away.
            (None, None) => {}
        }
    }
    ports
}
