//! Tokens at the gateway: failures are reported, and denied requests are not verified.

use serde_json::{Value, json};
use testkit::client::{Protocol, each_protocol};
use testkit::folder::folder_with;
use testkit::gateway::{Gateway, site};
use testkit::wait::wait_until;

pub(crate) const SECRET: &str = "0123456789abcdef0123456789abcdef";

pub(crate) fn token(secret: &str, claims: &Value) -> String {
    let key = jsonwebtoken::EncodingKey::from_secret(secret.as_bytes());
    jsonwebtoken::encode(&jsonwebtoken::Header::default(), claims, &key).unwrap()
}

/// Returns a new token of another issuer.
fn forged(number: u64) -> String {
    token("ffffffffffffffffffffffffffffffff", &json!({ "sub": number }))
}

fn gateway(protocol: Protocol, jwt: &str, limits: &str) -> Gateway {
    let routes = ["{ path: /**, respond: { status: 204 } }"];
    let rules = format!(
        "jwt: {{ key_file: secret.key, algorithms: [HS256]{jwt} }}\nadmin: {{ listen: 127.0.0.1:0 }}\n{}",
        site("workers: 1\n  access_log: { format: json, file: access.log }", &routes, limits)
    );
    protocol.start_in(folder_with(&[("tollgate.yaml", &rules), ("secret.key", SECRET)]))
}

fn request(token: Option<&str>) -> String {
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    format!("GET / HTTP/1.1\r\nHost: a\r\n{token}\r\n")
}

/// Returns the field `token` of each line of the access log, once there are this many lines.
fn logged(gateway: &Gateway, count: usize) -> Vec<Value> {
    let read = || std::fs::read_to_string(gateway.path("access.log")).unwrap_or_default();
    let whole = || Some(read()).filter(|text| text.lines().count() >= count && text.ends_with('\n'));
    let text = wait_until(whole).unwrap_or_else(|| panic!("there are not {count} lines in {}", read()));
    let parsed = |line: &str| serde_json::from_str::<Value>(line).unwrap()["token"].clone();
    text.lines().map(parsed).collect()
}

#[test]
fn a_denied_client_costs_no_verification() {
    each_protocol(|protocol| {
        let limits = "{ name: user, key: 'jwt:sub', limit: 1000 }, \
        { name: address, key: ip, algorithm: fixed_window, align: first_request, limit: 2, window: 1h }";
        let gateway = gateway(protocol, "", limits);
        let mut connection = gateway.client();
        for number in 0..2 {
            assert_eq!(connection.ask(request(Some(&forged(number)))).status, 204);
        }
        gateway.await_metric("tollgate_token_verifications_total", 2);
        for number in 2..32 {
            assert_eq!(connection.ask(request(Some(&forged(number)))).status, 429);
        }
        gateway.await_metric("tollgate_decisions_total{limit=\"address\",outcome=\"denied\"}", 30);
        gateway.await_metric("tollgate_token_verifications_total", 2);
        gateway.await_metric("tollgate_token_failures_total{reason=\"bad_signature\"}", 2);
        let tokens = logged(&gateway, 32);
        assert_eq!(tokens.iter().filter(|token| **token == json!("bad_signature")).count(), 2, "{tokens:?}");
        assert_eq!(tokens.iter().filter(|token| token.is_null()).count(), 30, "{tokens:?}");
    });
}

#[test]
fn client_without_a_valid_token_gets_the_reason_and_a_challenge() {
    each_protocol(|protocol| {
        let limits = "{ name: user, key: 'jwt:sub', missing: deny, limit: 1000 }";
        let expired = token(SECRET, &json!({ "sub": "ann", "exp": 1 }));
        let future = token(SECRET, &json!({ "sub": "ann", "nbf": 4_000_000_000_u64 }));
        let (forged, good) = (forged(0), token(SECRET, &json!({ "sub": "ann" })));
        for (jwt, status) in [("", 403), (", challenge: true", 401)] {
            let gateway = gateway(protocol, jwt, limits);
            for _ in 0..2 {
                let mut connection = gateway.client();
                for (token, reason, message) in [
                    (None, "missing", "The request carries no token."),
                    (Some("x"), "malformed", "The token is malformed."),
                    (Some(&*expired), "expired", "The token has expired."),
                    (Some(&*future), "not_yet_valid", "The token is not valid yet."),
                    (Some(&*forged), "bad_signature", "The signature of the token is invalid."),
                ] {
                    let answer = connection.ask(request(token));
                    assert_eq!(answer.status, status, "{reason}");
                    let body: Value = serde_json::from_str(answer.text()).unwrap();
                    assert_eq!(body, json!({ "error": format!("token_{reason}"), "message": message }));
                    let challenge = match (status, token) {
                        (403, _) => None,
                        (_, None) => Some("Bearer".to_owned()),
                        _ => Some(format!("Bearer error=\"invalid_token\", error_description=\"{message}\"")),
                    };
                    assert_eq!(answer.header("www-authenticate"), challenge.as_deref(), "{reason}");
                }
                assert_eq!(connection.ask(request(Some(&good))).status, 204);
            }
            for reason in ["missing", "malformed", "expired", "not_yet_valid", "bad_signature"] {
                gateway.await_metric(&format!("tollgate_token_failures_total{{reason=\"{reason}\"}}"), 2);
            }
            // Each of the four that could be verified, once: the second time they were cached.
            gateway.await_metric("tollgate_token_verifications_total", 4);
            let tokens = logged(&gateway, 12);
            assert_eq!(tokens.iter().filter(|token| **token == json!("expired")).count(), 2, "{tokens:?}");
            assert_eq!(tokens.iter().filter(|token| token.is_null()).count(), 2, "{tokens:?}");
        }
    });
}

#[test]
fn without_a_limit_by_claim_no_token_is_counted() {
    each_protocol(|protocol| {
        let gateway = gateway(protocol, "", "{ name: address, key: ip, limit: 1000 }");
        assert_eq!(gateway.client().ask(request(Some(&forged(0)))).status, 204);
        gateway.await_metric("tollgate_decisions_total{limit=\"address\",outcome=\"allowed\"}", 1);
        let admin = gateway.address_of("admin");
        let expected = testkit::http1::Connection::to(admin).get("/metrics").text().to_owned();
        assert!(!expected.contains("tollgate_token_"), "{expected}");
    });
}
