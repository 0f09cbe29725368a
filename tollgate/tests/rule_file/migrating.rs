//! The pages of `docs/migrating`: their rule files are valid, and their links lead somewhere.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use tollgate::rules::file::RuleFile;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/migrating")
}

/// Returns the text of every page by its file name.
fn pages() -> BTreeMap<String, String> {
    let entries = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let pages = entries.map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read_to_string(&path)));
    pages.map(|(name, text)| (name, text.unwrap())).collect()
}

/// Returns the blocks of a language. A block within a list is indented as a whole.
fn blocks<'t>(page: &'t str, language: &str) -> Vec<&'t str> {
    let fence = format!("```{language}\n");
    page.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap_or_default()).collect()
}

/// Returns the anchors of a page's headings, as GitHub makes them.
fn anchors(page: &str) -> Vec<String> {
    let headings = page.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    headings
        .map(|heading| {
            let lower = heading.to_lowercase().replace(' ', "-");
            lower.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect()
        })
        .collect()
}

#[test]
fn every_rule_file_is_valid_without_a_warning() {
    for (name, page) in pages() {
        let files = blocks(&page, "yaml");
        assert!(!files.is_empty(), "{name} shows no rule file");
        for text in files {
            let file =
                RuleFile::parse("tollgate.yaml", text).unwrap_or_else(|problems| panic!("{name}\n{text}\n{problems}"));
            let warnings = file.warnings().to_string();
            assert!(warnings.is_empty(), "{name}\n{text}\n{warnings}");
        }
    }
}

#[test]
fn every_page_is_in_the_table() {
    let pages = pages();
    for name in pages.keys().filter(|name| *name != "README.md") {
        assert!(pages["README.md"].contains(&format!("| [{name}]({name}) |")), "README.md does not list {name}");
    }
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    for (name, page) in pages() {
        let links = page.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for link in links.filter(|link| !link.starts_with("https:")) {
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { name.as_str() } else { file };
            let text = fs::read_to_string(folder().join(target));
            let text = text.unwrap_or_else(|error| panic!("{name} links to {link}: {error}"));
            let found = heading.is_empty() || anchors(&text).iter().any(|anchor| anchor == heading);
            assert!(found, "{name} links to {link}, and {target} has no such heading");
        }
    }
}
