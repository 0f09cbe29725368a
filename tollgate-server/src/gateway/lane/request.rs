//! A plain request: read from bytes, and written again as an upstream is asked it.

use std::mem::MaybeUninit;

use http::header::{CONNECTION, CONTENT_TYPE, EXPECT, HOST, TE, TRANSFER_ENCODING, UPGRADE};
use http::uri::{PathAndQuery, Uri};
use http::{HeaderMap, HeaderName, HeaderValue};
use tollgate::rules::file::HostHeader;

use super::super::answer::Failure;
use super::super::client::Client;
use super::super::exchange::Worker;
use super::super::guard::Guard;
use super::super::headers;
use super::super::site::{Route, Site, Weighted};
use super::text::{self, MAX_HEADERS};

/// What bytes are.
pub(super) enum Read<'a> {
    /// One request, and nothing behind it.
    Whole(Plain<'a>),
    /// The beginning of one.
    Part,
    /// Anything else. It is for hyper to say what.
    Other,
}

/// A request that has one reading and asks for nothing special. Its headers are beside it.
pub(super) struct Plain<'a> {
    /// As it came.
    pub(super) bytes: &'a [u8],
    pub(super) method: &'a str,
    /// Path and query.
    pub(super) target: &'a str,
    body: &'a [u8],
    /// Whether the client wants the connection to end with the answer.
    pub(super) is_last: bool,
}

impl<'a> Plain<'a> {
    pub(super) fn read(bytes: &'a [u8], map: &mut HeaderMap, max_head: usize) -> Read<'a> {
        let mut parsed = [const { MaybeUninit::uninit() }; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut []);
        let mut guard = Guard::new();
        let looked = guard.look(bytes, usize::MAX);
        let head = match (request.parse_with_uninit_headers(bytes, &mut parsed), looked) {
            (Ok(httparse::Status::Complete(head)), Ok(())) => head,
            (Ok(httparse::Status::Partial), Ok(())) if bytes.len() < max_head => return Read::Part,
            _ => return Read::Other,
        };
        let (Some(method), Some(target), Some(1)) = (request.method, request.path, request.version) else {
            return Read::Other;
        };
        // The guard is behind the body: these bytes are one request, or several.
        let is_one = guard.is_between() && guard.messages() == 1 && head <= max_head;
        if !is_one || method == "CONNECT" || !is_path(target) {
            return Read::Other;
        }
        match take_headers(request.headers, map) {
            Some(is_last) => Read::Whole(Self { bytes, method, target, body: &bytes[head..], is_last }),
            None => Read::Other,
        }
    }

    pub(super) fn body_bytes(&self) -> u64 {
        self.body.len() as u64
    }

    pub(super) fn is_head(&self) -> bool {
        self.method == "HEAD"
    }

    /// Whether it may be sent again when it is not known what became of it.
    pub(super) fn may_repeat(&self) -> bool {
        self.body.is_empty() && matches!(self.method, "GET" | "HEAD" | "OPTIONS" | "PUT" | "DELETE" | "TRACE")
    }

    /// Writes what the upstream is asked. The headers are made the upstream's; the id of the request comes back.
    pub(super) fn write(
        &self,
        out: &mut Vec<u8>,
        map: &mut HeaderMap,
        (site, route): (&Site, &Route),
        upstream: &Weighted,
        (client, worker): (&Client, &Worker),
    ) -> Result<Option<HeaderValue>, Failure> {
        headers::remove_hop_by_hop(map);
        let trusted = site.proxies.trusts(client.address.ip());
        let id = headers::tell_upstream(map, site, client, trusted, &worker.ids);
        route.request_edits.apply(map);
        if route.host == HostHeader::Upstream || !map.contains_key(HOST) {
            map.insert(HOST, upstream.target.host.clone());
        }
        out.extend_from_slice(self.method.as_bytes());
        out.push(b' ');
        match route.changes_paths().then(|| self.uri()).flatten() {
            Some(uri) => {
                let uri = route.asked_of(upstream, &uri)?;
                out.extend_from_slice(uri.path_and_query().map_or("/", PathAndQuery::as_str).as_bytes());
            }
            None => out.extend_from_slice(self.target.as_bytes()),
        }
        out.extend_from_slice(b" HTTP/1.1\r\n");
        text::put_headers(out, map);
        out.extend_from_slice(b"\r\n");
        out.extend_from_slice(self.body);
        Ok(id)
    }

    pub(super) fn uri(&self) -> Option<Uri> {
        self.target.parse().ok()
    }
}

/// Whether a target is a path with nothing in it that readers disagree on.
fn is_path(target: &str) -> bool {
    target.starts_with('/')
        && target.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/-._~%?=&+:@!$'()*,;".contains(&byte))
}

/// Takes the headers of a plain request, and whether it is the last of its connection; `None` if it is not plain.
fn take_headers(parsed: &[httparse::Header<'_>], map: &mut HeaderMap) -> Option<bool> {
    let mut is_last = false;
    for header in parsed {
        let name = HeaderName::from_bytes(header.name.as_bytes()).ok()?;
        let value = HeaderValue::from_bytes(header.value).ok()?;
        if name == CONNECTION {
            match header.value {
                close if close.eq_ignore_ascii_case(b"close") => is_last = true,
                keep if keep.eq_ignore_ascii_case(b"keep-alive") => {}
                _ => return None,
            }
        }
        let is_other = [UPGRADE, EXPECT, TE, TRANSFER_ENCODING].contains(&name)
            || (name == CONTENT_TYPE && header.value.starts_with(b"application/grpc"))
            || (name == HOST && (map.contains_key(HOST) || !headers::is_authority(&value)));
        if is_other {
            return None;
        }
        map.append(name, value);
    }
    map.contains_key(HOST).then_some(is_last)
}
