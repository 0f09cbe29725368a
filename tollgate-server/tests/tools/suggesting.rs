//! `tollgate replay --suggest` and `tollgate init --from-log`.
//!
//! The claim of a suggestion is that it leaves a share of the clients untouched. It is checked by `tollgate replay` with the
//! rules that were printed.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use testkit::folder::folder_with;
use testkit::tollgate::{RULES, run_in};

const LOG: &str = "access.log";

/// Returns the output and the exit code of a command.
fn transcript(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
    let code = output.status.code().expect("no signal ended it");
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    match stderr.is_empty() {
        true => format!("{stdout}exit code {code}"),
        false => format!("{stdout}on stderr:\n{stderr}exit code {code}"),
    }
}

/// Numbers that look random and are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// Returns a line of the Common Log Format, `second` seconds after midnight.
fn line(client: u64, second: u64) -> String {
    let (hours, minutes, seconds) = (second / 3600, second / 60 % 60, second % 60);
    let [.., a, b, c] = client.to_be_bytes();
    format!("10.{a}.{b}.{c} - - [04/Mar/2026:{hours:02}:{minutes:02}:{seconds:02} +0000] \"GET / HTTP/1.1\" 200 5\n")
}

/// Returns two hours of `clients` that send bursts of up to 20 requests. One in 500 is ten times as heavy. Each of the
/// `attackers` sends ten requests a second for five minutes.
fn log(clients: u64, attackers: u64) -> String {
    let mut random = Random(7);
    let mut requests: Vec<(u64, u64)> = Vec::new();
    for client in 0..clients {
        let weight = if client % 500 == 7 { 10 } else { 1 };
        for _ in 0..=random.below(4) {
            let start = random.below(7000);
            let burst = (1 + random.below(20)) * weight;
            requests.extend((0..burst).map(|_| (start + random.below(10), client)));
        }
    }
    for attacker in 0..attackers {
        requests.extend((0..3000).map(|request| (request / 10, 1_000_000 + attacker)));
    }
    requests.extend([(0, 0), (7199, 0)]);
    requests.sort_unstable();
    requests.iter().fold(String::new(), |mut text, (second, client)| {
        text.push_str(&line(*client, *second));
        text
    })
}

fn suggest(folder: &Path, arguments: &[&str]) -> String {
    transcript(&run_in(folder, &[&["replay", "--suggest", LOG], arguments].concat()))
}

fn suggested(folder: &Path, arguments: &[&str]) -> Value {
    let output = suggest(folder, &[arguments, &["--json"]].concat());
    let json = output.strip_suffix("exit code 0").unwrap_or_else(|| panic!("{output}"));
    serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {output}"))
}

/// Returns the clients, and those that rules deny, by `tollgate replay`.
fn denied_clients(folder: &Path, rules: &str) -> (u64, u64) {
    fs::write(folder.join(RULES), rules).expect("the folder is writable");
    let strict = transcript(&run_in(folder, &["validate", "--strict", RULES]));
    assert_eq!(strict, "tollgate.yaml: valid, 1 limit\nexit code 0", "{rules}");
    let output = run_in(folder, &["replay", "--config", RULES, LOG, "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}"));
    let limit = &report["rules"]["limits"][0];
    let number = |name: &str| limit[name].as_u64().unwrap_or_else(|| panic!("no {name} in {report:#}"));
    (number("keys"), number("denied_keys"))
}

/// Removes the first limit from suggested rules, and the comment signs from the second.
fn second_limit(rules: &str) -> String {
    let (_, second) = rules.split_once("  # - name: per-client").expect("two limits");
    let second = second.replace("\n  # ", "\n  ");
    format!("limits:\n  - name: per-client{second}")
}

#[test]
fn suggested_limits_leave_the_share_of_clients_untouched() {
    let folder = folder_with(&[(LOG, &log(1500, 0))]);
    for (cover, may_touch) in [("99.9%", 1), ("50%", 750)] {
        let output = suggest(folder.path(), &["--cover", cover]);
        let rules = output.strip_suffix("exit code 0").unwrap_or_else(|| panic!("{output}"));
        for rules in [rules.to_owned(), second_limit(rules)] {
            let (clients, denied) = denied_clients(folder.path(), &rules);
            assert_eq!(clients, 1500);
            assert!(denied <= may_touch, "{denied} clients are denied:\n{rules}");
            // The numbers are not larger than they need be: at half of the capacity or limit, more are denied.
            let halved = halve(&rules);
            assert!(denied_clients(folder.path(), &halved).1 > may_touch, "half is enough:\n{halved}");
        }
    }
}

/// Halves the capacity or the limit.
fn halve(rules: &str) -> String {
    let halved = |line: &str| {
        let number = line.trim().strip_prefix("capacity: ").or_else(|| line.trim().strip_prefix("limit: "))?;
        Some(line.replace(number, &(number.parse::<u64>().ok()? / 2).to_string()))
    };
    rules.lines().map(|line| halved(line).unwrap_or_else(|| line.to_owned()) + "\n").collect()
}

#[test]
fn few_heavy_clients_do_not_change_the_numbers() {
    let (quiet, attacked) = (folder_with(&[(LOG, &log(1500, 0))]), folder_with(&[(LOG, &log(1500, 2))]));
    let numbers = |folder: &Path| {
        let suggestion = suggested(folder, &["--cover", "99%"]);
        (suggestion["limits"][0]["capacity"].clone(), suggestion["limits"][0]["refill"].clone())
    };
    assert_eq!(numbers(quiet.path()), numbers(attacked.path()));
}

#[test]
fn more_clients_than_are_measured_are_sampled_and_the_claim_is_checked() {
    let mut random = Random(3);
    let again: Vec<u64> = (0..10_000).map(|_| random.below(1000)).collect();
    let clients = (0..40_000).chain(again);
    let text: String = clients.enumerate().map(|(number, client)| line(client, number as u64 / 20)).collect();
    let folder = folder_with(&[(LOG, &text)]);
    let suggestion = suggested(folder.path(), &[]);
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{suggestion:#}"));
    assert!(number(&suggestion["clients_measured"]) < number(&suggestion["clients"]), "{suggestion:#}");
    assert_eq!(suggestion["holds"], true, "{suggestion:#}");
    for limit in suggestion["limits"].as_array().unwrap() {
        let effect = &limit["on_this_log"];
        assert!(number(&effect["clients_denied"]) * 1000 <= number(&effect["clients"]), "{suggestion:#}");
    }
    assert!(suggestion["notes"].to_string().contains("sample"), "{suggestion:#}");
}

#[test]
fn suggestion_for_people_and_for_programs() {
    let folder = folder_with(&[(LOG, &log(600, 0))]);
    insta::assert_snapshot!("suggestion", suggest(folder.path(), &["--window", "10m"]));
    insta::assert_snapshot!("suggestion_as_json", suggest(folder.path(), &["--window", "10m", "--json"]));
}

#[test]
fn too_little_data_suggests_nothing() {
    let few: String = (0..2000).map(|second| line(second % 29, second)).collect();
    let short: String = (0..300).map(|second| line(second % 100, second)).collect();
    let folder = folder_with(&[("few.log", &*few), ("short.log", &*short), ("none.log", ""), ("text.log", "a\nb\n")]);
    let mut outputs = String::new();
    for (log, arguments) in [
        ("few.log", &[][..]),
        ("short.log", &[]),
        ("none.log", &[]),
        ("text.log", &[]),
        ("absent.log", &[]),
        ("short.log", &["--key", "header:x-user-id"]),
        ("short.log", &["--key", "user"]),
        ("short.log", &["--window", "soon"]),
        ("short.log", &["--cover", "100%"]),
        ("short.log", &["--cover", "most"]),
        ("short.log", &["--config", RULES]),
    ] {
        let output = transcript(&run_in(folder.path(), &[&["replay", "--suggest", log], arguments].concat()));
        _ = writeln!(outputs, "{log} {}\n{output}\n", arguments.join(" "));
    }
    insta::assert_snapshot!(outputs);
}

/// Returns the first half of a log in gzip.
fn truncated(log: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(log.as_bytes()).expect("written to memory");
    let mut bytes = encoder.finish().expect("written to memory");
    bytes.truncate(bytes.len() / 2);
    bytes
}

#[test]
fn a_truncated_archive_is_reported() {
    let folder = folder_with(&[]);
    fs::write(folder.path().join(LOG), truncated(&log(1500, 0))).unwrap();
    let output = suggest(folder.path(), &[]);
    let warning = "# WARNING: a file could not be read to its end, and the numbers are those of what could be read: check \
                   that it is complete: access.log (";
    assert!(output.lines().nth(1).is_some_and(|line| line.starts_with(warning)), "{output}");
    assert_eq!(suggested(folder.path(), &[])["incomplete_files"].as_array().map(Vec::len), Some(1));
    let output = transcript(&run_in(folder.path(), &["init", "--from-log", LOG]));
    assert!(output.contains("WARNING: a file could not be read to its end"), "{output}");
    fs::write(folder.path().join(LOG), &truncated("")[..5]).unwrap();
    let output = suggest(folder.path(), &[]);
    assert!(
        output.contains("no request could be read from access.log (") && output.ends_with("exit code 2"),
        "{output}"
    );
}

#[test]
fn parts_in_the_wrong_order_are_refused() {
    let log = log(100, 0);
    let middle = log[log.len() / 2..].find('\n').expect("a line") + log.len() / 2 + 1;
    let folder = folder_with(&[(LOG, &[&log[middle..], &log[..middle]].concat())]);
    for arguments in [&["replay", "--suggest", LOG][..], &["init", "--from-log", LOG]] {
        let output = transcript(&run_in(folder.path(), arguments));
        assert!(output.contains("tollgate: access.log is not in order of time: "), "{output}");
        assert!(
            output.ends_with("name each log file by itself, because files are merged by time\nexit code 2"),
            "{output}"
        );
    }
}

#[test]
fn advice_names_only_options_that_the_command_has() {
    let lines: String = (0..2000).map(|second| line(second % 100, second)).collect();
    let folder = folder_with(&[(LOG, &*lines), ("text.log", "a\n")]);
    let mut outputs = String::new();
    for arguments in [
        &["init", "--from-log", LOG, "-"][..],
        &["init", "--from-log", "text.log"],
        &["init", "--from-log", LOG, "--key", "header:x-user-id"],
        &["replay", "--suggest", LOG, "--key", "jwt:sub"],
        &["replay", "--suggest", LOG, "--cover", "0.9999999"],
    ] {
        let output = run_in(folder.path(), arguments);
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        outputs.push_str(&format!(
            "$ tollgate {}\n{stderr}exit code {:?}\n\n",
            arguments.join(" "),
            output.status.code()
        ));
    }
    insta::assert_snapshot!(outputs);
}

#[test]
fn standard_input_is_read_once_and_the_output_says_so() {
    let folder = folder_with(&[]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(["replay", "--suggest", "-"]).current_dir(folder.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut process = command.spawn().expect("the command starts");
    process.stdin.take().expect("a pipe").write_all(log(600, 0).as_bytes()).expect("it reads");
    let output = process.wait_with_output().expect("it ends");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(output.status.success() && text.contains("Not checked by a replay"), "{text}");
    assert!(text.contains("    capacity: ") && !text.contains("On this log"), "{text}");
}

#[test]
fn a_starter_file_gets_its_numbers_from_a_log() {
    let folder = folder_with(&[(LOG, &log(600, 0))]);
    let output = transcript(&run_in(folder.path(), &["init", "--from-log", LOG]));
    assert!(output.contains("tollgate.yaml is written") && output.ends_with("exit code 0"), "{output}");
    let rules = fs::read_to_string(folder.path().join(RULES)).unwrap();
    assert!(
        rules.contains("    algorithm: token_bucket\n    capacity: ") && rules.contains("Chosen from a log"),
        "{rules}"
    );
    let (clients, denied) = denied_clients(folder.path(), &rules);
    assert_eq!((clients, denied), (600, 0), "{rules}");

    let few: String = (0..2000).map(|second| line(second % 3, second)).collect();
    let folder = folder_with(&[(LOG, &few)]);
    let output = transcript(&run_in(folder.path(), &["init", "--from-log", LOG]));
    assert!(output.contains("3 clients are too few") && output.ends_with("exit code 1"), "{output}");
    assert!(!folder.path().join(RULES).exists());
}
