//! Rules on two stores: bans and variants of a limit are on its store, and requests across stores are all or nothing.

use super::*;

/// Returns the names of all keys on the server, up to the key of the limit.
fn names(server: &RedisServer) -> Vec<String> {
    let keys: Vec<String> = ::redis::cmd("KEYS").arg("*").query(&mut server.connection()).unwrap();
    let names = keys.iter().filter_map(|key| Some(key.split_once('|')?.0.to_owned()));
    let mut names: Vec<String> = names.collect();
    names.sort_unstable();
    names
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bans_and_variants_are_on_the_store_of_their_limit() {
    let (default, sessions) = (RedisServer::start(), RedisServer::start());
    let login = || Limit::new("login", FixedWindow::new(1, HOUR).from_first_request()).unwrap().with_store("sessions");
    let rules = || {
        let ban = Ban { after: 2, within: HOUR, for_: 2 * HOUR };
        let rich = FixedWindow::new(3, HOUR).from_first_request();
        [rule("all", 100), Rule::new(login()).key(user()).ban(ban).key_limit(&["rich"], rich)]
    };
    let open = || {
        let settings = RedisLimiter::builder(default.url()).store("sessions", sessions.url());
        Gate::on_redis(rule_set(rules()), settings.store_timeout(Duration::from_secs(5)))
    };
    let gates = [open().await.unwrap(), open().await.unwrap()];
    for (user, quota) in [("ann", 1), ("rich", 3)] {
        for turn in 0..quota {
            let outcome = check(&gates[turn % 2], "/", user).await;
            assert!(outcome.is_allowed(), "{user} {turn}: {outcome:?}");
        }
        assert_eq!(check(&gates[0], "/", user).await.refusal(), Some(&Refusal::Limited), "{user}");
        for gate in &gates {
            let banned = check(gate, "/", user).await;
            assert!(matches!(banned.refusal(), Some(Refusal::Banned { .. })), "{user}: {banned:?}");
        }
    }
    assert_eq!(names(&default), ["rate_limit:{all"]);
    let login = ["rate_limit:ban:{login", "rate_limit:ban:{login", "rate_limit:{login", "rate_limit:{login"];
    assert_eq!(names(&sessions), login);
    // The limit on the default store counts the four allowed requests, and no denied ones.
    let rich_again = gates[0].replace(rule_set([rule("all", 100)]));
    assert!(rich_again.is_ok());
    assert_eq!(remaining(&check(&gates[0], "/", "rich").await), 95);
}
