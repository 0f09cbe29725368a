//! Load on a limiter during an outage of its Redis, and the decisions.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tollgate::redis::RedisLimiter;
use tollgate::{Decision, Source};

/// The pause between two requests of one task: long enough for 64 tasks to leave a core to the servers.
const PAUSE: Duration = Duration::from_millis(2);

/// The longest that a recovery may take: probes are at most a second apart, and servers need time to start.
pub(crate) const RECOVERY: Duration = Duration::from_secs(8);

/// Tasks that send requests until the test ends them.
pub(crate) struct Load {
    tasks: Vec<JoinHandle<Tally>>,
    shared: Arc<Shared>,
}

struct Shared {
    ended: AtomicBool,
    admitted: AtomicU64,
    /// The number of decisions of each task.
    answers: Box<[AtomicU64]>,
}

/// The decisions of all tasks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) admitted: u64,
    pub(crate) by_store: u64,
    pub(crate) by_cache: u64,
    pub(crate) by_local: u64,
    pub(crate) by_policy: u64,
    /// Denials without `retry_after`.
    pub(crate) without_retry: u64,
}

impl Load {
    /// Starts that many tasks, each with the key that `key_of` returns for it.
    pub(crate) fn begin(limiter: &RedisLimiter, tasks: usize, key_of: impl Fn(usize) -> String) -> Self {
        let answers = (0..tasks).map(|_| AtomicU64::new(0)).collect();
        let shared = Arc::new(Shared { ended: AtomicBool::new(false), admitted: AtomicU64::new(0), answers });
        let run = |task| tokio::spawn(send_requests(limiter.clone(), key_of(task), task, shared.clone()));
        Self { tasks: (0..tasks).map(run).collect(), shared }
    }

    /// Returns the number of requests admitted so far.
    pub(crate) fn admitted(&self) -> u64 {
        self.shared.admitted.load(Ordering::SeqCst)
    }

    /// Waits until every task has a decision on a request that it sent after this call. During an outage, this shows
    /// that no request waits for the server to come back.
    pub(crate) async fn until_all_answered(&self) {
        let counts = || self.shared.answers.iter().map(|count| count.load(Ordering::SeqCst));
        let before: Vec<u64> = counts().collect();
        let begin = Instant::now();
        // The first decision may be on a request from before the call.
        while counts().zip(&before).any(|(now, before)| now < before + 2) {
            assert!(begin.elapsed() < RECOVERY, "a task waits for its answer");
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Ends the tasks, after a decision on the last request of each.
    pub(crate) async fn end(self) -> Tally {
        self.shared.ended.store(true, Ordering::SeqCst);
        let mut all = Tally::default();
        for task in self.tasks {
            let tally = timeout(RECOVERY, task).await.expect("every request is decided");
            all.add(&tally.expect("no task panics"));
        }
        all
    }
}

async fn send_requests(limiter: RedisLimiter, key: String, task: usize, shared: Arc<Shared>) -> Tally {
    let mut tally = Tally::default();
    while !shared.ended.load(Ordering::SeqCst) {
        let decision = limiter.check(&key).await;
        tally.count(&decision);
        shared.answers[task].fetch_add(1, Ordering::SeqCst);
        if decision.is_allowed() {
            shared.admitted.fetch_add(1, Ordering::SeqCst);
        }
        sleep(PAUSE).await;
    }
    tally
}

impl Tally {
    fn count(&mut self, decision: &Decision) {
        self.admitted += u64::from(decision.is_allowed());
        self.without_retry += u64::from(!decision.is_allowed() && decision.retry_after().is_none());
        *match decision.source() {
            Source::Store => &mut self.by_store,
            Source::DenialCache => &mut self.by_cache,
            Source::Local => &mut self.by_local,
            Source::Policy => &mut self.by_policy,
            other => panic!("nothing here is answered by {other:?}"),
        } += 1;
    }

    fn add(&mut self, other: &Self) {
        self.admitted += other.admitted;
        self.by_store += other.by_store;
        self.by_cache += other.by_cache;
        self.by_local += other.by_local;
        self.by_policy += other.by_policy;
        self.without_retry += other.without_retry;
    }
}

/// Sends requests until the decision is as expected, which it must be within the limit.
#[track_caller]
pub(crate) fn until(
    limiter: &RedisLimiter,
    key: &str,
    limit: Duration,
    is_expected: impl Fn(&Decision) -> bool,
) -> impl Future<Output = Decision> {
    let caller = std::panic::Location::caller();
    async move {
        let begin = Instant::now();
        loop {
            let decision = limiter.check(key).await;
            if is_expected(&decision) {
                return decision;
            }
            assert!(begin.elapsed() < limit, "{caller}: still {decision:?} after {limit:?}");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Sends requests until the store decides again.
#[track_caller]
pub(crate) fn until_back(limiter: &RedisLimiter, key: &str) -> impl Future<Output = ()> {
    let back = until(limiter, key, RECOVERY, |decision| decision.source() == Source::Store);
    async {
        let _ = back.await;
    }
}

/// Waits until the store counts as available, without sending requests.
#[track_caller]
pub(crate) fn until_available(limiter: &RedisLimiter) -> impl Future<Output = ()> {
    let caller = std::panic::Location::caller();
    async move {
        let begin = Instant::now();
        while let Some(why) = limiter.why_unavailable() {
            assert!(begin.elapsed() < RECOVERY, "{caller}: still {why}");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Sends requests until the store is unavailable.
#[track_caller]
pub(crate) fn until_gone(limiter: &RedisLimiter, key: &str) -> impl Future<Output = ()> {
    let gone = until(limiter, key, RECOVERY, |decision| {
        matches!(decision.source(), Source::Local | Source::Policy) && !limiter.is_store_available()
    });
    async {
        let _ = gone.await;
    }
}
