//! Every header of every family.

use std::time::Duration;

use http::HeaderMap;
use sfv::{List, ListEntry, Parser};
use tollgate::{
    Algorithm, Decision, FixedWindow, HOUR, LeakyBucket, Limit, MINUTE, Rate, SlidingWindowCounter, SlidingWindowLog,
    TokenBucket,
};
use tollgate_http::{Families, HeaderFamily, Policy};

use crate::{denied_for, limited, lines, per_user};

fn written(limit: &Limit, decision: &Decision, families: &[&str]) -> Vec<String> {
    let mut headers = HeaderMap::new();
    let families = Families::from_names(families.iter().copied()).expect("names of families");
    Policy::new(limit, families).write(decision, &mut headers);
    lines(&headers)
}

#[test]
fn legacy_resets_at_a_moment() {
    let (limit, decision) = per_user(49);
    assert_eq!(
        written(&limit, &decision, &["legacy"]),
        ["x-ratelimit-limit: 100", "x-ratelimit-remaining: 50", "x-ratelimit-reset: 1640000000"]
    );
}

#[test]
fn the_documents_denial_is_told_as_they_tell_it() {
    let (limit, decision) = per_user(100);
    assert_eq!(
        written(&limit, &decision, &["legacy"]),
        ["retry-after: 60", "x-ratelimit-limit: 100", "x-ratelimit-remaining: 0", "x-ratelimit-reset: 1640000000"]
    );
}

#[test]
fn draft6_resets_in_seconds() {
    let (limit, decision) = per_user(49);
    assert_eq!(
        written(&limit, &decision, &["draft6"]),
        ["ratelimit-limit: 100", "ratelimit-policy: 100;w=60", "ratelimit-remaining: 50", "ratelimit-reset: 60"]
    );
}

#[test]
fn draft7_has_one_field_for_the_three() {
    let (limit, decision) = per_user(49);
    assert_eq!(
        written(&limit, &decision, &["draft7"]),
        ["ratelimit-policy: 100;w=60", "ratelimit: limit=100, remaining=50, reset=60"]
    );
}

#[test]
fn ietf_names_the_policy() {
    let (limit, decision) = per_user(49);
    assert_eq!(
        written(&limit, &decision, &["ietf"]),
        [r#"ratelimit-policy: "per-user";q=100;w=60"#, r#"ratelimit: "per-user";r=50;t=60"#]
    );
}

#[test]
fn by_default_there_are_the_legacy_fields_and_the_newest() {
    let (limit, decision) = per_user(49);
    let mut headers = HeaderMap::new();
    Policy::new(&limit, Families::default()).write(&decision, &mut headers);
    assert_eq!(lines(&headers), written(&limit, &decision, &["ietf", "legacy"]));
}

#[test]
fn a_field_of_several_families_has_the_newest_form() {
    let (limit, decision) = per_user(49);
    assert_eq!(
        written(&limit, &decision, &["draft6", "draft7"]),
        [
            "ratelimit-limit: 100",
            "ratelimit-policy: 100;w=60",
            "ratelimit-remaining: 50",
            "ratelimit-reset: 60",
            "ratelimit: limit=100, remaining=50, reset=60",
        ]
    );
    assert_eq!(
        written(&limit, &decision, &["legacy", "draft6", "draft7", "ietf"]),
        [
            "ratelimit-limit: 100",
            r#"ratelimit-policy: "per-user";q=100;w=60"#,
            "ratelimit-remaining: 50",
            "ratelimit-reset: 60",
            r#"ratelimit: "per-user";r=50;t=60"#,
            "x-ratelimit-limit: 100",
            "x-ratelimit-remaining: 50",
            "x-ratelimit-reset: 1640000000",
        ]
    );
}

#[test]
fn without_families_only_a_denial_says_something() {
    let (limit, decision) = per_user(49);
    assert!(written(&limit, &decision, &[]).is_empty());
    let (limit, decision) = per_user(100);
    assert_eq!(written(&limit, &decision, &[]), ["retry-after: 60"]);
}

#[test]
fn waits_round_up_to_a_second_at_least() {
    let cases = [(1_000, 1), (200_000, 1), (1_000_000, 1), (1_000_001, 2), (60_000_000, 60), (60_000_001, 61)];
    for (wait_us, seconds) in cases {
        let (limit, decision) = denied_for(Duration::from_micros(wait_us));
        let lines = written(&limit, &decision, &["draft7"]);
        assert!(lines.contains(&format!("retry-after: {seconds}")), "{wait_us} µs: {lines:?}");
        // A client that reads this field must not retry earlier than one that reads `Retry-After`.
        assert!(
            lines.contains(&format!("ratelimit: limit=1, remaining=0, reset={seconds}")),
            "{wait_us} µs: {lines:?}"
        );
    }
}

#[test]
fn a_reset_within_a_second_is_told_as_the_next() {
    let (limit, limiter) = limited("fast", TokenBucket::new(10, Rate::per_second(5)));
    let decision = limiter.check("ann");
    assert_eq!(decision.reset_after(), Duration::from_millis(200));
    let lines = written(&limit, &decision, &["legacy", "ietf"]);
    assert!(lines.contains(&"x-ratelimit-reset: 1639999941".to_owned()), "{lines:?}");
    assert!(lines.contains(&r#"ratelimit: "fast";r=9;t=1"#.to_owned()), "{lines:?}");
}

#[test]
fn a_request_that_never_fits_is_not_told_to_wait() {
    let (limit, limiter) = limited("per-user", TokenBucket::new(10, Rate::per_second(1)));
    let decision = limiter.check_n("ann", 11);
    assert!(!decision.is_allowed());
    let lines = written(&limit, &decision, &["legacy", "ietf"]);
    assert!(lines.contains(&"x-ratelimit-remaining: 10".to_owned()), "{lines:?}");
    assert!(!lines.iter().any(|line| line.starts_with("retry-after")), "{lines:?}");
}

#[test]
fn the_window_of_a_bucket_is_the_time_it_takes_to_fill() {
    let cases: [(Algorithm, u64); 9] = [
        (TokenBucket::new(100, Rate::per_second(10)).into(), 10),
        (TokenBucket::new(100, Rate::per_second(1000)).into(), 1),
        (TokenBucket::new(100, Rate::per_second(99)).into(), 2),
        (TokenBucket::new(100, Rate::per_minute(30)).interval().into(), 240),
        (LeakyBucket::new(5, Rate::new(1, Duration::from_secs(2))).into(), 10),
        (LeakyBucket::new(5, Rate::per_second(1)).queue(MINUTE).into(), 5),
        (FixedWindow::new(5, HOUR).into(), 3600),
        (SlidingWindowLog::new(5, Duration::from_millis(1500)).into(), 2),
        (SlidingWindowCounter::new(5, MINUTE).into(), 60),
    ];
    for (algorithm, window) in cases {
        let (limit, limiter) = limited("l", algorithm);
        let quota = limit.quota();
        let lines = written(&limit, &limiter.check("ann"), &["ietf"]);
        assert!(lines.contains(&format!(r#"ratelimit-policy: "l";q={quota};w={window}"#)), "{algorithm:?}: {lines:?}");
    }
}

#[test]
fn any_name_makes_a_legal_structured_field() {
    let cases = [
        ("per-user", r#""per-user""#),
        (r#"a "quoted" \ name"#, r#""a \"quoted\" \\ name""#),
        ("50% off", r#""50% off""#),
        ("café 50%", r#""caf%C3%A9 50%25""#),
        ("한도", r#""%ED%95%9C%EB%8F%84""#),
    ];
    for (name, item) in cases {
        let (limit, limiter) = limited(name, FixedWindow::default());
        let mut headers = HeaderMap::new();
        Policy::new(&limit, [HeaderFamily::Ietf].into_iter().collect()).write(&limiter.check("ann"), &mut headers);
        assert!(headers["ratelimit-policy"].to_str().unwrap().starts_with(&format!("{item};q=")), "{headers:?}");
        for (field, parameters) in [("ratelimit-policy", ["q", "w"]), ("ratelimit", ["r", "t"])] {
            let list: List = Parser::new(headers[field].as_bytes()).parse().unwrap();
            let [ListEntry::Item(only)] = &list[..] else { panic!("one item: {list:?}") };
            assert!(only.bare_item.as_string().is_some(), "{field} of {name}");
            assert!(parameters.iter().all(|key| only.params[*key].as_integer().is_some()), "{field} of {name}");
            assert_eq!(only.params.len(), 2, "{field} of {name}");
        }
    }
}
