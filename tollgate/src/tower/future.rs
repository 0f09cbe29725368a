//! The future of a request: checked, perhaps delayed, served, and settled.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::body::Outgoing;
use super::framework::Tunnel;
use super::layer::Limits;
use super::{ActualCost, ResponseBody};
use crate::gate::{Admitted, Outcome};

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

    #[inline]
    pub(super) fn admitted(future: F, admitted: Admitted) -> Self {
        Self::Serving { future, kept: Some(Kept::Admitted(admitted)) }
    }

    #[inline]
    pub(super) fn serving(future: F, outcome: Box<Outcome>) -> Self {
        Self::Serving { future, kept: Some(Kept::Outcome(outcome)) }
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
            if let Some(refused) = limits.refusal::<_, R, B>(&outcome, &request) {
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
    let outcome = unserved.into_outcome();
    limits.insert_decision(&outcome, &mut request);
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
    outcome.write_headers(response.headers_mut());
    let cost = response.extensions_mut().remove::<ActualCost>();
    // If the store cannot be reached, the estimated cost stays: the response has no place for an error.
    _ = outcome
        .settle_response_with(response.status(), response.headers(), cost.as_ref().map(ActualCost::reported))
        .await;
    let mut permit = outcome.take_permit();
    if let Some(tunnel) = tunnel
        && tunnel.is_opened_by(response.status())
    {
        tunnel.open(permit.take());
    }
    B::response(response, permit)
}
