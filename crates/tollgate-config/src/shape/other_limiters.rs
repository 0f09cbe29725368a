//! Keys and values of other rate limiters, and the corresponding ones of Tollgate.
//!
//! Users of nginx, Envoy, Kong or a library often start with the keys that they know. A suggestion by spelling would
//! mislead, so each of these keys has its own fix.

use std::time::Duration;

use serde_json::Value;
use tollgate::Rate;

use crate::forms;
use crate::node::{Map, Node, NodeKind, ScalarValue};
use crate::problem::shown;

/// The fix for a key of another rate limiter, and the corresponding key of Tollgate.
pub(super) struct Suggestion {
    pub(super) fix: String,
    pub(super) ours: Option<&'static str>,
}

/// The scalars of a map. The fix for one key may depend on the values of others.
pub(super) struct Siblings(Vec<(String, String)>);

impl Siblings {
    pub(super) fn of(map: &Map) -> Self {
        let scalars =
            map.entries.iter().filter_map(|entry| Some((word_of(&entry.key), scalar(&entry.value)?.to_owned())));
        Self(scalars.collect())
    }

    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, text)| text.as_str())
    }

    fn number(&self, keys: &[&str]) -> Option<u64> {
        keys.iter().find_map(|key| self.get(key)?.parse().ok())
    }
}

/// A section of the file with keys that other rate limiters name differently.
enum Section {
    File,
    Limit,
    Tls,
}

impl Section {
    fn of(schema: &Value) -> Option<Self> {
        let properties = schema.get("properties")?;
        let has = |key: &str| properties.get(key).is_some();
        match () {
            () if has("algorithm") && has("missing") => Some(Self::Limit),
            () if has("limits") => Some(Self::File),
            () if has("certificates") => Some(Self::Tls),
            () => None,
        }
    }
}

/// Returns the suggestion for a key that is not in the schema.
pub(super) fn key(key: &str, value: &Node, siblings: &Siblings, schema: &Value) -> Option<Suggestion> {
    let known = |ours, fix: &str| Some(Suggestion { fix: fix.into(), ours: Some(ours) });
    let word = word_of(key);
    match (Section::of(schema)?, word.as_str()) {
        (Section::File, "rules" | "rate_limit" | "rate_limits" | "ratelimit" | "ratelimits" | "quotas") => {
            known("limits", "write `limits`")
        }
        (Section::Tls, "cert" | "certificate" | "cert_file" | "key" | "key_file") => {
            known("certificates", "write `certificates: { cert: FILE, key: FILE }`")
        }
        (Section::Limit, word) => limit(word, value, siblings).or_else(|| library(word, value)),
        _ => None,
    }
}

fn limit(word: &str, value: &Node, siblings: &Siblings) -> Option<Suggestion> {
    let known = |ours, fix: &str| Some(Suggestion { fix: fix.into(), ours: Some(ours) });
    match word {
        "keys" => known(
            "key",
            "write `key` for the key to count by, or list keys under `exempt` (not counted) or `blocked` (always \
             refused)",
        ),
        "when" | "if" | "condition" => known(
            "match",
            "write `match: { when: … }` to choose the requests that the limit applies to, or use `when` under `exempt` \
             (not counted) or `blocked` (always refused)",
        ),
        "ips" | "cidrs" | "networks" => known(
            "key",
            "write `key: ip` to count by address, `exempt: { ips: … }` for addresses that are not counted, or `blocked: { \
             ips: … }` for addresses that are refused",
        ),
        "ip" | "remote_addr" | "client_ip" | "by_ip" | "per_ip" => known("key", "write `key: ip`"),
        "by" | "by_key" | "group_by" | "identifier" | "zone" | "limit_by" => {
            known("key", "write `key`, such as `key: ip` or `key: header:x-user-id`")
        }
        "header" => known(
            "key",
            "write `key: header:NAME` to count by a header, or `match: { headers: { NAME: VALUE } }` for requests that \
             have it",
        ),
        "api_key" | "apikey" => {
            known("key", "write where the request has it, such as `key: header:x-api-key` or `key: query:api_key`")
        }
        "user" | "user_id" | "token" => {
            known("key", "write where the request has it, such as `key: header:x-user-id` or `key: jwt:sub`")
        }
        "rate" | "rps" | "average" => known("refill", &bucket(siblings)),
        "burst" | "burst_size" | "nodelay" => known("capacity", &bucket(siblings)),
        "delay" => {
            known("max_wait", "write `algorithm: leaky_bucket` with `overflow: queue` and `max_wait` to delay requests")
        }
        "requests" | "requests_per_unit" | "max" | "max_requests" | "hits" | "points" | "quota" | "threshold" => {
            let number = integer_of(value).unwrap_or_else(|| "10".into());
            known("limit", &format!("write `limit: {number}`, and its period in `window`"))
        }
        "unit" | "per" | "period" | "interval" | "duration" | "time_window" | "seconds" | "window_ms" | "windowms" => {
            known("window", &format!("write `window`, {}", window_of(word, value)))
        }
        "gcra" => known("algorithm", &gcra(siblings)),
        "token_bucket" | "leaky_bucket" | "fixed_window" | "sliding_window_log" | "sliding_window_counter" => {
            known("algorithm", &format!("write `algorithm: {word}`, and its numbers next to it"))
        }
        // Kong.
        "policy" if matches!(scalar(value), Some("local" | "cluster" | "redis")) => Some(Suggestion {
            fix: "write `store` at the top of the file: `memory`, or `redis://HOST:6379` to share counts".into(),
            ours: None,
        }),
        "type" | "strategy" | "policy" => known("algorithm", "write `algorithm`, such as `algorithm: token_bucket`"),
        "uri" | "url" | "location" | "endpoint" | "paths" => known("match", "write `match: { path: … }`"),
        "method" => known(
            "match",
            "write `match: { methods: [GET] }` for requests of that method, or `key: method` to count each method apart",
        ),
        "host" => known(
            "match",
            "write `match: { hosts: [api.example.com] }` for requests to that host, or `key: host` to count each host apart",
        ),
        "route" => known("key", "write `key: route` to count each route apart, or `match: { path: … }`"),
        "concurrency" | "concurrent" | "max_concurrent" | "connections" | "limit_conn" => {
            known("in_flight", "write `in_flight` to limit concurrent requests")
        }
        "dry_run" | "log_only" | "report_only" | "shadow_mode" => known("shadow", "write `shadow: true`"),
        "disabled" => known("enabled", "write `enabled: false`"),
        "comment" | "comments" | "note" | "notes" | "title" => known("description", "write `description`"),
        "whitelist" | "allowlist" | "allow" | "bypass" | "skip" => {
            known("exempt", "write `exempt: { ips: …, keys: …, when: … }` for requests that are not counted")
        }
        "blacklist" | "blocklist" | "denylist" | "deny" => {
            known("blocked", "write `blocked: { ips: …, keys: …, when: … }` for requests that are always refused")
        }
        _ => None,
    }
}

/// Returns the suggestion for a key of a Node, Python or Go library, or of Kong or Envoy.
fn library(word: &str, value: &Node) -> Option<Suggestion> {
    let known = |ours, fix: &str| Some(Suggestion { fix: fix.into(), ours: Some(ours) });
    let elsewhere = |fix: &str| Some(Suggestion { fix: fix.into(), ours: None });
    match word {
        "keygenerator" | "key_generator" | "key_func" | "keyfunc" | "key_prefix" | "keyprefix" => known(
            "key",
            "write what the function returns, such as `key: ip`, `key: header:x-user-id` or `key: [ip, path]`",
        ),
        "skipsuccessfulrequests" | "skip_successful_requests" => {
            known("count", "write `count: failures`: responses with status 400 and above count")
        }
        "skipfailedrequests" | "skip_failed_requests" => {
            known("count", "write `count: successes`: responses with a status below 400 count")
        }
        "standardheaders" | "legacyheaders" | "draft_polli_ratelimit_headers" | "headers" | "hide_client_headers" => {
            elsewhere("write `headers: [ietf]` or `headers: [legacy]` at the top of the file, for all limits")
        }
        "message" | "handler" | "error_message" | "response" => {
            elsewhere("write `body` at the top of the file: `json`, `problem` or a template, for all limits")
        }
        "statuscode" | "status_code" | "error_code" | "limit_req_status" => {
            elsewhere("remove it: a request beyond a limit gets 429, and one that is `blocked` gets 403")
        }
        "passonstoreerror" | "pass_on_store_error" | "fault_tolerant" | "swallow_errors" => elsewhere(
            "write `on_store_failure: allow` at the top of the file; by default, limits are counted in memory meanwhile",
        ),
        "redis" | "storage_uri" => elsewhere("write `store: redis://HOST:6379` at the top of the file"),
        "blockduration" | "block_duration" => {
            let lasts = integer_of(value).map_or_else(|| "10m".into(), |seconds| format!("{seconds}s"));
            known(
                "ban",
                &format!("write `ban: {{ after: 1, within: 1m, for: {lasts} }}`, which bans a key after one denial"),
            )
        }
        "max_tokens" => known("capacity", "write `algorithm: token_bucket` with `capacity`"),
        "tokens_per_fill" | "fill_interval" => known(
            "refill",
            "write `algorithm: token_bucket` with `refill`: 10 tokens per fill in an interval of 30s are `refill: 10/30s`",
        ),
        "second" | "minute" | "hour" | "day" => {
            let number = integer_of(value).unwrap_or_else(|| "10".into());
            known("limit", &format!("write `limit: {number}` and `window: 1{}`", &word[..1]))
        }
        _ => None,
    }
}

/// Returns the fix for an algorithm that needs other numbers here.
pub(super) fn algorithm(key: &str, value: &Node, siblings: &Siblings) -> Option<String> {
    let is_gcra = key == "algorithm" && matches!(word_of(scalar(value)?).as_str(), "gcra" | "generic_cell_rate");
    is_gcra.then(|| gcra(siblings))
}

/// Returns the fix for GCRA, with the numbers of the limit.
fn gcra(siblings: &Siblings) -> String {
    let why = "GCRA is a token bucket";
    let limit = siblings.number(&["limit", "max", "requests"]);
    let rate = limit.zip(siblings.get("window")).and_then(|(limit, window)| rate_text(limit, window));
    match (limit, rate) {
        (Some(limit), Some(rate)) => format!(
            "write `algorithm: token_bucket`, `capacity: {limit}` and `refill: {rate}` instead of `limit` and `window`: {why}"
        ),
        (Some(limit), None) => {
            format!("write `algorithm: token_bucket`, `capacity: {limit}` and its rate in `refill`: {why}")
        }
        (None, _) => format!("write `algorithm: token_bucket`, with `capacity` and `refill`: {why}"),
    }
}

/// Returns `count` per `window` as a rate, or `None` if a rate cannot have that period.
pub(crate) fn rate_text(count: u64, window: &str) -> Option<String> {
    let unit = window.strip_prefix('1').filter(|unit| unit.starts_with(|letter: char| letter.is_ascii_alphabetic()));
    let text = format!("{count}/{}", unit.unwrap_or(window));
    text.parse::<Rate>().is_ok().then_some(text)
}

/// Returns the fix for a rate and a burst. nginx's burst is one less than the capacity, and waits without `nodelay`.
fn bucket(siblings: &Siblings) -> String {
    let given = ["rate", "rps", "average"].iter().find_map(|key| siblings.get(key));
    let rate = given.and_then(rate_of);
    let burst = siblings.number(&["burst", "burst_size"]);
    let waits = match siblings.get("nodelay") {
        Some("false") => true,
        Some(_) => false,
        None => burst.is_some_and(|burst| burst > 0),
    };
    let is_nginx = given.is_some_and(|text| text.contains("r/")) || siblings.get("nodelay").is_some();
    let (Some(rate), true) = (&rate, is_nginx) else {
        let refill = rate.unwrap_or_else(|| "10/s".into());
        return match burst {
            Some(burst) => format!(
                "write `algorithm: token_bucket` with `refill: {refill}` and `capacity: {burst}`; nginx's `burst={burst} \
                 nodelay` is `capacity: {}`, because nginx admits one request in addition to the burst",
                burst.saturating_add(1)
            ),
            None => format!(
                "write `algorithm: token_bucket` with `refill: {refill}` and `capacity` for bursts, or `limit` and `window`"
            ),
        };
    };
    let capacity = burst.unwrap_or(0).saturating_add(1);
    match rate.parse::<Rate>() {
        Ok(parsed) if waits => format!(
            "write `algorithm: leaky_bucket`, `capacity: {capacity}`, `leak: {rate}`, `overflow: queue` and `max_wait: {}`: \
             nginx delays the requests of a burst unless it has `nodelay`, and admits one in addition to the burst",
            wait_text(parsed, capacity - 1)
        ),
        _ => format!(
            "write `algorithm: token_bucket`, `capacity: {capacity}` and `refill: {rate}`: nginx admits one request in \
             addition to the burst"
        ),
    }
}

/// Returns the time in which a rate admits `units`, rounded up to milliseconds.
fn wait_text(rate: Rate, units: u64) -> String {
    let millis = rate.period().as_millis().saturating_mul(u128::from(units)).div_ceil(u128::from(rate.count()).max(1));
    let wait = Duration::from_millis(millis.try_into().unwrap_or(u64::MAX));
    if wait.subsec_millis() == 0 { format!("{}s", wait.as_secs()) } else { format!("{}ms", wait.as_millis()) }
}

/// A rate in place of a number.
pub(super) struct WrittenRate {
    /// The rate in our notation.
    pub(super) rate: String,
    pub(super) count: String,
    /// The period of the count.
    pub(super) window: String,
}

pub(super) fn written_rate(text: &str) -> Option<WrittenRate> {
    let rate = rate_of(text).filter(|_| !text.bytes().all(|byte| byte.is_ascii_digit()))?;
    let (count, per) = rate.split_once('/')?;
    let digits = per.len() - per.trim_start_matches(|letter: char| letter.is_ascii_digit()).len();
    let (number, unit) = per.split_at(digits);
    let unit = match unit.trim() {
        "sec" | "second" => "s",
        "min" | "minute" => "m",
        "hour" => "h",
        "day" => "d",
        unit => unit,
    };
    let is_whole = count.bytes().all(|byte| byte.is_ascii_digit());
    let window = format!("{}{unit}", if number.is_empty() { "1" } else { number });
    is_whole.then(|| WrittenRate { count: count.to_owned(), window, rate: rate.clone() })
}

/// Returns the fix for a value that is not one of the listed words of a key.
pub(super) fn word(key: &str, word: &str) -> Option<&'static str> {
    if key != "algorithm" {
        return None;
    }
    match word_of(word).as_str() {
        "token" | "tokens" | "tokenbucket" | "bucket" => Some("write token_bucket"),
        "leaky" | "leakybucket" | "limit_req" => Some(
            "write leaky_bucket; nginx's `limit_req` with `nodelay` is a token_bucket with a capacity of burst + 1",
        ),
        "fixed" | "fixedwindow" | "window" => Some("write fixed_window"),
        "sliding" | "sliding_window" | "slidingwindow" | "rolling" | "rolling_window" | "moving_window" => {
            Some("write sliding_window_counter (an estimate, little memory) or sliding_window_log (exact)")
        }
        "log" | "sliding_log" => Some("write sliding_window_log"),
        "counter" | "sliding_counter" => Some("write sliding_window_counter"),
        "concurrency" | "concurrent" | "limit_conn" => {
            Some("write `in_flight: 10` instead of an algorithm, to limit concurrent requests")
        }
        _ => None,
    }
}

fn scalar(value: &Node) -> Option<&str> {
    match &value.kind {
        NodeKind::Scalar(scalar) if scalar.value != ScalarValue::Null => Some(&scalar.text),
        _ => None,
    }
}

fn integer_of(value: &Node) -> Option<String> {
    scalar(value).filter(|text| text.len() <= 10 && text.bytes().all(|byte| byte.is_ascii_digit())).map(str::to_owned)
}

/// Returns a rate in our notation. nginx writes `10r/s`, and others a number per second.
fn rate_of(text: &str) -> Option<String> {
    let is_number = !text.is_empty() && text.len() <= 10 && text.bytes().all(|byte| byte.is_ascii_digit());
    if is_number {
        return Some(format!("{text}/s"));
    }
    let text: String = text.replacen("r/", "/", 1).replacen(" per ", "/", 1).split_whitespace().collect();
    let is_rate = forms::RateText::read(&text).is_ok();
    is_rate.then(|| shown(&text))
}

/// Returns a key in lower case with underscores.
fn word_of(text: &str) -> String {
    text.to_ascii_lowercase().replace(['-', ' '], "_")
}

fn window_of(word: &str, value: &Node) -> String {
    let text = scalar(value).unwrap_or_default().to_ascii_lowercase();
    let unit = match text.trim_end_matches('s') {
        "second" | "sec" => Some("1s"),
        "minute" | "min" => Some("1m"),
        "hour" | "hr" => Some("1h"),
        "day" => Some("1d"),
        _ => None,
    };
    let is_span = forms::DurationText::read(&text).is_ok();
    match (unit, integer_of(value)) {
        (Some(unit), _) => format!("such as `window: {unit}`"),
        (None, Some(number)) if word.ends_with("ms") => format!("with its unit: `window: {number}ms`"),
        (None, Some(number)) if word == "seconds" => format!("with its unit: `window: {number}s`"),
        (None, Some(number)) => format!("with its unit: `window: {number}s` if these are seconds"),
        (None, None) if is_span => format!("such as `window: {}`", shown(&text)),
        (None, None) => "such as `window: 1m`".into(),
    }
}
