//! Every example is run as a reader would run it, and prints what it promises.

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

fn lines(program: &str) -> Vec<String> {
    lines_with(program, &[])
}

fn lines_with(program: &str, arguments: &[&str]) -> Vec<String> {
    let output = Command::new(program).args(arguments).output().expect("the example starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8").lines().map(str::to_owned).collect()
}

#[test]
fn plain_greets_three_times_a_minute() {
    let expected = [
        "call 1: hello, ann (2 left)",
        "call 2: hello, ann (1 left)",
        "call 3: hello, ann (0 left)",
        "call 4: too many; passes in 20 s",
        "call 5: too many; passes in 20 s",
    ];
    assert_eq!(lines(env!("CARGO_BIN_EXE_plain")), expected);
}

#[test]
fn per_user_admits_exactly_the_limit_from_all_threads() {
    let expected = ["ann: 20 of 200 calls passed", "bob: 20 of 200 calls passed", "eve: 20 of 200 calls passed"];
    assert_eq!(lines(env!("CARGO_BIN_EXE_per_user")), expected);
}

#[test]
fn tiers_spend_nothing_on_a_denied_call() {
    let mut expected =
        (1..=10).map(|call| format!("call {call} passes; endpoint has {} left", 10 - call)).collect::<Vec<_>>();
    expected.push("call 11 is denied; endpoint has 0 left".to_owned());
    expected.push("global has 9990 left".to_owned());
    expected.push("user has 90 left".to_owned());
    assert_eq!(lines(env!("CARGO_BIN_EXE_tiers")), expected);
}

#[test]
fn shaping_lets_one_job_leave_every_100_ms() {
    let lines = lines(env!("CARGO_BIN_EXE_shaping"));
    let (last, jobs) = lines.split_last().expect("output");
    assert_eq!(last, "the impatient job gave up");
    assert_eq!(jobs.len(), 5);
    for (index, job) in jobs.iter().enumerate() {
        let after_ms = job
            .strip_prefix(&format!("job {} left after ", index + 1))
            .and_then(|rest| rest.strip_suffix(" ms"))
            .and_then(|number| number.parse::<usize>().ok())
            .unwrap_or_else(|| panic!("{job}"));
        // The limiter's clock started a moment before the one that prints.
        assert!(after_ms + 5 >= index * 100, "{job}");
    }
}

/// A Redis that ends with the test.
struct Redis {
    server: Child,
    port: u16,
    _dir: tempfile::TempDir,
}

impl Redis {
    fn start() -> Self {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port").port();
        let dir = tempfile::tempdir().expect("a directory");
        let program = std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
        let server = Command::new(program)
            .args(["--port", &port.to_string(), "--save", "", "--dir"])
            .arg(dir.path())
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server starts: tools/install-redis installs it");
        let mut redis = Self { server, port, _dir: dir };
        redis.wait();
        redis
    }
}

impl Redis {
    #[expect(clippy::disallowed_methods, reason = "a real server takes real time to start")]
    fn wait(&mut self) {
        for _ in 0..1000 {
            if TcpStream::connect(("127.0.0.1", self.port)).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("redis-server did not come up");
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

#[test]
fn shared_counts_for_both_servers() {
    let redis = Redis::start();
    let url = format!("redis://127.0.0.1:{}", redis.port);
    let mut expected: Vec<_> = (1..=5)
        .map(|call| format!("call {call} on server {} passes; {} left, says Store", call % 2, 5 - call))
        .collect();
    expected.push("call 6 on server 0 is denied; 0 left, says Store".to_owned());
    assert_eq!(lines_with(env!("CARGO_BIN_EXE_shared"), &[&url]), expected);
}
