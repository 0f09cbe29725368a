//! The documentation is true: its links resolve, its rule files are valid, its reference is complete, and the messages
//! that it quotes exist.

mod links;
mod messages;
mod rule_files;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders with pages, relative to the root of the repository.
const FOLDERS: [&str; 6] = ["", "docs", "docs/adr", "docs/migrating", "bench", "examples"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the text of every page by its path from the root, such as `docs/rules.md`.
fn pages() -> BTreeMap<String, String> {
    let mut pages = BTreeMap::new();
    for folder in FOLDERS {
        for entry in fs::read_dir(root().join(folder)).expect("a folder") {
            let name = entry.expect("an entry").file_name().into_string().expect("a name in UTF-8");
            if name.ends_with(".md") {
                let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
                let text = read(&path);
                pages.insert(path, text);
            }
        }
    }
    pages
}

/// A fenced block of code.
struct Block<'t> {
    /// The word behind the fence, such as `yaml`.
    language: &'t str,
    text: &'t str,
}

/// Splits a page into its blocks of code and the prose around them.
fn parts(page: &str) -> (Vec<Block<'_>>, String) {
    let (mut blocks, mut prose, mut opened) = (Vec::new(), String::new(), None);
    let mut at = 0;
    for line in page.split_inclusive('\n') {
        let end = at + line.len();
        match (line.trim_start().strip_prefix("```"), opened) {
            (Some(language), None) => opened = Some((language.trim_end(), end)),
            (Some(_), Some((language, start))) => {
                blocks.push(Block { language, text: &page[start..at] });
                opened = None;
            }
            (None, None) => prose.push_str(line),
            (None, Some(_)) => {}
        }
        at = end;
    }
    assert!(opened.is_none(), "a block of code is not closed");
    (blocks, prose)
}
