//! The way of a request through the layer: asked, perhaps held, let in, and settled.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::service::refusal;
use super::{ActualCost, ResponseBody};
use crate::gate::Ruling;

type Answer<R, E> = Result<Response<ResponseBody<R>>, E>;

pin_project! {
    /// The answer to a request, on its way.
    pub struct ResponseFuture<F, R, E> {
        #[pin]
        stage: Stage<F, R, E>,
    }
}

pin_project! {
    #[project = StageProjection]
    enum Stage<F, R, E> {
        Refused { response: Option<Response<ResponseBody<R>>> },
        // What most requests are: nothing is allocated for them.
        Inside { #[pin] future: F, ruling: Option<Ruling> },
        // A store that is elsewhere, a queue that holds, a cost to settle.
        Longer { way: Pin<Box<dyn Future<Output = Answer<R, E>> + Send>> },
    }
}

impl<F, R, E> ResponseFuture<F, R, E> {
    pub(super) fn refused(response: Response<ResponseBody<R>>) -> Self {
        Self { stage: Stage::Refused { response: Some(response) } }
    }

    #[inline]
    pub(super) fn inside(future: F, ruling: Ruling) -> Self {
        Self { stage: Stage::Inside { future, ruling: Some(ruling) } }
    }

    /// Waits for the ruling, and holds the request as long as it says.
    pub(super) fn longer<S, Q>(
        ruling: impl Future<Output = Ruling> + Send + 'static,
        mut inner: S,
        request: Request<Q>,
    ) -> Self
    where
        S: Service<Request<Q>, Response = Response<R>, Error = E, Future = F> + Send + 'static,
        F: Future<Output = Result<Response<R>, E>> + Send,
        Q: Send + 'static,
        R: Send,
    {
        let way = Box::pin(async move {
            let ruling = ruling.await;
            if let Some(refused) = refusal(&ruling, &request) {
                return Ok(refused);
            }
            if !ruling.delay().is_zero() {
                tokio::time::sleep(ruling.delay()).await;
            }
            let response = inner.call(request).await?;
            Ok(answered(ruling, response).await)
        });
        Self { stage: Stage::Longer { way } }
    }
}

/// The service's answer with the headers of a ruling, once what it really cost is settled.
async fn answered<R>(mut ruling: Ruling, mut response: Response<R>) -> Response<ResponseBody<R>> {
    ruling.write_headers(response.headers_mut());
    let cost = response.extensions_mut().remove::<ActualCost>();
    // Nobody is left to tell when the store cannot be reached: what was taken stands.
    _ = ruling.hear(response.status(), response.headers(), cost.as_ref().map(ActualCost::told)).await;
    let place = ruling.take_place();
    response.map(|body| ResponseBody::inner(body, place))
}

impl<F, R, E> Future for ResponseFuture<F, R, E>
where
    F: Future<Output = Result<Response<R>, E>>,
    R: Send + 'static,
    E: 'static,
{
    type Output = Answer<R, E>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut stage = self.project().stage;
        match stage.as_mut().project() {
            StageProjection::Refused { response } => {
                Poll::Ready(Ok(response.take().expect("a future is not asked again after it is done")))
            }
            StageProjection::Longer { way } => way.as_mut().poll(context),
            StageProjection::Inside { future, ruling } => {
                let mut response = ready!(future.poll(context))?;
                // Not taken out where it need not be: it is large.
                let settled = |ruling: &&mut Ruling| {
                    response.extensions().get::<ActualCost>().is_none() && !ruling.hears_answer()
                };
                if let Some(ruling) = ruling.as_mut().filter(settled) {
                    ruling.write_headers(response.headers_mut());
                    let place = ruling.take_place();
                    return Poll::Ready(Ok(response.map(|body| ResponseBody::inner(body, place))));
                }
                let ruling = ruling.take().expect("a future is not asked again after it is done");
                let mut way = Box::pin(async move { Ok(answered(ruling, response).await) });
                let answer = way.as_mut().poll(context);
                if answer.is_pending() {
                    stage.set(Stage::Longer { way });
                }
                answer
            }
        }
    }
}
