//! Ports that stay reserved for a server while it is down.
//!
//! The kernel's own choice (bind port 0) comes from the range of outgoing connections. There, a client that knocks at
//! a killed server's port can be given that very port for its own end: it then talks to itself, and the server cannot
//! be restarted. So ports are chosen here, below that range.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use socket2::{Domain, Socket, Type};

const FIRST: u16 = 12_000;
const COUNT: u16 = 8_000;

/// A cluster node also listens here, for the other nodes: its port and this. Still below the outgoing range.
const CLUSTER_BUS_OFFSET: u16 = 10_000;

/// A port that no other process of the tests uses while it is held.
pub struct Port {
    number: u16,
    /// The UDP port of the same number, which is otherwise unused. Binding it reserves the number among all processes
    /// that run this suite, and ends with the process.
    _claim: UdpSocket,
}

impl Port {
    /// Reserves a free port.
    pub fn claim() -> Self {
        // Each process starts elsewhere, so that connections left by one test do not reach the server of another.
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let start = process::id().wrapping_mul(101);
        for _ in 0..COUNT {
            let step = NEXT.fetch_add(1, Ordering::Relaxed);
            let number = FIRST + (start.wrapping_add(step.into()) % u32::from(COUNT)) as u16;
            if let Ok(claim) = UdpSocket::bind((Ipv4Addr::LOCALHOST, number))
                && is_free(number)
                && is_free(number + CLUSTER_BUS_OFFSET)
            {
                return Self { number, _claim: claim };
            }
        }
        panic!("no port from {FIRST} to {} is free", FIRST + COUNT - 1);
    }

    /// The number of the port.
    pub fn number(&self) -> u16 {
        self.number
    }
}

fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

/// Returns an address where nothing listens. Its port stays reserved until the tests are over.
pub fn unused_address() -> SocketAddr {
    let (socket, address) = bound().expect("a port is free");
    std::mem::forget(socket);
    address
}

/// Returns an address whose listen queue is full while the other value is held: connection attempts time out.
pub fn full_listener() -> io::Result<(SocketAddr, impl Sized)> {
    let (listener, address) = bound()?;
    listener.listen(0)?;
    let dial = || TcpStream::connect_timeout(&address, Duration::from_millis(300)).ok();
    let taken: Vec<TcpStream> = std::iter::from_fn(dial).collect();
    Ok((address, (listener, taken)))
}

fn bound() -> io::Result<(Socket, SocketAddr)> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
    let address = socket.local_addr()?.as_socket().ok_or(io::ErrorKind::AddrNotAvailable)?;
    Ok((socket, address))
}
