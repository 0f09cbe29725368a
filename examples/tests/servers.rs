//! Starts the examples that serve as a reader would, and sends requests to them.

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};

use testkit::http1::ask;
use testkit::redis::RedisServer;

/// Any free port.
const ANY_PORT: &str = "127.0.0.1:0";

/// An example that serves until the test ends.
struct Server {
    process: Child,
    said: Lines<BufReader<ChildStdout>>,
    address: String,
}

impl Server {
    fn start(program: &str, arguments: &[&str]) -> Self {
        let mut process =
            Command::new(program).args(arguments).stdout(Stdio::piped()).spawn().expect("the example starts");
        let mut said = BufReader::new(process.stdout.take().expect("its output is piped")).lines();
        let first = said.next().expect("it says where it listens").expect("UTF-8");
        let address = first.strip_prefix("listening on ").unwrap_or_else(|| panic!("{first}")).to_owned();
        Self { process, said, address }
    }

    /// Returns the next line of output.
    fn next_line(&mut self) -> String {
        self.said.next().expect("a line").expect("UTF-8")
    }

    /// Returns the status of a response, and its `ratelimit` header.
    fn send(&self, header: &str) -> (u16, String) {
        let address = self.address.parse().expect("an address and a port");
        let response = ask(address, format!("GET / HTTP/1.1\r\nhost: localhost\r\n{header}connection: close\r\n\r\n"));
        let left = response.header("ratelimit").unwrap_or_default();
        // The time that follows depends on the speed of the machine.
        let left = left.split_once(";t=").map_or(left, |(left, _)| left);
        (response.status, left.to_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn axum_tiers_gives_each_plan_its_own_numbers() {
    let server = Server::start(env!("CARGO_BIN_EXE_axum_tiers"), &[ANY_PORT]);
    let left = |account: &str| server.send(&format!("authorization: Bearer {account}\r\n"));
    assert_eq!(left("ann-gold"), (200, "\"per-user\";r=999".to_owned()));
    assert_eq!(left("bob-silver"), (200, "\"per-user\";r=99".to_owned()));
    for remaining in ["2", "1", "0"] {
        assert_eq!(left("eve-free"), (200, format!("\"per-user\";r={remaining}")));
    }
    assert_eq!(left("eve-free").0, 429);
    // A client that upgrades gets the larger quota at once, and keeps what it has spent.
    assert_eq!(left("eve-silver"), (200, "\"per-user\";r=96".to_owned()));
}

#[test]
fn axum_redis_counts_for_all_servers() {
    let redis = RedisServer::start();
    let servers: Vec<Server> =
        (0..2).map(|_| Server::start(env!("CARGO_BIN_EXE_axum_redis"), &[&redis.url(), ANY_PORT])).collect();
    let statuses: Vec<u16> = (0..7).map(|call| servers[call % 2].send("").0).collect();
    assert_eq!(statuses, [200, 200, 200, 200, 200, 429, 429]);
}

#[test]
fn hot_reload_changes_the_rules_and_keeps_what_was_spent() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("tollgate.yaml");
    let write = |limit: &str| {
        let text = format!(
            "limits: [{{ name: per-client, key: ip, algorithm: fixed_window, align: first_request, limit: {limit} }}]\n"
        );
        let new = dir.path().join("new.yaml");
        std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &file)).expect("it can be written");
    };
    write("2");
    let mut server = Server::start(env!("CARGO_BIN_EXE_hot_reload"), &[file.to_str().expect("a plain path"), ANY_PORT]);
    let statuses: Vec<u16> = (0..3).map(|_| server.send("").0).collect();
    assert_eq!(statuses, [200, 200, 429]);

    write("5");
    assert_eq!(server.next_line(), "new rules are in force");
    assert_eq!(server.send(""), (200, "\"per-client\";r=2".to_owned()));

    write("many");
    let said = server.next_line();
    assert!(said.starts_with("the old rules stay in force: ") && said.contains(":1:"), "{said}");
    assert_eq!(server.send(""), (200, "\"per-client\";r=1".to_owned()));
}
