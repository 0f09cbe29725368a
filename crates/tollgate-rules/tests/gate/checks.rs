//! Rules made in code pass the checks of the rule file: a rule that would limit nothing, or refuse everything, is an
//! error.

use std::time::Duration;

use tollgate::{FixedWindow, LeakyBucket, Limit, MINUTE, Rate};
use tollgate_rules::{Cost, KeyPart, Listing, Match, Missing, Networks, Routes, Rule, RuleSet, StatusSet};

fn fixed(quota: u64) -> Rule {
    Rule::new(Limit::new("limit", FixedWindow::new(quota, MINUTE)).unwrap())
}

fn per_user(quota: u64) -> Rule {
    fixed(quota).key(KeyPart::header("x-user"))
}

fn queue() -> Rule {
    let bucket = LeakyBucket::new(10, Rate::per_second(1)).queue(Duration::from_secs(10));
    Rule::new(Limit::new("limit", bucket).unwrap())
}

fn on(path: &str) -> Rule {
    fixed(5).matching(Match::everything().path(path))
}

/// Returns the error of a rule.
fn error(rule: Rule) -> String {
    match RuleSet::builder().rule(rule).build() {
        Ok(rules) => panic!("{rules:?} is built"),
        Err(error) => {
            assert_eq!(error.limit(), Some("limit"), "{error}");
            error.to_string()
        }
    }
}

fn assert_error(rule: Rule, field: &str, problem: &str, fix: &str) {
    let found = RuleSet::builder().rule(rule.clone()).build().map(|rules| format!("{rules:?}"));
    assert_eq!(found.as_ref().map_err(tollgate::InvalidLimit::field), Err(field));
    let error = error(rule);
    assert!(error.contains(problem) && error.contains(fix), "{error}");
}

#[test]
fn parameters_of_a_router_are_refused_with_the_glob() {
    for (path, glob) in [
        ("/u/:id", "write /u/*,"),
        ("/u/{id}", "write /u/*,"),
        ("/u/<id>/x", "write /u/*/x,"),
        ("/u/{id}/posts/{post}", "write /u/*/posts/*,"),
        ("/files/{*rest}", "write /files/**,"),
        ("/files/{tail:.*}", "write /files/**,"),
        ("/u/{id:[0-9]+}", "write /u/*,"),
    ] {
        assert_error(on(path), "path", "has a router parameter, but paths are globs", glob);
        let error = Routes::new([Match::everything().path(path)]).unwrap_err();
        assert!(error.to_string().contains(glob), "{error}");
    }
}

#[test]
fn paths_that_no_request_has_are_refused() {
    assert_error(on("^/api/.*$"), "path", "looks like a regular expression, but paths are globs", "write /api/**");
    assert_error(on("/a b"), "path", "paths have no spaces", "write %20");
    assert_error(on("/a/./b"), "path", "are resolved first", "write the resolved path");
    assert_error(on("/a/{b"), "path", "has braces", "write * for one segment");
    assert_error(on("a"), "path", "every path starts with `/`", "write /a");
}

#[test]
fn methods_and_headers_that_no_request_has_are_refused() {
    let by_method = |method: &str| fixed(5).matching(Match::everything().method(method));
    assert_error(by_method("*"), "methods", "is not valid", "leave out the methods");
    assert_error(by_method("a b"), "methods", "is not valid", "write a method such as GET or POST");
    let by_header = |value: &str| fixed(5).matching(Match::everything().header("x-tier", value));
    assert_error(by_header(" gold"), "headers", "no request matches", "write the value without them");
    assert_error(by_header("a\nb"), "headers", "no request matches", "write the value without them");
    let by_host = |host: &str| fixed(5).matching(Match::everything().host(host));
    assert_error(by_host("http://api.example.com/x"), "host", "is a URL", "write the host alone");
}

#[test]
fn a_plan_that_no_request_has_is_refused() {
    let gold = fixed(5).plan_limit("gold", FixedWindow::new(50, MINUTE));
    assert_error(gold.clone(), "overrides", "never applies, because the limit has no `plan`", "add");
    assert!(RuleSet::builder().rule(gold.plan(KeyPart::header("x-plan"))).build().is_ok());
    let in_flight = Rule::in_flight("limit", 5).unwrap().plan_in_flight("gold", 50);
    assert_error(in_flight, "overrides", "never applies, because the limit has no `plan`", "add");
}

#[test]
fn keys_that_no_request_has_are_refused() {
    let other = || FixedWindow::new(50, MINUTE);
    let no_key = "the key has 1 part, but `limit` has no key";
    assert_error(fixed(5).key_limit(&["ann"], other()), "overrides", no_key, "leave it out");
    assert_error(fixed(5).exempt(Listing::none().key(&["ann"])), "exempt", no_key, "leave it out");
    assert_error(fixed(5).blocked(Listing::none().key(&["ann"])), "blocked", no_key, "leave it out");
    let two = "the key has 2 parts, but that of `limit` has 1 part";
    assert_error(per_user(5).key_limit(&["ann", "x"], other()), "overrides", two, "give header:x-user");
    assert_error(per_user(5).blocked(Listing::none().key(&["ann", "x"])), "blocked", two, "give header:x-user");
    let in_flight = Rule::in_flight("limit", 5).unwrap().key(KeyPart::ip()).key_in_flight(&["a", "b"], 5);
    assert_error(in_flight, "overrides", two, "give ip");
    let twice = per_user(5).key_limit(&["ann"], other()).key_limit(&["ann"], FixedWindow::new(60, MINUTE));
    assert_error(twice, "overrides", "two overrides are for the key `ann`", "remove one of them");
    let plan = || FixedWindow::new(60, MINUTE);
    let twice = per_user(5).plan(KeyPart::header("x-plan")).plan_limit("gold", plan()).plan_limit("gold", plan());
    assert_error(twice, "overrides", "two overrides are for the plan `gold`", "remove one of them");
    let both = per_user(5).exempt(Listing::none().key(&["ann"])).blocked(Listing::none().key(&["ann"]));
    assert_error(both, "blocked", "is blocked and exempt", "remove it from one of the lists");
}

#[test]
fn a_limit_that_no_request_reaches_is_refused() {
    let everybody = || Networks::parse(["0.0.0.0/0", "::/0"]).unwrap();
    let exempt = fixed(5).exempt(Listing::none().networks(everybody()));
    assert_error(exempt, "exempt", "every address is exempt", "exempt fewer");
    assert_error(fixed(5).count(StatusSet::none()), "count", "counts no response", "name a status");
}

#[test]
fn costs_that_never_pass_or_never_count_are_refused() {
    let dear = fixed(1).cost(Cost::constant(5));
    assert_error(dear, "cost", "cost 5 is above the limit of 1, so no request ever passes", "lower the cost");
    assert_error(fixed(1).cost(Cost::constant(0)), "cost", "cost 0 counts nothing", "use 1 or more");
    let small = per_user(10).cost(Cost::constant(5)).key_limit(&["ann"], FixedWindow::new(4, MINUTE));
    assert_error(small, "overrides", "limit 4 is below the cost of 5, so no request ever passes", "raise limit to 5");
    assert!(RuleSet::builder().rule(fixed(5).cost(Cost::constant(5))).build().is_ok());
}

#[test]
fn settings_without_effect_are_refused() {
    let no_effect = "has no effect with `overflow: queue`, which gives nothing back";
    assert_error(queue().count(StatusSet::failures()), "count", no_effect, "remove it");
    assert_error(queue().settle_by("x-cost"), "settle", no_effect, "remove it");
    assert_error(fixed(5).missing(Missing::Deny), "missing", "`missing` has no effect without a key", "add a `key`");
    let twice = per_user(5).key(KeyPart::header("X-User"));
    assert_error(twice, "key", "duplicate key part `header:x-user`", "remove one of them");
    let twice = fixed(5).matching(Match::everything().header("x-tier", "gold").header("X-Tier", "silver"));
    assert_error(twice, "headers", "duplicate header `x-tier`", "remove one of them");
    for part in [KeyPart::path(), KeyPart::ip(), KeyPart::cookie("plan"), KeyPart::constant("gold")] {
        let problem = format!("`{part}` is not a source of a plan");
        assert_error(per_user(5).plan(part), "plan", &problem, "use a header, a claim, a descriptor");
    }
}

#[test]
fn names_in_key_parts_are_checked() {
    assert_error(fixed(5).key(KeyPart::cookie("")), "key", "`cookie:` has no name after it", "write cookie:NAME");
    assert_error(fixed(5).key(KeyPart::query("a\nb")), "key", "contains a control character", "printable");
    assert_error(fixed(5).key(KeyPart::descriptor(&"a".repeat(257))), "key", "has 257 bytes", "256 bytes or less");
    assert_error(
        fixed(5).key(KeyPart::jwt("sub")),
        "key",
        "tokens cannot be verified by rules in code",
        "use `KeyPart::custom`",
    );
}
