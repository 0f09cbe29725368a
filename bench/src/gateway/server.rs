//! A process that listens, pinned to a core: what it has spent and what it holds, its children's included.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::clock;

/// An idle machine has each of them up within 100 ms.
const READY_TRIES: usize = 250;
const TRY_EVERY: Duration = Duration::from_millis(20);

/// Where a process may run.
#[derive(Clone, Copy)]
pub(super) enum Core {
    /// The contender's alone.
    Contender = 0,
    /// For the load and what stands behind the contender.
    Load = 1,
}

impl Core {
    /// How long it has been at work so far, for whomever.
    pub(super) fn worked(self) -> anyhow::Result<Duration> {
        let stat = fs::read_to_string("/proc/stat")?;
        let name = format!("cpu{}", self as usize);
        let mut lines = stat.lines().filter_map(|line| line.split_once(' '));
        let (_, fields) = lines.find(|(core, _)| *core == name).context("/proc/stat does not tell of this core")?;
        let ticks: Option<Vec<u64>> = fields.split(' ').take(8).map(|field| field.parse().ok()).collect();
        match ticks.as_deref() {
            Some(&[user, nice, system, _idle, _io_wait, hard, soft, stolen]) => {
                Ok(time_of(user + nice + system + hard + soft + stolen))
            }
            _ => bail!("/proc/stat has another form here"),
        }
    }
}

fn time_of(ticks: u64) -> Duration {
    Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// A command that will run on one core only.
pub(super) fn pinned(core: Core, program: &Path) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", &(core as usize).to_string()]).arg(program).stdin(Stdio::null());
    command
}

/// A port that nobody listens on.
pub(super) fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr())?.port())
}

/// Processor time.
#[derive(Clone, Copy)]
pub(super) struct Cpu {
    pub(super) all: Duration,
    /// The part of it in the kernel.
    pub(super) kernel: Duration,
}

/// A server, until it is dropped.
pub(super) struct Server {
    pub(super) address: SocketAddr,
    process: Child,
}

impl Server {
    /// Starts it, and waits until it accepts connections. What it has to say goes to the file `told`.
    pub(super) fn start(mut command: Command, port: u16, told: &Path) -> anyhow::Result<Self> {
        let (out, err) = (File::create(told)?, File::options().append(true).open(told)?);
        let process = command.stdout(out).stderr(err).spawn().context("could not be started")?;
        let mut server = Self { address: ([127, 0, 0, 1], port).into(), process };
        for _ in 0..READY_TRIES {
            if let Some(status) = server.process.try_wait()? {
                let told = fs::read_to_string(told).unwrap_or_default();
                bail!("it ended at once ({status}): {}", told.trim());
            }
            if TcpStream::connect(server.address).is_ok() {
                return Ok(server);
            }
            clock::pause(TRY_EVERY);
        }
        bail!("nothing listens on port {port}; see whether it starts by hand")
    }

    /// The time of all its threads so far.
    pub(super) fn cpu(&self) -> anyhow::Result<Cpu> {
        let (mut all, mut kernel) = (0, 0);
        for pid in self.tree() {
            let [user, system] = ticks(pid)?;
            all += user + system;
            kernel += system;
        }
        Ok(Cpu { all: time_of(all), kernel: time_of(kernel) })
    }

    /// Resident memory, of which what processes share is counted once.
    pub(super) fn resident_kb(&self) -> anyhow::Result<u64> {
        self.tree().into_iter().map(resident_kb).sum()
    }

    /// The process and its children; nginx has its workers there.
    fn tree(&self) -> Vec<u32> {
        let own = self.process.id();
        let children = fs::read_to_string(format!("/proc/{own}/task/{own}/children")).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
        std::iter::once(own).chain(children).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The parent goes first, for it would replace its children. Whether they were still there or not, they are
        // gone now.
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
    // The name of the program stands in brackets, and may itself contain anything. After it, the 12th and 13th field.
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    let mut times = fields.split(' ').skip(11).map_while(|field| field.parse().ok());
    let both = (times.next(), times.next());
    let (Some(user), Some(system)) = both else { bail!("/proc/PID/stat has another form here") };
    Ok([user, system])
}

fn resident_kb(pid: u32) -> anyhow::Result<u64> {
    let rollup =
        fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).context("a process of a contender has ended")?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
    let field = line.and_then(|line| line.split_whitespace().next()).and_then(|field| field.parse().ok());
    field.context("/proc/PID/smaps_rollup has another form here")
}
