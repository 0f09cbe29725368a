//! Reads the files that a configuration names.
//!
//! Opening a pipe waits for its writer, and reading a device may never end, so only regular files are opened. Every reader
//! names a bound, so that a wrong name cannot take all memory.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

/// Opens a regular file. Never waits for another process.
///
/// # Errors
///
/// Fails if the file cannot be opened, or is a pipe, a socket or a device.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    // Without it, opening a pipe waits for its writer. It changes nothing for regular files.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
    // A socket cannot be opened at all, and the system's reason for that does not help.
    let is_special = |found: &std::fs::Metadata| !found.is_file() && !found.is_dir();
    let file = options.open(path).map_err(|error| match std::fs::metadata(path) {
        Ok(found) if is_special(&found) => not_regular(),
        _ => error,
    })?;
    if is_special(&file.metadata()?) { Err(not_regular()) } else { Ok(file) }
}

fn not_regular() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "it is a pipe, a socket or a device, not a regular file")
}

/// Reads a regular file, up to this many bytes.
///
/// # Errors
///
/// Fails as [`open_regular`] does, or if the file cannot be read.
pub fn read_up_to(path: &Path, bytes: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    open_regular(path)?.take(bytes).read_to_end(&mut content)?;
    Ok(content)
}

/// Reads a regular file that has at most this many bytes.
///
/// # Errors
///
/// Fails as [`read_up_to`] does, or if the file is larger.
pub fn read_bounded(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let content = read_up_to(path, most.saturating_add(1))?;
    if content.len() as u64 > most {
        let problem = format!("it is larger than {most} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    Ok(content)
}

#[cfg(all(test, unix))]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A folder that is removed at the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("tollgate-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).expect("the directory can be created");
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn special_files_are_refused_without_waiting() {
        let folder = Folder::new("special");
        let (pipe, socket) = (folder.0.join("pipe"), folder.0.join("socket"));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for path in [&pipe, &socket, Path::new("/dev/zero")] {
            for outcome in
                [open_regular(path).map(drop), read_up_to(path, 1).map(drop), read_bounded(path, 1).map(drop)]
            {
                let problem = outcome.unwrap_err().to_string();
                assert_eq!(problem, "it is a pipe, a socket or a device, not a regular file", "{}", path.display());
            }
        }
    }

    #[test]
    fn files_are_read_up_to_their_bound() {
        let folder = Folder::new("bounds");
        let path = folder.0.join("file");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_up_to(&path, 4).unwrap(), b"1234");
        assert_eq!(read_bounded(&path, 5).unwrap(), b"12345");
        assert_eq!(read_bounded(&path, 4).unwrap_err().to_string(), "it is larger than 4 bytes");
        assert_eq!(read_bounded(&folder.0, 4).unwrap_err().kind(), io::ErrorKind::IsADirectory);
        assert_eq!(read_bounded(&folder.0.join("absent"), 4).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
