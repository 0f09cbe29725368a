//! The login and the certificates of connections, which may be in files.
//!
//! Files are read again for every new connection, and twice a minute while one is open, so that they can be replaced while
//! the program runs. If a file cannot be used any more, the last content that could be used stays in use, with a warning:
//! a file may be read in the moment in which it is replaced, and a rotation that went wrong must not end the connections
//! that still work.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use redis::{RedisConnectionInfo, RedisError};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tokio_rustls::TlsConnector;

use super::ConnectError;

/// Maximum size of a password file. A larger file is not a password.
const MAX_PASSWORD_FILE: u64 = 64 << 10;
/// Larger than any bundle of certificates.
const MAX_PEM: u64 = 4 << 20;

/// The last value that was read from files, and why they cannot be used now.
struct Latest<T> {
    value: Mutex<T>,
    problem: Mutex<Option<String>>,
}

impl<T: Clone> Latest<T> {
    fn new(value: T) -> Self {
        Self { value: Mutex::new(value), problem: Mutex::new(None) }
    }

    fn get(&self) -> T {
        self.value.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the value, unless the files cannot be used. Warns when that begins.
    fn update(&self, read: Result<T, ConnectError>) {
        let problem = match read {
            Ok(value) => {
                *self.value.lock().unwrap_or_else(PoisonError::into_inner) = value;
                None
            }
            Err(error) => Some(error.to_string()),
        };
        let mut known = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(problem) = &problem
            && known.is_none()
        {
            tracing::warn!(problem, "a file of the store cannot be used: its last content stays in use");
        }
        *known = problem;
    }

    fn problem(&self) -> Option<String> {
        self.problem.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
    password_file: Option<Arc<PasswordFile>>,
}

struct PasswordFile {
    path: PathBuf,
    latest: Latest<String>,
}

impl Login {
    pub(super) fn new(info: RedisConnectionInfo, password: Option<Secret>) -> Result<Self, ConnectError> {
        // `CLIENT SETINFO` would need another permission, and Redis 7.0 does not have it.
        let info = info.set_skip_set_lib_name();
        match password {
            None => Ok(Self { info, password_file: None }),
            Some(Secret::Text(password)) => Ok(Self { info: info.set_password(password), password_file: None }),
            Some(Secret::File(path)) => {
                let latest = Latest::new(read_password(&path)?);
                Ok(Self { info, password_file: Some(Arc::new(PasswordFile { path, latest })) })
            }
        }
    }

    pub(super) fn database(&self) -> i64 {
        self.info.db()
    }

    /// Returns the login with the current password of its file.
    pub(super) async fn current(&self) -> Result<RedisConnectionInfo, RedisError> {
        let Some(file) = self.password_file.clone() else { return Ok(self.info.clone()) };
        let read = tokio::task::spawn_blocking(move || {
            file.latest.update(read_password(&file.path));
            file.latest.get()
        });
        Ok(self.info.clone().set_password(read.await.map_err(std::io::Error::other)?))
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

    fn is_file(&self) -> bool {
        matches!(self, Self::File(_))
    }
}

/// Checks that the file of the setting `name` can be read.
#[cfg(feature = "file")]
pub(crate) fn check_pem_file(name: &str, path: &Path) -> Result<(), ConnectError> {
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
    latest: Latest<(Arc<Contents>, TlsConnector)>,
}

impl Certificates {
    /// Returns the settings by name.
    pub(super) fn named(&self) -> [(&'static str, Option<&Pem>); 3] {
        let Self { ca, client_cert, client_key } = self;
        [("ca", ca.as_ref()), ("client_cert", client_cert.as_ref()), ("client_key", client_key.as_ref())]
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
        let connector = contents.connector()?;
        Ok(Self { certificates, latest: Latest::new((Arc::new(contents), connector)) })
    }

    /// Returns the connector for the current content of the files.
    pub(super) async fn current(self: &Arc<Self>) -> TlsConnector {
        if self.certificates.named().iter().any(|(_, pem)| pem.is_some_and(Pem::is_file)) {
            let this = self.clone();
            // A runtime that shuts down does not read them.
            let _ = tokio::task::spawn_blocking(move || this.latest.update(this.read())).await;
        }
        self.latest.get().1
    }

    fn read(&self) -> Result<(Arc<Contents>, TlsConnector), ConnectError> {
        let (contents, latest) = (self.certificates.read()?, self.latest.get());
        // The same connector resumes sessions.
        if contents == *latest.0 {
            return Ok(latest);
        }
        let connector = contents.connector()?;
        Ok((Arc::new(contents), connector))
    }

    /// Returns why a file cannot be used. The last certificates that could be used stay in use.
    pub(super) fn problem(&self) -> Option<String> {
        self.latest.problem()
    }
}

impl Contents {
    fn connector(&self) -> Result<TlsConnector, ConnectError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| ConnectError::new(format!("TLS cannot be set up: {error}"), "report it as a bug"))?
            .with_root_certificates(self.roots()?);
        let config = match (&self.client_cert, &self.client_key) {
            (None, None) => config.with_no_client_auth(),
            (Some(chain), Some(key)) => {
                let chain: Vec<_> = CertificateDer::pem_slice_iter(chain).filter_map(Result::ok).collect();
                if chain.is_empty() {
                    return Err(ConnectError::new("client_cert has no certificate in it", "give it one in PEM"));
                }
                let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| {
                    ConnectError::new("client_key has no private key in it", "give it one in PEM, not encrypted")
                })?;
                config.with_client_auth_cert(chain, key).map_err(|error| {
                    let problem = format!("client_cert and client_key do not match ({error})");
                    ConnectError::new(problem, "set client_key to the key of the certificate")
                })?
            }
            (Some(_), None) => return Err(ConnectError::new("client_cert has no key", "set client_key")),
            (None, Some(_)) => return Err(ConnectError::new("client_key has no certificate", "set client_cert")),
        };
        Ok(TlsConnector::from(Arc::new(config)))
    }

    fn roots(&self) -> Result<RootCertStore, ConnectError> {
        let mut roots = RootCertStore::empty();
        match &self.ca {
            None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
            Some(pem) => {
                let certificates = CertificateDer::pem_slice_iter(pem).filter_map(Result::ok);
                let (added, _) = roots.add_parsable_certificates(certificates);
                if added == 0 {
                    return Err(ConnectError::new("ca has no certificate in it", "give it one in PEM"));
                }
            }
        }
        Ok(roots)
    }
}

#[cfg(test)]
mod tests {
    use crate::redis::RedisSettings;

    #[tokio::test]
    async fn a_password_file_is_read_anew_for_every_connection() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("password");
        std::fs::write(&path, "first\r\n").unwrap();
        let login = RedisSettings::new("redis://h").username("ann").password_file(&path).resolved().unwrap().login;
        assert_eq!(login.current().await.unwrap().password(), Some("first"));
        std::fs::write(&path, "second").unwrap();
        assert_eq!(login.current().await.unwrap().password(), Some("second"));
        assert_eq!(login.problem(), None);
        for damage in [|path| std::fs::write(path, "\n"), |path| std::fs::remove_file(path)]
            as [fn(&std::path::PathBuf) -> std::io::Result<()>; 2]
        {
            damage(&path).unwrap();
            assert_eq!(login.current().await.unwrap().password(), Some("second"));
            let problem = login.problem().unwrap();
            assert!(problem.contains("is empty") || problem.contains("cannot be read"), "{problem}");
        }
        std::fs::write(&path, "third").unwrap();
        assert_eq!((login.current().await.unwrap().password(), login.problem()), (Some("third"), None));
    }
}
