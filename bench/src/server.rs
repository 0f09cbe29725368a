//! A server process: its processor time and its memory, including those of its children.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::clock;
use crate::cores::time_of;

/// An idle machine has each of them up within 100 ms.
const READY_TRIES: usize = 250;
const TRY_EVERY: Duration = Duration::from_millis(20);

/// A free port.
pub(crate) fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr())?.port())
}

/// The processor time of a server.
#[derive(Clone, Copy)]
pub(crate) struct Spent {
    /// Processor time.
    pub(crate) cpu: Duration,
    /// The part of it in the kernel.
    pub(crate) kernel: Duration,
    /// How often its threads slept.
    pub(crate) sleeps: u64,
}

/// A running server. Dropping it stops the process.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    process: Child,
}

impl Server {
    /// Starts it, and waits until it accepts connections. Its output goes to the file `log`.
    pub(crate) fn start(mut command: Command, port: u16, log: &Path) -> anyhow::Result<Self> {
        let (out, err) = (File::create(log)?, File::options().append(true).open(log)?);
        let process = command.stdout(out).stderr(err).spawn().context("could not be started")?;
        let mut server = Self { address: ([127, 0, 0, 1], port).into(), process };
        server.wait_for(server.address, log)?;
        Ok(server)
    }

    /// Waits until it accepts connections on this address.
    pub(crate) fn wait_for(&mut self, address: SocketAddr, log: &Path) -> anyhow::Result<()> {
        for _ in 0..READY_TRIES {
            if let Some(status) = self.process.try_wait()? {
                let output = fs::read_to_string(log).unwrap_or_default();
                bail!("it exited at once ({status}): {}", output.trim());
            }
            if TcpStream::connect(address).is_ok() {
                return Ok(());
            }
            clock::pause(TRY_EVERY);
        }
        bail!("nothing listens on {address}: try to start it by hand")
    }

    /// Returns the processor time of all its threads so far.
    pub(crate) fn spent(&self) -> anyhow::Result<Spent> {
        let (mut all, mut kernel, mut sleeps) = (0, 0, 0);
        for pid in self.tree() {
            let [user, system] = ticks(pid)?;
            all += user + system;
            kernel += system;
            sleeps += slept(pid)?;
        }
        Ok(Spent { cpu: time_of(all), kernel: time_of(kernel), sleeps })
    }

    /// Resident memory. Memory that processes share is counted once.
    pub(crate) fn resident_kb(&self) -> anyhow::Result<u64> {
        self.tree().into_iter().map(resident_kb).sum()
    }

    /// The process and its children, such as nginx's workers.
    fn tree(&self) -> Vec<u32> {
        let own = self.process.id();
        let children = fs::read_to_string(format!("/proc/{own}/task/{own}/children")).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
        std::iter::once(own).chain(children).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The parent first, because it would restart its children. Errors mean that a process has already exited.
        let tree = self.tree();
        let _ = self.process.kill();
        for child in &tree[1..] {
            if let Some(child) = i32::try_from(*child).ok().and_then(Pid::from_raw) {
                let _ = kill_process(child, Signal::KILL);
            }
        }
        let _ = self.process.wait();
    }
}

/// User and system time.
fn ticks(pid: u32) -> anyhow::Result<[u64; 2]> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).context("a process of a contender has ended")?;
    // The name of the program is in brackets, and may contain anything. The times are the 12th and 13th field after it.
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    let mut times = fields.split(' ').skip(11).map_while(|field| field.parse().ok());
    let both = (times.next(), times.next());
    let (Some(user), Some(system)) = both else { bail!("/proc/PID/stat has another form here") };
    Ok([user, system])
}

/// Voluntary context switches of all threads.
fn slept(pid: u32) -> anyhow::Result<u64> {
    let mut sleeps = 0;
    for thread in fs::read_dir(format!("/proc/{pid}/task")).context("a process of a contender has ended")? {
        // A thread may have exited in the meantime.
        let status = fs::read_to_string(thread?.path().join("status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        sleeps += line.and_then(|number| number.trim().parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(sleeps)
}

fn resident_kb(pid: u32) -> anyhow::Result<u64> {
    let rollup =
        fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).context("a process of a contender has ended")?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
    let field = line.and_then(|line| line.split_whitespace().next()).and_then(|field| field.parse().ok());
    field.context("/proc/PID/smaps_rollup has another form here")
}
