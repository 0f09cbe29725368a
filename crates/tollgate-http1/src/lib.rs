//! HTTP/1 messages: bytes to heads and bodies, and back.
//!
//! A server behind a proxy may interpret an ambiguous message differently, and take the body of one request for another
//! request (request smuggling). So ambiguous messages are refused here, with the reason.
//!
//! Deliberately not here: I/O, buffers, deadlines, the meaning of headers to a proxy, and the target of a request beyond
//! its characters.
//!
//! The crate is for the binary `tollgate` and its sibling crates, and has no stable API.

#![forbid(unsafe_code)]

pub mod ambiguity;
pub mod body;
mod length;
pub mod request;
pub mod response;
pub mod write;

use std::mem::MaybeUninit;

pub use httparse::Header;

pub use self::ambiguity::Ambiguity;
pub use self::body::{BodyDecoder, ChunkDecoder, Framing, Part, TrailerNames};
pub use self::length::content_length;
pub use self::request::{InvalidHead, ParsedRequest};
pub use self::response::{InvalidResponse, ParsedResponse};

/// The maximum number of headers or trailers of a message.
pub const MAX_HEADERS: usize = 100;

/// Room for the headers of a message.
pub type HeaderSlots<'b> = [MaybeUninit<Header<'b>>; MAX_HEADERS];

/// Returns room for the headers of a message.
#[inline]
#[must_use]
pub const fn header_slots<'b>() -> HeaderSlots<'b> {
    [const { MaybeUninit::uninit() }; MAX_HEADERS]
}
