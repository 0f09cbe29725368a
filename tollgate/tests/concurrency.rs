//! Many threads at once: the number of admitted requests is exact, for one key, for several limits together, and while
//! the table grows. The clock stands still, so that the exact counts are known.

mod common;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use common::{Dice, Rig, START_US};
use tollgate::{
    Algorithm, FixedWindow, HOUR, Hit, LeakyBucket, Limit, Limiter, ManualClock, Rate, Settlement,
    SlidingWindowCounter, SlidingWindowLog, Timestamp, TokenBucket,
};

const THREADS: usize = 8;

/// Every algorithm in every variant, with the same quota.
fn variants(quota: u64) -> Vec<Algorithm> {
    let rate = Rate::per_second(1);
    vec![
        TokenBucket::new(quota, rate).into(),
        TokenBucket::new(quota, rate).interval().into(),
        LeakyBucket::new(quota, rate).into(),
        LeakyBucket::new(quota, rate).queue(HOUR).into(),
        FixedWindow::new(quota, HOUR).into(),
        FixedWindow::new(quota, HOUR).from_first_request().into(),
        SlidingWindowLog::new(quota, HOUR).into(),
        SlidingWindowLog::new(quota, HOUR).count_denied().into(),
        SlidingWindowCounter::new(quota, HOUR).into(),
        SlidingWindowCounter::new(quota, HOUR).segments(6).into(),
    ]
}

/// Runs the same work in many threads. Returns the results of all.
fn in_threads<T: Send>(work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || work(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no thread panics")).collect()
    })
}

#[test]
fn many_threads_on_one_key_admit_exactly_the_limit() {
    for algorithm in variants(1_000) {
        let shown = format!("{algorithm:?}");
        let rig = Rig::of(algorithm);
        let admitted = in_threads(|_| (0..500).filter(|_| rig.limiter.check("key").is_allowed()).count());
        assert_eq!(admitted.iter().sum::<usize>(), 1_000, "{shown}");
        assert_eq!(rig.limiter.peek("key").remaining(), 0, "{shown}");
    }
}

#[test]
fn many_threads_with_costs_admit_whole_requests_only() {
    for algorithm in variants(1_000) {
        let counts_denied = matches!(algorithm, Algorithm::SlidingWindowLog(_));
        let shown = format!("{algorithm:?}");
        let rig = Rig::of(algorithm);
        let admitted = in_threads(|_| (0..100).filter(|_| rig.limiter.check_n("key", 3).is_allowed()).count());
        assert_eq!(admitted.iter().sum::<usize>(), 333, "{shown}");
        // A log may contain the denied requests too.
        assert!(rig.limiter.peek("key").remaining() == 1 || counts_denied, "{shown}");
    }
}

#[test]
fn many_threads_in_one_queue_leave_one_by_one() {
    let rig = Rig::of(LeakyBucket::new(400, Rate::per_second(1)).queue(HOUR));
    let delays = in_threads(|_| {
        let decisions = (0..100).map(|_| rig.limiter.check("key"));
        decisions
            .filter(|decision| decision.is_allowed())
            .map(|decision| decision.delay().as_secs())
            .collect::<Vec<_>>()
    });
    let mut delays = delays.concat();
    delays.sort_unstable();
    assert_eq!(delays, (0..400).collect::<Vec<_>>());
}

#[test]
fn many_threads_that_give_back_are_charged_what_they_kept() {
    for algorithm in variants(20_000) {
        let rig = Rig::of(algorithm);
        let kept = in_threads(|thread| {
            let (limiter, mut dice) = (&rig.limiter, Dice(thread as u64));
            let mut kept = 0;
            for _ in 0..150 {
                let (cost, actual) = (1 + dice.below(3), dice.below(4));
                match dice.below(3) {
                    0 => {
                        let reservation = limiter.reserve("key", cost, HOUR).unwrap();
                        assert_eq!(limiter.settle(reservation, actual), Settlement::Settled);
                        kept += actual;
                    }
                    1 => {
                        let reservation = limiter.reserve("key", cost, HOUR).unwrap();
                        assert_eq!(limiter.refund(reservation), Settlement::Settled);
                    }
                    _ => {
                        assert!(limiter.check_n("key", cost).is_allowed());
                        kept += cost;
                    }
                }
            }
            kept
        });
        let (kept, spent) = (kept.iter().sum::<u64>(), 20_000 - rig.limiter.peek("key").remaining());
        // A queue gives back nothing: later requests already have their delays.
        let is_queue = matches!(algorithm, Algorithm::LeakyBucket(_)) && !rig.limiter.peek("key").delay().is_zero();
        assert!(spent == kept || is_queue && spent > kept, "{spent} spent, {kept} kept: {algorithm:?}");
    }
}

#[test]
fn a_request_denied_by_one_limit_takes_nothing_anywhere() {
    const KEYS: [&str; 3] = ["ann", "bob", "cid"];
    // Different quotas, so that some run out long before the others and most requests fail on one of them.
    let algorithms = several();
    let mut builder = Limiter::builder().clock(ManualClock::at(Timestamp::from_micros(START_US)));
    for (index, algorithm) in algorithms.iter().enumerate() {
        builder = builder.limit(Limit::new(format!("limit {index}"), *algorithm).unwrap());
    }
    let limiter = builder.build().unwrap();
    let ids: Vec<_> = (0..algorithms.len()).map(|index| limiter.id(&format!("limit {index}")).unwrap()).collect();

    let spent = in_threads(|thread| {
        let mut dice = Dice(thread as u64);
        let mut spent: HashMap<(usize, &str), u64> = HashMap::new();
        for _ in 0..2_000 {
            let first = dice.below(ids.len() as u64) as usize;
            let count = 1 + dice.below(4) as usize;
            let chosen =
                (0..count).map(|nth| ((first + nth * 2) % ids.len(), KEYS[dice.below(3) as usize], dice.below(4)));
            let chosen: Vec<_> = chosen.collect();
            let hits: Vec<_> = chosen.iter().map(|&(limit, key, cost)| Hit::new(ids[limit], key).cost(cost)).collect();
            if limiter.decide_now(&hits).is_allowed() {
                for (limit, key, cost) in chosen {
                    *spent.entry((limit, key)).or_default() += cost;
                }
            }
        }
        spent
    });
    for (index, id) in ids.iter().enumerate() {
        for key in KEYS {
            let spent: u64 = spent.iter().filter_map(|spent| spent.get(&(index, key))).sum();
            let decision = limiter.decide_now(&[Hit::new(*id, key).cost(0)]);
            assert_eq!(decision.quota() - decision.remaining(), spent, "{:?} for {key}", algorithms[index]);
        }
    }
}

/// One of each algorithm, with different quotas.
fn several() -> Vec<Algorithm> {
    vec![
        TokenBucket::new(500, Rate::per_second(1)).into(),
        TokenBucket::new(1_500, Rate::per_second(1)).interval().into(),
        LeakyBucket::new(700, Rate::per_second(1)).into(),
        FixedWindow::new(900, HOUR).into(),
        FixedWindow::new(2_000, HOUR).from_first_request().into(),
        SlidingWindowLog::new(600, HOUR).into(),
        SlidingWindowCounter::new(800, HOUR).into(),
        SlidingWindowCounter::new(1_000, HOUR).segments(6).into(),
    ]
}

/// Half of the threads add enough new keys to grow the table many times; the other half use a few existing keys.
fn grows_exactly(with_quota: impl Fn(u64) -> Algorithm) {
    const COLD_KEYS: usize = 200_000;
    const HOT_KEYS: usize = 4;
    let (cold_quota, hot_quota) = (3, 10_000);
    let limit = |name: &str, quota| Limit::new(name, with_quota(quota)).expect("a valid limit");
    let limiter = Limiter::builder()
        .limit(limit("cold", cold_quota))
        .limit(limit("hot", hot_quota))
        .clock(ManualClock::at(Timestamp::from_micros(START_US)))
        .build()
        .expect("two names");
    let [cold, hot] = ["cold", "hot"].map(|name| limiter.id(name).expect("just built"));
    let admitted: Vec<AtomicU64> = (0..COLD_KEYS + HOT_KEYS).map(|_| AtomicU64::new(0)).collect();
    let ask = |id, key: usize| {
        if limiter.decide_now(&[Hit::new(id, &key.to_le_bytes())]).is_allowed() {
            admitted[key].fetch_add(1, Ordering::Relaxed);
        }
    };
    in_threads(|thread| {
        for step in 0..COLD_KEYS {
            if thread % 2 == 0 {
                // Four threads, each from its own start, so every key is checked four times.
                ask(cold, (step + thread * COLD_KEYS / THREADS) % COLD_KEYS);
            } else if step % 4 == 0 {
                ask(hot, COLD_KEYS + step / 4 % HOT_KEYS);
            }
        }
    });
    for (key, admitted) in admitted.iter().enumerate() {
        let quota = if key < COLD_KEYS { cold_quota } else { hot_quota };
        assert_eq!(admitted.load(Ordering::Relaxed), quota, "key {key}");
    }
}

#[test]
fn token_buckets_grow_under_fire_without_loss() {
    grows_exactly(|quota| TokenBucket::new(quota, Rate::per_hour(1)).into());
}

#[test]
fn leaky_buckets_grow_under_fire_without_loss() {
    grows_exactly(|quota| LeakyBucket::new(quota, Rate::per_hour(1)).into());
}

#[test]
fn fixed_windows_grow_under_fire_without_loss() {
    grows_exactly(|quota| FixedWindow::new(quota, HOUR).into());
}

#[test]
fn logs_grow_under_fire_without_loss() {
    grows_exactly(|quota| SlidingWindowLog::new(quota, HOUR).into());
}

#[test]
fn counters_grow_under_fire_without_loss() {
    grows_exactly(|quota| SlidingWindowCounter::new(quota, HOUR).segments(6).into());
}

#[test]
fn a_limiter_is_cloned_into_threads_and_counts_as_one() {
    let rig = Rig::of(TokenBucket::new(100, Rate::per_second(1)));
    let threads: Vec<_> = (0..THREADS)
        .map(|_| {
            let limiter = rig.limiter.clone();
            thread::spawn(move || (0..50).filter(|_| limiter.check("key").is_allowed()).count())
        })
        .collect();
    assert_eq!(threads.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>(), 100);
}

#[test]
fn several_limits_on_many_keys_are_taken_together() {
    const KEYS: usize = 1_000;
    // Enough keys that some are not in their home bucket, in tables of different sizes.
    for algorithm in variants(10) {
        let shown = format!("{algorithm:?}");
        let limit = |name: &str, algorithm: Algorithm| Limit::new(name, algorithm).expect("a valid limit");
        let limiter = Limiter::builder()
            .limit(limit("first", algorithm))
            .limit(limit("second", FixedWindow::new(12, HOUR).into()))
            .limit(limit("third", FixedWindow::new(1_000_000, HOUR).into()))
            .clock(ManualClock::at(Timestamp::from_micros(START_US)))
            .build()
            .expect("enough memory");
        let ids = ["first", "second", "third"].map(|name| limiter.id(name).expect("there is such a limit"));
        let admitted = in_threads(|thread| {
            let mut admitted = vec![0_u64; KEYS];
            for turn in 0..2 * KEYS {
                let key = (turn * 7 + thread * 125) % KEYS;
                let name = key.to_string();
                let hits = [Hit::new(ids[0], &name), Hit::new(ids[1], &name), Hit::new(ids[2], "all")];
                admitted[key] += u64::from(limiter.decide_now(&hits).is_allowed());
            }
            admitted
        });
        let quota = limiter.limit(ids[0]).expect("its own id").quota().min(12);
        for key in 0..KEYS {
            let sum: u64 = admitted.iter().map(|admitted| admitted[key]).sum();
            assert_eq!(sum, quota, "{shown}: key {key}");
            let left = limiter.decide_now(&[Hit::new(ids[1], &key.to_string()).cost(0)]).remaining();
            assert_eq!(left, 12 - quota, "{shown}: key {key}");
        }
        let all: u64 = admitted.iter().flatten().sum();
        let left = limiter.decide_now(&[Hit::new(ids[2], "all").cost(0)]).remaining();
        assert_eq!(left, 1_000_000 - all, "{shown}: a denied request has taken something");
    }
}
