//! A slot that moves to another node under load: `ASK`, `TRYAGAIN`, then `MOVED`.

use std::time::Duration;

use testkit::redis::Cluster;
use tokio::time::{sleep, timeout};
use tollgate::redis::RedisLimiter;
use tollgate::{DAY, FixedWindow, Limit, OnStoreFailure, SlidingWindowLog};

use crate::load::Load;

const QUOTA: u64 = 1_000_000;
const HAMMERED: usize = 8;
/// Other keys in the slot, so that the move has several steps.
const IDLE: usize = 40;

/// Keys of the limit that are all in one slot, and that slot.
fn of_one_slot(prefix: &str, count: usize) -> (u16, Vec<String>) {
    let slot_of = |key: &str| crc16::State::<crc16::XMODEM>::calculate(format!("{prefix}|{key}").as_bytes()) % 16_384;
    let slot = slot_of("key 0");
    let keys = (0..).map(|nth| format!("key {nth}")).filter(|key| slot_of(key) == slot);
    (slot, keys.take(count).collect())
}

async fn moves_exactly(limit: Limit) {
    let cluster = Cluster::start();
    let (slot, keys) = of_one_slot(limit.name(), HAMMERED + IDLE);
    let quota = limit.quota();
    let builder = RedisLimiter::builder(cluster.url()).limit(limit).store_timeout(Duration::from_secs(20));
    let limiter = builder.on_store_failure(OnStoreFailure::Deny).connect().await.expect("the settings are valid");
    let mut admitted_here = 0;
    for key in &keys {
        admitted_here += u64::from(limiter.check(key).await.is_allowed());
    }
    let load = Load::begin(&limiter, 3 * HAMMERED, |task| keys[task % HAMMERED].clone());
    let home = cluster.owner(slot).expect("the nodes agree");
    let away = (home + 1) % 3;
    for to in [away, home, away] {
        let moving = cluster.begin_move(slot, to);
        sleep(Duration::from_millis(100)).await;
        while moving.step() > 0 {
            sleep(Duration::from_millis(20)).await;
        }
        let before = load.admitted();
        let served = async {
            while load.admitted() == before {
                sleep(Duration::from_millis(10)).await;
            }
        };
        let served = quota < QUOTA || timeout(Duration::from_secs(20), served).await.is_ok();
        assert!(served, "where all keys have moved, all are served");
        moving.finish();
        sleep(Duration::from_millis(100)).await;
    }
    let mut left = 0;
    let tally = load.end().await;
    for key in &keys {
        left += limiter.peek(key).await.expect("the cluster answers").remaining();
    }
    assert_eq!(admitted_here + tally.admitted + left, quota * keys.len() as u64, "{tally:?}");
    assert!(quota == QUOTA || keys[..HAMMERED].len() as u64 * quota <= tally.admitted + admitted_here, "{tally:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_or_counted_twice_while_a_slot_moves() {
    moves_exactly(Limit::new("wide", FixedWindow::new(QUOTA, DAY).from_first_request()).unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exactly_the_limit_is_admitted_while_a_slot_moves() {
    moves_exactly(Limit::new("logged", SlidingWindowLog::new(100, DAY)).unwrap()).await;
}
