//! Connections to upstreams: any of them with its slot, the one for HTTP/1, and how long they are reused.
//!
//! An upstream may close an idle connection at any time. A request that is sent at the same moment is lost, and one
//! that must not be repeated fails with 502. So an idle connection is given up before the upstream is expected to close
//! it.

use std::io::{self, IoSlice};
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tollgate_config::internal::UpstreamConnectionsRule;
use tollgate_net::deadline::{Tick, Wait};
use tollgate_net::stream::MaybeTls;

use super::addresses::HostAddresses;
use super::slots::UpstreamSlot;

/// The most interim responses to a request. An upstream that sends more keeps a worker busy for nothing.
const MAX_INTERIM: u32 = 32;

/// How much earlier than announced in `Keep-Alive: timeout=` a connection is given up, since requests and closes take
/// time to arrive. Half of the announced time if that is less.
const MARGIN: Duration = Duration::from_secs(1);

/// A connection to an upstream, with or without TLS, and its slot.
pub(in crate::gateway) struct UpstreamIo {
    io: MaybeTls<TlsStream<TcpStream>>,
    /// Dropped after the socket is closed.
    _slot: UpstreamSlot,
}

impl UpstreamIo {
    pub(in crate::gateway) fn new(io: MaybeTls<TlsStream<TcpStream>>, slot: UpstreamSlot) -> Self {
        Self { io, _slot: slot }
    }

    /// Returns the connection without its slot.
    pub(in crate::gateway) fn stream(&self) -> &MaybeTls<TlsStream<TcpStream>> {
        &self.io
    }

    pub(super) fn stream_mut(&mut self) -> &mut MaybeTls<TlsStream<TcpStream>> {
        &mut self.io
    }
}

impl Drop for UpstreamIo {
    /// Sends `close_notify`, which distinguishes the end from a broken connection, if it can be sent at once.
    fn drop(&mut self) {
        if let MaybeTls::Tls(tls) = &mut self.io {
            _ = Pin::new(tls).poll_shutdown(&mut Context::from_waker(Waker::noop()));
        }
    }
}

impl AsyncRead for UpstreamIo {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_read(context, buffer)
    }
}

impl AsyncWrite for UpstreamIo {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(context)
    }
}

/// An HTTP/1 connection for one request at a time.
pub(in crate::gateway) struct Http1Conn {
    io: UpstreamIo,
    /// Whether the last read returned bytes. True at the start, when nothing can have arrived.
    has_read: bool,
    pub(in crate::gateway) usage: Usage,
    /// The unsent rest of a request.
    unsent: Vec<u8>,
    /// Whether all sent bytes have left the buffer of TLS.
    is_flushed: bool,
    /// Whether the upstream accepts no more bytes.
    is_broken: bool,
    /// Whether the body of the last response was moved inside the kernel. Then little more than the head of the next one
    /// is read.
    pub(in crate::gateway) has_long_bodies: bool,
    /// The bytes of a partial response head.
    pub(in crate::gateway) head_bytes: Vec<u8>,
    /// Whether these are a complete head, which is wanted again: limits count it before the client gets it.
    pub(in crate::gateway) has_kept_head: bool,
    /// The interim responses to the current request.
    interim: u32,
}

impl Http1Conn {
    pub(in crate::gateway) fn new(io: UpstreamIo, usage: Usage) -> Self {
        Self {
            io,
            has_read: true,
            usage,
            unsent: Vec::new(),
            is_flushed: true,
            is_broken: false,
            has_long_bodies: false,
            head_bytes: Vec::new(),
            has_kept_head: false,
            interim: 0,
        }
    }

    /// Returns the socket of a connection without TLS.
    pub(in crate::gateway) fn plain(&self) -> Option<&TcpStream> {
        self.io.stream().plain()
    }

    /// Returns the connection after an upgrade.
    pub(in crate::gateway) fn into_io(self) -> UpstreamIo {
        self.io
    }

    /// Marks the connection as idle. Returns whether it can be used again.
    pub(super) fn become_idle(&mut self, now: Tick, policy: &ReusePolicy) -> bool {
        self.usage.note_idle(now, policy);
        self.unsent = Vec::new();
        self.interim = 0;
        self.usage.allows_another(now, policy)
    }

    /// Counts an interim response. Returns whether another is accepted.
    pub(in crate::gateway) fn note_interim(&mut self) -> bool {
        self.interim += 1;
        self.interim <= MAX_INTERIM
    }

    /// Returns whether it can take a request now.
    pub(super) fn can_take_request(&mut self, now: Tick, policy: &ReusePolicy, repeatable: Repeatable) -> bool {
        // The runtime learns of a close when it next polls for events. A request that must not be lost does not rely on
        // that, nor does one on a connection that has been idle for long enough to be closed.
        let checks_kernel = repeatable == Repeatable::No || self.usage.has_been_idle(now);
        self.usage.allows_another(now, policy)
            && self.is_quiet()
            && (!checks_kernel || self.io.stream().is_open_and_quiet())
    }

    /// Returns whether it should stay in the pool.
    pub(super) fn is_worth_keeping(&mut self, now: Tick) -> bool {
        !self.usage.is_stale(now) && self.is_quiet()
    }

    /// Returns whether the upstream has neither closed it nor sent unexpected bytes, as far as the runtime knows.
    fn is_quiet(&mut self) -> bool {
        match self.io.stream_mut() {
            MaybeTls::Plain(tcp) => {
                matches!(tcp.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            }
            // Messages of TLS itself, such as session tickets, are read here.
            MaybeTls::Tls(tls) => {
                let mut context = Context::from_waker(Waker::noop());
                Pin::new(tls).poll_read(&mut context, &mut ReadBuf::new(&mut [0])).is_pending()
            }
        }
    }

    /// Sends as much of the head of a request as possible, and of its body that has arrived with it.
    /// [`poll_send`](Self::poll_send) sends the rest.
    pub(in crate::gateway) fn send(
        &mut self,
        bytes: &[u8],
        _recorded: DeliveryBegun,
        context: &mut Context<'_>,
    ) -> io::Result<()> {
        self.write(bytes, context)
    }

    fn write(&mut self, bytes: &[u8], context: &mut Context<'_>) -> io::Result<()> {
        let sent = match self.io.stream_mut().poll_send(bytes, &[], context) {
            Poll::Ready(sent) => sent?,
            Poll::Pending => 0,
        };
        self.is_flushed = !self.io.stream().is_buffered();
        self.unsent.clear();
        self.unsent.extend_from_slice(&bytes[sent..]);
        Ok(())
    }

    /// Sends the next part of a body. Nothing may be left of earlier parts. [`poll_send`](Self::poll_send) reports an
    /// error, after the response of an upstream that did not read the whole body.
    pub(in crate::gateway) fn send_part(&mut self, bytes: &[u8], context: &mut Context<'_>) {
        self.is_broken |= self.write(bytes, context).is_err();
    }

    /// Returns the number of bytes that the upstream has not accepted.
    pub(in crate::gateway) fn unsent_bytes(&self) -> usize {
        self.unsent.len()
    }

    /// Returns whether the request was sent completely.
    pub(in crate::gateway) fn is_sent(&self) -> bool {
        self.unsent.is_empty() && self.is_flushed && !self.is_broken
    }

    /// Returns ready once the request is sent.
    pub(in crate::gateway) fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.is_broken {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        while !self.unsent.is_empty() {
            match self.io.stream_mut().poll_send(&self.unsent, &[], context) {
                Poll::Ready(Ok(sent)) => _ = self.unsent.drain(..sent),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            }
        }
        if !self.is_flushed {
            ready!(Pin::new(&mut self.io).poll_flush(context))?;
            self.is_flushed = true;
        }
        // An upload that stalled once may go on for long.
        self.unsent = Vec::new();
        Poll::Ready(Ok(()))
    }

    /// Reads into the buffer. Returns the number of bytes; 0 is the end of the stream.
    pub(in crate::gateway) fn poll_read(
        &mut self,
        buffer: &mut [u8],
        context: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        self.io.stream_mut().poll_receive(&mut self.has_read, buffer, context)
    }
}

/// The bounds of a route on the reuse of connections.
#[derive(Clone, Copy, Debug)]
pub(in crate::gateway) struct ReusePolicy {
    idle: Wait,
    max_age: Wait,
    max_requests: u32,
}

impl ReusePolicy {
    pub(in crate::gateway) fn new(rule: &UpstreamConnectionsRule) -> Self {
        Self {
            idle: Wait::at_most(rule.idle.duration()),
            max_age: Wait::at_most(rule.max_age.duration()),
            max_requests: rule.max_requests,
        }
    }
}

/// Whether a request that is lost with its connection can be sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gateway) enum Repeatable {
    Yes,
    No,
}

impl From<bool> for Repeatable {
    fn from(may_repeat: bool) -> Self {
        if may_repeat { Self::Yes } else { Self::No }
    }
}

/// Whether a byte of a request may have reached an upstream, over all of its attempts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::gateway) enum Delivery {
    #[default]
    NotBegun,
    /// It stays so, even if the connection has failed: an upstream may have read what TLS or the kernel had taken.
    Begun,
}

/// Proof that a delivery is recorded. Sending a request requires it, so that none reaches an upstream unrecorded.
pub(in crate::gateway) struct DeliveryBegun(());

impl Delivery {
    /// Records that a connection is about to get the request.
    pub(in crate::gateway) fn begin(&mut self) -> DeliveryBegun {
        *self = Self::Begun;
        DeliveryBegun(())
    }
}

/// The age and use of one connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::gateway) struct Usage {
    opened_at: Tick,
    requests: u32,
    /// The end of the last request.
    idle_since: Tick,
    /// When it is given up if no request follows.
    stale_at: Tick,
    /// The announced keep-alive time, less the margin.
    announced: Option<Wait>,
    origin: Origin,
}

/// The address of a connection, and the generation of the host's addresses when it was last checked.
#[derive(Clone, Copy, Debug)]
pub(in crate::gateway) struct Origin {
    pub(in crate::gateway) ip: IpAddr,
    pub(super) generation: u64,
}

impl Usage {
    pub(in crate::gateway) fn new(now: Tick, origin: Origin) -> Self {
        Self { opened_at: now, requests: 0, idle_since: now, stale_at: Tick::MAX, announced: None, origin }
    }

    /// Returns whether its address still belongs to the host.
    pub(super) fn is_current(&mut self, addresses: &HostAddresses) -> bool {
        addresses.has(self.origin.ip, &mut self.origin.generation)
    }

    /// Records the values of `Keep-Alive` in a response.
    pub(in crate::gateway) fn note_keep_alive<'v>(&mut self, values: impl IntoIterator<Item = &'v [u8]>) {
        let announced = values.into_iter().filter_map(announced_timeout).min();
        self.announced = announced.or(self.announced);
    }

    /// Records the end of a response. Returns how long the connection may wait for the next request.
    pub(super) fn note_idle(&mut self, now: Tick, policy: &ReusePolicy) -> Wait {
        let idle = self.announced.map_or(policy.idle, |announced| announced.min(policy.idle));
        self.note_request();
        self.idle_since = now;
        self.stale_at = idle.from(now);
        idle
    }

    /// Counts a request.
    pub(super) fn note_request(&mut self) {
        self.requests = self.requests.saturating_add(1);
    }

    /// Prevents further requests on the connection.
    pub(in crate::gateway) fn end(&mut self) {
        self.requests = u32::MAX;
    }

    /// Returns whether it is too old to be reused, by the bounds of the last route that used it.
    pub(super) fn is_stale(&self, now: Tick) -> bool {
        self.stale_at <= now
    }

    /// Returns whether another request may use it.
    pub(super) fn allows_another(&self, now: Tick, policy: &ReusePolicy) -> bool {
        !self.is_stale(now) && policy.idle.from(self.idle_since) > now && self.is_young(now, policy)
    }

    /// Returns whether its age and number of requests allow another one.
    pub(super) fn is_young(&self, now: Tick, policy: &ReusePolicy) -> bool {
        policy.max_age.from(self.opened_at) > now && self.requests < policy.max_requests
    }

    /// Returns whether a request was answered on it. The upstream may be closing it just now.
    pub(in crate::gateway) fn is_used(&self) -> bool {
        self.requests > 0
    }

    /// Returns whether it has been idle for at least a tick.
    pub(super) fn has_been_idle(&self, now: Tick) -> bool {
        self.idle_since < now
    }
}

/// Parses the timeout of a value such as `timeout=5, max=100`, less the margin.
fn announced_timeout(value: &[u8]) -> Option<Wait> {
    let parameters = std::str::from_utf8(value).ok()?.split(',').map(str::trim);
    let seconds = parameters.filter_map(|parameter| {
        let (name, seconds) = parameter.split_once('=')?;
        let is_timeout = name.trim_end().eq_ignore_ascii_case("timeout");
        seconds.trim_start().parse::<u32>().ok().filter(|_| is_timeout)
    });
    let announced = Duration::from_secs(seconds.min()?.into());
    Some(Wait::at_most(announced - MARGIN.min(announced / 2)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Tick = 10;

    fn policy() -> ReusePolicy {
        ReusePolicy::new(&UpstreamConnectionsRule::default())
    }

    fn new_usage() -> Usage {
        Usage::new(0, Origin { ip: std::net::Ipv4Addr::LOCALHOST.into(), generation: 0 })
    }

    fn used(keep_alive: &str) -> Usage {
        let mut usage = new_usage();
        usage.note_keep_alive([keep_alive.as_bytes()]);
        usage.note_idle(0, &policy());
        usage
    }

    #[test]
    fn idle_connection_is_given_up_before_the_upstream_closes_it() {
        for (keep_alive, last_use) in [
            ("", 4 * SECOND),
            ("timeout=5", 4 * SECOND),
            ("timeout=60, max=100", 4 * SECOND),
            ("max=100, Timeout = 3", 2 * SECOND),
            ("timeout=1", SECOND / 2),
            ("timeout=5, timeout=2", SECOND),
            ("timeout=soon", 4 * SECOND),
            ("xtimeout=1", 4 * SECOND),
        ] {
            let usage = used(keep_alive);
            assert!(usage.allows_another(last_use - 1, &policy()), "{keep_alive}");
            assert!(!usage.allows_another(last_use, &policy()), "{keep_alive}");
        }
        assert!(!used("timeout=0").allows_another(0, &policy()));
    }

    #[test]
    fn route_with_a_shorter_idle_time_does_not_use_what_another_route_kept() {
        let short = ReusePolicy { idle: Wait::at_most(Duration::from_secs(1)), ..policy() };
        let usage = used("");
        assert!(usage.allows_another(2 * SECOND, &policy()));
        assert!(!usage.allows_another(2 * SECOND, &short));
    }

    #[test]
    fn connection_ends_by_age_and_by_requests() {
        let age = 300 * SECOND;
        let mut usage = new_usage();
        usage.note_idle(age - 1, &policy());
        assert!(usage.allows_another(age - 1, &policy()));
        usage.note_idle(age, &policy());
        assert!(!usage.allows_another(age, &policy()));

        let mut usage = new_usage();
        (0..9_999).for_each(|_| _ = usage.note_idle(0, &policy()));
        assert!(usage.allows_another(0, &policy()));
        usage.note_idle(0, &policy());
        assert!(!usage.allows_another(0, &policy()));
    }
}
