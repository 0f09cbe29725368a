//! Files of envoyproxy/ratelimit: the limits they make, and the problems that are reported.

use tollgate::{Limiter, ManualClock, Timestamp};
use tollgate_config::internal::{AlgorithmName, DomainConfig, EnvoyRule, EnvoyRules};
use tollgate_config::{Parsed, Problems, RuleFile};
use tollgate_rules::internal::envoy::{DescriptorMatch, Domains};
use tollgate_rules::{Check, Gate, Outcome};

const FILE: &str = "
domain: edge
descriptors:
  - key: database
    value: users
    rate_limit: { unit: second, requests_per_unit: 5 }
  - key: database
    rate_limit: { unit: second, requests_per_unit: 2 }
  - key: database
    value: free
  - key: message
    value: marketing
    descriptors:
      - key: to
        rate_limit: { unit: DAY, requests_per_unit: 1 }
  - key: file
    value: files/*
    share_threshold: true
    rate_limit: { unit: hour, requests_per_unit: 2 }
  - key: page
    value: pages/*
    rate_limit: { unit: hour, requests_per_unit: 1 }
  - key: banned
    rate_limit: { unit: second, requests_per_unit: 0 }
  - key: internal
    rate_limit: { unlimited: true }
  - key: trial
    shadow_mode: true
    rate_limit: { unit: year, requests_per_unit: 1 }
  - key: code
    value: 404
    rate_limit: { unit: week, requests_per_unit: 1_0 }
  - key: model
    quota_mode: yes
    metadata: { tier: gold }
    rate_limit: { unit: month, requests_per_unit: 7, name: models, replaces: [{ name: all }] }
";

fn config(name: &str, text: &str) -> DomainConfig {
    DomainConfig::parse(name, text.as_bytes()).unwrap_or_else(|problems| panic!("{problems}")).0
}

fn parsed(configs: &[DomainConfig], settings: &EnvoyRule) -> Parsed {
    let text = format!(
        "service: {{ envoy: {{ algorithm: {}, merge_domains: {} }} }}\n",
        settings.algorithm.as_str(),
        settings.merge_domains
    );
    let file = RuleFile::parse("tollgate.yaml", text).unwrap_or_else(|problems| panic!("{problems}"));
    file.with_domains(configs.to_vec()).unwrap_or_else(|problems| panic!("{problems}"))
}

fn gate(text: &str) -> Gate {
    let rules = parsed(&[config("edge.yaml", text)], &EnvoyRule::default()).compile().unwrap();
    let clock = ManualClock::at(Timestamp::from_secs(1_700_000_000));
    Gate::with_limiter(rules, Limiter::builder().clock(clock)).unwrap()
}

fn domains(gate: &Gate) -> Domains {
    gate.rules().domains().clone()
}

/// Checks one descriptor, which a rule must count.
fn check(gate: &Gate, entries: &[(&str, &str)]) -> Outcome {
    let found = domains(gate).find("edge", entries.iter().copied()).unwrap();
    let key: Vec<&[u8]> = found.key.iter().map(|part| part.as_bytes()).collect();
    match gate.check_by_name(found.limit.rule.as_deref().unwrap(), &key, 1) {
        Ok(Check::Ready(outcome)) => outcome,
        _ => panic!("the store is in memory and has the rule"),
    }
}

fn allowed(gate: &Gate, entries: &[(&str, &str)]) -> bool {
    check(gate, entries).is_allowed()
}

#[test]
fn each_rate_limit_is_a_limit_with_the_name_of_its_statistics() {
    let gate = gate(FILE);
    let names: Vec<String> = gate.rules().names().map(str::to_owned).collect();
    assert_eq!(
        names,
        [
            "edge.database_users",
            "edge.database",
            "edge.message_marketing.to",
            "edge.file_files/*",
            "edge.page_pages/*",
            "edge.banned",
            "edge.trial",
            "edge.code_404",
            "edge.model",
        ]
    );
    let numbers: Vec<(u64, u64)> =
        gate.rules().limits().iter().map(|limit| (limit.quota(), limit.window().as_secs())).collect();
    const DAY: u64 = 86_400;
    let (week, month, year) = (7 * DAY, 30 * DAY, 365 * DAY);
    let expected = [(5, 1), (2, 1), (1, DAY), (2, 3600), (1, 3600), (1, 1), (1, year), (10, week), (7, month)];
    assert_eq!(numbers, expected);
}

#[test]
fn descriptors_are_counted_by_value_unless_they_share_a_threshold() {
    let gate = gate(FILE);
    let results =
        |entries: &[(&str, &str)], times: usize| (0..times).map(|_| allowed(&gate, entries)).collect::<Vec<_>>();
    assert_eq!(results(&[("database", "a")], 3), [true, true, false]);
    assert_eq!(results(&[("database", "b")], 1), [true]);
    assert_eq!(results(&[("database", "users")], 6), [true, true, true, true, true, false]);
    assert_eq!(results(&[("message", "marketing"), ("to", "1")], 2), [true, false]);
    assert_eq!(results(&[("message", "marketing"), ("to", "2")], 1), [true]);
    assert_eq!(results(&[("file", "files/a")], 1), [true]);
    assert_eq!(results(&[("file", "files/b")], 2), [true, false]);
    assert_eq!(results(&[("page", "pages/a")], 2), [true, false]);
    assert_eq!(results(&[("page", "pages/b")], 1), [true]);
}

#[test]
fn zero_requests_per_unit_denies_and_shadow_mode_never_does() {
    let gate = gate(FILE);
    let outcome = check(&gate, &[("banned", "x")]);
    assert!(!outcome.is_allowed());
    assert_eq!(outcome.limit(), Some("edge.banned"));
    assert!((0..3).all(|_| allowed(&gate, &[("trial", "x")])));
}

#[test]
fn descriptors_without_a_limit_are_not_counted() {
    let gate = gate(FILE);
    let domains = domains(&gate);
    let find = |domain: &str, entries: &[(&'static str, &'static str)]| {
        domains.find_all(domain, [entries.iter().copied()]).remove(0)
    };
    for entries in [&[("database", "free")][..], &[("message", "marketing")], &[("message", "x"), ("to", "1")], &[]] {
        assert!(matches!(find("edge", entries), DescriptorMatch::NoLimit), "{entries:?}");
    }
    assert!(matches!(find("other", &[("database", "a")]), DescriptorMatch::NoLimit));
    assert!(matches!(find("edge", &[("internal", "a")]), DescriptorMatch::Unlimited(_)));
    let DescriptorMatch::Limited(found) = find("edge", &[("model", "m")]) else { panic!("the model has a limit") };
    assert!(found.limit.quota_mode);
    assert_eq!((&*found.limit.name, &*found.limit.replaces), ("models", &["all".into()][..]));
    assert_eq!(found.limit.metadata, Some(serde_json::json!({ "tier": "gold" })));
}

#[test]
fn requests_with_facts_do_not_meet_these_limits() {
    let gate = gate(FILE);
    let facts = tollgate_rules::Facts::new("GET", "/");
    let outcome = gate.decide_now(&facts).unwrap();
    assert!(outcome.is_allowed());
    assert_eq!(outcome.limit(), None);
}

#[test]
fn the_algorithm_is_a_setting() {
    let config = config(
        "edge.yaml",
        "domain: edge\ndescriptors: [{ key: a, rate_limit: { unit: minute, requests_per_unit: 60 } }]\n",
    );
    for (algorithm, shown) in [
        (AlgorithmName::FixedWindow, "FixedWindow"),
        (AlgorithmName::SlidingWindowCounter, "SlidingWindowCounter"),
        (AlgorithmName::SlidingWindowLog, "SlidingWindowLog"),
        (AlgorithmName::TokenBucket, "TokenBucket"),
        (AlgorithmName::LeakyBucket, "LeakyBucket"),
    ] {
        let settings = EnvoyRule { algorithm, ..EnvoyRule::default() };
        let rules = parsed(std::slice::from_ref(&config), &settings).compile().unwrap();
        let [limit] = rules.limits() else { panic!("the file has one limit") };
        assert!(format!("{:?}", limit.algorithm()).starts_with(shown));
        assert_eq!((limit.quota(), limit.window().as_secs()), (60, 60));
    }
}

#[test]
fn long_and_ambiguous_names_stay_distinct() {
    let long = "v".repeat(300);
    let limit = "rate_limit: { unit: second, requests_per_unit: 1 }";
    let text = format!(
        "domain: d\ndescriptors:\n  - {{ key: k, value: {long}, {limit} }}\n  - {{ key: k, value: {long}2, {limit} }}\n  \
         - {{ key: a.b, {limit} }}\n  - {{ key: a, descriptors: [{{ key: b, {limit} }}] }}\n"
    );
    let rules = parsed(&[config("d.yaml", &text)], &EnvoyRule::default()).compile().unwrap();
    let names: std::collections::BTreeSet<&str> = rules.names().collect();
    assert_eq!(names.len(), 4);
    assert!(names.iter().all(|name| name.len() <= 128 && name.contains('~')));
}

#[test]
fn domains_of_several_files_are_merged_only_if_the_file_says_so() {
    let limit = "rate_limit: { unit: second, requests_per_unit: 1 }";
    let file =
        |key: &str| config(&format!("{key}.yaml"), &format!("domain: d\ndescriptors: [{{ key: {key}, {limit} }}]\n"));
    let mut settings = EnvoyRule::default();
    let files = [file("a"), file("b")];
    let problems = EnvoyRules::new(&files, &settings).err().unwrap();
    insta::assert_snapshot!(problems);
    settings.merge_domains = true;
    assert_eq!(EnvoyRules::new(&files, &settings).map(|rules| rules.len()).unwrap(), 2);
    let problems = EnvoyRules::new(&[file("a"), file("a")], &settings).err().unwrap();
    insta::assert_snapshot!("merged_files_with_the_same_descriptor", problems);
}

/// Returns the problems and warnings of one file.
fn problems(text: &str) -> Problems {
    match DomainConfig::parse("edge.yaml", text.as_bytes()) {
        Err(problems) => problems,
        Ok((config, warnings)) => match EnvoyRules::new([&config], &EnvoyRule::default()) {
            Err(problems) => warnings.and(problems),
            Ok(_) => warnings,
        },
    }
}

#[test]
fn problems_are_reported_with_their_position_and_fix() {
    let texts = [
        "",
        "domain: edge\ndescriptors: [\n",
        "descriptors: []\n",
        "domain: ''\n",
        "- domain: edge\n",
        "domain: edge\ndescriptors:\n  - value: users\n",
        "domain: edge\ndescriptors:\n  - key: a\n    value: b\n  - key: a_b\n",
        "domain: edge\ndescriptors:\n  - a\n",
        "domain: edge\ndescriptors: a\n",
        "domain: edge\ndescriptors:\n  - key: a\n    ratelimit: { unit: second }\n",
        "domain: edge\n0.25: a\n",
        "domain: edge\ndescriptors:\n  - key: a\n    rate_limit: { unit: foo, requests_per_unit: 1 }\n",
        "domain: edge\ndescriptors:\n  - key: a\n    rate_limit: { requests_per_unit: 1 }\n",
        "domain: edge\ndescriptors:\n  - key: a\n    rate_limit: { unit: second }\n",
        "domain: edge\ndescriptors:\n  - key: a\n    rate_limit: { unit: second, requests_per_unit: -1 }\n",
        "domain: edge\ndescriptors:\n  - key: a\n    rate_limit: { unit: second, requests_per_unit: '5' }\n",
        "domain: edge\ndescriptors:\n  - key: a\n    rate_limit: { unit: second, unlimited: true }\n",
        "domain: edge\ndescriptors:\n  - key: a\n    shadow_mode: maybe\n",
        "domain: edge\ndescriptors:\n  - key: a\n    share_threshold: true\n",
        "domain: edge\ndescriptors:\n  - key: a\n    metadata: x\n",
        "domain: edge\ndescriptors:\n  - key: a\n    rate_limit: { unit: second, requests_per_unit: 1, name: n, replaces: [{ name: n }, { name: '' }, {}] }\n",
        "domain: edge\ndescriptors:\n  - key: a\n    rate_limit: { unit: second, requests_per_unit: 1, shadow_mode: true }\n",
        "domain: edge\ndescriptors:\n  - key: a\n    detailed_metric: true\n  - key: b\n    value_to_metric: true\n",
    ];
    let shown: Vec<String> = texts.iter().map(|text| format!("{text}=> {}\n", problems(text))).collect();
    insta::assert_snapshot!(shown.join("\n"));
}

#[test]
fn a_name_that_a_limit_of_the_rule_file_has_is_refused() {
    let config = config("edge.yaml", FILE);
    let file = RuleFile::parse("tollgate.yaml", "limits: [{ name: edge.database, limit: 1, window: 1s }]\n").unwrap();
    insta::assert_snapshot!(file.with_domains(vec![config]).unwrap().compile().unwrap_err());
}
