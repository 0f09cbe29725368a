//! Tokens: claims count only if they are signed with the configured key.

use std::sync::LazyLock;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, Mac};
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue};
use serde_json::{Map, Value};
use sha2::Sha256;
use tollgate_config::RuleFile;
use tollgate_rules::{Facts, Gate};

use crate::gates;

const SECRET: &[u8] = b"the secret of the tokens of the fuzzer";
const OTHER_SECRET: &[u8] = b"another secret, which is not in the rules";

const RULES: &str = "
jwt: { key_file: secret, algorithms: [HS256] }
limits: [{ name: per-user, key: 'jwt:sub' }]
";

/// The key of a request without a valid token.
const MISSING: &str = "anonymous";

static GATE: LazyLock<Gate> = LazyLock::new(|| opened().unwrap_or_else(|error| panic!("{error}")));

/// Opens a gate whose key is in a file. The gate keeps the key after the file is removed.
fn opened() -> Result<Gate, Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("secret"), SECRET)?;
    let path = folder.path().join("tollgate.yaml");
    std::fs::write(&path, RULES)?;
    Ok(Gate::in_memory(RuleFile::load(&path)?.compile()?)?)
}

/// Reads the first byte as the kind of the input: a whole token, or a header and claims, separated by a line feed, to
/// be signed with our key or with another.
pub fn jwt(input: &[u8]) {
    let Some((kind, rest)) = input.split_first() else { return };
    let (header, claims) = rest.split_at(rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len()));
    let claims = claims.strip_prefix(b"\n").unwrap_or_default();
    match kind {
        b's' => signed_by_us(header, claims),
        b'o' => {
            let token = signed(header, claims, OTHER_SECRET);
            assert_eq!(client(token.as_bytes()).as_deref().unwrap_or(MISSING), MISSING, "{token}");
        }
        _ => any_token(rest),
    }
}

/// Checks that only a token with a valid signature identifies a client.
fn any_token(token: &[u8]) {
    let Some(found) = client(token) else { return };
    if found != MISSING {
        let text = String::from_utf8_lossy(token);
        assert!(is_signed(text.trim_ascii()), "{text} is taken for {found}");
    }
}

/// Checks that claims signed with our key count, if the header and the claims are valid.
fn signed_by_us(header: &[u8], claims: &[u8]) {
    let token = signed(header, claims, SECRET);
    let Some(found) = client(token.as_bytes()) else { return };
    let readable = |text: &[u8]| serde_json::from_slice::<Map<String, Value>>(text).ok();
    let (header, claims) = match (readable(header), readable(claims)) {
        (Some(header), Some(claims)) => (header, claims),
        _ => return assert_eq!(found, MISSING, "{token}"),
    };
    let is_ours = header.get("alg").is_some_and(|name| name == "HS256");
    let calls_for_more = header.get("crit").is_some_and(|list| !list.is_null());
    if !is_ours || calls_for_more || is_expired(&claims) {
        assert_eq!(found, MISSING, "{token}");
    } else if header.len() == 1 && !claims.contains_key("exp") && !claims.contains_key("nbf") {
        assert_eq!(found, subject(&claims), "{token}");
    }
}

/// Returns whether `exp` is a whole number of seconds that is long past.
fn is_expired(claims: &Map<String, Value>) -> bool {
    claims.get("exp").and_then(Value::as_u64).is_some_and(|end| end < 1_000_000_000)
}

fn subject(claims: &Map<String, Value>) -> String {
    match claims.get("sub") {
        Some(Value::String(text)) if !text.is_empty() => text.clone(),
        Some(value @ (Value::Number(_) | Value::Bool(_))) => value.to_string(),
        _ => MISSING.to_owned(),
    }
}

/// Returns the client that a token identifies, or `None` if the token is not a valid header value.
fn client(token: &[u8]) -> Option<String> {
    let value = HeaderValue::from_bytes(&[b"Bearer ", token].concat()).ok()?;
    let headers = HeaderMap::from_iter([(AUTHORIZATION, value)]);
    let facts = Facts::new("GET", "/").headers(&headers);
    match gates::key(&GATE, 0, &facts).as_deref() {
        Some([part]) => Some(part.clone()),
        other => panic!("a key of one part, not {other:?}"),
    }
}

fn signed(header: &[u8], claims: &[u8], secret: &[u8]) -> String {
    let message = format!("{}.{}", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(claims));
    let signature = URL_SAFE_NO_PAD.encode(signing(&message, secret).finalize().into_bytes());
    format!("{message}.{signature}")
}

fn is_signed(token: &str) -> bool {
    let Some((message, signature)) = token.rsplit_once('.') else { return false };
    let Ok(signature) = URL_SAFE_NO_PAD.decode(signature) else { return false };
    signing(message, SECRET).verify_slice(&signature).is_ok()
}

fn signing(message: &str, secret: &[u8]) -> Hmac<Sha256> {
    let Ok(mac) = Hmac::<Sha256>::new_from_slice(secret) else { panic!("a secret may have any length") };
    mac.chain_update(message)
}
