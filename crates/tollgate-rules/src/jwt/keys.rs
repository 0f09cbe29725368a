//! Keys for verifying tokens, each for one algorithm.

use std::fmt;
use std::str::FromStr;

use jsonwebtoken::DecodingKey;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::decoded;
use super::signature::{MIN_SECRET_BYTES, PublicKey};

/// Issuers publish two or three keys. A token without a key id may have to be tried with several.
const MAX_KEYS: usize = 32;

/// A token without a key id is verified with at most this many keys. Each verification costs as much as a hundred
/// decisions, and issuers sign with one key or, during a rotation, two.
pub(super) const MAX_KEYS_TRIED: usize = 4;

/// A signature algorithm of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
#[schemars(rename = "JwtAlgorithm")]
pub enum Algorithm {
    /// HMAC with SHA-256 and a shared secret.
    Hs256,
    /// RSA with SHA-256.
    Rs256,
    /// ECDSA on P-256.
    Es256,
    /// Ed25519.
    #[serde(rename = "EdDSA")]
    EdDsa,
}

impl Algorithm {
    /// All algorithms, in the order of the documentation.
    pub const ALL: [Self; 4] = [Self::Hs256, Self::Rs256, Self::Es256, Self::EdDsa];

    /// Returns the name in tokens and rule files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hs256 => "HS256",
            Self::Rs256 => "RS256",
            Self::Es256 => "ES256",
            Self::EdDsa => "EdDSA",
        }
    }
}

impl FromStr for Algorithm {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == name).ok_or(())
    }
}

/// A key.
pub(super) struct Key {
    /// The `kid` of the key in its set.
    id: Option<String>,
    algorithm: Algorithm,
    public: PublicKey,
}

impl Key {
    /// Parses a PEM file, or a file that contains a secret.
    pub(super) fn of_file(name: &str, contents: &[u8], algorithms: &[Algorithm]) -> Result<Self, InvalidKeys> {
        let (kind, key) = if contents.trim_ascii_start().starts_with(b"-----BEGIN ") {
            ("public key", of_pem(name, contents)?)
        } else {
            ("secret", of_secret(name, contents, algorithms)?)
        };
        let fit = key.algorithm.name();
        if algorithms.is_empty() {
            return Err(InvalidKeys::new(name, "has no algorithm", format_args!("set algorithms: [{fit}]")));
        }
        if let Some(other) = algorithms.iter().find(|other| **other != key.algorithm) {
            let problem = format_args!("holds a {kind} for {fit}, which {} cannot use", other.name());
            return Err(InvalidKeys::new(
                name,
                problem,
                format_args!("set algorithms: [{fit}], or name another key_file"),
            ));
        }
        Ok(key)
    }

    /// Parses a key set and returns the keys for these algorithms, or for all if none are given. Other keys are
    /// ignored.
    pub(super) fn of_jwks(name: &str, contents: &[u8], algorithms: &[Algorithm]) -> Result<Vec<Self>, InvalidKeys> {
        let set: Map<String, Value> = serde_json::from_slice(contents)
            .map_err(|error| InvalidKeys::new(name, format_args!("is not JSON: {error}"), "name a JWKS file"))?;
        let Some(Value::Array(keys)) = set.get("keys") else {
            return Err(InvalidKeys::new(name, "has no list `keys`", "name a JWKS file, or a PEM file as key_file"));
        };
        if keys.len() > MAX_KEYS {
            let problem = format_args!("has more than {MAX_KEYS} keys");
            return Err(InvalidKeys::new(name, problem, "remove those that are out of use"));
        }
        let served = |key: &Self| algorithms.is_empty() || algorithms.contains(&key.algorithm);
        let keys: Vec<_> = keys.iter().filter_map(|key| of_jwk(key.as_object()?)).filter(served).collect();
        if keys.is_empty() {
            let wanted = if algorithms.is_empty() { &Algorithm::ALL } else { algorithms };
            let wanted: Vec<_> = wanted.iter().map(|algorithm| algorithm.name()).collect();
            let problem = format_args!("has no sound key to verify {} with", wanted.join(", "));
            return Err(InvalidKeys::new(
                name,
                problem,
                "add one, of RSA with 2048 to 4096 bits, P-256, Ed25519 or oct",
            ));
        }
        let unnamed = |algorithm| keys.iter().filter(|key| key.algorithm == algorithm && key.id.is_none()).count();
        if let Some(algorithm) = Algorithm::ALL.into_iter().find(|one| unnamed(*one) > MAX_KEYS_TRIED) {
            let problem = format_args!("has more than {MAX_KEYS_TRIED} keys without `kid` for {}", algorithm.name());
            return Err(InvalidKeys::new(name, problem, "give each key a `kid`, or remove those that are out of use"));
        }
        Ok(keys)
    }

    /// Returns `true` if a token with this algorithm and key id may be signed with this key. If either has no id, the
    /// signature decides.
    pub(super) fn fits(&self, algorithm: Algorithm, id: Option<&str>) -> bool {
        let same_id = match (self.id.as_deref(), id) {
            (Some(ours), Some(theirs)) => ours == theirs,
            _ => true,
        };
        self.algorithm == algorithm && same_id
    }

    /// Returns `true` if a token names this key.
    pub(super) fn is_named(&self, id: Option<&str>) -> bool {
        id.is_some() && self.id.as_deref() == id
    }

    /// Returns `true` if the key is for this algorithm.
    pub(super) fn is_for(&self, algorithm: Algorithm) -> bool {
        self.algorithm == algorithm
    }

    pub(super) fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        self.public.verifies(message, signature)
    }

    fn new(algorithm: Algorithm, public: PublicKey) -> Self {
        Self { id: None, algorithm, public }
    }
}

fn of_pem(name: &str, contents: &[u8]) -> Result<Key, InvalidKeys> {
    let text = String::from_utf8_lossy(contents);
    if text.contains("PRIVATE KEY-----") {
        return Err(InvalidKeys::new(name, "holds a private key", "keep it with the issuer, and name its public half"));
    }
    if !text.contains("-----BEGIN PUBLIC KEY-----") && !text.contains("-----BEGIN RSA PUBLIC KEY-----") {
        return Err(InvalidKeys::new(name, "holds no public key", "name a file that begins with BEGIN PUBLIC KEY"));
    }
    let rsa = || {
        let key = DecodingKey::from_rsa_pem(contents).ok()?;
        PublicKey::rsa_der(key.try_get_as_bytes().ok()?).map(|public| Key::new(Algorithm::Rs256, public))
    };
    let ec = || {
        let key = DecodingKey::from_ec_pem(contents).ok()?;
        PublicKey::p256(key.try_get_as_bytes().ok()?).map(|public| Key::new(Algorithm::Es256, public))
    };
    let ed = || {
        let key = DecodingKey::from_ed_pem(contents).ok()?;
        PublicKey::ed25519(key.try_get_as_bytes().ok()?).map(|public| Key::new(Algorithm::EdDsa, public))
    };
    rsa().or_else(ec).or_else(ed).ok_or_else(|| {
        let fix = "use RSA with 2048 to 4096 bits, P-256 or Ed25519";
        InvalidKeys::new(name, "holds a public key that cannot be used", fix)
    })
}

fn of_secret(name: &str, contents: &[u8], algorithms: &[Algorithm]) -> Result<Key, InvalidKeys> {
    if !algorithms.is_empty() && !algorithms.contains(&Algorithm::Hs256) {
        let problem = "holds no public key in PEM";
        return Err(InvalidKeys::new(name, problem, "name a file that begins with BEGIN PUBLIC KEY"));
    }
    let secret = PublicKey::hmac(without_line_end(contents));
    secret.map(|secret| Key::new(Algorithm::Hs256, secret)).ok_or_else(|| {
        let problem = format_args!("holds a secret of less than {MIN_SECRET_BYTES} bytes, which can be guessed");
        InvalidKeys::new(name, problem, "make one with `openssl rand -hex 32`")
    })
}

/// Removes the line end of a text file. Binary contents are unchanged.
fn without_line_end(contents: &[u8]) -> &[u8] {
    match std::str::from_utf8(contents) {
        Ok(text) => text.strip_suffix('\n').map_or(text, |line| line.strip_suffix('\r').unwrap_or(line)).as_bytes(),
        Err(_) => contents,
    }
}

/// Parses a JWK (RFC 7517). Returns `None` if it is weak, invalid, or not for verifying one of our algorithms.
fn of_jwk(jwk: &Map<String, Value>) -> Option<Key> {
    let text = |name: &str| jwk.get(name).and_then(Value::as_str);
    let bytes = |name: &str| decoded(text(name)?);
    let (algorithm, public) = match (text("kty")?, text("crv")) {
        ("RSA", _) => (Algorithm::Rs256, PublicKey::rsa(&bytes("n")?, &bytes("e")?)?),
        ("EC", Some("P-256")) => (Algorithm::Es256, PublicKey::p256(&[&[4], &*bytes("x")?, &*bytes("y")?].concat())?),
        ("OKP", Some("Ed25519")) => (Algorithm::EdDsa, PublicKey::ed25519(&bytes("x")?)?),
        ("oct", _) => (Algorithm::Hs256, PublicKey::hmac(&bytes("k")?)?),
        _ => return None,
    };
    let is_for = |name: &str, ours: &str| jwk.get(name).is_none_or(|given| given.as_str() == Some(ours));
    let verifies = match jwk.get("key_ops") {
        Some(Value::Array(uses)) => uses.iter().any(|given| given == "verify"),
        Some(_) => false,
        None => true,
    };
    if !is_for("alg", algorithm.name()) || !is_for("use", "sig") || !verifies {
        return None;
    }
    Some(Key { id: text("kid").map(str::to_owned), algorithm, public })
}

/// Keys that cannot be used: the file, the problem, and the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidKeys {
    problem: String,
    fix: String,
}

impl InvalidKeys {
    pub(super) fn new(name: &str, problem: impl fmt::Display, fix: impl fmt::Display) -> Self {
        Self { problem: format!("{name} {problem}"), fix: fix.to_string() }
    }

    pub(super) fn unreadable(name: &str, error: &std::io::Error) -> Self {
        Self::new(name, format_args!("cannot be read: {error}"), "name a file that this process may read")
    }

    /// Returns the problem.
    pub fn problem(&self) -> &str {
        &self.problem
    }

    /// Returns the fix.
    pub fn fix(&self) -> &str {
        &self.fix
    }
}

impl fmt::Display for InvalidKeys {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.problem, self.fix)
    }
}

impl std::error::Error for InvalidKeys {}
