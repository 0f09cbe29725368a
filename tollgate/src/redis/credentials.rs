//! The login and the certificates of connections, which may be in files.
//!
//! Files are read again for every new connection, and twice a minute while one is open, so that they can be replaced while
//! the program runs. If a file cannot be used any more, the last content that could be used stays in use, with a warning:
//! a file may be read in the moment in which it is replaced, and a rotation that went wrong must not end the connections
//! that still work. The same holds for a file that hangs, for example on a network file system without its server.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use redis::RedisConnectionInfo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::ConnectError;

/// Maximum size of a password file. A larger file is not a password.
const MAX_PASSWORD_FILE: u64 = 64 << 10;
/// Larger than any bundle of certificates.
const MAX_PEM: u64 = 4 << 20;

/// Time to wait for files, which take microseconds on a local disk. All files of a connection together must leave most of
/// the second that an attempt to connect has.
const READ_LIMIT: Duration = Duration::from_millis(200);

/// The last value that was read from files, and why they cannot be used now.
struct Latest<T> {
    /// The files, for messages.
    files: String,
    state: Mutex<State<T>>,
    /// Held by the thread that reads the files. There is one at most: a slow read cannot replace a newer value, and a file
    /// that hangs holds one thread.
    reader: Arc<tokio::sync::Mutex<()>>,
    /// The number of reads that have begun.
    begun: AtomicU64,
}

struct State<T> {
    value: T,
    problem: Option<String>,
    progress: Progress,
}

/// The progress of the read that began last.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    Ended,
    Reading,
    /// It has taken longer than [`READ_LIMIT`]: nobody waits for it any more.
    Late,
}

impl<T> State<T> {
    /// Sets the problem. Warns when there was none.
    fn set_problem(&mut self, store: &str, problem: String) {
        if self.problem.is_none() {
            tracing::warn!(store, problem, "a file of the store cannot be used: its last content stays in use");
        }
        self.problem = Some(problem);
    }
}

impl<T: Clone + Send + 'static> Latest<T> {
    fn new(files: String, value: T) -> Self {
        let state = Mutex::new(State { value, problem: None, progress: Progress::Ended });
        Self { files, state, reader: Arc::default(), begun: AtomicU64::new(0) }
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self) -> T {
        self.state().value.clone()
    }

    fn problem(&self) -> Option<String> {
        self.state().problem.clone()
    }

    /// Returns the value after `read` has read the files again, or the last value if it fails or takes too long. The
    /// argument of `read` is the last value, and `store` is a name for the log.
    async fn refreshed(
        self: &Arc<Self>,
        store: &Arc<str>,
        read: impl FnOnce(T) -> Result<T, ConnectError> + Send + 'static,
    ) -> T {
        let is_late = self.state().progress == Progress::Late && self.reader.try_lock().is_err();
        if !is_late && timeout(READ_LIMIT, self.refresh(store, read)).await.is_err() {
            let mut state = self.state();
            if state.progress == Progress::Reading {
                state.progress = Progress::Late;
                let problem = format!("{} could not be read in time", self.files);
                state.set_problem(store, ConnectError::new(problem, "check the file system").to_string());
            }
        }
        self.get()
    }

    async fn refresh(
        self: &Arc<Self>,
        store: &Arc<str>,
        read: impl FnOnce(T) -> Result<T, ConnectError> + Send + 'static,
    ) {
        let begun = self.begun.load(Ordering::Acquire);
        let reader = self.reader.clone().lock_owned().await;
        if self.begun.load(Ordering::Acquire) != begun {
            // Another read has begun and ended during this call.
            return;
        }
        self.begun.fetch_add(1, Ordering::Release);
        self.state().progress = Progress::Reading;
        let (this, of, (ends, ended)) = (self.clone(), store.clone(), oneshot::channel::<()>());
        // Not a blocking task: a runtime that shuts down waits for those, for ever if a file hangs.
        let reading = thread::Builder::new().name("tollgate-files".to_owned()).spawn(move || {
            this.update(&of, read(this.get()));
            drop((reader, ends));
        });
        match reading {
            Ok(_) => {
                let _ = ended.await;
            }
            Err(error) => {
                let problem = format!("{} could not be read: {error}", self.files);
                self.update(store, Err(ConnectError::new(problem, "raise the limit of threads")));
            }
        }
    }

    /// Ends a read. Replaces the value, unless the files cannot be used.
    fn update(&self, store: &str, read: Result<T, ConnectError>) {
        let mut state = self.state();
        state.progress = Progress::Ended;
        match read {
            Ok(value) => (state.value, state.problem) = (value, None),
            Err(error) => state.set_problem(store, error.to_string()),
        }
    }
}

/// A password, or the file that has it.
#[derive(Clone)]
pub(super) enum Secret {
    Text(String),
    File(PathBuf),
}

/// A login and the settings of its connections.
#[derive(Clone)]
pub(super) struct Login {
    info: RedisConnectionInfo,
    password_file: Option<PasswordFile>,
}

#[derive(Clone)]
struct PasswordFile {
    path: PathBuf,
    latest: Arc<Latest<String>>,
}

impl Login {
    pub(super) fn new(info: RedisConnectionInfo, password: Option<Secret>) -> Result<Self, ConnectError> {
        // `CLIENT SETINFO` would need another permission, and Redis 7.0 does not have it.
        let info = info.set_skip_set_lib_name();
        match password {
            None => Ok(Self { info, password_file: None }),
            Some(Secret::Text(password)) => Ok(Self { info: info.set_password(password), password_file: None }),
            Some(Secret::File(path)) => {
                let latest = Latest::new(format!("the password file {}", path.display()), read_password(&path)?);
                Ok(Self { info, password_file: Some(PasswordFile { path, latest: Arc::new(latest) }) })
            }
        }
    }

    pub(super) fn database(&self) -> i64 {
        self.info.db()
    }

    /// Returns the login with the current password of its file.
    pub(super) async fn current(&self, store: &Arc<str>) -> RedisConnectionInfo {
        let Some(PasswordFile { path, latest }) = &self.password_file else { return self.info.clone() };
        let path = path.clone();
        self.info.clone().set_password(latest.refreshed(store, move |_| read_password(&path)).await)
    }

    /// Returns why the password file cannot be used. The last password that was read stays in use.
    pub(super) fn problem(&self) -> Option<String> {
        self.password_file.as_ref()?.latest.problem()
    }
}

/// Reads a password from its file. An error names the file, and never shows its content.
fn read_password(path: &Path) -> Result<String, ConnectError> {
    let wrong = |problem: String| ConnectError::new(problem, "name a file that has the password");
    let shown = path.display();
    let bytes = read_up_to(path, MAX_PASSWORD_FILE)
        .map_err(|error| wrong(format!("the password file {shown} cannot be read: {error}")))?;
    if bytes.len() as u64 > MAX_PASSWORD_FILE {
        return Err(wrong(format!("the password file {shown} is too large")));
    }
    let text = String::from_utf8(bytes).map_err(|_| wrong(format!("the password file {shown} is not text")))?;
    match text.trim_end_matches(['\r', '\n']) {
        "" => Err(wrong(format!("the password file {shown} is empty"))),
        password => Ok(password.to_owned()),
    }
}

/// Reads a file, or one byte more than `most` of a larger one.
fn read_up_to(path: &Path, most: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Certificates or a private key, in PEM, or the file that has them.
#[derive(Clone)]
pub(super) enum Pem {
    Text(Vec<u8>),
    File(PathBuf),
}

impl Pem {
    /// Returns the content of the setting `name`.
    fn read(&self, name: &str) -> Result<Vec<u8>, ConnectError> {
        let path = match self {
            Self::Text(pem) => return Ok(pem.clone()),
            Self::File(path) => path,
        };
        let fix = "check the path and its permissions";
        match read_up_to(path, MAX_PEM) {
            Ok(pem) if pem.len() as u64 > MAX_PEM => {
                Err(ConnectError::new(format!("{name}: {} is larger than 4 MiB", path.display()), fix))
            }
            Ok(pem) => Ok(pem),
            Err(error) => Err(ConnectError::new(format!("{name}: cannot read {}: {error}", path.display()), fix)),
        }
    }

    /// Returns the setting `name` with its file, for messages.
    fn shown(&self, name: &str) -> String {
        match self {
            Self::Text(_) => name.to_owned(),
            Self::File(path) => format!("{name} ({})", path.display()),
        }
    }
}

/// Checks that the file of the setting `name` can be read.
pub fn check_pem_file(name: &str, path: &Path) -> Result<(), ConnectError> {
    Pem::File(path.to_owned()).read(name).map(drop)
}

/// The certificates of TLS connections, as the settings have them.
#[derive(Clone, Default)]
pub(super) struct Certificates {
    /// The trusted authorities; the public ones if there are none.
    pub(super) ca: Option<Pem>,
    pub(super) client_cert: Option<Pem>,
    pub(super) client_key: Option<Pem>,
}

/// The content of [`Certificates`].
#[derive(Clone, PartialEq, Eq)]
struct Contents {
    ca: Option<Vec<u8>>,
    client_cert: Option<Vec<u8>>,
    client_key: Option<Vec<u8>>,
}

/// TLS with the current certificates.
pub(super) struct Tls {
    certificates: Certificates,
    latest: Arc<Latest<(Arc<Contents>, TlsConnector)>>,
}

impl Certificates {
    /// Returns the settings by name.
    pub(super) fn named(&self) -> [(&'static str, Option<&Pem>); 3] {
        let Self { ca, client_cert, client_key } = self;
        [("ca", ca.as_ref()), ("client_cert", client_cert.as_ref()), ("client_key", client_key.as_ref())]
    }

    /// Returns the settings that are files, for messages.
    fn files(&self) -> Vec<String> {
        let files = self.named().into_iter().filter_map(|(name, pem)| Some((name, pem?)));
        files.filter(|(_, pem)| matches!(pem, Pem::File(_))).map(|(name, pem)| pem.shown(name)).collect()
    }

    fn read(&self) -> Result<Contents, ConnectError> {
        let read = |(name, pem): (&'static str, Option<&Pem>)| pem.map(|pem| pem.read(name)).transpose();
        let [ca, client_cert, client_key] = self.named().map(read);
        Ok(Contents { ca: ca?, client_cert: client_cert?, client_key: client_key? })
    }
}

impl Tls {
    /// Reads the certificates.
    pub(super) fn new(certificates: Certificates) -> Result<Self, ConnectError> {
        let contents = certificates.read()?;
        let connector = contents.connector(&certificates.named().map(|(name, _)| name.to_owned()))?;
        let latest = Latest::new(certificates.files().join(" or "), (Arc::new(contents), connector));
        Ok(Self { certificates, latest: Arc::new(latest) })
    }

    /// Returns the connector for the current content of the files.
    pub(super) async fn current(&self, store: &Arc<str>) -> TlsConnector {
        if self.certificates.files().is_empty() {
            return self.latest.get().1;
        }
        let certificates = self.certificates.clone();
        let read = move |last: (Arc<Contents>, TlsConnector)| {
            let contents = certificates.read()?;
            // The same connector resumes sessions.
            if contents == *last.0 {
                return Ok(last);
            }
            // A warning does not show the settings, so it names the files.
            let shown = |(name, pem): (&str, Option<&Pem>)| pem.map_or_else(|| name.to_owned(), |pem| pem.shown(name));
            let connector = contents.connector(&certificates.named().map(shown))?;
            Ok((Arc::new(contents), connector))
        };
        self.latest.refreshed(store, read).await.1
    }

    /// Returns why a file cannot be used. The last certificates that could be used stay in use.
    pub(super) fn problem(&self) -> Option<String> {
        self.latest.problem()
    }
}

impl Contents {
    /// Returns a connector with these contents. `names` are those of the settings, for messages.
    fn connector(&self, names: &[String; 3]) -> Result<TlsConnector, ConnectError> {
        let [ca, client_cert, client_key] = names;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| ConnectError::new(format!("TLS cannot be set up: {error}"), "report it as a bug"))?
            .with_root_certificates(self.roots(ca)?);
        let config = match (&self.client_cert, &self.client_key) {
            (None, None) => config.with_no_client_auth(),
            (Some(chain), Some(key)) => {
                let chain: Vec<_> = CertificateDer::pem_slice_iter(chain).filter_map(Result::ok).collect();
                if chain.is_empty() {
                    return Err(ConnectError::new(
                        format!("{client_cert} has no certificate in it"),
                        "give it one in PEM",
                    ));
                }
                let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| {
                    let problem = format!("{client_key} has no private key in it");
                    ConnectError::new(problem, "give it one in PEM, not encrypted")
                })?;
                config.with_client_auth_cert(chain, key).map_err(|error| {
                    let problem = format!("{client_cert} and {client_key} do not match ({error})");
                    ConnectError::new(problem, "set client_key to the key of the certificate")
                })?
            }
            (Some(_), None) => return Err(ConnectError::new("client_cert has no key", "set client_key")),
            (None, Some(_)) => return Err(ConnectError::new("client_key has no certificate", "set client_cert")),
        };
        Ok(TlsConnector::from(Arc::new(config)))
    }

    fn roots(&self, ca: &str) -> Result<RootCertStore, ConnectError> {
        let mut roots = RootCertStore::empty();
        match &self.ca {
            None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
            Some(pem) => {
                let certificates = CertificateDer::pem_slice_iter(pem).filter_map(Result::ok);
                let (added, _) = roots.add_parsable_certificates(certificates);
                if added == 0 {
                    return Err(ConnectError::new(format!("{ca} has no certificate in it"), "give it one in PEM"));
                }
            }
        }
        Ok(roots)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::redis::RedisSettings;

    #[tokio::test]
    async fn a_read_that_hangs_is_the_only_one_and_does_not_replace_a_newer_value() {
        let (store, latest) = (Arc::from("default"), Arc::new(Latest::new("the file".to_owned(), 0)));
        let (release, hangs) = mpsc::channel::<()>();
        let hanging = move |_| {
            let _ = hangs.recv();
            Ok(1)
        };
        assert_eq!(latest.refreshed(&store, hanging).await, 0);
        let late = Some("the file could not be read in time: check the file system".to_owned());
        assert_eq!(latest.problem(), late);
        assert_eq!((latest.refreshed(&store, |_| Ok(2)).await, latest.problem()), (0, late), "no other read begins");
        drop(release);
        // Waits for the thread.
        drop(latest.reader.lock().await);
        assert_eq!((latest.get(), latest.problem()), (1, None));
        assert_eq!(latest.refreshed(&store, |last| Ok(last + 2)).await, 3);
        let damaged = latest.refreshed(&store, |_| Err(ConnectError::new("it is damaged", "repair it"))).await;
        assert_eq!((damaged, latest.problem().as_deref()), (3, Some("it is damaged: repair it")));
    }

    #[tokio::test]
    async fn a_password_file_is_read_anew_for_every_connection() {
        let (store, folder) = (Arc::from("default"), tempfile::tempdir().unwrap());
        let path = folder.path().join("password");
        std::fs::write(&path, "first\r\n").unwrap();
        let login = RedisSettings::new("redis://h").username("ann").password_file(&path).resolved().unwrap().login;
        assert_eq!(login.current(&store).await.password(), Some("first"));
        std::fs::write(&path, "second").unwrap();
        assert_eq!(login.current(&store).await.password(), Some("second"));
        assert_eq!(login.problem(), None);
        for damage in [|path| std::fs::write(path, "\n"), |path| std::fs::remove_file(path)]
            as [fn(&std::path::PathBuf) -> std::io::Result<()>; 2]
        {
            damage(&path).unwrap();
            assert_eq!(login.current(&store).await.password(), Some("second"));
            let problem = login.problem().unwrap();
            assert!(problem.contains("is empty") || problem.contains("cannot be read"), "{problem}");
        }
        std::fs::write(&path, "third").unwrap();
        assert_eq!((login.current(&store).await.password(), login.problem()), (Some("third"), None));
    }
}
