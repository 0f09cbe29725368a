//! Bans on both stores: a banned key is denied, and the request takes nothing from other limits.

use testkit::redis::RedisServer;
use tollgate::{Ban, FixedWindow, HOUR, Hit, Limit, MINUTE};

use super::rig::{Rig, SECOND_US, rigs_with};

const MINUTE_US: u64 = 60 * SECOND_US;

async fn banning(server: &RedisServer) -> Vec<Rig> {
    let ban = Limit::ban("login ban", Ban { after: 3, within: MINUTE, for_: HOUR }).expect("valid");
    rigs_with(server, &[Limit::new("login", FixedWindow::new(10, HOUR)).expect("valid"), ban]).await
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
        rig.reset("eve").await;
        assert!(rig.decide(&[Hit::new(ban, "eve").cost(0)]).await.is_allowed(), "{rig:?}");
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
