//! Where lines go.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tollgate::rules::file::Flaw;

use crate::notice;

/// The standard output, or a file that is opened again when it was renamed away.
pub(super) struct Sink {
    file: Option<Opened>,
    /// What is wrong, as far as somebody has been told.
    trouble: Option<String>,
}

struct Opened {
    path: PathBuf,
    file: File,
}

impl Sink {
    pub(super) fn open(path: Option<PathBuf>) -> Result<Self, Flaw> {
        let opened = path.map(|path| match open(&path) {
            Ok(file) => Ok(Opened { path, file }),
            Err(error) => {
                let problem = format!("gateway.access_log.file {}: {error}", path.display());
                Err(Flaw::new(problem, "name a file that may be written in a folder that is there").of("file"))
            }
        });
        Ok(Self { file: opened.transpose()?, trouble: None })
    }

    /// Opens the file again if it is no longer the one of its name.
    pub(super) fn look(&mut self) {
        let Some(opened) = &mut self.file else { return };
        if opened.is_in_place() {
            return;
        }
        match open(&opened.path) {
            Ok(file) => opened.file = file,
            Err(error) => self.tell("opened again", &error),
        }
    }

    /// Writes lines, and says how many were lost.
    pub(super) fn write(&mut self, lines: &[u8]) -> u64 {
        if lines.is_empty() {
            return 0;
        }
        let written = match &mut self.file {
            Some(opened) => opened.file.write_all(lines),
            None => io::stdout().write_all(lines).and_then(|()| io::stdout().flush()),
        };
        match written {
            Ok(()) => {
                self.trouble = None;
                0
            }
            Err(error) => {
                self.tell("written", &error);
                memchr::memchr_iter(b'\n', lines).count() as u64
            }
        }
    }

    /// Says once what is wrong, until it is something else.
    fn tell(&mut self, what: &str, error: &io::Error) {
        let trouble = format!("the access log cannot be {what}: {error}");
        if self.trouble.as_ref() != Some(&trouble) {
            notice::warn(format_args!("{trouble}; make room for it, and see that it may be written"));
            self.trouble = Some(trouble);
        }
    }
}

impl Opened {
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

/// Where an open file cannot be renamed, there is always the same one.
#[cfg(not(unix))]
fn identity(_: &Metadata) -> (u64, u64) {
    (0, 0)
}
