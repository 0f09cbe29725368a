//! The network between a client and a server: a port that forwards bytes, and that can be slow, lose a reply, or lose
//! everything.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::thread;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};

use super::RedisServer;
use crate::port::Port;
use crate::wait::within;

/// The backlog of the listener. Once it is full, the kernel drops the packets of new connections.
const BACKLOG: u32 = 16;

/// If a connection on the same machine takes longer, its packets are dropped.
const CONNECT_LIMIT: Duration = Duration::from_millis(100);

const APPLY_LIMIT: Duration = Duration::from_secs(10);

/// The handling of packets, in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// Packets are forwarded at once.
    Passes,
    /// A round trip takes this long.
    Slow(Duration),
    /// Packets are dropped. When traffic passes again, they are sent again, as TCP does.
    Partitioned,
    /// Packets are dropped. When traffic passes again, the server's side knows nothing of the connections of before.
    PoweredOff,
}

impl Traffic {
    fn is_dropped(self) -> bool {
        matches!(self, Self::Partitioned | Self::PoweredOff)
    }
}

/// A port that forwards to a server. It ends when it is dropped.
pub struct Link {
    port: Port,
    server: Arc<AtomicU16>,
    /// The current state. When dropped, the thread ends.
    traffic: watch::Sender<Traffic>,
    /// The state that the listener has applied.
    applied: watch::Receiver<Option<Traffic>>,
    cuts: Arc<AtomicBool>,
}

impl Link {
    /// A link to a server.
    pub fn to(server: &RedisServer) -> Self {
        let link = Self::to_nobody_yet();
        link.lead_to(server);
        link
    }

    /// For a server that needs to know the port of the link before it starts.
    pub fn to_nobody_yet() -> Self {
        let (port, server) = (Port::claim(), Arc::new(AtomicU16::new(0)));
        let (traffic, seen) = watch::channel(Traffic::Passes);
        let (apply, applied) = watch::channel(None);
        let cuts = Arc::new(AtomicBool::new(false));
        let way = Way { server: server.clone(), traffic: seen, cuts: cuts.clone() };
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port.number()));
        // A thread of its own: tests block theirs while they wait for servers.
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(serve(address, way, apply));
        });
        let link = Self { port, server, traffic, applied, cuts };
        link.set(Traffic::Passes);
        link
    }

    /// Sends connections to another server from now on.
    pub fn lead_to(&self, server: &RedisServer) {
        self.server.store(server.port(), Ordering::SeqCst);
    }

    /// The port that clients connect to.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// The URL for clients.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port())
    }

    /// Returns once it is applied, also to new connections.
    pub fn set(&self, traffic: Traffic) {
        let _ = self.traffic.send(traffic);
        within(APPLY_LIMIT, "the link has changed", || *self.applied.borrow() == Some(traffic));
    }

    /// Loses the next reply and the connection. The server has executed the command.
    pub fn cut_next_reply(&self) {
        self.cuts.store(true, Ordering::SeqCst);
    }
}

#[derive(Clone)]
struct Way {
    server: Arc<AtomicU16>,
    traffic: watch::Receiver<Traffic>,
    cuts: Arc<AtomicBool>,
}

async fn serve(address: SocketAddr, mut way: Way, apply: watch::Sender<Option<Traffic>>) {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_reuseaddr(true).expect("an option");
    socket.bind(address).expect("the port was free");
    let listener = socket.listen(BACKLOG).expect("listens");
    let mut fillers = Vec::new();
    loop {
        let traffic = *way.traffic.borrow_and_update();
        if !traffic.is_dropped() {
            fillers.clear();
        } else if fillers.is_empty() {
            fillers = fill_backlog(address).await;
        }
        let _ = apply.send(Some(traffic));
        tokio::select! {
            changed = way.traffic.changed() => if changed.is_err() { return },
            accepted = listener.accept(), if !traffic.is_dropped() => if let Ok((client, _)) = accepted {
                tokio::spawn(pass(client, way.clone()));
            },
        }
    }
}

/// Connects until the kernel drops packets of new connections.
async fn fill_backlog(address: SocketAddr) -> Vec<TcpStream> {
    let mut fillers = Vec::new();
    while let Ok(Ok(filler)) = timeout(CONNECT_LIMIT, TcpStream::connect(address)).await {
        fillers.push(filler);
    }
    fillers
}

async fn pass(client: TcpStream, way: Way) -> io::Result<()> {
    let server = TcpStream::connect((Ipv4Addr::LOCALHOST, way.server.load(Ordering::SeqCst))).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let requests = forward(from_client, to_server, way.traffic.clone(), None);
    let replies = forward(from_server, to_client, way.traffic.clone(), Some(way.cuts.clone()));
    tokio::select! {
        biased;
        () = after_power_off(way.traffic) => Ok(()),
        ended = async { tokio::try_join!(requests, replies) } => ended.map(|_| ()),
    }
}

/// Ends when the power is back.
async fn after_power_off(mut traffic: watch::Receiver<Traffic>) {
    while *traffic.borrow_and_update() != Traffic::PoweredOff && traffic.changed().await.is_ok() {}
    while *traffic.borrow_and_update() == Traffic::PoweredOff && traffic.changed().await.is_ok() {}
}

/// Forwards bytes until one side closes, which is an error here.
async fn forward(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut traffic: watch::Receiver<Traffic>,
    cuts: Option<Arc<AtomicBool>>,
) -> io::Result<()> {
    let (sender, mut receiver) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    let read = async {
        loop {
            let mut buffer = vec![0; 65_536];
            let length = from.read(&mut buffer).await?;
            if length == 0 || cuts.as_ref().is_some_and(|cuts| cuts.swap(false, Ordering::SeqCst)) {
                return Err::<(), _>(io::ErrorKind::UnexpectedEof.into());
            }
            buffer.truncate(length);
            let _ = sender.send((Instant::now(), buffer));
        }
    };
    let write = async {
        while let Some((read_at, bytes)) = receiver.recv().await {
            while traffic.borrow_and_update().is_dropped() {
                traffic.changed().await.map_err(io::Error::other)?;
            }
            let state = *traffic.borrow();
            if let Traffic::Slow(round_trip) = state {
                sleep_until(read_at + round_trip / 2).await;
            }
            to.write_all(&bytes).await?;
        }
        Ok(())
    };
    tokio::try_join!(read, write).map(|_| ())
}
