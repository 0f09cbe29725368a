//! The future of a request: checked, perhaps delayed, served or refused, and settled. Also the body of its response, which
//! is the inner service's or a refusal.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::{Method, Request, Response};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tollgate_http::{Refusal, is_grpc};
use tower_service::Service;

use super::cost::{ActualCost, Polling};
use super::limits::{Limits, report_unknown_address};
use tollgate_rules::internal::layer::Admitted;
use tollgate_rules::{InFlightPermit, Outcome};

#[cfg(feature = "axum")]
pub(super) use super::tunnel::Tunnel;

type ServiceResult<B, E> = Result<Response<B>, E>;

pin_project! {
    /// The future of a response.
    pub struct ResponseFuture<F, R, E> {
        #[pin]
        stage: Stage<F, ResponseBody<R>, E>,
    }
}

pin_project! {
    /// The stage of a request.
    #[project = StageProjection]
    pub(super) enum Stage<F, B, E> {
        Refused { response: Option<Response<B>> },
        // The stage of most requests.
        Serving { #[pin] future: F, kept: Option<Kept> },
        // For a remote store, a delay, a service that is not ready, or a cost to settle.
        Boxed { future: Pin<Box<dyn Future<Output = ServiceResult<B, E>> + Send>> },
    }
}

/// The part of an outcome that is kept until the service responds. It is small because futures are moved often.
pub(super) enum Kept {
    Admitted(Admitted),
    Outcome(Box<Outcome>),
}

impl Kept {
    fn into_outcome(self) -> Box<Outcome> {
        match self {
            Self::Admitted(admitted) => admitted.into_outcome(),
            Self::Outcome(outcome) => outcome,
        }
    }
}

impl<F, R, E> ResponseFuture<F, R, E> {
    #[inline]
    pub(super) fn new(stage: Stage<F, ResponseBody<R>, E>) -> Self {
        Self { stage }
    }
}

impl<F, R, E> Future for ResponseFuture<F, R, E>
where
    F: Future<Output = Result<Response<R>, E>>,
    R: Send + 'static,
    E: 'static,
{
    type Output = ServiceResult<ResponseBody<R>, E>;

    #[inline]
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().stage.poll_response(context)
    }
}

impl<F, B, E> Stage<F, B, E> {
    pub(super) fn refused(response: Response<B>) -> Self {
        Self::Refused { response: Some(response) }
    }

    /// Waits for the decision of a remote store.
    pub(super) fn awaiting_store<S, Q, R>(
        outcome: impl Future<Output = Outcome> + Send + 'static,
        limits: Arc<Limits>,
        inner: S,
        request: Request<Q>,
    ) -> Self
    where
        S: Service<Request<Q>, Response = Response<R>, Error = E, Future = F> + Send + 'static,
        F: Future<Output = Result<Response<R>, E>> + Send,
        Q: Send + 'static,
        R: Send + 'static,
        B: Outgoing<R>,
    {
        let future = Box::pin(async move {
            let outcome = outcome.await;
            if let Some(refused) = refusal::<_, R, B>(&limits, &outcome, &request) {
                return Ok(refused);
            }
            serve(outcome, limits, inner, request).await
        });
        Self::Boxed { future }
    }

    /// Delays an allowed request until its delay is over and the service is ready.
    pub(super) fn admitted_later<S, Q, R>(outcome: Outcome, limits: Arc<Limits>, inner: S, request: Request<Q>) -> Self
    where
        S: Service<Request<Q>, Response = Response<R>, Error = E, Future = F> + Send + 'static,
        F: Future<Output = Result<Response<R>, E>> + Send,
        Q: Send + 'static,
        R: Send + 'static,
        B: Outgoing<R> + 'static,
    {
        Self::Boxed { future: Box::pin(serve(outcome, limits, inner, request)) }
    }

    #[inline]
    pub(super) fn poll_response<R>(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<ServiceResult<B, E>>
    where
        F: Future<Output = Result<Response<R>, E>>,
        R: Send + 'static,
        B: Outgoing<R> + 'static,
        E: 'static,
    {
        let mut stage = self;
        let _polling = Polling::begin();
        match stage.as_mut().project() {
            StageProjection::Refused { response } => {
                Poll::Ready(Ok(response.take().expect("a future is not polled after completion")))
            }
            StageProjection::Boxed { future } => future.as_mut().poll(context),
            StageProjection::Serving { future, kept } => {
                let mut response = ready!(future.poll(context))?;
                let has_cost = response.extensions().get::<ActualCost>().is_some();
                match kept {
                    Some(Kept::Admitted(admitted)) if !has_cost => {
                        admitted.write_headers(response.headers_mut());
                        return Poll::Ready(Ok(B::response(response, None)));
                    }
                    Some(Kept::Outcome(outcome)) if !has_cost && !outcome.awaits_response() => {
                        outcome.write_headers(response.headers_mut());
                        let permit = outcome.take_permit();
                        return Poll::Ready(Ok(B::response(response, permit)));
                    }
                    _ => {}
                }
                let kept = kept.take().expect("a future is not polled after completion");
                let mut future = settle_boxed(kept.into_outcome(), response);
                let answer = future.as_mut().poll(context);
                if answer.is_pending() {
                    stage.set(Self::Boxed { future });
                }
                answer
            }
        }
    }
}

/// The time for which units that the response may give back are pending. A layer knows no deadline of its service.
pub(super) const PENDING_FOR: Duration = Duration::from_secs(30);

/// Calls the service with an allowed request, once its delay is over and the service is ready.
async fn serve<S, Q, R, B>(
    outcome: Outcome,
    limits: Arc<Limits>,
    mut inner: S,
    mut request: Request<Q>,
) -> ServiceResult<B, S::Error>
where
    S: Service<Request<Q>, Response = Response<R>>,
    B: Outgoing<R>,
{
    let delay = outcome.delay();
    let unserved = Unserved(Some(outcome));
    if !delay.is_zero() {
        tokio::time::sleep(delay).await;
    }
    poll_fn(|context| inner.poll_ready(context)).await?;
    let mut outcome = unserved.into_outcome();
    limits.insert_decision(&outcome, &mut request);
    outcome.hold_open(PENDING_FOR);
    let tunnel = if outcome.has_permit() { Tunnel::before(&mut request) } else { None };
    let response = inner.call(request).await?;
    Ok(finish(outcome, response, tunnel).await)
}

/// An allowed request before the service is called. Dropping it refunds the units it took.
struct Unserved(Option<Outcome>);

impl Unserved {
    fn into_outcome(mut self) -> Outcome {
        self.0.take().expect("taken only here and on drop")
    }
}

impl Drop for Unserved {
    fn drop(&mut self) {
        if let Some(outcome) = self.0.take() {
            outcome.refund_detached();
        }
    }
}

/// Settles the few responses that have a cost or rules to settle.
#[cold]
#[inline(never)]
fn settle_boxed<R, B, E>(
    outcome: Box<Outcome>,
    response: Response<R>,
) -> Pin<Box<dyn Future<Output = ServiceResult<B, E>> + Send>>
where
    R: Send + 'static,
    B: Outgoing<R> + 'static,
    E: 'static,
{
    Box::pin(async move { Ok(finish(*outcome, response, None).await) })
}

/// Settles the actual cost, and adds the headers of the outcome to the service's response.
async fn finish<R, B: Outgoing<R>>(
    mut outcome: Outcome,
    mut response: Response<R>,
    tunnel: Option<Tunnel>,
) -> Response<B> {
    // The extension stays, because a layer around this one may have limits that it settles.
    let cost = response.extensions().get::<ActualCost>().map(ActualCost::reported);
    let mistake = cost.as_ref().and_then(|cost| outcome.mistake_in(cost));
    // If the store cannot be reached, the estimated cost stays: the response has no place for an error.
    _ = outcome.settle_response_with(response.status(), response.headers(), cost).await;
    // After the settlement, so that they show the quota that is left then.
    outcome.write_headers(response.headers_mut());
    let mut permit = outcome.take_permit();
    if let Some(cost) = response.extensions_mut().get_mut::<ActualCost>()
        && let Some(error) = cost.pass(mistake)
    {
        return error.map(B::refusal);
    }
    if let Some(tunnel) = tunnel
        && tunnel.is_opened_by(response.status())
    {
        tunnel.open(permit.take());
    }
    B::response(response, permit)
}

/// Reports the decision, and returns the response if the request is refused.
#[inline]
pub(super) fn refusal<Q, R, B: Outgoing<R>>(
    limits: &Limits,
    outcome: &Outcome,
    request: &Request<Q>,
) -> Option<Response<B>> {
    if let Some(on_decision) = &limits.on_decision {
        on_decision(outcome, &limits.facts(request));
    }
    if outcome.is_allowed() { None } else { refusal_to(limits, outcome, request) }
}

/// Returns the refusal in the format that the client expects.
#[cold]
#[inline(never)]
fn refusal_to<Q, R, B: Outgoing<R>>(limits: &Limits, outcome: &Outcome, request: &Request<Q>) -> Option<Response<B>> {
    if matches!(outcome.refusal(), Some(Refusal::ClientAddressUnknown)) {
        report_unknown_address();
    }
    if is_grpc(request.headers()) {
        return outcome.grpc_response().map(|response| response.map(|()| B::refusal(Bytes::new())));
    }
    let mut response = outcome.response(request.headers())?;
    if let Some(refuse_with) = &limits.refuse_with {
        response = refuse_with(outcome, &limits.facts(request), response);
    }
    // Not every server removes the body from a response to HEAD. Its `content-length` stays.
    if request.method() == Method::HEAD {
        let length = std::mem::take(response.body_mut()).len();
        response.headers_mut().insert(CONTENT_LENGTH, length.into());
    }
    Some(response.map(B::refusal))
}

/// A connection that a handler takes over. Only hyper's are supported, with the feature `axum`.
#[cfg(not(feature = "axum"))]
pub(super) enum Tunnel {}

#[cfg(not(feature = "axum"))]
impl Tunnel {
    pub(super) fn is_requested(_: &http::Extensions) -> bool {
        false
    }

    fn before<B>(_: &mut Request<B>) -> Option<Self> {
        None
    }

    fn is_opened_by(&self, _: http::StatusCode) -> bool {
        match *self {}
    }

    fn open(self, _: Option<InFlightPermit>) {
        match self {}
    }
}

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
