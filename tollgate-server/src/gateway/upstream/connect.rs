//! Opens connections to upstreams: one that is shared, or a new one to the first address that answers.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tollgate_net::deadline::Tick;
use tollgate_net::stream::MaybeTls;

use super::conn::{Http1Conn, UpstreamIo, Usage};
use super::http2_pool::{self, Sender, StreamPermit};
use super::slots::{Evicted, UpstreamSlot};
use super::tls::TlsFault;
use super::{Target, UpstreamProtocol};
use crate::gateway::client::Client;
use crate::gateway::failure::{ConnectError, Exhausted};
use crate::gateway::site::Route;
use crate::gateway::worker::Worker;

/// The delay before the next address is tried in parallel (RFC 8305, section 5).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Concurrent attempts. During a partition, every request would otherwise open a socket for every address.
const MAX_ATTEMPTS: usize = 3;

/// The purpose of a connection to an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gateway) enum ConnUse {
    Request,
    /// Switching to another protocol.
    Upgrade,
}

/// A connection to an upstream.
pub(in crate::gateway) enum UpstreamConn {
    /// HTTP/1: one request at a time.
    H1(Box<Http1Conn>),
    /// HTTP/2: many requests at a time.
    H2(Sender, StreamPermit),
}

/// Returns a connection to an upstream: a shared one that has room, or a new one.
pub(in crate::gateway) async fn obtain(
    target: &Target,
    conn_use: ConnUse,
    (worker, client): (&Arc<Worker>, &Client),
    route: &Route,
) -> Result<UpstreamConn, ConnectError> {
    let connect_timeout = route.connect_timeout;
    let may_share = target.address.scheme != UpstreamProtocol::Http1 && conn_use == ConnUse::Request;
    let reserve = || target.http2_pool(worker.number).reserve(worker.ticks.now(), &route.reuse, &target.addresses);
    if may_share && let Some((sender, stream_permit)) = reserve() {
        return Ok(UpstreamConn::H2(sender, stream_permit));
    }
    let opened = async {
        let turn = if may_share { target.opening_turn(worker.number).await } else { None };
        // The previous holder of the turn may have opened one.
        match turn.as_ref().and_then(|_| reserve()) {
            Some((sender, stream_permit)) => Ok(UpstreamConn::H2(sender, stream_permit)),
            None => open(target, conn_use, (worker, client)).await,
        }
    };
    timeout(connect_timeout, opened).await.map_err(|_elapsed| ConnectError::Timeout)?
}

/// A new connection by protocol, with the address it leads to.
pub(in crate::gateway) enum Dialled {
    Http1(UpstreamIo, IpAddr),
    Http2(UpstreamIo, IpAddr),
}

/// Connects to an upstream and negotiates the protocol.
pub(in crate::gateway) async fn dial(
    target: &Target,
    conn_use: ConnUse,
    now: Tick,
    slot: UpstreamSlot,
) -> Result<Dialled, ConnectError> {
    let addresses = target.addresses.to_try(now).await?;
    let avoid = |failed: SocketAddr| target.addresses.avoid(failed.ip(), now);
    let (tcp, reached, slot) = connect_tcp(&addresses, slot, avoid).await?;
    let ip = reached.ip();
    // Nagle's algorithm would delay small requests.
    tcp.set_nodelay(true)?;
    Ok(match (&target.tls, target.address.scheme) {
        (Some(tls), _) => {
            let connector = if conn_use == ConnUse::Upgrade { &tls.http1 } else { &tls.connector };
            let stream = Box::new(connector.connect(tls.name.clone(), tcp).await.map_err(handshake_error)?);
            let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
            let io = UpstreamIo::new(MaybeTls::Tls(stream), slot);
            if is_http2 { Dialled::Http2(io, ip) } else { Dialled::Http1(io, ip) }
        }
        (None, UpstreamProtocol::Http2) => Dialled::Http2(UpstreamIo::new(MaybeTls::Plain(tcp), slot), ip),
        (None, _) => Dialled::Http1(UpstreamIo::new(MaybeTls::Plain(tcp), slot), ip),
    })
}

fn handshake_error(error: io::Error) -> ConnectError {
    TlsFault::of_handshake(&error).map_or(ConnectError::Io(error), ConnectError::Tls)
}

async fn open(
    target: &Target,
    conn_use: ConnUse,
    (worker, client): (&Arc<Worker>, &Client),
) -> Result<UpstreamConn, ConnectError> {
    let slot = worker.upstream_slots.take(client.requests(), || evict_idle(worker)).await?;
    let now = worker.ticks.now();
    match dial(target, conn_use, now, slot).await? {
        Dialled::Http1(io, ip) => {
            if conn_use == ConnUse::Request {
                target.http2_pool(worker.number).note_http1();
            }
            Ok(UpstreamConn::H1(Box::new(Http1Conn::new(io, Usage::new(now, target.origin(ip))))))
        }
        Dialled::Http2(io, ip) => {
            let opened = http2_pool::handshake(io).await?;
            let usage = Usage::new(worker.ticks.now(), target.origin(ip));
            let (sender, permit) = target.http2_pool(worker.number).add(opened, usage, &worker.ticks).await?;
            Ok(UpstreamConn::H2(sender, permit))
        }
    }
}

/// Closes an idle connection, first of those of this worker.
fn evict_idle(worker: &Worker) -> Evicted {
    let site = worker.site.load();
    let targets = || site.routes.iter().flat_map(Route::targets);
    let workers = targets().next().map_or(0, |target| target.workers());
    let own_first = (0..workers).map(|step| (worker.number + step) % workers);
    let evicted = own_first.flat_map(|worker| targets().map(move |target| target.evict_idle(worker)));
    evicted.into_iter().find(|evicted| *evicted != Evicted::Nothing).unwrap_or(Evicted::Nothing)
}

/// Opens a TCP connection to one of the addresses, in their order: the next one is tried when an attempt fails, or has taken
/// [`ATTEMPT_DELAY`]. The oldest attempt is dropped when the next one starts, if there are [`MAX_ATTEMPTS`] or no slot
/// is free. Calls `on_failure` for each address that failed, was dropped, or was overtaken by a later one, unless the
/// gateway itself lacks a resource.
async fn connect_tcp(
    addresses: &[SocketAddr],
    slot: UpstreamSlot,
    mut on_failure: impl FnMut(SocketAddr),
) -> io::Result<(TcpStream, SocketAddr, UpstreamSlot)> {
    let mut attempts: VecDeque<Attempt> = VecDeque::with_capacity(MAX_ATTEMPTS);
    let mut rest = addresses.iter().copied();
    let mut error: Option<io::Error> = None;
    attempts.extend(rest.next().map(|address| Attempt::new(address, slot)));
    if attempts.is_empty() {
        return Err(io::ErrorKind::AddrNotAvailable.into());
    }
    loop {
        let overtaken = async {
            match rest.len() {
                0 => std::future::pending().await,
                _ => sleep(ATTEMPT_DELAY).await,
            }
        };
        let finished = tokio::select! {
            finished = first_finished(&mut attempts) => finished,
            () = overtaken => {
                let another = match attempts.front() {
                    Some(oldest) if attempts.len() < MAX_ATTEMPTS => oldest.slot.another(),
                    _ => None,
                };
                let slot = another.or_else(|| {
                    let oldest = attempts.pop_front()?;
                    on_failure(oldest.address);
                    Some(oldest.into_slot())
                });
                attempts.extend(rest.next().zip(slot).map(|(address, slot)| Attempt::new(address, slot)));
                continue;
            }
        };
        match finished {
            (at, Attempt { address, slot, .. }, Ok(tcp)) => {
                attempts.iter().take(at).for_each(|slower| on_failure(slower.address));
                return Ok((tcp, address, slot));
            }
            (_, Attempt { address, slot, .. }, Err(new)) => {
                if !is_gateways_own(&new) {
                    on_failure(address);
                }
                let reported = match error.take() {
                    Some(old) => more_specific(old, new),
                    None => new,
                };
                attempts.extend(rest.next().map(|address| Attempt::new(address, slot)));
                if attempts.is_empty() {
                    return Err(reported);
                }
                error = Some(reported);
            }
        }
    }
}

/// An attempt to connect.
struct Attempt {
    address: SocketAddr,
    connecting: Pin<Box<dyn Future<Output = io::Result<TcpStream>> + Send>>,
    slot: UpstreamSlot,
}

impl Attempt {
    fn new(address: SocketAddr, slot: UpstreamSlot) -> Self {
        Self { address, connecting: Box::pin(TcpStream::connect(address)), slot }
    }

    /// Cancels the attempt.
    fn into_slot(self) -> UpstreamSlot {
        self.slot
    }
}

/// Waits for the first attempt that finishes, and removes it. Returns its position, itself and its result.
async fn first_finished(attempts: &mut VecDeque<Attempt>) -> (usize, Attempt, io::Result<TcpStream>) {
    poll_fn(|context| {
        for at in 0..attempts.len() {
            if let Poll::Ready(result) = attempts[at].connecting.as_mut().poll(context) {
                let Some(finished) = attempts.remove(at) else { continue };
                return Poll::Ready((at, finished, result));
            }
        }
        Poll::Pending
    })
    .await
}

/// Returns whether the gateway lacks a resource that a connection to any address needs. Without a local address or
/// port, another address may still be reached.
fn is_gateways_own(error: &io::Error) -> bool {
    Exhausted::of(error).is_some_and(|exhausted| exhausted != Exhausted::LocalAddresses)
}

/// Returns the error that better explains why there is no connection: a resource that the gateway lacks, then an error
/// of the upstream, and last an address that cannot be reached from here.
fn more_specific(old: io::Error, new: io::Error) -> io::Error {
    let rank = |error: &io::Error| match Exhausted::of(error) {
        Some(Exhausted::LocalAddresses) => 2,
        Some(_) => 0,
        None => 1,
    };
    if rank(&new) < rank(&old) { new } else { old }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// A listener whose queue of connections is full: the system answers no further attempt.
    fn silent() -> (SocketAddr, Vec<socket2::Socket>) {
        let new = || socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
        let listener = new();
        listener.bind(&SocketAddr::from(([127, 0, 0, 2], 0)).into()).expect("a port is free");
        listener.listen(0).expect("it is bound");
        let address = listener.local_addr().ok().and_then(|address| address.as_socket()).expect("it is bound");
        let mut held = vec![listener];
        for _ in 0..8 {
            let filler = new();
            filler.set_nonblocking(true).expect("a socket");
            _ = filler.connect(&address.into());
            held.push(filler);
        }
        (address, held)
    }

    fn refusing() -> (SocketAddr, socket2::Socket) {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("a port is free");
        (socket.local_addr().ok().and_then(|address| address.as_socket()).expect("it is bound"), socket)
    }

    #[tokio::test]
    async fn dead_address_does_not_hide_a_good_one() {
        let (silent, _held) = silent();
        let (refusing, _bound) = refusing();
        let good = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let good = good.local_addr().expect("it is bound");
        for dead in [vec![silent], vec![refusing], vec![silent, refusing], vec![refusing, silent]] {
            let addresses: Vec<SocketAddr> = dead.iter().copied().chain([good]).collect();
            let mut blamed = Vec::new();
            let slot = UpstreamSlot::for_test(3);
            let (_, reached, _) =
                connect_tcp(&addresses, slot, |address| blamed.push(address)).await.expect("one is good");
            assert_eq!(reached, good);
            blamed.sort_unstable();
            let mut dead = dead;
            dead.sort_unstable();
            assert_eq!(blamed, dead);
        }
    }

    #[tokio::test]
    async fn few_attempts_are_under_way_at_a_time() {
        let silent: Vec<_> = (0..5).map(|_| silent()).collect();
        let addresses: Vec<SocketAddr> = silent.iter().map(|(address, _)| *address).collect();
        let (sender, mut dropped) = tokio::sync::mpsc::unbounded_channel();
        let connecting =
            connect_tcp(&addresses, UpstreamSlot::for_test(3), |address| sender.send(address).expect("it is received"));
        let first = tokio::select! {
            _ = connecting => panic!("none answers"),
            first = async { [dropped.recv().await, dropped.recv().await] } => first,
        };
        assert_eq!(first, [Some(addresses[0]), Some(addresses[1])]);
    }

    #[tokio::test]
    async fn one_attempt_at_a_time_is_under_way_without_further_slots() {
        let silent: Vec<_> = (0..2).map(|_| silent()).collect();
        let good = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let good = good.local_addr().expect("it is bound");
        let addresses: Vec<SocketAddr> = silent.iter().map(|(address, _)| *address).chain([good]).collect();
        let mut blamed = Vec::new();
        let slot = UpstreamSlot::for_test(1);
        let (_, reached, slot) =
            connect_tcp(&addresses, slot, |address| blamed.push(address)).await.expect("one is good");
        assert_eq!((reached, blamed.as_slice()), (good, &addresses[..2]));
        assert!(slot.is_held());
    }

    #[test]
    fn address_is_not_blamed_for_what_the_gateway_lacks() {
        for (code, is_own) in [
            (rustix::io::Errno::MFILE, true),
            (rustix::io::Errno::NFILE, true),
            (rustix::io::Errno::NOBUFS, true),
            (rustix::io::Errno::ADDRNOTAVAIL, false),
            (rustix::io::Errno::CONNREFUSED, false),
        ] {
            assert_eq!(is_gateways_own(&io::Error::from(code)), is_own, "{code}");
        }
    }

    #[tokio::test]
    async fn first_address_is_used_if_it_answers() {
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port is free"));
        let addresses = listeners.each_ref().map(|listener| listener.local_addr().expect("it is bound"));
        let slot = UpstreamSlot::for_test(3);
        let blame = |address| panic!("{address} is good");
        let (_, reached, _) = connect_tcp(&addresses, slot, blame).await.expect("both are good");
        assert_eq!(reached, addresses[0]);
    }

    #[tokio::test]
    async fn failure_of_all_addresses_is_the_upstreams_unless_the_gateway_lacks_something() {
        let (refusing, _bound) = refusing();
        let connected = connect_tcp(&[refusing, refusing], UpstreamSlot::for_test(3), |_| {}).await;
        let error = connected.err().expect("nothing listens");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        let of = |code: rustix::io::Errno| io::Error::from(code);
        let (refused, descriptors, no_way) = (
            || of(rustix::io::Errno::CONNREFUSED),
            || of(rustix::io::Errno::MFILE),
            || of(rustix::io::Errno::ADDRNOTAVAIL),
        );
        assert_eq!(more_specific(refused(), descriptors()).raw_os_error(), descriptors().raw_os_error());
        assert_eq!(more_specific(no_way(), refused()).raw_os_error(), refused().raw_os_error());
        assert_eq!(more_specific(refused(), no_way()).raw_os_error(), refused().raw_os_error());
    }
}
