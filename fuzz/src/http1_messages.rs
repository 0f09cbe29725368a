//! Bodies and responses of HTTP/1 as `tollgate-http1` reads them.

use tollgate_http1::{BodyDecoder, ChunkDecoder, Framing, ParsedResponse, header_slots};

/// A chunked body as the gateway reads it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Http1Body {
    pub content: Vec<u8>,
    /// The number of bytes that belong to it.
    pub length: usize,
    pub is_complete: bool,
    /// The chunks for the other side.
    pub forwarded: Vec<u8>,
}

/// Reads a chunked body of a request that arrives in pieces. Returns `None` if it is refused.
pub fn read_request_chunks<'p>(pieces: impl IntoIterator<Item = &'p [u8]>) -> Option<Http1Body> {
    read_chunks(ChunkDecoder::of_request, pieces)
}

/// Reads a chunked body of a response that arrives in pieces. Returns `None` if it is malformed.
pub fn read_response_chunks<'p>(pieces: impl IntoIterator<Item = &'p [u8]>) -> Option<Http1Body> {
    read_chunks(ChunkDecoder::of_response, pieces)
}

fn read_chunks<'p>(decoder: fn() -> ChunkDecoder, pieces: impl IntoIterator<Item = &'p [u8]>) -> Option<Http1Body> {
    let chunks = || BodyDecoder::Chunked(decoder());
    let (mut passed_on, mut converted, mut skipped) = (chunks(), chunks(), chunks());
    converted.keep_trailers();
    let mut body = Http1Body::default();
    for piece in pieces {
        let part = passed_on.pass(piece, &Framing::CHUNKED, &mut body.forwarded).ok()?;
        let again = converted.pass(piece, &Framing::Raw, &mut body.content).ok()?;
        assert_eq!((part.taken, part.content), (again.taken, again.content), "both ways read the same body");
        assert_eq!(skipped.skip(piece), Ok((part.taken, part.content)), "a skipped body has the same length");
        body.length += part.taken;
    }
    body.is_complete = passed_on.is_over();
    assert_eq!((converted.is_over(), skipped.is_over()), (body.is_complete, body.is_complete), "all find the same end");
    if body.is_complete {
        converted.take_trailers().ok()?;
    }
    Some(body)
}

/// A response as the gateway reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Http1Response {
    pub status: u16,
    pub fields: Vec<(String, Vec<u8>)>,
    /// The length of the head.
    pub head: usize,
    pub framing: Http1Framing,
    /// Whether the connection can be used again after the body.
    pub stays_open: bool,
}

/// How the end of a body is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Http1Framing {
    Length(u64),
    Chunked,
    UntilClose,
}

/// Reads the head of a response, to HEAD if `is_head`. Returns `None` if it is incomplete or refused.
pub fn read_response(bytes: &[u8], is_head: bool) -> Option<Http1Response> {
    let mut slots = header_slots();
    let head = ParsedResponse::read(bytes, &mut slots, is_head).ok()??;
    let framing = match head.body {
        BodyDecoder::Length(length) => Http1Framing::Length(length),
        BodyDecoder::Chunked(_) => Http1Framing::Chunked,
        BodyDecoder::UntilClose => Http1Framing::UntilClose,
    };
    let fields = head.headers.iter().map(|field| (field.name.to_owned(), field.value.to_vec())).collect();
    Some(Http1Response { status: head.status.as_u16(), fields, head: head.bytes, framing, stays_open: head.stays_open })
}
