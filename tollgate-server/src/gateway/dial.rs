//! A TCP connection to the first of several addresses that answers.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::net::TcpStream;
use tokio::time::sleep;

use super::connect::Exhausted;

/// How long an attempt has before the next address is tried beside it (RFC 8305, section 5).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Connects to one of the addresses, tried in their order: the next one when an attempt fails, or has taken
/// [`ATTEMPT_DELAY`]. Calls `on_failure` for each address that failed, or was overtaken by a later one.
pub(super) async fn connect(
    addresses: &[SocketAddr],
    mut on_failure: impl FnMut(SocketAddr),
) -> io::Result<(TcpStream, SocketAddr)> {
    let mut attempts = FuturesUnordered::new();
    let mut rest = addresses.iter().copied();
    let mut failed: Vec<SocketAddr> = Vec::new();
    let mut error: Option<io::Error> = None;
    attempts.extend(rest.next().map(attempt));
    loop {
        let overtaken = async {
            match rest.len() {
                0 => std::future::pending().await,
                _ => sleep(ATTEMPT_DELAY).await,
            }
        };
        let finished = tokio::select! {
            finished = attempts.next() => finished,
            () = overtaken => {
                attempts.extend(rest.next().map(attempt));
                continue;
            }
        };
        match finished {
            Some((address, Ok(tcp))) => {
                let slower = addresses.iter().take_while(|other| **other != address);
                slower.filter(|other| !failed.contains(other)).for_each(|other| on_failure(*other));
                return Ok((tcp, address));
            }
            Some((address, Err(new))) => {
                failed.push(address);
                on_failure(address);
                error = Some(match error.take() {
                    Some(old) => more_telling(old, new),
                    None => new,
                });
                attempts.extend(rest.next().map(attempt));
            }
            None => return Err(error.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into())),
        }
    }
}

async fn attempt(address: SocketAddr) -> (SocketAddr, io::Result<TcpStream>) {
    (address, TcpStream::connect(address).await)
}

/// The error that says more about why there is no connection: what the gateway lacks for any address, then what an upstream
/// did, and last that there is no way to one address.
fn more_telling(old: io::Error, new: io::Error) -> io::Error {
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
            let (_, reached) = connect(&addresses, |address| blamed.push(address)).await.expect("one is good");
            assert_eq!(reached, good);
            blamed.sort_unstable();
            let mut dead = dead;
            dead.sort_unstable();
            assert_eq!(blamed, dead);
        }
    }

    #[tokio::test]
    async fn first_address_is_used_if_it_answers() {
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port is free"));
        let addresses = listeners.each_ref().map(|listener| listener.local_addr().expect("it is bound"));
        let (_, reached) = connect(&addresses, |address| panic!("{address} is good")).await.expect("both are good");
        assert_eq!(reached, addresses[0]);
    }

    #[tokio::test]
    async fn failure_of_all_addresses_is_the_upstreams_unless_the_gateway_lacks_something() {
        let (refusing, _bound) = refusing();
        let error = connect(&[refusing, refusing], |_| {}).await.expect_err("nobody listens");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        let of = |code: rustix::io::Errno| io::Error::from(code);
        let (refused, descriptors, no_way) = (
            || of(rustix::io::Errno::CONNREFUSED),
            || of(rustix::io::Errno::MFILE),
            || of(rustix::io::Errno::ADDRNOTAVAIL),
        );
        assert_eq!(more_telling(refused(), descriptors()).raw_os_error(), descriptors().raw_os_error());
        assert_eq!(more_telling(no_way(), refused()).raw_os_error(), refused().raw_os_error());
        assert_eq!(more_telling(refused(), no_way()).raw_os_error(), refused().raw_os_error());
    }
}
