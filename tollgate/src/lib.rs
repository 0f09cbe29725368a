//! Exact, fast and bounded rate limiting.
//!
//! ```
//! use tollgate::{Limit, Limiter, Rate, TokenBucket};
//!
//! let limiter = Limiter::new(Limit::new("per-user", TokenBucket::new(10, Rate::per_second(1)))?);
//! let decision = limiter.check("user:42");
//! if !decision.is_allowed() {
//!     println!("try again in {:?}", decision.retry_after());
//! }
//! # Ok::<(), tollgate::InvalidLimit>(())
//! ```
//!
//! In the order to read them:
//!
//! - A [`Limit`] is configured: a name and one of five algorithms, [`TokenBucket`], [`LeakyBucket`],
//!   [`FixedWindow`], [`SlidingWindowLog`] and [`SlidingWindowCounter`], with numbers that were checked.
//! - A [`Limiter`] holds one limit or several and the state of every key. [`Limiter::check`] asks all its limits
//!   for one key; [`Limiter::decide_now`] asks any set of [`Hit`]s, all or nothing. Neither needs a runtime.
//! - A [`Decision`] is answered: allowed or not, by which limit, what is left, and exactly how long to wait.
//! - Beside `check` there are [`peek`](Limiter::peek), [`refund`](Limiter::refund), [`reset`](Limiter::reset)
//!   and, for costs known only afterwards, [`reserve`](Limiter::reserve) and [`settle`](Limiter::settle). With
//!   the feature `tokio`, `until_ready` waits for quota.
//!
//! What it promises:
//!
//! - It never admits more than a limit says, whatever the concurrency, the clock or the number of keys.
//! - A denied request takes nothing, from any limit.
//! - `retry_after` is exact to the microsecond.
//! - Memory stays within a bound that is set, under attack too; see [`LimiterBuilder::max_memory`].
//! - Rates are exact ratios: nothing drifts, however long it runs.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod algorithm;
mod budget;
mod clock;
mod decision;
mod error;
#[cfg(feature = "rules")]
mod gate;
#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "http")]
#[doc(hidden)]
pub mod internal;
mod key;
mod limit;
mod limit_set;
mod limiter;
mod rate;
mod rate_limiter;
#[cfg(feature = "redis")]
pub mod redis;
mod reservation;
#[cfg(feature = "rules")]
pub mod rules;
mod store;
mod sync;
#[cfg(feature = "tower")]
pub mod tower;
mod units;
#[cfg(feature = "tokio")]
mod wait;

pub use algorithm::{Algorithm, Ban, FixedWindow, LeakyBucket, SlidingWindowCounter, SlidingWindowLog, TokenBucket};
pub use clock::{Clock, ManualClock};
pub use decision::{Decision, Denied, Source};
pub use error::InvalidLimit;
#[cfg(feature = "file")]
pub use gate::OpenError;
#[cfg(feature = "rules")]
pub use gate::{Check, Explanation, Gate, InFlightPermit, Outcome, RuleExplained, RuleState};
pub use key::Key;
pub use limit::{Consistency, Limit, LimitId, OnStoreFailure};
pub use limit_set::LimitSet;
pub use limiter::{Hit, Limiter, LimiterBuilder, RestoreError, Restored};
pub use rate::Rate;
pub use rate_limiter::RateLimiter;
pub use reservation::{Reservation, Settlement};
pub use store::memory::Overflow;
pub use units::{DAY, HOUR, MAX_SPAN, MIN_SPAN, MINUTE, SECOND, Timestamp};
#[cfg(feature = "tokio")]
pub use wait::Wait;
