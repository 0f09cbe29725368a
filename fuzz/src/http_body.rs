//! Bodies of the HTTP service: any bytes get a decision or an error with a message, and a body that is refused takes
//! nothing.

use serde_json::Value;
use tollgate_server::fuzzing::Service;

const PATHS: [&str; 6] = ["/v1/check", "/v1/peek", "/v1/refund", "/v1/reset", "/v1/reserve", "/v1/settle"];

/// Keys whose quota is looked at.
const PEEKS: &str = r#"[{"limit":"global"},{"limit":"per-user","key":"ann"},{"limit":"per-page","key":["ann","/"]}]"#;

/// Posts all bytes but the first one, which names the path.
pub fn http_body(input: &[u8]) {
    let Some((path, body)) = input.split_first() else { return };
    let path = PATHS[usize::from(*path) % PATHS.len()];
    let service = Service::default();
    let fresh = service.post("/v1/peek", PEEKS.as_bytes());
    assert_eq!(fresh.0, 200);
    let (status, answer) = service.post(path, body);
    let json: Value = serde_json::from_slice(&answer).unwrap_or_else(|error| panic!("{error}: {answer:?}"));
    let sent: Option<Value> = serde_json::from_slice(body).ok();
    if status == 200 {
        check_answer(&json, sent.as_ref());
    } else {
        assert!(matches!(status, 400 | 404 | 409 | 410 | 413), "{status} {json}");
        check_error(&json);
        assert_eq!(service.post("/v1/peek", PEEKS.as_bytes()), fresh, "a refused body has taken units");
    }
    if matches!(path, "/v1/peek" | "/v1/refund" | "/v1/reset") {
        assert_eq!(service.post("/v1/peek", PEEKS.as_bytes()), fresh, "{path} has taken units");
    }
    if path == "/v1/check" {
        simple(body, status, &json);
    }
}

fn check_answer(json: &Value, sent: Option<&Value>) {
    match (sent, json) {
        (Some(Value::Array(sent)), Value::Array(answers)) => assert_eq!(sent.len(), answers.len()),
        (Some(Value::Object(_)), Value::Object(_)) => {}
        _ => panic!("{sent:?} is answered with {json}"),
    }
    let answers = json.as_array().map_or(std::slice::from_ref(json), Vec::as_slice);
    for answer in answers {
        let number = |name: &str| answer.get(name).and_then(Value::as_u64);
        if let (Some(quota), Some(remaining)) = (number("quota"), number("remaining")) {
            assert!(remaining <= quota, "{answer}");
        }
        let has_verdict = answer.get("allowed").is_some_and(Value::is_boolean);
        assert!(has_verdict || answer.get("settled").is_some(), "{answer}");
    }
}

fn check_error(json: &Value) {
    let text = |name: &str| json.get(name).and_then(Value::as_str).unwrap_or_else(|| panic!("{json} has no {name}"));
    assert!(!text("error").is_empty() && text("error").bytes().all(|byte| byte == b'_' || byte.is_ascii_lowercase()));
    // A message names the problem and the fix, and repeats only the start of long texts.
    let message = text("message");
    assert!(message.contains([';', ':']) && message.chars().count() < 2_000, "{message}");
}

/// The fast path decides as the other one, or leaves the request to it.
fn simple(body: &[u8], status: u16, expected: &Value) {
    let head = format!(
        "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let Some(response) = Service::default().simple_check(&[head.as_bytes(), body].concat()) else { return };
    let text = String::from_utf8(response).unwrap_or_else(|error| panic!("{error}"));
    let Some((head, answer)) = text.split_once("\r\n\r\n") else { panic!("{text} has no body") };
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && status == 200, "{head} and {status}");
    assert_eq!(serde_json::from_str::<Value>(answer).ok().as_ref(), Some(expected));
}
