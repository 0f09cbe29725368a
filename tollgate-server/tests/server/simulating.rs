//! `tollgate simulate`.

use std::path::Path;
use std::process::Output;

use serde_json::Value;
use testkit::folder::folder_with;
use testkit::tollgate::{RULES, run, run_in, run_with_stdin, transcript};

const LIMITS: &str = "\
limits:
  - { name: global, limit: 20, window: 10s, algorithm: fixed_window }
  - { name: bucket, capacity: 5, refill: 1/s, algorithm: token_bucket, cost: 2 }
  - { name: concurrent, in_flight: 3 }
";

fn simulate(arguments: &[&str]) -> String {
    transcript(&run(&[&["simulate"], arguments].concat()))
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", transcript(output));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn the_five_algorithms_side_by_side() {
    insta::assert_snapshot!(simulate(&["--limit", "100", "--window", "1m", "--traffic", "boundary", "--for", "2m"]));
}

#[test]
fn a_scenario_is_explained() {
    insta::assert_snapshot!(simulate(&["--scenario", "counter"]));
    insta::assert_snapshot!("scenarios", simulate(&["--list-scenarios"]));
}

#[test]
fn limits_of_a_rule_file_on_a_burst() {
    let folder = folder_with(&[(RULES, LIMITS)]);
    let arguments = ["simulate", "--config", RULES, "--traffic", "burst", "--burst", "30", "--for", "20s"];
    insta::assert_snapshot!(transcript(&run_in(folder.path(), &arguments)));
    let only = json(&run_in(folder.path(), &["simulate", "--config", RULES, "--only", "bucket", "--json"]));
    assert_eq!(only["limits"].as_array().map(Vec::len), Some(1), "{only}");
    let unknown = transcript(&run_in(folder.path(), &["simulate", "--config", RULES, "--only", "buckt"]));
    let message = "on stderr:\ntollgate: --only: tollgate.yaml has no limit `buckt`: use one of global, bucket, concurrent\n\
                   exit code 2";
    assert_eq!(unknown, message);
}

#[test]
fn traffic_is_fast_and_long_enough_for_every_limit_to_deny() {
    const SLOW_AND_FAST: &str = "\
limits:
  - { name: slow, limit: 20, window: 1h }
  - { name: fast, limit: 20, window: 1s, algorithm: fixed_window }
  - { name: bucket, capacity: 300, refill: 1/s, algorithm: token_bucket }
";
    let folder = folder_with(&[(RULES, SLOW_AND_FAST)]);
    for arguments in [
        &["--capacity", "10", "--refill", "1/s"][..],
        &["--capacity", "1000", "--refill", "100/m"],
        &["--refill", "1/h"],
        &["--capacity", "5", "--refill", "10/s", "--traffic", "steady"],
        &["--capacity", "1000", "--traffic", "burst"],
        &["--config", RULES],
        &["--limit", "7", "--window", "3s"],
    ] {
        let report = json(&run_in(folder.path(), &[&["simulate", "--json"], arguments].concat()));
        for limit in report["limits"].as_array().expect("a list of limits") {
            assert!(limit["denied"].as_u64() > Some(0), "{arguments:?}: {} denies nothing", limit["name"]);
        }
    }
}

#[test]
fn a_limit_that_learns_is_simulated_with_its_first_number_and_a_warning() {
    const LEARNS: &str = "limits: [{ name: per-user, key: ip, window: 1m, limit: { learn: { from: 5, to: 50 } } }]\n";
    let folder = folder_with(&[(RULES, LEARNS)]);
    let output = transcript(&run_in(folder.path(), &["simulate", "--config", RULES]));
    let warning =
        "tollgate: warning: limit per-user learns its limit, and is simulated with the number that it starts from, 5: ";
    assert!(output.contains(warning) && output.ends_with("exit code 0"), "{output}");
}

#[test]
fn a_byte_order_mark_is_not_a_part_of_the_first_time() {
    let marked = "\u{feff}1\n2\n".as_bytes();
    assert_eq!(
        json(&run_with_stdin(Path::new("."), &["simulate", "--timestamps", "-", "--json"], marked))["offered"],
        2
    );
}

#[test]
fn random_traffic_repeats_with_its_seed() {
    let with_seed = |seed| run(&["simulate", "--traffic", "poisson", "--seed", seed, "--json"]).stdout;
    assert_eq!(with_seed("7"), with_seed("7"));
    assert_ne!(with_seed("7"), with_seed("8"));
}

#[test]
fn requests_are_read_from_a_file_and_from_stdin() {
    const TIMES: &str = "2026-01-31T11:59:59Z ann\n2026-01-31T12:00:00Z ann\n2026-01-31T12:00:00.5Z bob 3\n";
    let folder = folder_with(&[("times.txt", TIMES)]);
    let arguments = ["--timestamps", "times.txt", "--limit", "2", "--algorithm", "sliding_window_log", "--json"];
    let from_file = json(&run_in(folder.path(), &[&["simulate"], &arguments[..]].concat()));
    let limit = &from_file["limits"][0];
    assert_eq!((&from_file["offered"], &from_file["keys"]), (&3.into(), &2.into()), "{from_file}");
    assert_eq!((&limit["admitted"], &limit["never_fits"]), (&2.into(), &1.into()), "bob costs 3 of 2: {limit}");
    let arguments = [&["simulate", "--timestamps", "-"], &arguments[2..]].concat();
    let from_stdin = json(&run_with_stdin(folder.path(), &arguments, TIMES.as_bytes()));
    assert_eq!(from_stdin, from_file);
}

#[test]
fn pictures_and_pages_are_written_beside_the_table() {
    let folder = folder_with(&[]);
    let arguments = ["simulate", "--scenario", "doubling", "--svg", "one.svg", "--html", "one.html"];
    let output = transcript(&run_in(folder.path(), &arguments));
    assert!(output.starts_with("100 requests at 59 s and 100 at 60 s") && output.ends_with("exit code 0"), "{output}");
    let read = |name| std::fs::read_to_string(folder.path().join(name)).expect("it is written");
    let (svg, page) = (read("one.svg"), read("one.html"));
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{svg}");
    assert!(page.contains(&svg) && page.contains("prefers-color-scheme"), "{page}");
    let output = transcript(&run_in(folder.path(), &["simulate", "--svg", "absent/one.svg"]));
    assert!(output.contains("cannot write absent/one.svg: ") && output.ends_with("exit code 2"), "{output}");
}

#[test]
fn bad_numbers_are_refused_with_the_fix() {
    let folder = folder_with(&[("times.txt", "1\n2\nthree\n"), ("empty.yaml", "limits: []\n")]);
    let cases: [&[&str]; 31] = [
        &["--limit", "0"],
        &["--window", "1x"],
        &["--window", "10us"],
        &["--rate", "fast"],
        &["--rate", "0/s"],
        &["--for", "0s"],
        &["--for", "4000d"],
        &["--rate", "1000000/s", "--for", "1h"],
        &["--traffic", "burst", "--burst", "18446744073709551615"],
        &["--traffic", "burst", "--burst", "0"],
        &["--scenario", "unknown"],
        &["--timestamps", "times.txt"],
        &["--timestamps", "absent.txt"],
        &["--config", "empty.yaml"],
        &["--scenario", "log", "--limit", "5"],
        &["--algorithm", "magic"],
        &["--capacity", "0"],
        &["--segments", "0"],
        &["--for", "10y"],
        &["--traffic", "burst", "--every", "1h", "--for", "1m"],
        &["--traffic", "boundary", "--for", "10s"],
        &["--traffic", "ramp", "--rate", "1/h", "--for", "1m"],
        &["--traffic", "burst", "--rate", "1/s"],
        &["--traffic", "steady", "--seed", "1"],
        &["--burst", "5"],
        &["--every", "5s"],
        &["--algorithm", "fixed_window", "--capacity", "5"],
        &["--algorithm", "fixed_window", "--refill", "1/s"],
        &["--algorithm", "fixed_window", "--segments", "5"],
        &["--algorithm", "token_bucket", "--overflow", "queue"],
        &["--algorithm", "token_bucket", "--capacity", "5", "--refill", "1/s", "--limit", "5"],
    ];
    let transcripts = cases.map(|arguments| {
        let output = run_in(folder.path(), &[&["simulate"], arguments].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        format!("$ tollgate simulate {}\n{}", arguments.join(" "), transcript(&output))
    });
    insta::assert_snapshot!(transcripts.join("\n\n"));
}
