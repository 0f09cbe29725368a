//! Signed tokens (JWT).
//!
//! A token's claims are available only after its signature is verified. A key belongs to one algorithm, which follows
//! from the type of the key and not from the token, so a public key is never used as a secret, and `none` is not an
//! algorithm. Keys inside a token are ignored.
//!
//! Further decisions:
//! - `exp` and `nbf` are checked if present, with some leeway. A token without `exp` is valid as long as its key.
//! - If issuers or audiences are configured, a token must name one of them.
//! - A token that requires extensions (`crit`) is rejected, because none are supported.
//!
//! A token without `kid` is verified with at most [`MAX_KEYS_TRIED`] keys. Recent results are cached, for valid and
//! invalid signatures.
//!
//! Not here: whether a request is allowed. An invalid token has no claims, and a reason for that.

mod claims;
mod failure_cache;
mod keys;
mod signature;
mod source;
#[cfg(test)]
mod tests;
mod verified_cache;

use std::path::Path;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;
use serde_json::{Map, Value};
use tollgate::Timestamp;
use tollgate::internal::wall_now;
use tollgate_http::TokenError;

pub use self::claims::Claims;
use self::failure_cache::FailureCache;
pub use self::keys::{Algorithm, InvalidKeys};
use self::keys::{Key, MAX_KEYS_TRIED};
pub use self::source::TokenSource;
use self::verified_cache::VerifiedCache;
use crate::regular_file::read_up_to;

/// Servers accept headers of 8 to 16 KiB by default. A longer token is not hashed or verified.
const MAX_TOKEN_BYTES: usize = 16 * 1024;

/// A key set has a few kilobytes.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// Synchronized clocks differ by less.
const DEFAULT_LEEWAY: Duration = Duration::from_secs(30);

/// Verifies tokens.
pub struct Verifier {
    keys: Vec<Key>,
    issuers: Vec<String>,
    audiences: Vec<String>,
    leeway: Duration,
    verified_cache: VerifiedCache,
    failed: FailureCache,
}

/// The result of verifying a token.
pub struct Verification {
    /// The claims, or the reason that the token is invalid.
    pub claims: Result<Claims, TokenError>,
    /// The number of signatures that were verified.
    pub signatures: u8,
}

impl Verifier {
    /// Loads a file with a public key in PEM format, or with the secret of HS256. All algorithms must fit the key.
    pub fn from_key_file(path: &Path, algorithms: &[Algorithm]) -> Result<Self, InvalidKeys> {
        let name = path.display().to_string();
        Self::from_key(&name, &read(&name, path)?, algorithms)
    }

    /// Loads a JWKS file. If `algorithms` is empty, each key uses its own.
    pub fn from_jwks_file(path: &Path, algorithms: &[Algorithm]) -> Result<Self, InvalidKeys> {
        let name = path.display().to_string();
        Self::from_jwks(&name, &read(&name, path)?, algorithms)
    }

    /// Parses the contents of a key file. `name` is used in errors.
    pub fn from_key(name: &str, contents: &[u8], algorithms: &[Algorithm]) -> Result<Self, InvalidKeys> {
        Key::of_file(name, contents, algorithms).map(|key| Self::of_keys(vec![key]))
    }

    /// Parses the contents of a JWKS file. `name` is used in errors.
    pub fn from_jwks(name: &str, contents: &[u8], algorithms: &[Algorithm]) -> Result<Self, InvalidKeys> {
        Key::of_jwks(name, contents, algorithms).map(Self::of_keys)
    }

    fn of_keys(keys: Vec<Key>) -> Self {
        Self {
            keys,
            issuers: Vec::new(),
            audiences: Vec::new(),
            leeway: DEFAULT_LEEWAY,
            verified_cache: VerifiedCache::default(),
            failed: FailureCache::default(),
        }
    }

    /// Sets the accepted issuers.
    pub fn issuers(mut self, issuers: impl IntoIterator<Item = String>) -> Self {
        self.issuers = issuers.into_iter().collect();
        self
    }

    /// Sets the accepted audiences.
    pub fn audiences(mut self, audiences: impl IntoIterator<Item = String>) -> Self {
        self.audiences = audiences.into_iter().collect();
        self
    }

    /// Sets the allowed difference between the clocks of issuers and ours.
    pub fn leeway(mut self, leeway: Duration) -> Self {
        self.leeway = leeway;
        self
    }

    /// Verifies a token at the current time.
    pub fn verify(&self, token: &str) -> Verification {
        self.verify_at(token, wall_now())
    }

    /// Verifies a token at a given time.
    pub fn verify_at(&self, token: &str, now: Timestamp) -> Verification {
        let mut signatures = 0;
        let claims = self.signed_cached(token, now, &mut signatures);
        let claims = claims.and_then(|claims| claims.check_times(now, self.leeway).map(|()| claims));
        Verification { claims, signatures }
    }

    /// Cached version of [`signed`](Self::signed).
    fn signed_cached(&self, token: &str, now: Timestamp, signatures: &mut u8) -> Result<Claims, TokenError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(TokenError::Malformed);
        }
        if let Some(claims) = self.verified_cache.get(token) {
            return Ok(claims);
        }
        if let Some(error) = self.failed.get(token, now) {
            return Err(error);
        }
        let signed = self.signed(token, signatures);
        match &signed {
            Ok(claims) => self.verified_cache.put(token, claims.clone()),
            // Failures without a verification are cheap, so only failed signatures are cached.
            Err(error) if *signatures > 0 => self.failed.put(token, *error, now),
            Err(_) => {}
        }
        signed
    }

    /// Returns the claims of a token that is signed by one of our keys and has an accepted issuer and audience. Its
    /// times are not checked.
    fn signed(&self, token: &str, signatures: &mut u8) -> Result<Claims, TokenError> {
        let (message, header, payload, signature) = parts(token).ok_or(TokenError::Malformed)?;
        let header = Header::read(header).ok_or(TokenError::Malformed)?;
        let signature = decoded(signature).ok_or(TokenError::Malformed)?;
        let algorithm: Algorithm = header.alg.parse().map_err(|()| TokenError::WrongAlgorithm)?;
        let id = header.kid.as_deref();
        if !self.keys.iter().any(|key| key.is_for(algorithm)) {
            return Err(TokenError::WrongAlgorithm);
        }
        // The key that the token names comes before keys without a name.
        let fit = || self.keys.iter().filter(|key| key.fits(algorithm, id));
        let named = fit().filter(|key| key.is_named(id));
        let keys = named.chain(fit().filter(|key| !key.is_named(id))).take(MAX_KEYS_TRIED);
        let mut error = TokenError::UnknownKey;
        for key in keys {
            *signatures += 1;
            if key.has_signed(message.as_bytes(), &signature) {
                return self.accepted_claims(payload);
            }
            error = TokenError::BadSignature;
        }
        Err(error)
    }

    /// Returns the claims of a payload with an accepted issuer and audience.
    fn accepted_claims(&self, payload: &str) -> Result<Claims, TokenError> {
        let claims = decoded(payload).and_then(|payload| Claims::read(&payload)).ok_or(TokenError::Malformed)?;
        if !self.issuers.is_empty() && !claims.contain_one_of("iss", &self.issuers) {
            return Err(TokenError::WrongIssuer);
        }
        if !self.audiences.is_empty() && !claims.contain_one_of("aud", &self.audiences) {
            return Err(TokenError::WrongAudience);
        }
        Ok(claims)
    }
}

/// Splits a token into the signed part, its header and payload, and the signature.
fn parts(token: &str) -> Option<(&str, &str, &str, &str)> {
    let (message, signature) = token.rsplit_once('.')?;
    let (header, payload) = message.split_once('.')?;
    Some((message, header, payload, signature))
}

/// The header of a token.
#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    crit: Option<serde::de::IgnoredAny>,
}

impl Header {
    /// Parses a header, which must be an object without `crit`.
    fn read(part: &str) -> Option<Self> {
        // Parsed as a map first: a derived parser would also accept a list, and invalid UTF-8 in fields that it skips.
        let header: Map<String, Value> = serde_json::from_slice(&decoded(part)?).ok()?;
        let header: Self = serde_json::from_value(header.into()).ok()?;
        header.crit.is_none().then_some(header)
    }
}

fn decoded(part: &str) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(part).ok()
}

fn read(name: &str, path: &Path) -> Result<Vec<u8>, InvalidKeys> {
    let contents = read_up_to(path, MAX_FILE_BYTES + 1).map_err(|error| InvalidKeys::unreadable(name, &error))?;
    if contents.len() as u64 > MAX_FILE_BYTES {
        return Err(InvalidKeys::new(
            name,
            format_args!("is longer than {MAX_FILE_BYTES} bytes"),
            "name a file with keys and nothing else",
        ));
    }
    Ok(contents)
}
