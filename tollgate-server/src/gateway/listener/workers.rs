//! The threads that serve connections. Each has its own runtime, listeners and upstream connections, so that a request
//! stays on one processor from its first byte to its last.

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::connection::{self, ListenerConfig, OpenConnection};
use crate::gateway::site::Route;
use crate::gateway::stream::Stream;
use crate::gateway::worker::{Shutdown, Worker, scratch};
use crate::passed_sockets::{ListenerSockets, Owner};
use crate::service;

/// The pause after a failed accept. A process out of descriptors gets one back soon; retrying at once would only burn
/// CPU.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The length of the listen queue. The kernel has its own bound.
const BACKLOG: u32 = 4096;

/// The response when there is no room for another connection.
const NO_ROOM: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
    connection: close\r\ncontent-length: 83\r\n\r\n\
    {\"error\":\"too_many_connections\",\"message\":\"Too many connections: try again later.\"}";

/// The maximum number of clients that a listener of a worker sends this response at a time; each takes a descriptor.
/// Other connections are just closed.
const MAX_REJECTING: i64 = 128;

/// All of them together take this part of `max_connections`. Descriptors are set aside for them.
const REJECTING_SHARE: i64 = 8;

/// A gateway has at most two ports: with and without TLS.
const MAX_PORTS: i64 = 2;

/// How long listeners stay open after a stop. Clients may send one more request, and are asked to close the connection.
pub(in crate::gateway) const GRACE: Duration = Duration::from_millis(400);

/// The same for the last connections.
const LAST_GRACE: Duration = Duration::from_millis(100);

/// The same for idle connections of HTTP/1 when another process has taken over. They hold up nothing, and a client that
/// sends its next request in this time is asked to reconnect with the response.
const TAKEN_OVER_GRACE: Duration = Duration::from_secs(5);

/// How long idle connections take to close.
const LAST_LOOK: Duration = Duration::from_millis(50);

/// The interval in which connections closed by upstreams are dropped, to free their descriptors.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// A bound address, with its sockets: one for each worker, or those that another process has passed.
pub(in crate::gateway) struct Listening {
    pub(in crate::gateway) sockets: Vec<StdListener>,
    /// A copy of a socket for each worker, with the number of the worker. Every worker has one, and every socket is
    /// there.
    pub(in crate::gateway) accepting: Vec<(usize, StdListener)>,
    pub(in crate::gateway) bound: SocketAddr,
    pub(super) owner: Owner,
}

impl Listening {
    /// Binds an address, once for each worker.
    pub(in crate::gateway) async fn bind(address: &str, workers: usize) -> io::Result<Self> {
        let mut last = io::Error::new(io::ErrorKind::AddrNotAvailable, "the name has no address");
        for address in tokio::net::lookup_host(address).await? {
            match bind_all(address, workers) {
                Ok((sockets, bound)) => {
                    return Self::assign(ListenerSockets { sockets, bound, owner: Owner::Server }, workers);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Divides sockets between the workers. The process before may have had another number of them, and a service manager
    /// passes one socket, which all workers share.
    pub(super) fn assign(passed: ListenerSockets, workers: usize) -> io::Result<Self> {
        let ListenerSockets { sockets, bound, owner } = passed;
        let pairs = (0..workers.max(sockets.len())).map(|number| (number % workers, &sockets[number % sockets.len()]));
        let copies = pairs.map(|(worker, socket)| Ok((worker, socket.try_clone()?)));
        let accepting = copies.collect::<io::Result<_>>()?;
        Ok(Self { sockets, accepting, bound, owner })
    }
}

fn bind_all(address: SocketAddr, workers: usize) -> io::Result<(Vec<StdListener>, SocketAddr)> {
    // The sockets of the workers share a port, and would share it with another gateway, too. This bind fails if another
    // process uses the port.
    let alone = StdListener::bind(address)?;
    let bound = alone.local_addr()?;
    drop(alone);
    let sockets = (0..workers).map(|_| bind_one(bound)).collect::<io::Result<_>>()?;
    Ok((sockets, bound))
}

fn bind_one(address: SocketAddr) -> io::Result<StdListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    #[cfg(all(unix, not(target_os = "solaris"), not(target_os = "illumos")))]
    socket.set_reuseport(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)?.into_std()
}

/// A command to a worker.
pub(in crate::gateway) enum Command {
    /// Accept connections on this socket until `until` changes. Its last value decides about connections that wait.
    Listen { socket: StdListener, config: Arc<ArcSwap<ListenerConfig>>, until: watch::Receiver<service::Stop> },
}

/// A running worker.
pub(in crate::gateway) struct WorkerHandle {
    pub(super) commands: mpsc::UnboundedSender<Command>,
    /// Returns the number of connections that were cut off.
    thread: JoinHandle<i64>,
}

/// The settings of a worker.
#[derive(Clone)]
pub(in crate::gateway) struct WorkerSettings {
    /// Changes when the worker has to stop. Its last value decides about idle connections.
    pub(in crate::gateway) stop: watch::Receiver<service::Stop>,
    /// How long requests in flight may take then.
    pub(in crate::gateway) drain: Duration,
    /// For all workers together.
    pub(in crate::gateway) max_connections: i64,
    pub(in crate::gateway) workers: i64,
}

impl WorkerSettings {
    /// Returns how many clients a listener of a worker may send a rejection at a time.
    fn rejecting(&self) -> usize {
        let share = self.max_connections / (REJECTING_SHARE * MAX_PORTS * self.workers.max(1));
        usize::try_from(share.clamp(1, MAX_REJECTING)).unwrap_or(1)
    }
}

impl WorkerHandle {
    pub(in crate::gateway) fn start(worker: Worker, settings: WorkerSettings) -> io::Result<Self> {
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        let (commands, inbox) = mpsc::unbounded_channel();
        let name = format!("gateway-{}", worker.number);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let cut_off = runtime.block_on(run(Arc::new(worker), inbox, settings));
            runtime.shutdown_background();
            cut_off
        })?;
        Ok(Self { commands, thread })
    }

    /// Waits for the worker to stop, which blocks the thread. Returns the number of connections that were cut off.
    pub(in crate::gateway) fn join(self) -> i64 {
        self.thread.join().unwrap_or(0)
    }
}

async fn run(worker: Arc<Worker>, mut inbox: mpsc::UnboundedReceiver<Command>, mut settings: WorkerSettings) -> i64 {
    let stop = Arc::new(Shutdown::default());
    let mut listeners = JoinSet::new();
    tokio::spawn(sweep(Arc::clone(&worker)));
    loop {
        let command = tokio::select! {
            command = inbox.recv() => command,
            _ = settings.stop.changed() => break,
        };
        match command {
            Some(Command::Listen { socket, config, until }) => {
                let accepting = Acceptor {
                    config,
                    worker: Arc::clone(&worker),
                    stop: Arc::clone(&stop),
                    max_connections: settings.max_connections,
                    rejecting: Arc::new(Semaphore::new(settings.rejecting())),
                };
                // Forget listeners that have ended.
                while listeners.try_join_next().is_some() {}
                listeners.spawn(async move { _ = accepting.run(socket, until).await });
            }
            None => break,
        }
    }
    // Connections in the listen queue are served, too.
    _ = timeout(LAST_GRACE, async { while listeners.join_next().await.is_some() {} }).await;
    let how = *settings.stop.borrow();
    drain(&worker, &stop, settings.drain, how).await
}

/// Drops unused connections to upstreams periodically.
async fn sweep(worker: Arc<Worker>) {
    loop {
        sleep(SWEEP_EVERY).await;
        scratch().renew(&worker);
        let (site, now) = (worker.site.load_full(), worker.ticks.now());
        site.routes.iter().flat_map(Route::targets).for_each(|target| target.sweep(worker.number, now));
    }
}

/// Waits for requests in flight. Returns the number of connections that are left after the timeout.
async fn drain(worker: &Worker, stop: &Shutdown, within: Duration, how: service::Stop) -> i64 {
    worker.closing.store(true, Relaxed);
    let grace = match how {
        service::Stop::TakenOver => TAKEN_OVER_GRACE,
        service::Stop::Close | service::Stop::HandOver => LAST_GRACE,
    };
    if how == service::Stop::TakenOver {
        stop.send_goaway();
    }
    let all_gone = async {
        let step = Duration::from_millis(5);
        let mut left = grace.as_millis() / step.as_millis();
        while worker.tally.connections.load(Relaxed) > 0 {
            sleep(step).await;
            left = left.saturating_sub(1);
            if left == 0 {
                stop.end_idle();
            }
        }
    };
    if timeout(within, all_gone).await.is_err() {
        // Idle connections close by themselves, even if the timeout was shorter than the grace period.
        stop.end_idle();
        sleep(LAST_LOOK).await;
    }
    worker.tally.connections.load(Relaxed)
}

/// Accepts connections from one listener.
struct Acceptor {
    config: Arc<ArcSwap<ListenerConfig>>,
    worker: Arc<Worker>,
    stop: Arc<Shutdown>,
    max_connections: i64,
    /// Bounds the rejections that are being sent.
    rejecting: Arc<Semaphore>,
}

impl Acceptor {
    async fn run(self, socket: StdListener, mut until: watch::Receiver<service::Stop>) -> io::Result<()> {
        socket.set_nonblocking(true)?;
        let listener = TcpListener::from_std(socket)?;
        loop {
            tokio::select! {
                // A waiting connection is accepted before the stop is checked: the kernel has completed its handshake.
                biased;
                accepted = listener.accept() => match accepted {
                    Ok((tcp, peer)) => self.take(tcp, peer),
                    // Only this client is gone; the next may be waiting.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                    Err(_) => sleep(ACCEPT_PAUSE).await,
                },
                _ = until.changed() => return match *until.borrow() {
                    service::Stop::Close => self.take_rest(listener),
                    // The queue belongs to the socket, which another process has.
                    service::Stop::HandOver | service::Stop::TakenOver => Ok(()),
                },
            }
        }
    }

    /// Accepts the connections in the queue of a listener that is about to close. Their handshakes are complete, and
    /// closing the listener would reset them. The runtime may not know of them yet, so the kernel is queried.
    fn take_rest(&self, listener: TcpListener) -> io::Result<()> {
        let listener = listener.into_std()?;
        // The queue does not grow in the meantime.
        _ = rustix::net::listen(&listener, 0);
        loop {
            match listener.accept() {
                Ok((tcp, peer)) => {
                    tcp.set_nonblocking(true)?;
                    self.take(TcpStream::from_std(tcp)?, peer);
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    fn take(&self, tcp: TcpStream, peer: SocketAddr) {
        let tally = Arc::clone(&self.worker.tally);
        tally.accepted.add(1);
        let Some(counted) = OpenConnection::within(self.max_connections, &tally) else {
            tally.refused_connections.add(1);
            // In a flood, only some clients get a response.
            if let Ok(permit) = Arc::clone(&self.rejecting).try_acquire_owned() {
                tokio::spawn(async move {
                    turn_away(tcp).await;
                    drop(permit);
                });
            }
            return;
        };
        let config = self.config.load_full();
        // Behind a load balancer, the client is known only after the PROXY protocol header.
        let entered = if config.proxy_protocol { Ok(None) } else { self.worker.enter(peer.ip()) };
        let Ok(entered) = entered else { return };
        // A response is one small write; Nagle's algorithm would only delay it.
        _ = tcp.set_nodelay(true);
        let (worker, stop) = (Arc::clone(&self.worker), Arc::clone(&self.stop));
        // Not from within an async block: its captures would take room twice.
        if config.is_plain() {
            let client = connection::plain_client(&worker, (peer, entered));
            tokio::spawn(connection::serve(counted, Stream::Plain(tcp), client, worker, stop));
        } else {
            tokio::spawn(connection::begin_and_serve(counted, tcp, (peer, entered), config, worker, stop));
        }
    }
}

/// Sends the rejection. On a TLS port the client cannot read it, and the connection just ends.
async fn turn_away(mut tcp: TcpStream) {
    const TIMEOUT: Duration = Duration::from_secs(1);
    let reply = async {
        tcp.write_all(NO_ROOM).await?;
        tcp.shutdown().await?;
        // Reads what the client has sent, so that closing does not destroy the response.
        tokio::io::copy(&mut tcp, &mut tokio::io::sink()).await
    };
    _ = timeout(TIMEOUT, reply).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejection_has_the_length_that_it_announces() {
        let text = std::str::from_utf8(NO_ROOM).expect("the response is text");
        let (head, body) = text.split_once("\r\n\r\n").expect("the head has an end");
        assert!(head.ends_with(&format!("content-length: {}", body.len())), "{head}");
        serde_json::from_str::<serde_json::Value>(body).expect("the body is JSON");
    }
}
