//! What the rule file was when it was looked at, so that a mere touch changes nothing.

use std::path::Path;

use crate::config;

/// The rule file, and the keys of tokens that it names. Two sights that are the same mean the same rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileSnapshot {
    /// Why it cannot be read, if it cannot.
    text: Result<Vec<u8>, String>,
    keys: Option<Vec<u8>>,
}

impl FileSnapshot {
    pub(super) fn read(path: &Path, key_file: Option<&Path>) -> Self {
        let unreadable = |error| format!("cannot read {}: {error}", path.display());
        let text = config::read(path).map(without_bom).map_err(unreadable);
        Self { text, keys: None }.with_keys(key_file)
    }

    /// The snapshot of a file that was read already.
    pub(super) fn of_text(text: &str) -> Self {
        Self { text: Ok(text.into()), keys: None }
    }

    /// The same text beside the keys of another file. One that cannot be read has none.
    pub(super) fn with_keys(self, key_file: Option<&Path>) -> Self {
        Self { keys: key_file.and_then(|path| config::read(path).ok()), ..self }
    }

    pub(super) fn text(&self) -> Result<&[u8], &str> {
        self.text.as_deref().map_err(String::as_str)
    }
}

/// A byte order mark says nothing, and is left out of what was understood.
fn without_bom(text: Vec<u8>) -> Vec<u8> {
    match text.strip_prefix(b"\xEF\xBB\xBF") {
        Some(rest) => rest.to_vec(),
        None => text,
    }
}
