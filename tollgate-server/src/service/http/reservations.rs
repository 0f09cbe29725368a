//! `POST /v1/reserve` and `POST /v1/settle`: units that are taken now and corrected later, on any node.

use std::time::Duration;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tollgate::Settlement;
use tollgate_rules::{MAX_RESERVATION, ReservationError};

use super::batch::parse;
use super::check_request::{invalid_field, invalid_key, resolve_key};
use super::check_response::CheckResponse;
use super::values::{Object, OneOrMany, StringOrStrings, Units};
use super::{ServiceState, read_json};
use crate::service::error_body::ErrorBody;

/// Seconds until a reservation expires, if the client does not say.
const EXPIRES_AFTER_SECS: u64 = 60;

/// A reservation of units of a key.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReserveRequest {
    /// The name of a limit.
    limit: Option<String>,
    /// The key: a string, or one string for each part of the limit's key.
    #[schemars(with = "Option<StringOrStrings>")]
    key: Option<OneOrMany>,
    /// The plan whose numbers apply to the key: one that the limit has overrides for. Without it, that of the key's last
    /// request, if this process remembers one, or else the limit's own numbers.
    plan: Option<String>,
    /// The estimated cost: 1 by default, and at least 1.
    cost: Option<Units>,
    /// Whole seconds until the reservation expires: 60 by default, at most 86400.
    expires_after: Option<Units>,
}

/// A settlement of a reservation.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SettleRequest {
    /// The reservation, as `/v1/reserve` returned it.
    reservation: Option<String>,
    /// The actual cost. 0 gives everything back.
    actual: Option<Units>,
}

/// The decision on a reservation, and the reservation if it is allowed.
#[derive(JsonSchema, Serialize)]
pub(crate) struct ReserveResponse<'a> {
    #[serde(flatten)]
    decision: CheckResponse<'a>,
    /// The text to settle the reservation with; `null` if it was denied.
    reservation: Option<String>,
}

/// The result of a settlement.
#[derive(JsonSchema, Serialize)]
pub(crate) struct SettleResponse {
    settled: bool,
    /// Units of the actual cost beyond the quota. The key is denied until they are paid.
    owed: u64,
    /// Units of the actual cost that could not be counted.
    missing: u64,
}

pub(super) async fn reserve(State(state): State<ServiceState>, request: Request) -> Result<Response, ErrorBody> {
    let Object(question) = parse::<Object<ReserveRequest>>(&read_json(request).await?)?;
    let reserving = {
        let (gate, place) = (state.gate.pinned(), String::new);
        let rules = gate.rules();
        let limit = (question.limit.as_deref(), question.plan.as_deref());
        let (limit, key) = resolve_key(limit, question.key.as_ref(), &rules, &place)?;
        let seconds = question.expires_after.as_ref().map_or(EXPIRES_AFTER_SECS, |seconds| seconds.0);
        if !(1..=MAX_RESERVATION.as_secs()).contains(&seconds) {
            let problem = format!("is {seconds}: use 1 to {} seconds", MAX_RESERVATION.as_secs());
            return Err(invalid_field(&place, "expires_after", &problem));
        }
        let cost = question.cost.as_ref().map_or(1, |cost| cost.0);
        // An open reservation takes memory until it expires, so a client must pay for it.
        if cost == 0 {
            return Err(invalid_field(&place, "cost", "is 0: reserve 1 or more, or look at the key with /v1/peek"));
        }
        let reserving = gate.reserve_by_name(limit, &key, cost, Duration::from_secs(seconds));
        reserving.map_err(|error| invalid_key(&error, &rules, &place))?
    };
    let reserved = reserving.await.map_err(|error| refusal(&error))?;
    state.decisions.record([&reserved.outcome]);
    let decision = CheckResponse::new(&reserved.outcome);
    Ok(Json(ReserveResponse { decision, reservation: reserved.token }).into_response())
}

pub(super) async fn settle(
    State(state): State<ServiceState>,
    request: Request,
) -> Result<Json<SettleResponse>, ErrorBody> {
    let Object(question) = parse::<Object<SettleRequest>>(&read_json(request).await?)?;
    let missing = |field, problem| invalid_field(&String::new, field, problem);
    let token = question.reservation.ok_or_else(|| missing("reservation", "is missing: send it with `actual`"))?;
    let actual = question.actual.ok_or_else(|| missing("actual", "is missing: send the actual cost, or 0"))?;
    match state.gate.settle_token(&token, actual.0).await.map_err(|error| refusal(&error))? {
        Settlement::Settled => Ok(Json(SettleResponse { settled: true, owed: 0, missing: 0 })),
        Settlement::Owed { units } => Ok(Json(SettleResponse { settled: true, owed: units, missing: 0 })),
        Settlement::Short { missing } => Ok(Json(SettleResponse { settled: true, owed: 0, missing })),
        Settlement::AlreadySettled => Err(ErrorBody {
            status: StatusCode::CONFLICT,
            error: "already_settled",
            message: "the reservation was settled before: settle each reservation once".to_owned(),
        }),
        Settlement::Expired => Err(ErrorBody {
            status: StatusCode::GONE,
            error: "reservation_expired",
            message: "the reservation has expired, and its cost stays taken: reserve with a longer `expires_after`"
                .to_owned(),
        }),
        _ => Err(ErrorBody {
            status: StatusCode::SERVICE_UNAVAILABLE,
            error: "store_unavailable",
            message: "the store is unavailable: try again later".to_owned(),
        }),
    }
}

fn refusal(error: &ReservationError) -> ErrorBody {
    let (status, code) = match error {
        ReservationError::Store(error) => return ErrorBody::store_unavailable(error),
        ReservationError::Invalid => (StatusCode::BAD_REQUEST, "invalid_reservation"),
        ReservationError::Foreign => (StatusCode::NOT_FOUND, "unknown_reservation"),
        ReservationError::HandedOver => (StatusCode::SERVICE_UNAVAILABLE, "reservation_handed_over"),
        ReservationError::LimitRemoved { .. } => (StatusCode::NOT_FOUND, "limit_removed"),
        ReservationError::TooLong => (StatusCode::BAD_REQUEST, "invalid_request"),
        ReservationError::TooMany => (StatusCode::SERVICE_UNAVAILABLE, "too_many_reservations"),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "no_reservation"),
    };
    ErrorBody { status, error: code, message: error.to_string() }
}
