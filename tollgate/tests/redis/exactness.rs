//! Many processes together admit exactly the limit. This test program starts eight copies of itself, each with its own
//! tasks and connection.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use futures_util::future::join_all;
use testkit::redis::RedisServer;
use testkit::window::LONG_WINDOW;
use tollgate::redis::RedisLimiter;
use tollgate::{Hit, Limit, OnStoreFailure, Rate, SlidingWindowLog, Source, TokenBucket};

use crate::variants::{Variant, variants};

const PROCESSES: usize = 8;
const TASKS: usize = 16;
const QUOTA: u64 = 500;

/// Requests of each task and variant: together more than twice the quota.
const TURNS: usize = 10;

/// Environment variable of a child: the address of Redis.
const URL: &str = "TOLLGATE_TEST_URL";

/// Nothing here is about a slow Redis, and eight processes share two cores.
const PATIENCE: Duration = Duration::from_secs(30);

async fn limiter(url: &str, limit: Limit) -> RedisLimiter {
    let builder = RedisLimiter::builder(url).limit(limit).store_timeout(PATIENCE);
    builder.on_store_failure(OnStoreFailure::Deny).connect().await.expect("the settings are valid")
}

/// Entry point of the child processes. The harness ignores it, so it never counts as a test that passed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "entry point of child processes: run by the tests below"]
#[expect(clippy::print_stdout, reason = "a child reports its counts to its parent")]
async fn child_process() {
    let url = std::env::var(URL).expect("the parent sets the address of Redis");
    for variant in variants(QUOTA, LONG_WINDOW) {
        let limiter = limiter(&url, variant.limit()).await;
        let task = || {
            let limiter = limiter.clone();
            tokio::spawn(async move { count_allowed(&limiter).await })
        };
        let counts = join_all((0..TASKS).map(|_| task())).await;
        let allowed: u64 = counts.into_iter().map(|count| count.expect("no task panics")).sum();
        println!("\nallowed/{}/{allowed}", variant.name);
    }
}

/// Checks until the store has answered `TURNS` times, and returns the number of allowed requests.
async fn count_allowed(limiter: &RedisLimiter) -> u64 {
    let (mut answered, mut allowed) = (0, 0);
    while answered < TURNS {
        let decision = limiter.check("key").await;
        match decision.source() {
            Source::Store | Source::DenialCache => answered += 1,
            // The script was flushed once too often: nothing was taken.
            _ => tokio::time::sleep(Duration::from_millis(5)).await,
        }
        allowed += u64::from(decision.is_allowed());
    }
    allowed
}

fn spawn_children(server: &RedisServer) -> Vec<Child> {
    let program = std::env::current_exe().expect("a test knows its program");
    let child = || {
        Command::new(&program)
            .args(["--exact", "exactness::child_process", "--ignored", "--nocapture"])
            .env(URL, server.url())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("a test can run its own program")
    };
    (0..PROCESSES).map(|_| child()).collect()
}

/// Sums the requests that all children were allowed, by variant.
fn collect(children: Vec<Child>) -> Vec<(Variant, u64)> {
    let mut totals = variants(QUOTA, LONG_WINDOW).map(|variant| (variant, 0)).to_vec();
    for child in children {
        let output = child.wait_with_output().expect("a child ends");
        let report = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "a child failed: {report}");
        for (variant, total) in &mut totals {
            let count = report.lines().find_map(|line| line.strip_prefix(&format!("allowed/{}/", variant.name)));
            *total += count.and_then(|count| count.parse::<u64>().ok()).expect("a child reports all its counts");
        }
    }
    totals
}

#[test]
fn eight_processes_admit_exactly_the_limit() {
    let server = RedisServer::start();
    let children = spawn_children(&server);
    for (variant, admitted) in collect(children) {
        assert_eq!(admitted, QUOTA, "{}", variant.name);
    }
}

#[test]
fn flushing_the_scripts_under_load_loses_and_adds_no_units() {
    let server = RedisServer::start();
    let mut children = spawn_children(&server);
    let mut connection = server.connection();
    let mut flushes = 0;
    while children.iter_mut().any(|child| matches!(child.try_wait(), Ok(None))) {
        let _: () = redis::cmd("SCRIPT").arg("FLUSH").arg("SYNC").query(&mut connection).expect("flushed");
        flushes += 1;
        // A batch that never met its script would never end.
        pause();
    }
    assert!(flushes > 10, "the script was flushed {flushes} times only");
    for (variant, admitted) in collect(children) {
        assert_eq!(admitted, QUOTA, "{}", variant.name);
    }
}

#[expect(clippy::disallowed_methods, reason = "the parent of real processes has nothing to await")]
fn pause() {
    std::thread::sleep(Duration::from_millis(5));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_of_several_limits_is_charged_for_admitted_requests() {
    let server = RedisServer::start();
    let limits = [
        Limit::new("all", SlidingWindowLog::new(400, LONG_WINDOW)).unwrap(),
        Limit::new("some", TokenBucket::new(150, Rate::new(150, LONG_WINDOW))).unwrap(),
    ];
    let build = || {
        let builder = RedisLimiter::builder(server.url()).store_timeout(PATIENCE);
        limits.iter().fold(builder, |builder, limit| builder.limit(limit.clone())).connect()
    };
    let limiters = [build().await.unwrap(), build().await.unwrap()];
    let (all, some) = (limiters[0].id("all").unwrap(), limiters[0].id("some").unwrap());
    // Requests have two keys of one limit and one of the other, in either order; `some` denies first.
    let tasks = (0..32).map(|task| {
        let limiter = limiters[task % 2].clone();
        tokio::spawn(async move {
            let user = format!("user {}", task % 4);
            let mut hits = [Hit::new(all, "everyone"), Hit::new(some, &user)];
            if task % 3 == 0 {
                hits.reverse();
            }
            let mut admitted = 0;
            for _ in 0..40 {
                admitted += u64::from(limiter.decide(&hits).await.is_allowed());
            }
            (task % 4, admitted)
        })
    });
    let mut by_user = [0; 4];
    for task in join_all(tasks).await {
        let (user, admitted) = task.expect("no task panics");
        by_user[user] += admitted;
    }
    let left = async |id, key: &str| limiters[1].decide(&[Hit::new(id, key).cost(0)]).await.remaining();
    assert_eq!(by_user.iter().sum::<u64>(), 400, "of 1280 requests; each user alone would have had 150");
    assert_eq!(left(all, "everyone").await, 0);
    for (user, admitted) in by_user.into_iter().enumerate() {
        assert_eq!(left(some, &format!("user {user}")).await, 150 - admitted, "user {user}");
    }
}
