//! The headers of messages in the lane, and those of requests that determine how they are served.

use smallvec::SmallVec;
use tollgate::internal::HeaderLine;

use super::super::failure::Failure;
use super::super::framing;
use super::super::header_names::{DroppedHeaders, Fate, HeaderFilter, HeaderKind, kind};
use super::request_body::BodyLength;
use super::text;

/// The headers of a message and their kinds.
#[derive(Default)]
pub(super) struct HeaderBuffer<'a> {
    lines: SmallVec<[HeaderLine<'a>; 24]>,
    kinds: SmallVec<[HeaderKind; 24]>,
    pub(super) dropped: DroppedHeaders,
}

impl<'a> HeaderBuffer<'a> {
    pub(super) fn push(&mut self, header: &httparse::Header<'a>, kind: HeaderKind) {
        self.lines.push(HeaderLine { name: header.name, value: header.value });
        self.kinds.push(kind);
    }

    /// Removes the headers that `Connection` names.
    fn remove_named(&mut self, names: &[&[u8]]) {
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

    pub(super) fn view(&self) -> HeadersView<'_> {
        HeadersView { lines: &self.lines, kinds: &self.kinds }
    }
}

/// A view of a [`HeaderBuffer`].
#[derive(Clone, Copy)]
pub(super) struct HeadersView<'a> {
    pub(super) lines: &'a [HeaderLine<'a>],
    kinds: &'a [HeaderKind],
}

impl<'a> HeadersView<'a> {
    pub(super) fn iter(self) -> impl Iterator<Item = (&'a HeaderLine<'a>, HeaderKind)> {
        self.lines.iter().zip(self.kinds.iter().copied())
    }

    pub(super) fn values(self, wanted: HeaderKind) -> impl Iterator<Item = &'a [u8]> {
        self.iter().filter(move |(_, kind)| *kind == wanted).map(|(line, _)| line.value)
    }
}

/// The version of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestVersion {
    Http10,
    Http11,
}

/// The headers that determine the framing, the host, and how the response is sent.
pub(super) struct RequestHeaders<'a> {
    /// Requests of HTTP/1.0 may have none.
    pub(super) host: Option<&'a [u8]>,
    /// The reason why the request is refused.
    pub(super) failure: Option<Failure>,
    pub(super) length: BodyLength,
    /// Whether the client waits for `100 Continue` before it sends the body.
    pub(super) expects_continue: bool,
    /// Whether the client accepts trailers.
    pub(super) wants_trailers: bool,
    pub(super) is_grpc: bool,
    /// Whether the client wants the connection closed after the response.
    pub(super) is_last: bool,
    /// The protocols that the client wants to switch to.
    pub(super) upgrade: Option<&'a [u8]>,
}

/// The options in `Connection`.
#[derive(Default)]
struct ConnectionOptions<'a> {
    has_close: bool,
    has_keep_alive: bool,
    has_upgrade: bool,
    /// The others, which are names of headers.
    names: SmallVec<[&'a [u8]; 2]>,
}

impl<'a> RequestHeaders<'a> {
    /// Reads the headers of a request. Returns `None` if they do not determine the length of its body.
    pub(super) fn read(
        parsed: &[httparse::Header<'a>],
        version: RequestVersion,
        lines: &mut HeaderBuffer<'a>,
        filter: &HeaderFilter<'_>,
    ) -> Option<Self> {
        let (mut hosts, mut host, mut length) = (0_u32, None, None);
        let (mut options, mut upgrade) = (ConnectionOptions::default(), UpgradeHeader::Absent);
        let (mut expects_continue, mut wants_trailers, mut is_grpc, mut is_refused) = (false, false, false, false);
        let is_http10 = version == RequestVersion::Http10;
        for header in parsed {
            let (kind, value) = (kind(header.name), header.value);
            match kind {
                HeaderKind::Host => {
                    hosts += 1;
                    host.get_or_insert(value);
                }
                HeaderKind::ContentLength => {
                    length.replace(BodyLength::Known(framing::length(value)?)).is_none().then_some(())?;
                }
                HeaderKind::TransferEncoding if value.eq_ignore_ascii_case(b"chunked") && !is_http10 => {
                    length.replace(BodyLength::Chunked).is_none().then_some(())?;
                }
                HeaderKind::TransferEncoding => return None,
                // Other expectations are ignored (RFC 9110, section 10.1.1).
                HeaderKind::Expect => expects_continue = value.eq_ignore_ascii_case(b"100-continue") && !is_http10,
                HeaderKind::Connection => options.add(value),
                HeaderKind::Te => wants_trailers |= lists(value, b"trailers"),
                HeaderKind::Upgrade => upgrade.add(value),
                HeaderKind::ContentType => is_grpc |= is_grpc_type(value),
                _ => {}
            }
            match filter.fate(header.name, kind) {
                Fate::Kept => lines.push(header, kind),
                Fate::Dropped(reason) => lines.dropped.add(reason, 1),
                Fate::Refused => is_refused = true,
            }
        }
        if !options.names.is_empty() {
            lines.remove_named(&options.names);
        }
        let failure = match hosts {
            _ if is_refused => Some(Failure::UnderscoreHeader),
            0 if !is_http10 => Some(Failure::NoHost),
            0 | 1 => None,
            _ => Some(Failure::SeveralHosts),
        };
        let length = length.unwrap_or(BodyLength::Known(0));
        let is_last = options.has_close || is_http10 && !options.has_keep_alive;
        let upgrade = upgrade.protocol().filter(|_| options.has_upgrade && !is_http10);
        Some(Self { host, failure, length, expects_continue, wants_trailers, is_grpc, is_last, upgrade })
    }
}

/// The `Upgrade` headers of a request.
enum UpgradeHeader<'a> {
    Absent,
    /// The value of the first one.
    Other(&'a [u8]),
    /// They name another version of HTTP. Limits would not apply to its requests.
    Http,
}

impl<'a> UpgradeHeader<'a> {
    fn add(&mut self, value: &'a [u8]) {
        const HTTP: [&[u8]; 4] = [b"h2c", b"h2", b"http", b"tls"];
        let names = value.split(|byte| *byte == b',').filter_map(|name| name.split(|byte| *byte == b'/').next());
        let names = names.map(<[u8]>::trim_ascii);
        let is_http = |name: &[u8]| HTTP.iter().any(|http| http.eq_ignore_ascii_case(name));
        *self = match self {
            _ if !is_text(value) || names.into_iter().any(is_http) => Self::Http,
            Self::Absent => Self::Other(value),
            Self::Other(first) => Self::Other(first),
            Self::Http => Self::Http,
        };
    }

    /// Returns the protocols that the client accepts, if it may switch to them.
    fn protocol(self) -> Option<&'a [u8]> {
        match self {
            Self::Other(protocol) => Some(protocol),
            Self::Absent | Self::Http => None,
        }
    }
}

impl<'a> ConnectionOptions<'a> {
    /// Adds the options in a value. One that is not text names no header.
    fn add(&mut self, value: &'a [u8]) {
        // Nearly all clients send this, or nothing.
        if value.eq_ignore_ascii_case(b"keep-alive") {
            self.has_keep_alive = true;
            return;
        }
        if !is_text(value) {
            return;
        }
        for option in value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii) {
            match option {
                b"" => {}
                option if option.eq_ignore_ascii_case(b"keep-alive") => self.has_keep_alive = true,
                option if option.eq_ignore_ascii_case(b"close") => self.has_close = true,
                option if option.eq_ignore_ascii_case(b"upgrade") => self.has_upgrade = true,
                name => self.names.push(name),
            }
        }
    }
}

fn is_text(value: &[u8]) -> bool {
    value.iter().all(|byte| matches!(byte, b' '..=b'~' | b'\t'))
}

/// Returns whether a list contains a word, with or without parameters.
fn lists(value: &[u8], word: &[u8]) -> bool {
    let words = value.split(|byte| *byte == b',').filter_map(|one| one.split(|byte| *byte == b';').next());
    words.map(<[u8]>::trim_ascii).any(|one| one.eq_ignore_ascii_case(word))
}

fn is_grpc_type(content_type: &[u8]) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    let parts = content_type.split_at_checked(GRPC.len());
    parts.is_some_and(|(media_type, rest)| {
        media_type.eq_ignore_ascii_case(GRPC) && matches!(rest.first(), None | Some(b'+' | b';' | b' '))
    })
}
