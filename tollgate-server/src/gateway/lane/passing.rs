//! A plain request at its upstreams, and the answer on its way back.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::HeaderValue;
use smallvec::SmallVec;
use tokio::time::timeout;
use tollgate::Outcome;
use tollgate::rules::file::internal::UpstreamHeader;

use super::super::abandoned::is_event_stream;
use super::super::answer::{self, Failure};
use super::super::body::Came;
use super::super::client::Client;
use super::super::connect::{self, ConnectError, Dialled};
use super::super::exchange::{Ending, Held, Worker, would_fail_again};
use super::super::fault::Fault;
use super::super::headers::X_REQUEST_ID;
use super::super::names::{HeaderFilter, Kind};
use super::super::reuse::{Repeatable, Usage};
use super::super::site::{Route, Site};
use super::super::target::Target;
use super::answer::{BadBody, Body, Head, Read};
use super::link::Link;
use super::request::{self, Lines, Plain, Seen};
use super::scratch::{Desk, Scratch, scratch};
use super::{Lane, text};

/// A body that is no longer than this is written in one piece with its head: the kernel takes one piece for less than
/// two.
const SMALL_BYTES: usize = 4096;

/// A request that may pass.
pub(super) struct Passing {
    site: Arc<Site>,
    route: usize,
    outcome: Outcome,
    pub(super) ending: Ending,
    id: Option<HeaderValue>,
    tried: SmallVec<[usize; 4]>,
    /// The upstream that it is at, and the connection that it was sent on.
    target: Option<Arc<Target>>,
    link: Option<Box<Link>>,
    /// The rest of an answer that has begun, and whether its connection stays open. Kept here and not in the task, where
    /// it would take its room for as long as the client is connected.
    begun: Option<(Body, bool)>,
    /// It cannot be asked of any upstream.
    failed: Option<Failure>,
    pub(super) is_head: bool,
    may_repeat: bool,
    has_odd_body: bool,
}

/// What came of it.
pub(super) enum Passed {
    Answered,
    /// The connection cannot go on.
    Over,
}

/// Why a try ended without a whole answer.
enum Stopped {
    Failed {
        fault: Fault,
        /// The upstream may be asked again.
        again: bool,
    },
    /// The client has gone.
    Gone,
    /// The connection cannot go on: the client has a part of an answer that has no end.
    Over,
}

impl Stopped {
    fn failed(failure: Failure) -> Self {
        Self::Failed { fault: failure.into(), again: false }
    }
}

impl Passing {
    pub(super) fn new(plain: &Plain<'_>, (site, route): (Arc<Site>, usize), outcome: Outcome, ending: Ending) -> Self {
        Self {
            site,
            route,
            outcome,
            ending,
            id: None,
            tried: SmallVec::new(),
            target: None,
            link: None,
            begun: None,
            failed: None,
            is_head: plain.is_head(),
            may_repeat: plain.may_repeat(),
            has_odd_body: plain.has_odd_body(),
        }
    }

    fn route(&self) -> &Route {
        &self.site.routes[self.route]
    }
}

impl Lane<'_> {
    /// Sends a request at once, if a connection is there for it.
    pub(super) fn set_out(
        &mut self,
        plain: &Plain<'_>,
        desk: &mut Desk,
        mut passing: Box<Passing>,
        context: &mut Context<'_>,
    ) -> Box<Passing> {
        self.hold(plain);
        self.choose(&mut passing);
        if let Err(failure) = self.write_request(plain, desk, &mut passing) {
            passing.failed = Some(failure);
            return passing;
        }
        let link = passing.target.as_ref().and_then(|target| self.take_link(target, &passing));
        if let Some(mut link) = link
            && link.send(&desk.out, context).is_ok()
        {
            passing.link = Some(link);
        }
        passing
    }

    /// The upstream that is asked next.
    fn choose(&self, passing: &mut Passing) {
        let route = &passing.site.routes[passing.route];
        let chosen = route.choose(&passing.tried, self.worker.ticks.now());
        passing.target = chosen.map(|(number, upstream)| {
            let target = &upstream.target;
            passing.tried.push(number);
            passing.ending.note_upstream(target);
            target.begin();
            let (target, worker) = (Arc::clone(target), self.worker.number);
            passing.ending.hold(Held::new(&target, route, worker));
            target
        });
    }

    fn take_link(&self, target: &Target, passing: &Passing) -> Option<Box<Link>> {
        let repeatable = if passing.may_repeat { Repeatable::Yes } else { Repeatable::No };
        target.take_link(self.worker.number, self.worker.ticks.now(), &passing.route().reuse, repeatable)
    }

    fn write_request(&self, plain: &Plain<'_>, desk: &mut Desk, passing: &mut Passing) -> Result<(), Failure> {
        let route = passing.route();
        let upstream = passing.tried.last().and_then(|number| route.upstream(*number)).ok_or(Failure::NoRoute)?;
        let way = (&*passing.site, route);
        let id = plain.write(&mut desk.out, way, upstream, (self.client, self.worker), passing.id.clone())?;
        passing.ending.note_id(id.as_ref());
        passing.id = id;
        Ok(())
    }

    /// Carries a request to its upstreams until one has answered, and the answer to the client.
    pub(super) async fn forward(&mut self, mut passing: Box<Passing>) -> Passed {
        let fault = loop {
            if let Some(failure) = passing.failed {
                break failure.into();
            }
            let Some(target) = passing.target.clone() else { break Failure::NoRoute.into() };
            let (fault, again) = match self.ask(&target, &mut passing).await {
                Ok(()) => return Passed::Answered,
                Err(Stopped::Gone | Stopped::Over) => return Passed::Over,
                Err(Stopped::Failed { fault, again }) => (fault, again),
            };
            let (failure, route) = (fault.failure(), passing.route());
            if failure.is_upstreams() || failure.is_gateways() {
                target.failed(&fault, &route.eject, self.worker.ticks.now());
            }
            if !again || passing.tried.len() > usize::from(route.retries) || would_fail_again(failure, route) {
                break fault;
            }
            let tally = route.tally(self.worker.number);
            tally.note_failure(failure);
            tally.note_retry();
            self.choose(&mut passing);
        };
        let failure = fault.failure();
        passing.route().tally(self.worker.number).note_failure(failure);
        passing.ending.note_fault(&fault);
        let mut passing = Some(passing);
        let answered = poll_fn(|context| {
            let answered = passing.take().map(|passing| self.fail(failure, passing, context));
            Poll::Ready(answered.is_some_and(|answered| answered.is_ok()))
        });
        if answered.await { Passed::Answered } else { Passed::Over }
    }

    fn fail(&mut self, failure: Failure, passing: Box<Passing>, context: &mut Context<'_>) -> std::io::Result<()> {
        let mut response = answer::failed(failure);
        let map = response.headers_mut();
        passing.route().response_edits.apply(map);
        if let Some(id) = &passing.id {
            map.insert(X_REQUEST_ID, id.clone());
        }
        passing.outcome.write_headers(map);
        let response = if passing.is_head { super::bodiless(response) } else { response };
        self.answer(&response, passing.ending, &mut scratch().desk, context)
    }

    /// Asks one upstream.
    async fn ask(&mut self, target: &Arc<Target>, passing: &mut Passing) -> Result<(), Stopped> {
        let mut link = match passing.link.take() {
            Some(link) => link,
            None => Box::pin(self.reach(target, passing)).await?,
        };
        if passing.has_odd_body {
            link.usage.end();
        }
        self.expect_within(passing.route().timeout);
        let carried = poll_fn(|context| self.poll_carry(target, &mut link, passing, context)).await;
        let begun = passing.begun.take();
        if let Err(Stopped::Gone) = carried {
            self.abandon(link, begun, passing);
            return carried;
        }
        carried?;
        passing.ending.upstream_came(Came::All);
        if let Some((_, true)) = begun {
            target.keep_link(self.worker.number, link, self.worker.ticks.now(), &passing.route().reuse);
        }
        Ok(())
    }

    /// Sends a request on another connection, or on a new one.
    async fn reach(&mut self, target: &Arc<Target>, passing: &mut Passing) -> Result<Box<Link>, Stopped> {
        let mut link = match self.take_link(target, passing) {
            Some(link) => link,
            None => {
                let dialled = dial(target, passing, (self.worker, self.client));
                Box::new(self.unless_gone(dialled).await.ok_or(Stopped::Gone)??)
            }
        };
        poll_fn(|context| Poll::Ready(self.send_again(&mut link, passing, context))).await?;
        Ok(link)
    }

    /// Sends a request that was read before.
    fn send_again(&mut self, link: &mut Link, passing: &mut Passing, context: &mut Context<'_>) -> Result<(), Stopped> {
        let desk = &mut scratch().desk;
        desk.clean();
        let mut lines = Lines::default();
        let site = Arc::clone(&passing.site);
        let filter = HeaderFilter::new(&site, self.peer);
        let request::Read::Whole(plain) = Plain::read(&self.held, &mut lines, self.max_head, &filter) else {
            return Err(Stopped::Over);
        };
        self.write_request(&plain, desk, passing).map_err(Stopped::failed)?;
        let not_sent = |_| Stopped::Failed { fault: Failure::Disconnected.into(), again: true };
        link.send(&desk.out, context).map_err(not_sent)
    }

    /// Ready when the client has all of the answer.
    fn poll_carry(
        &mut self,
        target: &Target,
        link: &mut Link,
        passing: &mut Passing,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Stopped>> {
        if passing.begun.is_none() {
            ready!(self.poll_answer(target, link, passing, context))?;
        }
        self.poll_body(link, passing, context)
    }

    /// Ready when the client has the head of the answer, and what came of its body with it.
    fn poll_answer(
        &mut self,
        target: &Target,
        link: &mut Link,
        passing: &mut Passing,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Stopped>> {
        // A new connection to the only upstream has no excuse: what was asked may be what ended it.
        let may_repeat = passing.may_repeat && (link.usage.is_used() || passing.route().has_several());
        let broken =
            |came: usize| Stopped::Failed { fault: Failure::Disconnected.into(), again: came == 0 && may_repeat };
        // An upstream may answer before it has read everything; what it says is looked at in any case.
        let sent = link.poll_send(context);
        let mut scratch = scratch();
        let Scratch { input, desk, .. } = &mut *scratch;
        loop {
            let before = link.came.len();
            input[..before].copy_from_slice(&link.came);
            let read = match link.poll_read(&mut input[before..], context) {
                Poll::Ready(Ok(0) | Err(_)) => return Poll::Ready(Err(broken(before))),
                Poll::Ready(Ok(read)) => read,
                Poll::Pending => break,
            };
            let bytes = &input[..before + read];
            let mut lines = Lines::default();
            match Head::read(bytes, &mut lines, passing.is_head) {
                Read::Whole(head) => {
                    if passing.route().eject.counts(head.status) {
                        let fault = Fault::Status(head.status);
                        target.failed(&fault, &passing.route().eject, self.worker.ticks.now());
                    }
                    link.usage.note_keep_alive(head.keep_alive(lines.seen()));
                    let begun = self.begin_answer((head, lines.seen()), bytes, desk, passing, context);
                    link.came = Vec::new();
                    return Poll::Ready(begun);
                }
                Read::Part if bytes.len() < input.len() => {
                    link.came.clear();
                    link.came.extend_from_slice(&input[..before + read]);
                }
                Read::Part | Read::TooMany => return Poll::Ready(Err(Stopped::failed(Failure::LongAnswerHead))),
                Read::Bad => return Poll::Ready(Err(Stopped::failed(Failure::BadAnswer))),
            }
        }
        if let Poll::Ready(Err(_)) = sent {
            return Poll::Ready(Err(broken(link.came.len())));
        }
        if self.has_gone(input, context) {
            return Poll::Ready(Err(Stopped::Gone));
        }
        drop(scratch);
        ready!(self.poll_late(context));
        Poll::Ready(Err(Stopped::failed(Failure::UpstreamTimeout)))
    }

    /// Writes the head of an answer, and what has come of its body.
    fn begin_answer(
        &mut self,
        (mut head, lines): (Head<'_>, Seen<'_>),
        bytes: &[u8],
        desk: &mut Desk,
        passing: &mut Passing,
        context: &mut Context<'_>,
    ) -> Result<(), Stopped> {
        let Desk { out, date, .. } = desk;
        self.is_last |= self.worker.is_closing();
        out.clear();
        let told = (&passing.outcome, passing.id.as_ref(), passing.site.tells(UpstreamHeader::Via));
        let date = date.line(self.worker.ticks.now());
        head.write(out, lines, &passing.route().response_edits, told, date);
        if self.is_last {
            out.extend_from_slice(text::CLOSE);
        }
        out.extend_from_slice(b"\r\n");
        passing.ending.note_status(head.status);
        if passing.ending.has_place() && lines.values(Kind::ContentType).any(is_event_stream) {
            passing.ending.note_endless();
        }
        let rest = &bytes[head.bytes..];
        let (taken, content) = head.body.take(rest, out).map_err(|_bad| Stopped::failed(Failure::BadAnswer))?;
        passing.ending.note_sent(content);
        let put = match &head.body {
            Body::Length(_) if taken > SMALL_BYTES => self.put(out, &rest[..taken], context),
            Body::Length(_) => {
                out.extend_from_slice(&rest[..taken]);
                self.put(out, &[], context)
            }
            _ => self.put(out, &[], context),
        };
        passing.begun = Some((head.body, head.stays_open && taken == rest.len()));
        put.map_err(|_gone| Stopped::Gone)
    }

    /// Ready when the client has the rest of an answer that has begun.
    fn poll_body(
        &mut self,
        link: &mut Link,
        passing: &mut Passing,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Stopped>> {
        let Passing { site, route, ending, begun, .. } = passing;
        let Some((body, stays_open)) = begun else { return Poll::Ready(Err(Stopped::Over)) };
        loop {
            if ready!(self.poll_sent(context)).is_err() {
                return Poll::Ready(Err(Stopped::Gone));
            }
            // Some upstreams answer before they have read everything.
            let sent = link.poll_send(context);
            if body.is_over() {
                *stays_open &= matches!(sent, Poll::Ready(Ok(())));
                return Poll::Ready(Ok(()));
            }
            let mut scratch = scratch();
            let Scratch { input, desk, .. } = &mut *scratch;
            let read = match link.poll_read(input, context) {
                Poll::Ready(read) => read,
                Poll::Pending => {
                    if self.has_gone(input, context) {
                        return Poll::Ready(Err(Stopped::Gone));
                    }
                    drop(scratch);
                    ready!(self.poll_late(context));
                    ending.upstream_broke(&Fault::Stalled);
                    return Poll::Ready(Err(Stopped::Over));
                }
            };
            self.expect_within(site.routes[*route].timeout);
            desk.out.clear();
            let took = match read {
                Ok(0) => body.end(&mut desk.out).map(|()| (0, 0)),
                Ok(read) => {
                    body.take(&input[..read], &mut desk.out).inspect(|(taken, _)| *stays_open &= *taken == read)
                }
                Err(_) => Err(BadBody),
            };
            let Ok((taken, content)) = took else {
                ending.upstream_broke(&Failure::Disconnected.into());
                return Poll::Ready(Err(Stopped::Over));
            };
            ending.note_sent(content);
            let put = match body {
                Body::Length(_) => self.put(&input[..taken], &[], context),
                _ => self.put(&desk.out, &[], context),
            };
            if put.is_err() {
                return Poll::Ready(Err(Stopped::Gone));
            }
        }
    }
}

async fn dial(target: &Target, passing: &Passing, (worker, client): (&Worker, &Client)) -> Result<Link, Stopped> {
    let failed = |fault| Stopped::Failed { fault, again: true };
    let now = worker.ticks.now();
    let dialled = async {
        let slot = worker.take_upstream_slot(client).await?;
        connect::dial(target, now, slot).await
    };
    let (io, ip) = match timeout(passing.route().connect_timeout, dialled).await {
        Ok(Ok(Dialled::Http1(io, ip))) => (io, ip),
        Ok(Ok(Dialled::Http2(..))) => return Err(failed(Failure::CannotConnect.into())),
        Ok(Err(error)) => return Err(failed(error.into())),
        Err(_elapsed) => return Err(failed(ConnectError::Timeout.into())),
    };
    let plain = io.into_plain().ok_or_else(|| failed(Failure::CannotConnect.into()))?;
    Ok(Link::new(plain, Usage::new(now, target.origin(ip))))
}
