//! The log on the standard error: time and level, JSON, and the journal.

use std::os::unix::fs::MetadataExt;

use serde_json::Value;
use testkit::folder::folder_with;
use testkit::tollgate::{Process, RULES, run_in};

const RULES_10: &str = "service: { http: '127.0.0.1:0' }\nlimits: [{ name: user, limit: 10, window: 1h }]\n";

fn start(arguments: &[&str]) -> Process {
    let folder = folder_with(&[(RULES, RULES_10)]);
    Process::start(folder, &[&["serve", "--config", RULES], arguments].concat())
}

fn save(server: &Process, rules: &str) {
    std::fs::write(server.path(RULES), rules).expect("the folder is writable");
}

/// Returns every line as JSON.
fn objects(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

fn is_time(text: &str) -> bool {
    let pattern = "0000-00-00T00:00:00.000Z";
    let fits = |(char, of): (char, char)| if of == '0' { char.is_ascii_digit() } else { char == of };
    text.len() == pattern.len() && text.chars().zip(pattern.chars()).all(fits)
}

#[test]
fn lines_of_a_server_have_a_time_and_a_level() {
    let server = start(&[]);
    save(&server, &RULES_10.replace("limit: 10", "limit: 20"));
    server.await_said("is in force", 1);
    save(&server, "limits: [{ name: user, limit: 0 }]\n");
    server.await_said("limit 0 admits nothing", 1);
    let log = server.log();
    let lines: Vec<(&str, &str)> = log.lines().filter_map(|line| line.split_once(' ')).collect();
    assert!(lines.iter().all(|(time, _)| is_time(time)), "{log}");
    let messages: Vec<&str> = lines.iter().map(|(_, message)| *message).collect();
    assert_eq!(
        messages,
        [
            "info: tollgate.yaml is in force: user: limit 10 → 20",
            "error: tollgate.yaml is rejected, and the previous rules stay in force:",
            "error: tollgate.yaml:1:31: limit 0 admits nothing: use 1 or more, or `blocked` to refuse every request",
        ]
    );
}

#[test]
fn json_lines_have_fields() {
    let server = start(&["--log-format", "json"]);
    save(&server, &RULES_10.replace("limit: 10, window: 1h", "limit: 20, window: 30m"));
    server.await_said("is in force", 1);
    save(&server, "limits: [{ name: user, limit: 0 }]\n");
    server.await_said("limit 0 admits nothing", 1);
    let lines = objects(&server.log());
    assert!(lines.iter().all(|line| is_time(line["time"].as_str().expect("a text"))), "{lines:?}");
    assert_eq!((&lines[0]["level"], &lines[0]["rules"]), (&"info".into(), &"tollgate.yaml".into()));
    assert_eq!(lines[0]["message"], "tollgate.yaml is in force: user: limit 10 → 20, window 1h → 30m");
    assert_eq!(lines[0]["changes"], serde_json::json!(["user: limit 10 → 20, window 1h → 30m"]));
    let problem = &lines[2];
    assert_eq!((&problem["level"], &problem["file"]), (&"error".into(), &"tollgate.yaml".into()));
    assert_eq!((&problem["line"], &problem["column"]), (&1.into(), &31.into()));
    // The line about the start is JSON too, so that a collector of both streams reads JSON only.
    let stdout = std::fs::read_to_string(server.stdout()).unwrap();
    let started = &objects(&stdout)[0];
    assert!(started["message"].as_str().is_some_and(|message| message.contains("limit user: 10 per ")), "{started}");
}

#[test]
fn a_start_that_fails_is_logged_in_the_format_of_the_server() {
    let folder = folder_with(&[(RULES, "limits: [{ name: user, limit: 0 }]\n")]);
    let output = run_in(folder.path(), &["serve", "--config", RULES, "--log-format", "json"]);
    let lines = objects(&String::from_utf8(output.stderr).unwrap());
    let messages: Vec<&str> = lines.iter().filter_map(|line| line["message"].as_str()).collect();
    assert_eq!(messages.len(), 1, "{messages:?}");
    assert!(messages[0].starts_with("tollgate.yaml:1:31: limit 0 admits nothing: "), "{messages:?}");
    // Commands for people have no times.
    let output = run_in(folder.path(), &["explain", "--config", RULES, "GET", "/"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.starts_with("tollgate.yaml:1:31: limit 0 admits nothing: "), "{text}");
}

#[test]
fn lines_for_the_journal_have_a_priority_and_no_time() {
    let rules = format!(
        "{RULES_10}gateway: {{ listen: '127.0.0.1:0', workers: 1, routes: [{{ path: /**, upstream: echo }}] }}\n"
    );
    let folder = folder_with(&[(RULES, &rules), ("stderr.txt", "")]);
    let stderr = std::fs::metadata(folder.path().join("stderr.txt")).unwrap();
    let stream = format!("{}:{}", stderr.dev(), stderr.ino());
    let server = Process::start_with_variables(folder, &[("JOURNAL_STREAM", &stream)], &["serve", "--config", RULES]);
    save(&server, &rules.replace("workers: 1", "workers: 2"));
    server.await_said("gateway.workers has changed", 1);
    assert_eq!(
        server.log(),
        "<6>info: tollgate.yaml is in force: gateway.workers 1 → 2\n\
         <4>warning: gateway.workers has changed: restart the server to apply it\n"
    );
    // The variable of a parent whose stderr is something else.
    let folder = folder_with(&[(RULES, RULES_10)]);
    let server = Process::start_with_variables(folder, &[("JOURNAL_STREAM", "1:2")], &["serve", "--config", RULES]);
    server.signal("HUP");
    server.await_said("tollgate: tollgate.yaml is in force: no changes", 1);
}
