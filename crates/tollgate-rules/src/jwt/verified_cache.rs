//! Cache of verified tokens.
//!
//! A client sends the same token with every request, and verifying a signature takes far longer than the rest of a
//! decision. A token is compared in full, so a similar token is never accepted; the hash, keyed with a secret of the
//! process, only selects the set. Only tokens with a valid signature are kept, so nobody can evict them without having
//! as many. The times of a token are not checked here.

use tollgate::internal::Mutex;

use super::claims::Claims;

/// Together with [`WAYS`], room for 2,048 tokens: at 4 KiB each, and more than that again for their claims, at most
/// about 30 MiB. Each set has its own lock, so threads rarely contend.
const SETS: usize = 512;

/// The number of tokens per set.
const WAYS: usize = 4;

/// Tokens of the usual issuers have one or two kilobytes. A longer one is verified every time.
const MAX_CACHED_BYTES: usize = 4 * 1024;

pub(super) struct VerifiedCache {
    sets: Box<[Mutex<Set>]>,
    secret: ahash::RandomState,
}

#[derive(Default)]
struct Set {
    tokens: [Option<Token>; WAYS],
    /// The index of the oldest entry.
    oldest: usize,
}

struct Token {
    /// Compared first, so that the time of a comparison reveals nothing about the bytes of a token.
    fingerprint: u64,
    text: Box<str>,
    claims: Claims,
}

impl Default for VerifiedCache {
    fn default() -> Self {
        let sets = std::iter::repeat_with(Mutex::default).take(SETS).collect();
        Self { sets, secret: ahash::RandomState::new() }
    }
}

impl VerifiedCache {
    pub(super) fn get(&self, token: &str) -> Option<Claims> {
        let fingerprint = self.secret.hash_one(token);
        let set = self.set(fingerprint).lock();
        let mut tokens = set.tokens.iter().flatten();
        tokens.find(|known| known.fingerprint == fingerprint && *known.text == *token).map(|known| known.claims.clone())
    }

    pub(super) fn put(&self, token: &str, claims: Claims) {
        if token.len() > MAX_CACHED_BYTES {
            return;
        }
        let fingerprint = self.secret.hash_one(token);
        let known = Token { fingerprint, text: token.into(), claims };
        let mut set = self.set(fingerprint).lock();
        let at = set.oldest;
        set.tokens[at] = Some(known);
        set.oldest = (at + 1) % WAYS;
    }

    fn set(&self, fingerprint: u64) -> &Mutex<Set> {
        &self.sets[fingerprint as usize % SETS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(text: &str) -> Claims {
        Claims::read(format!("{{\"sub\":\"{text}\"}}").as_bytes()).unwrap()
    }

    #[test]
    fn a_token_is_recognised_by_all_its_bytes() {
        let verified_cache = VerifiedCache::default();
        verified_cache.put("head.body.signature", claims("ann"));
        assert_eq!(verified_cache.get("head.body.signature").unwrap().map()["sub"], "ann");
        for other in ["head.body.signaturf", "head.body.signatur", "head.body.signature ", "Head.body.signature", ""] {
            assert!(verified_cache.get(other).is_none(), "{other}");
        }
    }

    #[test]
    fn a_full_set_keeps_the_newest_tokens() {
        let verified_cache = VerifiedCache::default();
        let all: Vec<_> = (0..3 * SETS * WAYS).map(|number| format!("token {number}")).collect();
        for token in &all {
            verified_cache.put(token, claims(token));
            assert_eq!(verified_cache.get(token).unwrap().map()["sub"], *token);
        }
        let kept = all.iter().filter(|token| verified_cache.get(token).is_some()).count();
        assert!(kept <= SETS * WAYS && kept > SETS * WAYS / 2, "{kept}");
    }

    #[test]
    fn a_long_token_is_not_kept() {
        let verified_cache = VerifiedCache::default();
        for (length, kept) in [(MAX_CACHED_BYTES, true), (MAX_CACHED_BYTES + 1, false)] {
            let token = "x".repeat(length);
            verified_cache.put(&token, claims("ann"));
            assert_eq!(verified_cache.get(&token).is_some(), kept, "{length}");
        }
    }
}
