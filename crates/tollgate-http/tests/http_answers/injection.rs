//! A response has exactly the expected headers, whatever names and texts are configured.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response};
use proptest::prelude::*;
use sfv::{List, ListEntry, Parser};
use tollgate::{Decision, FixedWindow, Limit, Limiter, MINUTE};
use tollgate_http::{Body, Families, HeaderFamily, Policy, Refusal, RefusalBuilder};

/// Generates any valid name of a limit, with many of the characters that matter in headers.
fn names() -> impl Strategy<Value = String> {
    let letters =
        prop_oneof![any::<char>(), prop::sample::select(vec!['"', '\\', '%', ';', ',', '=', ':', ' ', '\u{2028}'])];
    prop::collection::vec(letters, 1..40)
        .prop_map(|letters| letters.into_iter().filter(|letter| !letter.is_control()).collect::<String>())
        .prop_filter("a name of a limit", |name| !name.is_empty() && name.len() <= 128)
}

fn families() -> impl Strategy<Value = Families> {
    prop::sample::subsequence(HeaderFamily::ALL.to_vec(), 0..=4).prop_map(|chosen| chosen.into_iter().collect())
}

fn refusals() -> impl Strategy<Value = Refusal> {
    prop_oneof![
        Just(Refusal::Limited),
        Just(Refusal::Blocked),
        Just(Refusal::StoreUnavailable),
        Just(Refusal::Banned { retry_after: Duration::MAX }),
        any::<Duration>().prop_map(|retry_after| Refusal::Banned { retry_after }),
        any::<String>().prop_map(|part| Refusal::KeyMissing { part }),
    ]
}

fn denied(name: &str) -> (Limit, Decision) {
    let limit = Limit::new(name, FixedWindow::new(1, MINUTE)).expect("any printable name is a name");
    let limiter = Limiter::new(limit.clone());
    let _ = limiter.check("ann");
    (limit, limiter.check("ann"))
}

/// Returns whether all headers are printable ASCII, so that none can end a line or confuse a parser.
fn is_printable_ascii(headers: &HeaderMap) -> bool {
    headers.values().all(|value| value.as_bytes().iter().all(|byte| (b' '..=b'~').contains(byte)))
}

fn named_items(headers: &HeaderMap, field: &str) -> usize {
    let Some(value) = headers.get(field) else { return 0 };
    let list: List = Parser::new(value.as_bytes()).parse().expect("a list of structured fields");
    list.iter().filter(|entry| matches!(entry, ListEntry::Item(item) if item.bare_item.as_string().is_some())).count()
}

proptest! {
    #[test]
    fn headers_are_printable_and_one_policy_is_one_item(name in names(), families in families(), refusal in refusals()) {
        let (limit, decision) = denied(&name);
        let policy = Policy::new(&limit, families);
        let answer = RefusalBuilder::new(&refusal).limit(&policy).decision(&decision);
        let of_limit = matches!(refusal, Refusal::Limited | Refusal::Banned { .. });
        let items = usize::from(families.has(HeaderFamily::Ietf) && of_limit);
        let http = answer.response(&Body::Json, &HeaderMap::new());
        for headers in [http.headers(), answer.grpc().headers()] {
            prop_assert!(is_printable_ascii(headers), "{headers:?}");
            if families.has(HeaderFamily::Ietf) {
                prop_assert_eq!(named_items(headers, "ratelimit"), items);
                prop_assert_eq!(named_items(headers, "ratelimit-policy"), items);
            }
        }
    }

    #[test]
    fn json_is_json_whatever_is_put_in(name in names(), refusal in refusals()) {
        let (limit, decision) = denied(&name);
        let policy = Policy::new(&limit, Families::default());
        let answer = RefusalBuilder::new(&refusal).limit(&policy).decision(&decision);
        let template = r#"{"limit":"{{limit}}","message":"{{message}}","wait":{{retry_after}}}"#;
        let template = Body::template(template, "application/json").unwrap();
        for body in [&Body::Json, &Body::Problem, &template] {
            let response: Response<Bytes> = answer.response(body, &HeaderMap::new());
            let members: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
            if let Some(limit) = members.get("limit") {
                prop_assert_eq!(limit.as_str(), Some(name.as_str()));
            }
        }
    }

    #[test]
    fn a_page_gains_no_tags(name in names(), refusal in refusals()) {
        let (limit, decision) = denied(&name);
        let policy = Policy::new(&limit, Families::default());
        let page = Body::template("<p title=\"{{limit}}\">{{message}}</p>", "text/html").unwrap();
        let response = RefusalBuilder::new(&refusal).limit(&policy).decision(&decision).response(&page, &HeaderMap::new());
        let text = std::str::from_utf8(response.body()).unwrap();
        prop_assert_eq!(text.matches('<').count(), 2);
        prop_assert_eq!(text.matches('"').count(), 2);
    }

    #[test]
    fn any_content_type_that_is_taken_can_be_sent(content_type in "\\PC{0,20}/\\PC{0,20}(; ?[a-z]{1,9}=\\PC{0,9})?") {
        if let Ok(body) = Body::template("", &content_type) {
            let response = RefusalBuilder::new(&Refusal::Blocked).response(&body, &HeaderMap::new());
            prop_assert!(is_printable_ascii(response.headers()));
        }
    }

    #[test]
    fn no_header_of_an_upstream_or_a_client_breaks_the_answer(
        value in prop_oneof![any::<Vec<u8>>(), "[ -~]{0,60}".prop_map(String::into_bytes), "[a-z/*,;=q0-9. \"\\\\()]{0,60}".prop_map(String::into_bytes)],
        families in families(),
    ) {
        let Ok(value) = HeaderValue::from_bytes(&value) else { return Ok(()) };
        let names = ["x-ratelimit-remaining", "x-ratelimit-reset", "ratelimit-remaining", "ratelimit", "ratelimit-policy"];
        let mut headers: HeaderMap = names.into_iter().map(|name| (name.parse().unwrap(), value.clone())).collect();
        let (limit, decision) = denied("per-user");
        Policy::new(&limit, families).merge(&decision, &mut headers);
        let request = HeaderMap::from_iter([(http::header::ACCEPT, value)]);
        let refused = RefusalBuilder::new(&Refusal::Limited).decision(&decision).response(&Body::Problem, &request);
        prop_assert_eq!(refused.status(), 429);
    }
}
