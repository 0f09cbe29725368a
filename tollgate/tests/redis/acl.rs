//! Users with exactly the documented permissions, and the errors when one is missing.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use testkit::redis::{Cluster, RedisServer};
use testkit::window::LONG_WINDOW;
use tollgate::redis::{Layout, RedisLimiter, RedisSettings, RuleSets, StoreWarning};
use tollgate::{
    Ban, Consistency, FixedWindow, HOUR, Hit, Limit, LimitSet, MINUTE, Rate, SlidingWindowLog, Source, TokenBucket,
};

use crate::load::{RECOVERY, until_back};
use crate::variants::variants;

const PREFIX: &str = "shop";

fn grant(server: &RedisServer, rules: &[String]) {
    let mut command = redis::cmd("ACL");
    command.arg("SETUSER").arg("limiter").arg(&["reset", "on", ">s3cret"]).arg(rules);
    let _: () = command.query(&mut server.connection()).expect("the rules are valid");
}

/// Returns the commands that the server has refused, as the reason and the object of each entry in its ACL log.
fn refused(server: &RedisServer) -> Vec<String> {
    let log: Vec<HashMap<String, redis::Value>> =
        redis::cmd("ACL").arg("LOG").query(&mut server.connection()).expect("the log can be read");
    log.iter().map(|entry| format!("{:?} {:?}", entry.get("reason"), entry.get("object"))).collect()
}

/// Returns the commands that the server has run.
fn run_by(server: &RedisServer) -> BTreeSet<String> {
    let info: String = redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).expect("answered");
    let names = info.lines().filter_map(|line| line.strip_prefix("cmdstat_")?.split_once(':'));
    names.map(|(name, _)| name.to_owned()).collect()
}

/// Writes and reads what the servers of a fleet share beside the limits.
async fn share_state(limiter: &RedisLimiter) {
    limiter.write_node_report("one", b"a report", HOUR).await.expect("written");
    assert_eq!(limiter.node_reports().await.expect("read"), [("one".to_owned(), b"a report".to_vec())]);
    let bans = limiter.load_bans().await.expect("read");
    assert!(limiter.store_bans(bans.version, b"bans", HOUR).await.expect("written"));
    assert_eq!(limiter.load_bans().await.expect("read").state, b"bans");
}

/// Runs every operation, on every algorithm, on leases, bans, reports of nodes and rule sets.
async fn do_everything(settings: RedisSettings, lose_scripts: impl FnOnce()) {
    let bucket = TokenBucket::new(1_000_000, Rate::per_second(100_000));
    let leased = Limit::new("leased", bucket).expect("valid").with_consistency(Consistency::Leased);
    let ban = Ban { after: 3, within: MINUTE, for_: HOUR };
    let mut lose_scripts = Some(lose_scripts);
    for variant in variants(10, LONG_WINDOW) {
        let builder = RedisLimiter::builder(settings.clone()).limit(variant.limit());
        let limiter = builder.store_timeout(Duration::from_secs(5)).connect().await.expect("the settings are good");
        for _ in 0..12 {
            let source = limiter.check("ann").await.source();
            assert!([Source::Store, Source::DenialCache].contains(&source), "{}: {source:?}", variant.name);
        }
        limiter.reset("ann").await.expect("reset");
        let Ok(reservation) = limiter.reserve("ann", 3, HOUR).await else { panic!("{}: 3 of 10 fit", variant.name) };
        let _ = limiter.settle(reservation, 2).await.expect("settled");
        let Ok(reservation) = limiter.reserve("ann", 3, HOUR).await else { panic!("{}: 3 of 8 fit", variant.name) };
        limiter.refund(reservation).await.expect("refunded");
        let _ = limiter.peek("ann").await.expect("peeked");
        // Another quota, which converts the state.
        let other =
            variants(20, LONG_WINDOW).into_iter().find(|other| other.name == variant.name).expect("the same variants");
        let changed = limiter.with_limits([other.limit()].to_vec()).expect("valid");
        assert_eq!(changed.check("ann").await.source(), Source::Store, "{}", variant.name);
        if let Some(lose) = lose_scripts.take() {
            lose();
            assert_eq!(limiter.check("bob").await.source(), Source::Store);
        }
    }
    // Long enough to be stored in several blocks.
    let log = Limit::new("long log", SlidingWindowLog::new(10_000, HOUR)).expect("valid");
    let builder = RedisLimiter::builder(settings.clone()).limit(log).store_timeout(Duration::from_secs(5));
    let limiter = builder.connect().await.expect("the settings are good");
    for _ in 0..300 {
        assert_eq!(limiter.check("ann").await.source(), Source::Store);
    }
    let user = Limit::new("user", FixedWindow::new(5, LONG_WINDOW)).expect("valid");
    let limits = LimitSet::new().limit(leased).limit(user).ban("banned", ban);
    let builder = RedisLimiter::builder(settings.clone()).limits(limits).store_timeout(Duration::from_secs(5));
    let limiter = builder.connect().await.expect("the settings are good");
    let id = |name: &str| limiter.id(name).or_else(|| limiter.ban(name)).expect("there is such a limit");
    for _ in 0..8 {
        let hits = [Hit::new(id("user"), "ann"), Hit::new(id("banned"), "ann").cost(0), Hit::new(id("leased"), "all")];
        let source = limiter.decide(&hits).await.source();
        assert!([Source::Store, Source::DenialCache].contains(&source), "{source:?}");
        let source = limiter.decide(&[Hit::new(id("leased"), "all")]).await.source();
        assert!([Source::Store, Source::Lease].contains(&source), "{source:?}");
        let source = limiter.decide(&[Hit::new(id("banned"), "eve")]).await.source();
        assert!([Source::Store, Source::DenialCache].contains(&source), "{source:?}");
    }
    limiter.return_leases().await;
    assert_eq!(limiter.why_unavailable(), None);
    // Nodes register a moment after they start.
    let seen = async {
        while limiter.fleet_nodes() == 1 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let builder = RedisLimiter::builder(settings.clone())
        .limit(Limit::new("user", FixedWindow::new(5, LONG_WINDOW)).expect("valid"));
    let _other = builder.connect().await.expect("the settings are good");
    tokio::time::timeout(RECOVERY, seen).await.expect("the other registers");

    share_state(&limiter).await;

    let rules = RuleSets::connect(settings).expect("the settings are good");
    let version = rules.publish(b"limits: []", None).await.expect("published");
    let mut latest = rules.latest();
    let heard = latest.wait_for(|latest| latest.as_ref().is_some_and(|latest| latest.version == version));
    let _ = tokio::time::timeout(RECOVERY, heard).await.expect("in time").expect("heard");
    let _ = rules.newest().await.expect("read").expect("published");
    let _ = rules.withdraw(Some(version)).await.expect("withdrawn");
}

fn flush_scripts(server: &RedisServer) {
    let _: () = redis::cmd("SCRIPT").arg("FLUSH").query(&mut server.connection()).expect("flushed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_with_the_documented_permissions_can_do_everything_and_needs_all_of_them() {
    needs_exactly_the_documented_permissions(|settings| settings).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_with_the_documented_permissions_can_do_everything_in_the_compact_layout() {
    needs_exactly_the_documented_permissions(|settings| settings.layout(Layout::Compact)).await;
}

async fn needs_exactly_the_documented_permissions(layout: impl Fn(RedisSettings) -> RedisSettings) {
    let server = RedisServer::start();
    let url = format!("redis://127.0.0.1:{}/1", server.port());
    let settings = layout(RedisSettings::new(url).prefix(PREFIX).username("limiter").password("s3cret"));
    let rules = settings.acl_rules().expect("the settings are good");
    grant(&server, &rules);
    let before = run_by(&server);
    do_everything(settings, || flush_scripts(&server)).await;
    assert_eq!(refused(&server), Vec::<String>::new());
    let run = run_by(&server);
    let allowed: BTreeSet<String> = rules.iter().filter_map(|rule| rule.strip_prefix('+')).map(String::from).collect();
    // A subscriber sends it only after some seconds without a message.
    let unused: Vec<&String> = allowed.difference(&run).filter(|name| *name != "ping").collect();
    assert_eq!(unused, Vec::<&String>::new(), "the list has commands that nothing needs");
    let suite = ["auth", "acl|setuser", "acl|log", "script|flush", "hello"].map(String::from).into();
    let known: BTreeSet<String> =
        allowed.union(&before).cloned().collect::<BTreeSet<_>>().union(&suite).cloned().collect();
    assert_eq!(run.difference(&known).collect::<Vec<_>>(), Vec::<&String>::new(), "the list lacks commands");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_documented_permissions_are_enough_on_a_cluster() {
    let mut cluster = Cluster::start();
    for layout in [Layout::Plain, Layout::Compact] {
        let settings = RedisSettings::new(cluster.url()).prefix(PREFIX).layout(layout);
        let settings = settings.username("limiter").password("s3cret");
        let rules = settings.acl_rules().expect("the settings are good");
        for node in 0..6 {
            grant(cluster.node(node), &rules);
        }
        do_everything(settings, || ()).await;
        for node in 0..6 {
            assert_eq!(refused(cluster.node(node)), Vec::<String>::new(), "{layout:?} node {node}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_permission_is_reported_with_the_fix_until_it_is_granted() {
    let server = RedisServer::start();
    let url = format!("redis://127.0.0.1:{}", server.port());
    let settings = RedisSettings::new(url).username("limiter").password("s3cret");
    let all = settings.acl_rules().expect("the settings are good");
    let without = |missing: &str| all.iter().filter(|rule| *rule != missing).cloned().collect::<Vec<_>>();
    for missing in ["+evalsha", "+mget", "+set", "~rate_limit:*"] {
        grant(&server, &without(missing));
        let limit = Limit::new("user", FixedWindow::new(1_000_000, LONG_WINDOW)).expect("valid");
        let builder = RedisLimiter::builder(settings.clone()).limit(limit).store_timeout(Duration::from_secs(5));
        let limiter = builder.connect().await.expect("the settings are good");
        assert_eq!(limiter.check("ann").await.source(), Source::Local, "{missing}");
        let why = limiter.why_unavailable().unwrap_or_else(|| panic!("without {missing} it is of no use"));
        assert!(why.is_refused(), "{missing}: {why}");
        let text = why.to_string();
        assert!(
            text.ends_with(": give its user the keys, channels and commands that docs/redis.md lists (ACL SETUSER)"),
            "{text}"
        );
        if missing == "+evalsha" {
            assert!(text.contains("'evalsha'"), "{text}");
        }
        assert!(!text.contains("s3cret"), "{text}");
        assert!(limiter.servers().iter().all(|server| !server.available), "{missing}");
        assert_eq!(limiter.stats().breaker_opened, 1, "{missing}");
        grant(&server, &all);
        until_back(&limiter, "ann").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_work_for_a_user_that_may_not_register_nodes() {
    let server = RedisServer::start();
    let url = format!("redis://127.0.0.1:{}", server.port());
    let settings = RedisSettings::new(url).username("limiter").password("s3cret");
    let all = settings.acl_rules().expect("the settings are good");
    grant(&server, &all.iter().filter(|rule| !rule.starts_with("+z")).cloned().collect::<Vec<_>>());
    let limit = Limit::new("user", FixedWindow::new(1_000_000, LONG_WINDOW)).expect("valid");
    let builder = RedisLimiter::builder(settings).limit(limit).store_timeout(Duration::from_secs(5));
    let limiter = builder.connect().await.expect("the settings are good");
    let refused_to_register = async {
        while refused(&server).is_empty() {
            assert_eq!(limiter.check("ann").await.source(), Source::Store);
        }
    };
    tokio::time::timeout(RECOVERY, refused_to_register).await.expect("it tries to register");
    assert!(limiter.write_node_report("one", b"a report", HOUR).await.is_err_and(|why| why.is_refused()));
    assert_eq!(limiter.check("ann").await.source(), Source::Store);
    assert_eq!((limiter.why_unavailable(), limiter.stats().breaker_opened, limiter.fleet_nodes()), (None, 0, 1));
}

/// The rules `~* +@all` look like all permissions, and lack the channels.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_that_may_not_subscribe_decides_and_the_store_has_a_warning_until_it_may() {
    let server = RedisServer::start();
    let url = format!("redis://127.0.0.1:{}", server.port());
    let settings = RedisSettings::new(url).prefix(PREFIX).username("limiter").password("s3cret");
    grant(&server, &["~*", "+@all"].map(String::from));
    let bucket = TokenBucket::new(1_000_000, Rate::per_second(100_000));
    let limit = Limit::new("leased", bucket).expect("valid").with_consistency(Consistency::Leased);
    let builder = RedisLimiter::builder(settings).limit(limit).store_timeout(Duration::from_secs(5));
    let limiter = builder.connect().await.expect("the settings are good");
    let until = async |is_warned: bool| {
        while limiter.stores()[0].warnings.is_empty() == is_warned {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(RECOVERY, until(true)).await.expect("there is a warning");
    for _ in 0..50 {
        assert_eq!(limiter.check("ann").await.source(), Source::Store, "there are no leases");
    }
    let warnings = &limiter.stores()[0].warnings;
    let [warning @ StoreWarning::NotSubscribed { .. }] = &warnings[..] else { panic!("{warnings:?}") };
    assert_eq!(warning.kind(), "not_subscribed");
    let text = warning.to_string();
    assert!(
        // The server's own words: Valkey writes "No".
        text.to_lowercase().contains("no permissions")
            && text.ends_with(": grant its user &shop:rate_limit:* +subscribe (ACL SETUSER)"),
        "{text}"
    );
    assert!(limiter.is_store_available());
    grant(&server, &["~*", "+@all", "&shop:rate_limit:*"].map(String::from));
    tokio::time::timeout(RECOVERY, until(false)).await.expect("the warning ends");
    let leased = async { while limiter.check("ann").await.source() != Source::Lease {} };
    tokio::time::timeout(RECOVERY, leased).await.expect("there are leases");
}

#[test]
fn the_documentation_lists_the_permissions() {
    let documented = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/redis.md")).expect("read");
    let line = |settings: RedisSettings| settings.acl_rules().expect("good").join(" ");
    let single = line(RedisSettings::new("redis://h"));
    let documented = documented.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(documented.contains(&single), "docs/redis.md lacks: {single}");
    let prefixed = line(RedisSettings::new("redis://h").prefix("checkout"));
    assert!(documented.contains(&prefixed), "docs/redis.md lacks: {prefixed}");
    let plain = RedisSettings::new("redis://h").acl_rules().expect("good");
    let compact = RedisSettings::new("redis://h").layout(Layout::Compact).acl_rules().expect("good");
    let more: Vec<&str> = compact.iter().filter(|rule| !plain.contains(rule)).map(String::as_str).collect();
    let line = format!("For the [compact layout](#compact-layout), add `{}`", more.join(" "));
    assert!(documented.contains(&line), "docs/redis.md lacks: {line}");
}
