//! Tokens of the clients of a listener: `Authorization: Bearer` over HTTP, `AUTH` over the Redis protocol.
//!
//! Tokens are in a file, one per line, so that they can be rotated without a restart: add the new token, switch the
//! clients to it, remove the old one. The file is read again when it has changed. If it cannot be read or has no token
//! then, the previous tokens stay valid.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};
use tokio::time::Instant;

use crate::notice;

/// The shortest token. Shorter ones can be guessed.
const MIN_TOKEN_BYTES: usize = 16;
const MAX_TOKEN_BYTES: usize = 1024;
/// The most tokens in a file. Each check compares all of them.
const MAX_TOKENS: usize = 64;
const MAX_FILE_BYTES: u64 = 128 * 1024;
/// How often the file is checked for changes while clients authenticate.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// The tokens of a listener.
#[derive(Debug)]
pub(crate) struct Tokens {
    path: PathBuf,
    state: Mutex<State>,
    /// Grows whenever the tokens change.
    generation: AtomicU64,
}

/// A token that was valid. The client of a long connection authenticates once, and its token may be removed later.
#[derive(Debug)]
pub(crate) struct Credential {
    digest: [u8; 32],
    /// The generation of tokens that it was last found in.
    generation: u64,
}

#[derive(Debug)]
struct State {
    digests: Vec<[u8; 32]>,
    version: Option<FileVersion>,
    checked: Instant,
}

/// A token file that cannot be used.
#[derive(Debug)]
pub(crate) struct TokensError {
    problem: String,
    fix: String,
}

impl TokensError {
    /// Returns the problem, which names the file.
    pub(crate) fn problem(&self) -> &str {
        &self.problem
    }

    pub(crate) fn fix(&self) -> &str {
        &self.fix
    }
}

impl fmt::Display for TokensError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.problem, self.fix)
    }
}

impl Tokens {
    /// Reads the file.
    pub(crate) fn open(path: &Path) -> Result<Self, TokensError> {
        let version = version(path);
        let digests = read(path).map_err(|(problem, fix)| {
            let problem = format!("tokens_file {}: {problem}", path.display());
            TokensError { problem, fix }
        })?;
        let state = State { digests, version, checked: Instant::now() };
        Ok(Self { path: path.to_owned(), state: Mutex::new(state), generation: AtomicU64::new(0) })
    }

    /// Returns whether the token is valid. Digests are compared, so the time that this takes reveals nothing about the
    /// tokens.
    pub(crate) fn contains(&self, token: &[u8]) -> bool {
        self.authenticate(token).is_some()
    }

    /// Returns the credential of a client that sends this token, if it is valid.
    pub(crate) fn authenticate(&self, token: &[u8]) -> Option<Credential> {
        let digest = Sha256::digest(token).into();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.refresh_state(&mut state);
        let generation = self.generation.load(Ordering::Acquire);
        state.contains(digest).then_some(Credential { digest, generation })
    }

    /// Returns whether the token of a credential is still valid. This costs a load, unless the tokens have changed.
    pub(crate) fn is_valid(&self, credential: &mut Credential) -> bool {
        if credential.generation == self.generation.load(Ordering::Acquire) {
            return true;
        }
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_valid = state.contains(credential.digest);
        if is_valid {
            credential.generation = self.generation.load(Ordering::Acquire);
        }
        is_valid
    }

    /// Reads the file again if it has changed. Connections whose clients do not authenticate again call this from time
    /// to time.
    pub(crate) fn refresh(&self) {
        self.refresh_state(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn refresh_state(&self, state: &mut State) {
        if state.checked.elapsed() < CHECK_EVERY {
            return;
        }
        state.checked = Instant::now();
        let version = version(&self.path);
        if version == state.version {
            return;
        }
        state.version = version;
        match read(&self.path) {
            Ok(digests) => {
                state.digests = digests;
                self.generation.fetch_add(1, Ordering::AcqRel);
            }
            Err((problem, fix)) => notice::warn(format_args!(
                "tokens_file {} is not used, and the tokens from before stay valid: {problem}: {fix}",
                self.path.display()
            )),
        }
    }
}

impl State {
    fn contains(&self, digest: [u8; 32]) -> bool {
        self.digests.iter().fold(false, |found, known| found | (*known == digest))
    }
}

type FileVersion = (SystemTime, (i64, i64), u64, u64);

/// What changes with a file: the times of its content and of its metadata, its inode and its size. Some tools replace a
/// file and keep the first.
fn version(path: &Path) -> Option<FileVersion> {
    let metadata = std::fs::metadata(path).ok()?;
    let changed = (metadata.ctime(), metadata.ctime_nsec());
    Some((metadata.modified().ok()?, changed, metadata.ino(), metadata.len()))
}

/// Reads the file and returns the digests of all tokens, one per line, or the problem and its fix. Empty lines and lines
/// that begin with `#` are skipped.
fn read(path: &Path) -> Result<Vec<[u8; 32]>, (String, String)> {
    let because = |problem: String, fix: &str| Err((problem, fix.to_owned()));
    let cannot_read = |error: io::Error| (error.to_string(), "check the path and its permissions".to_owned());
    let size = std::fs::metadata(path).map_err(cannot_read)?.len();
    if size > MAX_FILE_BYTES {
        let fix = format!("use {MAX_TOKENS} tokens or fewer, one in a line");
        return because(format!("{size} bytes are too many"), &fix);
    }
    let text = std::fs::read_to_string(path).map_err(cannot_read)?;
    let mut digests = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let token = line.trim();
        if token.is_empty() || token.starts_with('#') {
            continue;
        }
        if !(MIN_TOKEN_BYTES..=MAX_TOKEN_BYTES).contains(&token.len()) {
            return because(
                format!("line {}: a token has {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} bytes", number + 1),
                "make one with `openssl rand -hex 32`",
            );
        }
        digests.push(Sha256::digest(token.as_bytes()).into());
    }
    match digests.len() {
        0 => because("there is no token".to_owned(), "write one in a line, for example from `openssl rand -hex 32`"),
        count if count > MAX_TOKENS => {
            because(format!("{count} tokens are too many"), &format!("use {MAX_TOKENS} or fewer"))
        }
        _ => Ok(digests),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "0123456789abcdef-old";
    const NEW: &str = "0123456789abcdef-new";

    /// Writes the file and sets its modification time, as a later write would.
    fn write(path: &Path, text: &str, seconds: u64) {
        std::fs::write(path, text).unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + seconds);
        std::fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_are_rotated_by_writing_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        write(&path, &format!("# a comment\n\n {OLD} \r\n"), 0);
        let tokens = Tokens::open(&path).unwrap();
        assert!(tokens.contains(OLD.as_bytes()) && !tokens.contains(NEW.as_bytes()) && !tokens.contains(b""));
        write(&path, &format!("{OLD}\n{NEW}\n"), 1);
        tokio::time::advance(CHECK_EVERY).await;
        assert!(tokens.contains(OLD.as_bytes()) && tokens.contains(NEW.as_bytes()));
        write(&path, "\n", 2);
        tokio::time::advance(CHECK_EVERY).await;
        assert!(tokens.contains(OLD.as_bytes()), "a file without tokens changes nothing");
        write(&path, NEW, 3);
        tokio::time::advance(CHECK_EVERY).await;
        assert!(!tokens.contains(OLD.as_bytes()) && tokens.contains(NEW.as_bytes()));
        // As rsync and package managers do, which keep the time of another machine.
        let next = folder.path().join("next");
        write(&next, OLD, 3);
        std::fs::rename(&next, &path).unwrap();
        tokio::time::advance(CHECK_EVERY).await;
        assert!(
            tokens.contains(OLD.as_bytes()) && !tokens.contains(NEW.as_bytes()),
            "the modification time is the same"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn credential_ends_with_its_token() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        write(&path, &format!("{OLD}\n{NEW}\n"), 0);
        let tokens = Tokens::open(&path).unwrap();
        let [mut old, mut new] = [OLD, NEW].map(|token| tokens.authenticate(token.as_bytes()).unwrap());
        assert!(tokens.authenticate(b"0123456789abcdef-other").is_none());
        write(&path, NEW, 1);
        assert!(tokens.is_valid(&mut old), "the file was not read again");
        tokio::time::advance(CHECK_EVERY).await;
        tokens.refresh();
        for _ in 0..2 {
            assert!(!tokens.is_valid(&mut old) && tokens.is_valid(&mut new));
        }
        write(&path, OLD, 2);
        tokio::time::advance(CHECK_EVERY).await;
        tokens.refresh();
        assert!(tokens.is_valid(&mut old) && !tokens.is_valid(&mut new));
    }

    #[test]
    fn a_file_that_is_of_no_use_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        let problem = |text: &str| {
            write(&path, text, 0);
            let error = read(&path).unwrap_err();
            format!("{}: {}", error.0, error.1)
        };
        assert_eq!(
            problem("# none\n"),
            "there is no token: write one in a line, for example from `openssl rand -hex 32`"
        );
        assert!(problem("short").starts_with("line 1: a token has 16 to 1024 bytes"));
        assert_eq!(problem(&format!("{OLD}\n").repeat(65)), "65 tokens are too many: use 64 or fewer");
        assert!(Tokens::open(&folder.path().join("missing")).unwrap_err().fix().contains("check the path"));
    }
}
