//! The load: connections that send batches of requests, as fast as replies arrive or at a fixed rate. At a fixed rate
//! each batch has a scheduled time, and its latency counts from then.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::num::NonZeroU64;
use std::ops::Range;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::set_current_timer_slack;

use crate::clock;
use crate::cores::stay_on;
use crate::gateway::probe::Response;
use crate::race::quantile;

/// Connections of all threads together.
pub(super) const CONNECTIONS: usize = 64;
/// How long the last replies may take.
const GRACE: Duration = Duration::from_secs(5);

/// The replies that a script expects.
#[derive(Clone, Copy)]
pub(super) enum Replies {
    /// `+PONG`
    Pong,
    /// The five numbers of `THROTTLE`, allowed.
    Throttle,
    /// An HTTP response with a decision, allowed.
    Check,
}

/// The requests of a contender. Each is sent with a random one of `requests`, `batch` at a time on each connection.
pub(super) struct Script {
    pub(super) requests: Vec<Vec<u8>>,
    pub(super) batch: usize,
    pub(super) replies: Replies,
}

/// How fast, and for how long.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// Requests per second, or as fast as replies arrive.
    pub(super) per_second: Option<f64>,
    pub(super) length: Duration,
}

/// The result of a load.
pub(super) struct Load {
    pub(super) requests: u64,
    pub(super) elapsed: Duration,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
}

impl Replies {
    /// Returns the length of the first reply in `bytes`, or `None` while it is incomplete.
    fn complete(self, bytes: &[u8]) -> anyhow::Result<Option<usize>> {
        let starts_like = |start: &[u8]| {
            let common = start.len().min(bytes.len());
            let shown = || bytes[..bytes.len().min(200)].escape_ascii().to_string();
            ensure!(bytes[..common] == start[..common], "a reply is wrong: {}", shown());
            anyhow::Ok(common == start.len())
        };
        match self {
            Self::Pong => {
                let whole = b"+PONG\r\n";
                Ok(starts_like(whole)?.then_some(whole.len()))
            }
            Self::Throttle => {
                if !starts_like(b"*5\r\n:1\r\n")? {
                    return Ok(None);
                }
                let mut lines = bytes.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
                Ok(lines.nth(5).map(|(end, _)| end + 1))
            }
            Self::Check => {
                let Some(Response { status, body_bytes, head_bytes }) = Response::complete(bytes)? else {
                    return Ok(None);
                };
                let whole = head_bytes + body_bytes;
                let allowed = b"\"allowed\":true";
                let is_allowed = bytes[head_bytes..whole].windows(allowed.len()).any(|part| part == allowed);
                ensure!(status == 200 && is_allowed, "a response is wrong: {}", bytes[..whole].escape_ascii());
                Ok(Some(whole))
            }
        }
    }
}

/// Runs the load on these cores, with one thread for each.
pub(super) fn run(address: SocketAddr, script: &Script, pace: Pace, cores: Range<usize>) -> anyhow::Result<Load> {
    let threads = cores.len();
    let share = Pace { per_second: pace.per_second.map(|all| all / threads as f64), ..pace };
    let began = clock::now();
    let shares: Vec<Share> = thread::scope(|scope| {
        let start = |core: usize| {
            scope.spawn(move || {
                stay_on(core..core + 1)?;
                drive(address, script, share, (CONNECTIONS / threads, core as u64))
            })
        };
        let running: Vec<_> = cores.map(start).collect();
        let end = |share: ScopedJoinHandle<'_, _>| share.join().map_err(|_| anyhow!("a load has panicked"))?;
        running.into_iter().map(end).collect::<anyhow::Result<_>>()
    })?;
    let elapsed = clock::now() - began;
    let latencies: Vec<f64> = shares.into_iter().flat_map(|share| share.latencies_us).collect();
    ensure!(!latencies.is_empty(), "no request was answered");
    let requests = (latencies.len() * script.batch) as u64;
    let [p50_us, p99_us] = [0.5, 0.99].map(|part| quantile(latencies.clone(), part));
    Ok(Load { requests, elapsed, p50_us, p99_us })
}

/// The part of one thread.
struct Share {
    /// One for each batch.
    latencies_us: Vec<f64>,
}

/// A connection and the batch in flight on it.
struct Connection {
    stream: TcpStream,
    request: Vec<u8>,
    replies: Vec<u8>,
    missing: usize,
    since: Instant,
}

/// A linear congruential generator: its time is small, and the same for all contenders.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

fn drive(address: SocketAddr, script: &Script, pace: Pace, (count, seed): (usize, u64)) -> anyhow::Result<Share> {
    // By default the kernel may wake this thread 50 µs late, which would be charged to the contenders.
    set_current_timer_slack(NonZeroU64::new(1))?;
    let mut random = Random(seed);
    let mut connections: Vec<Connection> =
        (0..count).map(|_| Connection::open(address)).collect::<anyhow::Result<_>>()?;
    let began = clock::now();
    let (end, deadline) = (began + pace.length, began + pace.length + GRACE);
    // Batches have a scheduled time at a fixed rate. Otherwise every connection sends its next batch at once.
    let batches_per_second = pace.per_second.map(|per_second| per_second / script.batch as f64);
    let total = batches_per_second.map_or(usize::MAX, |rate| (rate * pace.length.as_secs_f64()) as usize);
    let due = |number: usize| began + Duration::from_secs_f64(number as f64 / batches_per_second.unwrap_or(1.0));
    let (mut idle, mut waiting): (VecDeque<usize>, VecDeque<Instant>) = ((0..count).collect(), VecDeque::new());
    let (mut next, mut latencies_us, mut now) = (0, Vec::new(), began);
    let mut ready: Vec<usize> = Vec::with_capacity(count);
    loop {
        if batches_per_second.is_some() {
            while next < total && due(next) <= now {
                waiting.push_back(due(next));
                next += 1;
            }
        } else if now < end {
            waiting.extend(idle.iter().map(|_| now));
        }
        while !waiting.is_empty()
            && let Some(number) = idle.pop_front()
        {
            let since = waiting.pop_front().unwrap_or(now);
            connections[number].send(script, &mut random, since)?;
        }
        let is_over = if batches_per_second.is_some() { next >= total && waiting.is_empty() } else { now >= end };
        if is_over && idle.len() == count {
            return Ok(Share { latencies_us });
        }
        ensure!(now < deadline, "{} connections had no reply", count - idle.len());
        let until = if batches_per_second.is_some() && next < total { due(next) } else { deadline };
        wait(&connections, until.saturating_duration_since(clock::now()), &mut ready)?;
        for number in ready.drain(..) {
            if connections[number].receive(script)? {
                now = clock::now();
                latencies_us.push(now.saturating_duration_since(connections[number].since).as_secs_f64() * 1e6);
                idle.push_back(number);
                // The next batch goes out at once, so that the contender is never without work.
                if batches_per_second.is_none() && now < end {
                    idle.pop_back();
                    connections[number].send(script, &mut random, now)?;
                }
            }
        }
        now = clock::now();
    }
}

/// Waits until connections are readable, and collects their numbers.
fn wait(connections: &[Connection], most: Duration, ready: &mut Vec<usize>) -> anyhow::Result<()> {
    let mut watched: Vec<PollFd<'_>> =
        connections.iter().map(|connection| PollFd::new(&connection.stream, PollFlags::IN)).collect();
    poll(&mut watched, Some(&Timespec::try_from(most)?))?;
    ready.extend(watched.iter().enumerate().filter(|(_, fd)| !fd.revents().is_empty()).map(|(number, _)| number));
    Ok(())
}

impl Connection {
    fn open(address: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, request: Vec::new(), replies: Vec::new(), missing: 0, since: clock::now() })
    }

    fn send(&mut self, script: &Script, random: &mut Random, since: Instant) -> anyhow::Result<()> {
        self.request.clear();
        for _ in 0..script.batch {
            self.request.extend_from_slice(&script.requests[random.below(script.requests.len())]);
        }
        (self.missing, self.since) = (script.batch, since);
        self.stream.write_all(&self.request).context("a request could not be sent")
    }

    /// Reads replies, and returns whether the batch is complete.
    fn receive(&mut self, script: &Script) -> anyhow::Result<bool> {
        let mut chunk = [0; 16 * 1024];
        let read = match self.stream.read(&mut chunk) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            read => read.context("a request had no reply")?,
        };
        ensure!(read > 0, "a connection was closed under a request");
        ensure!(self.missing > 0, "a reply came to no request");
        self.replies.extend_from_slice(&chunk[..read]);
        let mut at = 0;
        while self.missing > 0
            && let Some(length) = script.replies.complete(&self.replies[at..])?
        {
            at += length;
            self.missing -= 1;
        }
        self.replies.drain(..at);
        ensure!(self.missing > 0 || self.replies.is_empty(), "there are more replies than requests");
        Ok(self.missing == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_is_complete_with_its_last_byte() {
        let check = b"HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n{\"allowed\":true}";
        for (replies, bytes) in [
            (Replies::Pong, &b"+PONG\r\n"[..]),
            (Replies::Throttle, b"*5\r\n:1\r\n:9\r\n:8\r\n:1\r\n:0\r\n"),
            (Replies::Check, check),
        ] {
            for end in 0..bytes.len() {
                assert_eq!(replies.complete(&bytes[..end]).unwrap(), None);
            }
            let more = [bytes, bytes].concat();
            assert_eq!(replies.complete(&more).unwrap(), Some(bytes.len()));
        }
    }

    #[test]
    fn a_denial_or_an_error_is_a_wrong_reply() {
        assert!(Replies::Throttle.complete(b"*5\r\n:0\r\n:9\r\n:0\r\n:1\r\n:1\r\n").is_err());
        assert!(Replies::Throttle.complete(b"-ERR").is_err());
        let denied = b"HTTP/1.1 200 OK\r\ncontent-length: 17\r\n\r\n{\"allowed\":false}";
        assert!(Replies::Check.complete(denied).is_err());
    }
}
