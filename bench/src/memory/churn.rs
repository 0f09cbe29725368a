//! A table after 100 windows in which every key is new: bytes per live key, and the time of a decision in the first
//! window and in the last.
//!
//! A manual clock makes a window as long as its decisions take. Both runs have just too many keys for four fifths of a
//! power of two of buckets. Below the cap the table then doubles, so this is the most memory per key; at the cap it
//! cannot double.

use std::hint::black_box;
use std::time::Duration;

use anyhow::ensure;
use tollgate::{FixedWindow, Limit, Limiter, ManualClock, Timestamp};

use crate::clock::Ticker;
use crate::report::{Results, Table};
use crate::traffic;

const NAME: &str = "churn";
const WINDOW: Duration = Duration::from_secs(60);
const WINDOWS: usize = 100;
/// Four fifths of the seven slots of 16,384 buckets, and a few more.
const KEYS: usize = 92_000;
const BUCKETS: usize = 16_384;
const BUCKET_BYTES: usize = 128;
/// More than the table takes below the cap.
const ENOUGH_BYTES: usize = 64 << 20;

struct Churn {
    limiter: Limiter,
    clock: ManualClock,
    next_key: usize,
    watch: Ticker,
}

/// Nanoseconds per decision in one window.
#[derive(Clone, Copy)]
struct Nanos {
    /// The first decision on each key.
    new: f64,
    /// The second.
    known: f64,
}

pub(super) fn run(results: &mut Results) -> anyhow::Result<()> {
    let title = format!("After {WINDOWS} windows of {KEYS} new keys each: bytes, and ns per decision");
    let columns =
        ["", "bytes per live key", "new, window 1", "known, window 1", "new, window 100", "known, window 100"];
    let mut table = Table::new(title, columns);
    for (name, prefix, max_memory) in
        [("below the cap", "churn", ENOUGH_BYTES), ("at the cap", "churn_cap", BUCKETS * BUCKET_BYTES)]
    {
        let mut churn = Churn::new(max_memory)?;
        let first = churn.window()?;
        for _ in 2..WINDOWS {
            churn.window()?;
        }
        let last = churn.window()?;
        let bytes = churn.limiter.memory_used() as f64 / churn.live_keys() as f64;
        let figures = [bytes, first.new, first.known, last.new, last.known];
        table.row([name.to_string()].into_iter().chain(figures.map(|figure| format!("{figure:.1}"))));
        results.quantity(format!("{prefix}_bytes_per_key"), bytes);
        results.quantity(format!("{prefix}_new_ns"), last.new);
        results.quantity(format!("{prefix}_known_ns"), last.known);
    }
    table.print();
    Ok(())
}

impl Churn {
    fn new(max_memory: usize) -> anyhow::Result<Self> {
        let clock = ManualClock::at(Timestamp::from_micros(1_700_000_040_000_000));
        let limit = Limit::new(NAME, FixedWindow::new(10, WINDOW))?;
        let limiter = Limiter::builder().limit(limit).max_memory(max_memory).clock(clock.clone()).build()?;
        Ok(Self { limiter, clock, next_key: 0, watch: Ticker::new() })
    }

    /// Checks new keys, each of them twice.
    fn window(&mut self) -> anyhow::Result<Nanos> {
        self.clock.advance(WINDOW);
        let keys = self.next_key..self.next_key + KEYS;
        self.next_key = keys.end;
        let pass = || {
            let mut key = traffic::name(keys.end);
            let mut denied = 0;
            let began = self.watch.ticks();
            for id in keys.clone() {
                traffic::write_name(&mut key, id);
                denied += usize::from(!black_box(self.limiter.check(key.as_str())).is_allowed());
            }
            let nanos = self.watch.nanos(began, self.watch.ticks()) as f64 / KEYS as f64;
            ensure!(denied == 0, "tollgate denied {denied} of {KEYS} keys that have a slot");
            Ok(nanos)
        };
        Ok(Nanos { new: pass()?, known: pass()? })
    }

    fn live_keys(&self) -> usize {
        self.limiter.id(NAME).map_or(0, |limit| self.limiter.live_keys(limit))
    }
}
