//! HTTP/1: where the gateway accepts a message, hyper and llhttp read the same, or refuse it for a reason that is listed
//! here. Where the gateway refuses, nothing is compared: it may be stricter.

use http::Uri;
use llhttp::{Connection, Kind, Message};
use tollgate_server::fuzzing::{Http1End, Http1Request, read_requests};

use crate::http1_messages::{Http1Body, Http1Framing, read_request_chunks, read_response, read_response_chunks};
use crate::hyper_conn;

const CHUNKED_REQUEST: &[u8] = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n";
const CHUNKED_RESPONSE: &[u8] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";

/// The head of a request, without a body.
pub fn request_head(input: &[u8]) {
    let head = [&b"GET / HTTP/1.1\r\nHost: h\r\n"[..], input, b"\r\n"].concat();
    for bytes in [input, &head] {
        compare_requests(bytes);
    }
}

/// The requests of a connection, one after another.
pub fn connection(input: &[u8]) {
    compare_requests(input);
}

fn compare_requests(input: &[u8]) {
    let (requests, end) = read_requests(input);
    compare_with_llhttp(&requests, end, input);
    compare_with_hyper(&requests, end, input);
}

fn compare_with_llhttp(requests: &[Http1Request], end: Http1End, input: &[u8]) {
    let Some(theirs) = llhttp::read(input, Kind::Requests).filter(|_| !has_tab_in_framing(input)) else { return };
    for (index, ours) in requests.iter().enumerate() {
        let Some(message) = theirs.messages.get(index).filter(|message| message.has_head) else {
            let is_listed = match &theirs.end[..] {
                // It has a list of methods, and refuses targets that `http::Uri` accepts.
                "HPE_INVALID_METHOD" | "HPE_INVALID_URL" => true,
                // It reserves this method for HTTP/2.
                "HPE_INVALID_VERSION" => ours.method == "PRI",
                _ => false,
            };
            // It reads no request after one that wants another protocol.
            let is_behind_upgrade = theirs.end == "HPE_PAUSED_UPGRADE";
            assert!(is_listed || is_behind_upgrade, "llhttp refuses request {index} with {}: {ours:?}", theirs.end);
            return;
        };
        assert_eq!(message.method, ours.method.as_bytes());
        assert_eq!(as_uri(&message.target), Some(ours.target.clone()), "{ours:?}");
        assert_eq!(message.version, (1, u8::from(!ours.is_http10)), "{ours:?}");
        assert_part_of(&ours.fields, message.fields.iter().map(|(name, value)| (&name[..], &value[..])));
        // A request for another protocol without a length has no body, and what follows is not read as HTTP.
        if theirs.end == "HPE_PAUSED_UPGRADE" && index + 1 == theirs.messages.len() {
            return;
        }
        if !message.is_complete && refuses_ignored_part(&theirs, input) {
            return;
        }
        assert_eq!(message.is_complete, ours.is_complete, "{}: {ours:?}", theirs.end);
        assert_eq!(message.body, ours.body, "{ours:?}");
        // llhttp reads `Connection: close` in trailers, too.
        if contains(&ours.trailers, b"connection") {
            return;
        }
        // The gateway and hyper ignore a `Connection` that is not ASCII, and llhttp finds `close` in it.
        let is_ignored =
            |(name, value): &(String, Vec<u8>)| name.eq_ignore_ascii_case("connection") && !value.is_ascii();
        if ours.fields.iter().any(is_ignored) {
            return;
        }
        // `Connection: close` beside `keep-alive` closes here in HTTP/1.0, too.
        assert!(!ours.is_complete || ours.is_last || message.keeps_alive, "llhttp closes after {ours:?}");
    }
    // Where the gateway waits for more or would read a request, llhttp has read no further one.
    if matches!(end, Http1End::Open) {
        let complete = theirs.messages.iter().filter(|message| message.is_complete).count();
        assert!(complete <= requests.len(), "llhttp reads more requests: {theirs:?}");
    }
}

fn compare_with_hyper(requests: &[Http1Request], end: Http1End, input: &[u8]) {
    let theirs = hyper_conn::requests(input);
    for (index, ours) in requests.iter().enumerate() {
        let Some(message) = theirs.get(index) else {
            let previous = index.checked_sub(1).and_then(|index| requests.get(index));
            // It stops after a request whose expectation or upgrade it has not answered.
            let has_expect = |request: &Http1Request| {
                request.has_upgrade || request.fields.iter().any(|(name, _)| name.eq_ignore_ascii_case("expect"))
            };
            assert!(previous.is_some_and(has_expect), "hyper refuses request {index}: {ours:?}");
            return;
        };
        assert_eq!(message.method, ours.method);
        assert_eq!(message.target, ours.target);
        assert_eq!(message.is_http10, ours.is_http10);
        let fields = message.fields.iter().map(|(name, value)| (name.as_bytes(), &value[..]));
        assert_same_values(&ours.fields, fields);
        assert_eq!(message.is_complete, ours.is_complete, "{ours:?} {message:?}");
        if ours.is_complete {
            assert_eq!(message.body, ours.body, "{ours:?}");
        }
    }
    if matches!(end, Http1End::Open) {
        assert!(theirs.len() <= requests.len(), "hyper reads more requests: {theirs:?}");
    }
}

/// Returns whether a framing header has a tab. Around a value it is no part of it (RFC 9110, section 5.5), but llhttp
/// does not remove it. The gateway writes these headers anew.
fn has_tab_in_framing(head: &[u8]) -> bool {
    let is_framing = |line: &[u8]| contains(line, b"content-length") || contains(line, b"transfer-encoding");
    head.split(|byte| *byte == b'\n').any(|line| line.contains(&b'\t') && is_framing(line))
}

fn as_uri(target: &[u8]) -> Option<String> {
    Uri::try_from(target).ok().map(|uri| uri.to_string())
}

/// Asserts that our fields are among theirs, in the same order. The gateway drops some.
fn assert_part_of<'f>(ours: &[(String, Vec<u8>)], theirs: impl Iterator<Item = (&'f [u8], &'f [u8])>) {
    let mut theirs = theirs;
    for (name, value) in ours {
        let is_same = |(their_name, their_value): (&[u8], &[u8])| {
            their_name == name.as_bytes() && their_value.trim_ascii_end() == value.trim_ascii_end()
        };
        assert!(theirs.any(is_same), "{name}: {}", value.escape_ascii());
    }
}

/// Asserts that the values of each of our fields are theirs. hyper groups fields by name.
fn assert_same_values<'f>(ours: &[(String, Vec<u8>)], theirs: impl Iterator<Item = (&'f [u8], &'f [u8])> + Clone) {
    for (name, _) in ours {
        let is_same = |one: &[u8]| one.eq_ignore_ascii_case(name.as_bytes());
        let our_values: Vec<&[u8]> =
            ours.iter().filter(|(name, _)| is_same(name.as_bytes())).map(|(_, value)| &value[..]).collect();
        let their_values: Vec<&[u8]> =
            theirs.clone().filter(|(name, _)| is_same(name)).map(|(_, value)| value).collect();
        assert_eq!(our_values, their_values, "{name}");
    }
}

/// The chunked body of a request.
pub fn request_body(input: &[u8]) {
    let ours = read_request_chunks([input]);
    assert_pieces_change_nothing(input, ours.as_ref(), |pieces| read_request_chunks(pieces.iter().copied()));
    let Some(ours) = ours else { return };
    let sent = [CHUNKED_REQUEST, input].concat();
    let forwarded = [CHUNKED_REQUEST, &ours.forwarded].concat();
    let hyper = hyper_conn::requests(&sent).first().map(|message| (message.body.clone(), message.is_complete));
    let hyper_forwarded = hyper_conn::requests(&forwarded);
    assert_same_body(&ours, hyper, "hyper");
    assert_eq!(hyper_forwarded.len(), 1, "the upstream gets one request");
    assert_same_body(
        &ours,
        hyper_forwarded.first().map(|message| (message.body.clone(), message.is_complete)),
        "hyper",
    );
    let is_read = |theirs: &Connection| !refuses_ignored_part(theirs, &input[..ours.length]);
    if let Some(theirs) = llhttp::read(&sent, Kind::Requests).filter(is_read) {
        assert_same_body(&ours, theirs.messages.first().map(body), &theirs.end);
    }
    if let Some(theirs) = llhttp::read(&forwarded, Kind::Requests) {
        assert_eq!(theirs.messages.len(), 1, "the upstream gets one request");
        assert_same_body(&ours, theirs.messages.first().map(body), &theirs.end);
    }
    check_rest(&ours, input, CHUNKED_REQUEST);
}

/// The chunked body of a response.
pub fn response_body(input: &[u8]) {
    let ours = read_response_chunks([input]);
    assert_pieces_change_nothing(input, ours.as_ref(), |pieces| read_response_chunks(pieces.iter().copied()));
    let Some(ours) = ours else { return };
    let sent = [CHUNKED_RESPONSE, &input[..ours.length]].concat();
    let forwarded = [CHUNKED_RESPONSE, &ours.forwarded].concat();
    let hyper = |bytes: &[u8]| hyper_conn::response(bytes, "GET").map(|message| (message.body, message.is_complete));
    assert_same_body(&ours, hyper(&sent), "hyper");
    assert_same_body(&ours, hyper(&forwarded), "hyper");
    if let Some(theirs) = llhttp::read(&forwarded, Kind::Responses) {
        assert_same_body(&ours, theirs.messages.first().map(body), &theirs.end);
    }
    let is_read = |theirs: &Connection| {
        // It refuses blanks after the size of a chunk, which the gateway accepts from upstreams alone.
        let has_blanks = input[..ours.length].iter().any(|byte| matches!(byte, b' ' | b'\t'));
        let refuses_blanks = has_blanks && theirs.end == "HPE_INVALID_CHUNK_SIZE";
        !refuses_blanks && !refuses_ignored_part(theirs, &input[..ours.length])
    };
    if let Some(theirs) = llhttp::read(&sent, Kind::Responses).filter(is_read) {
        assert_same_body(&ours, theirs.messages.first().map(body), &theirs.end);
    }
}

/// Returns whether llhttp refuses a part of a chunked body that the gateway ignores and does not forward: a chunk
/// extension, or a trailer with the name of a framing header.
fn refuses_ignored_part(theirs: &Connection, sent: &[u8]) -> bool {
    let has = |name: &[u8]| contains(sent, name);
    match &theirs.end[..] {
        "HPE_STRICT" | "HPE_INVALID_CHUNK_SIZE" => has(b";"),
        "HPE_INVALID_CONTENT_LENGTH" | "HPE_UNEXPECTED_CONTENT_LENGTH" => has(b"content-length"),
        "HPE_INVALID_TRANSFER_ENCODING" => has(b"transfer-encoding"),
        _ => false,
    }
}

fn contains(bytes: &[u8], word: &[u8]) -> bool {
    bytes.windows(word.len()).any(|part| part.eq_ignore_ascii_case(word))
}

fn body(message: &Message) -> (Vec<u8>, bool) {
    (message.body.clone(), message.is_complete)
}

fn assert_same_body(ours: &Http1Body, theirs: Option<(Vec<u8>, bool)>, reader: &str) {
    let Some((content, is_complete)) = theirs else { panic!("{reader} reads nothing: {ours:?}") };
    assert_eq!(is_complete, ours.is_complete, "{reader}: {ours:?}");
    assert_eq!(content, ours.content, "{reader}: {ours:?}");
}

/// Both find the end at the same byte: a request right behind it is the next request.
fn check_rest(ours: &Http1Body, input: &[u8], head: &[u8]) {
    if !ours.is_complete {
        return;
    }
    let next = b"GET /next HTTP/1.1\r\nHost: h\r\n\r\n";
    let sent = [head, &input[..ours.length], next].concat();
    let is_next = |target: &str| assert_eq!(target, "/next");
    let theirs = hyper_conn::requests(&sent);
    assert_eq!(theirs.len(), 2);
    is_next(&theirs[1].target);
    // llhttp reads `Connection: close` in trailers, too.
    let has_connection = contains(&input[..ours.length], b"connection");
    let is_read = |theirs: &Connection| !has_connection && !refuses_ignored_part(theirs, &input[..ours.length]);
    if let Some(theirs) = llhttp::read(&sent, Kind::Requests).filter(is_read) {
        assert_eq!(theirs.messages.len(), 2, "{}", theirs.end);
        is_next(&String::from_utf8_lossy(&theirs.messages[1].target));
    }
}

fn assert_pieces_change_nothing(input: &[u8], whole: Option<&Http1Body>, read: impl Fn(&[&[u8]]) -> Option<Http1Body>) {
    let without_chunks = |body: &Http1Body| (body.content.clone(), body.length, body.is_complete);
    let bytes: Vec<&[u8]> = input.chunks(1).collect();
    let halves = input.split_at(input.len() / 2);
    for pieces in [&bytes[..], &[halves.0, halves.1]] {
        let body = read(pieces);
        assert_eq!(body.as_ref().map(without_chunks), whole.map(without_chunks), "in {} pieces", pieces.len());
    }
}

/// The head of a response. The first byte is the method of the request.
pub fn response_head(input: &[u8]) {
    let Some((method, input)) = input.split_first() else { return };
    let (method, kind) = if method % 2 == 0 { ("GET", Kind::Responses) } else { ("HEAD", Kind::ResponsesToHead) };
    let Some(ours) = read_response(input, method == "HEAD") else { return };
    // Interim responses have no body, and 101 ends HTTP.
    let is_interim = ours.status < 200;
    let head = &input[..ours.head];
    let body: &[u8] = match ours.framing {
        Http1Framing::Length(length) if length < 100 => &b"x".repeat(length as usize),
        Http1Framing::Length(_) => return,
        Http1Framing::Chunked => b"3\r\nabc\r\n0\r\n\r\n",
        Http1Framing::UntilClose => b"abc",
    };
    let content = if ours.framing == Http1Framing::Chunked { b"abc" } else { body };
    let sent = [head, body].concat();
    // llhttp refuses lines that end in a bare LF, which the gateway and hyper accept from upstreams alone.
    let has_bare_lf = head.iter().zip(&head[1..]).any(|(before, byte)| *byte == b'\n' && *before != b'\r');
    if let Some(theirs) = llhttp::read(&sent, kind).filter(|_| !has_bare_lf && !has_tab_in_framing(head)) {
        compare_response(&ours.fields, ours.status, content, theirs.messages.first(), &theirs.end, is_interim);
        if let Some(message) = theirs.messages.first().filter(|message| message.is_complete && !is_interim) {
            assert!(!ours.stays_open || message.keeps_alive, "llhttp closes: {message:?}");
        }
    }
    if is_interim {
        return;
    }
    let Some(message) = hyper_conn::response(&sent, method) else { panic!("hyper refuses it: {ours:?}") };
    assert_eq!(message.status, ours.status);
    assert_same_values(&ours.fields, message.fields.iter().map(|(name, value)| (name.as_bytes(), &value[..])));
    assert!(message.is_complete, "{ours:?}");
    assert_eq!(message.body, content, "{ours:?}");
}

fn compare_response(
    fields: &[(String, Vec<u8>)],
    status: u16,
    content: &[u8],
    theirs: Option<&Message>,
    end: &str,
    is_interim: bool,
) {
    let Some(message) = theirs.filter(|message| message.has_head) else { panic!("llhttp refuses it with {end}") };
    assert_eq!(message.status, status);
    assert_part_of(fields, message.fields.iter().map(|(name, value)| (&name[..], &value[..])));
    if !is_interim && end != "HPE_PAUSED_UPGRADE" {
        assert!(message.is_complete, "{end}");
        assert_eq!(message.body, content);
    }
}
