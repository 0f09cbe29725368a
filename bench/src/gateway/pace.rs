//! Load at a fixed rate: each request has a scheduled time, and its latency counts from then. So a contender that
//! stalls pays for all requests that were due in the meantime, not for one.

use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::set_current_timer_slack;

use super::load::{CONNECTIONS, Load, USERS};
use super::probe::{Response, request};
use crate::clock;
use crate::race::quantile;

/// How long the last responses may take.
const GRACE: Duration = Duration::from_secs(5);

/// A fixed number of requests per second, for a fixed time.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    pub(super) per_second: f64,
    pub(super) length: Duration,
}

/// A connection and the request in flight on it.
struct Lane {
    request: Vec<u8>,
    answer: Vec<u8>,
    intended: Option<Instant>,
}

pub(super) fn run(address: SocketAddr, path: &str, pace: Pace) -> anyhow::Result<Load> {
    // By default the kernel may wake this thread 50 µs late, which would be charged to the contenders.
    set_current_timer_slack(NonZeroU64::new(1))?;
    let streams: Vec<TcpStream> = (0..CONNECTIONS).map(|_| connect(address)).collect::<anyhow::Result<_>>()?;
    let lane = |number| Lane { request: request(path, 1 + number % USERS), answer: Vec::new(), intended: None };
    let mut lanes: Vec<Lane> = (0..CONNECTIONS).map(lane).collect();
    let mut watched: Vec<PollFd<'_>> = streams.iter().map(|stream| PollFd::new(stream, PollFlags::IN)).collect();
    let mut idle: VecDeque<usize> = (0..CONNECTIONS).collect();
    let mut waiting: VecDeque<Instant> = VecDeque::new();
    let total = (pace.per_second * pace.length.as_secs_f64()) as usize;
    // Microseconds from the scheduled time of a request to the end of its response.
    let mut latencies = Vec::with_capacity(total);
    let mut refused = 0;
    let began = clock::now();
    let due = |number: usize| began + Duration::from_secs_f64(number as f64 / pace.per_second);
    let deadline = began + pace.length + GRACE;
    let mut next = 0;
    while latencies.len() < total {
        let now = clock::now();
        ensure!(now < deadline, "{} of {total} paced requests had no answer", total - latencies.len());
        while next < total && due(next) <= now {
            waiting.push_back(due(next));
            next += 1;
        }
        while !waiting.is_empty()
            && let Some(number) = idle.pop_front()
        {
            lanes[number].intended = waiting.pop_front();
            (&streams[number]).write_all(&lanes[number].request).context("a paced request could not be sent")?;
        }
        let until = if next < total { due(next) } else { deadline };
        let timeout = Timespec::try_from(until.saturating_duration_since(clock::now()))?;
        poll(&mut watched, Some(&timeout))?;
        for number in (0..CONNECTIONS).filter(|number| !watched[*number].revents().is_empty()) {
            if let Some((intended, status)) = lanes[number].receive(&streams[number])? {
                refused += u64::from(status >= 400);
                latencies.push(clock::now().saturating_duration_since(intended).as_secs_f64() * 1e6);
                idle.push_back(number);
            }
        }
    }
    let elapsed = clock::now() - began;
    let [p50_us, p99_us] = [0.5, 0.99].map(|share| quantile(latencies.clone(), share));
    Ok(Load { requests: total as u64, elapsed, p50_us, p99_us, refused, failed: 0 })
}

impl Lane {
    /// Returns the scheduled time of the request whose response is now complete, and the status.
    fn receive(&mut self, mut stream: &TcpStream) -> anyhow::Result<Option<(Instant, u16)>> {
        let mut chunk = [0; 4096];
        let read = stream.read(&mut chunk).context("a paced request had no answer")?;
        ensure!(read > 0, "a connection was closed under a paced request");
        self.answer.extend_from_slice(&chunk[..read]);
        let Some(answer) = Response::complete(&self.answer)? else { return Ok(None) };
        self.answer.clear();
        Ok(self.intended.take().map(|intended| (intended, answer.status)))
    }
}

fn connect(address: SocketAddr) -> anyhow::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    Ok(stream)
}
