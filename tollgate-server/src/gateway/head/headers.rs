//! Headers: names with a meaning to a proxy, the filter for requests, the changes of a route, and lines as text.
//!
//! A header that the filter drops reaches neither limits nor upstreams, in HTTP/1 and HTTP/2: limits must not
//! count by something that the upstream does not get.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::net::IpAddr;

use http::{HeaderMap, HeaderName, HeaderValue};
use smallvec::SmallVec;
use tollgate_config::internal::{
    HeaderEdits, HeaderName as FileHeaderName, HeaderValueRule, RequestHeaderEdits, UnderscoreHeaders,
};
use tollgate_http::internal::{HeaderLine, is_folded_by_servers, is_forwarding_header, reads_as};
use tollgate_http1::TrailerNames;
pub(in crate::gateway) use tollgate_http1::content_length as length;
pub(in crate::gateway) use tollgate_http1::write::{
    CLOSE, KEEP_ALIVE, UPGRADE, lacks_body, put, put_headers, put_status,
};
use tollgate_rules::TrustedProxies;
use tollgate_rules::internal::HeaderFact;

pub(in crate::gateway) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The meaning of a header to a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gateway) enum HeaderKind {
    /// No special meaning.
    Other,
    /// A hop-by-hop header without further meaning.
    HopByHop,
    Connection,
    Te,
    Upgrade,
    Expect,
    TransferEncoding,
    /// Announces trailers.
    Trailer,
    Host,
    ContentLength,
    ContentType,
    Date,
    Location,
    Via,
    Forwarded,
    XForwardedFor,
    XForwardedProto,
    XForwardedHost,
    /// Another header in which proxies describe the client or the original request.
    Forwarding,
    XRequestId,
    MaxForwards,
    /// A rate limit header.
    RateLimit,
}

impl HeaderKind {
    /// Returns whether it is a hop-by-hop header.
    pub(in crate::gateway) fn is_hop_by_hop(self) -> bool {
        matches!(
            self,
            Self::HopByHop | Self::Connection | Self::Te | Self::Upgrade | Self::Expect | Self::TransferEncoding
        )
    }

    /// Returns whether a header is kept although `Connection` names it. Without its framing headers a request becomes
    /// another one, and without the forwarding headers of a trusted proxy it has another client (CVE-2022-31813).
    /// `Upgrade`, `TE` and `Connection` itself are handled later.
    pub(super) fn outlives_connection_option(self) -> bool {
        matches!(
            self,
            Self::Host
                | Self::ContentLength
                | Self::TransferEncoding
                | Self::Connection
                | Self::Te
                | Self::Upgrade
                | Self::Expect
                | Self::Forwarded
                | Self::XForwardedFor
                | Self::XForwardedProto
                | Self::XForwardedHost
                | Self::Forwarding
        )
    }
}

/// Returns the kind of a header name. Matching by length first leaves one candidate or none for most names.
pub(in crate::gateway) fn kind(name: &str) -> HeaderKind {
    let is = |wanted: &str| name.eq_ignore_ascii_case(wanted);
    match name.len() {
        2 if is("te") => HeaderKind::Te,
        3 if is("via") => HeaderKind::Via,
        4 if is("host") => HeaderKind::Host,
        4 if is("date") => HeaderKind::Date,
        6 if is("expect") => HeaderKind::Expect,
        7 if is("upgrade") => HeaderKind::Upgrade,
        7 if is("trailer") => HeaderKind::Trailer,
        8 if is("location") => HeaderKind::Location,
        9 if is("forwarded") => HeaderKind::Forwarded,
        9 if is("ratelimit") => HeaderKind::RateLimit,
        10 if is("connection") => HeaderKind::Connection,
        10 if is("keep-alive") => HeaderKind::HopByHop,
        12 if is("content-type") => HeaderKind::ContentType,
        12 if is("x-request-id") => HeaderKind::XRequestId,
        12 if is("max-forwards") => HeaderKind::MaxForwards,
        14 if is("content-length") => HeaderKind::ContentLength,
        15 if is("x-forwarded-for") => HeaderKind::XForwardedFor,
        16 if is("x-forwarded-host") => HeaderKind::XForwardedHost,
        16 if is("proxy-connection") => HeaderKind::HopByHop,
        17 if is("x-forwarded-proto") => HeaderKind::XForwardedProto,
        17 if is("transfer-encoding") => HeaderKind::TransferEncoding,
        18 if is("proxy-authenticate") => HeaderKind::HopByHop,
        19 if is("proxy-authorization") => HeaderKind::HopByHop,
        10.. if begins(name, "ratelimit-") || begins(name, "x-ratelimit-") => HeaderKind::RateLimit,
        _ if is_forwarding_header(name) => HeaderKind::Forwarding,
        _ => HeaderKind::Other,
    }
}

fn begins(name: &str, with: &str) -> bool {
    name.get(..with.len()).is_some_and(|beginning| beginning.eq_ignore_ascii_case(with))
}

/// Decides which headers of a request are kept.
pub(in crate::gateway) struct HeaderFilter<'a> {
    underscores: UnderscoreHeaders,
    proxies: &'a TrustedProxies,
    /// `None` if it is unknown, and trusted with nothing.
    peer: Option<IpAddr>,
    /// Whether the peer is a trusted proxy, determined when it is first needed.
    is_trusted: OnceCell<bool>,
}

/// The fate of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gateway) enum Fate {
    Kept,
    Dropped(DropReason),
    /// The whole request is refused.
    Refused,
}

/// The reason why a header is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gateway) enum DropReason {
    HopByHop,
    /// Its name has a character other than letters, digits and hyphens.
    Underscore,
    /// It describes a client, and its sender is not a trusted proxy.
    Forwarding,
}

/// The number of dropped headers of a request, except for hop-by-hop headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::gateway) struct DroppedHeaders {
    pub(in crate::gateway) underscore: u32,
    pub(in crate::gateway) forwarding: u32,
}

impl DroppedHeaders {
    pub(in crate::gateway) fn add(&mut self, reason: DropReason, headers: u32) {
        match reason {
            DropReason::HopByHop => {}
            DropReason::Underscore => self.underscore += headers,
            DropReason::Forwarding => self.forwarding += headers,
        }
    }
}

impl<'a> HeaderFilter<'a> {
    pub(in crate::gateway) fn new(
        underscores: UnderscoreHeaders,
        proxies: &'a TrustedProxies,
        peer: impl Into<Option<IpAddr>>,
    ) -> Self {
        Self { underscores, proxies, peer: peer.into(), is_trusted: OnceCell::new() }
    }

    /// Returns the fate of a request header with this name and kind.
    pub(super) fn fate(&self, name: &str, kind: HeaderKind) -> Fate {
        match kind {
            HeaderKind::Other | HeaderKind::Forwarding | HeaderKind::RateLimit if is_folded_by_servers(name) => {
                match self.underscores {
                    UnderscoreHeaders::Keep if !is_special_with_hyphens(name) => Fate::Kept,
                    UnderscoreHeaders::Refuse => Fate::Refused,
                    _ => Fate::Dropped(DropReason::Underscore),
                }
            }
            HeaderKind::HopByHop => Fate::Dropped(DropReason::HopByHop),
            HeaderKind::Forwarded
            | HeaderKind::XForwardedFor
            | HeaderKind::XForwardedProto
            | HeaderKind::XForwardedHost
            | HeaderKind::Forwarding
                if !self.is_trusted() =>
            {
                Fate::Dropped(DropReason::Forwarding)
            }
            _ => Fate::Kept,
        }
    }

    fn is_trusted(&self) -> bool {
        *self.is_trusted.get_or_init(|| self.peer.is_some_and(|peer| self.proxies.trusts(peer)))
    }
}

/// Returns whether a trailer of this name is forwarded. Limits have decided before it arrives, so every trailer that
/// describes the client, the target or the route of the request is dropped, from trusted proxies too (RFC 9110, section
/// 6.5.1).
fn passes_as_trailer(name: &str, underscores: UnderscoreHeaders) -> bool {
    const OF_HEADS: [&str; 2] = ["authorization", "cookie"];
    let is_kept = match is_folded_by_servers(name) {
        true => underscores == UnderscoreHeaders::Keep && !is_special_with_hyphens(name),
        false => kind(name) == HeaderKind::Other,
    };
    is_kept && !OF_HEADS.iter().any(|of_heads| name.eq_ignore_ascii_case(of_heads))
}

/// Removes the trailers of a request that an upstream might treat as headers.
pub(in crate::gateway) fn screen_request_trailers(
    mut trailers: HeaderMap,
    underscores: UnderscoreHeaders,
) -> HeaderMap {
    let is_dropped = |name: &&HeaderName| !passes_as_trailer(name.as_str(), underscores);
    let dropped: SmallVec<[HeaderName; 4]> = trailers.keys().filter(is_dropped).cloned().collect();
    for name in dropped {
        trailers.remove(name);
    }
    trailers
}

/// Returns whether a name has a meaning to a proxy once an upstream reads its underscores, dots and other special
/// characters as hyphens.
fn is_special_with_hyphens(name: &str) -> bool {
    kind(&name.replace(|letter: char| !letter.is_ascii_alphanumeric(), "-")) != HeaderKind::Other
}

/// The headers of a message and their kinds.
#[derive(Default)]
pub(in crate::gateway) struct HeaderBuffer<'a> {
    lines: SmallVec<[HeaderLine<'a>; 24]>,
    kinds: SmallVec<[HeaderKind; 24]>,
    pub(super) dropped: DroppedHeaders,
}

impl<'a> HeaderBuffer<'a> {
    pub(in crate::gateway) fn push(&mut self, line: HeaderLine<'a>, kind: HeaderKind) {
        self.lines.push(line);
        self.kinds.push(kind);
    }

    /// Removes the headers that `Connection` names.
    pub(super) fn remove_named(&mut self, names: &[&[u8]]) {
        let mut at = 0;
        while at < self.lines.len() {
            let name = self.lines[at].name.as_bytes();
            let is_named = names.iter().any(|named| named.eq_ignore_ascii_case(name));
            if is_named && !self.kinds[at].outlives_connection_option() {
                self.lines.remove(at);
                self.kinds.remove(at);
            } else {
                at += 1;
            }
        }
    }

    pub(in crate::gateway) fn view(&self) -> HeadersView<'_> {
        HeadersView { lines: &self.lines, kinds: &self.kinds }
    }
}

/// A view of a [`HeaderBuffer`].
#[derive(Clone, Copy)]
pub(in crate::gateway) struct HeadersView<'a> {
    pub(in crate::gateway) lines: &'a [HeaderLine<'a>],
    kinds: &'a [HeaderKind],
}

impl<'a> HeadersView<'a> {
    pub(in crate::gateway) fn iter(self) -> impl Iterator<Item = (&'a HeaderLine<'a>, HeaderKind)> {
        self.lines.iter().zip(self.kinds.iter().copied())
    }

    pub(in crate::gateway) fn values(self, wanted: HeaderKind) -> impl Iterator<Item = &'a [u8]> {
        self.iter().filter(move |(_, kind)| *kind == wanted).map(|(line, _)| line.value)
    }
}

/// Headers to remove, then to set, then to add.
#[derive(Debug, Default)]
pub(in crate::gateway) struct Edits {
    remove: Vec<HeaderName>,
    set: Vec<(HeaderName, HeaderValue)>,
    /// Headers of requests to set to a fact about the request. One that the request lacks is only removed.
    set_from: Vec<(HeaderName, HeaderFact)>,
    add: Vec<(HeaderName, HeaderValue)>,
}

impl Edits {
    /// Returns whether headers of that name are removed, in every spelling that an upstream or a client may take for it.
    pub(in crate::gateway) fn removes(&self, name: &str) -> bool {
        let is = |other: &HeaderName| reads_as(other.as_str(), name);
        self.remove.iter().any(is)
            || self.set.iter().any(|(other, _)| is(other))
            || self.set_from.iter().any(|(other, _)| is(other))
    }

    /// Returns whether headers of any name are removed.
    pub(in crate::gateway) fn removes_some(&self) -> bool {
        !(self.remove.is_empty() && self.set.is_empty() && self.set_from.is_empty())
    }

    /// Returns whether a header is removed and not replaced.
    pub(super) fn removes_for_good(&self, name: &HeaderName) -> bool {
        self.remove.contains(name) && !self.sets(name)
    }

    pub(in crate::gateway) fn sets(&self, name: &HeaderName) -> bool {
        self.new_headers().any(|(other, _)| other == name)
    }

    /// Returns the headers whose value is a fact about the request.
    pub(in crate::gateway) fn facts(&self) -> &[(HeaderName, HeaderFact)] {
        &self.set_from
    }

    /// Removes the headers or trailers that have the name of a removed or replaced header.
    pub(in crate::gateway) fn screen(&self, headers: &mut HeaderMap) {
        let removed = headers.keys().filter(|name| self.removes(name.as_str()));
        for name in removed.cloned().collect::<SmallVec<[HeaderName; 4]>>() {
            headers.remove(name);
        }
    }

    pub(in crate::gateway) fn new_headers(&self) -> impl Iterator<Item = &(HeaderName, HeaderValue)> {
        self.set.iter().chain(&self.add)
    }

    /// Writes the new headers, except for some.
    pub(in crate::gateway) fn write_new(&self, out: &mut Vec<u8>, except: impl Fn(&HeaderName) -> bool) {
        for (name, value) in self.new_headers().filter(|(name, _)| !except(name)) {
            put(out, name.as_str(), value.as_bytes());
        }
    }
}

impl Edits {
    pub(in crate::gateway) fn of_responses(rule: &HeaderEdits) -> Self {
        let (set, add) = (pairs(&rule.set).collect(), pairs(&rule.add).collect());
        Self { remove: names(&rule.remove), set, set_from: Vec::new(), add }
    }

    pub(in crate::gateway) fn of_requests(rule: &RequestHeaderEdits) -> Self {
        let (mut set, mut set_from) = (Vec::new(), Vec::new());
        for (name, value) in &rule.set {
            match value {
                HeaderValueRule::Constant(text) => set.extend(pair(name, text)),
                HeaderValueRule::From(rule) => {
                    set_from.extend(HeaderName::try_from(name).map(|name| (name, rule.from.compile())));
                }
            }
        }
        Self { remove: names(&rule.remove), set, set_from, add: pairs(&rule.add).collect() }
    }

    pub(in crate::gateway) fn apply(&self, headers: &mut HeaderMap) {
        self.screen(headers);
        for (name, value) in self.new_headers() {
            headers.append(name, value.clone());
        }
    }
}

/// Returns the headers of a rule. The file was validated, so all names and values are valid.
fn pairs(map: &BTreeMap<String, String>) -> impl Iterator<Item = (HeaderName, HeaderValue)> + '_ {
    map.iter().filter_map(|(name, value)| pair(name, value))
}

fn pair(name: &str, value: &str) -> Option<(HeaderName, HeaderValue)> {
    Some((HeaderName::try_from(name).ok()?, HeaderValue::try_from(value).ok()?))
}

fn names(names: &[FileHeaderName]) -> Vec<HeaderName> {
    names.iter().filter_map(|name| HeaderName::try_from(name.as_str()).ok()).collect()
}

pub(in crate::gateway) fn map(headers: &BTreeMap<String, String>) -> HeaderMap {
    pairs(headers).collect()
}

/// Headers without a meaning to a proxy that change how a message is read (RFC 9110, section 6.5.1).
const FORBIDDEN: [&str; 6] =
    ["authorization", "cache-control", "content-encoding", "content-range", "max-forwards", "set-cookie"];

/// Returns whether a trailer may be passed on. The gateway itself sends those with a meaning to a proxy, such as
/// `Connection`, `RateLimit` and `X-Request-Id`, or nobody may.
fn is_harmless(name: &str) -> bool {
    kind(name) == HeaderKind::Other && !FORBIDDEN.iter().any(|forbidden| name.eq_ignore_ascii_case(forbidden))
}

/// Returns the trailers to pass on, of those that a response announces.
pub(in crate::gateway) fn trailer_names<'v>(announced: impl Iterator<Item = &'v [u8]>) -> TrailerNames {
    TrailerNames::new(announced.filter(|name| str::from_utf8(name).is_ok_and(is_harmless)))
}

/// Removes the trailers of a response that may not be passed on.
pub(in crate::gateway) fn screen_response_trailers(trailers: &mut HeaderMap) {
    let removed = trailers.keys().filter(|name| !is_harmless(name.as_str()));
    for name in removed.cloned().collect::<SmallVec<[HeaderName; 4]>>() {
        trailers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use tollgate_http1::Framing;

    use super::*;

    fn fates(underscores: UnderscoreHeaders, peer: [u8; 4]) -> impl Fn(&str) -> Fate {
        let proxies = TrustedProxies::parse(["10.0.0.0/8"]).unwrap();
        move |name| HeaderFilter::new(underscores, &proxies, IpAddr::from(peer)).fate(name, kind(name))
    }

    #[test]
    fn forwarding_headers_are_kept_from_trusted_proxies_alone() {
        let (trusted, stranger) =
            (fates(UnderscoreHeaders::Drop, [10, 0, 0, 1]), fates(UnderscoreHeaders::Drop, [192, 0, 2, 1]));
        for name in
            ["X-Forwarded-For", "forwarded", "x-forwarded-port", "X-Real-IP", "true-client-ip", "x-original-url"]
        {
            assert_eq!((trusted(name), stranger(name)), (Fate::Kept, Fate::Dropped(DropReason::Forwarding)), "{name}");
        }
        for name in ["x-user-id", "host", "x-request-id", "connection", "content-length", "via"] {
            assert_eq!((trusted(name), stranger(name)), (Fate::Kept, Fate::Kept), "{name}");
        }
    }

    #[test]
    fn names_that_servers_fold_are_dropped_kept_or_refused_as_set() {
        let dropped = Fate::Dropped(DropReason::Underscore);
        for (setting, other, ours) in [
            (UnderscoreHeaders::Drop, dropped, dropped),
            (UnderscoreHeaders::Keep, Fate::Kept, dropped),
            (UnderscoreHeaders::Refuse, Fate::Refused, Fate::Refused),
        ] {
            for peer in [[10, 0, 0, 1], [192, 0, 2, 1]] {
                let fate = fates(setting, peer);
                for separator in "!#$%&'*+.^_`|~".chars() {
                    let name = format!("x{separator}user-id");
                    assert_eq!(fate(&name), other, "{name}");
                }
                for name in [
                    "x_forwarded_for",
                    "X_Real_IP",
                    "x.real.ip",
                    "content_length",
                    "Content.Length",
                    "Transfer_Encoding",
                    "x-ratelimit_limit",
                    "x-forwarded~for",
                ] {
                    assert_eq!(fate(name), ours, "{name}");
                }
            }
        }
    }

    #[test]
    fn trailers_with_a_meaning_to_a_proxy_do_not_pass() {
        for name in [
            "Connection",
            "keep-alive",
            "Transfer-Encoding",
            "content-length",
            "Content-Type",
            "trailer",
            "Upgrade",
            "RateLimit",
            "ratelimit-policy",
            "X-RateLimit-Remaining",
            "X-Request-Id",
            "Set-Cookie",
            "X-Forwarded-For",
        ] {
            let framing = Framing::Chunked(trailer_names([name, "x-sum"].into_iter().map(str::as_bytes)));
            let mut out = Vec::new();
            framing.end(&mut out, [(name, &b"1"[..]), ("X-Sum", b"42")]).unwrap();
            assert_eq!(str::from_utf8(&out), Ok("0\r\nX-Sum: 42\r\n\r\n"), "{name}");
        }
    }

    #[test]
    fn trailers_that_say_who_asks_for_what_do_not_pass() {
        for name in [
            "x-real-ip",
            "x-forwarded-for",
            "host",
            "content-length",
            "trailer",
            "Authorization",
            "cookie",
            "x_user",
            "x.user",
        ] {
            assert!(!passes_as_trailer(name, UnderscoreHeaders::Drop), "{name}");
        }
        assert!(passes_as_trailer("x-checksum", UnderscoreHeaders::Drop));
        assert!(passes_as_trailer("grpc-status", UnderscoreHeaders::Refuse));
        assert!(passes_as_trailer("x_sum", UnderscoreHeaders::Keep));
        assert!(passes_as_trailer("x.sum", UnderscoreHeaders::Keep));
        assert!(!passes_as_trailer("x_real_ip", UnderscoreHeaders::Keep));
        assert!(!passes_as_trailer("x.real.ip", UnderscoreHeaders::Keep));
    }
}
