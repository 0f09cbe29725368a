//! Upstreams that are the gateway itself.

use testkit::folder::folder_with;
use testkit::http1::Connection;
use testkit::tollgate::{Process, RULES, fails, run_in};
use testkit::upstream::Raw;

/// A request would be forwarded in a loop until its head is too long.
#[test]
fn an_upstream_that_is_the_gateway_itself_is_refused() {
    let limit = "limits: [{ name: user, key: ip }]";
    let rules = |listen: &str, upstream: &str| {
        format!("gateway:\n  listen: {listen}\n  routes:\n    - path: /**\n      upstream: {upstream}\n{limit}\n")
    };
    let validate = |rules: &str| {
        let folder = folder_with(&[(RULES, rules)]);
        String::from_utf8(run_in(folder.path(), &["validate", RULES]).stdout).unwrap()
    };
    let fix = "requests would be forwarded in a loop: name the service behind the gateway, or change gateway.listen\n";
    let expected = |place: &str, upstream: &str, listen: &str| {
        format!("{RULES}:{place}: the upstream {upstream} is the gateway itself, which listens on {listen}: {fix}")
    };
    let problem = expected("5:17", "127.0.0.1:8080", "0.0.0.0:8080");
    let circle = rules("0.0.0.0:8080", "http://127.0.0.1:8080");
    assert_eq!(validate(&circle), format!("{problem}{RULES}: not valid: 1 error\n"));
    assert_eq!(fails(&[(RULES, &circle)]).0, problem);
    let several = rules("127.0.0.1:80", "[http://127.0.0.1:8081, { url: http://localhost, weight: 2 }]");
    let problem = expected("5:48", "localhost:80", "127.0.0.1:80");
    assert_eq!(validate(&several), format!("{problem}{RULES}: not valid: 1 error\n"));
    for (listen, upstream) in [("127.0.0.1:8080", "http://127.0.0.1:8081"), ("127.0.0.1:0", "http://127.0.0.1:8081")] {
        assert_eq!(validate(&rules(listen, upstream)), format!("{RULES}: valid, 1 limit\n"));
    }
}

#[test]
fn upstream_at_the_configured_address_is_allowed_if_the_command_line_overrides_it() {
    let upstream = Raw::named("behind");
    let rules = format!(
        "gateway:\n  listen: {}\n  routes: [{{ path: /**, upstream: {} }}]\nlimits: []\n",
        upstream.address,
        upstream.url()
    );
    let arguments = ["serve", "--config", RULES, "--listen", "127.0.0.1:0"];
    let process = Process::start(folder_with(&[(RULES, &rules)]), &arguments);
    let answer = Connection::to(process.address_of("gateway")).get("/");
    assert_eq!(answer.header("x-upstream"), Some("behind"));
    // The command line overrides the next file, too.
    std::fs::write(process.path(RULES), format!("{rules}# saved again\n")).unwrap();
    process.await_said("is in force", 1);
}
