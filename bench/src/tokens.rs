//! Tokens in `bench rules`: the cost of an invalid token on a denied request, and the cost of verifying one.

use std::hint::black_box;
use std::time::Duration;

use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, HeaderValue};
use tollgate_config::RuleFile;
use tollgate_rules::{Facts, Gate, Outcome};

use crate::clock::thread_time;
use crate::race::{self, Rounds, Times, per_decision};
use crate::report::{Results, Table};

/// More invalid tokens than a gate caches, so that each is verified every time.
const TOKENS: usize = 4096;

/// Public keys without private keys: an odd number of 2048 bits, the base points of the curves, a secret.
const KEYS: &str = r#"{"keys":[
{"kty":"RSA","kid":"RS256","e":"AQAB","n":"$N"},
{"kty":"EC","crv":"P-256","kid":"ES256","x":"axfR8uEsQkf4vOblY6RA8ncDfYEt6zOg9KE5RdiYwpY","y":"T-NC4v4af5uO5-tKfA-eFivOM1drMV7Oy7ZAaDe_UfU"},
{"kty":"OKP","crv":"Ed25519","kid":"EdDSA","x":"WGZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmZmY"},
{"kty":"oct","kid":"HS256","k":"MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY"}]}"#;

/// Algorithms, with the length of their signatures in base64.
const ALGORITHMS: [(&str, usize); 4] = [("RS256", 342), ("ES256", 86), ("EdDSA", 86), ("HS256", 43)];

const PER_USER: &str = "{ name: per-user, key: 'jwt:sub', algorithm: token_bucket, capacity: 1000000000, refill: 1/s }";
const PER_IP: &str = "{ name: per-ip, key: ip, algorithm: token_bucket, capacity: 1, refill: 1/h }";

struct Contender {
    gate: Gate,
    requests: Vec<HeaderMap>,
}

impl Contender {
    fn new(limits: &str, algorithm: Option<(&str, usize)>) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        // The first digit makes the number one of 2048 bits, and the last an odd one.
        std::fs::write(folder.path().join("keys.json"), KEYS.replace("$N", &format!("x{}", "Q".repeat(341))))?;
        let path = folder.path().join("tollgate.yaml");
        std::fs::write(&path, format!("jwt: {{ jwks_file: keys.json }}\nlimits: [{limits}]\n"))?;
        let gate = Gate::in_memory(RuleFile::load(&path)?.compile()?)?;
        let request = |number| match algorithm {
            Some(algorithm) => {
                let value = HeaderValue::try_from(format!("Bearer {}", token(algorithm, number)))?;
                anyhow::Ok(HeaderMap::from_iter([(AUTHORIZATION, value)]))
            }
            None => Ok(HeaderMap::new()),
        };
        Ok(Self { gate, requests: (0..TOKENS).map(request).collect::<Result<_, _>>()? })
    }

    fn ask(&self, headers: &HeaderMap) -> Option<Outcome> {
        let facts = Facts::new("GET", "/").headers(headers).peer([192, 0, 2, 1].into());
        self.gate.decide_now(black_box(&facts))
    }

    /// Nanoseconds for each request.
    fn turn(&self, slice: Duration) -> f64 {
        let (before, mut checked) = (thread_time(), 0);
        loop {
            for headers in &self.requests {
                black_box(self.ask(headers));
                checked += 1;
                // A verification takes a thousand times as long as a denial.
                if checked % 64 == 0 && thread_time() - before > slice {
                    return per_decision(thread_time() - before, checked);
                }
            }
        }
    }
}

/// A token that does not verify, like no other of its algorithm.
fn token((algorithm, signature): (&str, usize), number: usize) -> String {
    let header = base64(format!(r#"{{"alg":"{algorithm}","kid":"{algorithm}"}}"#).as_bytes());
    let claims = base64(format!(r#"{{"sub":"{number:09}"}}"#).as_bytes());
    format!("{header}.{claims}.{}", "B".repeat(signature - 1) + "A")
}

/// Of a text whose length three divides, or with what is left over as zeros.
fn base64(text: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut out = String::new();
    for chunk in text.chunks(3) {
        let bits = chunk.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        let digits = (0..=chunk.len()).map(|place| DIGITS[(bits >> (18 - 6 * place) & 63) as usize] as char);
        out.extend(digits);
    }
    out
}

pub(crate) fn run(rounds: Rounds, results: &mut Results) -> anyhow::Result<()> {
    let both = format!("{PER_USER}, {PER_IP}");
    let field = [
        ("denied, without a token", "denied_none_ns", Contender::new(&both, None)?),
        ("denied, with a bad RS256 token", "denied_rs256_ns", Contender::new(&both, Some(ALGORITHMS[0]))?),
        ("denied, with a bad ES256 token", "denied_es256_ns", Contender::new(&both, Some(ALGORITHMS[1]))?),
        ("admitted, RS256 verified", "verify_rs256_ns", Contender::new(PER_USER, Some(ALGORITHMS[0]))?),
        ("admitted, ES256 verified", "verify_es256_ns", Contender::new(PER_USER, Some(ALGORITHMS[1]))?),
        ("admitted, EdDSA verified", "verify_eddsa_ns", Contender::new(PER_USER, Some(ALGORITHMS[2]))?),
        ("admitted, HS256 verified", "verify_hs256_ns", Contender::new(PER_USER, Some(ALGORITHMS[3]))?),
    ];
    for (name, _, contender) in &field {
        // The first takes the only unit of the address.
        black_box(contender.ask(&contender.requests[0]));
        let outcome = contender.ask(&contender.requests[1]);
        let is_verified = outcome.as_ref().map(|outcome| (outcome.is_allowed(), outcome.signatures_verified()));
        anyhow::ensure!(matches!(is_verified, Some((false, 0) | (true, 1))), "{name}: {outcome:?}");
    }
    let mut times: Vec<Times> = field.iter().map(|(name, ..)| Times::new(name)).collect();
    let Ok(()) = race::take_turns::<std::convert::Infallible>(rounds.count, field.len(), |_, turn| {
        times[turn].push(field[turn].2.turn(rounds.slice));
        Ok(())
    });
    let mut table = Table::new("Tokens: from the facts of a request to its outcome", ["", "ns"]);
    for (times, (_, name, _)) in times.iter().zip(&field) {
        table.row([times.name.to_owned(), format!("{:.0}", times.median())]);
        results.quantity(*name, times.median());
    }
    table.print();
    results.ratio("bad_rs256_vs_none", times[1].median() / times[0].median());
    results.ratio("bad_es256_vs_none", times[2].median() / times[0].median());
    Ok(())
}
