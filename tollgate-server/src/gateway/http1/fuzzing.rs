//! Requests of HTTP/1 as the gateway reads them, for the fuzzer.

use std::net::Ipv4Addr;

use tollgate_config::internal::UnderscoreHeaders;
use tollgate_rules::TrustedProxies;

use super::codec::PlainRequest;
use crate::gateway::head::headers::{HeaderBuffer, HeaderFilter, HeadersView};

/// The longest head, as by default.
const MAX_HEAD: usize = 64 << 10;

/// A request as the gateway reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Http1Request {
    pub method: String,
    pub target: String,
    pub is_http10: bool,
    /// The names and values of the fields that are not dropped.
    pub fields: Vec<(String, Vec<u8>)>,
    pub body: Vec<u8>,
    /// The trailers with the final empty line, if it is chunked.
    pub trailers: Vec<u8>,
    /// Whether all of the body has arrived.
    pub is_complete: bool,
    /// Whether the connection ends with it.
    pub is_last: bool,
    /// Whether the client wants to switch to another protocol.
    pub has_upgrade: bool,
}

/// How the bytes of a connection end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Http1End {
    /// After a message that another one may follow.
    Open,
    /// After the last message.
    Closed,
    /// In a message.
    Incomplete,
    /// With a message that is refused.
    Refused,
}

/// Reads the requests of a connection.
pub fn read_requests(mut bytes: &[u8]) -> (Vec<Http1Request>, Http1End) {
    let mut requests = Vec::new();
    while !bytes.is_empty() {
        let (proxies, peer) = (TrustedProxies::default(), std::net::IpAddr::from(Ipv4Addr::LOCALHOST));
        let filter = HeaderFilter::new(UnderscoreHeaders::Keep, &proxies, peer);
        let mut lines = HeaderBuffer::default();
        let plain = match PlainRequest::read(bytes, &mut lines, MAX_HEAD, &filter) {
            Ok(Some(plain)) => plain,
            Ok(None) => return (requests, Http1End::Incomplete),
            Err(_) => return (requests, Http1End::Refused),
        };
        let is_refused = plain.head.failure(u64::MAX).is_some() || plain.head.check_readable().is_err();
        if is_refused || plain.rest.is_err() {
            return (requests, Http1End::Refused);
        }
        let (body, rest) = plain.received_body();
        let request = Http1Request {
            method: plain.head.method.to_owned(),
            target: plain.head.target.received().map(|target| target.to_string()).unwrap_or_default(),
            is_http10: plain.head.is_http10(),
            fields: fields(plain.head.headers),
            body,
            trailers: rest.trailers().to_vec(),
            is_complete: rest.is_over(),
            is_last: plain.head.is_last,
            has_upgrade: plain.head.upgrade.is_some(),
        };
        let (is_complete, is_last, length) = (request.is_complete, request.is_last, plain.bytes.len());
        requests.push(request);
        match (is_complete, is_last) {
            (false, _) => return (requests, Http1End::Incomplete),
            (true, true) => return (requests, Http1End::Closed),
            (true, false) => bytes = &bytes[length..],
        }
    }
    (requests, Http1End::Open)
}

fn fields(headers: HeadersView<'_>) -> Vec<(String, Vec<u8>)> {
    headers.iter().map(|(line, _)| (line.name.to_owned(), line.value.to_vec())).collect()
}
