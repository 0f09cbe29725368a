//! Responses of an upstream that limits requests too.

use http::{HeaderMap, HeaderName, HeaderValue};
use tollgate_http::{Families, Policy};

use crate::{lines, per_user};

/// Returns the headers of an upstream's response after merging a decision with 50 of 100 left and a reset in 60
/// seconds.
fn merged(families: &[&str], upstream: &[(&'static str, &'static str)]) -> Vec<String> {
    let mut headers = HeaderMap::new();
    for (name, value) in upstream {
        headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    let (limit, decision) = per_user(49);
    let families = Families::from_names(families.iter().copied()).expect("names of families");
    Policy::new(&limit, families).merge(&decision, &mut headers);
    lines(&headers)
}

const OURS_LEGACY: [&str; 3] = ["x-ratelimit-limit: 100", "x-ratelimit-remaining: 50", "x-ratelimit-reset: 1640000000"];
const OURS_IETF: [&str; 2] = [r#"ratelimit-policy: "per-user";q=100;w=60"#, r#"ratelimit: "per-user";r=50;t=60"#];

#[test]
fn a_response_without_such_headers_gets_ours() {
    assert_eq!(merged(&["legacy"], &[]), OURS_LEGACY);
    assert_eq!(merged(&["ietf"], &[]), OURS_IETF);
}

#[test]
fn a_stricter_upstream_keeps_its_headers_together() {
    let stricter =
        [("x-ratelimit-limit", "1000"), ("x-ratelimit-remaining", "49"), ("x-ratelimit-reset", "1640000300")];
    assert_eq!(
        merged(&["legacy"], &stricter),
        ["x-ratelimit-limit: 1000", "x-ratelimit-remaining: 49", "x-ratelimit-reset: 1640000300"]
    );
    let stricter = [("ratelimit", r#""theirs";r=3;t=9"#), ("ratelimit-policy", r#""theirs";q=5;w=9"#)];
    assert_eq!(
        merged(&["ietf"], &stricter),
        [r#"ratelimit-policy: "theirs";q=5;w=9"#, r#"ratelimit: "theirs";r=3;t=9"#]
    );
}

#[test]
fn a_looser_upstream_is_written_over() {
    let looser = [("x-ratelimit-limit", "1000"), ("x-ratelimit-remaining", "51"), ("x-ratelimit-reset", "1640009999")];
    assert_eq!(merged(&["legacy"], &looser), OURS_LEGACY);
    let looser = [("ratelimit", r#""theirs";r=51;t=900"#), ("ratelimit-policy", r#""theirs";q=99;w=9"#)];
    assert_eq!(merged(&["ietf"], &looser), OURS_IETF);
}

#[test]
fn another_form_of_a_looser_upstream_is_not_left_beside_ours() {
    let draft6 = [("ratelimit-limit", "900"), ("ratelimit-remaining", "800"), ("ratelimit-reset", "9")];
    assert_eq!(merged(&["ietf"], &draft6), OURS_IETF);
    assert_eq!(merged(&["ietf"], &[("ratelimit", "limit=900, remaining=800, reset=9")]), OURS_IETF);
}

#[test]
fn another_form_of_a_stricter_upstream_stands_alone() {
    let draft6 = [("ratelimit-limit", "900"), ("ratelimit-remaining", "8"), ("ratelimit-reset", "9")];
    assert_eq!(merged(&["ietf"], &draft6), ["ratelimit-limit: 900", "ratelimit-remaining: 8", "ratelimit-reset: 9"]);
}

#[test]
fn with_as_much_left_the_later_reset_is_the_stricter() {
    assert_eq!(merged(&["ietf"], &[("ratelimit", r#""theirs";r=50;t=61"#)]), [r#"ratelimit: "theirs";r=50;t=61"#]);
    assert_eq!(merged(&["ietf"], &[("ratelimit", r#""theirs";r=50;t=60"#)]), OURS_IETF);
}

#[test]
fn headers_that_make_no_sense_are_written_over() {
    assert_eq!(merged(&["legacy"], &[("x-ratelimit-remaining", "none"), ("x-ratelimit-limit", "x")]), OURS_LEGACY);
    assert_eq!(merged(&["ietf"], &[("ratelimit", "a=;;"), ("ratelimit-policy", "\"")]), OURS_IETF);
}

#[test]
fn headers_of_families_that_were_not_chosen_are_left_alone() {
    let theirs = [("ratelimit", r#""theirs";r=900"#)];
    assert_eq!(merged(&[], &theirs), [r#"ratelimit: "theirs";r=900"#]);
    let mut expected = vec![r#"ratelimit: "theirs";r=900"#];
    expected.extend(OURS_LEGACY);
    assert_eq!(merged(&["legacy"], &theirs), expected);
}

#[test]
fn the_upstreams_own_refusal_keeps_its_retry_after() {
    assert!(merged(&["legacy"], &[("retry-after", "7")]).contains(&"retry-after: 7".to_owned()));
}
