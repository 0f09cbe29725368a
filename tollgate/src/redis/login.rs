//! The login of a connection. The password may be in a file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use redis::{RedisConnectionInfo, RedisError};

use super::ConnectError;

/// Maximum size of a password file. A larger file is not a password.
const MAX_PASSWORD_FILE: usize = 64 << 10;

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
    password_file: Option<Arc<Path>>,
}

impl Login {
    pub(super) fn new(info: RedisConnectionInfo, password: Option<Secret>) -> Result<Self, ConnectError> {
        // `CLIENT SETINFO` would need another permission, and Redis 7.0 does not have it.
        let info = info.set_skip_set_lib_name();
        match password {
            None => Ok(Self { info, password_file: None }),
            Some(Secret::Text(password)) => Ok(Self { info: info.set_password(password), password_file: None }),
            Some(Secret::File(path)) => {
                read_password(&path)
                    .map_err(|problem| ConnectError::new(problem, "name a file that has the password"))?;
                Ok(Self { info, password_file: Some(path.into()) })
            }
        }
    }

    pub(super) fn database(&self) -> i64 {
        self.info.db()
    }

    /// Returns the login with the current password of its file.
    pub(super) async fn current(&self) -> Result<RedisConnectionInfo, RedisError> {
        let Some(path) = self.password_file.clone() else { return Ok(self.info.clone()) };
        let read = tokio::task::spawn_blocking(move || read_password(&path)).await.map_err(std::io::Error::other)?;
        Ok(self.info.clone().set_password(read.map_err(std::io::Error::other)?))
    }
}

/// Reads a password from its file. An error names the file, and never shows its content.
fn read_password(path: &Path) -> Result<String, String> {
    use std::io::Read;

    let mut bytes = Vec::new();
    let file =
        std::fs::File::open(path).and_then(|file| file.take(MAX_PASSWORD_FILE as u64 + 1).read_to_end(&mut bytes));
    file.map_err(|error| format!("the password file {} cannot be read: {error}", path.display()))?;
    let text = String::from_utf8(bytes).map_err(|_| format!("the password file {} is not text", path.display()))?;
    let password = text.trim_end_matches(['\r', '\n']);
    match password.len() {
        0 => Err(format!("the password file {} is empty", path.display())),
        length if length > MAX_PASSWORD_FILE => Err(format!("the password file {} is too large", path.display())),
        _ => Ok(password.to_owned()),
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
        std::fs::write(&path, "\n").unwrap();
        let error = login.current().await.unwrap_err().to_string();
        assert!(error.contains("is empty"), "{error}");
    }
}
