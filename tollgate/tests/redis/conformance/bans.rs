//! Bans on both stores: a banned key is denied, and the request takes nothing from other limits.

use testkit::redis::RedisServer;
use tollgate::{Ban, FixedWindow, HOUR, Hit, InvalidHits, Limit, LimitSet, MINUTE};

use super::rig::{Rig, SECOND_US, rigs_of, rigs_with};

const MINUTE_US: u64 = 60 * SECOND_US;

async fn banning(server: &RedisServer) -> Vec<Rig> {
    let login = Limit::new("login", FixedWindow::new(10, HOUR)).expect("valid");
    rigs_of(server, &LimitSet::new().limit(login).ban("login ban", Ban { after: 3, within: MINUTE, for_: HOUR })).await
}

#[tokio::test]
async fn a_banned_key_is_denied_by_a_hit_without_cost_and_nothing_is_taken() {
    let server = RedisServer::start();
    for rig in banning(&server).await {
        let (login, ban) = (rig.id("login"), rig.id("login ban"));
        let request = [Hit::new(login, "eve"), Hit::new(ban, "eve").cost(0)];
        let allowed = rig.decide(&request).await;
        assert!(allowed.is_allowed(), "{rig:?}");
        assert_eq!((allowed.limit(), allowed.remaining()), (Some(login), 9), "{rig:?}");
        assert!(rig.decide(&[Hit::new(ban, "eve").cost(2)]).await.is_allowed(), "{rig:?}");
        assert!(rig.decide(&request).await.is_allowed(), "{rig:?}: two strikes are no ban");
        assert!(rig.decide(&[Hit::new(ban, "eve")]).await.is_allowed(), "{rig:?}: the strike itself passes");

        let banned = rig.decide(&request).await;
        assert!(!banned.is_allowed(), "{rig:?}");
        assert_eq!((banned.limit(), banned.retry_after()), (Some(ban), Some(HOUR)), "{rig:?}");
        assert_eq!(rig.decide(&[Hit::new(login, "eve").cost(0)]).await.remaining(), 8, "{rig:?}: nothing was taken");
        assert!(rig.decide(&[Hit::new(login, "ann"), Hit::new(ban, "ann").cost(0)]).await.is_allowed(), "{rig:?}");

        rig.set(60 * MINUTE_US - 1);
        assert!(!rig.decide(&request).await.is_allowed(), "{rig:?}");
        rig.set(60 * MINUTE_US);
        assert!(rig.decide(&request).await.is_allowed(), "{rig:?}");
    }
}

#[tokio::test]
async fn strikes_on_a_banned_key_do_not_make_the_ban_longer() {
    let server = RedisServer::start();
    for rig in banning(&server).await {
        let ban = rig.id("login ban");
        assert!(rig.decide(&[Hit::new(ban, "eve").cost(7)]).await.is_allowed(), "{rig:?}");
        rig.set(MINUTE_US);
        let struck = rig.decide(&[Hit::new(ban, "eve").cost(7)]).await;
        assert_eq!((struck.is_allowed(), struck.retry_after()), (false, Some(HOUR - MINUTE)), "{rig:?}");
        rig.set(60 * MINUTE_US);
        assert_eq!(rig.decide(&[Hit::new(ban, "eve").cost(2)]).await.remaining(), 1, "{rig:?}: counted from 0");
    }
}

#[tokio::test]
async fn strikes_count_together_from_the_first_one() {
    let server = RedisServer::start();
    for rig in banning(&server).await {
        let ban = rig.id("login ban");
        for (seconds, left) in [(0, 2), (59, 1), (60, 2), (61, 1), (119, 0)] {
            rig.set(seconds * SECOND_US);
            assert_eq!(rig.decide(&[Hit::new(ban, "eve")]).await.remaining(), left, "{rig:?} at {seconds} s");
        }
        assert_eq!(rig.decide(&[Hit::new(ban, "eve").cost(0)]).await.retry_after(), Some(HOUR), "{rig:?}");
    }
}

#[tokio::test]
async fn a_strike_is_not_counted_if_another_limit_denies_the_request() {
    let server = RedisServer::start();
    for rig in banning(&server).await {
        let (login, ban) = (rig.id("login"), rig.id("login ban"));
        let never = rig.decide(&[Hit::new(login, "eve").cost(11), Hit::new(ban, "eve").cost(3)]).await;
        assert_eq!((never.is_allowed(), never.limit()), (false, Some(login)), "{rig:?}");
        assert_eq!(rig.decide(&[Hit::new(ban, "eve").cost(0)]).await.remaining(), 3, "{rig:?}");
    }
}

#[tokio::test]
async fn hits_on_two_variants_of_a_limit_with_one_key_are_an_error() {
    let server = RedisServer::start();
    let hourly = |quota| Limit::new("limit", FixedWindow::new(quota, HOUR)).expect("valid");
    for rig in rigs_of(&server, &LimitSet::new().limit(hourly(1)).variant("gold", hourly(100))).await {
        let (base, gold) = (rig.id("limit"), rig.variant("limit", "gold"));
        for hits in [[Hit::new(base, "ann"), Hit::new(gold, "ann")], [Hit::new(gold, "ann"), Hit::new(base, "ann")]] {
            assert_eq!(rig.decide(&hits).await.invalid_hits(), Some(InvalidHits::TwoVariants), "{rig:?}");
            let refused = rig.reserve_hits(&hits, HOUR).await.err().expect("refused");
            assert_eq!(refused.decision().invalid_hits(), Some(InvalidHits::TwoVariants), "{rig:?}");
        }
        assert_eq!(rig.peek("ann").await.remaining(), 1, "{rig:?}: nothing was taken");
        assert!(rig.decide(&[Hit::new(base, "ann"), Hit::new(gold, "bob")]).await.is_allowed(), "{rig:?}");
    }
}

#[tokio::test]
async fn an_id_of_other_limits_is_an_error() {
    let server = RedisServer::start();
    let login = Limit::new("login", FixedWindow::new(10, HOUR)).expect("valid");
    let (one, other) = (banning(&server).await, rigs_with(&server, &[login]).await);
    for (one, other) in one.into_iter().zip(other) {
        let (id, hit) = (one.id("login"), Hit::new(one.id("login"), "ann"));
        assert!(one.decide(&[hit]).await.is_allowed(), "{one:?}");
        assert_eq!(other.decide(&[hit]).await.invalid_hits(), Some(InvalidHits::UnknownLimit), "{other:?}");
        assert_eq!((one.has_limit(id), other.has_limit(id)), (true, false), "{other:?}");
    }
}
