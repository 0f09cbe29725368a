//! A lane for those who are refused over and over.
//!
//! A client that floods a spent limit should cost less than one that is served. So once a connection has been refused,
//! its next plain request is looked at before hyper: if it is refused again, it is answered here, and hyper never hears
//! of it. If it may pass, hyper gets its bytes as they came, and what was decided waits for it in the [`Client`].
//!
//! Deliberately not here: anything that is not plain. A body, a pipeline, an upgrade, a content to negotiate or a line for
//! the access log are hyper's way.

use std::sync::Arc;
use std::time::SystemTime;

use http::header::{ACCEPT, CONNECTION, CONTENT_TYPE, EXPECT, HOST, TE, UPGRADE};
use http::{HeaderMap, HeaderName, HeaderValue, Response};
use tollgate::Asking;
use tollgate::rules::Facts;

use super::client::Client;
use super::exchange::{Ending, Worker};
use super::headers;
use super::site::Site;
use super::ticks::Tick;

/// A request with more headers is not plain.
const MAX_HEADERS: usize = 32;

/// What is kept from one refusal to the next, so that none of it is allocated again.
pub(super) struct Lane {
    worker: Arc<Worker>,
    headers: HeaderMap,
    answer: Vec<u8>,
    date: String,
    date_of: Option<Tick>,
}

/// What was decided about a request before hyper has read it.
pub(super) struct Asked {
    pub(super) site: Arc<Site>,
    pub(super) route: Option<usize>,
    pub(super) asking: Asking,
}

impl Lane {
    pub(super) fn new(worker: Arc<Worker>) -> Self {
        Self { worker, headers: HeaderMap::new(), answer: Vec::new(), date: String::new(), date_of: None }
    }

    /// The whole answer to the one request that these bytes are, if it is plain and refused. What was decided about one
    /// that may pass is left with the client.
    pub(super) fn refusal(&mut self, bytes: &[u8], client: &Arc<Client>) -> Option<&[u8]> {
        let site = self.worker.site.load_full();
        if site.log.is_some() || self.worker.is_closing() {
            return None;
        }
        let mut parsed = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut parsed);
        let whole = request.parse(bytes).ok()?;
        let (method, target) = (request.method?, request.path?);
        let is_plain = whole == httparse::Status::Complete(bytes.len())
            && request.version == Some(1)
            && !matches!(method, "HEAD" | "CONNECT")
            && target.starts_with('/');
        if !is_plain || !take_headers(request.headers, &mut self.headers) {
            return None;
        }
        let (route, asking) = self.worker.ask(Facts::new(method, target).headers(&self.headers), client, &site);
        let ruling = match &asking {
            Asking::Done(ruling) if !ruling.is_allowed() => ruling,
            _ => {
                client.leave(Asked { site, route, asking });
                return None;
            }
        };
        let response = ruling.response(&self.headers)?;
        client.request_began();
        let mut ending = Ending::new(client);
        if let Some(number) = route {
            ending.enter(site.routes[number].tally(self.worker.number));
        }
        ending.note_ruling(ruling);
        ending.note_status(response.status());
        ending.note_sent(response.body().len());
        self.write(&response);
        Some(&self.answer)
    }

    /// Writes an answer as hyper would.
    fn write(&mut self, response: &Response<bytes::Bytes>) {
        let now = self.worker.ticks.now();
        if self.date_of != Some(now) {
            self.date = httpdate::fmt_http_date(wall_clock());
            self.date_of = Some(now);
        }
        let out = &mut self.answer;
        out.clear();
        let status = response.status();
        for part in ["HTTP/1.1 ", status.as_str(), " ", status.canonical_reason().unwrap_or_default(), "\r\n"] {
            out.extend_from_slice(part.as_bytes());
        }
        for (name, value) in response.headers() {
            put(out, name.as_str(), value.as_bytes());
        }
        put(out, "content-length", itoa::Buffer::new().format(response.body().len()).as_bytes());
        put(out, "date", self.date.as_bytes());
        out.extend_from_slice(b"\r\n");
        out.extend_from_slice(response.body());
    }
}

fn put(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

#[expect(clippy::disallowed_methods, reason = "the date of an answer is the wall clock's, and decides nothing")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// Takes the headers of a plain request; `false` if it is not plain.
fn take_headers(parsed: &[httparse::Header<'_>], map: &mut HeaderMap) -> bool {
    map.clear();
    for header in parsed {
        let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(header.name.as_bytes()), HeaderValue::from_bytes(header.value))
        else {
            return false;
        };
        let is_other = [CONNECTION, UPGRADE, EXPECT, TE, CONTENT_TYPE].contains(&name)
            || (name == ACCEPT && header.value != b"*/*")
            || (name == HOST && (map.contains_key(HOST) || !headers::is_authority(&value)));
        if is_other {
            return false;
        }
        map.append(name, value);
    }
    map.contains_key(HOST)
}
