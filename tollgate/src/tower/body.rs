//! The body of a response: the inner service's, or a refusal.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::gate::InFlightPermit;

pin_project! {
    /// The body of a response: the inner service's, or that of a refusal.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        kind: BodyState<B>,
    }
}

pin_project! {
    #[derive(Debug)]
    #[project = BodyStateProjection]
    enum BodyState<B> {
        Inner {
            #[pin]
            body: B,
            // Returned when the body ends, and not only when the connection drops it.
            permit: Option<InFlightPermit>,
        },
        Refusal { text: Bytes },
    }
}

/// A response body that the layer can build from the inner service's body.
pub(super) trait Outgoing<B> {
    /// Wraps the inner service's body. The permit is held until the body ends.
    fn inner(body: B, permit: Option<InFlightPermit>) -> Self;

    /// Wraps the inner service's response.
    #[inline]
    fn response(response: Response<B>, permit: Option<InFlightPermit>) -> Response<Self>
    where
        Self: Sized,
    {
        response.map(|body| Self::inner(body, permit))
    }

    /// Creates the body of a refusal.
    fn refusal(text: Bytes) -> Self;
}

impl<B> Outgoing<B> for ResponseBody<B> {
    #[inline]
    fn inner(body: B, permit: Option<InFlightPermit>) -> Self {
        Self { kind: BodyState::Inner { body, permit } }
    }

    fn refusal(text: Bytes) -> Self {
        Self { kind: BodyState::Refusal { text } }
    }
}

impl<B: Body<Data = Bytes>> Body for ResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        match self.project().kind.project() {
            BodyStateProjection::Inner { mut body, permit } => {
                let frame = body.as_mut().poll_frame(context);
                if permit.is_some() && is_last(&frame, || body.is_end_stream()) {
                    *permit = None;
                }
                frame
            }
            BodyStateProjection::Refusal { text } => {
                let text = std::mem::take(text);
                Poll::Ready((!text.is_empty()).then(|| Ok(Frame::data(text))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            BodyState::Inner { body, .. } => body.is_end_stream(),
            BodyState::Refusal { text } => text.is_empty(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            BodyState::Inner { body, .. } => body.size_hint(),
            BodyState::Refusal { text } => SizeHint::with_exact(text.len() as u64),
        }
    }
}

/// Returns `true` if no frame follows this one.
fn is_last<D, E>(frame: &Poll<Option<Result<Frame<D>, E>>>, is_end: impl FnOnce() -> bool) -> bool {
    match frame {
        Poll::Pending => false,
        Poll::Ready(None | Some(Err(_))) => true,
        Poll::Ready(Some(Ok(_))) => is_end(),
    }
}
