//! Runs every example as a reader would, and checks its output.

use std::process::Command;

use testkit::redis::RedisServer;

fn lines(program: &str) -> Vec<String> {
    lines_with(program, &[])
}

fn lines_with(program: &str, arguments: &[&str]) -> Vec<String> {
    let output = Command::new(program).args(arguments).output().expect("the example starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8").lines().map(str::to_owned).collect()
}

#[test]
fn plain_greets_three_times_a_minute() {
    let expected = [
        "call 1: hello, ann (2 left)",
        "call 2: hello, ann (1 left)",
        "call 3: hello, ann (0 left)",
        "call 4: too many; passes in 20 s",
        "call 5: too many; passes in 20 s",
    ];
    assert_eq!(lines(env!("CARGO_BIN_EXE_plain")), expected);
}

#[test]
fn per_user_admits_exactly_the_limit_from_all_threads() {
    let expected = ["ann: 20 of 200 calls passed", "bob: 20 of 200 calls passed", "eve: 20 of 200 calls passed"];
    assert_eq!(lines(env!("CARGO_BIN_EXE_per_user")), expected);
}

#[test]
fn tiers_spend_nothing_on_a_denied_call() {
    let mut expected =
        (1..=10).map(|call| format!("call {call} passes; endpoint has {} left", 10 - call)).collect::<Vec<_>>();
    expected.push("call 11 is denied; endpoint has 0 left".to_owned());
    expected.push("global has 9990 left".to_owned());
    expected.push("user has 90 left".to_owned());
    assert_eq!(lines(env!("CARGO_BIN_EXE_tiers")), expected);
}

#[test]
fn shaping_lets_one_job_leave_every_100_ms() {
    let lines = lines(env!("CARGO_BIN_EXE_shaping"));
    let (last, jobs) = lines.split_last().expect("output");
    assert_eq!(last, "the impatient job gave up");
    assert_eq!(jobs.len(), 5);
    for (index, job) in jobs.iter().enumerate() {
        let after_ms = job
            .strip_prefix(&format!("job {} left after ", index + 1))
            .and_then(|rest| rest.strip_suffix(" ms"))
            .and_then(|number| number.parse::<usize>().ok())
            .unwrap_or_else(|| panic!("{job}"));
        // The limiter's clock started a moment before the one that prints.
        assert!(after_ms + 5 >= index * 100, "{job}");
    }
}

#[test]
fn shared_counts_for_both_servers() {
    let redis = RedisServer::start();
    let url = redis.url();
    let mut expected: Vec<_> = (1..=5)
        .map(|call| format!("call {call} on server {} passes; {} left, says Store", call % 2, 5 - call))
        .collect();
    expected.push("call 6 on server 0 is denied; 0 left, says Store".to_owned());
    assert_eq!(lines_with(env!("CARGO_BIN_EXE_shared"), &[&url]), expected);
}

#[test]
fn tonic_limits_refuses_the_third_call() {
    let lines = lines(env!("CARGO_BIN_EXE_tonic_limits"));
    assert_eq!(lines[..2], ["call 1 is answered", "call 2 is answered"]);
    assert!(lines[2].starts_with("call 3 is refused: ResourceExhausted, retry in "), "{}", lines[2]);
}
