//! `GET /v1/top`: the keys that limits deny or nearly deny most.

use std::str::FromStr;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::Uri;
use schemars::JsonSchema;
use serde::Serialize;
use tollgate_rules::internal::limited::LimitedKind;
use tollgate_telemetry::limited::{Top, TopEntry, TopQuery, Window, key_text};

use super::AdminState;
use super::parameters::Parameters;
use crate::service::error_body::ErrorBody;
use crate::service::http::unknown_limit;

/// The most keys in a response.
const MAX_KEYS: usize = 1_000;
const DEFAULT_KEYS: usize = 20;

/// The nodes that a list is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    Node,
    Fleet,
}

/// The most limited keys.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct TopResponse {
    /// The window: `1m` or `1h`.
    over: &'static str,
    /// `denied`, `shadow_denied` or `near_limit`.
    kind: &'static str,
    /// `node` or `fleet`.
    scope: &'static str,
    /// The number of nodes that the list is about.
    nodes: usize,
    /// Seconds that the list reaches back: the window, or up to a sixth more.
    covered: f64,
    /// The number of requests, of all keys.
    total: u64,
    /// Requests of the last hour that were not counted, because too many limits denied requests at once.
    uncounted: u64,
    /// Why the list is of this node only, if that of the fleet was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    /// The keys, those with the highest counts first.
    keys: Vec<KeyJson>,
}

/// A limited key.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "TopKey")]
struct KeyJson {
    limit: String,
    /// The parts of the key, separated by commas, without control characters and truncated; or its hash.
    key: String,
    /// Whether `key` is the hash.
    is_hashed: bool,
    /// The hash of the key, which is the same on every node.
    key_hash: String,
    /// The parts of the key, unless they are hidden or truncated.
    #[serde(skip_serializing_if = "Option::is_none")]
    parts: Option<Vec<String>>,
    /// The number of requests, or up to `error` more. It is never too low.
    count: u64,
    /// The most by which `count` can be too high.
    error: u64,
    /// Seconds since the Unix epoch.
    last_seen: f64,
}

pub(super) async fn top(State(state): State<AdminState>, uri: Uri) -> Result<Json<TopResponse>, ErrorBody> {
    let parameters = Parameters::parse(&uri, &["over", "kind", "limit", "count", "scope"])?;
    let Over(window) = parameters.value("over", Over(Window::Minute), "1m or 1h")?;
    let Kind(kind) = parameters.value("kind", Kind(LimitedKind::Denied), "denied, shadow_denied or near_limit")?;
    let scope = parameters.value("scope", Scope::Node, "node or fleet")?;
    let count = parameters.value("count", DEFAULT_KEYS, "a number from 1 to 1000")?;
    if !(1..=MAX_KEYS).contains(&count) {
        return Err(ErrorBody::invalid(format!("count is {count}: use 1 to {MAX_KEYS}")));
    }
    let limit = parameters.one("limit")?.map(str::to_owned);
    if let Some(limit) = &limit {
        let rules = state.server.gate.rules();
        if rules.key_parts(limit).is_none() {
            return Err(unknown_limit(limit, &rules));
        }
    }
    let query = TopQuery { window, kind, limit, count };
    let top = match scope {
        Scope::Fleet => state.server.limited.fleet_top(query).await,
        Scope::Node => {
            let limited = Arc::clone(&state.server.limited);
            // Merging thousands of keys takes milliseconds.
            let read = tokio::task::spawn_blocking(move || limited.top(&query));
            read.await.map_err(|_| ErrorBody::failed())?
        }
    };
    Ok(Json(TopResponse::of(&top, (window, kind, scope), state.server.key_display.shows_keys())))
}

impl TopResponse {
    fn of(top: &Top, (window, kind, scope): (Window, LimitedKind, Scope), shows_keys: bool) -> Self {
        let Top { list, nodes, problem } = top;
        let scope = if problem.is_some() { Scope::Node } else { scope };
        Self {
            over: over(window),
            kind: word(kind),
            scope: match scope {
                Scope::Node => "node",
                Scope::Fleet => "fleet",
            },
            nodes: *nodes,
            covered: list.covered.as_secs_f64(),
            total: list.total,
            uncounted: list.uncounted,
            note: problem.as_ref().map(|problem| format!("only this node is listed: {problem}")),
            keys: list.keys.iter().map(|entry| KeyJson::of(entry, shows_keys)).collect(),
        }
    }
}

impl KeyJson {
    fn of(entry: &TopEntry, shows_keys: bool) -> Self {
        let key_hash = format!("{:016x}", entry.key.hash);
        let shown = entry.key.parts.as_ref().filter(|_| shows_keys);
        let whole = shown.filter(|_| !entry.key.is_truncated);
        Self {
            limit: entry.limit.to_string(),
            key: shown.map_or_else(|| key_hash.clone(), |_| key_text(&entry.key)),
            is_hashed: shown.is_none(),
            key_hash,
            parts: whole.map(|parts| parts.iter().map(|part| String::from(&**part)).collect()),
            count: entry.count,
            error: entry.error,
            last_seen: entry.last_seen.as_micros() as f64 / 1e6,
        }
    }
}

struct Over(Window);

struct Kind(LimitedKind);

fn over(window: Window) -> &'static str {
    match window {
        Window::Minute => "1m",
        Window::Hour => "1h",
    }
}

fn word(kind: LimitedKind) -> &'static str {
    match kind {
        LimitedKind::Denied => "denied",
        LimitedKind::ShadowDenied => "shadow_denied",
        LimitedKind::NearLimit => "near_limit",
    }
}

impl FromStr for Over {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Window::ALL.into_iter().find(|window| over(*window) == text).map(Self).ok_or(())
    }
}

impl FromStr for Kind {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        LimitedKind::ALL.into_iter().find(|kind| word(*kind) == text).map(Self).ok_or(())
    }
}

impl FromStr for Scope {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "node" => Ok(Self::Node),
            "fleet" => Ok(Self::Fleet),
            _ => Err(()),
        }
    }
}
