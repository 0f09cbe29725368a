//! Certificates and passwords of a store that are replaced while nodes run: new connections use the new files.

use std::path::Path;
use std::time::Duration;

use testkit::redis::RedisServer;
use testkit::wait::poll;
use tollgate::{Decision, Source};
use tollgate_config::RuleFile;
use tollgate_rules::Gate;

/// The longest that a recovery may take: probes are at most a second apart.
const RECOVERY: Duration = Duration::from_secs(20);

/// Opens a gate on a server with TLS, with the certificates in a folder.
async fn gate(server: &RedisServer, folder: &Path) -> Gate {
    let text = format!(
        "store: {{ url: '{}', ca: ca.pem, client_cert: client.pem, client_key: client-key.pem }}
store_timeout: 5s
on_store_failure: deny
limits: [{{ name: per-user, key: 'header:x-user-id', limit: 10000, window: 10220d }}]\n",
        server.url()
    );
    let file = RuleFile::parse("tollgate.yaml", text).expect("a valid file").in_folder(folder);
    tollgate_config::open_gate(&file).await.expect("the files are there")
}

/// Copies the files of a client from the server.
fn copy_files(server: &RedisServer, folder: &Path) {
    let (certificate, key) = server.client_files();
    for (from, name) in [(server.ca_path(), "ca.pem"), (certificate, "client.pem"), (key, "client-key.pem")] {
        std::fs::copy(from, folder.join(name)).expect("copied");
    }
}

async fn checked(gate: &Gate) -> Decision {
    let outcome = gate.check_by_name("per-user", &[b"ann"], 1).expect("the rule exists").outcome().await;
    *outcome.decision().expect("the limit decides")
}

/// Closes all connections, and sends requests until the store decides again. Returns the remaining quota.
async fn remaining_after_reconnect(gate: &Gate, server: &RedisServer) -> u64 {
    server.kill_clients();
    let begin = tokio::time::Instant::now();
    loop {
        let decision = checked(gate).await;
        if decision.source() == Source::Store {
            return decision.remaining();
        }
        let why = gate.redis().and_then(|store| store.why_unavailable());
        assert!(begin.elapsed() < RECOVERY, "the store does not decide again: {why:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_connections_use_certificates_that_were_replaced() {
    let (server, folder) = (RedisServer::start_tls_with_clients(), tempfile::tempdir().expect("a folder"));
    copy_files(&server, folder.path());
    let gate = gate(&server, folder.path()).await;
    assert_eq!((checked(&gate).await.source(), checked(&gate).await.remaining()), (Source::Store, 9_998));
    for _ in 0..2 {
        server.rotate_certificates();
        copy_files(&server, folder.path());
        assert!(remaining_after_reconnect(&gate, &server).await < 9_998, "the counts are still there");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_cannot_be_used_leaves_the_last_good_one_in_use_with_a_warning() {
    let (server, folder) = (RedisServer::start_tls_with_clients(), tempfile::tempdir().expect("a folder"));
    copy_files(&server, folder.path());
    let gate = gate(&server, folder.path()).await;
    let warnings = || -> Vec<String> {
        let stores = gate.redis().expect("a store on Redis").stores();
        stores[0].warnings.iter().map(ToString::to_string).collect()
    };
    assert_eq!((checked(&gate).await.source(), warnings()), (Source::Store, Vec::new()));
    let damages: [(&str, Option<&str>, &str); 4] = [
        ("ca.pem", Some("not a certificate"), "ca.pem) has no certificate in it"),
        ("client-key.pem", None, "client_key: cannot read"),
        ("client-key.pem", Some("no key"), "client-key.pem) has no private key in it"),
        ("client.pem", Some(""), "client.pem) has no certificate in it"),
    ];
    for (name, content, problem) in damages {
        match content {
            Some(content) => std::fs::write(folder.path().join(name), content).expect("written"),
            None => std::fs::remove_file(folder.path().join(name)).expect("removed"),
        }
        remaining_after_reconnect(&gate, &server).await;
        let warnings = warnings();
        assert!(matches!(&*warnings, [one] if one.contains(problem)), "{name}: {warnings:?}");
        copy_files(&server, folder.path());
        remaining_after_reconnect(&gate, &server).await;
    }
    let no_warning = poll(RECOVERY, || warnings().is_empty().then_some(()));
    assert!(no_warning.is_some(), "{:?}", warnings());
}
