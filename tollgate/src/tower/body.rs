//! The body of an answer: the service's, or a refusal.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::gate::InFlightPermit;

pin_project! {
    /// The body of an answer: what the service inside said, or why it was not asked.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[derive(Debug)]
    #[project = KindProjection]
    enum Kind<B> {
        Inner {
            #[pin]
            body: B,
            // Given back when the body has ended, and not only when a connection lets go of it.
            place: Option<InFlightPermit>,
        },
        Refusal { text: Bytes },
    }
}

/// A body that the layer can make of the service's.
pub(super) trait Outgoing<B> {
    /// What the service said, and the place of the request among those in flight, to be kept as long as that takes.
    fn inner(body: B, place: Option<InFlightPermit>) -> Self;

    /// The whole answer of the service.
    #[inline]
    fn answer(response: Response<B>, place: Option<InFlightPermit>) -> Response<Self>
    where
        Self: Sized,
    {
        response.map(|body| Self::inner(body, place))
    }

    /// Why the service was not asked.
    fn refusal(text: Bytes) -> Self;
}

impl<B> Outgoing<B> for ResponseBody<B> {
    #[inline]
    fn inner(body: B, place: Option<InFlightPermit>) -> Self {
        Self { kind: Kind::Inner { body, place } }
    }

    fn refusal(text: Bytes) -> Self {
        Self { kind: Kind::Refusal { text } }
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
            KindProjection::Inner { mut body, place } => {
                let frame = body.as_mut().poll_frame(context);
                if place.is_some() && is_last(&frame, || body.is_end_stream()) {
                    *place = None;
                }
                frame
            }
            KindProjection::Refusal { text } => {
                let text = std::mem::take(text);
                Poll::Ready((!text.is_empty()).then(|| Ok(Frame::data(text))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body, .. } => body.is_end_stream(),
            Kind::Refusal { text } => text.is_empty(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body, .. } => body.size_hint(),
            Kind::Refusal { text } => SizeHint::with_exact(text.len() as u64),
        }
    }
}

/// Whether nothing comes after what a body has said.
fn is_last<D, E>(said: &Poll<Option<Result<Frame<D>, E>>>, is_end: impl FnOnce() -> bool) -> bool {
    match said {
        Poll::Pending => false,
        Poll::Ready(None | Some(Err(_))) => true,
        Poll::Ready(Some(Ok(_))) => is_end(),
    }
}
