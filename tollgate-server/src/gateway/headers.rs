//! Headers that a proxy removes and adds (RFC 9110, RFC 7239), and the IDs of requests.

use std::hash::{BuildHasher, RandomState};
use std::io::Write as _;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, COOKIE, FORWARDED, HOST, TE, VIA};
use http::{HeaderMap, HeaderName, HeaderValue, Version};
use smallvec::SmallVec;
use tollgate::rules::file::internal::{UnderscoreHeaders, UpstreamHeader};

use super::client::{Client, Scheme};
use super::failure::Failure;
use super::header_names::{self, DroppedHeaders, Fate, HeaderFilter, HeaderKind};
use super::site::Site;

pub(super) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// Our `Via` entry for HTTP/1.1 messages.
pub(super) const OUR_VIA: &str = "1.1 tollgate";

/// The maximum length of a request ID. Longer ones are replaced.
const MAX_ID_BYTES: usize = 128;

/// The capacity for headers that we add, so that the map grows once.
const ADDED: usize = 8;

/// Removes the headers that the filter drops and those that `Connection` names, before limits are checked: an upstream
/// gets neither. Returns the number of headers that the filter dropped.
pub(super) fn screen(headers: &mut HeaderMap, filter: &HeaderFilter<'_>) -> Result<DroppedHeaders, Failure> {
    let mut dropped: SmallVec<[HeaderName; 4]> = SmallVec::new();
    let mut counts = DroppedHeaders::default();
    let mut has_connection = false;
    for name in headers.keys() {
        let kind = header_names::kind(name.as_str());
        has_connection |= kind == HeaderKind::Connection;
        match filter.fate(name.as_str(), kind) {
            Fate::Kept => {}
            Fate::Dropped(reason) => {
                counts.add(reason, u32::try_from(headers.get_all(name).iter().count()).unwrap_or(u32::MAX));
                dropped.push(name.clone());
            }
            Fate::Refused => return Err(Failure::UnderscoreHeader),
        }
    }
    if has_connection {
        dropped.extend(named_by_connection(headers).filter(|name| !outlives_connection_option(name)));
    }
    for name in dropped {
        headers.remove(name);
    }
    Ok(counts)
}

/// Removes the trailers of a request that an upstream might treat as headers.
pub(super) fn screen_trailers(mut trailers: HeaderMap, underscores: UnderscoreHeaders) -> HeaderMap {
    let is_dropped = |name: &&HeaderName| !header_names::passes_as_trailer(name.as_str(), underscores);
    let dropped: SmallVec<[HeaderName; 4]> = trailers.keys().filter(is_dropped).cloned().collect();
    for name in dropped {
        trailers.remove(name);
    }
    trailers
}

fn outlives_connection_option(name: &HeaderName) -> bool {
    header_names::kind(name.as_str()).outlives_connection_option()
}

/// Returns the header names that `Connection` lists.
fn named_by_connection(headers: &HeaderMap) -> impl Iterator<Item = HeaderName> {
    let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let names = values.flat_map(|value| value.split(',')).map(str::trim);
    // These two are not header names, and nearly all clients send one of them.
    let names = names.filter(|name| !name.eq_ignore_ascii_case("keep-alive") && !name.eq_ignore_ascii_case("close"));
    names.filter_map(|name| name.parse().ok())
}

/// Removes hop-by-hop headers.
pub(super) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    // One pass over the names is cheaper than a lookup of each hop-by-hop header.
    let mut found: SmallVec<[HeaderName; 4]> =
        headers.keys().filter(|name| header_names::kind(name.as_str()).is_hop_by_hop()).cloned().collect();
    if found.is_empty() {
        return;
    }
    if found.contains(&CONNECTION) {
        found.extend(named_by_connection(headers).filter(|name| !outlives_connection_option(name)));
    }
    let wants_trailers = found.contains(&TE) && headers.get_all(TE).iter().any(|value| lists(value, "trailers"));
    for name in found {
        headers.remove(name);
    }
    if wants_trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
}

fn lists(value: &HeaderValue, word: &str) -> bool {
    let words = value.to_str().unwrap_or_default().split(',');
    words.into_iter().any(|one| one.split(';').next().is_some_and(|one| one.trim().eq_ignore_ascii_case(word)))
}

/// Names the remaining hop-by-hop header in `Connection`, for an HTTP/1 upstream.
pub(super) fn set_connection_options(headers: &mut HeaderMap) {
    if headers.contains_key(TE) {
        headers.insert(CONNECTION, HeaderValue::from_static("te"));
    }
}

/// Returns whether a request has at most one `Content-Length`, and a valid one.
pub(super) fn has_one_length(headers: &HeaderMap) -> bool {
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    let is_good = |length: &HeaderValue| !length.is_empty() && length.as_bytes().iter().all(u8::is_ascii_digit);
    lengths.next().is_none_or(is_good) && lengths.next().is_none()
}

/// A set of bytes.
pub(super) type ByteKind = [bool; 256];

/// Returns the set of letters, digits and `others`.
pub(super) const fn letters_digits_and(others: &[u8]) -> ByteKind {
    let mut kind = [false; 256];
    let mut at = 0;
    while at < others.len() {
        kind[others[at] as usize] = true;
        at += 1;
    }
    let mut byte = 0;
    while byte < kind.len() {
        kind[byte] |= (byte as u8).is_ascii_alphanumeric();
        byte += 1;
    }
    kind
}

/// Joins the pieces of a cookie, which HTTP/2 may split (RFC 9113, section 8.2.3).
pub(super) fn join_cookies(headers: &mut HeaderMap) {
    if headers.get_all(COOKIE).iter().nth(1).is_none() {
        return;
    }
    let pieces: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if let Ok(whole) = HeaderValue::from_bytes(&pieces.join(&b"; "[..])) {
        headers.insert(COOKIE, whole);
    }
}

/// Returns the ID of a request, if requests get one: the client's, or a new one.
pub(super) fn request_id(headers: &HeaderMap, site: &Site, ids: &RequestIds) -> Option<HeaderValue> {
    if !site.adds_header(UpstreamHeader::RequestId) {
        return None;
    }
    let mut given = headers.get_all(X_REQUEST_ID).iter();
    // Of several, it is unknown which one the upstream uses.
    match (given.next(), given.next()) {
        (Some(id), None) if is_id(id.as_bytes()) => Some(id.clone()),
        _ => Some(ids.next()),
    }
}

/// Adds the headers that describe the client, the connection and the request.
pub(super) fn add_proxy_headers(
    version: Version,
    headers: &mut HeaderMap,
    site: &Site,
    client: &Client,
    id: Option<&HeaderValue>,
) {
    headers.reserve(ADDED);
    if site.adds_header(UpstreamHeader::XForwarded) {
        add_x_forwarded(headers, client);
    }
    if site.adds_header(UpstreamHeader::Forwarded) {
        add_forwarded(headers, client);
    }
    if site.adds_header(UpstreamHeader::Via) {
        append_via(version, headers);
    }
    if let Some(id) = id {
        headers.insert(X_REQUEST_ID, id.clone());
    }
}

/// Returns whether a client's request ID is valid.
pub(super) fn is_id(id: &[u8]) -> bool {
    (1..=MAX_ID_BYTES).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic)
}

/// Appends to the headers of a trusted proxy. Those of others were dropped before ([`screen`]).
fn add_x_forwarded(headers: &mut HeaderMap, client: &Client) {
    match headers.get_all(X_FORWARDED_FOR).iter().next() {
        Some(_) => {
            let chain: Vec<&[u8]> = headers.get_all(X_FORWARDED_FOR).iter().map(HeaderValue::as_bytes).collect();
            let chain = [&chain.join(&b", "[..]), client.address_text.as_bytes()].join(&b", "[..]);
            if let Ok(chain) = HeaderValue::from_maybe_shared(Bytes::from(chain)) {
                headers.insert(X_FORWARDED_FOR, chain);
            }
        }
        None => {
            headers.insert(X_FORWARDED_FOR, client.address_text.clone());
        }
    }
    if !headers.contains_key(X_FORWARDED_PROTO) {
        headers.insert(X_FORWARDED_PROTO, scheme(client.scheme));
    }
    if !headers.contains_key(X_FORWARDED_HOST) {
        match headers.get(HOST).cloned() {
            Some(host) => headers.insert(X_FORWARDED_HOST, host),
            None => headers.remove(X_FORWARDED_HOST),
        };
    }
}

fn scheme(scheme: Scheme) -> HeaderValue {
    HeaderValue::from_static(scheme.as_str())
}

fn add_forwarded(headers: &mut HeaderMap, client: &Client) {
    let mut element = Vec::with_capacity(96);
    put_forwarded(&mut element, client, headers.get(HOST).map(HeaderValue::as_bytes));
    let Ok(element) = HeaderValue::from_maybe_shared(Bytes::from(element)) else { return };
    headers.append(FORWARDED, element);
}

/// Writes an element such as `for=192.0.2.7;host="h:80";proto=http`.
pub(super) fn put_forwarded(out: &mut Vec<u8>, client: &Client, host: Option<&[u8]>) {
    out.extend_from_slice(b"for=");
    match client.address.ip().to_canonical() {
        IpAddr::V4(_) => out.extend_from_slice(client.address_text.as_bytes()),
        IpAddr::V6(address) => _ = write!(out, "\"[{address}]\""),
    }
    if let Some(host) = host {
        out.extend_from_slice(b";host=\"");
        out.extend_from_slice(host);
        out.push(b'"');
    }
    out.extend_from_slice(b";proto=");
    out.extend_from_slice(client.scheme.as_str().as_bytes());
}

/// Adds our entry to `Via`, for a message of that version.
pub(super) fn append_via(version: Version, headers: &mut HeaderMap) {
    let via = match version {
        Version::HTTP_2 => "2 tollgate",
        Version::HTTP_11 => OUR_VIA,
        _ => "1.0 tollgate",
    };
    headers.append(VIA, HeaderValue::from_static(via));
}

/// A generator of request IDs.
#[derive(Debug)]
pub(super) struct RequestIds {
    secret: RandomState,
    next: AtomicU64,
}

impl RequestIds {
    pub(super) fn new() -> Self {
        Self { secret: RandomState::new(), next: AtomicU64::new(0) }
    }

    /// Returns a new ID as a header.
    pub(super) fn next(&self) -> HeaderValue {
        // Hexadecimal digits are valid in a header.
        HeaderValue::from_bytes(&self.next_text()).unwrap_or(HeaderValue::from_static("0"))
    }

    /// Returns a new ID of 32 hexadecimal digits.
    pub(super) fn next_text(&self) -> [u8; 32] {
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
