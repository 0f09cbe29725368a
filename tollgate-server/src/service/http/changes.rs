//! `POST /v1/refund` and `POST /v1/reset`: changes of a key's state, by the name of a limit.

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use futures_util::future::{BoxFuture, join_all};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tollgate_rules::{Gate, Outcome, RuleSet, StoreUnavailable};

use super::batch::{Batch, Question, Shape};
use super::check_request::{invalid_key, resolve_key};
use super::check_response::CheckResponse;
use super::values::{OneOrMany, StringOrStrings, Units};
use super::{ServiceState, read_json};
use crate::service::error_body::ErrorBody;

/// A refund of units to a key, without a reservation.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RefundRequest {
    /// The name of a limit.
    limit: Option<String>,
    /// The key: a string, or one string for each part of the limit's key.
    #[schemars(with = "Option<StringOrStrings>")]
    key: Option<OneOrMany>,
    /// The plan whose numbers apply to the key: one that the limit has overrides for. Without it, that of the key's last
    /// request, if this process remembers one, or else the limit's own numbers.
    plan: Option<String>,
    /// The units to give back: 1 by default.
    units: Option<Units>,
}

impl Question for RefundRequest {
    const ONE: &'static str = "a refund";
    const MANY: &'static str = "refunds";
}

/// A reset of a key.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResetRequest {
    /// The name of a limit.
    limit: Option<String>,
    /// The key: a string, or one string for each part of the limit's key.
    #[schemars(with = "Option<StringOrStrings>")]
    key: Option<OneOrMany>,
    /// The plan whose numbers apply to the key: one that the limit has overrides for. Without it, that of the key's last
    /// request, if this process remembers one, or else the limit's own numbers.
    plan: Option<String>,
}

impl Question for ResetRequest {
    const ONE: &'static str = "a reset";
    const MANY: &'static str = "resets";
}

type Changing = BoxFuture<'static, Result<Outcome, StoreUnavailable>>;

/// The response to one change of an array.
#[derive(Serialize)]
#[serde(untagged)]
enum ChangeResponse<'a> {
    Done(Box<CheckResponse<'a>>),
    Failed(ErrorBody),
}

pub(super) async fn refund(State(state): State<ServiceState>, request: Request) -> Result<Response, ErrorBody> {
    let batch = Batch::<RefundRequest>::parse(&read_json(request).await?)?;
    let changes = start(&state.gate, &batch, |refund, gate, rules, place| {
        let limit = (refund.limit.as_deref(), refund.plan.as_deref());
        let (limit, key) = resolve_key(limit, refund.key.as_ref(), rules, place)?;
        let units = refund.units.as_ref().map_or(1, |units| units.0);
        gate.refund_by_name(limit, &key, units).map_err(|error| invalid_key(&error, rules, place))
    })?;
    respond(batch.shape, changes).await
}

pub(super) async fn reset(State(state): State<ServiceState>, request: Request) -> Result<Response, ErrorBody> {
    let batch = Batch::<ResetRequest>::parse(&read_json(request).await?)?;
    let changes = start(&state.gate, &batch, |reset, gate, rules, place| {
        let limit = (reset.limit.as_deref(), reset.plan.as_deref());
        let (limit, key) = resolve_key(limit, reset.key.as_ref(), rules, place)?;
        gate.reset_by_name(limit, &key).map_err(|error| invalid_key(&error, rules, place))
    })?;
    respond(batch.shape, changes).await
}

/// Prepares all changes by the same rules. None is made before all are known to be valid.
fn start<T: Question>(
    gate: &Gate,
    batch: &Batch<T>,
    change: impl Fn(&T, &Gate, &RuleSet, &dyn Fn() -> String) -> Result<Changing, ErrorBody>,
) -> Result<Vec<Changing>, ErrorBody> {
    let gate = gate.pinned();
    let rules = gate.rules();
    batch.resolve(|item, place| change(item, &gate, &rules, place))
}

async fn respond(shape: Shape, changes: Vec<Changing>) -> Result<Response, ErrorBody> {
    let mut outcomes = join_all(changes).await;
    if shape == Shape::One {
        let outcome = outcomes.pop().expect("one question has one response");
        let outcome = outcome.map_err(|error| ErrorBody::store_unavailable(&error))?;
        return Ok(Json(CheckResponse::new(&outcome)).into_response());
    }
    let responses = outcomes.iter().map(|outcome| match outcome {
        Ok(outcome) => ChangeResponse::Done(Box::new(CheckResponse::new(outcome))),
        Err(error) => ChangeResponse::Failed(ErrorBody::store_unavailable(error)),
    });
    Ok(Json(responses.collect::<Vec<_>>()).into_response())
}
