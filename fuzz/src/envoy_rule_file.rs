//! Files of envoyproxy/ratelimit: any bytes are refused with reasons at positions in the file, or make limits that
//! descriptors find as a search of the whole file does.

use tollgate_config::RuleFile;
use tollgate_config::internal::{DescriptorConfig, DomainConfig};

use crate::gates;
use crate::refusals::{check_refusal, check_warnings};

/// The most descriptors of a file that are looked up.
const MAX_LOOKUPS: usize = 500;

/// The texts that stand for the asterisks of a value, or for a value that may be any.
const ANY: [&str; 3] = ["", "x", "a_b"];

type Descriptor = Vec<(String, String)>;

/// Parses bytes as a file of envoyproxy/ratelimit, and looks up descriptors in it.
pub fn envoy_rule_file(input: &[u8]) {
    let text = String::from_utf8_lossy(input.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(input));
    let config = match DomainConfig::parse("edge.yaml", input) {
        Ok((config, warnings)) => {
            check_warnings(&warnings, &text);
            config
        }
        Err(problems) => return check_refusal(&problems, &text),
    };
    let file = RuleFile::parse("tollgate.yaml", "limits: []\n").unwrap_or_else(|problems| panic!("{problems}"));
    let file = match file.with_domains(vec![config.clone()]) {
        Ok(file) => file,
        Err(problems) => return check_refusal(&problems, &text),
    };
    // A file can have more limits than a rule set.
    let Ok(rules) = file.compile() else { return };
    assert_eq!(rules.names().count(), file.envoy_rules().len());
    let Some((gate, _)) = gates::gate(rules.clone()) else { return };
    let mut descriptors = Vec::new();
    collect(&config.descriptors, &Vec::new(), &mut descriptors);
    for descriptor in &descriptors {
        let entries = || descriptor.iter().map(|(key, value)| (&**key, &**value));
        let found = rules.domains().find(&config.domain, entries());
        let expected = search(&config.descriptors, descriptor).and_then(|entry| entry.rate_limit.as_ref());
        assert_eq!(found.is_some(), expected.is_some(), "{descriptor:?}");
        let (Some(found), Some(expected)) = (found, expected) else { continue };
        let numbers = |unlimited: bool, name: &str, requests: u32| (unlimited, name.to_owned(), requests);
        assert_eq!(
            numbers(found.limit.rule.is_none(), &found.limit.name, found.limit.requests_per_unit),
            numbers(expected.unlimited, &expected.name, expected.requests_per_unit),
            "{descriptor:?}"
        );
        let Some(rule) = &found.limit.rule else { continue };
        let key: Vec<&[u8]> = found.key.iter().map(|part| part.as_bytes()).collect();
        assert_eq!(rules.key_parts(rule).map(<[_]>::len), Some(key.len()), "{descriptor:?}");
        assert!(gate.check_by_name(&**rule, &key, 1).is_ok(), "no rule is named {rule}");
    }
    assert!(rules.domains().find(&config.domain, std::iter::empty()).is_none());
}

/// Adds descriptors that lead to each entry, and beside it.
fn collect(entries: &[DescriptorConfig], before: &Descriptor, descriptors: &mut Vec<Descriptor>) {
    for entry in entries {
        for any in ANY {
            if descriptors.len() >= MAX_LOOKUPS {
                return;
            }
            let value = if entry.value.is_empty() { any.to_owned() } else { entry.value.replace('*', any) };
            let mut descriptor = before.clone();
            descriptor.push((entry.key.replace('*', any), value));
            descriptors.push(descriptor.clone());
            collect(&entry.descriptors, &descriptor, descriptors);
        }
    }
}

/// Finds the entry of a descriptor by its definition: key and value, wildcards in order, key.
fn search<'c>(entries: &'c [DescriptorConfig], descriptor: &[(String, String)]) -> Option<&'c DescriptorConfig> {
    let ((key, value), rest) = descriptor.split_first()?;
    let both = format!("{key}_{value}");
    let exact = entries.iter().find(|entry| name(entry) == both);
    let wildcard =
        || entries.iter().find(|entry| name(entry).contains('*') && matches(name(entry).as_bytes(), both.as_bytes()));
    let by_key = || entries.iter().find(|entry| name(entry) == *key);
    let entry = exact.or_else(wildcard).or_else(by_key)?;
    if rest.is_empty() { Some(entry) } else { search(&entry.descriptors, rest) }
}

fn name(entry: &DescriptorConfig) -> String {
    match &*entry.value {
        "" => entry.key.clone(),
        value => format!("{}_{value}", entry.key),
    }
}

/// Returns whether a text matches a pattern, by a table of all their beginnings.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let mut reached = vec![false; text.len() + 1];
    reached[0] = true;
    for letter in pattern {
        let mut next = vec![false; text.len() + 1];
        for end in 0..=text.len() {
            next[end] = match letter {
                b'*' => reached[..=end].contains(&true),
                _ => end > 0 && reached[end - 1] && text[end - 1] == *letter,
            };
        }
        reached = next;
    }
    reached[text.len()]
}
