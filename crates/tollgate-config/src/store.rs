//! The Redis settings of a rule file.

use std::path::PathBuf;

use tollgate::redis::{Layout, RedisSettings, check_pem_file};

use super::forms::StoreUrl;
use super::setting_error::SettingError;
use super::types::{LayoutName, StoreRule};
use super::{Parsed, Problems};

/// Sets the path of a file, which is read for every new connection.
type SetFile = fn(RedisSettings, PathBuf) -> RedisSettings;

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
    /// [`RedisLimiterBuilder::store`](tollgate::redis::RedisLimiterBuilder::store).
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
        let files: [(&str, &Option<String>, SetFile); 3] = [
            ("ca", ca, RedisSettings::tls_ca_file),
            ("client_cert", client_cert, RedisSettings::client_cert_file),
            ("client_key", client_key, RedisSettings::client_key_file),
        ];
        for (key, path, set) in files {
            let Some(path) = path.as_ref().map(|path| self.folder.join(path)) else { continue };
            match check_pem_file(key, &path) {
                Ok(()) => settings = set(settings, path),
                Err(error) => errors.push(SettingError::new(error.problem(), error.fix()).of(key)),
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
}
