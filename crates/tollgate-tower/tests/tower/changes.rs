//! Rules are replaced while requests are in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use http::Method;
use tollgate::{FixedWindow, Limit, MINUTE};
use tollgate_rules::{Rule, RuleSet};

use super::server::{Server, TestResponse, http1, http2};
use super::{gate_of, per_minute, user};

/// Clients that send requests without a pause.
const CLIENTS: usize = 8;
/// The number of times that the rules are replaced.
const CHANGES: usize = 400;

fn rules(limit: u64, with_second: bool) -> RuleSet {
    let mut rules = RuleSet::builder().rule(per_minute("per-user", limit).key(user()));
    if with_second {
        rules = rules.rule(Rule::new(Limit::new("second", FixedWindow::new(limit * 10, MINUTE)).unwrap()));
    }
    rules.build().unwrap()
}

/// Returns `true` if a response comes entirely from one of the rule sets.
fn is_whole(answer: &TestResponse) -> bool {
    let limit = answer.header("x-ratelimit-limit");
    let remaining = answer.header("x-ratelimit-remaining").and_then(|left| left.parse::<u64>().ok());
    let policy = answer.header("ratelimit-policy");
    let is_ample = (limit, policy) == (Some("1000000"), Some(r#""per-user";q=1000000;w=60"#));
    let is_strict = matches!(limit, Some("5" | "50")) && policy == Some(r#""per-user";q=5;w=60, "second";q=50;w=60"#);
    match answer.status {
        200 => (is_ample || is_strict) && answer.body == "hello" && remaining.is_some(),
        429 => is_strict && remaining == Some(0) && answer.header("retry-after").is_some(),
        _ => false,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_response_under_load_comes_from_the_old_rules_or_the_new() {
    let (gate, _) = gate_of(RuleSet::builder().rule(per_minute("per-user", 1_000_000).key(user())));
    let server = Arc::new(Server::with(&gate).await);
    let (done, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let (server, done, answered) = (server.clone(), done.clone(), answered.clone());
            let client = if number % 2 == 0 { http1() } else { http2() };
            tokio::spawn(async move {
                let name = format!("user-{number}");
                let mut statuses = [0_usize; 2];
                while !done.load(Ordering::Relaxed) {
                    let answer = server.send(&client, Method::GET, "/", &[("x-user-id", &name)]).await;
                    assert!(is_whole(&answer), "{answer:?}");
                    statuses[usize::from(answer.status == 429)] += 1;
                    answered.fetch_add(1, Ordering::Relaxed);
                }
                statuses
            })
        })
        .collect();
    for change in 0..CHANGES {
        let (limit, with_second) = if change % 2 == 0 { (5, true) } else { (1_000_000, false) };
        gate.replace(rules(limit, with_second)).unwrap();
        // Each rule set gets requests, though not from every client. A client that failed sends no more.
        let enough = answered.load(Ordering::Relaxed) + CLIENTS / 2;
        while answered.load(Ordering::Relaxed) < enough && !clients.iter().any(tokio::task::JoinHandle::is_finished) {
            tokio::task::yield_now().await;
        }
    }
    done.store(true, Ordering::Relaxed);
    let mut total = [0, 0];
    for client in clients {
        let statuses = client.await.unwrap();
        total = [total[0] + statuses[0], total[1] + statuses[1]];
    }
    // Both rule sets must have decided requests, or nothing was tested.
    assert!(total[0] > CLIENTS && total[1] > 0, "{total:?}");
    assert_eq!(server.calls(), total[0]);
}

#[tokio::test]
async fn a_new_quota_applies_at_once_to_clients_that_have_spent() {
    let (gate, _) = gate_of(RuleSet::builder().rule(per_minute("per-user", 10).key(user())));
    let server = Server::with(&gate).await;
    let ann = [("x-user-id", "ann")];
    for _ in 0..4 {
        assert_eq!(server.get("/", &ann).await.status, 200);
    }
    gate.replace(rules(4, false)).unwrap();
    assert_eq!(server.get("/", &ann).await.status, 429);
    gate.replace(rules(6, false)).unwrap();
    assert_eq!(server.get("/", &ann).await.left(), Some(r#""per-user";r=1;t=20"#));
}
