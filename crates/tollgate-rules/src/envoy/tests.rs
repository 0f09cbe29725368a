//! Tests of the lookup.

use proptest::prelude::*;

use super::*;

fn limit(name: &str) -> DescriptorLimit {
    DescriptorLimit {
        rule: Some(name.into()),
        name: name.into(),
        requests_per_unit: 1,
        unit: Some(Unit::Minute),
        quota_mode: false,
        replaces: Box::default(),
        metadata: None,
    }
}

fn leaf(name: &str) -> DescriptorNode {
    DescriptorNode::new(Vec::new(), Some(limit(name)))
}

/// Entries without a value and with an unshared wildcard count each value by itself.
fn domain(entries: &[(&str, &str)]) -> Domains {
    let child = |(key, value): &(&str, &str)| {
        let counting = if value.is_empty() || value.contains('*') { Counting::EachValue } else { Counting::Together };
        Child::new(key, value, counting, leaf(&joined(key, value)))
    };
    root(entries.iter().map(child).collect())
}

fn root(children: Vec<Child>) -> Domains {
    Domains::new([("edge".into(), DescriptorNode::new(children, None))])
}

fn found(domains: &Domains, entries: &[(&str, &str)]) -> Option<(String, Vec<String>)> {
    let found = domains.find("edge", entries.iter().copied())?;
    let key = found.key.iter().map(|part| part.to_string()).collect();
    Some((found.limit.name.to_string(), key))
}

fn expect(name: &str, key: &[&str]) -> Option<(String, Vec<String>)> {
    Some((name.to_owned(), key.iter().map(ToString::to_string).collect()))
}

#[test]
fn a_value_is_found_before_a_wildcard_and_a_wildcard_before_the_key_alone() {
    let domains = domain(&[("path", ""), ("path", "/a*"), ("path", "/a/b"), ("path", "/*")]);
    assert_eq!(found(&domains, &[("path", "/a/b")]), expect("path_/a/b", &[]));
    assert_eq!(found(&domains, &[("path", "/a/c")]), expect("path_/a*", &["/a/c"]));
    assert_eq!(found(&domains, &[("path", "/b")]), expect("path_/*", &["/b"]));
    assert_eq!(found(&domains, &[("path", "b")]), expect("path", &["b"]));
    assert_eq!(found(&domains, &[("other", "b")]), None);
}

#[test]
fn the_first_wildcard_of_the_file_is_used() {
    let domains = domain(&[("a", "x*z"), ("a", "x*"), ("a", "*")]);
    assert_eq!(found(&domains, &[("a", "xyz")]), expect("a_x*z", &["xyz"]));
    assert_eq!(found(&domains, &[("a", "xy")]), expect("a_x*", &["xy"]));
    let domains = domain(&[("a", "*"), ("a", "x*z"), ("a", "x*")]);
    assert_eq!(found(&domains, &[("a", "xyz")]), expect("a_*", &["xyz"]));
}

#[test]
fn a_limit_applies_only_to_descriptors_of_its_depth() {
    let inner = DescriptorNode::new(vec![Child::new("user", "", Counting::EachValue, leaf("inner"))], None);
    let domains = root(vec![Child::new("route", "", Counting::EachValue, inner)]);
    assert_eq!(found(&domains, &[]), None);
    assert_eq!(found(&domains, &[("route", "a")]), None);
    assert_eq!(found(&domains, &[("route", "a"), ("user", "u")]), expect("inner", &["a", "u"]));
    assert_eq!(found(&domains, &[("route", "a"), ("user", "u"), ("more", "m")]), None);
}

#[test]
fn entries_are_found_by_key_and_value_joined() {
    // envoyproxy/ratelimit joins them, so that these match.
    let domains = domain(&[("a_b", "c"), ("d_e", "")]);
    assert_eq!(found(&domains, &[("a", "b_c")]), expect("a_b_c", &[]));
    assert_eq!(found(&domains, &[("d", "e")]), expect("d_e", &["d_e"]));
    assert_eq!(found(&domains, &[("d_e", "x")]), expect("d_e", &["x"]));
}

#[test]
fn a_wildcard_may_stand_in_the_key() {
    let domains = domain(&[("tenant*", "")]);
    assert_eq!(found(&domains, &[("tenant-1", "x")]), expect("tenant*", &["tenant-1_x"]));
    assert_eq!(found(&domains, &[("other", "x")]), None);
}

#[test]
fn a_limit_replaces_named_ones_within_a_request() {
    let replacing = DescriptorLimit { replaces: Box::new(["first".into()]), ..limit("second") };
    let replacing = DescriptorNode::new(Vec::new(), Some(replacing));
    let domains = root(vec![
        Child::new("a", "", Counting::EachValue, leaf("first")),
        Child::new("b", "", Counting::EachValue, replacing),
    ]);
    let [a, b] = [[("a", "1")], [("b", "1")]];
    assert!(matches!(&*domains.find_all("edge", [a]), [DescriptorMatch::Limited(_)]));
    for descriptors in [[a, b], [b, a]] {
        let found = domains.find_all("edge", descriptors);
        let replaced = found.iter().filter_map(|one| match one {
            DescriptorMatch::Replaced(limit) => Some(&*limit.name),
            _ => None,
        });
        assert_eq!(replaced.collect::<Vec<_>>(), ["first"]);
    }
    assert!(matches!(&*domains.find_all("other", [a]), [DescriptorMatch::NoLimit]));
}

#[test]
fn wildcards_match_any_number_of_characters() {
    let matches = |pattern: &str, text: &str| matches_wildcard(&pattern.split('*').collect::<Vec<_>>(), text);
    for (pattern, text) in [("*", ""), ("a*", "a"), ("a*c", "ac"), ("a*b*c", "a-b-b-c"), ("a**c", "abc"), ("a", "a")] {
        assert!(matches(pattern, text), "{pattern} {text}");
    }
    for (pattern, text) in [("a*a", "a"), ("a*c", "acd"), ("a*b*b", "ab"), ("a", "ab"), ("/api/*/x", "/api/1/y")] {
        assert!(!matches(pattern, text), "{pattern} {text}");
    }
}

proptest! {
    /// Comparing with the joined text gives the same order as comparing the parts.
    #[test]
    fn entries_are_compared_as_if_they_were_joined(text in "[a_b*]{0,6}", key in "[a_b*]{0,3}", value in "[a_b*]{0,3}") {
        prop_assert_eq!(compare_joined(&text, &key, &value), (*text).cmp(&*format!("{key}_{value}")));
    }

    /// Every entry is found by its own key and value, in whichever order entries are added.
    #[test]
    fn every_entry_is_found(keys in proptest::collection::btree_map("[a-d]{1,3}", "[a-d]{0,2}", 1..8).prop_map(|map| map.into_iter().collect::<Vec<_>>()).prop_shuffle()) {
        let entries: Vec<(&str, &str)> = keys.iter().map(|(key, value)| (&**key, &**value)).collect();
        let domains = domain(&entries);
        for (key, value) in &entries {
            prop_assert_eq!(found(&domains, &[(key, value)]).map(|(name, _)| name), Some(joined(key, value)));
        }
    }
}
