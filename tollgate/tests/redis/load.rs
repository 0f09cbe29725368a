//! Traffic on a limiter while something happens to its Redis, and what became of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tollgate::redis::RedisLimiter;
use tollgate::{Decision, Source};

/// Between two questions of one task: enough for 64 tasks to leave a core to the servers.
const PAUSE: Duration = Duration::from_millis(2);

/// The longest that coming back may take: probes are a second apart at most, and servers take their time.
pub(crate) const RECOVERY: Duration = Duration::from_secs(8);

/// Tasks that ask until the test ends them.
pub(crate) struct Load {
    tasks: Vec<JoinHandle<Tally>>,
    shared: Arc<Shared>,
}

struct Shared {
    ended: AtomicBool,
    admitted: AtomicU64,
    /// How often each task has been answered.
    answers: Box<[AtomicU64]>,
}

/// What the tasks were answered.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) admitted: u64,
    pub(crate) by_store: u64,
    pub(crate) by_cache: u64,
    pub(crate) by_local: u64,
    pub(crate) by_policy: u64,
    /// Denials that did not say when to come again.
    pub(crate) without_retry: u64,
}

impl Load {
    /// So many tasks, each on the key that `key_of` names for it.
    pub(crate) fn begin(limiter: &RedisLimiter, tasks: usize, key_of: impl Fn(usize) -> String) -> Self {
        let answers = (0..tasks).map(|_| AtomicU64::new(0)).collect();
        let shared = Arc::new(Shared { ended: AtomicBool::new(false), admitted: AtomicU64::new(0), answers });
        let run = |task| tokio::spawn(ask_on(limiter.clone(), key_of(task), task, shared.clone()));
        Self { tasks: (0..tasks).map(run).collect(), shared }
    }

    /// Admitted so far.
    pub(crate) fn admitted(&self) -> u64 {
        self.shared.admitted.load(Ordering::SeqCst)
    }

    /// Waits until every task has been answered a question that it asked after this call. Called while the server is
    /// gone, it shows that nobody waits for the server to come back.
    pub(crate) async fn until_all_answered(&self) {
        let counts = || self.shared.answers.iter().map(|count| count.load(Ordering::SeqCst));
        let before: Vec<u64> = counts().collect();
        let begin = Instant::now();
        // The first answer may be to a question from before the call.
        while counts().zip(&before).any(|(now, before)| now < before + 2) {
            assert!(begin.elapsed() < RECOVERY, "a task waits for its answer");
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Ends the tasks, each of which still has to be answered.
    pub(crate) async fn end(self) -> Tally {
        self.shared.ended.store(true, Ordering::SeqCst);
        let mut all = Tally::default();
        for task in self.tasks {
            let tally = timeout(RECOVERY, task).await.expect("every question is answered");
            all.add(&tally.expect("no task panics"));
        }
        all
    }
}

async fn ask_on(limiter: RedisLimiter, key: String, task: usize, shared: Arc<Shared>) -> Tally {
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

/// Asks until the answer is as wanted, which it has to be within the limit.
#[track_caller]
pub(crate) fn until(
    limiter: &RedisLimiter,
    key: &str,
    limit: Duration,
    wanted: impl Fn(&Decision) -> bool,
) -> impl Future<Output = Decision> {
    let caller = std::panic::Location::caller();
    async move {
        let begin = Instant::now();
        loop {
            let decision = limiter.check(key).await;
            if wanted(&decision) {
                return decision;
            }
            assert!(begin.elapsed() < limit, "{caller}: still {decision:?} after {limit:?}");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Asks until the store answers again.
#[track_caller]
pub(crate) fn until_back(limiter: &RedisLimiter, key: &str) -> impl Future<Output = ()> {
    let back = until(limiter, key, RECOVERY, |decision| decision.source() == Source::Store);
    async {
        let _ = back.await;
    }
}

/// Waits until the store counts as available, without asking it anything.
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

/// Asks until the store is given up.
#[track_caller]
pub(crate) fn until_gone(limiter: &RedisLimiter, key: &str) -> impl Future<Output = ()> {
    let gone = until(limiter, key, RECOVERY, |decision| {
        matches!(decision.source(), Source::Local | Source::Policy) && !limiter.is_store_available()
    });
    async {
        let _ = gone.await;
    }
}
