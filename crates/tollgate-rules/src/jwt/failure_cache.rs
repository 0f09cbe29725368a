//! Cache of tokens whose signature was invalid.
//!
//! A client that keeps sending the same invalid token costs one verification per [`KEPT_FOR`]. Only a 128-bit hash of
//! each token is kept, keyed with secrets of the process, so nobody can construct a valid token that collides with an
//! invalid one. The entries belong to one set of keys, so replaced keys start with an empty cache.
//!
//! Not here: tokens with a valid signature. Their times are checked on every use.

use std::time::Duration;

use tollgate::Timestamp;
use tollgate::internal::Mutex;
use tollgate_http::TokenError;

/// Together with [`WAYS`], room for 1,024 tokens in 48 KiB. A flood of different invalid tokens evicts only invalid
/// ones.
const SETS: usize = 256;

/// The number of tokens per set.
const WAYS: usize = 4;

/// Long enough that a client which retries every second costs next to nothing, and short enough that a wrong entry
/// would not matter for long.
const KEPT_FOR: Duration = Duration::from_secs(60);

pub(super) struct FailureCache {
    sets: Box<[Mutex<Set>]>,
    secrets: [ahash::RandomState; 2],
}

#[derive(Default)]
struct Set {
    tokens: [Option<Entry>; WAYS],
    oldest: usize,
}

#[derive(Clone, Copy)]
struct Entry {
    hash: [u64; 2],
    error: TokenError,
    since: Timestamp,
}

impl Default for FailureCache {
    fn default() -> Self {
        let sets = std::iter::repeat_with(Mutex::default).take(SETS).collect();
        Self { sets, secrets: [ahash::RandomState::new(), ahash::RandomState::new()] }
    }
}

impl FailureCache {
    /// Returns the cached error of a token.
    pub(super) fn get(&self, token: &str, now: Timestamp) -> Option<TokenError> {
        let hash = self.hash(token);
        let set = self.set(hash).lock();
        let entry = set.tokens.iter().flatten().find(|entry| entry.hash == hash)?;
        // An entry from the future was added before the clock was set back, so its age is unknown.
        (entry.since <= now && now < entry.since.saturating_add(KEPT_FOR)).then_some(entry.error)
    }

    pub(super) fn put(&self, token: &str, error: TokenError, now: Timestamp) {
        let entry = Entry { hash: self.hash(token), error, since: now };
        let mut set = self.set(entry.hash).lock();
        let same = set.tokens.iter().position(|known| known.is_some_and(|known| known.hash == entry.hash));
        let at = same.unwrap_or(set.oldest);
        set.tokens[at] = Some(entry);
        if same.is_none() {
            set.oldest = (at + 1) % WAYS;
        }
    }

    fn hash(&self, token: &str) -> [u64; 2] {
        self.secrets.each_ref().map(|secret| secret.hash_one(token))
    }

    fn set(&self, hash: [u64; 2]) -> &Mutex<Set> {
        &self.sets[hash[0] as usize % SETS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_800_000_000);

    #[test]
    fn a_failure_is_kept_for_a_minute_and_not_before_it_happened() {
        let failed = FailureCache::default();
        failed.put("a.b.c", TokenError::BadSignature, NOW);
        assert_eq!(failed.get("a.b.c", NOW), Some(TokenError::BadSignature));
        assert_eq!(failed.get("a.b.d", NOW), None);
        assert_eq!(failed.get("a.b.c", NOW.saturating_add(Duration::from_secs(59))), Some(TokenError::BadSignature));
        assert_eq!(failed.get("a.b.c", NOW.saturating_add(KEPT_FOR)), None);
        assert_eq!(failed.get("a.b.c", Timestamp::from_secs(1_799_999_999)), None);
        failed.put("a.b.c", TokenError::WrongIssuer, NOW.saturating_add(KEPT_FOR));
        assert_eq!(failed.get("a.b.c", NOW.saturating_add(KEPT_FOR)), Some(TokenError::WrongIssuer));
    }

    #[test]
    fn the_number_of_failures_kept_is_bounded() {
        let failed = FailureCache::default();
        let all: Vec<_> = (0..3 * SETS * WAYS).map(|number| format!("token {number}")).collect();
        for token in &all {
            failed.put(token, TokenError::BadSignature, NOW);
            assert!(failed.get(token, NOW).is_some());
        }
        let kept = all.iter().filter(|token| failed.get(token, NOW).is_some()).count();
        assert!(kept <= SETS * WAYS && kept > SETS * WAYS / 2, "{kept}");
    }
}
