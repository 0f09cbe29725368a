//! The longest call on a sliding window log of many entries. Redis runs one script at a time, so a slow call blocks
//! every other client. Times are from the slow log of Redis, which records every call here.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use tollgate::redis::{RedisLimiter, RedisReservation};
use tollgate::{Consistency, HOUR, Limit, ManualClock, SlidingWindowLog, Timestamp};

use super::{Bench, Coverage};
use crate::report::{Results, Table};

const KEY: &str = "user:000000";
const NAME: &str = "long";
/// The same call is repeated, and the longest counts.
const REPEATS: u64 = 20;
const STEP: Duration = Duration::from_micros(10);
const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

pub(super) fn run(bench: &Bench, results: &mut Results) -> anyhow::Result<()> {
    let entries = match bench.scale.coverage {
        Coverage::Full => 100_000,
        Coverage::Quick => 10_000,
    };
    let title = format!("The longest of {REPEATS} calls on a sliding window log of {entries} entries");
    let mut table = Table::new(title, ["", "Redis time, ms"]);
    let calls = bench.block_on(longest_calls(bench, entries))?;
    let mut longest = Duration::ZERO;
    for (name, time) in calls {
        table.row([name.to_string(), format!("{:.3}", time.as_secs_f64() * 1000.0)]);
        longest = longest.max(time);
    }
    table.print();
    results.ratio("long_log_longest_call_ms", longest.as_secs_f64() * 1000.0);
    Ok(())
}

struct Long<'a> {
    bench: &'a Bench,
    clock: ManualClock,
    limiter: RedisLimiter,
    calls: Vec<(&'static str, Duration)>,
}

impl Long<'_> {
    fn advance(&self) {
        self.clock.advance(STEP);
    }

    /// Notes the longest call since the last note.
    async fn note(&mut self, name: &'static str) -> anyhow::Result<()> {
        self.calls.push((name, self.bench.server.longest_call().await?));
        Ok(())
    }

    async fn reserve(&self) -> anyhow::Result<RedisReservation> {
        self.advance();
        let reserved = self.limiter.reserve(KEY, 1, HOUR).await;
        reserved.ok().context("a log that is not full denied a request")
    }
}

async fn longest_calls(bench: &Bench, entries: u64) -> anyhow::Result<Vec<(&'static str, Duration)>> {
    bench.server.flush().await?;
    bench.server.record_calls().await?;
    let clock = ManualClock::at(START);
    let limit = Limit::new(NAME, SlidingWindowLog::new(entries, HOUR))?;
    let connect = async |limit: Limit| {
        let builder = RedisLimiter::builder(&bench.server.url).limit(limit).clock(clock.clone());
        builder.store_timeout(Duration::from_secs(10)).connect().await
    };
    let leased = connect(limit.clone().with_consistency(Consistency::Leased)).await?;
    let mut long = Long { bench, clock: clock.clone(), limiter: connect(limit).await?, calls: Vec::new() };
    // Requests of one call have the same time and become one entry, so each needs its own call.
    let mut reservations = Vec::new();
    for entry in 0..entries - REPEATS {
        let reservation = long.reserve().await?;
        if entry % (entries / REPEATS) == 0 {
            reservations.push(reservation);
        }
    }
    bench.server.longest_call().await?;
    for _ in 0..REPEATS {
        let _ = long.reserve().await?;
    }
    long.note("check, allowed").await?;
    for repeat in 0..REPEATS {
        long.advance();
        let cost = entries - repeat * entries / (2 * REPEATS);
        ensure!(!long.limiter.check_n(KEY, cost).await.is_allowed(), "a full log allowed a request");
    }
    long.note("check, denied").await?;
    for _ in 0..REPEATS {
        long.limiter.peek(KEY).await?;
    }
    long.note("peek").await?;
    for reservation in reservations {
        long.limiter.refund(reservation).await?;
    }
    long.note("refund").await?;
    for _ in 0..REPEATS {
        long.advance();
        let _ = leased.check(KEY).await;
    }
    long.note("slice").await?;
    // Half of the log leaves the window at once.
    clock.advance(HOUR - STEP * u32::try_from(entries / 2)?);
    let _ = long.reserve().await?;
    long.note("check after half of the entries have expired").await?;
    long.limiter.reset(KEY).await?;
    long.note("reset").await?;
    Ok(long.calls)
}
