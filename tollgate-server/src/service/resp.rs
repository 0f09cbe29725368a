//! The Redis protocol: `CL.THROTTLE`, `THROTTLE` and `TOLLGATE.*` for every language that has a Redis client.
//!
//! Commands of a pipeline are executed in order. In memory, each is decided at once. On Redis, they are sent in order
//! and together, so that they share round trips. Replies are sent in the order of the commands.

mod command;
mod frame;
mod reply;

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};
use tollgate::Gate;

use self::command::{Session, Step};
use self::frame::MAX_REQUEST_BYTES;
use super::throttle::Throttles;
use super::tokens::Tokens;
use crate::decisions::Decisions;

/// The longest time between two requests of a client. Clients with a connection pool use each connection more often; a
/// client that disappeared is noticed.
const IDLE_DEADLINE: Duration = Duration::from_secs(600);
/// The longest time that a client may take to read its replies.
const WRITE_DEADLINE: Duration = Duration::from_secs(10);
/// Replies are sent once they reach this size, even if more requests are waiting.
const MAX_REPLY_BYTES: usize = 64 * 1024;
/// The most commands of one connection that wait for Redis at a time.
const MAX_PENDING: usize = 1_000;
const READ_BYTES: usize = 16 * 1024;
/// The pause after a failed accept. A process out of descriptors gets one back soon.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The time for commands in progress when the server stops.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);

/// The state that all connections share.
pub(crate) struct Engine {
    pub(crate) gate: Gate,
    pub(crate) throttles: Arc<Throttles>,
    pub(crate) decisions: Arc<Decisions>,
    /// The tokens that clients authenticate with. `None` if clients need no token.
    pub(crate) tokens: Option<Tokens>,
}

/// Serves connections until `shutdown` resolves, then lets commands in progress finish.
pub(crate) async fn run(
    listener: TcpListener,
    engine: Engine,
    max_connections: u32,
    shutdown: impl Future<Output = ()>,
) {
    static NEXT_ID: AtomicU64 = AtomicU64::new(1);
    let engine = Arc::new(engine);
    let slots = Arc::new(Semaphore::new(max_connections as usize));
    let (serving, stopped) = watch::channel(());
    let mut shutdown = pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shutdown.as_mut() => break,
        };
        let Ok((mut io, _)) = accepted else {
            sleep(ACCEPT_PAUSE).await;
            continue;
        };
        _ = io.set_nodelay(true);
        let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else {
            // The same reply as Redis. The client may have disconnected already.
            tokio::spawn(async move {
                _ = timeout(WRITE_DEADLINE, io.write_all(b"-ERR max number of clients reached\r\n")).await;
            });
            continue;
        };
        let session = Session::new(Arc::clone(&engine), NEXT_ID.fetch_add(1, Ordering::Relaxed));
        let mut stopped = stopped.clone();
        tokio::spawn(async move {
            let stop = async move { _ = stopped.changed().await };
            // Errors of a connection are ignored: the client disconnected.
            _ = converse(io, session, stop).await;
            drop(slot);
        });
    }
    drop(serving);
    drop(listener);
    _ = timeout(DRAIN_DEADLINE, slots.acquire_many(max_connections)).await;
}

/// Executes the commands of one connection until the client closes it, or until `stop` resolves and no command is in
/// progress.
async fn converse<Io>(mut io: Io, mut session: Session, stop: impl Future<Output = ()>) -> io::Result<()>
where
    Io: AsyncRead + AsyncWrite + Unpin,
{
    let mut stop = pin!(stop);
    let mut input: Vec<u8> = Vec::with_capacity(READ_BYTES);
    loop {
        let end = execute(&mut io, &mut session, &mut input).await?;
        if end == End::Close {
            return Ok(());
        }
        if input.capacity() > MAX_REQUEST_BYTES && input.is_empty() {
            input = Vec::with_capacity(READ_BYTES);
        }
        input.reserve(READ_BYTES);
        let read = tokio::select! {
            biased;
            () = stop.as_mut() => return Ok(()),
            read = timeout(IDLE_DEADLINE, io.read_buf(&mut input)) => read,
        };
        match read {
            Ok(Ok(0)) | Err(_) => return Ok(()),
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Err(error),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    More,
    Close,
}

/// A reply, or a future of one.
enum Reply {
    Ready(Vec<u8>),
    Pending(BoxFuture<'static, Vec<u8>>),
}

/// Executes every complete request in `input`, and sends the replies.
async fn execute<Io>(io: &mut Io, session: &mut Session, input: &mut Vec<u8>) -> io::Result<End>
where
    Io: AsyncWrite + Unpin,
{
    let (mut at, mut end) = (0, End::More);
    let mut pending: Vec<Reply> = Vec::new();
    while end == End::More {
        match frame::parse(&input[at..]) {
            Ok(Some((arguments, used))) => {
                at += used;
                match session.execute(&arguments) {
                    Step::Replied => {}
                    Step::Close => end = End::Close,
                    Step::Pending(reply) => {
                        let before = std::mem::take(&mut session.replies.bytes);
                        if !before.is_empty() {
                            pending.push(Reply::Ready(before));
                        }
                        pending.push(Reply::Pending(reply));
                    }
                }
            }
            Ok(None) => break,
            Err(problem) => {
                session.replies.error(&format!("ERR Protocol error: {}", problem.0));
                end = End::Close;
            }
        }
        if session.replies.bytes.len() >= MAX_REPLY_BYTES || pending.len() >= MAX_PENDING {
            send(io, session, &mut pending).await?;
        }
    }
    send(io, session, &mut pending).await?;
    input.drain(..at);
    Ok(end)
}

/// Sends all replies, in order.
async fn send<Io>(io: &mut Io, session: &mut Session, pending: &mut Vec<Reply>) -> io::Result<()>
where
    Io: AsyncWrite + Unpin,
{
    if !pending.is_empty() {
        let replies = std::mem::take(pending).into_iter().map(|reply| async {
            match reply {
                Reply::Ready(bytes) => bytes,
                Reply::Pending(reply) => reply.await,
            }
        });
        let mut bytes = join_all(replies).await.concat();
        bytes.append(&mut session.replies.bytes);
        session.replies.bytes = bytes;
    }
    if session.replies.bytes.is_empty() {
        return Ok(());
    }
    match timeout(WRITE_DEADLINE, io.write_all(&session.replies.bytes)).await {
        Ok(written) => written?,
        Err(_) => return Err(io::ErrorKind::TimedOut.into()),
    }
    session.replies.bytes.clear();
    Ok(())
}
