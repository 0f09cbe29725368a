//! The numbers and modes of the five algorithms.

use schemars::JsonSchema;
use serde::Deserialize;
use tollgate::internal::MAX_QUOTA;
use tollgate::{
    Algorithm, DAY, FixedWindow, LeakyBucket, MINUTE, Rate, SECOND, SlidingWindowCounter, SlidingWindowLog, TokenBucket,
};
use tollgate_rules::internal::demand::{Cover, LearnSettings};

use super::notation::between;
use crate::forms::{DurationText, RateText};

/// The algorithm of a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AlgorithmName {
    /// Bursts up to `capacity`, then the `refill` rate.
    TokenBucket,
    /// A steady outflow at `leak`. Requests that do not fit are refused or queued.
    LeakyBucket,
    /// At most `limit` per `window`.
    FixedWindow,
    /// At most `limit` in any `window`, exact at every instant.
    SlidingWindowLog,
    /// At most `limit` in a sliding `window`, estimated from counts per segment. The default.
    #[default]
    SlidingWindowCounter,
}

impl AlgorithmName {
    pub(crate) const ALL: [Self; 5] =
        [Self::TokenBucket, Self::LeakyBucket, Self::FixedWindow, Self::SlidingWindowLog, Self::SlidingWindowCounter];

    /// Returns the name in a rule file.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::TokenBucket => "token_bucket",
            Self::LeakyBucket => "leaky_bucket",
            Self::FixedWindow => "fixed_window",
            Self::SlidingWindowLog => "sliding_window_log",
            Self::SlidingWindowCounter => "sliding_window_counter",
        }
    }

    /// Returns the keys that apply to the algorithm, the quota first.
    pub(crate) const fn keys(self) -> &'static [&'static str] {
        match self {
            Self::TokenBucket => &["capacity", "refill", "refill_mode"],
            Self::LeakyBucket => &["capacity", "leak", "overflow", "max_wait"],
            Self::FixedWindow => &["limit", "window", "align"],
            Self::SlidingWindowLog => &["limit", "window", "count_denied"],
            Self::SlidingWindowCounter => &["limit", "window", "segments"],
        }
    }

    /// Returns the key of the quota.
    pub(crate) const fn quota_key(self) -> &'static str {
        self.keys()[0]
    }
}

/// The numbers of a limit. The algorithm decides which of them apply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Numbers {
    /// Units per window (10), or `{ learn: { from, to } }`. For windows, logs and counters.
    pub limit: Option<QuotaRule>,
    /// Length of the window (60s). For windows, logs and counters.
    pub window: Option<DurationText>,
    /// Number of segments of the window (1). For sliding_window_counter.
    #[schemars(range(min = 1, max = 1440))]
    pub segments: Option<u32>,
    /// Units in a full bucket (10), or `{ learn: { from, to } }`. For token_bucket and leaky_bucket.
    pub capacity: Option<QuotaRule>,
    /// Rate at which tokens return (1/s). For token_bucket.
    pub refill: Option<RateText>,
    /// Rate at which the bucket leaks (1/s). For leaky_bucket.
    pub leak: Option<RateText>,
    /// Longest wait of a queued request. For leaky_bucket with `overflow: queue`.
    pub max_wait: Option<DurationText>,
}

impl Numbers {
    /// Returns these numbers, and those of `those` where there are none.
    pub fn or(self, those: Self) -> Self {
        Self {
            limit: self.limit.or(those.limit),
            window: self.window.or(those.window),
            segments: self.segments.or(those.segments),
            capacity: self.capacity.or(those.capacity),
            refill: self.refill.or(those.refill),
            leak: self.leak.or(those.leak),
            max_wait: self.max_wait.or(those.max_wait),
        }
    }

    /// Returns the algorithm of that name with these numbers, and defaults for the missing ones.
    pub fn algorithm(self, name: AlgorithmName, modes: Modes) -> Algorithm {
        const QUOTA: u64 = 10;
        let limit = self.limit.map_or(QUOTA, QuotaRule::units);
        let capacity = self.capacity.map_or(QUOTA, QuotaRule::units);
        let window = self.window.map_or(MINUTE, DurationText::duration);
        let rate = |text: Option<RateText>| text.map_or(Rate::new(1, SECOND), RateText::rate);
        match name {
            AlgorithmName::TokenBucket => {
                let bucket = TokenBucket::new(capacity, rate(self.refill));
                match modes.refill_mode.unwrap_or_default() {
                    RefillMode::Smooth => bucket.into(),
                    RefillMode::Interval => bucket.interval().into(),
                }
            }
            AlgorithmName::LeakyBucket => {
                let bucket = LeakyBucket::new(capacity, rate(self.leak));
                match (modes.overflow.unwrap_or_default(), self.max_wait) {
                    (Overflow::Queue, Some(max_wait)) => bucket.queue(max_wait.duration()).into(),
                    _ => bucket.into(),
                }
            }
            AlgorithmName::FixedWindow => {
                let windows = FixedWindow::new(limit, window);
                match modes.align.unwrap_or_default() {
                    Align::Clock => windows.into(),
                    Align::FirstRequest => windows.from_first_request().into(),
                }
            }
            AlgorithmName::SlidingWindowLog => {
                let log = SlidingWindowLog::new(limit, window);
                if modes.count_denied == Some(true) { log.count_denied().into() } else { log.into() }
            }
            AlgorithmName::SlidingWindowCounter => {
                SlidingWindowCounter::new(limit, window).segments(self.segments.unwrap_or(1)).into()
            }
        }
    }
}

/// The quota of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum QuotaRule {
    /// A number of units.
    Units(#[schemars(range(min = 1, max = MAX_QUOTA))] u64),
    /// A number that follows the demand of clients.
    Learned(LearnedQuota),
}

impl QuotaRule {
    /// Returns the number of units, or the smallest one of a quota that learns.
    pub const fn units(self) -> u64 {
        match self {
            Self::Units(units) => units,
            Self::Learned(LearnedQuota { learn }) => learn.from,
        }
    }

    /// Returns how the quota learns, if it does.
    pub const fn learn(self) -> Option<LearnRule> {
        match self {
            Self::Units(_) => None,
            Self::Learned(LearnedQuota { learn }) => Some(learn),
        }
    }
}

/// A quota that follows the demand of clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LearnedQuota {
    /// The bounds of the number, and the clients that it is for.
    #[schemars(extend("examples" = [{ "from": 50, "to": 400 }]))]
    pub learn: LearnRule,
}

/// How a quota follows the demand of clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LearnRule {
    /// The smallest number, which is in force until enough is known.
    #[schemars(range(min = 1, max = MAX_QUOTA), extend("examples" = [50]))]
    pub from: u64,
    /// The largest number.
    #[schemars(range(min = 1, max = MAX_QUOTA), extend("examples" = [400]))]
    pub to: u64,
    /// The time to learn from (7d), from 1h to 90d.
    #[serde(default = "week")]
    #[schemars(transform = between("1h", "90d"))]
    pub over: DurationText,
    /// The share of clients that are never denied (0.999).
    #[serde(default)]
    pub cover: Share,
    /// Shows the number in the log and the metrics, and keeps `from` in force.
    #[serde(default)]
    pub shadow: bool,
}

impl LearnRule {
    /// Returns the settings of the learner. `None` if the cover is not a share, which a parsed file does not have.
    pub fn settings(self) -> Option<LearnSettings> {
        let Self { from, to, over, cover, .. } = self;
        Some(LearnSettings { from, to, over: over.duration(), cover: cover.cover()? })
    }
}

fn week() -> DurationText {
    DurationText::new(DAY * 7)
}

/// A share between 0 and 1, in millionths. A number that is no share is reported with its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share(u32);

impl Default for Share {
    fn default() -> Self {
        Self(999_000)
    }
}

impl Share {
    /// Returns the share as a cover, unless it is 0 or 1 or more.
    pub fn cover(self) -> Option<Cover> {
        Cover::new(f64::from(self.0) / 1_000_000.0)
    }
}

impl<'de> Deserialize<'de> for Share {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let number = serde_json::Value::deserialize(from)?.as_f64().unwrap_or(0.0);
        // Shares that would be rounded to none or to all of the clients are refused like these. The conversion saturates.
        Ok(Self(match number {
            ..0.000_001 => 0,
            0.000_001..=0.999_999 => (number * 1_000_000.0).round() as u32,
            _ => 1_000_000,
        }))
    }
}

impl JsonSchema for Share {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Share".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "number", "minimum": 0.000_001, "maximum": 0.999_999, "examples": [0.999] })
    }
}

impl serde::Serialize for Share {
    fn serialize<S: serde::Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_f64(f64::from(self.0) / 1_000_000.0)
    }
}

/// The modes of a limit. An override cannot change them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Modes {
    /// How tokens return. For token_bucket.
    pub refill_mode: Option<RefillMode>,
    /// The treatment of requests that do not fit. For leaky_bucket.
    pub overflow: Option<Overflow>,
    /// The start of a window. For fixed_window.
    pub align: Option<Align>,
    /// Also counts denied requests (false). For sliding_window_log.
    pub count_denied: Option<bool>,
}

/// How tokens return.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RefillMode {
    /// One by one.
    #[default]
    Smooth,
    /// All at once, at the end of each period of the clock.
    Interval,
}

/// The treatment of requests that do not fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Overflow {
    /// Refused.
    #[default]
    Reject,
    /// Queued, for at most `max_wait`.
    Queue,
}

/// The start of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Align {
    /// Aligned to the clock, the same for all keys.
    #[default]
    Clock,
    /// At the first request of a key.
    FirstRequest,
}
