//! The memory of a contender with ten thousand idle connections, or as many as the limit on open files allows. Excludes
//! the kernel's buffers, which are the same for all.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::Bench;
use super::config::{Limits, Protocol};
use super::contender::{Contender, SMALL_BYTES, TOLLGATE};
use super::load::USERS;
use super::probe::Connection;
use crate::clock;
use crate::report::{self, Results, Table};

const IDLE: usize = 10_000;
/// With fewer connections, memory that a server allocates in advance would distort the result.
const LEAST_IDLE: usize = 1_000;
/// The descriptors that Tollgate reserves for 8 clients: one for each, one for its upstream, and one for a refusal.
const FILES_PER_EIGHT: u64 = 17;
/// Descriptors for everything else.
const OTHER_FILES: u64 = 1_000;
/// Long enough for a server to free the memory of a request.
const SETTLING: Duration = Duration::from_secs(2);

/// Resident kilobytes.
struct Resident {
    before_kb: u64,
    after_kb: u64,
}

pub(super) fn run(bench: &Bench, results: &mut Results) -> anyhow::Result<()> {
    let idle = idle_connections();
    if idle < IDLE {
        report::note(format_args!(
            "{idle} idle connections instead of {IDLE}: the limit on open files is too low: raise the hard limit to {}",
            files_for(IDLE)
        ));
    }
    let header = ["", "at first MB", "at last MB", "growth MB", "KB per connection"];
    let mut table = Table::new(format!("Memory: from none to {idle} idle keep-alive connections"), header);
    for product in bench.products() {
        let contender = bench.start(product, Limits::One, Protocol::Http1)?;
        let resident = measure(&contender, idle).with_context(|| format!("idle connections to {}", contender.name))?;
        let growth_kb = resident.after_kb as f64 - resident.before_kb as f64;
        let mb = |kb: f64| format!("{:.1}", kb / 1024.0);
        let each = format!("{:.2}", growth_kb / idle as f64);
        let (first, last) = (mb(resident.before_kb as f64), mb(resident.after_kb as f64));
        table.row([contender.name.to_owned(), first, last, mb(growth_kb), each]);
        if contender.name == TOLLGATE {
            results.quantity("memory_connection_bytes", growth_kb * 1024.0 / idle as f64);
            if idle == IDLE {
                results.quantity("memory_10k_connections_mb", growth_kb / 1024.0);
            }
        }
    }
    table.print();
    Ok(())
}

/// Raises the limit on open files, for this process and those it starts, and returns it.
pub(super) fn raise_open_files() -> anyhow::Result<()> {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let needed = files_for(LEAST_IDLE);
    ensure!(
        idle_connections() >= LEAST_IDLE,
        "{} files may be open: raise the hard limit to {needed} or more (`ulimit -Hn`), or leave out `memory`",
        maximum.unwrap_or(u64::MAX)
    );
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
    Ok(())
}

/// Returns the number of connections that Tollgate accepts with this limit on open files.
fn idle_connections() -> usize {
    let files = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX).saturating_sub(OTHER_FILES);
    usize::try_from(files.saturating_mul(8) / FILES_PER_EIGHT).unwrap_or(usize::MAX).min(IDLE)
}

/// Returns the limit on open files that this many connections need.
fn files_for(connections: usize) -> u64 {
    (connections as u64 * FILES_PER_EIGHT).div_ceil(8) + OTHER_FILES
}

/// The first request is not counted, so that one-time allocations of a server are excluded.
fn measure(contender: &Contender, idle: usize) -> anyhow::Result<Resident> {
    send(&mut Connection::open(contender.server.address)?, 0)?;
    clock::pause(SETTLING);
    let before_kb = contender.server.resident_kb()?;
    let mut connections = Vec::with_capacity(idle);
    for number in 0..idle {
        let mut connection = Connection::open(contender.server.address)?;
        send(&mut connection, number).with_context(|| format!("connection {number}"))?;
        connections.push(connection);
    }
    clock::pause(SETTLING);
    let after_kb = contender.server.resident_kb()?;
    for connection in &connections {
        ensure!(connection.is_open()?, "an idle connection was closed; none should be within {SETTLING:?}");
    }
    Ok(Resident { before_kb, after_kb })
}

fn send(connection: &mut Connection, number: usize) -> anyhow::Result<()> {
    let answer = connection.send("/small", 1 + number % USERS)?;
    let (status, body) = (answer.status, answer.body_bytes);
    ensure!((status, body) == (200, SMALL_BYTES), "answered with {status} and {body} bytes");
    Ok(())
}
