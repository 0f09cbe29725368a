//! Temporary directories, removed when they are dropped.

use tempfile::TempDir;

/// Returns an empty folder.
pub fn folder() -> TempDir {
    tempfile::tempdir().expect("a temporary folder can be made")
}

/// Returns a folder with these files.
pub fn folder_with(files: &[(&str, &str)]) -> TempDir {
    let folder = folder();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).expect("the folder is writable");
    }
    folder
}
