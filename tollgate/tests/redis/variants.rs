//! Every way a limit can count: five algorithms, nine variants.

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

    /// Where a plain key of it is kept.
    pub(crate) fn name_of(&self, key: &str) -> String {
        format!("rate_limit:{{{}|{key}}}", self.name)
    }

    /// Whether those already told when to leave keep what is given back from being of use.
    pub(crate) fn gives_back(&self) -> bool {
        self.name != "queue"
    }

    /// Whether a denial costs.
    pub(crate) fn counts_denied(&self) -> bool {
        self.name == "log of all"
    }
}

/// All nine, each of that quota, which comes back in that time.
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
