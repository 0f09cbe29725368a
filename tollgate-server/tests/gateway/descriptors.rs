//! Processes with few open files or threads.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::sync::{Arc, Barrier};

use http::Request;
use testkit::client::{Client, Protocol, each_http2, each_protocol};
use testkit::folder::folder_with;
use testkit::http1::Connection;
use testkit::skip::skipped;
use testkit::tollgate::{Process, RULES, binary};
use testkit::upstream::{Raw, full, runtime};
use testkit::wait::wait_until;

use crate::http2::{connect_over, whole};

fn rules(max_connections: &str, upstream: &str) -> String {
    format!(
        "gateway:\n  listen: 127.0.0.1:0\n  workers: 2\n  max_connections_per_address: 1000\n  {max_connections}\n  \
         routes: [{{ path: /**, upstream: {upstream} }}]\n\
         service: {{ http: 127.0.0.1:0 }}\nadmin: {{ listen: 127.0.0.1:0 }}\n\
         limits: [{{ name: one, algorithm: fixed_window, limit: 1000000, window: 1h }}]\n"
    )
}

/// Starts a gateway that may open 256 files, and returns its address.
fn with_few_files(protocol: Protocol, rules: &str) -> (Process, SocketAddr) {
    let folder = folder_with(&[(RULES, rules)]);
    protocol.prepare(&folder);
    let process = Process::start_with_open_files(folder, 256, &["serve", "--config", RULES]);
    let address = process.address_of("gateway");
    (process, address)
}

/// Three HTTP/2 clients need more connections to an HTTP/1 upstream than the process may open files.
#[test]
fn many_streams_to_a_slow_upstream_leave_descriptors_to_everything_else() {
    each_http2(|protocol| {
        const MAX_UPSTREAM_CONNECTIONS: usize = 56;
        let upstream = Raw::start(|conversation| {
            while let Some(asked) = conversation.request() {
                if asked.head.starts_with("GET /slow") {
                    // Until the gateway closes the connection.
                    while conversation.more() {}
                    return;
                }
                conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
            }
        });
        let (process, gateway) = with_few_files(protocol, &rules("", &upstream.url()));
        let (answered, mut answers) = tokio::sync::mpsc::unbounded_channel();
        let _clients = runtime().block_on(async {
            let mut clients = Vec::new();
            for _ in 0..3 {
                let client = connect_over(protocol, gateway).await;
                for _ in 0..100 {
                    let (mut client, answered) = (client.clone(), answered.clone());
                    let request =
                        Request::get(format!("{}://{gateway}/slow", protocol.scheme())).body(full("")).unwrap();
                    tokio::spawn(async move {
                        if let Ok(response) = client.send_request(request).await {
                            let retry_after = response.headers().get("retry-after").cloned();
                            _ = answered.send((retry_after, whole(response).await));
                        }
                    });
                }
                clients.push(client);
            }
            clients
        });
        for number in 0..300 - MAX_UPSTREAM_CONNECTIONS {
            let answer = wait_until(|| answers.try_recv().ok());
            let (retry_after, (status, body, _)) =
                answer.unwrap_or_else(|| panic!("answer {number}: {}", process.said()));
            assert_eq!((status, retry_after.unwrap()), (503, "1".parse().unwrap()), "{body:?}");
            assert!(body.starts_with(br#"{"error":"too_many_upstream_connections""#), "{body:?}");
        }
        assert!((20..=MAX_UPSTREAM_CONNECTIONS).contains(&upstream.accepted()), "{}", upstream.accepted());
        // Slots are left for clients with few requests.
        assert_eq!(Client::to(gateway, protocol).get("/").status, 200);
        let page = Connection::to(process.address_of("admin")).get("/metrics");
        let page = page.text();
        let value = |name: &str| page.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<usize>().ok());
        let refused = value("tollgate_upstream_failures_total{route=\"/**\",kind=\"too_many_upstream_connections\"}");
        assert!(refused.is_some_and(|refused| refused >= 300 - MAX_UPSTREAM_CONNECTIONS), "{page}");
        assert!(value("tollgate_upstream_connections").is_some_and(|open| open <= MAX_UPSTREAM_CONNECTIONS), "{page}");
        process.await_said("the limit of open files allows no more connections to upstreams", 1);
    });
}

#[test]
fn idle_upstream_connections_are_closed_for_new_ones() {
    each_protocol(|protocol| {
        const CLIENTS: usize = 40;
        // Responds once all clients have sent a request, so that each needs a connection.
        let slow = || {
            let barrier = Arc::new(Barrier::new(CLIENTS));
            Raw::start(move |conversation| {
                while conversation.request().is_some() {
                    barrier.wait();
                    conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
                }
            })
        };
        let (one, two) = (slow(), slow());
        let rules = rules("", &one.url()).replace(
            "routes: [",
            &format!("routes: [{{ path: /two, upstream: {}, upstream_connections: {{ idle: 1h }} }}, ", two.url()),
        );
        let rules = rules.replace("{ path: /**,", "{ path: /**, upstream_connections: { idle: 1h },");
        let (process, gateway) = with_few_files(protocol, &rules);
        let mut clients: Vec<_> = (0..CLIENTS).map(|_| Client::to(gateway, protocol)).collect();
        for path in ["/one", "/two"] {
            for client in &mut clients {
                client.send(format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n"));
            }
            for client in &mut clients {
                let answer = client.receive();
                assert_eq!(answer.status, 200, "{path} {}: {}", answer.text(), process.said());
            }
        }
        assert_eq!((one.accepted(), two.accepted()), (CLIENTS, CLIENTS));
    });
}

/// Each of many clients is served or refused, none waits in vain, and the other listeners respond in the meantime.
#[test]
fn few_open_files_serve_few_clients_and_keep_the_other_listeners_alive() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        for max_connections in ["", "max_connections: 240"] {
            let (process, gateway) = with_few_files(protocol, &rules(max_connections, &upstream.url()));
            assert_eq!(
                process.said().contains("gateway.max_connections 240 is lowered to 53: the process may open 256 files"),
                !max_connections.is_empty(),
                "{}",
                process.said()
            );
            // With TLS, a client that is refused cannot even connect.
            let mut held: Vec<_> = (0..200).map(|_| Client::try_to(gateway, protocol)).collect();
            let mut served = 0;
            for connection in &mut held {
                let answer =
                    connection.as_mut().map_err(|error| io::Error::from(error.kind())).and_then(|connection| {
                        connection.try_send("GET / HTTP/1.1\r\nHost: h\r\n\r\n")?;
                        connection.try_receive()
                    });
                match answer {
                    Ok(answer) => served += usize::from(answer.status == 200),
                    Err(error) => {
                        let is_closed = !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
                        assert!(is_closed, "a client waits in vain: {error}");
                    }
                }
            }
            // On a slow machine, waiting connections may have been closed as idle.
            assert!((27..=53).contains(&served), "{served} clients are served: {}", process.said());
            assert_eq!(Connection::to(process.address_of("admin")).get("/healthz").status, 200);
            let question = r#"{"limit":"one"}"#;
            let answer = Connection::to(process.address_of("decisions POST")).ask(format!(
                "POST /v1/check HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n\
                 {question}",
                question.len()
            ));
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
    });
}

#[test]
fn too_few_open_files_end_with_2_and_the_fix() {
    let folder = folder_with(&[(RULES, &rules("", "echo"))]);
    let output = Command::new("sh")
        .args(["-c", "ulimit -n 100; exec \"$0\" serve --config tollgate.yaml", &binary()])
        .current_dir(folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("the process may open 100 files") && said.contains("LimitNOFILE="), "{said}");
}

/// The limit of threads does not apply to root, so the process runs as an unused user ID.
#[test]
fn too_few_threads_end_with_2_and_the_fix() {
    const NOBODY: &str = "61234";
    let folder = folder_with(&[(RULES, &rules("", "echo"))]);
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let run = |threads: u32| {
        // A server that starts after all would serve forever.
        Command::new("timeout")
            .args(["30", "prlimit", &format!("--nproc={threads}")])
            .args(["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"])
            .args([&binary(), "serve", "--config", RULES])
            .current_dir(folder.path())
            .env("TOKIO_WORKER_THREADS", "2")
            .output()
    };
    // Only root may change the user.
    if !Command::new("setpriv").args(["--reuid", NOBODY, "true"]).status().is_ok_and(|status| status.success()) {
        return skipped("only root may run a process as another user");
    }
    // With 1 the main runtime fails; with 4 it starts and the workers of the gateway do not.
    for threads in [1, 2, 3, 4, 5] {
        let output = run(threads).unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{threads}: {said}");
        assert!(said.contains("cannot start") && said.contains("TasksMax="), "{threads}: {said}");
        assert!(!said.contains("panicked"), "{threads}: {said}");
    }
}
