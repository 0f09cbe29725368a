//! `GET /v1/bans`: the keys that operators have banned.
//!
//! Deliberately not here: bans that limits set themselves. Each is a counter of its key in the store, which has no list.

use axum::Json;
use axum::extract::State;
use axum::http::Uri;
use schemars::JsonSchema;
use serde::Serialize;
use tollgate::Timestamp;
use tollgate_rules::KeyBan;

use super::key_hash::key_hash;
use super::parameters::Parameters;
use super::{Admin, AdminState};
use crate::service::error_body::ErrorBody;

/// The most bans in a response.
const MAX_BANS: usize = 1_000;
const DEFAULT_BANS: usize = 100;

/// The bans of operators.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct BanList {
    /// The number of bans, also of those that are not in the list.
    total: usize,
    /// The bans, the newest first.
    bans: Vec<BanJson>,
}

/// A ban of a key.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Ban")]
struct BanJson {
    limit: String,
    /// Whether the limit refuses the key now. `false` if no rule has the limit, it is disabled or in shadow mode, or no
    /// request can have the key.
    in_force: bool,
    /// The parts of the key, if the rule file has `show_keys`.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<Vec<String>>,
    /// The hash of the key, which is the same on every node. `POST /v1/keys/unban` accepts it.
    key_hash: String,
    /// Seconds since the Unix epoch.
    since: f64,
    /// Seconds since the Unix epoch.
    until: f64,
    /// The operator, as in the log.
    by: String,
}

pub(super) async fn bans(State(state): State<AdminState>, uri: Uri) -> Result<Json<BanList>, ErrorBody> {
    let parameters = Parameters::parse(&uri, &["limit", "count"])?;
    let count = parameters.value("count", DEFAULT_BANS, "a number from 1 to 1000")?;
    if !(1..=MAX_BANS).contains(&count) {
        return Err(ErrorBody::invalid(format!("count is {count}: use 1 to {MAX_BANS}")));
    }
    let mut bans = state.server.bans.list();
    // A limit that no rule has any more may still have bans.
    if let Some(limit) = parameters.one("limit")? {
        bans.retain(|ban| ban.limit == limit);
    }
    let total = bans.len();
    Ok(Json(BanList { total, bans: bans.into_iter().take(count).map(|ban| state.ban(ban)).collect() }))
}

impl Admin {
    /// Returns the hash of a banned key.
    pub(super) fn hash(&self, ban: &KeyBan) -> String {
        key_hash(&ban.limit, &self.server.bans.normal_key(&ban.limit, &ban.key))
    }

    fn ban(&self, ban: KeyBan) -> BanJson {
        let seconds = |time: Timestamp| time.as_micros() as f64 / 1e6;
        let counted = self.server.gate.normal_key(&ban.limit, &ban.key);
        BanJson {
            // The limit may count by something else now.
            in_force: counted.is_ok() && self.server.gate.is_enforced(&ban.limit),
            key_hash: self.hash(&ban),
            key: self.server.key_display.shows_keys().then(|| counted.unwrap_or(ban.key)),
            limit: ban.limit,
            since: seconds(ban.since),
            until: seconds(ban.until),
            by: ban.by,
        }
    }
}
