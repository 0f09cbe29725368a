//! Who a signed token (JWT) says that a client is.
//!
//! A token is verified or it is nothing: there is no way here to read one whose signature was not checked. A key
//! serves one algorithm, which follows from the kind of the key and not from what a token says, so a public key is
//! never taken for a secret, and `none` is no algorithm. Keys that a token brings along are not looked at.
//!
//! What was decided:
//! - `exp` and `nbf` are checked when they are there, with some leeway. A token without `exp` is good for as long
//!   as its key: issuers that want an end write one.
//! - With issuers or audiences configured, a token must name one of them. Without, it may name any.
//! - A token that calls for extensions (`crit`) is refused, since none are known here.
//!
//! A token without `kid` is verified with at most [`MAX_KEYS_TRIED`] keys. A token whose signature was good or bad a
//! moment ago is not verified again.
//!
//! Nothing here says whether a request may pass: a token that is not good has no claims, and a reason for that.

mod claims;
mod failed;
mod keys;
mod remembered;
mod signature;
mod source;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;
use serde_json::{Map, Value};

pub(crate) use self::claims::Claims;
use self::failed::Failed;
pub(crate) use self::keys::{Algorithm, InvalidKeys};
use self::keys::{Key, MAX_KEYS_TRIED};
use self::remembered::Remembered;
pub(crate) use self::source::TokenSource;
use crate::clock::wall;
use crate::http::TokenError;
use crate::units::Timestamp;

/// Servers take 8 to 16 KiB for a header by default. What is longer did not come as a token, and is not hashed.
const MAX_TOKEN_BYTES: usize = 16 * 1024;

/// A set of keys is a few kilobytes.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// Clocks of machines that are kept right differ by less.
const DEFAULT_LEEWAY: Duration = Duration::from_secs(30);

/// Tells good tokens from bad ones.
pub(crate) struct Verifier {
    keys: Vec<Key>,
    issuers: Vec<String>,
    audiences: Vec<String>,
    leeway: Duration,
    remembered: Remembered,
    failed: Failed,
}

/// What came of a token.
pub(crate) struct Verification {
    /// Its claims, or why there are none.
    pub(crate) claims: Result<Claims, TokenError>,
    /// How many signatures were verified to know that.
    pub(crate) signatures: u8,
}

impl Verifier {
    /// From a file with a public key in PEM, or with the secret of HS256. All algorithms must fit the key.
    pub(crate) fn from_key_file(path: &Path, algorithms: &[Algorithm]) -> Result<Self, InvalidKeys> {
        let name = path.display().to_string();
        Self::from_key(&name, &read(&name, path)?, algorithms)
    }

    /// From a file with a JWKS. With no algorithms named, each key serves its own.
    pub(crate) fn from_jwks_file(path: &Path, algorithms: &[Algorithm]) -> Result<Self, InvalidKeys> {
        let name = path.display().to_string();
        Self::from_jwks(&name, &read(&name, path)?, algorithms)
    }

    /// From what is in a key file. Errors call it by that name.
    pub(crate) fn from_key(name: &str, contents: &[u8], algorithms: &[Algorithm]) -> Result<Self, InvalidKeys> {
        Key::of_file(name, contents, algorithms).map(|key| Self::of_keys(vec![key]))
    }

    /// From what is in a JWKS file. Errors call it by that name.
    pub(crate) fn from_jwks(name: &str, contents: &[u8], algorithms: &[Algorithm]) -> Result<Self, InvalidKeys> {
        Key::of_jwks(name, contents, algorithms).map(Self::of_keys)
    }

    fn of_keys(keys: Vec<Key>) -> Self {
        Self {
            keys,
            issuers: Vec::new(),
            audiences: Vec::new(),
            leeway: DEFAULT_LEEWAY,
            remembered: Remembered::default(),
            failed: Failed::default(),
        }
    }

    /// Tokens must be of one of these issuers.
    pub(crate) fn issuers(mut self, issuers: impl IntoIterator<Item = String>) -> Self {
        self.issuers = issuers.into_iter().collect();
        self
    }

    /// Tokens must be for one of these audiences.
    pub(crate) fn audiences(mut self, audiences: impl IntoIterator<Item = String>) -> Self {
        self.audiences = audiences.into_iter().collect();
        self
    }

    /// By how much the clocks of issuers may differ from ours.
    pub(crate) fn leeway(mut self, leeway: Duration) -> Self {
        self.leeway = leeway;
        self
    }

    /// The claims of a token that is good now.
    pub(crate) fn verify(&self, token: &str) -> Verification {
        self.verify_at(token, wall::now())
    }

    /// The claims of a token that is good at that moment.
    pub(crate) fn verify_at(&self, token: &str, now: Timestamp) -> Verification {
        let mut signatures = 0;
        let claims = self.signed_lately(token, now, &mut signatures);
        let claims = claims.and_then(|claims| claims.are_current(now, self.leeway).map(|()| claims));
        Verification { claims, signatures }
    }

    /// The same as [`signed`](Self::signed), which is not asked twice in a while.
    fn signed_lately(&self, token: &str, now: Timestamp, signatures: &mut u8) -> Result<Claims, TokenError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(TokenError::Malformed);
        }
        if let Some(claims) = self.remembered.get(token) {
            return Ok(claims);
        }
        if let Some(error) = self.failed.get(token, now) {
            return Err(error);
        }
        let signed = self.signed(token, signatures);
        match &signed {
            Ok(claims) => self.remembered.put(token, claims.clone()),
            // What failed before a signature was verified fails as fast again.
            Err(error) if *signatures > 0 => self.failed.put(token, *error, now),
            Err(_) => {}
        }
        signed
    }

    /// The claims of a token that is signed by one of our keys, and meant for us; not whether it is in time.
    fn signed(&self, token: &str, signatures: &mut u8) -> Result<Claims, TokenError> {
        let (message, header, payload, signature) = parts(token).ok_or(TokenError::Malformed)?;
        let header = Header::read(header).ok_or(TokenError::Malformed)?;
        let signature = decoded(signature).ok_or(TokenError::Malformed)?;
        let algorithm: Algorithm = header.alg.parse().map_err(|()| TokenError::WrongAlgorithm)?;
        let id = header.kid.as_deref();
        if !self.keys.iter().any(|key| key.is_for(algorithm)) {
            return Err(TokenError::WrongAlgorithm);
        }
        // The key that the token names comes before those that have no name.
        let fit = || self.keys.iter().filter(|key| key.fits(algorithm, id));
        let named = fit().filter(|key| key.is_named(id));
        let keys = named.chain(fit().filter(|key| !key.is_named(id))).take(MAX_KEYS_TRIED);
        let mut error = TokenError::UnknownKey;
        for key in keys {
            *signatures += 1;
            if key.has_signed(message.as_bytes(), &signature) {
                return self.meant(payload);
            }
            error = TokenError::BadSignature;
        }
        Err(error)
    }

    /// The claims of a payload, if they are meant for us.
    fn meant(&self, payload: &str) -> Result<Claims, TokenError> {
        let claims = decoded(payload).and_then(|payload| Claims::read(&payload)).ok_or(TokenError::Malformed)?;
        if !self.issuers.is_empty() && !claims.name_one_of("iss", &self.issuers) {
            return Err(TokenError::WrongIssuer);
        }
        if !self.audiences.is_empty() && !claims.name_one_of("aud", &self.audiences) {
            return Err(TokenError::WrongAudience);
        }
        Ok(claims)
    }
}

/// What is signed, and of that the header and the payload; then the signature.
fn parts(token: &str) -> Option<(&str, &str, &str, &str)> {
    let (message, signature) = token.rsplit_once('.')?;
    let (header, payload) = message.split_once('.')?;
    Some((message, header, payload, signature))
}

/// What a token says of its signature.
#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    crit: Option<serde::de::IgnoredAny>,
}

impl Header {
    /// A header that is an object, and calls for no extensions.
    fn read(part: &str) -> Option<Self> {
        // By way of a map: read at once, it could also be a list, or have bytes that are no text where it is skipped.
        let header: Map<String, Value> = serde_json::from_slice(&decoded(part)?).ok()?;
        let header: Self = serde_json::from_value(header.into()).ok()?;
        header.crit.is_none().then_some(header)
    }
}

fn decoded(part: &str) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(part).ok()
}

fn read(name: &str, path: &Path) -> Result<Vec<u8>, InvalidKeys> {
    let mut contents = Vec::new();
    let file = File::open(path).map_err(|error| InvalidKeys::unreadable(name, &error))?;
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut contents).map_err(|error| InvalidKeys::unreadable(name, &error))?;
    if contents.len() as u64 > MAX_FILE_BYTES {
        return Err(InvalidKeys::new(
            name,
            format_args!("is longer than {MAX_FILE_BYTES} bytes"),
            "name a file with keys and nothing else",
        ));
    }
    Ok(contents)
}
