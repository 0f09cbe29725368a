//! The rules in force: `GET` and `PUT /v1/rules`, `POST /v1/rules/validate` and `/v1/rules/rollback`.
//!
//! A change names the version that it expects to be in force, so of two clients that change the same rules, one wins. The
//! task of reloads makes the change.

use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tollgate_config::internal::LimitRule;
use tollgate_config::{Problems, Severity};
use tollgate_telemetry::limit_summary;

use super::access::Caller;
use super::{Admin, AdminState};
use crate::learning::Learned;
use crate::reload::api::{ChangeKind, ChangeRefused, ChangeRequest, CurrentRules, Reach, describe_changes, parse};
use crate::reload::versions::{EarlierRules, RulesInForce, RulesSource};
use crate::service::error_body::{ErrorBody, quoted};
use crate::service::http::{Object, parse_json, read_body, read_json};

/// The longest text of rules: that of a rule file.
pub(super) const MAX_RULES_BYTES: usize = 4 << 20;

/// The most checks of rules that run or wait. Each holds a text of up to 4 MiB.
const MAX_VALIDATIONS: usize = 4;

/// The longest time that a client waits for a check of rules. 4 MiB of them take seconds, and a disk may hang.
const VALIDATION_DEADLINE: Duration = Duration::from_secs(20);

static VALIDATIONS: Validations = Validations::new();

/// The rules in force, and those before.
#[derive(Serialize, JsonSchema)]
pub(super) struct Rules {
    /// A hash of the text, which is the same on all nodes with the same rules. It is the `ETag` too.
    version: String,
    source: RulesSource,
    /// Seconds since the Unix epoch.
    loaded_at: f64,
    /// The text, without lines that may contain credentials.
    text: String,
    limits: Vec<LimitJson>,
    /// The versions before, the latest first.
    history: Vec<HistoryJson>,
}

/// A limit in force.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "RuleLimit")]
struct LimitJson {
    limit: String,
    /// The algorithm, or `in_flight`.
    algorithm: &'static str,
    /// The numbers in words.
    numbers: String,
    /// The parts of the key. One count for all requests without any.
    key: Vec<String>,
    /// The requests that it applies to, as the rules say it. All if left out.
    #[serde(rename = "match", skip_serializing_if = "Option::is_none")]
    matches: Option<Value>,
    /// Whether it only counts, and denies nothing.
    shadow: bool,
    enabled: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    /// What a limit that learns has learned.
    #[serde(skip_serializing_if = "Option::is_none")]
    learned: Option<Learned>,
}

/// Rules that were in force.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "EarlierRules")]
struct HistoryJson {
    version: String,
    source: RulesSource,
    /// Seconds since the Unix epoch.
    loaded_at: f64,
    /// The changes to the version before it.
    changes: Vec<String>,
}

/// The result of checking rules.
#[derive(Serialize, JsonSchema)]
pub(super) struct Validation {
    valid: bool,
    problems: Vec<ProblemJson>,
    /// The changes to the rules in force that they would make.
    changes: Vec<String>,
}

/// A problem of rules.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "RuleProblem")]
struct ProblemJson {
    line: u32,
    column: u32,
    /// `error` or `warning`.
    severity: &'static str,
    message: String,
    fix: String,
}

/// Rules that were replaced.
#[derive(Serialize, JsonSchema)]
pub(super) struct Changed {
    /// The version in force now.
    version: String,
    changes: Vec<String>,
    /// How long they stay in force.
    lasts: &'static str,
}

/// A version to return to.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Rollback {
    /// A version of the history.
    version: String,
    /// The version that has to be in force now.
    expected: String,
}

/// Why rules were not replaced.
#[derive(Serialize, JsonSchema)]
pub(super) struct RulesError {
    #[serde(skip)]
    status: StatusCode,
    error: &'static str,
    message: String,
    /// The version in force, if it is not the expected one.
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    /// The problems of rules that are not valid.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<ProblemJson>,
}

pub(super) async fn read(State(state): State<AdminState>, headers: HeaderMap) -> Result<Response, ErrorBody> {
    let in_force = state.server.reloads.in_force();
    let tag = etag(&in_force.version);
    if headers.get(header::IF_NONE_MATCH) == Some(&tag) {
        return Ok((StatusCode::NOT_MODIFIED, [(header::ETAG, tag)]).into_response());
    }
    // Ten thousand limits take milliseconds.
    let read = tokio::task::spawn_blocking(move || Rules::of(&state, &in_force));
    let rules = read.await.map_err(|_| ErrorBody::failed())?;
    Ok(([(header::ETAG, tag)], Json(rules)).into_response())
}

pub(super) async fn validate(State(state): State<AdminState>, request: Request) -> Result<Json<Validation>, ErrorBody> {
    let text = read_rules(request).await?;
    VALIDATIONS.run(move || Validation::of(&state, &text)).await.map(Json)
}

pub(super) async fn replace(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, RulesError> {
    let expected = expected_version(request.headers())?;
    let text = read_rules(request).await?;
    let kind = ChangeKind::Replace;
    change(&state, ChangeRequest { text, expected, kind, caller: caller.to_string() }).await
}

pub(super) async fn roll_back(
    State(state): State<AdminState>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, RulesError> {
    let body = read_json(request).await?;
    let Object(Rollback { version, expected }) = parse_json(&body)?;
    let in_force = state.server.reloads.version();
    if version == in_force {
        if expected != in_force {
            return Err(RulesError::of(ChangeRefused::Conflict { version: in_force }, &state));
        }
        let message = format!("version {in_force} is in force already: choose another one of GET /v1/rules");
        return Err(ErrorBody { status: StatusCode::CONFLICT, error: "already_in_force", message }.into());
    }
    let earlier = state.server.reloads.earlier();
    let Some(found) = earlier.iter().find(|one| one.version == version) else {
        let message = format!("the history has no version {}: use one of GET /v1/rules", quoted(&version));
        return Err(ErrorBody { status: StatusCode::NOT_FOUND, error: "unknown_version", message }.into());
    };
    let (text, kind) = (found.text.clone(), ChangeKind::RollBack);
    change(&state, ChangeRequest { text, expected, kind, caller: caller.to_string() }).await
}

async fn change(state: &Admin, request: ChangeRequest) -> Result<Response, RulesError> {
    match state.server.reloads.change(request).await {
        Ok(changed) => {
            let lasts = match changed.reach {
                Reach::ThisNode => "until the file is saved or the server restarts",
                Reach::AllNodes => "published to all nodes",
            };
            let tag = etag(&changed.version);
            let body = Changed { version: changed.version, changes: changed.changes, lasts };
            Ok(([(header::ETAG, tag)], Json(body)).into_response())
        }
        Err(refused) => Err(RulesError::of(refused, state)),
    }
}

/// Reads rules as YAML.
async fn read_rules(request: Request) -> Result<String, ErrorBody> {
    let sent = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if !sent.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/yaml") {
        return Err(ErrorBody {
            status: StatusCode::UNSUPPORTED_MEDIA_TYPE,
            error: "unsupported_media_type",
            message: format!("the Content-Type is {}: send `Content-Type: application/yaml`", quoted(sent)),
        });
    }
    let body = read_body(request, MAX_RULES_BYTES).await?;
    let text = String::from_utf8(body.into());
    text.map_err(|_| ErrorBody::invalid("the rules are not UTF-8: send them as UTF-8".to_owned()))
}

/// Returns the version that a client expects, from `If-Match`.
fn expected_version(headers: &HeaderMap) -> Result<String, ErrorBody> {
    let sent = headers.get(header::IF_MATCH).and_then(|value| value.to_str().ok());
    let version = sent.map(|sent| sent.trim().trim_start_matches("W/").trim_matches('"'));
    match version.filter(|version| !version.is_empty() && *version != "*") {
        Some(version) => Ok(version.to_owned()),
        None => Err(ErrorBody {
            status: StatusCode::PRECONDITION_REQUIRED,
            error: "version_missing",
            message: "the request names no version: send the ETag of GET /v1/rules as `If-Match: \"VERSION\"`"
                .to_owned(),
        }),
    }
}

fn etag(version: &str) -> HeaderValue {
    // A version has hexadecimal digits only.
    HeaderValue::try_from(format!("\"{version}\"")).unwrap_or(HeaderValue::from_static("\"\""))
}

impl Rules {
    fn of(state: &Admin, in_force: &RulesInForce) -> Self {
        let file = &in_force.file;
        let limits = file.limits.iter().enumerate().map(|(index, limit)| {
            let matches = file.setting_of_limit(index, "match");
            LimitJson::of(limit, matches, state.server.learners.describe(limit.name.as_str()))
        });
        let of_domains = file.envoy_rules().limits().map(|(name, numbers)| LimitJson::of_domain(name, &numbers));
        Self {
            version: in_force.version.clone(),
            source: in_force.source,
            loaded_at: in_force.loaded_at,
            text: in_force.shown_text().to_owned(),
            limits: limits.chain(of_domains).collect(),
            history: state.server.reloads.earlier().iter().map(|one| HistoryJson::of(one)).collect(),
        }
    }
}

impl LimitJson {
    fn of(limit: &LimitRule, matches: Option<Value>, learned: Option<Learned>) -> Self {
        Self {
            limit: limit.name.as_str().to_owned(),
            algorithm: if limit.in_flight.is_some() { "in_flight" } else { limit.algorithm.as_str() },
            // The numbers of rules in force are valid.
            numbers: limit_summary::numbers(limit).unwrap_or_default(),
            key: limit.key.iter().flatten().map(ToString::to_string).collect(),
            matches,
            shadow: limit.shadow,
            enabled: limit.enabled,
            description: limit.description.clone(),
            learned,
        }
    }

    /// Describes a limit of envoyproxy/ratelimit's configuration.
    fn of_domain(name: &str, numbers: &str) -> Self {
        Self {
            limit: name.to_owned(),
            algorithm: "envoy",
            numbers: numbers.to_owned(),
            key: Vec::new(),
            matches: None,
            shadow: false,
            enabled: true,
            description: None,
            learned: None,
        }
    }
}

impl HistoryJson {
    fn of(earlier: &EarlierRules) -> Self {
        let EarlierRules { version, source, loaded_at, changes, .. } = earlier;
        Self { version: version.clone(), source: *source, loaded_at: *loaded_at, changes: changes.clone() }
    }
}

impl Validation {
    fn of(state: &Admin, text: &str) -> Self {
        let (own, in_force) = (state.server.reloads.own_file(), state.server.reloads.in_force());
        let current = CurrentRules { own: &own, in_force: &in_force.file };
        let checked = parse(text, current, ChangeKind::Replace).and_then(|file| file.compile().map(|_| file));
        match checked {
            Ok(file) => {
                let changes = describe_changes(&file, current);
                Self { valid: true, problems: problems(file.warnings()), changes }
            }
            Err(errors) => Self { valid: false, problems: problems(&errors), changes: Vec::new() },
        }
    }
}

/// Checks rules one at a time, so that they take no more than one processor.
struct Validations {
    /// Checks that run or wait.
    places: Semaphore,
    turn: Semaphore,
}

impl Validations {
    const fn new() -> Self {
        Self { places: Semaphore::const_new(MAX_VALIDATIONS), turn: Semaphore::const_new(1) }
    }

    /// Runs a check on its own thread. A check that takes too long keeps its turn until it ends, so that checks on a disk
    /// that hangs do not use up all threads.
    async fn run<T: Send + 'static>(&'static self, check: impl FnOnce() -> T + Send + 'static) -> Result<T, ErrorBody> {
        let unavailable = |message: &str| ErrorBody {
            status: StatusCode::SERVICE_UNAVAILABLE,
            error: "validation_unavailable",
            message: message.to_owned(),
        };
        let _place =
            self.places.try_acquire().map_err(|_| unavailable("other rules are being checked: try again later"))?;
        let checked = async {
            let turn = self.turn.acquire().await.map_err(|_| ErrorBody::failed())?;
            let checked = tokio::task::spawn_blocking(move || {
                let checked = check();
                drop(turn);
                checked
            });
            checked.await.map_err(|_| ErrorBody::failed())
        };
        let late = |_| {
            let seconds = VALIDATION_DEADLINE.as_secs();
            unavailable(&format!(
                "the check did not end within {seconds} s: use fewer limits, or look for a disk that hangs if \
                 tollgate validate on the server takes as long"
            ))
        };
        timeout(VALIDATION_DEADLINE, checked).await.map_err(late)?
    }
}

fn problems(problems: &Problems) -> Vec<ProblemJson> {
    let json = |problem: &tollgate_config::Problem| ProblemJson {
        line: problem.position().line,
        column: problem.position().column,
        severity: if problem.severity() == Severity::Warning { "warning" } else { "error" },
        message: problem.message().to_owned(),
        fix: problem.fix().to_owned(),
    };
    problems.iter().map(json).collect()
}

impl RulesError {
    fn of(refused: ChangeRefused, state: &Admin) -> Self {
        let error =
            |status, error, message: String| Self { status, error, message, version: None, problems: Vec::new() };
        match refused {
            ChangeRefused::Conflict { version } => {
                let message =
                    format!("version {version} is in force, not the expected one: read it, and change that version");
                Self { version: Some(version), ..error(StatusCode::PRECONDITION_FAILED, "version_conflict", message) }
            }
            ChangeRefused::PublishedElsewhere => {
                let message = "another node has published other rules: read them in a moment, and change that version";
                let version = Some(state.server.reloads.version());
                let conflict = error(StatusCode::PRECONDITION_FAILED, "version_conflict", message.to_owned());
                Self { version, ..conflict }
            }
            ChangeRefused::Invalid(found) => {
                let message = "the rules are not valid: correct the problems, and send them again".to_owned();
                let invalid = error(StatusCode::UNPROCESSABLE_ENTITY, "invalid_rules", message);
                Self { problems: problems(&found), ..invalid }
            }
            ChangeRefused::Unavailable(message) => {
                error(StatusCode::SERVICE_UNAVAILABLE, "change_unavailable", message)
            }
        }
    }
}

impl From<ErrorBody> for RulesError {
    fn from(ErrorBody { status, error, message }: ErrorBody) -> Self {
        Self { status, error, message, version: None, problems: Vec::new() }
    }
}

impl IntoResponse for RulesError {
    fn into_response(self) -> Response {
        let (status, tag) = (self.status, self.version.as_deref().map(etag));
        let mut response = (status, Json(self)).into_response();
        response.headers_mut().extend(tag.map(|tag| (header::ETAG, tag)));
        response
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_check_that_hangs_delays_others_only_until_the_deadline() {
        static CHECKS: Validations = Validations::new();
        let (end, ended) = mpsc::channel::<()>();
        // The clock does not advance by itself while a thread works.
        let hanging = tokio::spawn(CHECKS.run(move || ended.recv()));
        let waiting = [(); MAX_VALIDATIONS - 1].map(|()| tokio::spawn(CHECKS.run(|| ())));
        tokio::task::yield_now().await;
        let full = CHECKS.run(|| ()).await.expect_err("there is no place");
        assert_eq!((full.status.as_u16(), full.error), (503, "validation_unavailable"));
        tokio::time::advance(VALIDATION_DEADLINE).await;
        let late = hanging.await.expect("it ends").expect_err("it is late");
        assert!(late.message.starts_with("the check did not end within 20 s"), "{}", late.message);
        for one in waiting {
            assert!(one.await.expect("it ends").is_err(), "the turn is still taken");
        }
        drop(end);
        assert!(CHECKS.run(|| ()).await.is_ok(), "the turn is free again");
    }
}
