//! The pages of `docs/migrating`: their rule files are valid without a warning, and the table lists them all.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use tollgate_config::RuleFile;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/migrating")
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
