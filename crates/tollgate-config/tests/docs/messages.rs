//! The messages that the documentation quotes are in the sources.
//!
//! `docs/troubleshooting.md` quotes messages in the first column of its tables, with `…` for the parts that vary.
//! `docs/messages.md` is made from the snapshots of the rule file's messages.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{pages, parts, read, root};

/// The parts of one message are at most this many bytes apart in the source.
const MOST_APART: usize = 1500;

fn add_files(folder: &Path, ending: &str, files: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            add_files(&path, ending, files);
        } else if path.to_str().is_some_and(|name| name.ends_with(ending)) {
            files.push((path.display().to_string(), fs::read_to_string(&path).expect("text")));
        }
    }
}

/// Returns a source without the line breaks and escapes in its strings.
fn normal(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, after)) = rest.split_once("\\\n") {
        text.push_str(before);
        rest = after.trim_start();
    }
    text.push_str(rest);
    text.replace("\\\"", "\"").replace("{{", "{").replace("}}", "}")
}

fn has_message(source: &str, message: &str) -> bool {
    let parts: Vec<&str> = message.split('…').map(str::trim).filter(|part| !part.is_empty()).collect();
    let Some((first, others)) = parts.split_first() else { return false };
    source.match_indices(first).any(|(at, _)| {
        let mut end = at + first.len();
        others.iter().all(|part| {
            let found = source[end..].find(part).filter(|gap| *gap < MOST_APART);
            end += found.map_or(0, |gap| gap + part.len());
            found.is_some()
        })
    })
}

#[test]
fn every_quoted_message_is_in_the_sources() {
    let mut sources = Vec::new();
    for folder in ["crates", "tollgate/src", "tollgate-server/src"] {
        add_files(&root().join(folder), ".rs", &mut sources);
    }
    add_files(&root().join("crates/tollgate-config/tests"), ".snap", &mut sources);
    let sources: Vec<String> = sources.iter().map(|(_, text)| normal(text)).collect();
    let page = read("docs/troubleshooting.md");
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    let quoted: Vec<&str> = rows.filter_map(|row| row.strip_prefix("| `")?.split("` | ").next()).collect();
    assert!(quoted.len() > 100, "{} messages", quoted.len());
    let lost: Vec<&&str> =
        quoted.iter().filter(|message| !sources.iter().any(|source| has_message(source, message))).collect();
    assert!(
        lost.is_empty(),
        "docs/troubleshooting.md quotes messages that are not in the sources: correct them:\n{lost:#?}"
    );
}

/// Returns the paths of our items in the code spans of a page, such as `RuleSets::connect`.
fn paths(page: &str) -> Vec<&str> {
    let spans = page.split('`').skip(1).step_by(2).filter(|span| span.contains("::") && !span.contains(['\n', ' ']));
    let is_path = |span: &&str| span.chars().all(|char| char.is_alphanumeric() || matches!(char, ':' | '_'));
    spans.filter(is_path).filter(|span| span.starts_with(char::is_uppercase) || span.starts_with("tollgate")).collect()
}

#[test]
fn every_name_of_the_library_exists() {
    let mut sources = Vec::new();
    add_files(&root().join("crates"), ".rs", &mut sources);
    add_files(&root().join("tollgate/src"), ".rs", &mut sources);
    let has_word = |word: &str| {
        sources.iter().any(|(_, source)| {
            let declared = ["fn", "struct", "enum", "trait", "type", "mod", "const"];
            declared.iter().any(|kind| source.contains(&format!("{kind} {word}")))
                || source.lines().any(|line| line.trim_start().starts_with(word))
        })
    };
    // Pages about other projects name their types too.
    let is_ours = |name: &str| name.starts_with("docs/") && name.matches('/').count() == 1;
    for (name, page) in pages().iter().filter(|(name, _)| is_ours(name)) {
        let prose = parts(page).1;
        for path in paths(&prose) {
            let lost = path.split("::").filter(|part| !part.starts_with("tollgate")).find(|part| !has_word(part));
            assert_eq!(lost, None, "{name} names `{path}`");
        }
    }
}

const HEAD: &str = "# Messages of the rule file

<!-- Made from the snapshots of the tests: UPDATE_DOCS=1 cargo test -p tollgate-config --all-features --test docs -->

The messages of `tollgate validate`, each below a rule file that causes it. A message consists of the file, the
line, the column, the mistake and the fix. [Troubleshooting](troubleshooting.md) has the messages of a running
server.
";

/// The heading of mistakes that are not in one section of the file.
const WHOLE_FILE: &str = "The file as a whole";

/// Returns the examples in the snapshots: a rule file, and each of its messages in a line that begins with `=> `.
fn examples() -> Vec<String> {
    let mut snapshots = Vec::new();
    add_files(&root().join("crates/tollgate-config/tests/rule_file/snapshots"), ".snap", &mut snapshots);
    let mut examples = Vec::new();
    for (_, snapshot) in &snapshots {
        let body = snapshot.splitn(3, "---\n").nth(2).unwrap_or_default();
        let mut example = String::new();
        for line in body.lines() {
            let is_next =
                !line.starts_with("=> ") && example.lines().last().is_some_and(|last| last.starts_with("=> "));
            if is_next {
                examples.push(std::mem::take(&mut example));
            }
            if !(example.is_empty() && line.is_empty()) {
                example.push_str(line);
                example.push('\n');
            }
        }
        examples.push(example);
    }
    examples.retain(|example| example.contains("=> ") && !example.contains("```"));
    // By message, so that the order does not depend on the names of snapshots.
    examples.sort_by_cached_key(|example| {
        let message = example.lines().find_map(|line| line.strip_prefix("=> ")).unwrap_or_default();
        let text = message.splitn(4, ':').nth(3).unwrap_or_default().trim_start_matches([' ', '`']).to_lowercase();
        (text, example.clone())
    });
    examples.dedup();
    examples
}

/// Returns the top-level key of the rule file that contains the first mistake of an example, such as `limits`.
fn section(example: &str) -> Option<&str> {
    let (messages, rules): (Vec<&str>, Vec<&str>) = example.lines().partition(|line| line.starts_with("=> "));
    let line: usize = messages.first()?.split(':').nth(1)?.parse().ok()?;
    let above = rules.get(..line)?.iter().rev();
    let first = above.into_iter().find(|line| line.starts_with(|char: char| char.is_ascii_alphabetic()))?;
    first.split_once(':').map(|(key, _)| key)
}

/// Returns the examples by their heading. A key that no rule file has is a mistake of the whole file.
fn examples_by_heading() -> BTreeMap<String, Vec<String>> {
    let schema: Value = serde_json::from_str(&read("docs/tollgate.schema.json")).expect("the schema is JSON");
    let mut by_heading: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for example in examples() {
        let known = section(&example).filter(|key| schema["properties"].get(key).is_some());
        let heading = known.map_or_else(|| WHOLE_FILE.to_owned(), |key| format!("`{key}`"));
        by_heading.entry(heading).or_default().push(example);
    }
    by_heading
}

#[test]
fn page_of_messages_is_up_to_date() {
    let by_heading = examples_by_heading();
    let count: usize = by_heading.values().map(Vec::len).sum();
    assert!(count > 200, "{count} examples");
    let sections = by_heading.iter().map(|(heading, examples)| {
        let blocks: String = examples.iter().map(|example| format!("\n```text\n{example}```\n")).collect();
        format!("\n## {heading}\n{blocks}")
    });
    let page = format!("{HEAD}{}", sections.collect::<String>());
    let path = root().join("docs/messages.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let checked_in = fs::read_to_string(&path).unwrap_or_default();
    assert!(checked_in == page, "docs/messages.md is stale; run this test with UPDATE_DOCS=1");
}
