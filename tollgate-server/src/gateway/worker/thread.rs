//! The thread of a worker. It has its own runtime, listeners and upstream connections, so that a request stays on one
//! processor from its first byte to its last.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tollgate_net::listening::Stop;

use super::{Shutdown, Worker, scratch};
use crate::gateway::listener::WorkerSocket;
use crate::gateway::site::Route;

/// How long a stopping worker waits for its listeners, and then for idle connections, in which clients may send one more
/// request.
const LAST_GRACE: Duration = Duration::from_millis(100);

/// The same for idle connections of HTTP/1 if another process has taken over. They hold up nothing, and a client that
/// sends its next request in this time is asked to reconnect with the response.
const TAKEN_OVER_GRACE: Duration = Duration::from_secs(5);

/// How long idle connections take to close.
const LAST_LOOK: Duration = Duration::from_millis(50);

/// The interval in which connections closed by upstreams are dropped, to free their descriptors.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// A running worker.
pub(in crate::gateway) struct WorkerHandle {
    sockets: mpsc::UnboundedSender<WorkerSocket>,
    /// Returns the number of connections that were cut off.
    thread: JoinHandle<i64>,
}

/// The settings of a worker.
#[derive(Clone)]
pub(in crate::gateway) struct WorkerSettings {
    /// Changes when the worker has to stop. Its last value decides about idle connections.
    pub(in crate::gateway) stop: watch::Receiver<Stop>,
    /// How long requests in flight may take then.
    pub(in crate::gateway) drain: Duration,
    /// For all workers together.
    pub(in crate::gateway) max_connections: i64,
    pub(in crate::gateway) workers: i64,
}

impl WorkerHandle {
    pub(in crate::gateway) fn start(worker: Worker, settings: WorkerSettings) -> io::Result<Self> {
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        let (sockets, inbox) = mpsc::unbounded_channel();
        let name = format!("gateway-{}", worker.number);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let cut_off = runtime.block_on(run(Arc::new(worker), inbox, settings));
            runtime.shutdown_background();
            cut_off
        })?;
        Ok(Self { sockets, thread })
    }

    /// Accepts connections on a socket.
    pub(in crate::gateway) fn listen(&self, socket: WorkerSocket) {
        // The worker receives it for as long as it runs.
        _ = self.sockets.send(socket);
    }

    /// Waits for the worker to stop, which blocks the thread. Returns the number of connections that were cut off.
    pub(in crate::gateway) fn join(self) -> i64 {
        self.thread.join().unwrap_or(0)
    }
}

async fn run(
    worker: Arc<Worker>,
    mut inbox: mpsc::UnboundedReceiver<WorkerSocket>,
    mut settings: WorkerSettings,
) -> i64 {
    let stop = Arc::new(Shutdown::default());
    let mut listeners = JoinSet::new();
    tokio::spawn(sweep(Arc::clone(&worker)));
    let bounds = (settings.max_connections, settings.workers);
    loop {
        let socket = tokio::select! {
            socket = inbox.recv() => socket,
            _ = settings.stop.changed() => None,
        };
        let Some(socket) = socket else { break };
        // Forget listeners that have ended.
        while listeners.try_join_next().is_some() {}
        listeners.spawn(socket.accept(Arc::clone(&worker), Arc::clone(&stop), bounds));
    }
    // Connections in the listen queue are served, too.
    _ = timeout(LAST_GRACE, async { while listeners.join_next().await.is_some() {} }).await;
    let how = *settings.stop.borrow();
    drain(&worker, &stop, settings.drain, how).await
}

/// Drops unused connections to upstreams periodically.
async fn sweep(worker: Arc<Worker>) {
    loop {
        sleep(SWEEP_EVERY).await;
        scratch().renew(&worker);
        let (site, now) = (worker.site.load_full(), worker.ticks.now());
        site.routes.iter().flat_map(Route::targets).for_each(|target| target.sweep(worker.number, now));
    }
}

/// Waits for requests in flight. Returns the number of connections that are left after the timeout.
async fn drain(worker: &Worker, stop: &Shutdown, within: Duration, how: Stop) -> i64 {
    worker.closing.store(true, Relaxed);
    let grace = match how {
        Stop::TakenOver => TAKEN_OVER_GRACE,
        Stop::Close | Stop::HandOver => LAST_GRACE,
    };
    if how == Stop::TakenOver {
        stop.send_goaway();
    }
    let all_gone = async {
        let step = Duration::from_millis(5);
        let mut left = grace.as_millis() / step.as_millis();
        while worker.tally.connections.load(Relaxed) > 0 {
            sleep(step).await;
            left = left.saturating_sub(1);
            if left == 0 {
                stop.end_idle();
            }
        }
    };
    if timeout(within, all_gone).await.is_err() {
        // Idle connections close by themselves, even if the timeout was shorter than the grace period.
        stop.end_idle();
        sleep(LAST_LOOK).await;
    }
    worker.tally.connections.load(Relaxed)
}
