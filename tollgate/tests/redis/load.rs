//! Traffic on a limiter while something happens to its Redis, and what became of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tollgate::redis::RedisLimiter;
use tollgate::{Decision, Source};

/// Between two questions of one task: enough for 64 tasks to leave a core to the servers.
const PAUSE: Duration = Duration::from_millis(2);

/// What two busy cores may add to a deadline: a task that is due waits for its turn.
pub(crate) const SCHEDULING: Duration = Duration::from_millis(250);

/// The longest that coming back may take: probes are a second apart at most, and servers take their time.
pub(crate) const RECOVERY: Duration = Duration::from_secs(8);

/// Tasks that ask until told to end.
pub(crate) struct Load {
    tasks: Vec<JoinHandle<Tally>>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    ended: AtomicBool,
    admitted: AtomicU64,
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
    pub(crate) slowest: Duration,
}

impl Load {
    /// So many tasks, each on the key that `key_of` names for it.
    pub(crate) fn begin(limiter: &RedisLimiter, tasks: usize, key_of: impl Fn(usize) -> String) -> Self {
        let shared = Arc::new(Shared::default());
        let run = |task| tokio::spawn(ask_on(limiter.clone(), key_of(task), shared.clone()));
        Self { tasks: (0..tasks).map(run).collect(), shared }
    }

    /// Admitted so far.
    pub(crate) fn admitted(&self) -> u64 {
        self.shared.admitted.load(Ordering::SeqCst)
    }

    pub(crate) async fn end(self) -> Tally {
        self.shared.ended.store(true, Ordering::SeqCst);
        let mut all = Tally::default();
        for task in self.tasks {
            all.add(&task.await.expect("no task panics"));
        }
        all
    }
}

async fn ask_on(limiter: RedisLimiter, key: String, shared: Arc<Shared>) -> Tally {
    let mut tally = Tally::default();
    while !shared.ended.load(Ordering::SeqCst) {
        let begin = Instant::now();
        let decision = limiter.check(&key).await;
        tally.count(&decision, begin.elapsed());
        if decision.is_allowed() {
            shared.admitted.fetch_add(1, Ordering::SeqCst);
        }
        sleep(PAUSE).await;
    }
    tally
}

impl Tally {
    fn count(&mut self, decision: &Decision, took: Duration) {
        self.slowest = self.slowest.max(took);
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
        self.slowest = self.slowest.max(other.slowest);
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
