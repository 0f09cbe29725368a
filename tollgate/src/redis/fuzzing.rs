//! The scanner and the readers of replies, for the fuzzer.

use std::sync::{Arc, LazyLock};

use redis::Value;
use smallvec::SmallVec;

use super::bounds::{ReplyBounds, Scanner};
use super::cluster::View;
use super::dial::Address;
use super::node::read_master;
use super::script::{Batch, ScriptHit, ScriptHits, ScriptRequest, Terms};
use super::shared_state::{StatePart, read_nodes, read_reports};
use super::stats::ServerMemory;
use super::{StoreError, rule_sets, shared_reservations, stores};
use crate::algorithm::Algorithm;
use crate::units::{HOUR, MINUTE};
use crate::{FixedWindow, LeakyBucket, Limit, Rate, SlidingWindowCounter, SlidingWindowLog, TokenBucket};

/// The bounds of a connection to a sentinel, which an input of the fuzzer can exceed.
const BOUNDS: ReplyBounds = ReplyBounds::SENTINELS;

/// Follows the framing of replies up to the first one that exceeds a bound.
pub struct ReplyScanner(Scanner);

impl Default for ReplyScanner {
    fn default() -> Self {
        Self(Scanner::new(BOUNDS))
    }
}

impl ReplyScanner {
    /// Scans the next bytes, and returns the number of replies that end in them, or why the connection is closed.
    ///
    /// # Errors
    ///
    /// If a reply exceeds a bound or is not RESP2.
    pub fn scan(&mut self, bytes: &[u8]) -> Result<u64, String> {
        self.0.scan(bytes).map_err(|error| error.to_string())
    }
}

/// Limits of every algorithm.
static LIMITS: LazyLock<Vec<Arc<Terms>>> = LazyLock::new(|| {
    let second = Rate::per_second(1);
    let algorithms: [Algorithm; 8] = [
        TokenBucket::new(10, second).into(),
        TokenBucket::new(10, Rate::new(3, 7 * MINUTE)).into(),
        TokenBucket::new(10, Rate::new(4, MINUTE)).interval().into(),
        LeakyBucket::new(10, second).queue(HOUR).into(),
        FixedWindow::new(10, MINUTE).into(),
        SlidingWindowLog::new(10, MINUTE).into(),
        SlidingWindowCounter::new(10, MINUTE).into(),
        SlidingWindowCounter::new(10, MINUTE).segments(6).into(),
    ];
    let limits = algorithms.into_iter().filter_map(|algorithm| Limit::new("limit", algorithm).ok());
    limits.map(|limit| Arc::new(Terms::new(limit.compiled(), 10, Vec::new()))).collect()
});

/// Reads one reply in every way in which this crate reads one, and returns whether any of them succeeds. Nothing is sent.
pub fn read_reply(bytes: &[u8]) -> bool {
    let Ok(reply) = redis::parse_redis_value(bytes) else { return false };
    let known = Address::tcp("10.0.0.1", 7000);
    let view = View::read(reply.clone(), &known);
    if let Ok(view) = &view {
        assert!(view.nodes() <= 1_000, "{} nodes", view.nodes());
    }
    let state = StatePart::read(reply.clone(), 0, 1 << 20);
    let others = [
        view.is_ok(),
        state.is_ok(),
        read_master(reply.clone()).is_ok(),
        read_nodes(reply.clone()).is_ok(),
        read_reports(reply.clone()).is_ok(),
        stores::read_beat(reply.clone()).is_some(),
        rule_sets::read_reply(reply.clone()).is_ok(),
        shared_reservations::read_secret(reply.clone()).is_ok(),
        ServerMemory::read(&reply).is_some(),
    ];
    let decisions = LIMITS.iter().map(|terms| read_decision(terms, &reply)).fold(false, |any, one| any | one);
    decisions | others.contains(&true)
}

/// Reads the replies to a batch of the small script and to one of the full script.
fn read_decision(terms: &Arc<Terms>, reply: &Value) -> bool {
    let hit = |key: &str| {
        let name = Arc::from(format!("rate_limit:{{limit|{key}}}").into_bytes());
        ScriptHit { terms: terms.clone(), siblings: Arc::from([]), name, cost: 1 }
    };
    let both = || ScriptHits::from_iter([hit("a"), hit("b")]);
    let batches = [
        vec![ScriptRequest::Take(both()), ScriptRequest::Take(ScriptHits::from_iter([hit("a")]))],
        vec![ScriptRequest::Peek(both()), ScriptRequest::Slice(hit("a"), SmallVec::from_slice(&[4, 2, 1]))],
        vec![ScriptRequest::Owe(hit("a"))],
    ];
    let mut is_read = false;
    for requests in batches {
        let mut batch = Batch::default();
        requests.iter().for_each(|request| batch.add(request));
        // What the worker asks first.
        let _ = batch.needs_full_script(reply);
        let replies: Result<Vec<_>, StoreError> = batch.replies(reply.clone());
        let Ok(replies) = replies else { continue };
        assert_eq!(replies.len(), requests.len());
        is_read = true;
        for (reply, request) in replies.iter().zip(&requests) {
            let Ok(reply) = reply else { continue };
            assert_eq!(reply.states.len(), request.hits().len());
            let _ = reply.settlement(&request.hits()[0]);
            for state in &reply.states {
                let _ = state.verdict(terms, reply.at, 1);
                let _ = terms.compiled.verdict_after(state.numbers(), reply.at.as_micros(), 1);
            }
        }
    }
    is_read
}
