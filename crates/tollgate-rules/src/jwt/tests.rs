//! Tokens signed with real keys, which the tests generate, and forged tokens.

use std::sync::LazyLock;

use jsonwebtoken::{Algorithm as Signing, EncodingKey};
use proptest::prelude::*;
use rcgen::{KeyPair, PublicKeyData};
use rsa::pkcs8::{EncodePrivateKey, EncodePublicKey, LineEnding};
use rsa::traits::PublicKeyParts;
use serde_json::{Value, json};

use super::*;

const NOW_SECS: u64 = 1_800_000_000;
const NOW: Timestamp = Timestamp::from_secs(NOW_SECS);
const SECRET: &[u8] = b"a secret of forty bytes, as tests have it";

/// A key pair: the private key for signing, and the public key in PEM format and in a JWKS.
struct Pair {
    algorithm: Algorithm,
    private: EncodingKey,
    public: Vec<u8>,
    jwk: Value,
}

impl Pair {
    fn verifier(&self) -> Verifier {
        Verifier::from_key("key.pem", &self.public, &[self.algorithm]).unwrap()
    }

    fn sign(&self, claims: &Value) -> String {
        sign(&json!({ "alg": self.algorithm.name(), "typ": "JWT" }), claims, self)
    }
}

static RSA: LazyLock<Pair> = LazyLock::new(rsa_pair);
static OTHER_RSA: LazyLock<Pair> = LazyLock::new(rsa_pair);
static EC: LazyLock<Pair> = LazyLock::new(ec_pair);
static ED: LazyLock<Pair> = LazyLock::new(ed_pair);
static HMAC: LazyLock<Pair> = LazyLock::new(|| hmac_pair(SECRET));

fn text(claims: &Claims, name: &str) -> Option<String> {
    crate::claims::text(&claims.map(), name).map(std::borrow::Cow::into_owned)
}

fn pairs() -> [&'static Pair; 4] {
    [&RSA, &EC, &ED, &HMAC]
}

fn rsa_pair() -> Pair {
    let private = rsa::RsaPrivateKey::new(&mut rsa::rand_core::OsRng, 2048).unwrap();
    let public = private.to_public_key();
    let component = |number: &rsa::BigUint| URL_SAFE_NO_PAD.encode(number.to_bytes_be());
    Pair {
        algorithm: Algorithm::Rs256,
        private: EncodingKey::from_rsa_pem(private.to_pkcs8_pem(LineEnding::LF).unwrap().as_bytes()).unwrap(),
        public: public.to_public_key_pem(LineEnding::LF).unwrap().into_bytes(),
        jwk: json!({ "kty": "RSA", "n": component(public.n()), "e": component(public.e()) }),
    }
}

fn ec_pair() -> Pair {
    let pair = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
    let (x, y) = pair.der_bytes()[1..].split_at(32);
    Pair {
        algorithm: Algorithm::Es256,
        private: EncodingKey::from_ec_pem(pair.serialize_pem().as_bytes()).unwrap(),
        public: pair.public_key_pem().into_bytes(),
        jwk: json!({ "kty": "EC", "crv": "P-256", "x": URL_SAFE_NO_PAD.encode(x), "y": URL_SAFE_NO_PAD.encode(y) }),
    }
}

fn ed_pair() -> Pair {
    let pair = KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    Pair {
        algorithm: Algorithm::EdDsa,
        private: EncodingKey::from_ed_pem(pair.serialize_pem().as_bytes()).unwrap(),
        public: pair.public_key_pem().into_bytes(),
        jwk: json!({ "kty": "OKP", "crv": "Ed25519", "x": URL_SAFE_NO_PAD.encode(pair.der_bytes()) }),
    }
}

fn hmac_pair(secret: &[u8]) -> Pair {
    Pair {
        algorithm: Algorithm::Hs256,
        private: EncodingKey::from_secret(secret),
        public: secret.to_vec(),
        jwk: json!({ "kty": "oct", "k": URL_SAFE_NO_PAD.encode(secret) }),
    }
}

/// Signs a token with any header, with the pair's own algorithm whatever the header says.
fn sign(header: &Value, claims: &Value, pair: &Pair) -> String {
    let message = unsigned(header, claims);
    let algorithm: Signing = pair.algorithm.name().parse().unwrap();
    let signature = jsonwebtoken::crypto::sign(message.as_bytes(), &pair.private, algorithm).unwrap();
    format!("{message}.{signature}")
}

fn unsigned(header: &Value, claims: &Value) -> String {
    format!("{}.{}", URL_SAFE_NO_PAD.encode(header.to_string()), URL_SAFE_NO_PAD.encode(claims.to_string()))
}

fn jwks(keys: &[(&Pair, Value)], algorithms: &[Algorithm]) -> Result<Verifier, InvalidKeys> {
    let keys: Vec<_> = keys
        .iter()
        .map(|(pair, more)| {
            let mut key = pair.jwk.clone();
            key.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            key
        })
        .collect();
    Verifier::from_jwks("keys.json", json!({ "keys": keys }).to_string().as_bytes(), algorithms)
}

fn is_good(verifier: &Verifier, token: &str) -> bool {
    let first = verifier.verify_at(token, NOW).claims.is_ok();
    // The cached result must equal the first.
    assert_eq!(verifier.verify_at(token, NOW).claims.is_ok(), first);
    first
}

fn subject(verifier: &Verifier, token: &str) -> Option<String> {
    text(&verifier.verify_at(token, NOW).claims.ok()?, "sub")
}

#[test]
fn a_token_of_every_algorithm_is_verified_by_a_key_file_and_by_a_set() {
    for pair in pairs() {
        let token = pair.sign(&json!({ "sub": "ann", "exp": NOW_SECS + 60 }));
        assert_eq!(subject(&pair.verifier(), &token).as_deref(), Some("ann"), "{}", pair.algorithm.name());
        let set = jwks(&[(pair, json!({}))], &[]).unwrap();
        assert_eq!(subject(&set, &token).as_deref(), Some("ann"), "{}", pair.algorithm.name());
    }
}

#[test]
fn a_token_is_verified_by_the_wall_clock() {
    let verifier = HMAC.verifier();
    assert!(verifier.verify(&HMAC.sign(&json!({ "exp": 4_000_000_000_u64 }))).claims.is_ok());
    assert!(verifier.verify(&HMAC.sign(&json!({ "exp": 1_700_000_000 }))).claims.is_err());
}

#[test]
fn a_changed_token_is_refused() {
    for pair in pairs() {
        let verifier = pair.verifier();
        let token = pair.sign(&json!({ "sub": "ann" }));
        assert!(is_good(&verifier, &token));
        let (message, signature) = token.rsplit_once('.').unwrap();
        let (header, _) = message.split_once('.').unwrap();
        let other = URL_SAFE_NO_PAD.encode(json!({ "sub": "bob" }).to_string());
        let mut flipped = URL_SAFE_NO_PAD.decode(signature).unwrap();
        flipped[7] ^= 1;
        for forged in [
            format!("{header}.{other}.{signature}"),
            format!("{message}.{}", URL_SAFE_NO_PAD.encode(flipped)),
            format!("{message}."),
            message.to_owned(),
            format!("{message}.{}", &signature[..signature.len() - 4]),
            format!("{token}AAAA"),
            format!("{token}."),
            format!("{token}={}", ""),
            format!(" {token}"),
            format!(".{token}"),
        ] {
            assert!(!is_good(&verifier, &forged), "{} {forged}", pair.algorithm.name());
        }
    }
}

#[test]
fn a_token_of_another_key_is_refused() {
    let token = OTHER_RSA.sign(&json!({ "sub": "ann" }));
    assert!(!is_good(&RSA.verifier(), &token));
    for (ours, theirs) in [(&*EC, ec_pair()), (&*ED, ed_pair()), (&*HMAC, hmac_pair(&[7; 32]))] {
        assert!(!is_good(&ours.verifier(), &theirs.sign(&json!({ "sub": "ann" }))));
    }
}

#[test]
fn an_unsigned_token_is_refused() {
    let claims = json!({ "sub": "ann" });
    for pair in pairs() {
        for name in ["none", "None", "NONE", "nOnE", ""] {
            let message = unsigned(&json!({ "alg": name }), &claims);
            let signed = sign(&json!({ "alg": name }), &claims, pair);
            for token in [message.clone(), format!("{message}."), format!("{message}.AAAA"), signed] {
                assert!(!is_good(&pair.verifier(), &token), "{name}");
            }
        }
        assert!(!is_good(&pair.verifier(), &sign(&json!({ "typ": "JWT" }), &claims, pair)));
    }
}

#[test]
fn a_public_key_is_not_used_as_a_secret() {
    let claims = json!({ "sub": "ann" });
    for pair in [&*RSA, &*EC, &*ED] {
        let without_end = pair.public.trim_ascii_end();
        for secret in [&*pair.public, without_end] {
            let forged = hmac_pair(secret).sign(&claims);
            assert!(!is_good(&pair.verifier(), &forged), "{}", pair.algorithm.name());
            assert!(!is_good(&jwks(&[(pair, json!({})), (&HMAC, json!({}))], &[]).unwrap(), &forged));
        }
        let error = Verifier::from_key("key.pem", &pair.public, &[Algorithm::Hs256]).err().unwrap();
        let name = pair.algorithm.name();
        assert_eq!(
            error.to_string(),
            format!(
                "key.pem holds a public key for {name}, which HS256 cannot use: set algorithms: [{name}], or name another key_file"
            )
        );
    }
}

#[test]
fn the_header_cannot_choose_another_algorithm() {
    let claims = json!({ "sub": "ann" });
    for pair in pairs() {
        for name in ["HS256", "HS384", "HS512", "RS256", "RS384", "PS256", "ES256", "ES384", "EdDSA", "hs256"] {
            let good = is_good(&pair.verifier(), &sign(&json!({ "alg": name }), &claims, pair));
            assert_eq!(good, name == pair.algorithm.name(), "{name} with a key for {}", pair.algorithm.name());
        }
    }
    // A valid signature of the same key, with an algorithm that was not configured.
    let message = unsigned(&json!({ "alg": "RS512" }), &claims);
    let signature = jsonwebtoken::crypto::sign(message.as_bytes(), &RSA.private, Signing::RS512).unwrap();
    assert!(!is_good(&RSA.verifier(), &format!("{message}.{signature}")));
}

#[test]
fn a_key_inside_the_token_is_not_used() {
    let header = json!({ "alg": "RS256", "jwk": OTHER_RSA.jwk, "jku": "https://evil.example/keys", "x5c": ["AAAA"] });
    assert!(!is_good(&RSA.verifier(), &sign(&header, &json!({ "sub": "ann" }), &OTHER_RSA)));
    assert!(is_good(&RSA.verifier(), &sign(&header, &json!({ "sub": "ann" }), &RSA)));
}

#[test]
fn a_token_that_calls_for_extensions_is_refused() {
    for header in [json!({ "alg": "HS256", "crit": ["b64"], "b64": false }), json!({ "alg": "HS256", "crit": [] })] {
        assert!(!is_good(&HMAC.verifier(), &sign(&header, &json!({ "sub": "ann" }), &HMAC)));
    }
}

#[test]
fn a_header_that_is_not_an_object_is_refused() {
    let pair = hmac_pair(&[b'k'; 32]);
    let verifier = Verifier::from_key("secret", &pair.public, &[Algorithm::Hs256]).unwrap();
    let headers: [(&[u8], bool); 4] = [
        (br#"{"alg":"HS256","typ":"JWT"}"#, true),
        (b"{\"alg\":\"HS256\",\"typ\":\"J\x92T\"}", false),
        (br#"["HS256",null,null]"#, false),
        (br#""HS256""#, false),
    ];
    for (header, expected) in headers {
        let message = format!("{}.{}", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(r#"{"sub":"ann"}"#));
        let signature = jsonwebtoken::crypto::sign(message.as_bytes(), &pair.private, Signing::HS256).unwrap();
        let token = format!("{message}.{signature}");
        assert_eq!(is_good(&verifier, &token), expected, "{}", String::from_utf8_lossy(header));
    }
}

#[test]
fn times_are_checked_with_the_leeway() {
    let verifier = HMAC.verifier();
    for (claims, good) in [
        (json!({}), true),
        (json!({ "exp": NOW_SECS + 1 }), true),
        (json!({ "exp": NOW_SECS - 29 }), true),
        (json!({ "exp": NOW_SECS - 30 }), false),
        (json!({ "exp": NOW_SECS as f64 - 29.5 }), true),
        (json!({ "exp": NOW_SECS as f64 - 30.5 }), false),
        (json!({ "exp": 0 }), false),
        (json!({ "exp": -1 }), false),
        (json!({ "exp": -1e300 }), false),
        (json!({ "exp": u64::MAX }), true),
        (json!({ "exp": 1e300 }), true),
        (json!({ "exp": (NOW_SECS + 60).to_string() }), false),
        (json!({ "exp": null }), false),
        (json!({ "exp": [NOW_SECS + 60] }), false),
        (json!({ "exp": true }), false),
        (json!({ "nbf": NOW_SECS }), true),
        (json!({ "nbf": NOW_SECS + 30 }), true),
        (json!({ "nbf": NOW_SECS + 31 }), false),
        (json!({ "nbf": -5 }), true),
        (json!({ "nbf": u64::MAX }), false),
        (json!({ "nbf": "soon" }), false),
        (json!({ "nbf": NOW_SECS - 5, "exp": NOW_SECS + 5, "iat": NOW_SECS + 500 }), true),
    ] {
        assert_eq!(is_good(&verifier, &HMAC.sign(&claims)), good, "{claims}");
    }
    let strict = HMAC.verifier().leeway(Duration::ZERO);
    assert!(!is_good(&strict, &HMAC.sign(&json!({ "exp": NOW_SECS }))));
    assert!(is_good(&strict, &HMAC.sign(&json!({ "exp": NOW_SECS + 1, "nbf": NOW_SECS }))));
    let endless = HMAC.verifier().leeway(Duration::MAX);
    assert!(is_good(&endless, &HMAC.sign(&json!({ "exp": 1, "nbf": u64::MAX }))));
}

#[test]
fn a_cached_token_expires_in_time() {
    let verifier = HMAC.verifier().leeway(Duration::ZERO);
    let token = HMAC.sign(&json!({ "nbf": NOW_SECS + 10, "exp": NOW_SECS + 20 }));
    for (after, good) in [(0, false), (9, false), (10, true), (19, true), (20, false), (15, true), (21, false)] {
        let now = Timestamp::from_secs(NOW_SECS + after);
        assert_eq!(verifier.verify_at(&token, now).claims.is_ok(), good, "after {after} s");
    }
}

#[test]
fn issuer_and_audience_must_be_ours() {
    let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let verifier = HMAC.verifier().issuers(list(&["https://a", "https://b"])).audiences(list(&["api", "web"]));
    for (claims, good) in [
        (json!({ "iss": "https://a", "aud": "api" }), true),
        (json!({ "iss": "https://b", "aud": ["other", "web"] }), true),
        (json!({ "iss": "https://c", "aud": "api" }), false),
        (json!({ "iss": "https://a/", "aud": "api" }), false),
        (json!({ "iss": "https://a", "aud": "other" }), false),
        (json!({ "iss": "https://a", "aud": ["other"] }), false),
        (json!({ "iss": "https://a", "aud": [] }), false),
        (json!({ "iss": "https://a", "aud": 5 }), false),
        (json!({ "iss": "https://a", "aud": { "api": "api" } }), false),
        (json!({ "iss": "https://a" }), false),
        (json!({ "aud": "api" }), false),
        (json!({}), false),
    ] {
        assert_eq!(is_good(&verifier, &HMAC.sign(&claims)), good, "{claims}");
    }
    assert!(is_good(&HMAC.verifier(), &HMAC.sign(&json!({ "iss": "anyone", "aud": ["anyone"] }))));
}

#[test]
fn a_key_is_chosen_by_its_name() {
    let named = |pair: &'static Pair, name: &str| (pair, json!({ "kid": name }));
    let set = jwks(&[named(&RSA, "one"), named(&OTHER_RSA, "two"), named(&EC, "three")], &[]).unwrap();
    let token = |pair: &Pair, header: Value| {
        let mut header = header;
        header["alg"] = pair.algorithm.name().into();
        sign(&header, &json!({ "sub": "ann" }), pair)
    };
    for (pair, header, good) in [
        (&*RSA, json!({ "kid": "one" }), true),
        (&*OTHER_RSA, json!({ "kid": "two" }), true),
        (&*EC, json!({ "kid": "three" }), true),
        (&*RSA, json!({ "kid": "two" }), false),
        (&*RSA, json!({ "kid": "three" }), false),
        (&*EC, json!({ "kid": "one" }), false),
        (&*RSA, json!({ "kid": "unheard of" }), false),
        (&*RSA, json!({}), true),
        (&*OTHER_RSA, json!({}), true),
        (&*EC, json!({}), true),
        (&*ED, json!({}), false),
        (&*RSA, json!({ "kid": 5 }), false),
    ] {
        assert_eq!(is_good(&set, &token(pair, header.clone())), good, "{} {header}", pair.algorithm.name());
    }
    // Keys without an id fit every id.
    assert!(is_good(&jwks(&[(&RSA, json!({}))], &[]).unwrap(), &token(&RSA, json!({ "kid": "any" }))));
}

#[test]
fn only_keys_for_the_configured_algorithms_are_used() {
    let token = RSA.sign(&json!({ "sub": "ann" }));
    for (more, good) in [
        (json!({ "alg": "RS256", "use": "sig", "key_ops": ["verify"] }), true),
        (json!({ "key_ops": ["sign", "verify"] }), true),
        (json!({ "alg": "RS512" }), false),
        (json!({ "alg": "PS256" }), false),
        (json!({ "alg": 5 }), false),
        (json!({ "use": "enc" }), false),
        (json!({ "key_ops": ["encrypt"] }), false),
        (json!({ "key_ops": "verify" }), false),
        (json!({ "n": "AQAB" }), false),
        (json!({ "n": "not base64!" }), false),
        (json!({ "kty": "what" }), false),
    ] {
        // The key beside it keeps the set usable.
        let set = jwks(&[(&RSA, more.clone()), (&EC, json!({}))], &[]).unwrap();
        assert_eq!(is_good(&set, &token), good, "{more}");
    }
    let set = [(&*RSA, json!({})), (&*EC, json!({}))];
    assert!(is_good(&jwks(&set, &[Algorithm::Rs256]).unwrap(), &token));
    assert!(!is_good(&jwks(&set, &[Algorithm::Es256]).unwrap(), &token));
    assert!(jwks(&set, &[Algorithm::EdDsa]).is_err());
}

#[test]
fn keys_that_are_short_or_broken_are_not_used() {
    for (pair, more) in [
        (&*ED, json!({ "x": URL_SAFE_NO_PAD.encode([1; 31]) })),
        (&*ED, json!({ "x": URL_SAFE_NO_PAD.encode([1; 33]) })),
        (&*ED, json!({ "x": "" })),
        (&*EC, json!({ "x": URL_SAFE_NO_PAD.encode([1; 32]), "y": URL_SAFE_NO_PAD.encode([1; 32]) })),
        (&*EC, json!({ "crv": "P-384" })),
        (&*EC, json!({ "y": null })),
        (&*HMAC, json!({ "k": URL_SAFE_NO_PAD.encode([1; 31]) })),
        (&*RSA, json!({ "n": URL_SAFE_NO_PAD.encode([255; 255]) })),
        (&*RSA, json!({ "n": URL_SAFE_NO_PAD.encode([255; 513]) })),
    ] {
        assert!(jwks(&[(pair, more.clone())], &[]).is_err(), "{more}");
    }
}

#[test]
fn a_key_file_that_cannot_be_used_is_named_with_the_fix() {
    let problem = |contents: &[u8], algorithms: &[Algorithm]| {
        Verifier::from_key("key.pem", contents, algorithms).err().map(|error| error.to_string()).unwrap_or_default()
    };
    let private = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap().serialize_pem();
    let p384 = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap().public_key_pem();
    let unusable = "key.pem holds a public key that cannot be used: use RSA with 2048 to 4096 bits, P-256 or Ed25519";
    let no_public = "key.pem holds no public key: name a file that begins with BEGIN PUBLIC KEY";
    for (contents, algorithms, expected) in [
        (
            private.as_bytes(),
            [Algorithm::Es256],
            "key.pem holds a private key: keep it with the issuer, and name its public half",
        ),
        (p384.as_bytes(), [Algorithm::Es256], unusable),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", [Algorithm::Es256], unusable),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", [Algorithm::Es256], no_public),
        (
            SECRET,
            [Algorithm::Rs256],
            "key.pem holds no public key in PEM: name a file that begins with BEGIN PUBLIC KEY",
        ),
        (
            b"hunter2\n",
            [Algorithm::Hs256],
            "key.pem holds a secret of less than 32 bytes, which can be guessed: make one with `openssl rand -hex 32`",
        ),
    ] {
        assert_eq!(problem(contents, &algorithms), expected);
    }
    assert_eq!(problem(&EC.public, &[]), "key.pem has no algorithm: set algorithms: [ES256]");
    assert!(!problem(SECRET, &[Algorithm::Hs256, Algorithm::Rs256]).is_empty());
}

#[test]
fn a_set_that_cannot_be_used_is_named_with_the_fix() {
    let problem = |contents: &str| {
        Verifier::from_jwks("keys.json", contents.as_bytes(), &[])
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    };
    assert!(problem("nonsense").starts_with("keys.json is not JSON: "));
    assert_eq!(problem("{}"), "keys.json has no list `keys`: name a JWKS file, or a PEM file as key_file");
    assert_eq!(
        problem("{\"keys\":[{\"kty\":\"EC\"},5]}"),
        "keys.json has no sound key to verify HS256, RS256, ES256, EdDSA with: \
         add one, of RSA with 2048 to 4096 bits, P-256, Ed25519 or oct"
    );
    let many = json!({ "keys": vec![HMAC.jwk.clone(); 33] }).to_string();
    assert_eq!(problem(&many), "keys.json has more than 32 keys: remove those that are out of use");
}

#[test]
fn the_line_end_of_a_secret_is_not_part_of_it() {
    let token = HMAC.sign(&json!({ "sub": "ann" }));
    for end in [&b""[..], b"\n", b"\r\n"] {
        let verifier = Verifier::from_key("secret", &[SECRET, end].concat(), &[Algorithm::Hs256]).unwrap();
        assert!(is_good(&verifier, &token));
    }
    // In binary contents, the last byte is part of the secret.
    let bytes = [&[0xff; 40][..], b"\n"].concat();
    let verifier = Verifier::from_key("secret", &bytes, &[Algorithm::Hs256]).unwrap();
    assert!(is_good(&verifier, &hmac_pair(&bytes).sign(&json!({}))));
}

#[test]
fn keys_are_read_from_files() {
    let folder = tempfile::tempdir().unwrap();
    let token = ED.sign(&json!({ "sub": "ann" }));
    let pem = folder.path().join("key.pem");
    std::fs::write(&pem, &ED.public).unwrap();
    assert!(is_good(&Verifier::from_key_file(&pem, &[Algorithm::EdDsa]).unwrap(), &token));
    let set = folder.path().join("keys.json");
    std::fs::write(&set, json!({ "keys": [ED.jwk] }).to_string()).unwrap();
    assert!(is_good(&Verifier::from_jwks_file(&set, &[]).unwrap(), &token));

    let missing = folder.path().join("missing.pem");
    let error = Verifier::from_key_file(&missing, &[Algorithm::EdDsa]).err().unwrap().to_string();
    assert!(error.starts_with(&format!("{} cannot be read: ", missing.display())), "{error}");
    std::fs::write(&pem, vec![b'x'; 1024 * 1024 + 1]).unwrap();
    let error = Verifier::from_key_file(&pem, &[Algorithm::Hs256]).err().unwrap().to_string();
    assert!(error.ends_with("is longer than 1048576 bytes: name a file with keys and nothing else"), "{error}");
}

#[test]
fn claims_are_read_as_text() {
    let token = HMAC.sign(&json!({
        "sub": "ann", "id": 42, "big": u64::MAX, "share": 0.5, "admin": true, "guest": false, "empty": "",
        "none": null, "list": ["a"], "realm": { "plan": "gold", "deep": { "er": 1 } },
        "realm.literal": "first", "https://example.com/claims": { "plan": "silver" }, "both.ways": "literal",
        "both": { "ways": "nested" },
    }));
    let claims = HMAC.verifier().verify_at(&token, NOW).claims.unwrap();
    for (name, expected) in [
        ("sub", Some("ann")),
        ("id", Some("42")),
        ("big", Some("18446744073709551615")),
        ("share", Some("0.5")),
        ("admin", Some("true")),
        ("guest", Some("false")),
        ("empty", Some("")),
        ("none", None),
        ("list", None),
        ("list.0", None),
        ("realm", None),
        ("realm.plan", Some("gold")),
        ("realm.deep", None),
        ("realm.deep.er", Some("1")),
        ("realm.literal", Some("first")),
        ("https://example.com/claims.plan", Some("silver")),
        ("both.ways", Some("literal")),
        ("missing", None),
        ("sub.x", None),
        (".", None),
        ("", None),
    ] {
        assert_eq!(text(&claims, name).as_deref(), expected, "{name}");
    }
    assert_eq!(claims.map().len(), 14);
}

#[test]
fn a_subject_that_is_a_number_is_a_subject() {
    for subject in [json!(42), json!({ "id": 42 }), json!(["42"])] {
        assert!(is_good(&HMAC.verifier(), &HMAC.sign(&json!({ "sub": subject }))), "{subject}");
    }
}

#[test]
fn a_payload_that_is_not_an_object_is_refused() {
    for payload in [json!([]), json!("sub"), json!(5), json!(null)] {
        assert!(!is_good(&HMAC.verifier(), &HMAC.sign(&payload)), "{payload}");
    }
    let nested = format!("{{\"a\":{}{}}}", "[".repeat(5_000), "]".repeat(5_000));
    let message = format!("{}.{}", URL_SAFE_NO_PAD.encode(r#"{"alg":"HS256"}"#), URL_SAFE_NO_PAD.encode(nested));
    let signature = jsonwebtoken::crypto::sign(message.as_bytes(), &HMAC.private, Signing::HS256).unwrap();
    assert!(!is_good(&HMAC.verifier(), &format!("{message}.{signature}")));
}

#[test]
fn a_token_beyond_the_bound_is_refused() {
    let of_length = |padding: usize| HMAC.sign(&json!({ "pad": "x".repeat(padding) }));
    let long = of_length(11_900);
    assert!(long.len() <= MAX_TOKEN_BYTES && is_good(&HMAC.verifier(), &long));
    let longer = of_length(12_300);
    assert!(longer.len() > MAX_TOKEN_BYTES && !is_good(&HMAC.verifier(), &longer));
}

#[test]
fn a_failure_has_its_reason() {
    let list = |name: &str| vec![name.to_owned()];
    let set = jwks(&[(&RSA, json!({ "kid": "one" })), (&HMAC, json!({ "kid": "two" }))], &[]).unwrap();
    let set = set.issuers(list("https://a")).audiences(list("api"));
    let good = json!({ "iss": "https://a", "aud": "api" });
    let with = |more: Value| {
        let mut claims = good.clone();
        claims.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        HMAC.sign(&claims)
    };
    let message = unsigned(&json!({ "alg": "HS256" }), &good);
    for (token, expected) in [
        (with(json!({})), None),
        (String::new(), Some(TokenError::Malformed)),
        ("a.b".to_owned(), Some(TokenError::Malformed)),
        (format!("{message}.?"), Some(TokenError::Malformed)),
        (sign(&json!({ "alg": "HS256", "crit": ["b64"] }), &good, &HMAC), Some(TokenError::Malformed)),
        (with(json!({ "exp": "soon" })), Some(TokenError::Malformed)),
        ("x".repeat(MAX_TOKEN_BYTES + 1), Some(TokenError::Malformed)),
        (format!("{}.", unsigned(&json!({ "alg": "none" }), &good)), Some(TokenError::WrongAlgorithm)),
        (sign(&json!({ "alg": "RS512" }), &good, &RSA), Some(TokenError::WrongAlgorithm)),
        (EC.sign(&good), Some(TokenError::WrongAlgorithm)),
        (sign(&json!({ "alg": "RS256", "kid": "three" }), &good, &RSA), Some(TokenError::UnknownKey)),
        (OTHER_RSA.sign(&good), Some(TokenError::BadSignature)),
        (format!("{message}.AAAA"), Some(TokenError::BadSignature)),
        (with(json!({ "exp": NOW_SECS - 60 })), Some(TokenError::Expired)),
        (with(json!({ "nbf": NOW_SECS + 60 })), Some(TokenError::NotYetValid)),
        (with(json!({ "iss": "https://b" })), Some(TokenError::WrongIssuer)),
        (with(json!({ "aud": "web" })), Some(TokenError::WrongAudience)),
    ] {
        for _ in 0..2 {
            assert_eq!(set.verify_at(&token, NOW).claims.err(), expected, "{token}");
        }
    }
}

#[test]
fn a_token_is_verified_once_a_minute() {
    let signatures = |verifier: &Verifier, token: &str, after: u64| {
        verifier.verify_at(token, Timestamp::from_secs(NOW_SECS + after)).signatures
    };
    for (token, first, later) in [
        (RSA.sign(&json!({})), 1, 0),
        (OTHER_RSA.sign(&json!({})), 1, 1),
        (RSA.sign(&json!({ "exp": 1 })), 1, 0),
        (RSA.sign(&json!({ "nbf": NOW_SECS + 100 })), 1, 0),
        ("not.a.token".to_owned(), 0, 0),
    ] {
        let verifier = RSA.verifier();
        assert_eq!(signatures(&verifier, &token, 0), first);
        assert_eq!(signatures(&verifier, &token, 1), 0);
        assert_eq!(signatures(&verifier, &token, 59), 0);
        assert_eq!(signatures(&verifier, &token, 60), later, "{token}");
        // Other keys do not share the cache.
        assert_eq!(signatures(&RSA.verifier(), &token, 1), first);
    }
}

#[test]
fn a_token_that_is_not_valid_yet_becomes_valid_in_time() {
    let verifier = HMAC.verifier().leeway(Duration::ZERO);
    let token = HMAC.sign(&json!({ "nbf": NOW_SECS + 5 }));
    for (after, expected) in [(0, Some(TokenError::NotYetValid)), (4, Some(TokenError::NotYetValid)), (5, None)] {
        let now = Timestamp::from_secs(NOW_SECS + after);
        assert_eq!(verifier.verify_at(&token, now).claims.err(), expected, "after {after} s");
    }
}

#[test]
fn a_token_without_a_key_name_is_verified_with_a_few_keys_only() {
    let pairs: Vec<Pair> = (0..8).map(|number| hmac_pair(&[number; 32])).collect();
    let named: Vec<_> = (0..).zip(&pairs).map(|(number, pair)| (pair, json!({ "kid": format!("{number}") }))).collect();
    let set = jwks(&named, &[]).unwrap();
    for (number, pair) in pairs.iter().enumerate() {
        let found = set.verify_at(&pair.sign(&json!({ "sub": "ann" })), NOW);
        assert_eq!(found.claims.is_ok(), number < MAX_KEYS_TRIED, "{number}");
        assert_eq!(usize::from(found.signatures), (number + 1).min(MAX_KEYS_TRIED));
        let header = json!({ "alg": "HS256", "kid": number.to_string() });
        let found = set.verify_at(&sign(&header, &json!({ "sub": "ann" }), pair), NOW);
        assert!(found.claims.is_ok() && found.signatures == 1, "{number}");
    }
    let unnamed: Vec<_> = pairs.iter().map(|pair| (pair, json!({}))).collect();
    assert!(jwks(&unnamed[..4], &[]).is_ok());
    assert_eq!(
        jwks(&unnamed[..5], &[]).err().unwrap().to_string(),
        "keys.json has more than 4 keys without `kid` for HS256: \
         give each key a `kid`, or remove those that are out of use"
    );
}

#[test]
fn keys_may_begin_with_zeros() {
    let component = |name: &str| {
        let bytes = URL_SAFE_NO_PAD.decode(RSA.jwk[name].as_str().unwrap()).unwrap();
        URL_SAFE_NO_PAD.encode([&[0; 2][..], &bytes].concat())
    };
    let set = jwks(&[(&RSA, json!({ "n": component("n"), "e": component("e") }))], &[]).unwrap();
    assert!(is_good(&set, &RSA.sign(&json!({ "sub": "ann" }))));
}

proptest! {
    #[test]
    fn garbage_never_verifies(token in "[A-Za-z0-9._=-]{0,80}|.{0,40}") {
        for pair in pairs() {
            prop_assert!(pair.verifier().verify_at(&token, NOW).claims.is_err());
        }
    }

    #[test]
    fn a_token_with_a_changed_byte_never_verifies(which in 0_usize..4, at: prop::sample::Index, byte in 33_u8..127) {
        let pair = pairs()[which];
        let mut token = pair.sign(&json!({ "sub": "ann" })).into_bytes();
        let at = at.index(token.len());
        prop_assume!(token[at] != byte);
        token[at] = byte;
        prop_assert!(pair.verifier().verify_at(&String::from_utf8(token).unwrap(), NOW).claims.is_err());
    }

    #[test]
    fn any_signed_header_and_payload_never_panic(header in ".{0,40}", payload in prop::collection::vec(any::<u8>(), 0..60)) {
        let message = format!("{}.{}", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(payload));
        let signature = jsonwebtoken::crypto::sign(message.as_bytes(), &HMAC.private, Signing::HS256).unwrap();
        _ = HMAC.verifier().verify_at(&format!("{message}.{signature}"), NOW);
    }
}
