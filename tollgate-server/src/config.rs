//! The rule file on disk: read within a bound, and understood.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use tollgate::rules::RuleSet;
use tollgate::rules::file::internal::Address;
use tollgate::rules::file::{LoadError, Parsed, Problems, RuleFile};

use crate::gateway::Gateway;

/// A rule file may have 4 MiB, which the library says with a position; so one byte more than that has to be read.
const MAX_FILE_BYTES: u64 = (4 << 20) + 1;

/// The rule file at a path.
pub(crate) fn load(path: &Path) -> Result<Parsed, LoadError> {
    let text = read(path).map_err(|source| LoadError::Unreadable { path: path.to_owned(), source })?;
    understand(path, &text).map_err(LoadError::Refused)
}

/// What stands in a file, up to the bound.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?.take(MAX_FILE_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

/// The text of the rule file at a path, understood. Files that it names are looked for beside it.
pub(crate) fn understand(path: &Path, text: &[u8]) -> Result<Parsed, Problems> {
    let parsed = RuleFile::parse(&path.display().to_string(), text)?;
    Ok(parsed.in_folder(path.parent().unwrap_or(Path::new(""))))
}

/// The rules of a file that is to be served: everything that it names can be used, for its gateway too. That may listen
/// elsewhere than the file says.
pub(crate) fn compile(file: &Parsed, listen: Option<&Address>) -> Result<RuleSet, Problems> {
    match (file.compile(), Gateway::problems(file, listen)) {
        (Ok(rules), None) => Ok(rules),
        (Ok(_), Some(problems)) | (Err(problems), None) => Err(problems),
        (Err(one), Some(other)) => Err(one.and(other)),
    }
}

/// The file with the keys of tokens, if the rules name one.
pub(crate) fn key_file(rules: &Parsed) -> Option<PathBuf> {
    let jwt = rules.jwt.as_ref()?;
    jwt.key_file.as_ref().or(jwt.jwks_file.as_ref()).map(|name| rules.folder().join(name))
}
