//! Tokens of the clients of a listener: `Authorization: Bearer` over HTTP, `AUTH` over the Redis protocol.
//!
//! Tokens are in a file, one per line, so that they can be rotated without a restart: add the new token, switch the
//! clients to it, remove the old one. The file is read again when it has changed.
//!
//! A token is valid while the file contains it. So an operator who empties or deletes the file locks all clients out, also
//! if that was a mistake: a token that someone has removed must not work.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};
use tokio::time::Instant;
use tollgate_rules::internal::read_up_to;
use tollgate_telemetry::notice;

/// The shortest token. Shorter ones can be guessed.
const MIN_TOKEN_BYTES: usize = 16;
const MAX_TOKEN_BYTES: usize = 1024;
/// The most tokens in a file. Each check compares all of them.
const MAX_TOKENS: usize = 64;
const MAX_FILE_BYTES: usize = 128 * 1024;
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
    contents: Contents,
    version: Option<FileVersion>,
    checked: Instant,
}

/// The contents of a file.
#[derive(Debug, Default)]
struct Contents {
    /// The digests of its tokens.
    digests: Vec<[u8; 32]>,
    /// The first problem of the file, and its fix. Tokens on other lines are valid nevertheless.
    problem: Option<(String, String)>,
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

impl Credential {
    /// Returns the start of the token's digest, which identifies it in the log.
    pub(crate) fn short_digest(&self) -> String {
        crate::reload::versions::hex(&self.digest[..4])
    }
}

impl Tokens {
    /// Reads the file.
    pub(crate) fn open(path: &Path) -> Result<Self, TokensError> {
        let version = version(path);
        let contents = Contents::read(path);
        if let Some((problem, fix)) = contents.problem {
            return Err(TokensError { problem: format!("tokens_file {}: {problem}", path.display()), fix });
        }
        let state = State { contents, version, checked: Instant::now() };
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
        let had_problem = state.contents.problem.is_some();
        state.contents = Contents::read(&self.path);
        self.generation.fetch_add(1, Ordering::AcqRel);
        let (path, valid) = (self.path.display(), state.contents.digests.len());
        match &state.contents.problem {
            Some((problem, fix)) => {
                notice::error(format_args!("tokens_file {path} has {valid} valid tokens: {problem}: {fix}"))
            }
            None if had_problem => {
                notice::log(format_args!("tokens_file {path} is correct again, with {valid} tokens"))
            }
            None => {}
        }
    }

    /// Returns the number of valid tokens.
    pub(crate) fn count(&self) -> usize {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.refresh_state(&mut state);
        state.contents.digests.len()
    }
}

impl State {
    fn contains(&self, digest: [u8; 32]) -> bool {
        self.contents.digests.iter().fold(false, |found, known| found | (*known == digest))
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

impl Contents {
    /// Reads the tokens of a file, one per line. Empty lines and lines that begin with `#` are skipped.
    fn read(path: &Path) -> Self {
        let because =
            |problem: String, fix: &str| Self { digests: Vec::new(), problem: Some((problem, fix.to_owned())) };
        let text = match text_of(path) {
            Ok(text) => text,
            Err(error) => return because(error.to_string(), "check the path and its permissions"),
        };
        if text.len() > MAX_FILE_BYTES {
            let fix = format!("use {MAX_TOKENS} tokens or fewer, one in a line");
            return because(format!("more than {MAX_FILE_BYTES} bytes are too many"), &fix);
        }
        let mut contents = Self::default();
        for (number, line) in text.split(|byte| *byte == b'\n').enumerate() {
            let token = line.trim_ascii();
            if token.is_empty() || token.starts_with(b"#") {
                continue;
            }
            if (MIN_TOKEN_BYTES..=MAX_TOKEN_BYTES).contains(&token.len()) {
                contents.digests.push(Sha256::digest(token).into());
            } else {
                contents.problem.get_or_insert_with(|| {
                    let bounds = format!("a token has {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} bytes");
                    (format!("line {}: {bounds}", number + 1), "make one with `openssl rand -hex 32`".to_owned())
                });
            }
        }
        match contents.digests.len() {
            0 if contents.problem.is_none() => {
                because("there is no token".to_owned(), "write one in a line, for example from `openssl rand -hex 32`")
            }
            count if count > MAX_TOKENS => {
                because(format!("{count} tokens are too many"), &format!("use {MAX_TOKENS} or fewer"))
            }
            _ => contents,
        }
    }
}

/// Reads a file, up to one byte more than it may have.
fn text_of(path: &Path) -> io::Result<Vec<u8>> {
    read_up_to(path, MAX_FILE_BYTES as u64 + 1)
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
    async fn tokens_that_the_file_no_longer_contains_are_invalid() {
        type Removal = (&'static str, fn(&Path));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        let removals: [Removal; 4] = [
            ("emptied", |path| write(path, "# none\n", 1)),
            ("deleted", |path| std::fs::remove_file(path).unwrap()),
            ("a folder", |path| {
                std::fs::remove_file(path).unwrap();
                std::fs::create_dir(path).unwrap();
            }),
            ("too large", |path| write(path, &format!("{OLD}\n").repeat(MAX_TOKENS + 1), 1)),
        ];
        for (removal, remove) in removals {
            _ = std::fs::remove_dir(&path);
            write(&path, OLD, 0);
            let tokens = Tokens::open(&path).unwrap();
            let mut credential = tokens.authenticate(OLD.as_bytes()).unwrap();
            remove(&path);
            tokio::time::advance(CHECK_EVERY).await;
            assert_eq!(tokens.count(), 0, "{removal}");
            assert!(!tokens.contains(OLD.as_bytes()) && !tokens.is_valid(&mut credential), "{removal}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_invalid_line_does_not_invalidate_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        write(&path, &format!("{OLD}\n{NEW}\n"), 0);
        let tokens = Tokens::open(&path).unwrap();
        write(&path, &format!("short\n{NEW}\n"), 1);
        tokio::time::advance(CHECK_EVERY).await;
        assert!(!tokens.contains(OLD.as_bytes()) && tokens.contains(NEW.as_bytes()) && !tokens.contains(b"short"));
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
            let (problem, fix) = Contents::read(&path).problem.unwrap();
            format!("{problem}: {fix}")
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
