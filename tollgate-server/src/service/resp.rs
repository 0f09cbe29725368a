//! The Redis protocol: `CL.THROTTLE`, `THROTTLE` and `TOLLGATE.*` for every language that has a Redis client.
//!
//! Commands of a pipeline are executed in order. In memory, each is decided at once. On Redis, they are sent in order
//! and together, so that they share round trips. Replies are sent in the order of the commands.

mod catalogue;
mod command;
mod frame;
mod reply;
mod transaction;

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, join_all};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;
use tollgate_net::listening::Stop;
use tollgate_rules::Gate;
use tollgate_telemetry::decisions::Decisions;

use self::command::{Session, Step};
use self::frame::MAX_REQUEST_BYTES;
use super::connections::{self, Begun, HEAD_DEADLINE, Interrupt, Interrupts, Options, Protocol, Stage, TICK, Usage};
use super::surfaces::{RequestOutcome, Surface, Surfaces};
use super::throttle::Throttles;
use super::tokens::Tokens;

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
/// The most bytes that are read and ignored after the last reply.
const MAX_LINGER_BYTES: u64 = 256 * 1024;
/// Commands of one connection that are executed before others get their turn.
const COMMANDS_PER_TURN: u32 = 512;

/// The state that all connections share.
pub(crate) struct Engine {
    pub(crate) gate: Gate,
    pub(crate) throttles: Arc<Throttles>,
    pub(crate) decisions: Arc<Decisions>,
    /// The tokens that clients authenticate with. `None` if clients need no token.
    pub(crate) tokens: Option<Arc<Tokens>>,
}

/// Serves connections until `shutdown` resolves, then lets commands in progress finish.
pub(crate) async fn run(
    listener: Arc<TcpListener>,
    engine: Engine,
    options: Options,
    shutdown: impl Future<Output = Stop>,
) {
    let protocol = Resp { engine: Arc::new(engine), surfaces: Arc::clone(&options.surfaces) };
    connections::serve_protocol(listener, protocol, options, shutdown).await;
}

/// The Redis protocol.
#[derive(Clone)]
struct Resp {
    engine: Arc<Engine>,
    surfaces: Arc<Surfaces>,
}

impl Protocol for Resp {
    async fn serve<Io>(self, io: Io, begun: Begun, stage: watch::Receiver<Stage>)
    where
        Io: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let session = Session::new(self.engine, NEXT_ID.fetch_add(1, Ordering::Relaxed));
        // Errors of a connection are ignored: the client disconnected.
        _ = converse(io, session, (&self.surfaces, &begun.usage), stage).await;
    }

    /// Sends the same reply as Redis. The client may have disconnected already.
    async fn refuse<Io>(self, mut io: Io, _peer: SocketAddr)
    where
        Io: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let refusal = io.write_all(b"-ERR max number of clients reached\r\n");
        if let Ok(Ok(())) = timeout(connections::REFUSAL_DEADLINE, refusal).await {
            close(io).await;
        }
    }
}

/// Closes a connection whose client may still send. Reads what arrives for a moment, because closing a socket with
/// unread bytes would destroy the last reply.
async fn close<Io: AsyncRead + AsyncWrite + Unpin>(mut io: Io) {
    let closing = async {
        io.shutdown().await?;
        tokio::io::copy(&mut io.take(MAX_LINGER_BYTES), &mut tokio::io::sink()).await
    };
    // The client may have disconnected already.
    _ = timeout(connections::REFUSAL_DEADLINE, closing).await;
}

/// The end of a connection whose input arrived in pieces.
pub(crate) struct Conversation {
    pub(crate) replies: Vec<u8>,
    /// Whether the server closes the connection.
    pub(crate) is_closed: bool,
}

/// Executes the commands of a connection whose input arrives in these pieces. Returns `None` if the store is not in
/// memory, because then there would be something to wait for.
pub(crate) fn execute_pieces<'p>(
    engine: Arc<Engine>,
    pieces: impl IntoIterator<Item = &'p [u8]>,
) -> Option<Conversation> {
    let (mut session, mut input, mut replies) = (Session::new(engine, 1), Vec::new(), Vec::new());
    for piece in pieces {
        input.extend_from_slice(piece);
        let executed = execute(&mut replies, &mut session, &mut input).now_or_never()?.ok()?;
        if executed.end == End::Close {
            return Some(Conversation { replies, is_closed: true });
        }
    }
    Some(Conversation { replies, is_closed: false })
}

/// Parses the requests at the start of `input`, up to the first one that is incomplete or malformed. Returns their
/// words, and whether one is malformed.
pub(crate) fn parse_requests(mut input: &[u8]) -> (Vec<Vec<Vec<u8>>>, bool) {
    let mut requests = Vec::new();
    loop {
        match frame::parse(input) {
            Ok(Some((words, used))) => {
                requests.push(words.iter().map(|word| word.to_vec()).collect());
                input = &input[used..];
            }
            Ok(None) => return (requests, false),
            Err(_) => return (requests, true),
        }
    }
}

/// Executes the commands of one connection until the client closes it, or until the listener ends and no command is in
/// progress.
async fn converse<Io>(
    mut io: Io,
    mut session: Session,
    (surfaces, usage): (&Surfaces, &Usage),
    stage: watch::Receiver<Stage>,
) -> io::Result<()>
where
    Io: AsyncRead + AsyncWrite + Unpin,
{
    let mut wait = Wait {
        interrupts: Interrupts::new(stage),
        idle: Duration::ZERO,
        has_executed: false,
        is_ending: false,
        was_last_read: false,
        has_ticked: false,
    };
    let mut input: Vec<u8> = Vec::with_capacity(READ_BYTES);
    let mut in_turn = 0;
    loop {
        let began = surfaces.now();
        usage.begin();
        let Executed { end, received, commands } = execute(&mut io, &mut session, &mut input).await?;
        if received > 0 {
            usage.end()
        } else {
            usage.cancel()
        }
        let errors = u64::from(std::mem::take(&mut session.replies.errors));
        let unauthenticated = u64::from(std::mem::take(&mut session.replies.unauthenticated));
        let outcomes = [
            (RequestOutcome::Ok, u64::from(commands).saturating_sub(errors)),
            (RequestOutcome::Invalid, errors.saturating_sub(unauthenticated)),
            (RequestOutcome::Unauthenticated, unauthenticated),
        ];
        for counted in outcomes.into_iter().filter(|(_, count)| *count > 0) {
            surfaces.observe_all(Surface::Resp, counted, began);
        }
        if end == End::Close {
            close(io).await;
            return Ok(());
        }
        wait.has_executed |= received > 0;
        if received > 0 {
            wait.idle = Duration::ZERO;
        }
        in_turn += received.max(commands);
        if in_turn >= COMMANDS_PER_TURN {
            in_turn = 0;
            tokio::task::yield_now().await;
        }
        if input.capacity() > MAX_REQUEST_BYTES && input.is_empty() {
            input = Vec::with_capacity(READ_BYTES);
        }
        input.reserve(READ_BYTES);
        if wait.read(&mut io, &mut input).await? == End::Close {
            // The client receives the last replies, and then the end.
            return timeout(connections::REFUSAL_DEADLINE, io.shutdown()).await.unwrap_or(Ok(()));
        }
        if std::mem::take(&mut wait.has_ticked) {
            session.refresh_tokens();
        }
    }
}

/// Waits for requests.
struct Wait {
    interrupts: Interrupts,
    /// The time without a request.
    idle: Duration,
    /// Whether the client has sent a command.
    has_executed: bool,
    /// Whether the connection closes once it is idle.
    is_ending: bool,
    /// Whether the input was read since the end began.
    was_last_read: bool,
    /// Whether a tick has passed since the tokens were looked at.
    has_ticked: bool,
}

impl Wait {
    /// Reads more of the input, unless the connection has to be closed.
    async fn read<Io: AsyncRead + Unpin>(&mut self, io: &mut Io, input: &mut Vec<u8>) -> io::Result<End> {
        let is_between_requests = input.is_empty();
        let deadline = if is_between_requests && self.has_executed { IDLE_DEADLINE } else { HEAD_DEADLINE };
        let mut read = pin!(io.read_buf(input));
        poll_fn(|context| {
            // Before the read: a client that sends all the time would otherwise never notice the end.
            while let Poll::Ready(interrupt) = self.interrupts.poll(context) {
                match interrupt {
                    Interrupt::Stage(Stage::Serving | Stage::Closing) => {}
                    Interrupt::Stage(Stage::Ending) => self.is_ending = true,
                    Interrupt::Stage(Stage::Cut) => return Poll::Ready(Ok(End::Close)),
                    Interrupt::Tick => {
                        self.idle += TICK;
                        self.has_ticked = true;
                    }
                }
            }
            // Requests that have arrived are executed once more at the end.
            let is_done = self.is_ending && is_between_requests && self.was_last_read;
            self.was_last_read = self.is_ending;
            if !is_done && let Poll::Ready(read) = read.as_mut().poll(context) {
                // The time of a request counts from its first byte, however slowly the others follow.
                if is_between_requests {
                    self.idle = Duration::ZERO;
                }
                return Poll::Ready(read.map(|length| if length == 0 { End::Close } else { End::More }));
            }
            let is_over = self.idle >= deadline || (self.is_ending && is_between_requests);
            if is_over { Poll::Ready(Ok(End::Close)) } else { Poll::Pending }
        })
        .await
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

/// What was executed of the input.
struct Executed {
    end: End,
    /// Requests that were received.
    received: u32,
    /// Commands that were executed. A queued command is not, until `EXEC`.
    commands: u32,
}

/// Executes every complete request in `input`, and sends the replies.
async fn execute<Io>(io: &mut Io, session: &mut Session, input: &mut Vec<u8>) -> io::Result<Executed>
where
    Io: AsyncWrite + Unpin,
{
    let (mut at, mut executed) = (0, Executed { end: End::More, received: 0, commands: 0 });
    let mut pending: Vec<Reply> = Vec::new();
    while executed.end == End::More {
        match frame::parse(&input[at..]) {
            Ok(Some((arguments, used))) => {
                let bytes = &input[at..at + used];
                at += used;
                executed.received += 1;
                executed.commands += 1;
                match session.execute(&arguments, bytes) {
                    Step::Queued => executed.commands -= 1,
                    Step::Execute(queued) => {
                        for arguments in queued.iter() {
                            executed.commands += 1;
                            let step = session.execute(&arguments, &[]);
                            follow(step, session, &mut pending, &mut executed.end);
                        }
                    }
                    step => follow(step, session, &mut pending, &mut executed.end),
                }
            }
            Ok(None) => break,
            Err(problem) => {
                session.replies.error(&format!("ERR Protocol error: {}", problem.0));
                executed.end = End::Close;
            }
        }
        if session.replies.bytes.len() >= MAX_REPLY_BYTES || pending.len() >= MAX_PENDING {
            send(io, session, &mut pending).await?;
        }
    }
    send(io, session, &mut pending).await?;
    input.drain(..at);
    Ok(executed)
}

/// Keeps the order of the replies if one is not ready.
fn follow(step: Step, session: &mut Session, pending: &mut Vec<Reply>, end: &mut End) {
    match step {
        Step::Pending(reply) => {
            let before = std::mem::take(&mut session.replies.bytes);
            if !before.is_empty() {
                pending.push(Reply::Ready(before));
            }
            pending.push(Reply::Pending(reply));
        }
        Step::Close => *end = End::Close,
        // Nothing that is queued queues or executes others.
        Step::Replied | Step::Queued | Step::Execute(_) => {}
    }
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
    let written = {
        let mut write = pin!(async {
            io.write_all(&session.replies.bytes).await?;
            // TLS may hold back the last records otherwise.
            io.flush().await
        });
        // The replies nearly always fit into the socket's buffer, and then no deadline is needed.
        match write.as_mut().now_or_never() {
            Some(written) => written,
            None => timeout(WRITE_DEADLINE, write).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())),
        }
    };
    written?;
    session.replies.bytes.clear();
    Ok(())
}
