//! The gateway: a reverse proxy that checks every request against the limits before it forwards it.
//!
//! A request stays on one thread from its first byte to its last. Every worker has its own runtime, its own listener on
//! the shared port, and its own connections to upstreams. The [`http1::server`] serves HTTP/1, and [`http2`] HTTP/2.
//! Both read requests into the same [`head`]. Every wait for a client or an upstream has a deadline; those that move
//! while a request is in flight are in [`deadline`].
//!
//! Deliberately not here: rate-limit decisions. [`tollgate_rules::Gate`] makes them.

mod access_log;
mod buffer_budget;
mod client;
mod deadline;
mod failure;
mod head;
mod http2;
mod listener;
mod local_response;
mod metrics;
mod per_address;
mod proxy;
mod site;
mod splice;
mod tally;
mod upload;
mod upstream;
mod worker;

/// HTTP/1: heads and bodies of messages, the server, and the client for upstreams.
mod http1 {
    pub(super) mod codec;
    #[doc(hidden)]
    pub(crate) mod fuzzing;
    pub(super) mod sender;
    pub(super) mod server;
    mod upgrade;
}

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use http::HeaderMap;
use tokio::sync::watch as signal;
use tollgate_config::internal::{Address, GatewayRule};
use tollgate_config::{Parsed, Problems};
use tollgate_net::deadline::Ticks;
use tollgate_net::descriptors::Plan;
use tollgate_net::listening::Stop;
use tollgate_net::listening::{Ending, ListenError};
use tollgate_net::passed_sockets::{PassedSocket, PassedSockets};
use tollgate_rules::Gate;
use tollgate_telemetry::notice;

use self::buffer_budget::BufferBudget;
pub(crate) use self::failure::Misuse;
use self::head::headers::HeaderFilter;
use self::head::upstream_head::RequestIds;
pub(crate) use self::http1::fuzzing as http1_fuzzing;
pub(crate) use self::http2::frames;
use self::listener::{NextPort, Port};
use self::per_address::PerAddress;
use self::site::Site;
pub(crate) use self::site::upstream_urls;
pub(crate) use self::tally::Closings;
use self::tally::Tally;
use self::upstream::slots::UpstreamSlots;
use self::worker::Worker;
use self::worker::thread::{WorkerHandle, WorkerSettings};

/// Removes the headers that the gateway would drop from a request of `peer`. Removes all headers if the gateway would
/// refuse the request because of one of them.
pub(crate) fn drop_headers(file: &Parsed, headers: &mut HeaderMap, peer: Option<IpAddr>) -> Result<(), Problems> {
    let (Some(gateway), proxies) = (&file.gateway, file.trusted_proxies()?) else { return Ok(()) };
    let filter = HeaderFilter::new(gateway.underscore_headers, &proxies, peer);
    *headers = head::kept_headers(headers, &filter).unwrap_or_default();
    Ok(())
}

/// A running gateway.
pub(crate) struct Gateway {
    site: Arc<ArcSwap<Site>>,
    workers: usize,
    tallies: Vec<Arc<Tally>>,
    /// The address from the command line. It overrides the one in the rule file.
    listen: Option<Address>,
    ticks: Arc<Ticks>,
    queued: Arc<AtomicU32>,
    upstream_slots: Arc<UpstreamSlots>,
    /// Access log lines that were lost.
    lost: Arc<AtomicU64>,
    /// Handles that keep the gateway running; `None` once it has stopped.
    handles: Mutex<Option<Handles>>,
    closing: Arc<AtomicBool>,
    /// Sockets that listeners use in place of their own.
    passed: Arc<PassedSockets>,
}

/// Handles of the parts of a running gateway. Dropping them stops it.
struct Handles {
    ports: Vec<Port>,
    serving: signal::Sender<Stop>,
    workers: Vec<WorkerHandle>,
}

/// The reason why a gateway could not start.
#[derive(Debug)]
pub(crate) enum StartError {
    /// The gateway settings in the rule file, or the files that they name, cannot be used.
    Refused(Problems),
    Listen(ListenError),
    Runtime(std::io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(problems) => problems.fmt(out),
            Self::Listen(problem) => problem.fmt(out),
            Self::Runtime(source) => source.fmt(out),
        }
    }
}

/// A checked configuration with bound listeners, ready to replace the current one.
pub(crate) struct NextConfig {
    site: Site,
    ports: Vec<NextPort>,
}

impl Gateway {
    /// Returns the number of worker threads for these settings.
    pub(crate) fn workers(rule: &GatewayRule) -> usize {
        let processors = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        rule.workers.map_or_else(processors, usize::from)
    }

    /// Binds the listeners, or uses sockets that were passed, and starts the workers. `listen` overrides the address in
    /// the rule file.
    pub(crate) async fn start(
        file: &Parsed,
        gate: &Gate,
        listen: Option<Address>,
        plan: Plan,
        passed: Arc<PassedSockets>,
    ) -> Result<Self, StartError> {
        let max_connections = plan.gateway;
        let rule = file.gateway.clone().unwrap_or_default();
        let workers = Self::workers(&rule);
        let lost = Arc::new(AtomicU64::new(0));
        let site = Site::new(file, None, workers, &lost).map_err(StartError::Refused)?;
        let site = Arc::new(ArcSwap::from_pointee(site));
        let ports = listener::prepare(file, listen.as_ref(), &[], (workers, &passed)).await?;
        let (serving, stop) = signal::channel(Stop::Close);
        let ticks = Arc::new(Ticks::default());
        let (queued, closing) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let settings = WorkerSettings {
            stop,
            drain: rule.timeouts.drain.duration(),
            max_connections,
            workers: i64::try_from(workers).unwrap_or(i64::MAX),
        };
        let per_address = Arc::new(PerAddress::new(max_connections));
        let (mut running, mut tallies) = (Vec::new(), Vec::new());
        let connections = Arc::new(AtomicI64::new(0));
        let closings = Arc::new(Closings::default());
        let max_buffered = rule.max_buffered.map(|size| size.bytes());
        let buffer_budget = Arc::new(BufferBudget::new(max_buffered, &connections));
        let upstream_slots = Arc::new(UpstreamSlots::new(plan.upstreams, &connections));
        for number in 0..workers {
            let tally = Arc::new(Tally::new(&connections, &buffer_budget, &closings));
            let worker = Worker {
                number,
                gate: gate.clone(),
                site: Arc::clone(&site),
                ticks: Arc::clone(&ticks),
                tally: Arc::clone(&tally),
                ids: RequestIds::new(),
                queued: Arc::clone(&queued),
                closing: Arc::clone(&closing),
                per_address: Arc::clone(&per_address),
                upstream_slots: Arc::clone(&upstream_slots),
            };
            running.push(WorkerHandle::start(worker, settings.clone()).map_err(StartError::Runtime)?);
            tallies.push(tally);
        }
        let ports = listener::open(ports, Vec::new(), |worker, socket| running[worker].listen(socket));
        tokio::spawn(upstream::health::run(Arc::clone(&site), Arc::clone(&ticks), Arc::clone(&upstream_slots)));
        let counting = Arc::clone(&ticks);
        tokio::spawn(async move { counting.run().await });
        let handles = Mutex::new(Some(Handles { ports, serving, workers: running }));
        Ok(Self { site, workers, tallies, listen, ticks, queued, upstream_slots, lost, handles, closing, passed })
    }

    /// Returns the problems that prevent the gateway from serving this rule file: unusable files that it names, and
    /// upstreams that are the gateway itself. `listen` overrides the address in the rule file.
    pub(crate) fn problems(file: &Parsed, listen: Option<&Address>) -> Option<Problems> {
        let rule = file.gateway.as_ref()?;
        let listens: Vec<String> =
            listener::listen_addresses(rule, listen).into_iter().map(|listening| listening.address).collect();
        let errors = Site::errors(file, &listens);
        (!errors.is_empty()).then(|| file.problems(errors))
    }

    /// Returns the address from the command line, which overrides the one in the rule file.
    pub(crate) fn listen(&self) -> Option<&Address> {
        self.listen.as_ref()
    }

    fn handles(&self) -> MutexGuard<'_, Option<Handles>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the bound addresses and their schemes.
    pub(crate) fn addresses(&self) -> Vec<(&'static str, SocketAddr)> {
        self.handles().iter().flat_map(|handles| &handles.ports).map(Port::address).collect()
    }

    /// Prepares another rule file for [`change`](Self::change): checks it and binds new listeners.
    pub(crate) async fn prepare(&self, file: &Parsed) -> Result<NextConfig, StartError> {
        let before = self.site.load_full();
        let site = Site::new(file, Some(&before), self.workers, &self.lost).map_err(StartError::Refused)?;
        let there: Vec<String> =
            self.handles().iter().flat_map(|handles| &handles.ports).map(|port| port.configured.clone()).collect();
        let ports = listener::prepare(file, self.listen.as_ref(), &there, (self.workers, &self.passed)).await?;
        Ok(NextConfig { site, ports })
    }

    /// Applies a new configuration from the next request on. Open connections stay open, whichever listener accepted
    /// them.
    pub(crate) fn change(&self, next: NextConfig) {
        let site = Arc::new(next.site);
        self.site.swap(Arc::clone(&site)).retire(&site);
        if let Some(Handles { ports, workers, .. }) = &mut *self.handles() {
            let listen = |worker: usize, socket| workers[worker].listen(socket);
            *ports = listener::open(next.ports, std::mem::take(ports), listen);
        }
    }

    /// Returns copies of the listening sockets, for another process. It gets those of the service manager elsewhere.
    pub(crate) fn sockets(&self) -> std::io::Result<Vec<PassedSocket>> {
        let handles = self.handles();
        let ports = handles.iter().flat_map(|handles| &handles.ports);
        let copies: Vec<Vec<PassedSocket>> = ports.map(Port::copies).collect::<std::io::Result<_>>()?;
        Ok(copies.into_iter().flatten().collect())
    }

    /// Accepts no more connections on the sockets that another process has taken over.
    pub(crate) fn hand_over(&self, ending: &Ending) {
        self.closing.store(true, Relaxed);
        if let Some(handles) = &mut *self.handles() {
            for port in handles.ports.extract_if(.., |port| ending.of(port.bound) == Stop::TakenOver) {
                port.hand_over();
            }
        }
    }

    /// Stops accepting connections, finishes requests in flight, and stops the workers.
    pub(crate) async fn stop(&self, ending: &Ending) {
        let handles = self.handles().take();
        let Some(Handles { ports, serving, workers }) = handles else { return };
        self.closing.store(true, Relaxed);
        if !ports.is_empty() {
            // Connections that wait in the listen queue are accepted and asked to close. Closing the listener would
            // reset them.
            tokio::time::sleep(listener::GRACE).await;
        }
        drop(ports);
        if *ending != Ending::Stop {
            serving.send_replace(Stop::TakenOver);
        }
        drop(serving);
        let site = self.site.load_full();
        let ended = tokio::task::spawn_blocking(move || {
            let cut_off: i64 = workers.into_iter().map(WorkerHandle::join).sum();
            if let Some(log) = &site.log {
                log.finish();
            }
            cut_off
        });
        match ended.await {
            Ok(0) | Err(_) => {}
            Ok(cut_off) => warn_of_cut_off(cut_off),
        }
    }
}

fn warn_of_cut_off(cut_off: i64) {
    let connections = if cut_off == 1 { "connection" } else { "connections" };
    notice::warn(format_args!(
        "{cut_off} {connections} with requests in flight cut off at the end of gateway.timeouts.drain: raise it if requests need more time"
    ));
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_telemetry::notice::captured::lines_of;

    #[test]
    fn requests_that_are_cut_off_are_logged_with_the_fix() {
        insta::assert_snapshot!(lines_of(|| [1, 17].into_iter().for_each(warn_of_cut_off)));
    }
}
