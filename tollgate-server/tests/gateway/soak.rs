//! Many clients, for a long time: nothing grows.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use testkit::gateway::{Gateway, site};
use testkit::upstream::Raw;
use testkit::wait::{until, wait_until};

/// How long the soak takes, unless `TOLLGATE_SOAK_SECONDS` says otherwise.
const SOAK: Duration = Duration::from_secs(12);

/// The shortest soak in which the memory of each request is checked.
const LONG_SOAK: Duration = Duration::from_secs(120);

/// The memory that buffers, pools and the allocator may take in addition after the first third.
const ALLOCATOR_NOISE_KIB: u64 = 24 << 10;

/// The bound on the memory that each request may leave behind in a long soak.
const MAX_LEAK_BYTES: u64 = 64;

/// As many clients as this process may have, up to ten thousand.
fn clients() -> usize {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    // Other tests of this process have sockets too, and the gateway has more than two descriptors for each client.
    let most = allowed.saturating_sub(2_000).min(allowed.saturating_sub(1_000) / 17 * 8);
    usize::try_from(most).unwrap_or(usize::MAX).min(10_000)
}

/// Files that the gateway may open or close once, soon after its start.
const FILES_OF_THE_START: usize = 8;

/// The number of connections that may wait to be accepted.
const QUEUED: usize = 256;

#[test]
fn ten_thousand_idle_connections_are_held_and_answered() {
    // On a busy machine it takes longer than the default to open all of them.
    let settings = "max_connections: 12000\n  max_connections_per_address: 12000\n  timeouts: { head: 1h, idle: 1h }";
    let gateway = Gateway::start(&site(settings, &["{ path: /**, respond: { body: ok } }"], ""));
    let (before_kib, before_files) = (gateway.memory_kib(), gateway.open_files());
    let (mut connections, clients) = (Vec::new(), clients());
    for number in 0..clients {
        let mut connection = gateway.connect();
        if number % 4 == 0 {
            assert_eq!(connection.get("/").status, 200);
        }
        connections.push(connection);
        // If more wait than fit into the queue of a listener, the kernel repeats handshakes for half a minute.
        if number % QUEUED == 0 || number + 1 == clients {
            let files = || gateway.open_files() + FILES_OF_THE_START;
            let accepted = wait_until(|| (files() >= before_files + connections.len()).then_some(()));
            assert!(accepted.is_some(), "{} open files, {before_files} before {number} clients", gateway.open_files());
        }
    }
    for connection in connections.iter_mut().step_by(101) {
        assert_eq!(connection.get("/").status, 200);
    }
    let grown_kib = gateway.memory_kib().saturating_sub(before_kib);
    // Some 20 KiB for a connection that has been used, less for one that has not; buffers of a proxy would be more.
    assert!(grown_kib < 40 * connections.len() as u64, "{grown_kib} KiB for {} connections", connections.len());
    drop(connections);
    until("all are closed", || gateway.open_files() <= before_files + FILES_OF_THE_START);
}

#[test]
fn memory_and_files_stay_flat_under_mixed_load() {
    let seconds = std::env::var("TOLLGATE_SOAK_SECONDS").ok().and_then(|text| text.parse().ok());
    let soak = seconds.map_or(SOAK, Duration::from_secs);
    let upstream = Raw::named("one");
    let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
    let limits = "{ name: per-user, key: 'header:x-user-id', algorithm: token_bucket, capacity: 20, refill: 20/s }";
    let gateway = Gateway::start(&site("", &[route], limits));
    let begun = Instant::now();
    let requests = AtomicU64::new(0);
    let mut marks = Vec::new();
    std::thread::scope(|scope| {
        for client in 0..4 {
            let (gateway, requests) = (&gateway, &requests);
            scope.spawn(move || {
                let body = "x".repeat(20_000);
                let mut round = 0;
                while begun.elapsed() < soak {
                    let mut connection = gateway.connect();
                    for _ in 0..50 {
                        round += 1;
                        requests.fetch_add(1, Relaxed);
                        let user = format!("user-{client}-{}", round % 7);
                        let answer = match round % 5 {
                            0 => connection.ask(format!(
                                "POST / HTTP/1.1\r\nHost: h\r\nX-User-Id: {user}\r\nContent-Length: {}\r\n\r\n{body}",
                                body.len()
                            )),
                            _ => connection.get_as(&user, "/"),
                        };
                        assert!(matches!(answer.status, 200 | 429), "{}", answer.status);
                    }
                    // Some leave in the middle of a request.
                    if round % 100 == 0 {
                        connection.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\nhalf");
                    }
                }
            });
        }
        while begun.elapsed() < soak {
            std::thread::sleep(soak / 12);
            marks.push((gateway.memory_kib(), gateway.open_files()));
        }
    });
    // The first third is for buffers and pools to find their size.
    let (warm, rest) = marks.split_at(marks.len() / 3);
    let most =
        |marks: &[(u64, usize)]| marks.iter().fold((0, 0), |most, mark| (most.0.max(mark.0), most.1.max(mark.1)));
    let ((warm_kib, warm_files), (last_kib, last_files)) = (most(warm), most(rest));
    assert!(last_files < warm_files + 32, "{marks:?}");
    let (grown_kib, requests) = (last_kib.saturating_sub(warm_kib), requests.load(Relaxed));
    if soak >= LONG_SOAK {
        let leaked = grown_kib.saturating_sub(ALLOCATOR_NOISE_KIB) * 1024 / requests.max(1);
        assert!(leaked < MAX_LEAK_BYTES, "{leaked} bytes more for each of {requests} requests: {marks:?}");
    } else {
        // The noise of the allocator hides a small leak, but not one of bodies or whole requests.
        assert!(grown_kib < 2 * ALLOCATOR_NOISE_KIB, "{grown_kib} KiB more after {requests} requests: {marks:?}");
    }
}
