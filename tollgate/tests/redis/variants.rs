//! All algorithms of a limit: five algorithms, nine variants.

use std::time::Duration;

use tollgate::{Algorithm, FixedWindow, LeakyBucket, Limit, Rate, SlidingWindowCounter, SlidingWindowLog, TokenBucket};

/// A variant by the name that its limit gets in tests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variant {
    pub(crate) name: &'static str,
    pub(crate) algorithm: Algorithm,
}

impl Variant {
    pub(crate) fn limit(&self) -> Limit {
        Limit::new(self.name, self.algorithm).expect("the numbers are within the bounds")
    }

    /// Returns the name of a key on Redis.
    pub(crate) fn name_of(&self, key: &str) -> String {
        format!("rate_limit:{{{}|{key}}}", self.name)
    }

    /// Returns whether refunds make units available again. A queue has already assigned start times to other requests.
    pub(crate) fn gives_back(&self) -> bool {
        self.name != "queue"
    }

    /// Returns whether denied requests count.
    pub(crate) fn counts_denied(&self) -> bool {
        self.name == "log of all"
    }
}

/// Returns all nine variants with that quota per window.
pub(crate) fn variants(quota: u64, window: Duration) -> [Variant; 9] {
    let rate = Rate::new(quota, window);
    let variant = |name, algorithm: Algorithm| Variant { name, algorithm };
    [
        variant("tokens", TokenBucket::new(quota, rate).into()),
        variant("portions", TokenBucket::new(quota, rate).interval().into()),
        variant("meter", LeakyBucket::new(quota, rate).into()),
        variant("queue", LeakyBucket::new(quota, rate).queue(window).into()),
        variant("clock window", FixedWindow::new(quota, window).into()),
        variant("opened window", FixedWindow::new(quota, window).from_first_request().into()),
        variant("log", SlidingWindowLog::new(quota, window).into()),
        variant("log of all", SlidingWindowLog::new(quota, window).count_denied().into()),
        variant("counter", SlidingWindowCounter::new(quota, window).segments(3).into()),
    ]
}
