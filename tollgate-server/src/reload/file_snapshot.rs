//! Contents of the rule file at one moment, so that touching the file without a change does nothing.

use std::path::Path;

use crate::config;

/// The contents of the rule file, and of the key file for tokens that it names. Equal snapshots mean equal rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileSnapshot {
    /// The text, or the reason why it cannot be read.
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

    /// Returns the same text with the contents of this key file; `None` if that cannot be read.
    pub(super) fn with_keys(self, key_file: Option<&Path>) -> Self {
        Self { keys: key_file.and_then(|path| config::read(path).ok()), ..self }
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
