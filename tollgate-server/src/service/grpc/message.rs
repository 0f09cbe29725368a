//! One message in a request or response of gRPC: a flag for compression, the length and the message.
//!
//! tonic reads and writes messages with its own buffers, streams and boxed bodies, which takes longer than the decision.
//! Deliberately not here: compression, and streams of messages. tonic serves the methods that have those.

use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use axum::BoxError;
use axum::body::HttpBody;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Response, header};
use bytes::{BufMut, Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Frame;
use prost::Message;
use tonic::Status;

use crate::service::connections::BodyError;

/// The longest request. A request with the most descriptors and entries of ordinary length is much shorter.
pub(super) const MAX_MESSAGE_BYTES: usize = 256 * 1024;

/// The flag and the length in front of a message.
const PREFIX_BYTES: usize = 5;

/// The size of the buffer for a response. Nearly all fit.
const RESPONSE_BYTES: usize = 512;

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const OK: HeaderValue = HeaderValue::from_static("0");
const MEDIA_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");

/// Reads the only message of a request.
///
/// # Errors
///
/// If the message is compressed, too long, or not the only one.
pub(super) async fn read<B>(body: B) -> Result<Bytes, Status>
where
    B: HttpBody<Data = Bytes, Error: Into<BoxError>>,
{
    let mut body = pin!(body);
    let mut bytes = next(&mut body).await?.unwrap_or_default();
    // Nearly always, the first frame has the whole message.
    if !body.is_end_stream() {
        let mut all = BytesMut::new();
        loop {
            all.extend_from_slice(&bytes);
            // Refuses a message that is too long before the rest arrives.
            message_bytes(&all)?;
            match next(&mut body).await? {
                Some(more) => bytes = more,
                None => break,
            }
        }
        bytes = all.freeze();
    }
    match message_bytes(&bytes)? {
        Some(length) if bytes.len() == PREFIX_BYTES + length => Ok(bytes.slice(PREFIX_BYTES..)),
        _ => Err(Status::invalid_argument("the request ends within its message: send the whole message")),
    }
}

/// Returns the next bytes of a body, or `None` at its end.
async fn next<B>(body: &mut Pin<&mut B>) -> Result<Option<Bytes>, Status>
where
    B: HttpBody<Data = Bytes, Error: Into<BoxError>>,
{
    while let Some(frame) = body.frame().await {
        let cannot_read = |error: B::Error| {
            let error = error.into();
            match BodyError::overload(&*error) {
                Some(message) => Status::resource_exhausted(message),
                None => Status::cancelled(format!("cannot read the request: {error}")),
            }
        };
        // The trailers of a request mean nothing.
        if let Ok(data) = frame.map_err(cannot_read)?.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

/// Returns the length of the message at the start of `bytes`, or `None` if they do not have the whole prefix.
fn message_bytes(bytes: &[u8]) -> Result<Option<usize>, Status> {
    let Some((prefix, rest)) = bytes.split_first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
    let [flag, length @ ..] = *prefix;
    let length = u32::from_be_bytes(length) as usize;
    if flag != 0 {
        return Err(Status::unimplemented("the message is compressed: send it without compression"));
    }
    if length > MAX_MESSAGE_BYTES {
        return Err(Status::out_of_range(format!(
            "the message has {length} bytes, more than {MAX_MESSAGE_BYTES}: send fewer descriptors"
        )));
    }
    if rest.len() > length {
        return Err(Status::invalid_argument("the request has bytes after its message: send one message"));
    }
    Ok(Some(length))
}

/// Returns a response with one message.
pub(super) fn response(message: &impl Message) -> Result<Response<GrpcBody>, Status> {
    let mut bytes = BytesMut::with_capacity(RESPONSE_BYTES);
    bytes.put_bytes(0, PREFIX_BYTES);
    let too_long = |_| Status::internal("the response is too long: send fewer descriptors");
    message.encode(&mut bytes).map_err(|_| too_long(()))?;
    let length = u32::try_from(bytes.len() - PREFIX_BYTES).map_err(|_| too_long(()))?;
    bytes[1..PREFIX_BYTES].copy_from_slice(&length.to_be_bytes());
    let mut response = Response::new(GrpcBody::Message(bytes.freeze()));
    response.headers_mut().insert(header::CONTENT_TYPE, MEDIA_TYPE);
    Ok(response)
}

/// The body of a response.
#[derive(Default)]
pub(super) enum GrpcBody {
    /// Nothing: the status is in the head, or everything was sent.
    #[default]
    Empty,
    /// A message with its prefix. The trailers follow.
    Message(Bytes),
    /// The trailers of a successful call.
    Trailers,
    /// The response of a service of tonic.
    Tonic(axum::body::Body),
}

impl HttpBody for GrpcBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let (frame, next) = match &mut *self {
            Self::Empty => return Poll::Ready(None),
            Self::Message(bytes) => (Frame::data(std::mem::take(bytes)), Self::Trailers),
            Self::Trailers => {
                let mut trailers = HeaderMap::with_capacity(1);
                trailers.insert(GRPC_STATUS, OK);
                (Frame::trailers(trailers), Self::Empty)
            }
            Self::Tonic(body) => return Pin::new(body).poll_frame(context),
        };
        *self = next;
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Empty => true,
            Self::Message(_) | Self::Trailers => false,
            Self::Tonic(body) => body.is_end_stream(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::stream;
    use http_body_util::StreamBody;

    use super::*;

    /// Reads a body whose frames are these.
    async fn read_all(frames: &[&'static [u8]]) -> Result<Bytes, tonic::Code> {
        let frames: Vec<_> =
            frames.iter().map(|data| Ok::<_, Infallible>(Frame::data(Bytes::from_static(data)))).collect();
        read(StreamBody::new(stream::iter(frames))).await.map_err(|status| status.code())
    }

    #[tokio::test]
    async fn messages_are_read_from_any_frames() {
        for frames in [&[&b"\0\0\0\0\x03abc"[..]][..], &[b"\0\0", b"\0\0\x03a", b"", b"bc"]] {
            assert_eq!(read_all(frames).await.as_deref(), Ok(&b"abc"[..]));
        }
        assert_eq!(read_all(&[b"\0\0\0\0\0"]).await.as_deref(), Ok(&b""[..]));
    }

    #[tokio::test]
    async fn other_bodies_are_refused() {
        use tonic::Code::{InvalidArgument, OutOfRange, Unimplemented};
        for (frames, code) in [
            (&[][..], InvalidArgument),
            (&[&b"\0\0\0"[..]], InvalidArgument),
            (&[b"\0\0\0\0\x03ab"], InvalidArgument),
            (&[b"\0\0\0\0\x03abcd"], InvalidArgument),
            (&[b"\0\0\0\0\x03abc", b"\0\0\0\0\0"], InvalidArgument),
            (&[b"\x01\0\0\0\x03abc"], Unimplemented),
            (&[b"\0\0\x04\0\x01"], OutOfRange),
        ] {
            assert_eq!(read_all(frames).await, Err(code), "{frames:?}");
        }
    }
}
