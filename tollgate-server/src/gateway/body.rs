//! Bodies on their way through: nothing of them is kept, and each side goes as fast as the other.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::StatusCode;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::{Sleep, sleep};
use tollgate::rules::file::internal::UnderscoreHeaders;

use super::answer::Failure;
use super::buffers::{HeldBytes, Overloaded, STEP_BYTES};
use super::client::Client;
use super::exchange::Ending;
use super::headers;
use super::patience::Patience;
use super::ticks::Wait;

/// What a client sends, as an upstream gets it.
pub(super) enum ToUpstream {
    Nothing,
    /// In a box: a connection to an upstream allocates room for 32 requests at once.
    Sent(Box<Sent>),
}

/// A body that a client sends.
pub(super) struct Sent {
    body: Incoming,
    client: Arc<Client>,
    /// How much more of it is taken.
    room: u64,
    underscores: UnderscoreHeaders,
    /// What is held of it while the upstream does not read.
    held: HeldBytes,
    /// The most that can be.
    most_held: usize,
    upstream: Option<Reader>,
    /// When it is late, on a connection that others share.
    late: Option<Pin<Box<Sleep>>>,
}

/// Whoever reads a body. While the client does not send, nothing is expected of the upstream.
struct Reader {
    patience: Arc<Patience>,
    timeout: Wait,
}

/// Why a body ended before its end.
#[derive(Debug)]
pub(super) enum Broken {
    Client(hyper::Error),
    TooLong,
    Late,
    Overloaded,
}

impl fmt::Display for Broken {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Client(error) => error.fmt(out),
            Self::TooLong => out.write_str("the body is too long"),
            Self::Late => out.write_str("the body did not come in time"),
            Self::Overloaded => out.write_str("more of bodies is held than max_buffered"),
        }
    }
}

impl std::error::Error for Broken {}

impl ToUpstream {
    pub(super) fn new(body: Incoming, client: &Arc<Client>, max_bytes: u64) -> Self {
        if body.is_end_stream() {
            return Self::Nothing;
        }
        Self::Sent(Box::new(Sent {
            most_held: client.upload_bytes(&body),
            body,
            client: Arc::clone(client),
            room: max_bytes,
            underscores: UnderscoreHeaders::default(),
            held: HeldBytes::none(client),
            upstream: None,
            late: None,
        }))
    }

    /// Takes over what was held of it before.
    pub(super) fn holding(mut self, held: Option<HeldBytes>) -> Self {
        if let (Self::Sent(sent), Some(held)) = (&mut self, held) {
            sent.held = held;
        }
        self
    }

    /// Treats trailers with an underscore in their name as that setting says.
    pub(super) fn with_underscores(mut self, underscores: UnderscoreHeaders) -> Self {
        if let Self::Sent(sent) = &mut self {
            sent.underscores = underscores;
        }
        self
    }

    /// An upstream is about to be asked, and has to answer within that time; the time in which the client does not send
    /// is not the upstream's.
    pub(super) fn read_by(&mut self, patience: &Arc<Patience>, timeout: Wait) {
        patience.begin(timeout);
        if let Self::Sent(sent) = self {
            sent.upstream = Some(Reader { patience: Arc::clone(patience), timeout });
        }
    }

    pub(super) fn is_nothing(&self) -> bool {
        matches!(self, Self::Nothing)
    }
}

impl Body for ToUpstream {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let Self::Sent(sent) = &mut *self else {
            return Poll::Ready(None);
        };
        match Pin::new(&mut sent.body).poll_frame(context) {
            Poll::Pending => {
                // Whatever has come has been read.
                sent.held.release();
                if let Some(reader) = &sent.upstream {
                    reader.patience.forgive();
                }
                let Some(wait) = sent.client.body_awaited() else { return Poll::Pending };
                let late = sent.late.get_or_insert_with(|| Box::pin(sleep(wait)));
                ready!(late.as_mut().poll(context));
                sent.broke(Broken::Late)
            }
            Poll::Ready(frame) => {
                sent.client.body_came();
                sent.late = None;
                if let Some(reader) = &sent.upstream {
                    reader.patience.expect(reader.timeout);
                }
                let Some(frame) = frame else { return Poll::Ready(None) };
                let frame = match frame {
                    Ok(frame) => frame,
                    Err(error) => return sent.broke(Broken::Client(error)),
                };
                let length = frame.data_ref().map_or(0, Bytes::len) as u64;
                match sent.room.checked_sub(length) {
                    Some(room) => sent.room = room,
                    None => return sent.broke(Broken::TooLong),
                }
                // While the upstream has this to read, more may come.
                if sent.held.set(sent.most_held).is_err() {
                    return sent.broke(Broken::Overloaded);
                }
                Poll::Ready(Some(Ok(match frame.into_trailers() {
                    Ok(trailers) => Frame::trailers(headers::screen_trailers(trailers, sent.underscores)),
                    Err(data) => data,
                })))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Nothing => true,
            Self::Sent(sent) => sent.body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Nothing => SizeHint::with_exact(0),
            Self::Sent(sent) => sent.body.size_hint(),
        }
    }
}

impl Sent {
    fn broke(&mut self, how: Broken) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        if let Some(reader) = &self.upstream {
            reader.patience.expect(reader.timeout);
            reader.patience.body_broke(match how {
                Broken::Client(_) => Failure::BodyBroken,
                Broken::TooLong => Failure::BodyTooLong,
                Broken::Late => Failure::BodyLate,
                Broken::Overloaded => Failure::Overloaded,
            });
        }
        Poll::Ready(Some(Err(how)))
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.client.body_came();
    }
}

/// What a client is answered.
pub(super) struct ToClient {
    kind: Kind,
    /// What is there and not given to the client yet.
    rest: Bytes,
    /// What is held of it while the client does not read.
    held: Option<HeldBytes>,
    /// When an upstream that others share the connection of is given up; those that do not share it have a driver for
    /// that.
    stall: Option<Pin<Box<Sleep>>>,
    /// What is done when the answer is over.
    ending: Ending,
}

enum Kind {
    Written,
    Upstream(Incoming),
}

impl ToClient {
    pub(super) fn written(text: Bytes, ending: Ending) -> Self {
        Self { kind: Kind::Written, rest: text, held: None, stall: None, ending }
    }

    pub(super) fn upstream(body: Incoming, ending: Ending) -> Self {
        Self { kind: Kind::Upstream(body), rest: Bytes::new(), held: None, stall: None, ending }
    }

    /// Takes away what was written here, for an answer that has no body: how long it was, if there was any.
    pub(super) fn take_written(&mut self) -> Option<usize> {
        let is_written = matches!(self.kind, Kind::Written) && !self.rest.is_empty();
        is_written.then(|| std::mem::take(&mut self.rest).len())
    }

    /// The head of the answer is about to leave.
    pub(super) fn answers_with(&mut self, status: StatusCode) {
        self.ending.note_status(status);
    }
}

impl ToClient {
    /// Counts what is held of the answer: what is not given yet, and what waits to be written to the client.
    fn hold(&mut self) -> Result<(), Cut> {
        let bytes = self.rest.len() + self.ending.unwritten_bytes();
        if matches!(self.kind, Kind::Written) || self.held.is_none() && bytes < STEP_BYTES {
            return Ok(());
        }
        let held = self.held.get_or_insert_with(|| self.ending.held_bytes());
        held.set(bytes).map_err(|Overloaded| {
            self.ending.note_cut();
            Cut::Overloaded
        })
    }
}

impl Body for ToClient {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        let this = &mut *self;
        if !this.rest.is_empty() {
            let piece = this.ending.give(&mut this.rest);
            return Poll::Ready(Some(this.hold().map(|()| Frame::data(piece))));
        }
        match &mut this.kind {
            Kind::Written => Poll::Ready(None),
            Kind::Upstream(body) => match Pin::new(body).poll_frame(context) {
                Poll::Pending => {
                    this.ending.upstream_awaited();
                    let Some(timeout) = this.ending.shared_timeout() else { return Poll::Pending };
                    let stall = this.stall.get_or_insert_with(|| Box::pin(sleep(timeout)));
                    ready!(stall.as_mut().poll(context));
                    this.ending.upstream_came(Came::TooLate);
                    Poll::Ready(Some(Err(Cut::Late)))
                }
                Poll::Ready(frame) => {
                    this.stall = None;
                    this.ending.upstream_came(match &frame {
                        None => Came::All,
                        Some(Ok(_)) => Came::Bytes,
                        Some(Err(_)) => Came::Error,
                    });
                    Poll::Ready(frame.map(|frame| match frame.map_err(Cut::Upstream)?.into_data() {
                        Ok(data) => {
                            this.rest = data;
                            let piece = this.ending.give(&mut this.rest);
                            this.hold().map(|()| Frame::data(piece))
                        }
                        Err(trailers) => Ok(trailers),
                    }))
                }
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
            && match &self.kind {
                Kind::Written => true,
                Kind::Upstream(body) => body.is_end_stream(),
            }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Written => SizeHint::with_exact(self.rest.len() as u64),
            // Asked for before anything is given.
            Kind::Upstream(body) => body.size_hint(),
        }
    }
}

impl Drop for ToClient {
    fn drop(&mut self) {
        if self.rest.is_empty() && self.ending.is_upstream_done() {
            self.ending.note_complete();
        } else if self.is_end_stream() {
            self.ending.note_complete();
            self.ending.upstream_came(Came::All);
        } else if let Kind::Upstream(body) = std::mem::replace(&mut self.kind, Kind::Written)
            && let Some(abandoned) = self.ending.abandon()
        {
            abandoned.discard(body);
        }
    }
}

/// Why an answer ended before its end.
#[derive(Debug)]
pub(super) enum Cut {
    Upstream(hyper::Error),
    Late,
    Overloaded,
}

impl fmt::Display for Cut {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Upstream(error) => error.fmt(out),
            Self::Late => out.write_str("the upstream did not go on"),
            Self::Overloaded => out.write_str("more of bodies is held than max_buffered"),
        }
    }
}

impl std::error::Error for Cut {}

/// What came of an upstream's body.
pub(super) enum Came {
    Bytes,
    All,
    /// Nothing, in all the time that it may take.
    TooLate,
    Error,
}
