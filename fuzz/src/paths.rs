//! Paths and globs: however a path is spelled, it meets the same rules and makes the same key.

use tollgate::rules::{Facts, KeyPart, Match, PathGlob, Rule, RuleSet};
use tollgate::{FixedWindow, Limit, MINUTE};

use crate::asking;

/// More lines than this teach nothing that fewer do not.
const MAX_GLOBS: usize = 8;

/// The last line is a path; the others are globs, one rule each.
pub fn paths(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let (globs, path) = text.rsplit_once('\n').unwrap_or(("", text));
    let path = format!("/{}", path.replace(['?', '#'], ""));
    let globs: Vec<PathGlob> = globs.lines().take(MAX_GLOBS).filter_map(read).collect();
    let Ok(everything) = "/**".parse::<PathGlob>() else { panic!("/** is no glob") };
    assert!(everything.matches(&path), "{path}");
    let key = counted_by_path(&path, &globs);
    for other in respelled(&path) {
        assert_eq!(counted_by_path(&other, &globs), key, "{path} as {other}");
    }
    // What is counted by is the path in its one spelling.
    assert_eq!(counted_by_path(&key, &globs), key, "{path}");
}

fn read(text: &str) -> Option<PathGlob> {
    let glob: PathGlob = text.parse().ok()?;
    let again = glob.to_string().parse();
    assert_eq!(again.as_ref(), Ok(&glob), "{text} is shown as another glob");
    assert!(text.contains('*') || glob.matches(text), "{text} does not match itself");
    Some(glob)
}

/// Asks rules, which have an index, and globs, which have none; both must say the same. Returns the key that the
/// path makes.
fn counted_by_path(path: &str, globs: &[PathGlob]) -> String {
    let rule = |number: usize, matching: Match| {
        let limit = Limit::new(format!("limit-{number}"), FixedWindow::new(10, MINUTE));
        limit.map(|limit| Rule::new(limit).matching(matching).key(KeyPart::path()))
    };
    let everything = rule(globs.len(), Match::everything());
    let by_glob = globs.iter().enumerate().map(|(number, glob)| rule(number, Match::everything().path(glob.clone())));
    let rules = by_glob.chain([everything]).try_fold(RuleSet::builder(), |rules, rule| rule.map(|rule| rules.rule(rule)));
    let Ok(rules) = rules.and_then(|rules| rules.build()) else { panic!("ten limits are too many") };
    let Some((gate, _)) = asking::gate(rules) else { panic!("ten limits do not fit the memory") };
    let facts = Facts::new("GET", path);
    // Decided by index: each rule that matches has one request less left.
    let before = asking::explained(&gate, &facts);
    assert!(gate.decide_now(&facts).is_some_and(|ruling| ruling.is_allowed()));
    let after = asking::explained(&gate, &facts);
    for (number, glob) in globs.iter().enumerate() {
        let spent = remaining(&before, number) != remaining(&after, number);
        assert_eq!(spent, glob.matches(path), "{glob} {path}");
        assert_eq!(remaining(&before, number).is_some(), spent, "{glob} {path}");
    }
    asking::key(&gate, globs.len(), &facts).unwrap_or_default().concat()
}

fn remaining(explanation: &tollgate::Explanation, number: usize) -> Option<u64> {
    match &explanation.rules[number].standing {
        tollgate::Standing::Counted { decision: Some(decision), .. } => Some(decision.remaining()),
        _ => None,
    }
}

/// Other spellings that every server takes for the same path.
fn respelled(path: &str) -> [String; 6] {
    [
        path.replace('/', "//"),
        path.replace('/', "/./"),
        format!("/elsewhere/..{path}"),
        format!("{path}/"),
        escaped(path, |byte| format!("%{byte:02x}")),
        escaped(path, |byte| format!("%{byte:02X}")),
    ]
}

/// The path with everything escaped but its slashes; what may belong to an escape stays.
fn escaped(path: &str, escape: impl Fn(u8) -> String) -> String {
    let mut written = String::new();
    let mut since_percent = 2;
    for letter in path.chars() {
        if letter == '/' || letter == '%' || since_percent < 2 {
            written.push(letter);
        } else {
            written.extend(letter.encode_utf8(&mut [0; 4]).bytes().map(&escape));
        }
        since_percent = if letter == '%' { 0 } else { since_percent + 1 };
    }
    written
}
