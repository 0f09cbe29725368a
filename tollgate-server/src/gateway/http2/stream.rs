//! Streams of HTTP/2, of clients and of upstreams: bodies that arrive, bodies that leave, and keep-alive pings.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use h2::{Ping, PingPong, Reason, RecvStream, SendStream};
use http::HeaderMap;
use http::header::CONTENT_LENGTH;
use hyper::body::{Body, Frame};
use tollgate_net::deadline::{Tick, Wait};

use crate::gateway::client::Client;
use crate::gateway::failure::Failure;
use crate::gateway::head::headers;

/// A body that arrives on a stream.
pub(in crate::gateway) struct StreamBody {
    stream: RecvStream,
    /// Whether only trailers can follow.
    is_data_over: bool,
    /// The number of bytes left, if the head announces the length.
    bytes_left: Option<u64>,
    /// Data that was taken from h2 before it can be passed on.
    ahead: VecDeque<Bytes>,
    /// Small frames behind it, joined.
    joined: BytesMut,
    /// The error behind that.
    error: Option<h2::Error>,
}

/// The length of frames that are joined while they wait. h2 needs about 280 bytes for each frame, whatever its length.
const SMALL_BYTES: usize = 1024;

/// The length up to which frames are joined: the default frame size. The sender may send more once a part is passed on.
const MAX_JOINED_BYTES: usize = 16 << 10;

/// The most of a connection's window that a stream claims while it waits: a frame of the default size.
const MAX_CLAIM_BYTES: usize = 16 << 10;

impl StreamBody {
    pub(in crate::gateway) fn new(stream: RecvStream, headers: &HeaderMap) -> Self {
        let mut lengths = headers.get_all(CONTENT_LENGTH).iter().map(|value| headers::length(value.as_bytes()));
        let first = lengths.next().flatten();
        let bytes_left = first.filter(|_| lengths.all(|length| length == first));
        let (ahead, joined) = (VecDeque::new(), BytesMut::new());
        Self { stream, is_data_over: false, bytes_left, ahead, joined, error: None }
    }

    /// Takes data from h2 before it can be forwarded, and joins small frames, because h2 needs about 280 bytes for each.
    /// The window is not released, so the sender sends no more.
    pub(in crate::gateway) fn poll_ahead(&mut self, context: &mut Context<'_>) {
        while !self.is_data_over && self.error.is_none() {
            match self.stream.poll_data(context) {
                Poll::Pending => return,
                Poll::Ready(None) => self.is_data_over = true,
                Poll::Ready(Some(Err(error))) => self.error = Some(error),
                Poll::Ready(Some(Ok(data))) => self.queue(data),
            }
        }
    }

    /// Puts data behind what waits already.
    fn queue(&mut self, data: Bytes) {
        if data.len() < SMALL_BYTES {
            self.joined.extend_from_slice(&data);
            if self.joined.len() >= MAX_JOINED_BYTES {
                self.end_joined();
            }
        } else {
            self.end_joined();
            self.ahead.push_back(data);
        }
    }

    fn end_joined(&mut self) {
        if !self.joined.is_empty() {
            self.ahead.push_back(std::mem::take(&mut self.joined).freeze());
        }
    }

    /// Joins a small frame with the small frames behind it that have arrived: the next hop may refuse many of them.
    fn join_next(&mut self, first: Bytes, context: &mut Context<'_>) -> Bytes {
        match self.stream.poll_data(context) {
            Poll::Pending => first,
            Poll::Ready(None) => {
                self.is_data_over = true;
                first
            }
            Poll::Ready(Some(Err(error))) => {
                self.error = Some(error);
                first
            }
            Poll::Ready(Some(Ok(second))) => {
                self.queue(first.clone());
                self.queue(second);
                self.poll_ahead(context);
                self.end_joined();
                self.ahead.pop_front().unwrap_or(first)
            }
        }
    }

    /// Returns data for the reader, and lets the sender send more for it.
    fn pass(&mut self, data: Bytes) -> Frame<Bytes> {
        // It fails only if more is released than has arrived.
        _ = self.stream.flow_control().release_capacity(data.len());
        self.bytes_left = self.bytes_left.map(|left| left.saturating_sub(data.len() as u64));
        Frame::data(data)
    }

    pub(in crate::gateway) fn poll_frame(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        self.end_joined();
        if let Some(data) = self.ahead.pop_front() {
            return Poll::Ready(Some(Ok(self.pass(data))));
        }
        if let Some(error) = self.error.take() {
            return Poll::Ready(Some(Err(error)));
        }
        if !self.is_data_over {
            match ready!(self.stream.poll_data(context)) {
                Some(Ok(data)) if data.len() < SMALL_BYTES && !self.stream.is_end_stream() => {
                    let data = self.join_next(data, context);
                    return Poll::Ready(Some(Ok(self.pass(data))));
                }
                Some(Ok(data)) => return Poll::Ready(Some(Ok(self.pass(data)))),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => self.is_data_over = true,
            }
        }
        let trailers = ready!(self.stream.poll_trailers(context)).transpose();
        Poll::Ready(trailers.map(|trailers| trailers.map(Frame::trailers)))
    }

    /// Returns whether nothing is left to read.
    pub(in crate::gateway) fn is_empty(&self) -> bool {
        self.ahead.is_empty() && self.joined.is_empty() && self.error.is_none() && self.stream.is_end_stream()
    }

    /// Returns the number of bytes left, if it is known.
    pub(in crate::gateway) fn bytes_left(&self) -> Option<u64> {
        self.bytes_left.or_else(|| self.is_empty().then_some(0))
    }
}

/// Sends a body on a stream.
pub(in crate::gateway) struct BodySender {
    stream: SendStream<Bytes>,
    /// The next part, and whether it is the last one, while the peer does not read.
    next: Option<(Bytes, bool)>,
}

/// A body was not sent to its end: it breaks off, or the peer does not want it or has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gateway) struct Unsent;

impl From<h2::Error> for Unsent {
    fn from(_: h2::Error) -> Self {
        Self
    }
}

impl BodySender {
    pub(in crate::gateway) fn new(stream: SendStream<Bytes>) -> Self {
        Self { stream, next: None }
    }

    /// Resets the stream. The peer gets no end of the body.
    pub(in crate::gateway) fn reset(&mut self, reason: Reason) {
        self.stream.send_reset(reason);
    }

    /// Returns whether the peer has to read before more of the body is sent.
    pub(in crate::gateway) fn awaits_peer(&self) -> bool {
        self.next.is_some()
    }

    /// Sends the body as far as the peer reads. Returns ready once everything was passed on.
    pub(in crate::gateway) fn poll_send(
        &mut self,
        body: &mut (impl Body<Data = Bytes, Error = Failure> + Unpin),
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Unsent>> {
        loop {
            // Whatever the body waits for, the task is woken if the peer resets the stream.
            if self.stream.poll_reset(context)?.is_ready() {
                return Poll::Ready(Err(Unsent));
            }
            if self.next.is_some() {
                ready!(self.poll_room(context))?;
            }
            if let Some((mut data, is_last)) = self.next.take() {
                self.stream.reserve_capacity(data.len());
                let room = self.stream.capacity();
                if room < data.len() {
                    // The rest waits here, where it has a deadline, until the peer has read what is before it.
                    self.stream.send_data(data.split_to(room), false)?;
                    self.claim(data.len());
                    self.next = Some((data, is_last));
                    continue;
                }
                self.stream.send_data(data, is_last)?;
                if is_last {
                    return Poll::Ready(Ok(()));
                }
            }
            match ready!(Pin::new(&mut *body).poll_frame(context)) {
                None => {
                    self.stream.send_data(Bytes::new(), true)?;
                    return Poll::Ready(Ok(()));
                }
                Some(Err(_failure)) => {
                    self.stream.send_reset(Reason::INTERNAL_ERROR);
                    return Poll::Ready(Err(Unsent));
                }
                Some(Ok(frame)) => match frame.into_data() {
                    // Until there is a part to send, none of the window that all streams share is reserved.
                    Ok(data) if !data.is_empty() => {
                        self.claim(data.len());
                        self.next = Some((data, body.is_end_stream()));
                    }
                    Ok(_) => {}
                    Err(frame) => {
                        self.stream.reserve_capacity(0);
                        self.stream.send_trailers(frame.into_trailers().unwrap_or_default())?;
                        return Poll::Ready(Ok(()));
                    }
                },
            }
        }
    }

    /// Claims a part of the window that all streams of the connection share. h2 serves the claims in turn, so each is large
    /// enough for progress, and small enough that the others wait for little.
    fn claim(&mut self, bytes: usize) {
        self.stream.reserve_capacity(bytes.min(MAX_CLAIM_BYTES));
    }

    /// Returns ready once the peer and the connection accept another part.
    fn poll_room(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Unsent>> {
        while self.stream.capacity() == 0 {
            match ready!(self.stream.poll_capacity(context)) {
                Some(capacity) => _ = capacity?,
                None => return Poll::Ready(Err(Unsent)),
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// The intervals of pings, and the timeout of an answer.
#[derive(Clone, Copy)]
pub(in crate::gateway) struct PingWaits {
    pub(in crate::gateway) every: Wait,
    /// The interval after two pings without other traffic.
    pub(in crate::gateway) quiet: Wait,
    pub(in crate::gateway) timeout: Wait,
}

/// Pings that show whether the peer of a connection is alive.
pub(in crate::gateway) struct KeepAlive {
    pings: PingPong,
    schedule: PingSchedule,
}

impl KeepAlive {
    pub(in crate::gateway) fn new(pings: PingPong, waits: PingWaits, now: Tick) -> Self {
        Self { pings, schedule: PingSchedule::new(waits, now) }
    }

    /// Returns whether a ping was sent and not answered yet.
    pub(in crate::gateway) fn awaits_answer(&self) -> bool {
        self.schedule.awaits_answer
    }

    /// Sends a ping if nothing was received for a while. Returns when this has to be called again, or `None` if nothing
    /// was received since the last ping, which is late.
    pub(in crate::gateway) fn check(&mut self, traffic: Traffic, now: Tick, context: &mut Context<'_>) -> Option<Tick> {
        if self.awaits_answer() && self.pings.poll_pong(context).is_ready() {
            self.schedule.awaits_answer = false;
        }
        loop {
            match self.schedule.next(traffic, now) {
                PingStep::Wait { until } => return Some(until),
                PingStep::Late => return None,
                PingStep::Ping => self.schedule.note_sent(self.pings.send_ping(Ping::opaque()).is_ok(), now),
            }
        }
    }
}

/// The last traffic of a connection.
#[derive(Clone, Copy)]
pub(in crate::gateway) struct Traffic {
    pub(in crate::gateway) received_at: Tick,
    /// When the last request began.
    pub(in crate::gateway) began_at: Tick,
}

impl Traffic {
    /// Returns the traffic of a client, whose requests are received.
    pub(in crate::gateway) fn of(client: &Client) -> Self {
        let received_at = client.received_at();
        Self { received_at, began_at: received_at }
    }
}

/// When pings are sent, and when an answer is late.
struct PingSchedule {
    waits: PingWaits,
    pinged_at: Tick,
    /// The pings since the last other traffic, and when that was.
    quiet_pings: u32,
    traffic_at: Tick,
    awaits_answer: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PingStep {
    Wait { until: Tick },
    Ping,
    Late,
}

impl PingSchedule {
    fn new(waits: PingWaits, now: Tick) -> Self {
        Self { waits, pinged_at: now, quiet_pings: 0, traffic_at: now, awaits_answer: false }
    }

    fn next(&mut self, Traffic { received_at, began_at }: Traffic, now: Tick) -> PingStep {
        let traffic_at = received_at.max(began_at);
        if traffic_at > self.traffic_at {
            (self.traffic_at, self.quiet_pings) = (traffic_at, 0);
        }
        let wait = match self.quiet_pings {
            // On a slow link, the answer may be behind much else.
            _ if self.awaits_answer => self.waits.timeout,
            0 | 1 => self.waits.every,
            _ => self.waits.quiet,
        };
        // The start of a request says nothing about the peer, so it postpones nothing.
        let due = wait.from(self.pinged_at.max(received_at));
        match self.awaits_answer {
            _ if now < due => PingStep::Wait { until: due },
            true => PingStep::Late,
            false => PingStep::Ping,
        }
    }

    fn note_sent(&mut self, is_sent: bool, now: Tick) {
        self.awaits_answer = is_sent;
        self.pinged_at = now;
        self.quiet_pings += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const WAITS: PingWaits = PingWaits { every: Wait::ticks(10), quiet: Wait::ticks(100), timeout: Wait::ticks(5) };

    /// Returns when pings are sent until a tick to a peer that answers each at once.
    fn pings(schedule: &mut PingSchedule, traffic: Traffic, ticks: std::ops::Range<Tick>) -> Vec<Tick> {
        let is_sent = |now: &Tick| {
            let is_due = schedule.next(traffic, *now) == PingStep::Ping;
            if is_due {
                schedule.note_sent(true, *now);
                schedule.awaits_answer = false;
            }
            is_due
        };
        ticks.filter(is_sent).collect()
    }

    #[test]
    fn peer_that_sends_nothing_but_answers_gets_few_pings() {
        let mut schedule = PingSchedule::new(WAITS, 0);
        let quiet = Traffic { received_at: 0, began_at: 0 };
        assert_eq!(pings(&mut schedule, quiet, 0..300), [10, 20, 120, 220]);
        let asked = Traffic { received_at: 0, began_at: 300 };
        assert_eq!(pings(&mut schedule, asked, 300..420), [300, 310, 410], "a request has begun");
        let answered = Traffic { received_at: 420, began_at: 300 };
        assert_eq!(pings(&mut schedule, answered, 420..450), [430, 440], "a response has arrived");
    }

    #[test]
    fn start_of_a_request_postpones_no_ping() {
        let mut schedule = PingSchedule::new(WAITS, 0);
        let asked = Traffic { received_at: 0, began_at: 9 };
        assert_eq!(pings(&mut schedule, asked, 0..15), [10]);
    }

    /// Polls a server once, so that it reads and writes what it can.
    async fn turn(connection: &mut h2::server::Connection<tokio::io::DuplexStream, Bytes>) {
        poll_fn(|context| {
            assert!(connection.poll_accept(context).is_pending(), "the connection goes on");
            Poll::Ready(())
        })
        .await;
    }

    #[tokio::test]
    async fn peer_that_answers_no_ping_is_lost_and_one_that_answers_is_not() {
        let (near, far) = tokio::io::duplex(1 << 16);
        let (server, client) = tokio::join!(h2::server::handshake(near), h2::client::handshake(far));
        let (mut server, (_sender, mut client)) = (server.unwrap(), client.unwrap());
        let mut keep_alive = KeepAlive::new(server.ping_pong().unwrap(), WAITS, 0);
        let mut check = async |received_at, now, server: &mut _| {
            turn(server).await;
            let traffic = Traffic { received_at, began_at: 0 };
            poll_fn(|context| Poll::Ready(keep_alive.check(traffic, now, context))).await
        };
        assert_eq!(check(0, 9, &mut server).await, Some(10), "not yet");
        assert_eq!(check(3, 10, &mut server).await, Some(13), "something was received");
        assert_eq!(check(3, 13, &mut server).await, Some(18), "a ping was sent");
        turn(&mut server).await;
        poll_fn(|context| {
            assert!(Pin::new(&mut client).poll(context).is_pending(), "the connection goes on");
            Poll::Ready(())
        })
        .await;
        assert_eq!(check(14, 18, &mut server).await, Some(24), "answered");
        assert_eq!(check(14, 24, &mut server).await, Some(29), "another ping was sent");
        assert_eq!(check(27, 29, &mut server).await, Some(32), "something else was received");
        assert_eq!(check(27, 32, &mut server).await, None);
    }

    /// A body of pieces like those of responses, without an end.
    struct Endless;

    impl Body for Endless {
        type Data = Bytes;
        type Error = Failure;

        fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[0; 16 << 10])))))
        }
    }

    /// Returns a frame of HTTP/2 without flags other than END_STREAM and END_HEADERS for requests.
    fn frame(kind: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let flags = if kind == HEADERS { 5 } else { 0 };
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    }

    const DATA: u8 = 0;
    const HEADERS: u8 = 1;
    const SETTINGS: u8 = 4;
    const WINDOW_UPDATE: u8 = 8;

    /// A client with a large window for each stream opens that of the connection by half of its default size, as many do.
    #[tokio::test]
    async fn streams_share_the_window_of_their_connection() {
        const STREAMS: [u32; 3] = [1, 3, 5];
        const STEP: u32 = 32 << 10;
        let (near, mut client) = tokio::io::duplex(1 << 20);
        tokio::spawn(async move {
            let mut builder = h2::server::Builder::new();
            let mut server = builder.max_send_buffer_size(32 << 10).handshake(near).await.unwrap();
            while let Some(Ok((_, mut respond))) = server.accept().await {
                let stream = respond.send_response(http::Response::new(()), false).unwrap();
                tokio::spawn(async move {
                    let mut sender = BodySender::new(stream);
                    poll_fn(|context| sender.poll_send(&mut Endless, context)).await
                });
            }
        });
        let mut begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        begin.extend(frame(SETTINGS, 0, &[&[0, 4][..], &(1_u32 << 30).to_be_bytes()].concat()));
        for stream in STREAMS {
            // GET http://h/
            begin.extend(frame(HEADERS, stream, &[0x82, 0x86, 0x84, 0x41, 1, b'h']));
        }
        client.write_all(&begin).await.unwrap();
        let (mut read, mut unclaimed) = ([0; STREAMS.len()], 0);
        while read.iter().sum::<u32>() < 2 << 20 {
            let mut head = [0; 9];
            client.read_exact(&mut head).await.unwrap();
            let [a, b, c, kind, _, d, e, f, g] = head;
            let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
            client.read_exact(&mut payload).await.unwrap();
            if kind != DATA {
                continue;
            }
            let stream = STREAMS.iter().position(|stream| *stream == u32::from_be_bytes([d, e, f, g])).unwrap();
            let bytes = u32::try_from(payload.len()).unwrap();
            (read[stream], unclaimed) = (read[stream] + bytes, unclaimed + bytes);
            while unclaimed >= STEP {
                unclaimed -= STEP;
                client.write_all(&frame(WINDOW_UPDATE, 0, &STEP.to_be_bytes())).await.unwrap();
            }
        }
        assert!(read.iter().all(|bytes| *bytes >= 512 << 10), "{read:?}");
    }
}
