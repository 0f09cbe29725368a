//! Real frameworks behind the gateway: a handler that an exhausted limit or a block list protects never runs, however
//! the request is spelled.
//!
//! Every spelling of the corpus goes to every framework three times: directly, which shows what the framework reads,
//! and through a gateway over HTTP/1 and HTTP/2. A pair of spelling and framework is past the limit if the handler ran
//! behind the gateway for the identity whose limit is exhausted. `known.txt` lists the pairs that only the service's
//! own reading explains; any other pair fails the test.
//!
//! `keys.rs` has spellings of names and credentials, for handlers that read them leniently.
//! `messages.rs` has another corpus, of messages that servers may delimit differently.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::disallowed_methods, reason = "other processes are waited for, by their own clocks")]
#![allow(clippy::print_stderr, reason = "the tables are for people who run the test")]

mod corpus;
mod http1;
mod http2;
mod keys;
mod messages;
mod upstreams;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use testkit::folder::folder_with;
use testkit::tollgate::{Process, RULES};

use crate::corpus::{BLOCKED, Cause, Spelling, corpus, plain, unlimited};
use crate::upstreams::Upstream;

/// The fewest spellings. With fewer, something is wrong with the corpus or the frameworks.
const FEWEST_SPELLINGS: usize = 300;
/// The fewest spellings that reach the handler of each framework without the gateway.
const FEWEST_DIRECT_PER_FRAMEWORK: usize = 50;
/// The most pairs that may bypass a limit because of the service's own reading.
const MOST_KNOWN: usize = 60;

/// The number of clients per framework, each of which sends a part of the corpus. Single-threaded frameworks have short
/// queues.
const CLIENTS: usize = 3;
/// The timeout for a framework that waits for more of a malformed request.
const DIRECT_TIMEOUT: Duration = Duration::from_secs(10);
const GATEWAY_TIMEOUT: Duration = Duration::from_secs(6);

/// More than all requests of the test take together. One request with this cost exhausts a key.
const QUOTA: &str = "1000000";

/// The result of one spelling with one framework: whether the handler ran.
#[derive(Clone, Copy, Default)]
struct Fate {
    direct: bool,
    http1: bool,
    http2: bool,
}

/// A pair that bypassed the limit.
struct Past<'a> {
    framework: &'static str,
    spelling: &'a Spelling,
    fate: Fate,
}

#[test]
fn no_spelling_gets_past_an_exhausted_limit() {
    let corpus = corpus();
    assert!(corpus.len() >= FEWEST_SPELLINGS, "the corpus has {} spellings", corpus.len());
    let upstreams = Upstream::start_all();
    let fates: Vec<Vec<Fate>> = std::thread::scope(|scope| {
        let running: Vec<_> = upstreams.iter().map(|upstream| scope.spawn(|| fates_with(upstream, &corpus))).collect();
        running.into_iter().map(|thread| thread.join().expect("a framework was tested")).collect()
    });

    let mut direct = 0;
    let mut past = Vec::new();
    for (upstream, fates) in upstreams.iter().zip(&fates) {
        let reached = fates.iter().filter(|fate| fate.direct).count();
        assert!(reached >= FEWEST_DIRECT_PER_FRAMEWORK, "only {reached} spellings reach {}", upstream.name);
        direct += reached;
        for (spelling, fate) in corpus.iter().zip(fates) {
            assert!(
                fate.direct || !spelling.is_plain(),
                "{} does not run the handler of {}",
                upstream.name,
                spelling.name()
            );
            if fate.http1 || fate.http2 {
                past.push(Past { framework: upstream.name, spelling, fate: *fate });
            }
        }
    }
    report_table(&past, &corpus, upstreams.len(), direct);
    compare_with_known(&past, &upstreams);
}

/// Sends the whole corpus to a framework, directly and through a gateway whose limits are exhausted.
fn fates_with(upstream: &Upstream, corpus: &[Spelling]) -> Vec<Fate> {
    let gateway = Process::start(folder_with(&[(RULES, &rules(upstream.address))]), &["serve", "--config", RULES]);
    let address = gateway.address_of("gateway");
    assert_http2_runs_the_handler(address, upstream.name);
    exhaust(address, upstream.name);
    let parts: Vec<Vec<Fate>> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| scope.spawn(move || fates_of_part(corpus, client, upstream.address, address)))
            .collect();
        clients.into_iter().map(|client| client.join().expect("a client did its part")).collect()
    });
    (0..corpus.len()).map(|index| parts[index % CLIENTS][index / CLIENTS]).collect()
}

/// Sends every spelling whose index has this remainder.
fn fates_of_part(corpus: &[Spelling], remainder: usize, upstream: SocketAddr, gateway: SocketAddr) -> Vec<Fate> {
    let mut direct = http1::Client::new(upstream, DIRECT_TIMEOUT);
    let mut by_http1 = http1::Client::new(gateway, GATEWAY_TIMEOUT);
    let mut by_http2 = http2::Client::new(gateway, GATEWAY_TIMEOUT);
    let fate = |spelling: &Spelling| Fate {
        direct: ran(spelling, direct.send(spelling, &[])),
        http1: ran(spelling, by_http1.send(spelling, &[])),
        http2: ran(spelling, by_http2.send(spelling)),
    };
    corpus.iter().skip(remainder).step_by(CLIENTS).map(fate).collect()
}

/// Sends a plain spelling over HTTP/2. Otherwise a gateway that never answers over HTTP/2 would pass the test.
fn assert_http2_runs_the_handler(gateway: SocketAddr, framework: &str) {
    let mut client = http2::Client::new(gateway, GATEWAY_TIMEOUT);
    let spelling = unlimited();
    // On a busy machine the first answers of a framework may take longer than the gateway waits.
    let has_run = (0..5).any(|_| ran(&spelling, client.send(&spelling)));
    assert!(has_run, "{framework} does not run the handler of {} over HTTP/2", spelling.name());
}

/// Exhausts every limit, with requests that everybody reads alike.
fn exhaust(gateway: SocketAddr, framework: &str) {
    let mut client = http1::Client::new(gateway, GATEWAY_TIMEOUT);
    for spelling in plain() {
        let mut send = || ran(&spelling, client.send(&spelling, &[("X-Cost", QUOTA)]));
        // The first two share a limit.
        let is_first = spelling.identity != Some(BLOCKED) && !spelling.name().starts_with("POST /api");
        assert_eq!(send(), is_first, "{framework} runs the handler of {} once", spelling.name());
        assert!(!send(), "the limit on {} of {framework} is exhausted", spelling.name());
    }
}

/// Returns whether the framework reports that it ran the handler, for the identity of the limit.
fn ran(spelling: &Spelling, body: Option<Vec<u8>>) -> bool {
    let Some(report) = body.and_then(|body| serde_json::from_slice::<serde_json::Value>(&body).ok()) else {
        return false;
    };
    report["ran"] == spelling.handler.name() && spelling.identity.is_none_or(|identity| report["key"] == identity)
}

fn rules(upstream: SocketAddr) -> String {
    let once = |name: &str, matching: &str| {
        format!(
            "  - {{ name: {name}, match: {{ {matching} }}, algorithm: fixed_window, align: first_request, \
             limit: 1, window: 1h }}\n"
        )
    };
    let by_key = |name: &str, key: &str| {
        format!(
            "  - {{ name: {name}, match: {{ path: /keys/{name} }}, key: '{key}', algorithm: fixed_window, \
             align: first_request, limit: {QUOTA}, window: 1h, cost: 'header:x-cost', \
             blocked: {{ keys: [{BLOCKED}] }} }}\n"
        )
    };
    let limits = [
        once("login", "path: /api/**"),
        once("graphql", "path: /graphql/**"),
        once("root", "path: /"),
        once("submit", "path: /submit, methods: [POST]"),
        once("node", "hosts: [node.test]"),
        once("wildcard", "hosts: ['*.example.com']"),
        by_key("header", "header:x-api-key"),
        by_key("cookie", "cookie:s"),
        by_key("query", "query:key"),
    ];
    format!(
        "gateway:\n  listen: 127.0.0.1:0\n  workers: 1\n  routes:\n    - {{ path: /**, upstream: 'http://{upstream}', \
         timeout: 3s, retries: 0, eject: {{ after: 1000000, for: 1s }} }}\nlimits:\n{}",
        limits.concat()
    )
}

fn report_table(past: &[Past<'_>], corpus: &[Spelling], frameworks: usize, direct: usize) {
    let known = known();
    for Past { framework, spelling, fate } in past {
        let (class, cause) = spelling.class;
        let note = if known.contains(&entry(framework, spelling)) { "known" } else { "NEW" };
        let protocol = match (fate.http1, fate.http2) {
            (true, true) => "1+2",
            (true, false) => "1",
            _ => "2",
        };
        report(&format!("{note}\t{cause:?}\t{class}\tHTTP/{protocol}\t{framework}\t{}", spelling.name()));
    }
    let mut classes: BTreeMap<_, (usize, usize)> = BTreeMap::new();
    for spelling in corpus {
        classes.entry((spelling.class.1, spelling.class.0)).or_default().0 += 1;
    }
    for pair in past {
        classes.entry((pair.spelling.class.1, pair.spelling.class.0)).or_default().1 += 1;
    }
    report(&format!("\n{:<9} {:<20} {:>9} {:>6}", "cause", "class", "spellings", "past"));
    for ((cause, class), (spellings, past)) in &classes {
        report(&format!("{:<9} {class:<20} {spellings:>9} {past:>6}", format!("{cause:?}")));
    }
    let own_making = past.iter().filter(|pair| pair.spelling.class.1 == Cause::Gateway).count();
    report(&format!(
        "\nRESULT spellings={} frameworks={frameworks} of {} pairs={} direct={direct} past={} own_making={own_making}",
        corpus.len(),
        upstreams::COUNT,
        corpus.len() * frameworks,
        past.len()
    ));
}

/// Fails if a pair is not in `known.txt`, or if a pair in it no longer exists.
fn compare_with_known(past: &[Past<'_>], upstreams: &[Upstream]) {
    let known = known();
    assert!(known.len() <= MOST_KNOWN, "known.txt has {} pairs: at most {MOST_KNOWN} may be there", known.len());
    let found: BTreeSet<String> = past.iter().map(|pair| entry(pair.framework, pair.spelling)).collect();
    let is_tested = |line: &&String| upstreams.iter().any(|upstream| line.starts_with(&format!("{}\t", upstream.name)));
    let fixed: Vec<_> = known.difference(&found).filter(is_tested).cloned().collect();
    let new: Vec<_> = found.difference(&known).cloned().collect();
    let of_gateway = past.iter().filter(|pair| pair.spelling.class.1 == Cause::Gateway).count();
    assert_eq!(of_gateway, 0, "pairs got past a limit by the gateway's own making");
    assert!(new.is_empty(), "{} pairs that are not in known.txt got past a limit:\n{}", new.len(), new.join("\n"));
    assert!(
        fixed.is_empty(),
        "{} pairs no longer get past a limit: remove them from known.txt:\n{}",
        fixed.len(),
        fixed.join("\n")
    );
}

fn known() -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/frameworks/known.txt");
    let text = std::fs::read_to_string(path).expect("known.txt can be read");
    text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect()
}

/// Returns a line of `known.txt`.
fn entry(framework: &str, spelling: &Spelling) -> String {
    format!("{framework}\t{}", spelling.name())
}

/// Prints a line of the report.
pub(crate) fn report(line: &str) {
    eprintln!("{line}");
}
