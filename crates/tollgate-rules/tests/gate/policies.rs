//! `RateLimit-Policy` lists every enforced policy that a request matched, the same in every response.

use http::HeaderMap;
use tollgate::{Ban, FixedWindow, HOUR, Limit, MINUTE, Rate, SlidingWindowLog, TokenBucket};
use tollgate_rules::{KeyPart, Match, Mode, Outcome, Rule};

use super::{check, gate};

fn per_user(name: &str, limit: u64) -> Rule {
    Rule::new(Limit::new(name, SlidingWindowLog::new(limit, MINUTE)).unwrap())
        .key(KeyPart::header(http::HeaderName::from_static("x-user-id")))
}

/// Returns the response headers, which must be the same in a map and as lines.
fn headers_of(outcome: &Outcome) -> HeaderMap {
    if let Some(response) = outcome.response(&HeaderMap::new()) {
        let mut message = Vec::new();
        outcome.write_http1(&HeaderMap::new(), b"", &mut message).unwrap();
        let message = String::from_utf8(message).unwrap();
        let policy = response.headers().get("ratelimit-policy").map(|value| value.to_str().unwrap());
        assert_eq!(message.lines().find_map(|line| line.strip_prefix("ratelimit-policy: ")), policy);
        return response.headers().clone();
    }
    let (mut map, mut lines) = (HeaderMap::new(), Vec::new());
    outcome.write_headers(&mut map);
    outcome.write_header_lines(&mut lines);
    let lines = String::from_utf8(lines).unwrap();
    let policy = map.get("ratelimit-policy").map(|value| value.to_str().unwrap());
    assert_eq!(lines.lines().find_map(|line| line.strip_prefix("ratelimit-policy: ")), policy);
    map
}

fn policy(outcome: &Outcome) -> String {
    headers_of(outcome)["ratelimit-policy"].to_str().unwrap().to_owned()
}

#[test]
fn all_matching_policies_are_listed_whichever_decided() {
    let (gate, clock) = gate([per_user("per-user", 2), per_user("everyone", 3).key(KeyPart::method())]);
    let both = r#""per-user";q=2;w=60, "everyone";q=3;w=60"#;
    let mut reported = Vec::new();
    for user in ["ann", "ann", "ann", "bob", "ann"] {
        let outcome = check(&gate, "GET", "/", &[("x-user-id", user)]);
        assert_eq!(policy(&outcome), both);
        reported.push(outcome.limit().unwrap().to_owned());
    }
    clock.advance(MINUTE);
    assert_eq!(policy(&check(&gate, "GET", "/", &[("x-user-id", "ann")])), both);
    assert!(reported.contains(&"per-user".to_owned()), "{reported:?}");
}

#[test]
fn only_matching_policies_are_listed() {
    let posts = Match::everything().method("POST");
    let shadow = per_user("watched", 1).mode(Mode::Shadow);
    let (gate, _) = gate([per_user("all", 9), per_user("posts", 9).matching(posts), shadow]);
    assert_eq!(policy(&check(&gate, "GET", "/", &[])), r#""all";q=9;w=60"#);
    assert_eq!(policy(&check(&gate, "POST", "/", &[])), r#""all";q=9;w=60, "posts";q=9;w=60"#);
}

#[test]
fn bans_are_not_listed_and_requests_in_flight_are() {
    let ban = Ban { after: 1, within: HOUR, for_: HOUR };
    let at_once = || Rule::in_flight("at-once", 1).unwrap();
    let (gate, _) = gate([at_once(), per_user("rate", 2).ban(ban)]);
    let listed = r#""rate";q=2;w=60, "at-once";q=1;qu="concurrent-requests""#;
    let mut first = check(&gate, "GET", "/", &[]);
    assert_eq!(policy(&first), listed);
    let place = first.take_permit();
    let full = check(&gate, "GET", "/", &[]);
    assert_eq!((full.limit(), policy(&full).as_str()), (Some("at-once"), listed));
    drop(place);
    assert_eq!(policy(&check(&gate, "GET", "/", &[])), listed);
    let banned = check(&gate, "GET", "/", &[]);
    assert_eq!((banned.is_allowed(), policy(&banned).as_str()), (false, listed));
}

#[test]
fn the_list_of_policies_is_bounded() {
    let (gate, _) = gate((0..40).map(|number| per_user(&format!("l{number}"), 9)));
    assert_eq!(policy(&check(&gate, "GET", "/", &[])).matches(";q=9").count(), 32);
}

#[test]
fn t_is_the_time_until_more_quota_becomes_available() {
    let bucket = |capacity, rate| Limit::new("l", TokenBucket::new(capacity, rate)).unwrap();
    let slow = Rate::new(1, 7 * MINUTE);
    for (limit, answers) in [
        // One unit every 420 s: the other nine return later than the next one.
        (bucket(10, slow), ["r=9;t=420", "r=8;t=420", "r=7;t=420"]),
        (bucket(100, Rate::per_second(10)), ["r=99;t=1", "r=98;t=1", "r=97;t=1"]),
        (Limit::new("l", FixedWindow::new(3, MINUTE)).unwrap(), ["r=2;t=40", "r=1;t=40", "r=0;t=40"]),
    ] {
        let (gate, _) = gate([Rule::new(limit)]);
        for answer in answers {
            assert_eq!(headers_of(&check(&gate, "GET", "/", &[]))["ratelimit"], format!("\"l\";{answer}"));
        }
    }
}

#[test]
fn retry_after_never_ends_before_t() {
    let (gate, _) = gate([Rule::new(Limit::new("l", TokenBucket::new(2, Rate::per_minute(1))).unwrap())]);
    let headers: Vec<_> = (0..3).map(|_| headers_of(&check(&gate, "GET", "/", &[]))).collect();
    assert_eq!(headers[1]["ratelimit"], r#""l";r=0;t=60"#);
    assert_eq!(
        (&headers[2]["ratelimit"], &headers[2]["retry-after"]),
        (&r#""l";r=0;t=60"#.parse().unwrap(), &"60".parse().unwrap())
    );
}
