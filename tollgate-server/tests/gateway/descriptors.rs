//! A process that may not open many files, or start many threads.

use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use crate::client::Connection;
use crate::common::{Process, RULES, folder_with};
use crate::upstream::Raw;

fn rules(max_connections: &str, upstream: &str) -> String {
    format!(
        "gateway:\n  listen: 127.0.0.1:0\n  workers: 2\n  max_connections_per_address: 1000\n  {max_connections}\n  \
         routes: [{{ path: /**, upstream: {upstream} }}]\n\
         service: {{ http: 127.0.0.1:0 }}\nadmin: {{ listen: 127.0.0.1:0 }}\n\
         limits: [{{ name: one, algorithm: fixed_window, limit: 1000000, window: 1h }}]\n"
    )
}

/// Each of many clients is served or refused, none waits in vain, and the other listeners answer all the while.
#[test]
fn few_open_files_serve_few_clients_and_keep_the_other_listeners_alive() {
    let upstream = Raw::named("one");
    for max_connections in ["", "max_connections: 240"] {
        let folder = folder_with(&[(RULES, &rules(max_connections, &upstream.url()))]);
        let process = Process::start_with_open_files(folder, 256, &["serve", "--config", RULES]);
        assert_eq!(
            process.said().contains("gateway.max_connections 240 is lowered to 52: the process may open 256 files"),
            !max_connections.is_empty(),
            "{}",
            process.said()
        );
        let mut held: Vec<Connection> = (0..200).map(|_| Connection::to(process.address_of("gateway"))).collect();
        let mut served = 0;
        for connection in &mut held {
            let asked = connection.try_send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
            match asked.and_then(|()| connection.try_receive()) {
                Ok(answer) => served += usize::from(answer.status == 200),
                Err(error) => {
                    let is_closed =
                        !matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut);
                    assert!(is_closed, "a client waits in vain: {error}");
                }
            }
        }
        // On a slow machine, connections that waited for their turn may have been closed as idle.
        assert!((26..=52).contains(&served), "{served} clients are served: {}", process.said());
        assert_eq!(Connection::to(process.address_of("admin")).get("/healthz").status, 200);
        let question = r#"{"limit":"one"}"#;
        let answer = Connection::to(process.address_of("decisions POST")).ask(format!(
            "POST /v1/check HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n\
             {question}",
            question.len()
        ));
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
}

#[test]
fn too_few_open_files_end_with_2_and_the_fix() {
    let folder = folder_with(&[(RULES, &rules("", "echo"))]);
    let output = Command::new("sh")
        .args(["-c", "ulimit -n 100; exec \"$0\" serve --config tollgate.yaml", env!("CARGO_BIN_EXE_tollgate")])
        .current_dir(folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("the process may open 100 files") && said.contains("LimitNOFILE="), "{said}");
}

/// The bound on threads does not hold for root, so the process runs as a user that nobody is.
#[test]
fn too_few_threads_end_with_2_and_the_fix() {
    const NOBODY: &str = "61234";
    let folder = folder_with(&[(RULES, &rules("", "echo"))]);
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let run = |threads: u32| {
        Command::new("prlimit")
            .arg(format!("--nproc={threads}"))
            .args(["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"])
            .args([env!("CARGO_BIN_EXE_tollgate"), "serve", "--config", RULES])
            .current_dir(folder.path())
            .env("TOKIO_WORKER_THREADS", "2")
            .output()
    };
    // Only root may become somebody else.
    if !Command::new("setpriv").args(["--reuid", NOBODY, "true"]).status().is_ok_and(|status| status.success()) {
        return;
    }
    // With 1 the first of all fails; with 4 the runtime starts and the workers of the gateway do not.
    for threads in [1, 2, 3, 4, 5] {
        let output = run(threads).unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{threads}: {said}");
        assert!(said.contains("cannot start") && said.contains("TasksMax="), "{threads}: {said}");
        assert!(!said.contains("panicked"), "{threads}: {said}");
    }
}
