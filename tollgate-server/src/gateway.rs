//! The gateway: a reverse proxy that asks the gate before it forwards.
//!
//! A request stays on one thread from its first byte to its last: every worker has its own runtime, its own listener on
//! the shared port, and its own connections to upstreams. hyper speaks HTTP; what it reads has passed the [`guard`].
//! Everything that waits for a client or an upstream has a deadline in [`ticks`].
//!
//! Deliberately not here: deciding. That is [`tollgate::Gate`]'s.

mod answer;
mod body;
mod client;
mod connect;
mod connection;
mod descriptors;
mod echo;
mod exchange;
mod guard;
mod headers;
mod health;
mod io;
mod request_id;
mod site;
mod tally;
mod target;
mod ticks;
mod tls;
mod upgrade;
mod upstream_tls;
mod watch;
mod wire;
mod workers;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use tokio::sync::watch as signal;
use tollgate::Gate;
use tollgate::rules::file::{GatewayRule, Parsed};

use self::connection::Begins;
use self::exchange::Worker;
use self::request_id::RequestIds;
pub(crate) use self::site::SiteError;
use self::site::Site;
use self::tally::Tally;
use self::ticks::Ticks;
use self::tls::Tls;
use self::workers::{Ends, Listening, Order, Running};

/// A gateway that runs.
pub(crate) struct Gateway {
    site: Arc<ArcSwap<Site>>,
    workers: usize,
    tallies: Vec<Arc<Tally>>,
    addresses: Vec<(&'static str, SocketAddr)>,
    /// What ends it, while it runs.
    ends: Mutex<Option<Endings>>,
    closing: Arc<AtomicBool>,
}

/// Dropped, these end a gateway.
struct Endings {
    listening: signal::Sender<()>,
    serving: signal::Sender<()>,
    workers: Vec<Running>,
}

/// What a gateway is to serve next.
pub(crate) struct NextSite(Site);

/// Why a gateway does not start.
#[derive(Debug)]
pub(crate) enum StartError {
    Site(SiteError),
    Listen { address: String, source: std::io::Error },
    Runtime(std::io::Error),
}

impl Gateway {
    /// Binds and starts. `listen` is used in place of the file's address.
    pub(crate) async fn start(
        file: &Parsed,
        gate: &Gate,
        listen: Option<SocketAddr>,
    ) -> Result<Self, StartError> {
        let rule = file.gateway.clone().unwrap_or_default();
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let workers = rule.workers.map_or(processors, usize::from);
        let site = Site::new(file, None, workers).map_err(StartError::Site)?;
        let site = Arc::new(ArcSwap::from_pointee(site));
        let tls = rule.tls.as_ref().map(|tls| Tls::new(tls, file.folder())).transpose().map_err(StartError::Site)?;
        let mut bound = Vec::new();
        for (address, begins) in places(&rule, listen, tls.as_ref()) {
            let cannot_listen = |source| StartError::Listen { address: address.clone(), source };
            bound.push(Listening::bind(&address, begins, workers).await.map_err(cannot_listen)?);
        }
        let (listening, until) = signal::channel(());
        let (serving, stop) = signal::channel(());
        let ticks = Arc::new(Ticks::default());
        let (queued, closing) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let most = rule.max_connections.map_or_else(descriptors::connections, i64::from);
        let ends =
            Ends { stop, drain: rule.timeouts.drain.duration(), max_connections: (most / workers as i64).max(1) };
        let (mut running, mut tallies) = (Vec::new(), Vec::new());
        for number in 0..workers {
            let tally = Arc::new(Tally::default());
            let worker = Worker {
                number,
                gate: gate.clone(),
                site: Arc::clone(&site),
                ticks: Arc::clone(&ticks),
                tally: Arc::clone(&tally),
                ids: RequestIds::new(),
                queued: Arc::clone(&queued),
                closing: Arc::clone(&closing),
            };
            running.push(Running::start(worker, ends.clone()).map_err(StartError::Runtime)?);
            tallies.push(tally);
        }
        let addresses = bound.iter().map(Listening::address).collect();
        for Listening { sockets, begins, .. } in bound {
            for (worker, socket) in running.iter().zip(sockets) {
                // A worker takes orders for as long as it runs.
                _ = worker.orders.send(Order::Listen { socket, begins: begins.clone(), until: until.clone() });
            }
        }
        if let Some(tls) = tls {
            tokio::spawn(tls.follow());
        }
        tokio::spawn(health::run(Arc::clone(&site)));
        let counting = Arc::clone(&ticks);
        tokio::spawn(async move { counting.run().await });
        let ends = Mutex::new(Some(Endings { listening, serving, workers: running }));
        Ok(Self { site, workers, tallies, addresses, ends, closing })
    }

    /// Where it listens, and what is spoken there.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = (&'static str, SocketAddr)> + '_ {
        self.addresses.iter().copied()
    }

    /// Whether clients are asked to go elsewhere.
    pub(crate) fn is_stopping(&self) -> bool {
        self.closing.load(Relaxed)
    }

    /// What another file says, ready to be served.
    pub(crate) fn prepare(&self, file: &Parsed) -> Result<NextSite, SiteError> {
        let before = self.site.load_full();
        Site::new(file, Some(&before), self.workers).map(NextSite)
    }

    /// Serves that, from the next request on. Connections stay as they are.
    pub(crate) fn change(&self, next: NextSite) {
        self.site.store(Arc::new(next.0));
    }

    /// Takes no more connections, finishes what is under way, and ends.
    pub(crate) async fn stop(&self) {
        let ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Endings { listening, serving, workers }) = ends else { return };
        self.closing.store(true, Relaxed);
        drop(listening);
        drop(serving);
        _ = tokio::task::spawn_blocking(move || workers.into_iter().for_each(Running::join)).await;
    }
}

/// Where connections are taken, and how they begin.
fn places(rule: &GatewayRule, listen: Option<SocketAddr>, tls: Option<&Tls>) -> Vec<(String, Begins)> {
    let address = listen.map_or_else(|| rule.listen.as_str().to_owned(), |listen| listen.to_string());
    let begins = |tls: Option<&Tls>| Begins {
        proxy_protocol: rule.proxy_protocol,
        tls: tls.map(|tls| tls.acceptor.clone()),
    };
    match rule.tls.as_ref().and_then(|tls| tls.listen.as_ref()) {
        Some(beside) => vec![(address, begins(None)), (beside.as_str().to_owned(), begins(tls))],
        None => vec![(address, begins(tls))],
    }
}
