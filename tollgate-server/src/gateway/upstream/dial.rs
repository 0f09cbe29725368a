//! TCP connections to the first of several addresses that accepts.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::sleep;

use super::slots::UpstreamSlot;
use crate::gateway::failure::Exhausted;

/// The delay before the next address is tried in parallel (RFC 8305, section 5).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Concurrent attempts. During a partition, every request would otherwise open a socket for every address.
const MAX_ATTEMPTS: usize = 3;

/// Connects to one of the addresses, in their order: the next one is tried when an attempt fails, or has taken
/// [`ATTEMPT_DELAY`]. The oldest attempt is dropped when the next one starts, if there are [`MAX_ATTEMPTS`] or no slot
/// is free. Calls `on_failure` for each address that failed, was dropped, or was overtaken by a later one, unless the
/// gateway itself lacks a resource.
pub(in crate::gateway) async fn connect(
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
            let (_, reached, _) = connect(&addresses, slot, |address| blamed.push(address)).await.expect("one is good");
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
            connect(&addresses, UpstreamSlot::for_test(3), |address| sender.send(address).expect("it is received"));
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
        let (_, reached, slot) = connect(&addresses, slot, |address| blamed.push(address)).await.expect("one is good");
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
        let (_, reached, _) = connect(&addresses, slot, blame).await.expect("both are good");
        assert_eq!(reached, addresses[0]);
    }

    #[tokio::test]
    async fn failure_of_all_addresses_is_the_upstreams_unless_the_gateway_lacks_something() {
        let (refusing, _bound) = refusing();
        let connected = connect(&[refusing, refusing], UpstreamSlot::for_test(3), |_| {}).await;
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
