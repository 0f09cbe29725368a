//! The state of keys, and changes to it: `GET /v1/keys`, `POST /v1/keys/reset`, `/grant`, `/ban` and `/unban`.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{StatusCode, Uri};
use axum::{Extension, Json};
use futures_util::future::join_all;
use schemars::JsonSchema;
use serde::Deserialize;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tollgate::Decision;
use tollgate_config::internal::DurationText;
use tollgate_rules::internal::limited::{KeyTexts, LimitedKey};
use tollgate_rules::{KeyError, NamedRule, RuleSet};
use tollgate_rules::{RuleExplained, RuleState};
use tollgate_telemetry::limited::key_text;
use tollgate_telemetry::notice::{self, Field};
use tollgate_telemetry::seconds::Seconds;

use super::access::Caller;
use super::key_hash::{KeyDisplay, key_hash};
use super::parameters::Parameters;
use super::{Admin, AdminState};
use crate::bans::{BanError, MAX_DURATION, MAX_KEY_BYTES};
use crate::service::error_body::{ErrorBody, quoted};
use crate::service::http::{
    Object, OneOrMany, StringOrStrings, Units, invalid_key, parse_json, read_json, resolve_key,
};

/// The most limits in a response. Each is a read of the store.
const MAX_LIMITS: usize = 1_000;

/// The most names of limits in a log line.
const MAX_LOGGED: usize = 5;

/// The state of a key in its limits.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Keys {
    limits: Vec<KeyJson>,
    /// Limits that were left out, because there are more than 1,000: name one with `limit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out: Option<usize>,
    /// After a change: whether more is left than before, or a ban was set or lifted. Left out if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    changed: Option<bool>,
    /// A hint if the key looks like the hash of a key.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

/// The state of a key in a limit.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "KeyState")]
struct KeyJson {
    limit: String,
    /// The parts of the key, if the rule file has `show_keys`.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<Vec<String>>,
    /// The first 16 hexadecimal digits of SHA-256 over the name of the limit and the parts of the key, each after a NUL.
    key_hash: String,
    /// `counted`, `in_flight`, `exempt`, `blocked`, `disabled`, or `unknown` while the store fails.
    state: &'static str,
    shadow: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    quota: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remaining: Option<u64>,
    /// The time until the whole quota is back.
    #[serde(skip_serializing_if = "Option::is_none")]
    reset_after: Option<Seconds>,
    /// The time until a request of one unit is allowed, if none is now.
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after: Option<Seconds>,
    /// The time for which the key is still banned.
    #[serde(skip_serializing_if = "Option::is_none")]
    banned_for: Option<Seconds>,
    /// The requests that are in flight.
    #[serde(skip_serializing_if = "Option::is_none")]
    in_flight: Option<u64>,
}

/// A key of a limit, or of all limits with as many parts.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ResetRequest {
    /// The name of a limit. All limits whose key has as many parts if left out.
    limit: Option<String>,
    /// The key: a string, or one string for each part of the limit's key.
    #[schemars(with = "Option<StringOrStrings>")]
    key: Option<OneOrMany>,
}

/// Units to give back to a key.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct GrantRequest {
    /// The name of a limit.
    limit: Option<String>,
    /// The key: a string, or one string for each part of the limit's key.
    #[schemars(with = "Option<StringOrStrings>")]
    key: Option<OneOrMany>,
    /// The plan whose numbers apply to the key. If left out, that of the key's last request, if this process remembers one,
    /// or else the limit's own numbers.
    plan: Option<String>,
    /// The units. A key never has more than its whole quota.
    units: Units,
}

/// A ban of a key.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct BanRequest {
    /// The name of a limit.
    limit: Option<String>,
    /// The key: a string, or one string for each part of the limit's key.
    #[schemars(with = "Option<StringOrStrings>")]
    key: Option<OneOrMany>,
    /// The length: seconds, or a text such as `10m`. At most 366 days.
    #[serde(rename = "for")]
    lasts: Length,
}

/// The end of a ban.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct UnbanRequest {
    /// The name of a limit.
    limit: Option<String>,
    /// The key: a string, or one string for each part of the limit's key.
    #[schemars(with = "Option<StringOrStrings>")]
    key: Option<OneOrMany>,
    /// In place of the key: its hash in `GET /v1/bans`.
    key_hash: Option<String>,
}

/// A duration in seconds, or as in a rule file.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "is not a duration: send seconds, such as 600, or text such as \"10m\"")]
enum Length {
    Seconds(f64),
    Text(DurationText),
}

pub(super) async fn state(State(state): State<AdminState>, uri: Uri) -> Result<Json<Keys>, ErrorBody> {
    let parameters = Parameters::parse(&uri, &["key", "limit", "plan"])?;
    let key = parameters.all("key");
    let key: Vec<String> = key.into_iter().map(str::to_owned).collect();
    let plan = parameters.one("plan")?;
    let limits = match parameters.one("limit")? {
        Some(limit) => vec![checked_limit((limit, plan), &key, &state.server.gate.rules())?],
        None if plan.is_some() => {
            return Err(ErrorBody::invalid(
                "`plan` is given without `limit`: name the limit that has the plan".to_owned(),
            ));
        }
        None => limits_by_parts(&key, &state.server.gate.rules())?,
    };
    let note = state.check_hash(&key).await?;
    Ok(Json(Keys { note, ..state.keys_under(&limits, plan, &key).await }))
}

pub(super) async fn reset(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<Keys>, ErrorBody> {
    let ResetRequest { limit, key } = body(request).await?;
    let rules = state.server.gate.rules();
    let (limits, key) = match limit {
        Some(limit) => {
            let (limit, key) = named_key((Some(&limit), None), key.as_ref(), &rules)?;
            (vec![limit], key)
        }
        None => {
            let key = key.map_or_else(Vec::new, |key| key.as_slice().to_vec());
            (limits_by_parts(&key, &rules)?, key)
        }
    };
    let note = state.check_hash(&key).await?;
    let before = state.keys(&limits, &key).await;
    let slices: Vec<&[u8]> = key.iter().map(String::as_bytes).collect();
    let resets = limits.iter().filter_map(|limit| state.server.gate.reset_by_name(limit, &slices).ok());
    for reset in join_all(resets).await {
        drop(reset.map_err(|error| ErrorBody::store_unavailable(&error))?);
    }
    for limit in state.server.bans.limits_that_ban(&limits, &key) {
        state.server.bans.lift(limit, &key).await.map_err(|error| ban_error(&error))?;
    }
    let after = state.keys(&limits, &key).await.since(&before);
    state.audit("reset_key", &caller, &limits, &key, &[after.changed_field()]);
    Ok(Json(Keys { note, ..after }))
}

pub(super) async fn grant(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<Keys>, ErrorBody> {
    let GrantRequest { limit, key, plan, units: Units(units) } = body(request).await?;
    let plan = plan.as_deref();
    let (limit, key) = named_key((limit.as_deref(), plan), key.as_ref(), &state.server.gate.rules())?;
    let note = state.check_hash(&key).await?;
    let limits = [limit];
    let before = state.keys_under(&limits, plan, &key).await;
    let slices: Vec<&[u8]> = key.iter().map(String::as_bytes).collect();
    if let Ok(granted) = state.server.gate.refund_by_name(NamedRule::new(&limits[0]).plan(plan), &slices, units) {
        drop(granted.await.map_err(|error| ErrorBody::store_unavailable(&error))?);
    }
    let after = state.keys_under(&limits, plan, &key).await.since(&before);
    state.audit("grant_units", &caller, &limits, &key, &[("units", units.into()), after.changed_field()]);
    Ok(Json(Keys { note, ..after }))
}

pub(super) async fn ban(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<Keys>, ErrorBody> {
    let BanRequest { limit, key, lasts } = body(request).await?;
    let (limit, key) = named_key((limit.as_deref(), None), key.as_ref(), &state.server.gate.rules())?;
    let lasts = lasts.duration()?;
    if key.iter().map(String::len).sum::<usize>() > MAX_KEY_BYTES {
        let message = format!("`key` is longer than {MAX_KEY_BYTES} bytes: use `blocked` in the rules");
        return Err(ErrorBody::invalid(message));
    }
    let in_force = state.server.reloads.in_force();
    let rule = in_force.file.limits.iter().find(|rule| rule.name.as_str() == limit);
    if let Some(rule) = rule.filter(|rule| rule.shadow || !rule.enabled) {
        let why = if rule.shadow { "is in shadow mode" } else { "is disabled" };
        let message = format!("the limit {} {why} and refuses nothing: ban the key in another limit", quoted(&limit));
        return Err(ErrorBody { status: StatusCode::CONFLICT, error: "limit_refuses_nothing", message });
    }
    let note = state.check_hash(&key).await?;
    state.server.bans.ban(&limit, &key, lasts, &caller).await.map_err(|error| ban_error(&error))?;
    let limits = [limit];
    state.audit("ban_key", &caller, &limits, &key, &[("seconds", lasts.as_secs_f64().into())]);
    Ok(Json(Keys { changed: Some(true), note, ..state.keys(&limits, &key).await }))
}

pub(super) async fn unban(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<Keys>, ErrorBody> {
    let UnbanRequest { limit, key, key_hash } = body(request).await?;
    let (limit, key) = match (key, key_hash) {
        (None, Some(hash)) => state.banned_key(limit.as_deref(), &hash)?,
        (Some(_), Some(_)) => {
            return Err(ErrorBody::invalid("both `key` and `key_hash` are given: send one of them".to_owned()));
        }
        (key, None) => named_key((limit.as_deref(), None), key.as_ref(), &state.server.gate.rules())?,
    };
    let note = state.check_hash(&key).await?;
    let limits = [limit];
    let is_listed = !state.server.bans.limits_that_ban(&limits, &key).is_empty();
    let before = state.keys(&limits, &key).await;
    state.server.bans.lift(&limits[0], &key).await.map_err(|error| ban_error(&error))?;
    let slices: Vec<&[u8]> = key.iter().map(String::as_bytes).collect();
    if let Ok(lifted) = state.server.gate.lift_ban_by_name(&limits[0], &slices) {
        drop(lifted.await.map_err(|error| ErrorBody::store_unavailable(&error))?);
    }
    let mut after = state.keys(&limits, &key).await.since(&before);
    // A limit that no rule has any more may still have bans.
    after.changed = after.changed.map(|changed| changed || is_listed);
    state.audit("unban_key", &caller, &limits, &key, &[after.changed_field()]);
    Ok(Json(Keys { note, ..after }))
}

async fn body<T: DeserializeOwned>(request: Request) -> Result<T, ErrorBody> {
    let Object(parsed) = parse_json::<Object<T>>(&read_json(request).await?)?;
    Ok(parsed)
}

/// Returns the limit and the key of a request.
fn named_key(
    (limit, plan): (Option<&str>, Option<&str>),
    key: Option<&OneOrMany>,
    rules: &RuleSet,
) -> Result<(String, Vec<String>), ErrorBody> {
    resolve_key((limit, plan), key, rules, &String::new)?;
    Ok((limit.unwrap_or_default().to_owned(), key.map_or_else(Vec::new, |key| key.as_slice().to_vec())))
}

fn checked_limit((limit, plan): (&str, Option<&str>), key: &[String], rules: &RuleSet) -> Result<String, ErrorBody> {
    let key = OneOrMany::new(key.to_vec());
    resolve_key((Some(limit), plan), Some(&key), rules, &String::new).map(|_| limit.to_owned())
}

/// Returns the limits that can have this key.
fn limits_by_parts(key: &[String], rules: &RuleSet) -> Result<Vec<String>, ErrorBody> {
    if key.is_empty() {
        let message = "no key is given: give `key`, or `limit` for a limit with one count for all requests";
        return Err(ErrorBody::invalid(message.to_owned()));
    }
    let parts: Vec<&[u8]> = key.iter().map(String::as_bytes).collect();
    let (mut limits, mut invalid) = (Vec::new(), None);
    for name in rules.names() {
        match rules.check_key(name, &parts) {
            Ok(()) => limits.push(name.to_owned()),
            Err(error @ KeyError::InvalidValue { .. }) => _ = invalid.get_or_insert(error),
            Err(_) => {}
        }
    }
    match invalid {
        Some(error) if limits.is_empty() => Err(invalid_key(&error, rules, &String::new)),
        _ => Ok(limits),
    }
}

fn ban_error(error: &BanError) -> ErrorBody {
    let (status, code) = match error {
        BanError::TooMany => (StatusCode::CONFLICT, "too_many_bans"),
        BanError::Store(_) => (StatusCode::SERVICE_UNAVAILABLE, "store_unavailable"),
        BanError::Busy => (StatusCode::SERVICE_UNAVAILABLE, "busy"),
    };
    ErrorBody { status, error: code, message: error.to_string() }
}

impl Length {
    fn duration(self) -> Result<Duration, ErrorBody> {
        let length = match self {
            Self::Seconds(seconds) => Duration::try_from_secs_f64(seconds).ok(),
            Self::Text(text) => Some(text.duration()),
        };
        length.filter(|length| !length.is_zero() && *length <= MAX_DURATION).ok_or_else(|| {
            ErrorBody::invalid(
                "`for` must be longer than 0 and at most 366 days: send seconds, or text such as \"10m\"".to_owned(),
            )
        })
    }
}

impl Admin {
    /// Reads the state of a key in these limits.
    async fn keys(&self, limits: &[String], key: &[String]) -> Keys {
        self.keys_under(limits, None, key).await
    }

    /// Reads the state of a key in these limits, by the numbers of a plan.
    async fn keys_under(&self, limits: &[String], plan: Option<&str>, key: &[String]) -> Keys {
        let slices: Vec<&[u8]> = key.iter().map(String::as_bytes).collect();
        let named = limits.iter().take(MAX_LIMITS).map(|limit| NamedRule::new(limit).plan(plan));
        let read = named.filter_map(|limit| self.server.gate.explain_key(limit, &slices).ok());
        let read: Vec<RuleExplained> = join_all(read).await;
        let left_out = limits.len().checked_sub(MAX_LIMITS).filter(|more| *more > 0);
        let json = |one: RuleExplained| {
            let counted = self.server.bans.normal_key(&one.name, key);
            KeyJson::of(one, counted, &self.server.key_display)
        };
        let limits = read.into_iter().map(json).collect();
        Keys { limits, left_out, changed: None, note: None }
    }

    /// Refuses the hash of a limited or banned key in place of the key. Returns a hint if the key only looks like a hash,
    /// because a key may look like that too.
    async fn check_hash(self: &Arc<Self>, key: &[String]) -> Result<Option<String>, ErrorBody> {
        let [part] = key else { return Ok(None) };
        let digits = part.strip_prefix('#').unwrap_or(part).to_owned();
        let Some(hash) = parse_hash(&digits) else { return Ok(None) };
        let state = Arc::clone(self);
        // A search of all limited and banned keys takes milliseconds.
        let found = tokio::task::spawn_blocking(move || {
            let banned = || state.banned_key(None, &digits).map(|(limit, _)| limit.into()).ok();
            state.server.limited.limit_of(hash).or_else(banned)
        });
        let Some(limit) = found.await.map_err(|_| ErrorBody::failed())? else {
            let message = "looks like the hash of a key, but no key with this hash was limited on this node in the last \
                           hour: it is taken for a key";
            return Ok(Some(format!("{} {message}", quoted(part))));
        };
        let message = format!(
            "{} is the hash of a key of the limit {}: send the key itself. To list keys in place of hashes, set \
             `admin: {{ show_keys: true }}` in the rule file",
            quoted(part),
            quoted(&limit)
        );
        Err(ErrorBody { status: StatusCode::BAD_REQUEST, error: "key_is_hash", message })
    }

    /// Returns the banned key with this hash, and its limit.
    fn banned_key(&self, limit: Option<&str>, hash: &str) -> Result<(String, Vec<String>), ErrorBody> {
        let bans = self.server.bans.list();
        let found = bans.into_iter().find(|ban| limit.is_none_or(|limit| ban.limit == limit) && self.hash(ban) == hash);
        found.map(|ban| (ban.limit, ban.key)).ok_or_else(|| {
            let message = format!("no ban has the hash {}: use one of GET /v1/bans", quoted(hash));
            ErrorBody { status: StatusCode::NOT_FOUND, error: "unknown_ban", message }
        })
    }

    /// Logs a change of a key. Of several limits, the hash of the key is that for the first.
    fn audit(&self, action: &str, caller: &Caller, limits: &[String], key: &[String], more: &[Field]) {
        let first = limits.first().map(String::as_str).unwrap_or_default();
        let texts = if self.server.key_display.shows_keys() { KeyTexts::Kept } else { KeyTexts::Hashed };
        let key = key_text(&LimitedKey::new(first, &self.server.bans.normal_key(first, key), texts));
        let limits = notice::join_up_to(limits, MAX_LOGGED);
        let fields = [("limit", limits.into()), ("key", key.into())];
        let fields: Vec<Field> = fields.into_iter().chain(more.iter().cloned()).collect();
        notice::audit(action, caller, &fields);
    }
}

/// Returns the number of a hash in the form that `top` shows: 16 hexadecimal digits in lower case.
fn parse_hash(text: &str) -> Option<u64> {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if text.len() == 16 && text.bytes().all(is_digit) { u64::from_str_radix(text, 16).ok() } else { None }
}

impl Keys {
    /// Notes whether a change had an effect, given the state before it.
    fn since(self, before: &Self) -> Self {
        let gained = |(before, after): (&KeyJson, &KeyJson)| {
            after.remaining > before.remaining || (before.banned_for.is_some() && after.banned_for.is_none())
        };
        let changed = before.limits.iter().zip(&self.limits).any(gained);
        // The state of limits that were left out is unknown.
        Self { changed: Some(changed).filter(|changed| *changed || self.left_out.is_none()), ..self }
    }

    /// Returns the effect of a change for the log.
    fn changed_field(&self) -> Field {
        ("changed", self.changed.into())
    }
}

impl KeyJson {
    fn of(explained: RuleExplained, counted: Vec<String>, display: &KeyDisplay) -> Self {
        let json = Self {
            key_hash: key_hash(&explained.name, &counted),
            limit: explained.name,
            key: display.shows_keys().then_some(counted),
            state: "unknown",
            shadow: explained.shadow,
            quota: None,
            remaining: None,
            reset_after: None,
            retry_after: None,
            banned_for: None,
            in_flight: None,
        };
        match explained.state {
            RuleState::Counted { decision, banned_for, .. } => {
                let decided = decision.as_ref();
                Self {
                    state: if decision.is_some() { "counted" } else { "unknown" },
                    quota: decided.map(Decision::quota),
                    remaining: decided.map(Decision::remaining),
                    reset_after: decided.map(|decision| Seconds(decision.reset_after())),
                    retry_after: decided.and_then(Decision::retry_after).map(Seconds),
                    banned_for: banned_for.map(Seconds),
                    ..json
                }
            }
            RuleState::InFlight { in_flight, decision, banned_for, .. } => Self {
                state: "in_flight",
                quota: Some(decision.quota()),
                remaining: Some(decision.quota().saturating_sub(in_flight)),
                banned_for: banned_for.map(Seconds),
                in_flight: Some(in_flight),
                ..json
            },
            RuleState::Disabled => Self { state: "disabled", ..json },
            RuleState::Refused(_) => Self { state: "blocked", ..json },
            _ => Self { state: "exempt", ..json },
        }
    }
}
