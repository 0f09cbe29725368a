//! Methods: services answer HEAD with their handlers for GET, so a rule for GET counts both.

use tollgate::{Ban, FixedWindow, Limit, MINUTE};
use tollgate_rules::{Cost, Facts, Gate, KeyPart, Listing, Match, Missing, Mode, Rule, RuleState, StatusSet};

use super::{check, gate};

fn rule(name: &str, matching: Match) -> Rule {
    Rule::new(Limit::new(name, FixedWindow::new(1, MINUTE)).unwrap()).matching(matching)
}

fn on(path: &str, methods: &[&str]) -> Match {
    methods.iter().fold(Match::everything().path(path), |matching, method| matching.method(method))
}

fn everywhere(method: &str) -> Match {
    Match::everything().method(method)
}

/// Returns the names of the rules that count a request.
fn counted(gate: &Gate, method: &str, path: &str) -> Vec<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let explained = runtime.block_on(gate.explain(&Facts::new(method, path).host("a.example")));
    let counted = explained.rules.into_iter().filter(|rule| matches!(rule.state, RuleState::Counted { .. }));
    counted.map(|rule| rule.name).collect()
}

#[test]
fn a_rule_for_get_counts_head_too() {
    let (gate, _) = gate([rule("reads", everywhere("GET"))]);
    assert!(check(&gate, "HEAD", "/", &[]).is_allowed());
    assert!(!check(&gate, "GET", "/", &[]).is_allowed());
    assert!(!check(&gate, "HEAD", "/", &[]).is_allowed());
    assert!(check(&gate, "POST", "/", &[]).is_allowed());
}

#[test]
fn a_rule_without_get_does_not_count_head() {
    let (gate, _) = gate([rule("posts", everywhere("POST")), rule("others", on("/**", &["POST", "get"]))]);
    assert_eq!(counted(&gate, "HEAD", "/"), ["others"], "the case of a method does not count");
    assert_eq!(counted(&gate, "POST", "/"), ["posts", "others"]);
}

#[test]
fn head_is_left_to_a_rule_that_names_it_and_counts_all_of_its_requests() {
    let heads = [
        everywhere("HEAD"),
        on("/**", &["HEAD"]),
        on("/api/**", &["OPTIONS", "head"]),
        on("/api/*", &["HEAD"]).path("/api").path("/api/*/**"),
        everywhere("HEAD").host("*.example").host("b.test"),
    ];
    for (number, head) in heads.into_iter().enumerate() {
        let reads = on("/api/*", &["GET"]).host("a.example").header("x-a", "*");
        let reads = if number == 4 { reads } else { on("/api/*", &["GET"]) };
        let (gate, _) = gate([rule("reads", reads.clone()), rule("heads", head.clone())]);
        assert_eq!(counted(&gate, "HEAD", "/api/x"), ["heads"], "{reads:?} {head:?}");
    }
}

#[test]
fn head_is_counted_unless_the_rule_that_names_it_counts_every_request() {
    let all = || everywhere("HEAD");
    let listed = || Listing::none().when(|request| request.facts().query().is_some());
    let heads = [
        rule("heads", on("/health", &["HEAD"])),
        rule("heads", on("/api/v1/**", &["HEAD"])),
        rule("heads", all().host("b.example")),
        rule("heads", all().header("x-probe", "1")),
        rule("heads", all().domain("edge")),
        rule("heads", all().when(|_| false)),
        rule("heads", all()).mode(Mode::Shadow),
        rule("heads", all()).mode(Mode::Disabled),
        rule("heads", all()).key(KeyPart::header("x-user")).missing(Missing::Skip),
        rule("heads", all()).key(KeyPart::descriptor("user")),
        rule("heads", all()).exempt(listed()),
        rule("heads", all()).count(StatusSet::failures()),
        rule("heads", all()).settle_by("x-cost"),
        rule("heads", all()).cost(Cost::custom(|_| Some(0))),
        Rule::in_flight("heads", 1).unwrap().matching(all()),
        rule("heads", all()).key(KeyPart::header("x-user")),
        rule("heads", on("/**", &["GET", "HEAD"])),
    ];
    for heads in heads {
        let (gate, _) = gate([heads.clone(), rule("reads", on("/api/**", &["GET"]))]);
        assert!(counted(&gate, "HEAD", "/api/x").contains(&"reads".to_owned()), "{heads:?}");
    }
    let both = on("/**", &["GET", "HEAD"]);
    let (gate, _) = gate([rule("reads", both.clone()), rule("heads", all())]);
    assert_eq!(counted(&gate, "HEAD", "/"), ["reads", "heads"], "a rule that names HEAD keeps it");
}

/// A limit that names HEAD for its own reasons must not open a way around what another limit refuses.
#[test]
fn head_is_refused_where_get_is_refused() {
    let reads = || rule("reads", everywhere("GET"));
    let heads = || rule("heads", everywhere("HEAD"));
    let by_user = |rule: Rule| rule.key(KeyPart::header("x-user"));
    let listed = || Listing::none().when(|request| request.path() == "/secret");
    for (reads, heads, path) in [
        (by_user(reads()).missing(Missing::Deny), by_user(heads()), "/"),
        (by_user(reads()).missing(Missing::Deny), heads(), "/"),
        (reads().blocked(listed()), heads(), "/secret"),
        (by_user(reads()).blocked(listed()), by_user(heads()).blocked(Listing::none().key(&["ann"])), "/secret"),
    ] {
        for rules in [[reads.clone(), heads.clone()], [heads.clone(), reads.clone()]] {
            let (gate, _) = gate(rules);
            for method in ["GET", "HEAD"] {
                let outcome = check(&gate, method, path, &[]);
                assert!(outcome.refusal().is_some(), "{method} {reads:?} {heads:?}");
            }
        }
    }
    let denying = |rule: Rule| by_user(rule).missing(Missing::Deny);
    let (alike, _) = gate([denying(reads()), denying(heads())]);
    let of_user = [("x-user", "ann")];
    assert!(check(&alike, "GET", "/", &of_user).is_allowed() && check(&alike, "HEAD", "/", &of_user).is_allowed());
    assert!(check(&alike, "HEAD", "/", &[]).refusal().is_some());
}

#[test]
fn a_ban_counts_the_denials_of_head() {
    let banning = |rule: Rule| rule.ban(Ban { after: 2, within: MINUTE, for_: MINUTE });
    let (reads, heads) = (|| banning(rule("reads", everywhere("GET"))), || rule("heads", everywhere("HEAD")));
    let (gate_with_one, _) = gate([reads(), heads()]);
    assert_eq!(counted(&gate_with_one, "HEAD", "/"), ["reads", "heads"]);
    let (gate_with_both, _) = gate([reads(), banning(heads())]);
    assert_eq!(counted(&gate_with_both, "HEAD", "/"), ["heads"]);
}

#[test]
fn rules_on_trial_split_head_as_they_will_when_enforced() {
    let (gate, _) = gate([
        rule("reads", everywhere("GET")).mode(Mode::Shadow),
        rule("heads", everywhere("HEAD")).mode(Mode::Shadow),
    ]);
    assert_eq!(counted(&gate, "HEAD", "/"), ["heads"]);
}

#[test]
fn rules_that_responses_settle_alike_split_head() {
    let failures = |rule: Rule| rule.count(StatusSet::failures());
    let (reads, heads) = (|| rule("reads", everywhere("GET")), || rule("heads", everywhere("HEAD")));
    for (reads, heads, expected) in [
        (failures(reads()), failures(heads()), &["heads"][..]),
        (failures(reads()), heads(), &["heads"]),
        (failures(reads()).settle_by("x-cost"), failures(heads()), &["reads", "heads"]),
        (reads().count(StatusSet::successes()), failures(heads()), &["reads", "heads"]),
        (reads().cost(Cost::custom(|_| Some(0))), heads().cost(Cost::header("x-size")), &["heads"]),
    ] {
        let (gate, _) = gate([reads.clone(), heads.clone()]);
        assert_eq!(counted(&gate, "HEAD", "/"), expected, "{reads:?} {heads:?}");
    }
}

/// A client could otherwise send any number of HEAD requests, because every successful response gives its unit back.
#[test]
fn successful_head_requests_do_not_get_past_a_limit_for_get() {
    let (gate, _) = gate([
        rule("reads", everywhere("GET")),
        Rule::new(Limit::new("failed-heads", FixedWindow::new(1000, MINUTE)).unwrap())
            .matching(everywhere("HEAD"))
            .count(StatusSet::failures()),
    ]);
    assert!(check(&gate, "HEAD", "/", &[]).is_allowed());
    assert!(!check(&gate, "HEAD", "/", &[]).is_allowed());
}

#[test]
fn an_explanation_names_every_method_that_a_rule_counts() {
    let (gate, _) = gate([rule("reads", everywhere("GET"))]);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let explained = runtime.block_on(gate.explain(&Facts::new("POST", "/")));
    let RuleState::NotMatched(why) = &explained.rules[0].state else { panic!("{explained:?}") };
    assert_eq!(why, "method is not GET, HEAD");
}
