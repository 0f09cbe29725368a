//! The head of a request as its upstream gets it (RFC 9110, RFC 7239): the client's headers without those that are
//! not forwarded, and the headers that the gateway adds. Also the IDs of requests.

use std::hash::{BuildHasher, RandomState};
use std::io::Write as _;
use std::net::IpAddr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HOST, VIA};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Uri, Version};
use smallvec::SmallVec;
use tollgate_config::internal::{HostHeader, UpstreamHeader};
use tollgate_rules::Outcome;
use tollgate_rules::internal::HeaderFacts;
use tollgate_telemetry::traces::{RequestSpan, TRACEPARENT, TRACESTATE};

use super::headers::{self, Edits, Fate, HeaderFilter, HeaderKind};
use super::{BodyLength, RequestHead, reads_body};
use crate::gateway::client::Client;
use crate::gateway::failure::Failure;
use crate::gateway::site::{Route, Site};
use crate::gateway::upstream::RouteUpstream;

/// The maximum length of a request ID. Longer ones are replaced.
const MAX_ID_BYTES: usize = 128;

/// The capacity for headers that we add, so that a map grows once.
const ADDED: usize = 8;

/// A head that is being written: text for HTTP/1, or a map for HTTP/2.
trait HeaderSink {
    /// Adds a header whose value `write` appends to a buffer.
    fn put_with(&mut self, name: &str, write: impl FnOnce(&mut Vec<u8>));

    fn put(&mut self, name: &str, value: &[u8]) {
        self.put_with(name, |out| out.extend_from_slice(value));
    }
}

impl HeaderSink for Vec<u8> {
    fn put_with(&mut self, name: &str, write: impl FnOnce(&mut Vec<u8>)) {
        self.extend_from_slice(name.as_bytes());
        self.extend_from_slice(b": ");
        write(self);
        self.extend_from_slice(b"\r\n");
    }

    fn put(&mut self, name: &str, value: &[u8]) {
        headers::put(self, name, value);
    }
}

impl HeaderSink for HeaderMap {
    fn put_with(&mut self, name: &str, write: impl FnOnce(&mut Vec<u8>)) {
        let mut value = Vec::with_capacity(64);
        write(&mut value);
        let (name, value) =
            (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_maybe_shared(Bytes::from(value)));
        if let (Ok(name), Ok(value)) = (name, value) {
            self.append(name, value);
        }
    }
}

/// The facts about a request that are not in its head.
#[derive(Clone, Copy)]
pub(in crate::gateway) struct RequestContext<'a> {
    pub(in crate::gateway) site: &'a Site,
    pub(in crate::gateway) client: &'a Client,
    pub(in crate::gateway) id: Option<&'a HeaderValue>,
    pub(in crate::gateway) span: &'a RequestSpan,
    pub(in crate::gateway) outcome: &'a Outcome,
}

/// A request for an upstream.
pub(in crate::gateway) struct UpstreamHead<'a> {
    head: &'a RequestHead<'a>,
    route: &'a Route,
    upstream: &'a RouteUpstream,
    request: RequestContext<'a>,
    traceparent: Option<String>,
    /// The new value of `Max-Forwards`, if the gateway counts it.
    max_forwards: Option<u64>,
    /// Whether the upstream gets its own name as the host.
    is_upstreams_host: bool,
}

impl<'a> UpstreamHead<'a> {
    pub(in crate::gateway) fn new(
        head: &'a RequestHead<'a>,
        (route, upstream): (&'a Route, &'a RouteUpstream),
        request: RequestContext<'a>,
    ) -> Self {
        let edits = &route.request_edits;
        let lacks_host = head.host().is_none() && !edits.sets(&HOST);
        let is_upstreams_host = lacks_host || route.host == HostHeader::Upstream || edits.removes_for_good(&HOST);
        let max_forwards = head.forwards_left().map(|left| left.saturating_sub(1));
        let traceparent = request.span.traceparent();
        Self { head, route, upstream, request, traceparent, max_forwards, is_upstreams_host }
    }

    /// Writes the head for an upstream with HTTP/1.
    pub(in crate::gateway) fn write(&self, out: &mut Vec<u8>) -> Result<(), Failure> {
        let (head, edits) = (self.head, self.edits());
        out.extend_from_slice(head.method.as_bytes());
        out.push(b' ');
        match self.changed_uri()? {
            Some(uri) => {
                out.extend_from_slice(uri.path_and_query().map_or("/", PathAndQuery::as_str).as_bytes());
            }
            None => out.extend_from_slice(head.target.as_str().as_bytes()),
        }
        out.extend_from_slice(b" HTTP/1.1\r\n");
        self.put_host(out);
        for (line, kind) in head.headers.iter() {
            // HTTP/1 upstreams get no trailers, so none are announced.
            if kind != HeaderKind::Trailer && self.passes(line.name, kind) {
                headers::put(out, line.name, line.value);
            }
        }
        self.put_added(out);
        let wants_trailers = self.put_te(out);
        let upgrade = head.upgrade.filter(|_| !edits.removes("upgrade"));
        if let Some(protocol) = upgrade {
            headers::put(out, "upgrade", protocol);
        }
        match (upgrade, wants_trailers) {
            (Some(_), true) => out.extend_from_slice(b"connection: upgrade, te\r\n"),
            (Some(_), false) => out.extend_from_slice(headers::UPGRADE),
            (None, true) => out.extend_from_slice(b"connection: te\r\n"),
            (None, false) => {}
        }
        if head.may_desync() && upgrade.is_none() {
            out.extend_from_slice(headers::CLOSE);
        }
        if head.length == BodyLength::Unknown {
            out.extend_from_slice(b"transfer-encoding: chunked\r\n");
        }
        out.extend_from_slice(b"\r\n");
        Ok(())
    }

    /// Converts the head for an upstream with HTTP/2. `parts` is the request that it was read from.
    pub(in crate::gateway) fn to_http2(
        &self,
        parts: &Parts,
        filter: &HeaderFilter<'_>,
    ) -> Result<Request<()>, Failure> {
        let uri = self.changed_uri()?;
        let mut request = Request::new(());
        *request.method_mut() = parts.method.clone();
        *request.uri_mut() = uri.unwrap_or_else(|| parts.uri.clone());
        let map = request.headers_mut();
        // A repeated name takes one place, and a map has room for no more names than that of the request.
        _ = map.try_reserve(parts.headers.keys_len() + ADDED);
        self.put_host(map);
        for (name, value) in &parts.headers {
            let kind = headers::kind(name.as_str());
            if filter.fate(name.as_str(), kind) == Fate::Kept && self.passes(name.as_str(), kind) {
                map.append(name, value.clone());
            }
        }
        self.put_added(map);
        self.put_te(map);
        if self.head.length == BodyLength::Known(0) && reads_body(parts.method.as_str()) {
            map.entry(CONTENT_LENGTH).or_insert(HeaderValue::from_static("0"));
        }
        self.upstream.target.set_http2_target(&mut request);
        Ok(request)
    }

    fn edits(&self) -> &'a Edits {
        &self.route.request_edits
    }

    /// Returns the target, if the route changes it.
    fn changed_uri(&self) -> Result<Option<Uri>, Failure> {
        if !self.route.changes_paths() {
            return Ok(None);
        }
        let uri = self.head.target.uri().ok_or(Failure::BadTarget)?;
        self.route.rewritten_uri(self.upstream, &uri).map(Some)
    }

    /// Returns whether a header of the client is forwarded.
    fn passes(&self, name: &str, kind: HeaderKind) -> bool {
        let passes = match kind {
            kind if kind.is_hop_by_hop() => false,
            HeaderKind::Host => !self.is_upstreams_host && self.head.target.authority().is_none(),
            HeaderKind::XForwardedFor => !self.request.site.adds_header(UpstreamHeader::XForwarded),
            HeaderKind::XRequestId => self.request.id.is_none(),
            HeaderKind::MaxForwards => self.max_forwards.is_none(),
            _ => true,
        };
        let is_replaced = self.traceparent.is_some()
            && (name.eq_ignore_ascii_case(TRACEPARENT.as_str())
                || name.eq_ignore_ascii_case(TRACESTATE.as_str()) && !self.request.span.continues_trace());
        passes && !is_replaced && !self.edits().removes(name)
    }

    /// Adds the host, unless the client's header passes.
    fn put_host(&self, out: &mut impl HeaderSink) {
        if self.is_upstreams_host {
            out.put(HOST.as_str(), self.upstream.target.host.as_bytes());
        } else if let Some(authority) = self.head.target.authority().filter(|_| !self.edits().removes(HOST.as_str())) {
            out.put(HOST.as_str(), authority.as_str().as_bytes());
        }
    }

    /// Adds the headers that describe the client, the connection and the request, and those of the route.
    fn put_added(&self, out: &mut impl HeaderSink) {
        let (site, edits) = (self.request.site, self.edits());
        if site.adds_header(UpstreamHeader::XForwarded) {
            self.put_x_forwarded(out);
        }
        if site.adds_header(UpstreamHeader::Forwarded) && !edits.removes("forwarded") {
            out.put_with("forwarded", |value| self.write_forwarded(value));
        }
        if site.adds_header(UpstreamHeader::Via) && !edits.removes("via") {
            out.put("via", request_via(self.head.version).as_bytes());
        }
        if let Some(id) = self.request.id.filter(|_| !edits.removes("x-request-id")) {
            out.put("x-request-id", id.as_bytes());
        }
        if let Some(left) = self.max_forwards.filter(|_| !edits.removes("max-forwards")) {
            out.put("max-forwards", itoa::Buffer::new().format(left).as_bytes());
        }
        if let Some(traceparent) = self.traceparent.as_ref().filter(|_| !edits.removes(TRACEPARENT.as_str())) {
            out.put(TRACEPARENT.as_str(), traceparent.as_bytes());
        }
        for (name, value) in edits.new_headers().filter(|(name, _)| !self.is_upstreams_host || *name != HOST) {
            out.put(name.as_str(), value.as_bytes());
        }
        if !edits.facts().is_empty() {
            self.put_facts(out);
        }
    }

    /// Adds the headers of the route that have facts about the request. The client's were removed.
    #[inline(never)]
    fn put_facts(&self, out: &mut impl HeaderSink) {
        let RequestContext { client, outcome, .. } = self.request;
        let facts = self.head.facts(client.peer()).route(&self.route.name);
        let facts = HeaderFacts::new(outcome.rules(), &facts, outcome.limit());
        for (name, fact) in self.edits().facts() {
            if let Some(value) = facts.value(fact) {
                out.put(name.as_str(), value.as_bytes());
            }
        }
    }

    /// Adds `TE` for a client that accepts trailers.
    fn put_te(&self, out: &mut impl HeaderSink) -> bool {
        let wants_trailers = self.head.wants_trailers && !self.edits().removes("te");
        if wants_trailers {
            out.put("te", b"trailers");
        }
        wants_trailers
    }

    /// Appends to the headers of a trusted proxy. Those of others were dropped.
    fn put_x_forwarded(&self, out: &mut impl HeaderSink) {
        let (head, edits) = (self.head, self.edits());
        if !edits.removes("x-forwarded-for") {
            out.put_with("x-forwarded-for", |value| {
                for hop in head.headers.values(HeaderKind::XForwardedFor) {
                    value.extend_from_slice(hop);
                    value.extend_from_slice(b", ");
                }
                value.extend_from_slice(self.request.client.address_text.as_bytes());
            });
        }
        let is_present = |kind| head.headers.values(kind).next().is_some();
        if !is_present(HeaderKind::XForwardedProto) && !edits.removes("x-forwarded-proto") {
            out.put("x-forwarded-proto", self.request.client.scheme.as_str().as_bytes());
        }
        if let Some(host) = head.host()
            && !is_present(HeaderKind::XForwardedHost)
            && !edits.removes("x-forwarded-host")
        {
            out.put("x-forwarded-host", host);
        }
    }

    /// Writes an element such as `for=192.0.2.7;host="h:80";proto=http`.
    fn write_forwarded(&self, out: &mut Vec<u8>) {
        let client = self.request.client;
        out.extend_from_slice(b"for=");
        match client.address.map(|address| address.to_canonical()) {
            Some(IpAddr::V6(address)) => _ = write!(out, "\"[{address}]\""),
            Some(IpAddr::V4(_)) | None => out.extend_from_slice(client.address_text.as_bytes()),
        }
        if let Some(host) = self.head.host() {
            out.extend_from_slice(b";host=\"");
            out.extend_from_slice(host);
            out.push(b'"');
        }
        out.extend_from_slice(b";proto=");
        out.extend_from_slice(client.scheme.as_str().as_bytes());
    }
}

/// The name of this process in `Via` of requests. It is random: a request that comes back has it, and one that has passed
/// another gateway has another. Responses have the short name, because clients need not know which process served them.
static NODE: LazyLock<String> = LazyLock::new(|| format!("{NODE_PREFIX}{:016x}", RandomState::new().hash_one(0)));

/// The beginning of the name in requests. Hexadecimal digits follow.
const NODE_PREFIX: &str = "tollgate-";

/// Returns our entry in `Via` of a request that was received with that version.
fn request_via(version: Version) -> &'static str {
    static ENTRIES: LazyLock<[String; 3]> =
        LazyLock::new(|| ["1.0", "1.1", "2"].map(|version| format!("{version} {}", *NODE)));
    &ENTRIES[match version {
        Version::HTTP_10 => 0,
        Version::HTTP_2 => 2,
        _ => 1,
    }]
}

/// Returns whether a value of `Via` shows that the request has passed this process before.
pub(super) fn has_own_entry(via: &[u8]) -> bool {
    memchr::memmem::find(via, NODE.as_bytes()).is_some()
}

/// Returns a value of `Via` in which `tollgate` replaces the random names of gateways. A client that knows the name of one
/// could have its requests refused as a loop.
pub(in crate::gateway) fn without_node_names(via: &[u8]) -> Vec<u8> {
    let (mut text, mut rest) = (Vec::with_capacity(via.len()), via);
    while let Some(start) = memchr::memmem::find(rest, NODE_PREFIX.as_bytes()) {
        let (before, name) = rest.split_at(start + NODE_PREFIX.len());
        let digits = name.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
        text.extend_from_slice(before.strip_suffix(b"-").unwrap_or(before));
        rest = &name[digits..];
    }
    text.extend_from_slice(rest);
    text
}

/// Returns our entry in `Via` of a response of that version.
pub(in crate::gateway) fn via(version: Version) -> &'static str {
    match version {
        Version::HTTP_10 => "1.0 tollgate",
        Version::HTTP_2 => "2 tollgate",
        _ => "1.1 tollgate",
    }
}

/// Adds our entry to `Via` of a response.
pub(in crate::gateway) fn append_via(version: Version, headers: &mut HeaderMap) {
    headers.append(VIA, HeaderValue::from_static(via(version)));
}

/// Removes hop-by-hop headers from the response of an upstream with HTTP/2. h2 refuses responses with `Connection`.
pub(in crate::gateway) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let is_hop_by_hop = |name: &&HeaderName| headers::kind(name.as_str()).is_hop_by_hop();
    let found: SmallVec<[HeaderName; 4]> = headers.keys().filter(is_hop_by_hop).cloned().collect();
    for name in found {
        headers.remove(name);
    }
}

impl<'a> RequestHead<'a> {
    /// Returns the client's request ID, if there is exactly one and it is valid.
    pub(in crate::gateway) fn id(&self) -> Option<&'a [u8]> {
        let mut ids = self.headers.values(HeaderKind::XRequestId);
        // Of several, it is unknown which one the upstream uses.
        let only = ids.next().filter(|_| ids.next().is_none())?;
        let is_valid = (1..=MAX_ID_BYTES).contains(&only.len()) && only.iter().all(u8::is_ascii_graphic);
        is_valid.then_some(only)
    }
}

/// A generator of request IDs.
#[derive(Debug)]
pub(in crate::gateway) struct RequestIds {
    secret: RandomState,
    next: AtomicU64,
}

impl RequestIds {
    pub(in crate::gateway) fn new() -> Self {
        Self { secret: RandomState::new(), next: AtomicU64::new(0) }
    }

    /// Returns a new ID as a header.
    pub(in crate::gateway) fn next(&self) -> HeaderValue {
        // Hexadecimal digits are valid in a header.
        HeaderValue::from_bytes(&self.next_text()).unwrap_or(HeaderValue::from_static("0"))
    }

    /// Returns a new ID of 32 hexadecimal digits.
    pub(in crate::gateway) fn next_text(&self) -> [u8; 32] {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let number = self.next.fetch_add(1, Relaxed);
        let halves = [self.secret.hash_one(number), self.secret.hash_one(!number)];
        let mut text = [0; 32];
        let bytes = halves.iter().flat_map(|half| half.to_be_bytes());
        for (digits, byte) in text.chunks_exact_mut(2).zip(bytes) {
            digits.copy_from_slice(&[DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ_and_are_of_one_form() {
        let ids = RequestIds::new();
        let made: std::collections::HashSet<_> = (0..1000).map(|_| ids.next()).collect();
        assert_eq!(made.len(), 1000);
        assert!(made.iter().all(|id| id.len() == 32 && id.as_bytes().iter().all(u8::is_ascii_hexdigit)));
    }
}
