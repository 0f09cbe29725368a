//! `tollgate validate`.

use std::path::Path;
use std::process::Command;

use testkit::certificates::Authority;
use testkit::folder::folder_with;
use testkit::tollgate::{RULES, run_in, run_with_stdin, transcript};

const GOOD: &str = "limits:\n  - { name: user, key: ip }\n";
const ODD: &str = "limits: []\n";
const BAD: &str = "\
store: memroy
limits:
  - name: user
    capcity: 3
    algorithm: token_bucket
  - name: user
    limit: 0
  - name: office
    exempt: { ips: [10.0.0.1/8] }
    cost: 11
    match: { when: 'request.path + 1' }
";
const WITHOUT_KEYS: &str =
    "jwt: { key_file: absent.pem, algorithms: [RS256] }\nlimits: [{ name: user, key: 'jwt:sub' }]\n";
const TOO_SMALL: &str = "max_memory: 4KiB\nlimits: [{ name: user, key: ip }]\n";

fn validate(arguments: &[&str]) -> String {
    let files = [
        ("good.yaml", GOOD),
        ("odd.yaml", ODD),
        ("bad.yaml", BAD),
        ("without-keys.yaml", WITHOUT_KEYS),
        ("small.yaml", TOO_SMALL),
    ];
    transcript(&run_in(folder_with(&files).path(), &[&["validate"], arguments].concat()))
}

#[test]
fn a_good_file_is_valid() {
    assert_eq!(validate(&["good.yaml"]), "good.yaml: valid, 1 limit\nexit code 0");
    assert_eq!(validate(&["--json", "good.yaml"]), "[]\nexit code 0");
}

#[test]
fn a_valid_file_with_a_warning() {
    insta::assert_snapshot!(validate(&["odd.yaml"]));
}

#[test]
fn warnings_are_errors_if_validation_is_strict() {
    let odd = validate(&["odd.yaml"]);
    assert!(odd.ends_with("odd.yaml: valid, no limits, 1 warning\nexit code 0"), "{odd}");
    let odd = validate(&["--strict", "odd.yaml"]);
    assert!(odd.ends_with("odd.yaml: not valid: 1 warning\nexit code 1"), "{odd}");
    assert_eq!(validate(&["--strict", "good.yaml"]), "good.yaml: valid, 1 limit\nexit code 0");
    assert!(validate(&["--strict", "--json", "odd.yaml"]).ends_with("exit code 1"));
}

#[test]
fn a_key_that_all_requests_would_share_is_refused_when_a_file_is_checked_and_when_it_is_served() {
    let rules = |key: &str| format!("limits: [{{ name: per-client, key: {key} }}]\n");
    let folder = |key: &str| folder_with(&[(RULES, &rules(key))]);
    let validate =
        |key: &str| transcript(&run_in(folder(key).path(), &["validate", RULES])).replace(&format!("{RULES}:"), "");
    let problem = "1:35: `x-api-key` is not a part of a key: write header:x-api-key, or const:x-api-key for a constant, the \
                   same for all requests\n";
    assert_eq!(validate("x-api-key"), format!("{problem} not valid: 1 error\nexit code 1"));
    for meant in ["header:x-api-key", "const:x-api-key"] {
        assert_eq!(validate(meant), " valid, 1 limit\nexit code 0");
    }
    let served = transcript(&run_in(folder("remote_addr").path(), &["serve", "--config", RULES]));
    assert!(
        served.contains("`remote_addr` is not a part of a key: write ip") && served.ends_with("exit code 2"),
        "{served}"
    );
}

#[test]
fn routes_that_no_request_reaches_are_reported() {
    let rules = "\
gateway:
  routes:
    - { path: /a, methods: [GET, POST], upstream: echo }
    - { path: /a, methods: [GET], upstream: echo }
    - { path: /shop/**, strip_prefix: /store, upstream: echo }
limits: [{ name: user, key: ip }]
";
    let output = transcript(&run_in(folder_with(&[(RULES, rules)]).path(), &["validate", RULES]));
    insta::assert_snapshot!(output);
}

#[test]
fn too_many_proxies_are_reported_once() {
    let networks: Vec<String> = (0..=16_384).map(|n| format!("10.{}.{}.{}", n >> 14, n >> 7 & 127, n & 127)).collect();
    let gateway = format!("trusted_proxies: [{}], routes: [{{ path: /**, upstream: echo }}]", networks.join(", "));
    let folder = folder_with(&[(RULES, &format!("limits: []\ngateway: {{ {gateway} }}\n"))]);
    let output = transcript(&run_in(folder.path(), &["validate", RULES]));
    let problem =
        "tollgate.yaml:2:29: trusted_proxies: there are more than 16384 networks: join neighbours into wider ones\n";
    assert!(output.contains(problem) && output.matches("networks").count() == 1, "{output}");
}

#[test]
fn every_problem_is_reported_at_once() {
    insta::assert_snapshot!(validate(&["bad.yaml"]));
}

#[test]
fn every_problem_is_reported_as_json() {
    insta::assert_snapshot!(validate(&["--json", "bad.yaml"]));
}

#[test]
fn referenced_files_and_memory_are_checked() {
    insta::assert_snapshot!(validate(&["without-keys.yaml", "small.yaml"]));
}

#[test]
fn token_files_are_read() {
    let tokens = format!("# of the shop\n{}\n", "0123456789abcdef".repeat(2));
    let listener = |file: &str| format!("{{ listen: '0.0.0.0:0', tokens_file: {file} }}");
    let rules = |http: &str, resp: &str| {
        format!("service:\n  http: {}\n  resp: {}\nlimits: [{{ name: user }}]\n", listener(http), listener(resp))
    };
    let files = [
        ("good.yaml", &*rules("tokens.txt", "tokens.txt")),
        ("bad.yaml", &rules("absent.txt", "empty.txt")),
        ("tokens.txt", &tokens),
        ("empty.txt", "\n"),
    ];
    let folder = folder_with(&files);
    let output = transcript(&run_in(folder.path(), &["validate", "good.yaml", "bad.yaml"]));
    insta::assert_snapshot!(output.replace(&*folder.path().to_string_lossy(), "FOLDER"));
}

#[test]
fn one_invalid_file_of_several_exits_with_1() {
    let output = validate(&["good.yaml", "bad.yaml"]);
    assert!(output.starts_with("good.yaml: valid, 1 limit\nbad.yaml:1:8: "), "{output}");
    assert!(output.ends_with("exit code 1"), "{output}");
}

#[test]
fn a_file_that_cannot_be_read_exits_with_2() {
    insta::assert_snapshot!(validate(&["good.yaml", "absent.yaml"]));
}

/// `tollgate validate <(…)` opens such a pipe too.
#[test]
fn commands_read_the_rule_file_that_they_are_given_from_a_pipe() {
    let log = "192.0.2.7 - - [10/Oct/2025:13:55:36 +0000] \"GET / HTTP/1.1\" 200 5\n";
    let folder = folder_with(&[("access.log", log)]);
    let run = |arguments: &[&str]| transcript(&run_with_stdin(folder.path(), arguments, GOOD.as_bytes()));
    assert_eq!(run(&["validate", "/dev/stdin"]), "/dev/stdin: valid, 1 limit\nexit code 0");
    for command in [
        &["explain", "--config", "/dev/stdin", "GET", "/", "--ip", "192.0.2.7"][..],
        &["replay", "--config", "/dev/stdin", "access.log"],
        &["simulate", "--config", "/dev/stdin"],
    ] {
        let output = run(command);
        assert!(output.contains("user") && output.ends_with("exit code 0"), "{command:?}: {output}");
    }
    let endless = run(&["validate", "/dev/zero"]);
    assert!(endless.contains("more than 4 MiB") && endless.ends_with("exit code 1"), "{endless}");
}

/// Opening a pipe waits for its writer, which may never come, and a server reads its files again.
#[test]
fn files_that_a_server_reads_or_rules_name_are_refused_at_once_if_they_are_pipes() {
    let authority = Authority::new();
    let signed = authority.sign(&["localhost"]);
    let tls = "tls: { certificates: { cert: CERT, key: KEY }, client_ca: CA }";
    let rules = format!(
        "jwt: {{ jwks_file: JWKS }}\ngateway: {{ {tls}, routes: [{{ path: /**, upstream: 'https://127.0.0.1:1', \
         upstream_tls: {{ ca: UPSTREAM }} }}] }}\nservice: {{ http: {{ listen: '127.0.0.1:0', tokens_file: TOKENS }}, \
         envoy: {{ files: ENVOY }} }}\nlimits: [{{ name: a, key: 'jwt:sub', limit: 1 }}]\n"
    );
    let names = ["CERT", "KEY", "CA", "JWKS", "UPSTREAM", "TOKENS", "ENVOY"];
    let secret = r#"{"keys":[{"kty":"oct","alg":"HS256","k":"c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0MTI"}]}"#;
    let pem = authority.pem();
    let contents = [&*signed.cert, &signed.key, &pem, secret, &pem, "0123456789abcdef0123456789abcdef", "domain: a\n"];
    let files: Vec<(&str, &str)> = names.into_iter().zip(contents).chain([(RULES, &*rules)]).collect();
    let validate = |folder: &Path| transcript(&run_in(folder, &["validate", RULES]));
    let pipe_at = |folder: &Path, name: &str| {
        _ = std::fs::remove_file(folder.join(name));
        assert!(Command::new("mkfifo").arg(folder.join(name)).status().expect("it is installed").success());
    };
    let folder = folder_with(&files);
    let valid = validate(folder.path());
    assert!(valid.ends_with("exit code 0"), "{valid}");
    for name in names {
        let folder = folder_with(&files);
        pipe_at(folder.path(), name);
        let refused = validate(folder.path());
        let expected = "it is a pipe, a socket or a device, not a regular file";
        assert!(refused.contains(expected) && refused.ends_with("exit code 1"), "{name}: {refused}");
    }
    pipe_at(folder.path(), "pipe");
    for arguments in [&["serve", "--config", "pipe"][..], &["serve", "--config", RULES, "--state", "pipe"]] {
        let refused = transcript(&run_in(folder.path(), arguments));
        assert!(refused.contains("not a regular file"), "{arguments:?}: {refused}");
    }
}
