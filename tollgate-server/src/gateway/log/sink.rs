//! The destination of the log: a file or the standard output.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tollgate::rules::file::internal::SettingError;

use crate::notice;

/// The standard output, or a file that is reopened after it was renamed.
pub(super) struct Sink {
    file: Option<LogFile>,
    /// The last logged write error.
    last_warning: LastWarning,
}

struct LogFile {
    path: PathBuf,
    file: File,
    /// The file was removed and cannot be created again, so lines would be lost.
    is_gone: bool,
    /// The last logged error of reopening.
    last_warning: LastWarning,
}

/// An error that is logged once, until it changes.
#[derive(Default)]
struct LastWarning(Option<String>);

impl Sink {
    pub(super) fn open(path: Option<PathBuf>) -> Result<Self, SettingError> {
        let opened = path.map(|path| match open(&path) {
            Ok(file) => Ok(LogFile { path, file, is_gone: false, last_warning: LastWarning::default() }),
            Err(error) => {
                let problem = format!("gateway.access_log.file {}: {error}", path.display());
                Err(SettingError::new(problem, "name a writable file in an existing folder").of("file"))
            }
        });
        Ok(Self { file: opened.transpose()?, last_warning: LastWarning::default() })
    }

    /// Opens the file again if it was renamed or removed.
    pub(super) fn reopen_if_moved(&mut self) {
        if let Some(opened) = &mut self.file {
            opened.reopen_if_moved();
        }
    }

    /// Writes lines. Returns the number of lost lines.
    pub(super) fn write(&mut self, lines: &[u8]) -> u64 {
        let lost = || memchr::memchr_iter(b'\n', lines).count() as u64;
        let written = match &mut self.file {
            _ if lines.is_empty() => return 0,
            Some(opened) if opened.is_gone => return lost(),
            Some(opened) => opened.file.write_all(lines),
            None => io::stdout().write_all(lines).and_then(|()| io::stdout().flush()),
        };
        match written {
            Ok(()) => {
                self.last_warning = LastWarning::default();
                0
            }
            Err(error) => {
                let path = self.file.as_ref().map(|opened| &*opened.path);
                self.last_warning.warn(path, "written", &error);
                lost()
            }
        }
    }
}

impl LastWarning {
    fn warn(&mut self, path: Option<&Path>, what: &str, error: &io::Error) {
        let of = path.map_or(String::new(), |path| format!(" {}", path.display()));
        let last_warning = format!("the access log{of} cannot be {what}: {error}");
        if self.0.as_ref() != Some(&last_warning) {
            notice::warn(format_args!("{last_warning}: free some disk space, or fix its permissions"));
            self.0 = Some(last_warning);
        }
    }
}

impl LogFile {
    fn reopen_if_moved(&mut self) {
        if self.is_in_place() {
            (self.is_gone, self.last_warning) = (false, LastWarning::default());
            return;
        }
        match open(&self.path) {
            Ok(file) => (self.file, self.is_gone, self.last_warning) = (file, false, LastWarning::default()),
            Err(error) => {
                self.is_gone = self.file.metadata().is_ok_and(|file| has_no_name(&file));
                self.last_warning.warn(Some(&self.path), "opened again", &error);
            }
        }
    }

    fn is_in_place(&self) -> bool {
        match (self.path.metadata(), self.file.metadata()) {
            (Ok(there), Ok(here)) => identity(&there) == identity(&here),
            _ => false,
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).open(path)
}

#[cfg(unix)]
fn identity(metadata: &Metadata) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    (metadata.dev(), metadata.ino())
}

#[cfg(unix)]
fn has_no_name(metadata: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    metadata.nlink() == 0
}

#[cfg(not(unix))]
fn has_no_name(_: &Metadata) -> bool {
    false
}

/// An open file cannot be renamed here.
#[cfg(not(unix))]
fn identity(_: &Metadata) -> (u64, u64) {
    (0, 0)
}
