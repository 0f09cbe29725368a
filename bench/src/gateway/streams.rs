//! One stream of 1 GB at a time, up or down: the processor time that a contender needs for all of it.
//!
//! The upstream and the client are threads of this process, which copy no body from or to a file.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::Bench;
use super::config::{Limits, Protocol};
use super::contender::{Contender, HAPROXY, NGINX, TOLLGATE};
use crate::clock;
use crate::cores::stay_on;
use crate::race::{self, Times};
use crate::report::{Results, Table};

const STREAM_BYTES: u64 = 1_000_000_000;
const PIECE_BYTES: usize = 256 * 1024;
/// Longer than any contender lets a stream stand still.
const PATIENCE: Duration = Duration::from_secs(30);
/// Longer than any head here.
const MOST_HEAD_BYTES: usize = 16 * 1024;

#[derive(Clone, Copy)]
enum Direction {
    Up,
    Down,
}

impl Direction {
    fn name(self) -> &'static str {
        match self {
            Self::Up => "upload",
            Self::Down => "download",
        }
    }
}

pub(super) fn run(bench: &Bench, results: &mut Results) -> anyhow::Result<()> {
    let upstream = serve(bench)?;
    let start = |product| bench.start_before(product, Limits::One, Protocol::Http1, upstream.port());
    let contenders: Vec<Contender> = bench.products().map(start).collect::<anyhow::Result<_>>()?;
    for direction in [Direction::Up, Direction::Down] {
        let mut cpu: Vec<Times> = contenders.iter().map(|contender| Times::new(contender.name)).collect();
        let mut elapsed: Vec<Times> = contenders.iter().map(|contender| Times::new(contender.name)).collect();
        race::take_turns(bench.scale.rounds, contenders.len(), |_, turn| {
            let contender = &contenders[turn];
            let (began, before) = (clock::now(), contender.server.spent()?);
            stream(contender.server.address, direction)
                .with_context(|| format!("{}: {} of 1 GB", contender.name, direction.name()))?;
            cpu[turn].push((contender.server.spent()?.cpu - before.cpu).as_secs_f64() * 1e3);
            elapsed[turn].push(began.elapsed().as_secs_f64() * 1e3);
            anyhow::Ok(())
        })?;
        conclude(direction, &cpu, &elapsed, results);
    }
    Ok(())
}

fn conclude(direction: Direction, cpu: &[Times], elapsed: &[Times], results: &mut Results) {
    let name = direction.name();
    let header = ["", "CPU ms", "of nginx's", "took ms"];
    let mut table = Table::new(format!("One {name} of 1 GB"), header);
    let find = |name: &str| cpu.iter().find(|times| times.name == name);
    for (cpu, elapsed) in cpu.iter().zip(elapsed) {
        let ratio = find(NGINX).map_or(String::new(), |nginx| cpu.ratio_to(nginx).to_string());
        table.row([cpu.name.to_owned(), format!("{:.0}", cpu.median()), ratio, format!("{:.0}", elapsed.median())]);
    }
    table.print();
    for (peer, label) in [(NGINX, "nginx"), (HAPROXY, "haproxy")] {
        if let (Some(ours), Some(theirs)) = (find(TOLLGATE), find(peer)) {
            results.ratio(format!("{name}_1gb_vs_{label}"), ours.ratio_to(theirs).median);
        }
    }
}

/// Sends or receives one stream.
fn stream(address: SocketAddr, direction: Direction) -> anyhow::Result<()> {
    let mut connection = open(TcpStream::connect_timeout(&address, PATIENCE)?)?;
    let (method, length) = match direction {
        Direction::Up => ("POST", format!("Content-Length: {STREAM_BYTES}\r\n")),
        Direction::Down => ("GET", String::new()),
    };
    write!(connection, "{method} /stream HTTP/1.1\r\nHost: 127.0.0.1\r\nx-user-id: user-1\r\n{length}\r\n")?;
    if let Direction::Up = direction {
        send(&mut connection)?;
    }
    let head = Head::read(&mut connection)?.context("the connection was closed before the answer")?;
    ensure!(head.text.starts_with("HTTP/1.1 200 "), "answered with {}", head.text.lines().next().unwrap_or_default());
    let expected = match direction {
        Direction::Up => 0,
        Direction::Down => STREAM_BYTES,
    };
    ensure!(head.length == expected, "the answer has {} bytes, not {expected}", head.length);
    receive(&mut connection, head.length - head.rest)?;
    Ok(())
}

/// Starts the upstream, and returns its address.
fn serve(bench: &Bench) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    let core = bench.cores.upstream();
    thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            let core = core.clone();
            // A contender may close a connection at any time. A broken stream fails the client's measurement.
            thread::spawn(move || stay_on(core).and_then(|()| answer(open(connection)?)));
        }
    });
    Ok(address)
}

/// Answers the requests of one connection.
fn answer(mut connection: TcpStream) -> anyhow::Result<()> {
    while let Some(head) = Head::read(&mut connection)? {
        if head.text.starts_with("POST ") {
            receive(&mut connection, head.length - head.rest)?;
            connection.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")?;
        } else {
            write!(connection, "HTTP/1.1 200 OK\r\nContent-Length: {STREAM_BYTES}\r\n\r\n")?;
            send(&mut connection)?;
        }
    }
    Ok(())
}

fn open(connection: TcpStream) -> io::Result<TcpStream> {
    connection.set_read_timeout(Some(PATIENCE))?;
    connection.set_write_timeout(Some(PATIENCE))?;
    connection.set_nodelay(true)?;
    Ok(connection)
}

/// A head, and the part of its body that arrived with it.
struct Head {
    text: String,
    /// The length of the body.
    length: u64,
    /// The number of its bytes that were read with the head.
    rest: u64,
}

impl Head {
    /// Reads a head, or returns `None` if the connection was closed before it.
    fn read(connection: &mut TcpStream) -> anyhow::Result<Option<Self>> {
        let (mut bytes, mut piece) = (Vec::new(), [0; 4096]);
        let end = loop {
            let read = connection.read(&mut piece)?;
            if read == 0 && bytes.is_empty() {
                return Ok(None);
            }
            ensure!(read > 0, "the connection was closed in a head");
            bytes.extend_from_slice(&piece[..read]);
            if let Some(end) = bytes.windows(4).position(|end| end == b"\r\n\r\n") {
                break end + 4;
            }
            ensure!(bytes.len() <= MOST_HEAD_BYTES, "a head does not end");
        };
        let rest = (bytes.len() - end) as u64;
        bytes.truncate(end);
        let text = String::from_utf8(bytes).context("a head is no text")?;
        let lines = text.lines().filter_map(|line| line.split_once(':'));
        let length = lines.into_iter().find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
        let length = length.map_or(Ok(0), |(_, length)| length.trim().parse()).context("a length is no number")?;
        ensure!(rest <= length, "more than a body arrived");
        Ok(Some(Self { text, length, rest }))
    }
}

fn send(connection: &mut TcpStream) -> io::Result<()> {
    let piece = vec![b'x'; PIECE_BYTES];
    let mut left = STREAM_BYTES;
    while left > 0 {
        let next = left.min(PIECE_BYTES as u64);
        connection.write_all(&piece[..next as usize])?;
        left -= next;
    }
    Ok(())
}

fn receive(connection: &mut TcpStream, bytes: u64) -> anyhow::Result<()> {
    let mut piece = vec![0; PIECE_BYTES];
    let mut left = bytes;
    while left > 0 {
        let most = left.min(PIECE_BYTES as u64) as usize;
        let read = connection.read(&mut piece[..most])?;
        ensure!(read > 0, "the connection was closed {left} bytes before the end of the body");
        left -= read as u64;
    }
    Ok(())
}
