//! Paths and globs: all spellings of a path match the same rules and have the same key.

use tollgate::{FixedWindow, InvalidLimit, Limit, MINUTE};
use tollgate_rules::internal::CleanPath;
use tollgate_rules::{
    Explanation, Facts, Gate, KeyPart, Match, PathGlob, PathReading, Rule, RuleSet, RuleSetBuilder, RuleState,
};

use crate::gates;

/// The number of globs that are read. More would find nothing new.
const MAX_GLOBS: usize = 8;

/// Reads the last line as a path, and the others as globs with one rule each.
pub fn paths(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let (globs, path) = text.rsplit_once('\n').unwrap_or(("", text));
    let path = format!("/{}", path.replace(['?', '#'], ""));
    let globs: Vec<PathGlob> = globs.lines().take(MAX_GLOBS).filter_map(read).collect();
    // Dot segments are refused where the path is not forwarded in its clean form.
    let has_dots = path.split('/').any(|segment| matches!(segment, "." | ".."));
    let is_readable = CleanPath::new(&path).is_ok_and(|path| path.forwarded(PathReading::default()).is_ok());
    if has_dots || !is_readable {
        let refused = gate(&globs).decide_now(&Facts::new("GET", &path));
        assert!(refused.is_some_and(|outcome| !outcome.is_allowed()), "{path}");
        return;
    }
    let Ok(everything) = "/**".parse::<PathGlob>() else { panic!("/** is no glob") };
    assert!(everything.matches(&path), "{path}");
    let gate = gate(&globs);
    let (key, matches) = key_and_matches(&gate, &globs, &path);
    for other in respelled(&path) {
        assert_eq!(key_and_matches(&gate, &globs, &other), (key.clone(), matches.clone()), "{path} as {other}");
    }
    // The key is the path in its normal form, so it is its own key. It may have fewer readings than the path.
    assert_eq!(key_and_matches(&gate, &globs, &key).0, key, "{path}");
}

fn read(text: &str) -> Option<PathGlob> {
    let glob: PathGlob = text.parse().ok()?;
    let again = glob.to_string().parse();
    assert_eq!(again.as_ref(), Ok(&glob), "{text} is shown as another glob");
    assert!(text.contains('*') || glob.matches(text), "{text} does not match itself");
    Some(glob)
}

/// Returns a gate with a rule for each glob and a last one for everything, all of which count by path.
fn gate(globs: &[PathGlob]) -> Gate {
    let matches = globs.iter().map(|glob| Match::everything().path(glob.to_string())).chain([Match::everything()]);
    let rules = matches.enumerate().try_fold(RuleSet::builder(), |rules, (number, matching)| {
        let limit = Limit::new(format!("limit-{number}"), FixedWindow::new(100, MINUTE))?;
        Ok::<_, InvalidLimit>(rules.rule(Rule::new(limit).matching(matching).key(KeyPart::path())))
    });
    let Ok(rules) = rules.and_then(RuleSetBuilder::build) else { panic!("ten limits are too many") };
    let Some((gate, _)) = gates::gate(rules) else { panic!("ten limits do not fit the memory") };
    gate
}

/// Matches the path with rules, which use an index, and with globs, which do not, and checks that both agree. Returns
/// the key of the path, and whether each glob matches.
fn key_and_matches(gate: &Gate, globs: &[PathGlob], path: &str) -> (String, Vec<bool>) {
    let facts = Facts::new("GET", path);
    let before = gates::explained(gate, &facts);
    // The decision uses the index: each rule that it finds has one request less left.
    assert!(gate.decide_now(&facts).is_some_and(|outcome| outcome.is_allowed()));
    let after = gates::explained(gate, &facts);
    let matches = globs.iter().enumerate().map(|(number, glob)| {
        let spent = remaining(&before, number) != remaining(&after, number);
        assert_eq!(spent, glob.matches(path), "{glob} {path}");
        assert_eq!(remaining(&before, number).is_some(), spent, "{glob} {path}");
        spent
    });
    let matches = matches.collect();
    (gates::key(gate, globs.len(), &facts).unwrap_or_default().concat(), matches)
}

fn remaining(explanation: &Explanation, number: usize) -> Option<u64> {
    match &explanation.rules[number].state {
        RuleState::Counted { decision: Some(decision), .. } => Some(decision.remaining()),
        _ => None,
    }
}

/// Returns other spellings that every server reads as the same path.
fn respelled(path: &str) -> [String; 4] {
    [
        path.replace('/', "//"),
        format!("{path}/"),
        escaped(path, |byte| format!("%{byte:02x}")),
        escaped(path, |byte| format!("%{byte:02X}")),
    ]
}

/// Escapes every character except slashes, dots, semicolons and percent signs with the two characters that follow.
fn escaped(path: &str, escape: impl Fn(u8) -> String) -> String {
    let mut written = String::new();
    let mut since_percent = 2;
    for letter in path.chars() {
        if matches!(letter, '/' | '%' | '.' | ';') || since_percent < 2 {
            written.push(letter);
        } else {
            written.extend(letter.encode_utf8(&mut [0; 4]).bytes().map(&escape));
        }
        since_percent = if letter == '%' { 0 } else { since_percent + 1 };
    }
    written
}
