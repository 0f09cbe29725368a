//! A key that owes units is denied by every process that holds slices of it and learns of the debt.

use testkit::redis::RedisServer;
use testkit::window::LONG_WINDOW;
use tollgate::{FixedWindow, MINUTE, Settlement, Source};

use super::node;
use crate::load::{RECOVERY, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_debt_ends_the_slices_of_the_process_that_settles() {
    let server = RedisServer::start();
    let node = node(&server, FixedWindow::new(1_000, LONG_WINDOW)).await;
    for round in 0..10 {
        let key = format!("key {round}");
        let Ok(reserved) = node.reserve(key.as_str(), 1, MINUTE).await else { panic!("1 of 1000 fits") };
        let _ = until(&node, &key, RECOVERY, |decision| decision.source() == Source::Lease).await;
        let settled = node.settle(reserved, 5_000).await;
        assert!(matches!(settled, Ok(Settlement::Owed { units: 4_000.. })), "{settled:?}");
        for _ in 0..100 {
            assert!(!node.check(key.as_str()).await.is_allowed(), "round {round}");
        }
    }
    node.return_leases().await;
    assert_eq!(node.stats().leased_units, 0);
}
