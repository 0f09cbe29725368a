//! Words that other rate limiters use, and ours for them.
//!
//! Somebody who comes from nginx, Envoy, Kong or a library types its words first. A guess by spelling would mislead, so
//! each of them has a sentence that leads to the same meaning here, or that asks which meaning is wanted.

use serde_json::Value;

use crate::rules::file::forms;
use crate::rules::file::node::{Kind, Node, ScalarValue};
use crate::rules::file::problem::shown;

/// A key of another rate limiter: the sentence that leads to ours, and the key of ours that it stands for.
pub(super) struct Known {
    pub(super) fix: String,
    pub(super) ours: Option<&'static str>,
}

/// A part of the file whose keys have look-alikes elsewhere.
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

/// Returns what is known of a key that the schema does not have.
pub(super) fn key(key: &str, value: &Node, schema: &Value) -> Option<Known> {
    let known = |ours, fix: String| Some(Known { fix, ours });
    let word = key.to_ascii_lowercase().replace('-', "_");
    match (Section::of(schema)?, word.as_str()) {
        (Section::File, "rules" | "rate_limit" | "rate_limits" | "ratelimit" | "ratelimits" | "quotas") => {
            known(Some("limits"), "write `limits`".into())
        }
        (Section::Tls, "cert" | "certificate" | "cert_file" | "key" | "key_file") => {
            known(Some("certificates"), "write `certificates: { cert: FILE, key: FILE }`".into())
        }
        (Section::Limit, word) => limit(word, value),
        _ => None,
    }
}

fn limit(word: &str, value: &Node) -> Option<Known> {
    let known = |ours, fix: String| Some(Known { fix, ours: Some(ours) });
    match word {
        "keys" => known(
            "key",
            "write `key` for what to count by; keys that are not counted or always refused are listed under `exempt` or \
             `blocked`"
                .into(),
        ),
        "when" | "if" | "condition" => known(
            "match",
            "write `match: { when: … }` for the requests that the limit applies to; under `exempt` it says who is not \
             counted, under `blocked` who is refused"
                .into(),
        ),
        "ips" | "cidrs" | "networks" => known(
            "key",
            "write `key: ip` to count by address, `exempt: { ips: … }` for addresses that are not counted, or `blocked: { \
             ips: … }` for addresses that are refused"
                .into(),
        ),
        "ip" | "remote_addr" | "client_ip" | "by_ip" | "per_ip" => known("key", "write `key: ip`".into()),
        "by" | "by_key" | "group_by" | "identifier" | "zone" | "limit_by" => {
            known("key", "write `key`, such as `key: ip` or `key: header:x-user-id`".into())
        }
        "header" => known(
            "key",
            "write `key: header:NAME` to count by a header, or `match: { headers: { NAME: VALUE } }` for requests that \
             have it"
                .into(),
        ),
        "api_key" | "apikey" => {
            known("key", "write where the request names it, such as `key: header:x-api-key` or `key: query:api_key`".into())
        }
        "user" | "user_id" | "token" => {
            known("key", "write where the request names it, such as `key: header:x-user-id` or `key: jwt:sub`".into())
        }
        "rate" | "rps" | "average" => {
            let rate = rate_of(value).unwrap_or_else(|| "10/s".into());
            known(
                "refill",
                format!(
                    "write `algorithm: token_bucket` with `refill: {rate}` and `capacity` for bursts, or `limit` and \
                     `window`"
                ),
            )
        }
        "burst" | "burst_size" | "nodelay" => known(
            "capacity",
            "write `algorithm: token_bucket` with `capacity`: nginx's `burst=5 nodelay` is `capacity: 6`, because nginx \
             admits one request beside the burst"
                .into(),
        ),
        "delay" => known(
            "max_wait",
            "write `algorithm: leaky_bucket` with `overflow: queue` and `max_wait`, which lets requests wait".into(),
        ),
        "requests" | "requests_per_unit" | "max" | "max_requests" | "hits" | "points" | "quota" | "threshold" => {
            let number = integer_of(value).unwrap_or_else(|| "10".into());
            known("limit", format!("write `limit: {number}`, and in `window` the time that it is for"))
        }
        "unit" | "per" | "period" | "interval" | "duration" | "time_window" | "seconds" | "window_ms" | "windowms" => {
            known("window", format!("write `window`, {}", window_of(word, value)))
        }
        "gcra" => known("algorithm", "write `algorithm: token_bucket`: GCRA is a token bucket".into()),
        "token_bucket" | "leaky_bucket" | "fixed_window" | "sliding_window_log" | "sliding_window_counter" => {
            known("algorithm", format!("write `algorithm: {word}`, and its numbers beside it"))
        }
        "type" | "strategy" | "policy" => known("algorithm", "write `algorithm`, such as `algorithm: token_bucket`".into()),
        "uri" | "url" | "location" | "endpoint" | "paths" => known("match", "write `match: { path: … }`".into()),
        "method" => known(
            "match",
            "write `match: { methods: [GET] }` for requests of that method, or `key: method` to count each method apart"
                .into(),
        ),
        "host" => known(
            "match",
            "write `match: { hosts: [api.example.com] }` for requests to that host, or `key: host` to count each host apart"
                .into(),
        ),
        "route" => known("key", "write `key: route` to count each route apart, or `match: { path: … }`".into()),
        "concurrency" | "concurrent" | "max_concurrent" | "connections" | "limit_conn" => {
            known("in_flight", "write `in_flight` for requests at the same time".into())
        }
        "dry_run" | "log_only" | "report_only" | "shadow_mode" => known("shadow", "write `shadow: true`".into()),
        "disabled" => known("enabled", "write `enabled: false`".into()),
        "comment" | "comments" | "note" | "notes" | "title" => known("description", "write `description`".into()),
        "whitelist" | "allowlist" | "allow" | "bypass" | "skip" => {
            known("exempt", "write `exempt: { ips: …, keys: …, when: … }` for requests that are not counted".into())
        }
        "blacklist" | "blocklist" | "denylist" | "deny" => {
            known("blocked", "write `blocked: { ips: …, keys: …, when: … }` for requests that are always refused".into())
        }
        _ => None,
    }
}

/// Returns the sentence for a word that is not one of those listed for a key.
pub(super) fn word(key: &str, word: &str) -> Option<&'static str> {
    if key != "algorithm" {
        return None;
    }
    match word.to_ascii_lowercase().replace(['-', ' '], "_").as_str() {
        "gcra" | "generic_cell_rate" => Some("write token_bucket: GCRA is a token bucket"),
        "token" | "tokens" | "tokenbucket" | "bucket" => Some("write token_bucket"),
        "leaky" | "leakybucket" | "limit_req" => Some(
            "write leaky_bucket; nginx's `limit_req` with `nodelay` is a token_bucket with a capacity of burst + 1",
        ),
        "fixed" | "fixedwindow" | "window" => Some("write fixed_window"),
        "sliding" | "sliding_window" | "slidingwindow" | "rolling" | "rolling_window" | "moving_window" => {
            Some("write sliding_window_counter, an estimate in little memory, or sliding_window_log, which is exact")
        }
        "log" | "sliding_log" => Some("write sliding_window_log"),
        "counter" | "sliding_counter" => Some("write sliding_window_counter"),
        "concurrency" | "concurrent" | "limit_conn" => {
            Some("write `in_flight: 10` in place of an algorithm, for requests at the same time")
        }
        _ => None,
    }
}

fn scalar(value: &Node) -> Option<&str> {
    match &value.kind {
        Kind::Scalar(scalar) if scalar.value != ScalarValue::Null => Some(&scalar.text),
        _ => None,
    }
}

fn integer_of(value: &Node) -> Option<String> {
    scalar(value).filter(|text| text.len() <= 10 && text.bytes().all(|byte| byte.is_ascii_digit())).map(str::to_owned)
}

/// A rate as we write it: nginx has `10r/s`.
fn rate_of(value: &Node) -> Option<String> {
    let text = scalar(value)?.replacen("r/", "/", 1);
    let is_rate = forms::by_format("rate").is_some_and(|form| (form.check)(&text).is_ok());
    is_rate.then(|| shown(&text))
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
    let is_span = forms::by_format("span").is_some_and(|form| (form.check)(&text).is_ok());
    match (unit, integer_of(value)) {
        (Some(unit), _) => format!("such as `window: {unit}`"),
        (None, Some(number)) if word.ends_with("ms") => format!("with its unit: `window: {number}ms`"),
        (None, Some(number)) if word == "seconds" => format!("with its unit: `window: {number}s`"),
        (None, Some(number)) => format!("with its unit: `window: {number}s` if these are seconds"),
        (None, None) if is_span => format!("such as `window: {}`", shown(&text)),
        (None, None) => "such as `window: 1m`".into(),
    }
}
