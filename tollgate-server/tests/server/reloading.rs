//! Rules change while the server runs, however the file is changed.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use testkit::folder::{folder, folder_with};
use testkit::service::{Server, served};
use testkit::tollgate::RULES;
use testkit::wait::SetOnDrop;

fn limit(name: &str, limit: u64) -> String {
    format!(
        "  - {{ name: {name}, key: 'header:x-user-id', algorithm: fixed_window, align: first_request, \
         limit: {limit}, window: 1h }}\n"
    )
}

fn limits(all: &[(&str, u64)]) -> String {
    format!("limits:\n{}", all.iter().map(|(name, quota)| limit(name, *quota)).collect::<String>())
}

fn ann(limit: &str) -> Value {
    json!({"limit": limit, "key": "ann"})
}

#[test]
fn saving_the_file_changes_numbers_at_once_and_counts_survive() {
    let server = Server::with_rules(&limits(&[("user", 10), ("old", 5)]));
    let mut connection = server.connect();
    assert_eq!(connection.check(&json!({"limit": "user", "key": "ann", "cost": 4}))["remaining"], 6);
    server.save_rules(&limits(&[("user", 20), ("new", 7)]));
    server.await_said("tollgate: tollgate.yaml is in force: added new; user: limit 10 → 20; removed old\n", 1);
    assert_eq!(connection.check(&ann("user"))["remaining"], 15);
    assert_eq!(connection.check(&ann("new"))["remaining"], 6);
    assert_eq!(connection.post(ann("old").to_string()).status, 400);
}

#[test]
fn counts_of_a_shadow_limit_carry_over_when_it_is_enforced() {
    let shadow = limits(&[("user", 2)]).replace("window: 1h }", "window: 1h, shadow: true }");
    let server = Server::with_rules(&shadow);
    let mut connection = server.connect();
    for _ in 0..3 {
        assert_eq!(connection.check(&ann("user"))["allowed"], true);
    }
    server.save_rules(&limits(&[("user", 2)]));
    server.await_said("tollgate: tollgate.yaml is in force: user: shadow true → unset\n", 1);
    let answer = connection.check(&ann("user"));
    assert_eq!((&answer["allowed"], &answer["remaining"]), (&json!(false), &json!(0)));
}

#[test]
fn renaming_another_file_into_its_place_is_seen() {
    let server = Server::with_rules(&limits(&[("user", 10)]));
    for quota in [20, 30] {
        std::fs::write(server.path("draft"), served(&limits(&[("user", quota)]))).unwrap();
        std::fs::rename(server.path("draft"), server.path(RULES)).unwrap();
        server.await_said("tollgate.yaml is in force: user: ", quota as usize / 10 - 1);
        assert_eq!(server.connect().check(&ann("user"))["quota"], quota);
    }
}

/// Changes the file as Kubernetes changes a ConfigMap: the file is a link into `..data`, which is a link that is
/// replaced.
#[test]
fn swapping_a_link_on_the_way_is_seen() {
    let folder = folder();
    mount(folder.path(), 1);
    symlink(format!("..data/{RULES}"), folder.path().join(RULES)).unwrap();
    let server = Server::in_folder(folder);
    for version in [2, 3] {
        mount(&server.path(""), version);
        server.await_said("is in force: user: ", version as usize - 1);
        assert_eq!(server.connect().check(&ann("user"))["quota"], version);
    }
}

fn mount(folder: &Path, version: u64) {
    let inner = folder.join(format!("..{version}"));
    std::fs::create_dir(&inner).expect("the folder is writable");
    std::fs::write(inner.join(RULES), served(&limits(&[("user", version)]))).expect("the folder is writable");
    symlink(format!("..{version}"), folder.join("..data_tmp")).expect("the folder is writable");
    std::fs::rename(folder.join("..data_tmp"), folder.join("..data")).expect("the folder is writable");
    if version > 1 {
        std::fs::remove_dir_all(folder.join(format!("..{}", version - 1))).expect("the folder is writable");
    }
}

#[test]
fn hangup_reads_the_file_again_even_if_it_is_the_same() {
    let server = Server::with_rules(&limits(&[("user", 10)]));
    server.signal("HUP");
    server.await_said("tollgate.yaml is in force: no changes", 1);
}

#[test]
fn a_touch_changes_nothing_and_says_nothing() {
    let server = Server::with_rules(&limits(&[("user", 10)]));
    server.save_rules(&limits(&[("user", 10)]));
    // A later change is logged, so the earlier one was noticed.
    server.save_rules(&limits(&[("user", 11)]));
    server.await_said("is in force", 1);
    assert_eq!(server.said(), "tollgate: tollgate.yaml is in force: user: limit 10 → 11\n");
}

#[test]
fn a_bad_file_changes_nothing_and_every_problem_is_reported() {
    let server = Server::with_rules(&limits(&[("user", 10)]));
    server.connect().check(&ann("user"));
    server.save_rules("limits:\n  - name: user\n    limit: 0\n    windw: 1h\n");
    let said = server.await_said(
        "tollgate.yaml:4:12: limit 0 admits nothing: use 1 or more, or `blocked` to refuse every request\n",
        1,
    );
    let first = "tollgate: tollgate.yaml is rejected, and the previous rules stay in force:\ntollgate.yaml:4:12: ";
    assert!(said.starts_with(first), "{said}");
    assert!(said.contains("tollgate.yaml:5:5: unknown key `windw`"), "{said}");
    assert_eq!(server.connect().check(&ann("user"))["remaining"], 8);

    std::fs::write(server.path(RULES), "\n").unwrap();
    server.await_said("the previous rules stay in force: it is empty: write `limits: []` to allow everything", 1);
    std::fs::remove_file(server.path(RULES)).unwrap();
    server.await_said("the previous rules stay in force: cannot read tollgate.yaml: No such file", 1);
    assert_eq!(server.connect().check(&ann("user"))["remaining"], 7);

    server.save_rules(&limits(&[("user", 12)]));
    server.await_said("tollgate.yaml is in force: user: ", 1);
    assert_eq!(server.connect().check(&ann("user"))["remaining"], 8);
}

#[test]
fn another_store_starts_anew() {
    let server = Server::with_rules(&limits(&[("user", 10)]));
    server.connect().check(&ann("user"));
    server.save_rules(&format!("max_memory: 64MiB\n{}", limits(&[("user", 10)])));
    server.await_said("tollgate: the store has changed; counts start from zero\n", 1);
    assert_eq!(server.connect().check(&ann("user"))["remaining"], 9);
}

/// A setting that is changed back to its value at the start is in force already.
#[test]
fn changes_that_need_a_restart_are_reported() {
    let rules = |gateway: &str| {
        served(&format!(
            "gateway: {{ listen: '127.0.0.1:0', {gateway}, routes: [{{ path: /**, upstream: echo }}] }}\n{}",
            limits(&[("user", 10)])
        ))
    };
    let started = rules("workers: 1, max_connections: 100, timeouts: { drain: 1s }");
    let server = Server::in_folder(folder_with(&[(RULES, &started)]));
    let save = |rules: &str, turn: usize| {
        std::fs::write(server.path(RULES), rules).unwrap();
        server.await_said("is in force", turn);
    };
    save(&rules("workers: 2, max_connections: 101, timeouts: { drain: 2s }"), 1);
    let wanted = "tollgate: warning: gateway.workers has changed: restart the server to apply it
tollgate: warning: gateway.max_connections has changed: restart the server to apply it
tollgate: warning: gateway.timeouts.drain has changed: restart the server to apply it
";
    let said = server.await_said("gateway.timeouts.drain has changed", 1);
    assert!(said.ends_with(wanted), "{said}");
    save(&started, 2);
    // The next change is logged after any line about this one.
    save(&rules("workers: 1, max_connections: 101, timeouts: { drain: 1s }"), 3);
    let said = server.await_said("gateway.max_connections has changed", 2);
    assert_eq!(said.matches("restart the server to apply it").count(), 4, "{said}");
}

#[test]
fn settings_from_the_command_line_need_no_restart() {
    let rules = |admin: &str| format!("admin: {{ listen: '127.0.0.1:{admin}' }}\n{}", limits(&[("user", 10)]));
    let free = "127.0.0.1:0";
    let arguments = ["serve", "--config", RULES, "--http", free, "--admin", free];
    let server = Server::run(folder_with(&[(RULES, &served(&rules("1")))]), &arguments);
    server.save_rules(&rules("2"));
    server.await_said("is in force", 1);
    server.save_rules(&limits(&[("user", 20)]));
    let said = server.await_said("is in force", 2);
    assert!(!said.contains("restart the server to apply it"), "{said}");
}

#[test]
fn keys_of_tokens_are_read_again_when_their_file_changes() {
    let rules = "jwt: { key_file: secret.key, algorithms: [HS256] }\nlimits:\n  - { name: user, key: 'jwt:sub', \
                 missing: deny }\n";
    let secrets = ["0123456789abcdef0123456789abcdef", "ffffffffffffffffffffffffffffffff"];
    let server = Server::in_folder(folder_with(&[(RULES, &served(rules)), ("secret.key", secrets[0])]));
    let key = jsonwebtoken::EncodingKey::from_secret(secrets[1].as_bytes());
    let claims = json!({"sub": "ann", "exp": 4_000_000_000_u64});
    let token = jsonwebtoken::encode(&jsonwebtoken::Header::default(), &claims, &key).unwrap();
    let question = json!({"request": {"headers": {"authorization": format!("Bearer {token}")}}});
    assert_eq!(server.connect().check(&question)["reason"], "token_bad_signature");
    std::fs::write(server.path("secret.key"), secrets[1]).unwrap();
    server.await_said("tollgate.yaml is in force", 1);
    assert_eq!(server.connect().check(&question)["allowed"], true);
}

/// A limit that stays the same admits exactly its quota while the limits around it change back and forth.
#[test]
fn reloading_under_load_gives_no_wrong_answer() {
    const QUOTA: u64 = 2000;
    let around = [&[("before", 5), ("user", QUOTA)][..], &[("user", QUOTA), ("behind", 9), ("more", 3)]];
    let server = Server::with_rules(&limits(around[0]));
    let done = AtomicBool::new(false);
    let admitted: usize = std::thread::scope(|scope| {
        let set_done = SetOnDrop(&done);
        let clients = [(); 4].map(|()| {
            scope.spawn(|| {
                let mut connection = server.connect();
                let mut admitted = 0;
                while !done.load(Ordering::Relaxed) {
                    let answer = connection.check(&ann("user"));
                    assert_eq!((&answer["limit"], &answer["quota"]), (&json!("user"), &json!(QUOTA)), "{answer}");
                    admitted += usize::from(answer["allowed"] == true);
                }
                admitted
            })
        });
        for turn in 1..=8 {
            server.save_rules(&limits(around[turn % 2]));
            server.await_said("is in force", turn);
        }
        // Takes the rest, so that the sum is the quota if no count was lost or created.
        let mut connection = server.connect();
        let rest = (0..).take_while(|_| connection.check(&ann("user"))["allowed"] == true).count();
        drop(set_done);
        rest + clients.map(|client| client.join().unwrap()).iter().sum::<usize>()
    });
    assert_eq!(admitted as u64, QUOTA);
}
