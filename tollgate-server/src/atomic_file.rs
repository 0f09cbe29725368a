//! Files that keep state from one run of the server to the next. A new file replaces the old one atomically, so a file is
//! always complete. One that cannot be used is kept under another name.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// Replaces a file with what `write` writes, readable by its owner only. `write` returns whether there was anything to
/// write; otherwise the old file stays.
pub(crate) fn replace(path: &Path, write: impl FnOnce(&File) -> io::Result<bool>) -> io::Result<()> {
    let unfinished = with_suffix(path, ".new");
    let replaced = create(&unfinished).and_then(|file| {
        if !write(&file)? {
            return Ok(false);
        }
        file.sync_all()?;
        fs::rename(&unfinished, path)?;
        Ok(true)
    });
    if !matches!(replaced, Ok(true)) {
        // It may not exist.
        _ = fs::remove_file(&unfinished);
    }
    if replaced? { sync_folder(path) } else { Ok(()) }
}

/// Renames a file that cannot be used, so that the next one does not replace it. Returns its new path.
pub(crate) fn set_aside(path: &Path) -> io::Result<PathBuf> {
    let rejected = with_suffix(path, ".rejected");
    fs::rename(path, &rejected)?;
    Ok(rejected)
}

/// Appends `suffix` to the file name.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn create(path: &Path) -> io::Result<File> {
    // A killed process may have left one. It is removed rather than reused: by now it could be a link to another file.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// Makes the rename durable.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let write = |text: &'static str| move |mut file: &File| file.write_all(text.as_bytes()).map(|()| true);
        replace(&path, write("one")).unwrap();
        replace(&path, write("two")).unwrap();
        assert!(replace(&path, |mut file| file.write_all(b"thr").and(Err(io::ErrorKind::StorageFull.into()))).is_err());
        replace(&path, |_| Ok(false)).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(fs::read_to_string(set_aside(&path).unwrap()).unwrap(), "two");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "only state.rejected is left");
    }
}
