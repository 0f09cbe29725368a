//! Files of envoyproxy/ratelimit are loaded, checked and reloaded with the rule file.

use testkit::folder::{folder, folder_with};
use testkit::service::{Server, served};
use testkit::tollgate::{RULES, run_in, transcript};

use crate::remaining;

const SERVICE: &str = "service: { http: '127.0.0.1:0', envoy: { files: ratelimit } }\nlimits: []\n";

/// Returns a file with one limit per day for each value of a key.
fn file(domain: &str, key: &str, requests: u32) -> String {
    format!(
        "domain: {domain}\ndescriptors:\n  - key: {key}\n    rate_limit: {{ unit: year, requests_per_unit: {requests} }}\n"
    )
}

fn server(files: &[(&str, &str)]) -> Server {
    let folder = folder();
    std::fs::create_dir(folder.path().join("ratelimit")).expect("the folder is writable");
    std::fs::write(folder.path().join(RULES), SERVICE).expect("the folder is writable");
    for (name, text) in files {
        std::fs::write(folder.path().join("ratelimit").join(name), text).expect("the folder is writable");
    }
    Server::in_folder(folder)
}

#[test]
fn limits_of_all_files_in_a_folder_are_in_force() {
    let (one, other) = (file("edge", "user", 3), file("mail", "to", 2));
    let server =
        server(&[("edge.yaml", &one), ("mail.yml", &other), (".hidden.yaml", "domain: ["), ("notes.txt", "x")]);
    assert!(server.first_line.contains("2 limits from files of envoyproxy/ratelimit"), "{}", server.first_line);
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(2));
    assert_eq!(remaining(&server, "edge.user", "bob"), Some(2));
    assert_eq!(remaining(&server, "mail.to", "x"), Some(1));
    assert_eq!(remaining(&server, "other", "x"), None);
}

#[test]
fn files_are_reloaded_when_they_change_and_counts_survive() {
    let server = server(&[("edge.yaml", &file("edge", "user", 3))]);
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(2));
    std::fs::write(server.path("ratelimit/edge.yaml"), file("edge", "user", 10)).expect("the folder is writable");
    server.await_said("tollgate.yaml is in force: edge.user: 3 per ", 1);
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(8));
    std::fs::write(server.path("ratelimit/mail.yaml"), file("mail", "to", 2)).expect("the folder is writable");
    server.await_said("tollgate.yaml is in force: added mail.to", 1);
    assert_eq!(remaining(&server, "mail.to", "x"), Some(1));
    std::fs::remove_file(server.path("ratelimit/mail.yaml")).expect("the folder is writable");
    server.await_said("tollgate.yaml is in force: removed mail.to", 1);
    assert_eq!(remaining(&server, "mail.to", "x"), None);
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(7));
}

#[test]
fn a_file_with_problems_changes_nothing() {
    let server = server(&[("edge.yaml", &file("edge", "user", 3))]);
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(2));
    std::fs::write(server.path("ratelimit/bad.yaml"), file("edge", "other", 1)).expect("the folder is writable");
    let said = server.await_said("domain `edge` is already configured", 1);
    assert!(said.contains("tollgate.yaml is rejected, and the previous rules stay in force"), "{said}");
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(1));
    std::fs::write(server.path("ratelimit/bad.yaml"), file("mail", "to", 1)).expect("the folder is writable");
    server.await_said("tollgate.yaml is in force: added mail.to", 1);
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(0));
}

#[test]
fn validate_reports_the_problems_of_all_files() {
    let rules = |files: &str| served("limits: []\n").replace(" }", &format!(", envoy: {{ files: {files} }} }}"));
    let bad = "domain: edge\ndescriptors:\n  - key: a\n    rate_limit: { unit: fortnight, requests_per_unit: 1 }\n  - value: b\n";
    let folder = folder_with(&[
        ("good.yaml", &rules("[edge.yaml]")),
        ("edge.yaml", &file("edge", "user", 1)),
        ("bad.yaml", &rules("'*.bad'")),
        ("a.bad", bad),
        ("b.bad", "domian: edge\n"),
        ("c.bad", bad),
        ("absent.yaml", &rules("[absent/*.yaml, none.yaml]")),
        ("xds.yaml", &rules("[edge.yaml]").replace(" }\n", ", xds: 'ftp://a' }\n")),
    ]);
    let files = ["good.yaml", "bad.yaml", "absent.yaml", "xds.yaml"];
    let outputs = files.map(|name| transcript(&run_in(folder.path(), &["validate", name])));
    insta::assert_snapshot!(outputs.join("\n---\n"));
}
