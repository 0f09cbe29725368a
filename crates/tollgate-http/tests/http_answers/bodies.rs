//! The bodies of a refusal, and which of them is sent.

use std::time::Duration;

use bytes::Bytes;
use http::header::ACCEPT;
use http::{HeaderMap, HeaderValue, Response};
use serde_json::{Value, json};
use tollgate::{Decision, FixedWindow, Limit};
use tollgate_http::{Body, Families, Policy, Refusal, RefusalBuilder, Template};

use crate::{denied_for, limited, per_user};

fn accepting(accept: &str) -> HeaderMap {
    HeaderMap::from_iter([(ACCEPT, HeaderValue::try_from(accept).expect("a header value"))])
}

fn refused(refusal: &Refusal, by: Option<&(Limit, Decision)>, body: &Body, request: &HeaderMap) -> Response<Bytes> {
    let policy = by.map(|(limit, _)| Policy::new(limit, Families::default()));
    let mut answer = RefusalBuilder::new(refusal);
    if let (Some(policy), Some((_, decision))) = (&policy, by) {
        answer = answer.limit(policy).decision(decision);
    }
    answer.response(body, request)
}

fn text(response: &Response<Bytes>) -> &str {
    std::str::from_utf8(response.body()).expect("bodies are UTF-8")
}

fn content_type(response: &Response<Bytes>) -> &str {
    response.headers()["content-type"].to_str().expect("media types are ASCII")
}

#[test]
fn the_documents_json_to_the_letter() {
    let response = refused(&Refusal::Limited, Some(&per_user(100)), &Body::Json, &HeaderMap::new());
    assert_eq!(response.status(), 429);
    assert_eq!(
        text(&response),
        r#"{"error":"rate_limit_exceeded","message":"Too many requests. Please retry after 60 seconds.","retry_after":60}"#
    );
    assert_eq!(content_type(&response), "application/json");
    assert_eq!(response.headers()["retry-after"], "60");
    assert_eq!(response.headers()["x-ratelimit-limit"], "100");
    assert_eq!(response.headers()["x-ratelimit-remaining"], "0");
    assert_eq!(response.headers()["x-ratelimit-reset"], "1640000000");
    assert_eq!(response.headers()["ratelimit"], r#""per-user";r=0;t=60"#);
    assert_eq!(response.headers()["ratelimit-policy"], r#""per-user";q=100;w=60"#);
    assert_eq!(response.headers()["cache-control"], "no-store");
    assert_eq!(response.headers().len(), 8);
}

#[test]
fn the_body_waits_as_long_as_the_header() {
    let by = denied_for(Duration::from_micros(60_000_001));
    let response = refused(&Refusal::Limited, Some(&by), &Body::Json, &HeaderMap::new());
    let body: Value = serde_json::from_slice(response.body()).unwrap();
    assert_eq!((&body["retry_after"], response.headers()["retry-after"].to_str().unwrap()), (&json!(61), "61"));
}

#[test]
fn where_waiting_never_helps_no_wait_is_promised() {
    let (limit, limiter) = limited("per-user", FixedWindow::default());
    let by = (limit, limiter.check_n("ann", 11));
    let response = refused(&Refusal::Limited, Some(&by), &Body::Json, &HeaderMap::new());
    assert_eq!(
        text(&response),
        r#"{"error":"rate_limit_exceeded","message":"The request asks for more than the limit ever allows."}"#
    );
    assert!(!response.headers().contains_key("retry-after"));
}

#[test]
fn every_refusal_has_its_status_code_and_words() {
    let missing = Refusal::KeyMissing { part: "header:x-user-id".into() };
    let banned = Refusal::Banned { retry_after: Duration::from_millis(599_001) };
    let table = [
        (
            &banned,
            429,
            Some("600"),
            json!({"error": "banned", "message": "This client is banned. Please retry after 600 seconds.", "retry_after": 600}),
        ),
        (&Refusal::Blocked, 403, None, json!({"error": "blocked", "message": "This client is blocked."})),
        (
            &missing,
            403,
            None,
            json!({"error": "key_missing", "message": "The request lacks header:x-user-id, which the limit counts by."}),
        ),
        (
            &Refusal::StoreUnavailable,
            503,
            Some("1"),
            json!({"error": "store_unavailable", "message": "The limit cannot be checked at the moment. Please retry after 1 second.", "retry_after": 1}),
        ),
        (&Refusal::Limited, 429, None, json!({"error": "rate_limit_exceeded", "message": "Too many requests."})),
        (
            &Refusal::ClientAddressUnknown,
            500,
            None,
            json!({"error": "client_address_unknown", "message": "The service does not know the address of its clients, which a limit needs: serve it with into_make_service_with_connect_info::<SocketAddr>(), or set RateLimitLayer::peer_address."}),
        ),
    ];
    for (refusal, status, retry_after, body) in table {
        let response = refused(refusal, None, &Body::Json, &HeaderMap::new());
        assert_eq!(response.status(), status, "{refusal:?}");
        assert_eq!(response.headers().get("retry-after").map(|value| value.to_str().unwrap()), retry_after);
        assert_eq!(serde_json::from_slice::<Value>(response.body()).unwrap(), body);
    }
}

#[test]
fn a_ban_outlasts_what_the_limit_says() {
    let banned = Refusal::Banned { retry_after: Duration::from_secs(600) };
    let response = refused(&banned, Some(&per_user(100)), &Body::Json, &HeaderMap::new());
    assert_eq!(response.headers()["retry-after"], "600");
    assert_eq!(response.headers()["x-ratelimit-remaining"], "0");
}

#[test]
fn problem_details_have_the_members_of_rfc_9457() {
    let missing = Refusal::KeyMissing { part: "header:x-user-id".into() };
    let banned = Refusal::Banned { retry_after: Duration::from_secs(600) };
    let table = [
        (
            &Refusal::Limited,
            json!({
                "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
                "title": "Request cannot be satisfied as assigned quota has been exceeded",
                "status": 429,
                "detail": "Too many requests. Please retry after 60 seconds.",
                "violated-policies": ["per-user"],
            }),
        ),
        (
            &banned,
            json!({
                "type": "https://iana.org/assignments/http-problem-types#abnormal-usage-detected",
                "title": "Request not satisfied due to detection of abnormal request pattern",
                "status": 429,
                "detail": "This client is banned. Please retry after 600 seconds.",
                "violated-policies": ["per-user"],
            }),
        ),
        (
            &Refusal::StoreUnavailable,
            json!({
                "type": "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
                "title": "Request cannot be satisfied due to temporary server capacity constraints",
                "status": 503,
                "detail": "The limit cannot be checked at the moment. Please retry after 60 seconds.",
                "violated-policies": ["per-user"],
            }),
        ),
        (
            &Refusal::Blocked,
            json!({
                "type": "about:blank", "title": "Forbidden", "status": 403, "detail": "This client is blocked.",
            }),
        ),
        (
            &missing,
            json!({
                "type": "about:blank", "title": "Forbidden", "status": 403,
                "detail": "The request lacks header:x-user-id, which the limit counts by.",
            }),
        ),
    ];
    for (refusal, problem) in table {
        let response = refused(refusal, Some(&per_user(100)), &Body::Problem, &HeaderMap::new());
        assert_eq!(content_type(&response), "application/problem+json");
        assert_eq!(serde_json::from_slice::<Value>(response.body()).unwrap(), problem);
    }
}

#[test]
fn a_violated_policy_goes_by_the_name_that_the_header_has() {
    let (limit, limiter) = limited("한도", FixedWindow::new(1, tollgate::MINUTE));
    let _ = limiter.check("ann");
    let by = (limit, limiter.check("ann"));
    let response = refused(&Refusal::Limited, Some(&by), &Body::Problem, &HeaderMap::new());
    let problem: Value = serde_json::from_slice(response.body()).unwrap();
    let name = problem["violated-policies"][0].as_str().unwrap();
    assert!(response.headers()["ratelimit"].to_str().unwrap().starts_with(&format!("\"{name}\";")));
}

#[test]
fn accept_chooses_the_body_and_the_set_one_is_the_default() {
    const JSON: &str = "application/json";
    const PROBLEM: &str = "application/problem+json";
    const HTML: &str = "text/html; charset=utf-8";
    let html = Body::template("<p>", "text/html").unwrap();
    let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
    // (Accept, with JSON set, with problem details set, with a page set)
    let table = [
        ("*/*", JSON, PROBLEM, HTML),
        ("application/json", JSON, JSON, JSON),
        ("application/problem+json", PROBLEM, PROBLEM, PROBLEM),
        ("application/*", JSON, PROBLEM, JSON),
        ("application/json;q=0.2, application/problem+json;q=0.3", PROBLEM, PROBLEM, PROBLEM),
        ("application/json;q=0, */*", PROBLEM, PROBLEM, HTML),
        (browser, JSON, PROBLEM, HTML),
        ("image/png", JSON, PROBLEM, HTML),
        ("nonsense", JSON, PROBLEM, HTML),
    ];
    for (accept, with_json, with_problem, with_page) in table {
        for (body, expected) in [(&Body::Json, with_json), (&Body::Problem, with_problem), (&html, with_page)] {
            let response = refused(&Refusal::Limited, Some(&per_user(100)), body, &accepting(accept));
            assert_eq!(content_type(&response), expected, "{accept} with {body:?}");
        }
    }
}

#[test]
fn a_template_is_told_everything() {
    let all = "{{limit}} {{quota}} {{ remaining }} {{retry_after}} {{reset_after}} {{status}}: {{message}}";
    let body = Body::template(all, "text/plain").unwrap();
    let response = refused(&Refusal::Limited, Some(&per_user(100)), &body, &HeaderMap::new());
    assert_eq!(text(&response), "per-user 100 0 60 60 429: Too many requests. Please retry after 60 seconds.");
    assert_eq!(content_type(&response), "text/plain; charset=utf-8");
}

#[test]
fn unknown_numbers_are_null_in_json_and_empty_elsewhere() {
    let json = Body::template(r#"{"wait":{{retry_after}},"left":{{remaining}}}"#, "application/json").unwrap();
    assert_eq!(text(&refused(&Refusal::Blocked, None, &json, &HeaderMap::new())), r#"{"wait":null,"left":null}"#);
    let plain = Body::template("[{{retry_after}}{{limit}}]", "text/plain").unwrap();
    assert_eq!(text(&refused(&Refusal::Blocked, None, &plain, &HeaderMap::new())), "[]");
}

#[test]
fn values_are_escaped_as_the_type_asks() {
    let table = [
        ("text/html", "&lt;b title=&#39;&quot;&#39;&gt;&amp;\\"),
        ("application/xhtml+xml", "&lt;b title=&#39;&quot;&#39;&gt;&amp;\\"),
        ("application/xml; charset=UTF-8", "&lt;b title=&#39;&quot;&#39;&gt;&amp;\\"),
        ("application/json", r#"<b title='\"'>&\\"#),
        ("application/vnd.api+json", r#"<b title='\"'>&\\"#),
        ("text/plain", r#"<b title='"'>&\"#),
    ];
    let name = r#"<b title='"'>&\"#;
    let (limit, limiter) = limited(name, FixedWindow::new(1, tollgate::MINUTE));
    let _ = limiter.check("ann");
    let by = (limit, limiter.check("ann"));
    for (content_type, escaped) in table {
        let body = Body::template("{{limit}}", content_type).unwrap();
        assert_eq!(text(&refused(&Refusal::Limited, Some(&by), &body, &HeaderMap::new())), escaped, "{content_type}");
    }
}

#[test]
fn values_are_not_read_as_templates() {
    let refusal = Refusal::KeyMissing { part: "{{status}}".into() };
    let body = Body::template("{{message}} }} {", "text/plain").unwrap();
    let response = refused(&refusal, None, &body, &HeaderMap::new());
    assert_eq!(text(&response), "The request lacks {{status}}, which the limit counts by. }} {");
}

#[test]
fn a_template_that_cannot_be_sent_is_refused_with_the_fix() {
    let known = "use limit, quota, remaining, retry_after, reset_after, message, status";
    let long = "x".repeat(64 * 1024 + 1);
    let table = [
        ("{{limits}}", "text/html", "template", format!("unknown placeholder `limits` in the template: {known}")),
        ("a {{}}", "text/html", "template", format!("unknown placeholder `` in the template: {known}")),
        (
            "a {{limit",
            "text/html",
            "template",
            "unclosed `{{` in the template, before `limit`: close it with `}}`".into(),
        ),
        (&long, "text/html", "template", "a template of 65537 bytes is too long: use 64 KiB or less".into()),
        ("", "html", "content_type", "`html` is not a content type: write a media type such as text/html".into()),
        (
            "",
            "text/html\r\nx-evil: 1",
            "content_type",
            "`text/html  x-evil: 1` is not a content type: write a media type such as text/html".into(),
        ),
        (
            "",
            "text/html; a=b\r\nx: y",
            "content_type",
            "`text/html; a=b  x: y` is not a content type: write a media type such as text/html".into(),
        ),
        (
            "",
            "text/html; charset=latin1",
            "content_type",
            "a template is sent as UTF-8, not as latin1: use charset=utf-8, or leave it out".into(),
        ),
    ];
    for (text, content_type, field, message) in table {
        let error = Template::new(text, content_type).unwrap_err();
        assert_eq!((error.field(), error.to_string()), (field, message));
    }
}
