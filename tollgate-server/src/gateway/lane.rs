//! The lane of plain requests: from a client to an upstream and back in one task, without hyper on either side.
//!
//! Most requests of most gateways are alike: HTTP/1.1, a head that comes in one piece, a small body or none. They need
//! nothing of what makes HTTP hard, so they are carried here: read and written in memory that all connections of a
//! worker share, over connections to upstreams that need no task of their own. A client that is refused over and over
//! costs one read and one write.
//!
//! Deliberately not here: everything else. The first request of a connection that is not plain, in bytes, by its rules
//! or by its route, is hyper's with all that follow, and gets its bytes as they came; what was decided about it already
//! waits for it in the [`Client`]. What is ambiguous is never plain.

mod abandoned;
mod answer;
mod link;
mod passing;
mod refusal;
mod request;
mod scratch;
mod stream;
mod text;

use std::future::poll_fn;
use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Response, Version};
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;
use tollgate::rules::{Certificate, Facts};
use tollgate::{Check, Outcome};

pub(super) use self::link::Link;
use self::passing::{Passed, Passing};
use self::request::{Lines, Plain, Read};
pub(super) use self::scratch::scratch;
use self::scratch::{Desk, INPUT_BYTES, Scratch};
use super::alarm::Alarm;
use super::answer::{Failure, failed};
use super::buffers::HeldBytes;
use super::client::{Client, LINGER};
use super::connection::{HTTP2_BEGINS, Stop};
use super::exchange::{Ending, Worker, bodiless};
use super::io::Stream;
use super::log::Record;
use super::names::HeaderFilter;
use super::site::{Leads, Site};
use super::ticks::{Tick, Wait};

/// A head that comes in more pieces than this is not plain.
const MAX_PIECES: u32 = 16;

/// A connection that rests keeps no larger buffers than this.
const KEPT_BYTES: usize = 2 << 10;

/// A connection in the lane.
struct Lane<'a> {
    stream: Stream,
    client: &'a Arc<Client>,
    worker: &'a Worker,
    /// What every request needs to know of the client, so that nothing of it has to be fetched for a refusal.
    peer: IpAddr,
    certificate: Option<&'a Certificate>,
    max_head: usize,
    idle: Wait,
    /// What has come and is not served yet: a part of a request, or what was sent ahead.
    ahead: Vec<u8>,
    /// Nobody has looked at what was sent ahead.
    is_unseen: bool,
    pieces: u32,
    /// The request under way, for another try.
    held: Vec<u8>,
    /// What is left to be written of an answer.
    unsent: Vec<u8>,
    /// The same, counted.
    unsent_held: HeldBytes,
    /// Nothing of what was written waits in the stream.
    is_flushed: bool,
    /// The client does not read.
    is_blocked: bool,
    /// Something was read since there was nothing to read.
    has_read: bool,
    /// The connection ends with the answer.
    is_last: bool,
    has_served: bool,
    alarm: Alarm,
    deadline: Tick,
    /// How long whatever is waited for may take, when the client reads.
    patience: Wait,
}

/// A connection that has left the lane.
pub(super) struct Left {
    pub(super) stream: Stream,
    /// What was read of it.
    pub(super) first: Bytes,
    pub(super) is_http2: bool,
    /// Nothing was served on it.
    pub(super) is_fresh: bool,
}

/// What was decided about a request before hyper has read it.
pub(super) struct Asked {
    pub(super) site: Arc<Site>,
    pub(super) route: Option<usize>,
    pub(super) asking: Check,
}

/// What comes next on a connection.
enum Next {
    /// A request has its answer, which is on its way.
    Answered,
    /// A store elsewhere is asked about a request.
    Ask(Box<Asked>),
    /// A request is to be forwarded.
    Forward(Box<Passing>),
    /// The rest is hyper's.
    Leave,
    /// Nothing.
    Over,
}

/// Serves the plain requests of a connection. One that is over by then does not come back.
pub(super) async fn serve(
    stream: Stream,
    client: &Arc<Client>,
    worker: &Arc<Worker>,
    stop: &Stop,
) -> io::Result<Option<Left>> {
    let mut lane = Lane::new(stream, client, worker);
    let mut stopped = pin!(stop.idle.notified());
    // A stop that comes later wakes this task, whatever it waits for.
    poll_fn(|context| Poll::Ready(_ = stopped.as_mut().poll(context))).await;
    loop {
        let mut next = poll_fn(|context| lane.poll_next(stop, context)).await?;
        if let Next::Ask(asked) = next {
            next = lane.ruled(asked).await?;
        }
        match next {
            Next::Answered => {}
            Next::Forward(passing) => match lane.forward(passing).await {
                Passed::Answered => {}
                Passed::Over => return Ok(None),
            },
            Next::Leave => {
                let is_http2 = !lane.has_served && lane.ahead.starts_with(HTTP2_BEGINS);
                let first = Bytes::from(std::mem::take(&mut lane.ahead));
                let is_fresh = !lane.has_served;
                return Ok(Some(Left { stream: lane.stream, first, is_http2, is_fresh }));
            }
            Next::Over | Next::Ask(_) => {
                if lane.stream.is_buffered() {
                    // TLS tells its end from a connection that broke.
                    _ = Box::pin(timeout(LINGER, lane.stream.shutdown())).await;
                }
                return Ok(None);
            }
        }
        lane.has_served = true;
        lane.rest();
        if lane.is_last {
            poll_fn(|context| lane.poll_sent(context)).await?;
            return Box::pin(timeout(LINGER, lane.stream.end())).await?.map(|()| None);
        }
    }
}

impl<'a> Lane<'a> {
    fn new(stream: Stream, client: &'a Arc<Client>, worker: &'a Arc<Worker>) -> Self {
        Self {
            stream,
            client,
            worker,
            peer: client.address.ip(),
            certificate: client.certificate.as_ref(),
            max_head: client.max_head,
            idle: client.waits.idle,
            ahead: Vec::new(),
            is_unseen: false,
            pieces: 0,
            held: Vec::new(),
            unsent: Vec::new(),
            unsent_held: HeldBytes::none(client),
            is_flushed: true,
            is_blocked: false,
            has_read: false,
            is_last: false,
            has_served: false,
            alarm: Alarm::new(),
            deadline: worker.ticks.after(client.waits.idle),
            patience: client.waits.idle,
        }
    }

    /// Between two requests.
    fn rest(&mut self) {
        self.expect_within(self.idle);
        self.pieces = 0;
        self.held.clear();
        for buffer in [&mut self.held, &mut self.ahead, &mut self.unsent] {
            buffer.shrink_to(KEPT_BYTES);
        }
        self.is_unseen = !self.ahead.is_empty();
    }

    fn expect_within(&mut self, wait: Wait) {
        self.patience = wait;
        self.deadline = self.worker.ticks.after(wait);
    }

    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.alarm.poll_passed(self.deadline, &self.worker.ticks, context)
    }

    /// The next request, as far as it can be served without waiting.
    fn poll_next(&mut self, stop: &Stop, context: &mut Context<'_>) -> Poll<io::Result<Next>> {
        loop {
            ready!(self.poll_sent(context))?;
            let mut scratch = scratch();
            let before = self.ahead.len();
            scratch.input[..before].copy_from_slice(&self.ahead);
            let mut filled = before;
            if !std::mem::take(&mut self.is_unseen) {
                match self.poll_read(&mut scratch.input[before..], context)? {
                    Poll::Ready(0) => return Poll::Ready(Ok(Next::Over)),
                    Poll::Ready(read) => filled += read,
                    Poll::Pending => {
                        drop(scratch);
                        if before == 0 && stop.is_over() {
                            return Poll::Ready(Ok(Next::Over));
                        }
                        ready!(self.poll_late(context));
                        return Poll::Ready(Ok(Next::Over));
                    }
                }
            }
            self.ahead.clear();
            match self.judge(&mut scratch, filled, context)? {
                Some(Next::Leave) => {
                    self.ahead.extend_from_slice(&scratch.input[..filled]);
                    return Poll::Ready(Ok(Next::Leave));
                }
                Some(next) => return Poll::Ready(Ok(next)),
                None => {
                    self.ahead.extend_from_slice(&scratch.input[..filled]);
                    if self.pieces == 0 {
                        self.deadline = self.worker.ticks.after(self.client.waits.head);
                    }
                    self.pieces += 1;
                    if self.pieces > MAX_PIECES || filled == INPUT_BYTES {
                        return Poll::Ready(Ok(Next::Leave));
                    }
                }
            }
        }
    }

    /// What to do with what has come; nothing, as long as a part of it is missing.
    fn judge(&mut self, scratch: &mut Scratch, filled: usize, context: &mut Context<'_>) -> io::Result<Option<Next>> {
        let Scratch { input, desk, in_force } = scratch;
        let bytes = &input[..filled];
        desk.clean();
        let mut lines = Lines::default();
        let (site, cached) = in_force.load(self.worker);
        let plain = match Plain::read(bytes, &mut lines, self.max_head, &HeaderFilter::new(site, self.peer)) {
            Read::Whole(plain) => plain,
            Read::Part => return Ok(None),
            Read::Other => return Ok(Some(Next::Leave)),
        };
        if plain.body_bytes() > site.max_body {
            return Ok(Some(Next::Leave));
        }
        // As in `Client::sends`.
        let facts = Facts::new(plain.method, plain.target).headers(plain.headers.lines).peer(self.peer);
        let facts = self.certificate.map_or(facts, |certificate| facts.certificate(certificate));
        let route = site.find(&facts);
        let asking = cached.check(&site.tell_route(facts, route));
        if let Check::Ready(outcome) = &asking
            && !outcome.is_allowed()
            && site.log.is_none()
        {
            self.refuse_unlogged(&plain, desk, (site, route), outcome, context)?;
            return Ok(Some(Next::Answered));
        }
        match asking {
            Check::Ready(outcome) => self.act(&plain, desk, (Arc::clone(site), route), outcome, context).map(Some),
            asking @ Check::Pending(_) => {
                self.hold(&plain);
                let site = Arc::clone(site);
                Ok(Some(Next::Ask(Box::new(Asked { site, route, asking }))))
            }
        }
    }

    /// Keeps a copy of the request under way.
    fn hold(&mut self, plain: &Plain<'_>) {
        self.held.clear();
        self.held.extend_from_slice(plain.bytes);
    }

    /// A store elsewhere is asked, and what it says is done.
    async fn ruled(&mut self, asked: Box<Asked>) -> io::Result<Next> {
        let Asked { site, route, asking } = *asked;
        let mut outcome = Some((asking.outcome().await, site));
        poll_fn(|context| {
            let desk = &mut scratch().desk;
            desk.clean();
            let held = std::mem::take(&mut self.held);
            let mut lines = Lines::default();
            let Some((outcome, site)) = outcome.take() else { return Poll::Ready(Ok(Next::Over)) };
            let filter = HeaderFilter::new(&site, self.peer);
            let Read::Whole(plain) = Plain::read(&held, &mut lines, self.max_head, &filter) else {
                return Poll::Ready(Ok(Next::Over));
            };
            let next = self.act(&plain, desk, (Arc::clone(&site), route), outcome, context);
            if let Ok(Next::Leave) = next {
                self.ahead.splice(..0, held.iter().copied());
            }
            Poll::Ready(next)
        })
        .await
    }

    /// Does what was ruled: answers, or sends what the upstream is asked.
    fn act(
        &mut self,
        plain: &Plain<'_>,
        desk: &mut Desk,
        (site, route): (Arc<Site>, Option<usize>),
        mut outcome: Outcome,
        context: &mut Context<'_>,
    ) -> io::Result<Next> {
        if outcome.is_allowed() && !is_plain(&outcome, &site, route) {
            self.client.leave(Asked { site, route, asking: Check::Ready(outcome) });
            return Ok(Next::Leave);
        }
        self.is_last = plain.is_last;
        self.client.request_began();
        self.worker.tally.note_dropped_headers(plain.dropped);
        let mut ending = Ending::new(self.client);
        if let Some(log) = &site.log
            && let Some(uri) = plain.uri()
        {
            let line = (plain.method.parse().unwrap_or_default(), uri, Version::HTTP_11);
            let headers = plain.headers.lines.into();
            ending.keep_record(Record::new(line, headers, self.client, &site.proxies, (log, self.worker.number)));
        }
        if let Some(number) = route {
            ending.enter(site.routes[number].tally(self.worker.number));
        }
        self.worker.tally.note_ruling_after(&mut desk.last_noted, &outcome);
        ending.record_ruling(&outcome);
        ending.keep_permit(outcome.take_permit());
        if !outcome.is_allowed() {
            self.refuse(plain, &outcome, ending, desk, context)?;
            return Ok(Next::Answered);
        }
        let mut response = match route.map(|number| (number, &site.routes[number].leads)) {
            Some((number, Leads::Respond(written))) => {
                let mut response = written.response();
                site.routes[number].response_edits.apply(response.headers_mut());
                response
            }
            Some((number, _)) => {
                let passing = Box::new(Passing::new(plain, (site, number), outcome, ending));
                return Ok(Next::Forward(self.set_out(plain, desk, passing, context)));
            }
            None => failed(Failure::NoRoute),
        };
        outcome.write_headers(response.headers_mut());
        let response = if plain.is_head() { bodiless(response) } else { response };
        self.answer(&response, ending, desk, context)?;
        Ok(Next::Answered)
    }

    /// Answers with what was written here.
    fn answer(
        &mut self,
        response: &Response<Bytes>,
        mut ending: Ending,
        desk: &mut Desk,
        context: &mut Context<'_>,
    ) -> io::Result<()> {
        self.is_last |= self.worker.is_closing();
        ending.note_status(response.status());
        ending.note_sent(response.body().len());
        desk.out.clear();
        text::put_answer(&mut desk.out, response, desk.date.line(self.worker.ticks.now()), self.is_last);
        self.put(&desk.out, &[], context)
    }
}

/// Whether an admitted request needs nothing that only hyper's way has: no turn in a queue to wait for, no limit that
/// hears the answer, no upstream that speaks TLS or HTTP/2.
fn is_plain(outcome: &Outcome, site: &Site, route: Option<usize>) -> bool {
    let is_plain_route = route.is_none_or(|number| match &site.routes[number].leads {
        Leads::Upstreams(_) => site.routes[number].is_plain(),
        Leads::Respond(_) => true,
        Leads::Echo => false,
    });
    is_plain_route && outcome.delay().is_zero() && !outcome.awaits_response()
}
