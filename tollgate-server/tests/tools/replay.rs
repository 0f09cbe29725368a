//! `tollgate replay`: real files through the built binary.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;
use tempfile::TempDir;
use testkit::folder::folder_with;

const RULES: &str = "\
limits:
  - { name: global, limit: 1000, window: 1m, algorithm: fixed_window }
  - { name: per-ip, key: ip, limit: 10, window: 1m, algorithm: fixed_window }
";
/// Admits half as many.
const STRICTER: &str = "limits: [{ name: per-ip, key: ip, limit: 5, window: 1m, algorithm: fixed_window }]\n";

/// The same requests in every format: one each by 192.0.2.7, in the order of the servers below.
const SAMPLES: [(&str, &str); 9] = [
    ("common", include_str!("logs/common.log")),
    ("combined", include_str!("logs/combined.log")),
    ("nginx", include_str!("logs/nginx.json")),
    ("envoy", include_str!("logs/envoy.json")),
    ("caddy", include_str!("logs/caddy.json")),
    ("traefik", include_str!("logs/traefik.log")),
    ("traefik_json", include_str!("logs/traefik.json")),
    ("alb", include_str!("logs/alb.log")),
    ("tollgate", include_str!("logs/tollgate.json")),
];

fn line_at(minute: u32, second: u32, client: &str, rest: &str) -> String {
    format!("{client} - ann [10/Oct/2000:13:{minute:02}:{second:02} +0000] {rest}\n")
}

fn get(minute: u32, second: u32, client: &str) -> String {
    line_at(minute, second, client, "\"GET / HTTP/1.1\" 200 5 \"-\" \"curl/8\"")
}

/// Returns `number` requests of a client in one second.
fn burst(minute: u32, client: &str, number: usize) -> String {
    get(minute, 7, client).repeat(number)
}

fn folder(log: &[u8]) -> TempDir {
    let folder = folder_with(&[("tollgate.yaml", RULES), ("stricter.yaml", STRICTER)]);
    fs::write(folder.path().join("access.log"), log).expect("the folder is writable");
    folder
}

fn replay(folder: &Path, arguments: &[&str], input: &[u8]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.arg("replay").args(arguments).current_dir(folder);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().expect("tollgate starts");
    process.stdin.take().expect("stdin is piped").write_all(input).expect("the command reads its input");
    process.wait_with_output().expect("the command ends")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("output is UTF-8")
}

/// Replays `access.log` with more arguments. Returns the result and the exit code.
fn report(folder: &Path, arguments: &[&str]) -> (Value, Option<i32>) {
    let arguments = [&["--config", "tollgate.yaml", "--json", "access.log"], arguments].concat();
    let output = replay(folder, &arguments, b"");
    let json = serde_json::from_slice(&output.stdout);
    (json.unwrap_or_else(|_| panic!("{}", text(&output.stderr))), output.status.code())
}

fn report_of(log: &[u8]) -> Value {
    report(folder(log).path(), &[]).0
}

/// Returns the numbers of a limit: offered, admitted and denied.
fn limit(report: &Value, name: &str) -> [u64; 3] {
    let limits = report["rules"]["limits"].as_array().expect("a list of limits");
    let limit = limits.iter().find(|limit| limit["limit"] == name).expect("the limit is reported");
    ["offered", "admitted", "denied"].map(|field| limit[field].as_u64().expect("a number"))
}

#[test]
fn limits_decide_in_the_time_of_the_log() {
    let log = [burst(1, "192.0.2.7", 15), burst(1, "192.0.2.8", 3), burst(2, "192.0.2.7", 10)].concat();
    let report = report_of(log.as_bytes());
    assert_eq!(limit(&report, "per-ip"), [28, 23, 5]);
    assert_eq!(limit(&report, "global"), [28, 23, 0]);
    assert_eq!(report["clients"], serde_json::json!({ "seen": 2, "denied": 1, "exact": true }));
    let most_limited = &report["rules"]["most_limited"][0];
    assert_eq!((&most_limited["key"], &most_limited["denied"]), (&"192.0.2.7".into(), &5.into()));
    assert_eq!(report["rules"]["limits"][1]["peak_minute"]["from"], "2000-10-10T13:01:00Z");
}

#[test]
fn the_result_for_people() {
    let wrong = "this is not a log line\n".to_owned();
    let log = [burst(1, "192.0.2.7", 15), wrong, get(1, 3, "192.0.2.8"), burst(2, "192.0.2.7", 12)].concat();
    let output = replay(folder(log.as_bytes()).path(), &["--config", "tollgate.yaml", "access.log"], b"");
    insta::assert_snapshot!(text(&output.stdout));
    assert_eq!((text(&output.stderr), output.status.code()), (String::new(), Some(0)));
}

#[test]
fn every_format_is_recognized() {
    for (name, log) in SAMPLES {
        let report = report_of(log.as_bytes());
        let file = &report["files"][0];
        assert_eq!(file["requests"], 3, "{name}: {file}");
        assert_eq!(file["unreadable"], 0, "{name}: {file}");
        assert_eq!(limit(&report, "per-ip"), [3, 3, 0], "{name}");
        assert_eq!(report["clients"]["seen"], 2, "{name}");
        assert_eq!(report["from"].as_str().unwrap().get(..19), Some("2024-03-12T08:01:02"), "{name}");
    }
}

#[test]
fn formats_may_be_mixed() {
    let all: String = SAMPLES.iter().flat_map(|(_, log)| [*log, "\n"]).collect();
    let report = report_of(all.as_bytes());
    assert_eq!(report["requests"], 27);
    assert_eq!(report["files"][0]["formats"], serde_json::json!({ "alb": 3, "combined": 6, "common": 3, "json": 15 }));
    // A forced format reads only its own lines.
    let folder = folder(all.as_bytes());
    let (report, _) = self::report(folder.path(), &["--format", "alb"]);
    assert_eq!((&report["requests"], &report["files"][0]["unreadable"]), (&3.into(), &24.into()));
}

fn gzip(log: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(log).expect("written to memory");
    encoder.finish().expect("written to memory")
}

#[test]
fn compressed_logs_are_read() {
    let log = burst(1, "192.0.2.7", 2000);
    let twice = [gzip(log.as_bytes()), gzip(log.as_bytes())].concat();
    assert_eq!(limit(&report_of(&twice), "per-ip"), [4000, 10, 3990]);
    // Two frames of the combined sample, and a frame without content between them.
    assert_eq!(limit(&report_of(include_bytes!("logs/combined.log.zst")), "per-ip"), [6, 6, 0]);
}

#[test]
fn the_standard_input_is_read() {
    let folder = folder(b"");
    let log = burst(1, "192.0.2.7", 12);
    for log in [log.clone().into_bytes(), gzip(log.as_bytes())] {
        let output = replay(folder.path(), &["--config", "tollgate.yaml", "--json", "-"], &log);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(limit(&report, "per-ip"), [12, 10, 2]);
    }
}

#[test]
fn a_truncated_archive_is_read_as_far_as_possible() {
    let lines: String =
        (0..3000).map(|line| get(line / 60 % 60, line % 60, &format!("192.0.2.{}", line % 250))).collect();
    let whole = gzip(lines.as_bytes());
    let folder = folder(&whole[..whole.len() / 2]);
    let (report, code) = report(folder.path(), &[]);
    let requests = report["requests"].as_u64().unwrap();
    assert!((500..3000).contains(&requests), "{requests}");
    assert!(report["files"][0]["problem"].is_string());
    assert_eq!(code, Some(0));
    // Thresholds cannot be judged by a part of a log.
    let (report, code) = self::report(folder.path(), &["--fail-if", "denied>99%"]);
    assert_eq!((&report["thresholds"][0]["crossed"], code), (&Value::Null, Some(2)));
    let output = replay(folder.path(), &["--config", "tollgate.yaml", "access.log"], b"");
    assert!(text(&output.stdout).starts_with("WARNING: access.log could not be read to its end ("));
}

/// Returns an hour of requests, three a minute by each of 20 clients, and their two halves in the wrong order.
fn halves() -> (String, String) {
    let minute = |minute: u32| -> String {
        (0..60).map(|second| get(minute, second, &format!("192.0.2.{}", second % 20))).collect()
    };
    let half = |from: u32| -> String { (from..from + 30).map(minute).collect() };
    (half(0) + &half(30), half(30) + &half(0))
}

#[test]
fn parts_in_the_wrong_order_are_warned_of_first_and_not_judged() {
    let (log, wrong) = halves();
    let folder = folder(wrong.as_bytes());
    let rules = "limits: [{ name: per-ip, key: ip, algorithm: token_bucket, capacity: 5, refill: 2/m }]\n";
    fs::write(folder.path().join("tollgate.yaml"), rules).unwrap();
    let arguments = ["--config", "tollgate.yaml", "access.log"];
    let first = text(&replay(folder.path(), &arguments, b"").stdout);
    for _ in 0..3 {
        assert_eq!(text(&replay(folder.path(), &arguments, b"").stdout), first, "every run has the same numbers");
    }
    insta::assert_snapshot!(first);

    let (report, code) = report(folder.path(), &["--fail-if", "denied>99%"]);
    assert_eq!((&report["files"][0]["went_back"], code), (&1800.into(), Some(2)));
    let output = replay(folder.path(), &[&arguments[..], &["--fail-if", "denied>99%"]].concat(), b"");
    assert!(
        text(&output.stderr).starts_with("tollgate: --fail-if cannot be judged: access.log is not in order of time: ")
    );
    assert_eq!(text(&output.stdout), first);

    // Each part by itself is in order, and the numbers are those of the whole log.
    let (second_half, first_half) = wrong.split_at(wrong.len() / 2);
    fs::write(folder.path().join("access.log"), second_half).unwrap();
    fs::write(folder.path().join("access.log.1"), first_half).unwrap();
    let (merged, code) = self::report(folder.path(), &["access.log.1", "--fail-if", "denied>99%"]);
    assert_eq!((merged["warnings"].as_array().map(Vec::len), code), (Some(0), Some(0)));
    fs::write(folder.path().join("access.log"), log).unwrap();
    let (whole, _) = self::report(folder.path(), &[]);
    assert_eq!(limit(&merged, "per-ip"), limit(&whole, "per-ip"));
}

#[test]
fn a_few_lines_far_back_are_tolerated() {
    let (log, _) = halves();
    let folder = folder((log.clone() + &get(0, 0, "192.0.2.7").repeat(15)).as_bytes());
    let (report, code) = report(folder.path(), &["--fail-if", "denied>99%"]);
    assert_eq!((&report["files"][0]["went_back"], code), (&15.into(), Some(0)));
    fs::write(folder.path().join("access.log"), log + &get(0, 0, "192.0.2.7").repeat(40)).unwrap();
    let (report, code) = self::report(folder.path(), &["--fail-if", "denied>99%"]);
    assert_eq!((&report["files"][0]["went_back"], code), (&40.into(), Some(2)), "1 % of 3640 requests are 36");
}

#[test]
fn a_limit_that_learns_is_replayed_with_its_first_number_and_a_note() {
    let folder = folder(burst(1, "192.0.2.7", 12).as_bytes());
    let rules = "limits: [{ name: per-ip, key: ip, window: 1m, limit: { learn: { from: 5, to: 50 } } }]\n";
    fs::write(folder.path().join("tollgate.yaml"), rules).unwrap();
    let (report, _) = report(folder.path(), &[]);
    assert_eq!(limit(&report, "per-ip"), [12, 5, 7]);
    let note = "limit per-ip learns its limit, and is replayed with the number that it starts from, 5: put another in \
                `from` to replay it";
    assert_eq!(report["notes"][0], note);
}

#[test]
fn a_byte_order_mark_is_not_a_part_of_the_first_client() {
    let marked = ["\u{feff}", &burst(1, "192.0.2.7", 12)].concat();
    for log in [marked.clone().into_bytes(), gzip(marked.as_bytes())] {
        let report = report_of(&log);
        assert_eq!((limit(&report, "per-ip"), &report["clients"]["seen"]), ([12, 10, 2], &1.into()));
    }
    assert_eq!(
        report_of(
            "\u{feff}{\"time\":1,\"client_ip\":\"192.0.2.7\",\"method\":\"GET\",\"path\":\"/\",\"status\":200}\n"
                .as_bytes()
        )["requests"],
        1
    );
}

#[test]
fn long_lines_are_skipped_and_counted() {
    let log =
        [get(1, 1, "192.0.2.7").into_bytes(), vec![b'x'; 9_000_000], b"\n".to_vec(), get(1, 2, "192.0.2.7").into()];
    let report = report_of(&log.concat());
    assert_eq!((&report["requests"], &report["files"][0]["too_long"]), (&2.into(), &1.into()));
}

#[test]
fn lines_out_of_order_and_wrong_times_are_reported() {
    let wrong = |line: String| line.replace("/2000:", "/2089:");
    let log = [
        get(5, 10, "192.0.2.7"),
        get(5, 8, "192.0.2.7"),
        wrong(get(5, 11, "192.0.2.7")),
        get(5, 12, "192.0.2.7"),
        get(1, 0, "192.0.2.7").repeat(20),
    ];
    let report = report_of(log.concat().as_bytes());
    let file = &report["files"][0];
    assert_eq!((&file["out_of_order"], &file["misdated"], &file["time_jumps"]), (&1.into(), &17.into(), &1.into()));
    assert_eq!((&report["from"], &report["to"]), (&"2000-10-10T13:01:00Z".into(), &"2000-10-10T13:05:12Z".into()));
}

#[test]
fn files_of_several_servers_are_merged() {
    let folder = folder(burst(1, "192.0.2.7", 8).as_bytes());
    fs::write(folder.path().join("other.log"), burst(1, "192.0.2.7", 8)).unwrap();
    let (report, _) = report(folder.path(), &["other.log"]);
    assert_eq!(limit(&report, "per-ip"), [16, 10, 6]);
}

#[test]
fn rules_are_compared() {
    let folder = folder([burst(1, "192.0.2.7", 12), burst(1, "192.0.2.8", 7)].concat().as_bytes());
    let arguments = ["--config", "stricter.yaml", "--against", "tollgate.yaml", "--json", "access.log"];
    let output = replay(folder.path(), &arguments, b"");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let against = &report["against"];
    assert_eq!((&report["rules"]["denied"], &against["denied"]), (&9.into(), &2.into()));
    assert_eq!((&against["newly_denied"], &against["newly_admitted"]), (&7.into(), &0.into()));
    assert_eq!((&against["clients_denied"], &against["clients_newly_denied"]), (&1.into(), &1.into()));
    let output = replay(folder.path(), &arguments[..4].iter().copied().chain(["access.log"]).collect::<Vec<_>>(), b"");
    insta::assert_snapshot!(text(&output.stdout));
}

#[test]
fn thresholds_decide_the_exit_code() {
    let folder = folder(burst(1, "192.0.2.7", 20).as_bytes());
    for (threshold, expected) in
        [("denied>50%", 0), ("denied>49.9%", 1), ("denied:per-ip>9", 1), ("denied:global>0", 0), ("clients>0", 1)]
    {
        let (report, code) = report(folder.path(), &["--fail-if", threshold]);
        assert_eq!(code, Some(expected), "{threshold}: {report}");
    }
    let (_, code) = report(folder.path(), &["--fail-if", "newly_denied>0", "--against", "stricter.yaml"]);
    assert_eq!(code, Some(0));
}

#[test]
fn only_counted_statuses_are_counted() {
    let log: String = (0..20).map(|_| line_at(1, 1, "192.0.2.7", "\"POST /login HTTP/1.1\" 200 5")).collect();
    let failed: String = (0..20).map(|_| line_at(1, 2, "192.0.2.7", "\"POST /login HTTP/1.1\" 401 5")).collect();
    let folder = folder((log + &failed).as_bytes());
    let rules = "limits: [{ name: logins, key: ip, limit: 5, window: 1m, algorithm: fixed_window, count: [401] }]\n";
    fs::write(folder.path().join("tollgate.yaml"), rules).unwrap();
    let (report, _) = report(folder.path(), &[]);
    assert_eq!(limit(&report, "logins"), [40, 25, 15]);
}

#[test]
fn shadow_limits_deny_nobody() {
    let folder = folder(burst(1, "192.0.2.7", 12).as_bytes());
    let rules = "limits: [{ name: per-ip, key: ip, limit: 5, window: 1m, algorithm: fixed_window, shadow: true }]\n";
    fs::write(folder.path().join("tollgate.yaml"), rules).unwrap();
    let (report, _) = report(folder.path(), &[]);
    assert_eq!(limit(&report, "per-ip"), [12, 5, 7]);
    assert_eq!((&report["rules"]["denied"], &report["clients"]["denied"]), (&0.into(), &0.into()));
}

#[test]
fn parts_that_the_log_lacks_are_named_and_mapped() {
    let log = burst(1, "192.0.2.7", 12) + &burst(1, "192.0.2.8", 12).replace("ann", "bob");
    let folder = folder(log.as_bytes());
    let rules = "\
store: redis://127.0.0.1:1
limits:
  - { name: per-user, key: header:x-user-id, limit: 10, window: 1m, algorithm: fixed_window }
  - { name: busy, in_flight: 5 }
";
    fs::write(folder.path().join("tollgate.yaml"), rules).unwrap();
    let (unmapped, _) = report(folder.path(), &[]);
    assert_eq!(limit(&unmapped, "per-user"), [24, 10, 14]);
    insta::assert_snapshot!(
        unmapped["notes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|note| format!("{}\n", note.as_str().unwrap()))
            .collect::<String>()
    );
    let (mapped, _) = report(folder.path(), &["--map", "header:x-user-id=user"]);
    assert_eq!(limit(&mapped, "per-user"), [24, 20, 4]);
    assert_eq!(mapped["notes"].as_array().unwrap().len(), 2);
}

#[test]
fn unusable_input_ends_with_2_and_the_fix() {
    let folder = folder(b"");
    fs::write(folder.path().join("photo.jpg"), [0xff, 0xd8, 0xff, 0xe0, 0, 16, b'J', b'\n', 0x1b, b'[', b'2', b'J'])
        .unwrap();
    fs::write(folder.path().join("old.log.xz"), b"\xfd7zXZ\0\0").unwrap();
    fs::write(folder.path().join("broken.gz"), [0x1f, 0x8b, 8, 0]).unwrap();
    let mut all = String::new();
    for arguments in [
        &["access.log"][..],
        &["photo.jpg"],
        &["old.log.xz"],
        &["broken.gz"],
        &["absent.log"],
        &["."],
        &["-", "-"],
        &["--fail-if", "denied:absent>1", "access.log"],
        &["--fail-if", "newly_denied>1", "access.log"],
        &["--fail-if", "errors>1", "access.log"],
        &["--map", "x-user-id=user", "access.log"],
    ] {
        let output = replay(folder.path(), &[&["--config", "tollgate.yaml"], arguments].concat(), b"");
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert_eq!(text(&output.stdout), "", "{arguments:?}");
        all += &format!("$ tollgate replay {}\n{}\n", arguments.join(" "), text(&output.stderr));
    }
    insta::assert_snapshot!(all);
}
