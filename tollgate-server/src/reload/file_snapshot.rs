//! Contents of the rule file at one moment, so that touching the file without a change does nothing.

use std::path::{Path, PathBuf};

use tollgate::rules::file::Parsed;

use crate::config;

/// The contents of the rule file, and of the files that it names. Equal snapshots mean equal rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileSnapshot {
    /// The text, or the reason why it cannot be read.
    text: Result<Vec<u8>, String>,
    /// The named files; `None` for one that cannot be read.
    named: Vec<(PathBuf, Option<Vec<u8>>)>,
}

impl FileSnapshot {
    pub(super) fn read(path: &Path, named: Vec<PathBuf>) -> Self {
        let unreadable = |error| format!("cannot read {}: {error}", path.display());
        let text = config::read(path).map(without_bom).map_err(unreadable);
        Self { text, named: Vec::new() }.with_named(named)
    }

    /// The snapshot of a file that was loaded: what it was made of, not what the disk has now. A change since then must
    /// be noticed.
    pub(crate) fn of_loaded(file: &Parsed) -> Self {
        Self { text: Ok(file.source().into()), named: config::loaded_files(file) }
    }

    /// Returns the same text with the contents of these files. Files that it has are not read again: they may have
    /// changed since.
    pub(super) fn with_named(self, named: Vec<PathBuf>) -> Self {
        if named.iter().eq(self.named.iter().map(|(path, _)| path)) {
            return self;
        }
        let read = |path: PathBuf| {
            let text = config::read(&path).ok().map(without_bom);
            (path, text)
        };
        Self { named: named.into_iter().map(read).collect(), ..self }
    }

    pub(super) fn text(&self) -> Result<&[u8], &str> {
        self.text.as_deref().map_err(String::as_str)
    }
}

/// Removes a byte order mark, which the parser removes too.
fn without_bom(text: Vec<u8>) -> Vec<u8> {
    match text.strip_prefix(b"\xEF\xBB\xBF") {
        Some(rest) => rest.to_vec(),
        None => text,
    }
}
