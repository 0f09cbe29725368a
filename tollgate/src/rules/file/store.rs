//! The Redis settings of a rule file, with the content of the files that they name.

use std::fs::File;
use std::io::Read;

use super::forms::StoreUrl;
use super::setting_error::SettingError;
use super::types::{LayoutName, StoreRule};
use super::{Parsed, Problems};
use crate::redis::{Layout, RedisSettings};

/// Larger than any bundle of certificates.
const MAX_PEM: u64 = 4 << 20;

/// Sets the content of a file.
type SetPem = fn(RedisSettings, Vec<u8>) -> RedisSettings;

impl Parsed {
    /// Returns the settings of the Redis in `store`, or `None` if the store is in memory. Relative paths start from
    /// [`folder`](Self::folder).
    ///
    /// # Errors
    ///
    /// Fails if a file cannot be read, or if the settings cannot work.
    pub fn redis_settings(&self) -> Result<Option<RedisSettings>, Problems> {
        self.settings(&self.rules.store)
            .map_err(|errors| self.problems(errors.into_iter().map(|error| error.of("store"))))
    }

    /// Returns the settings of the stores that limits choose by name, for
    /// [`RedisLimiterBuilder::store`](crate::redis::RedisLimiterBuilder::store).
    ///
    /// # Errors
    ///
    /// As [`redis_settings`](Self::redis_settings), and when there are such stores and all other counts are in memory.
    pub fn named_redis_settings(&self) -> Result<Vec<(String, RedisSettings)>, Problems> {
        self.check_default_store()?;
        let (mut named, mut errors) = (Vec::new(), Vec::new());
        for (name, store) in &self.rules.stores {
            match self.settings(store) {
                Ok(settings) => named.extend(settings.map(|settings| (name.clone(), settings))),
                Err(of_store) => errors.extend(of_store.into_iter().map(|error| error.of(name.as_str()).of("stores"))),
            }
        }
        if errors.is_empty() { Ok(named) } else { Err(self.problems(errors)) }
    }

    /// Returns the settings of a store, or what is wrong with parts of it.
    fn settings(&self, store: &StoreRule) -> Result<Option<RedisSettings>, Vec<SettingError>> {
        let StoreUrl::Redis(url) = &store.url else { return Ok(None) };
        let StoreRule { prefix, ca, client_cert, client_key, username, .. } = store;
        let (mut settings, mut errors) = (RedisSettings::new(url), Vec::new());
        if let Some(prefix) = prefix {
            settings = settings.prefix(prefix.as_str());
        }
        if store.layout == LayoutName::Compact {
            settings = settings.layout(Layout::Compact);
        }
        if let Some(keys) = store.expected_keys {
            settings = settings.expected_keys(keys.into());
        }
        let files: [(&str, &Option<String>, SetPem); 3] = [
            ("ca", ca, RedisSettings::tls_ca),
            ("client_cert", client_cert, RedisSettings::client_cert),
            ("client_key", client_key, RedisSettings::client_key),
        ];
        for (key, path, set) in files {
            match path.as_ref().map(|path| self.read_pem(path)) {
                None => {}
                Some(Ok(pem)) => settings = set(settings, pem),
                Some(Err(problem)) => {
                    let fix = "check the path and its permissions";
                    errors.push(SettingError::new(format!("{key}: {problem}"), fix).of(key));
                }
            }
        }
        if let Some(name) = username {
            settings = settings.username(name);
        }
        if let Some(path) = &store.password_file {
            settings = settings.password_file(self.folder.join(path));
        }
        if let Some(name) = &store.sentinel_username {
            settings = settings.sentinel_username(name);
        }
        if let Some(path) = &store.sentinel_password_file {
            settings = settings.sentinel_password_file(self.folder.join(path));
        }
        if errors.is_empty()
            && let Err(error) = settings.check()
        {
            errors.push(SettingError::new(error.problem(), error.fix()));
        }
        if errors.is_empty() { Ok(Some(settings)) } else { Err(errors) }
    }

    fn read_pem(&self, path: &str) -> Result<Vec<u8>, String> {
        let (path, mut pem) = (self.folder.join(path), Vec::new());
        let read = File::open(&path).and_then(|file| file.take(MAX_PEM + 1).read_to_end(&mut pem));
        match read {
            Ok(length) if length as u64 > MAX_PEM => Err(format!("{} is larger than 4 MiB", path.display())),
            Ok(_) => Ok(pem),
            Err(error) => Err(format!("cannot read {}: {error}", path.display())),
        }
    }
}
