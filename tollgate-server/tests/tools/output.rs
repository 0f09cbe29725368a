//! Answers that cannot be written to stdout.

use std::fs::{self, File, OpenOptions};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use testkit::folder::folder_with;

const RULES: &str = "limits: [{ name: per-ip, key: ip, limit: 5, window: 1m }]\n";

/// Runs a command in a folder, with its output in a file.
fn run_into(stdout: impl Into<Stdio>, folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(arguments).current_dir(folder).stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped());
    command.spawn().expect("tollgate starts").wait_with_output().expect("it ends")
}

/// Every command that prints an answer, except those of `publish`, which need a Redis.
const COMMANDS: [&[&str]; 17] = [
    &["schema"],
    &["completions", "bash"],
    &["man"],
    &["init", "--yes", "-"],
    &["init", "--yes", "--force", "new.yaml"],
    &["validate", "tollgate.yaml"],
    &["validate", "--json", "tollgate.yaml"],
    &["explain", "--config", "tollgate.yaml", "GET", "/"],
    &["explain", "--config", "tollgate.yaml", "GET", "/", "--json"],
    &["simulate"],
    &["simulate", "--json"],
    &["simulate", "--list-scenarios"],
    &["replay", "--config", "tollgate.yaml", "access.log"],
    &["replay", "--config", "tollgate.yaml", "access.log", "--json"],
    &["replay", "--suggest", "many.log"],
    &["--help"],
    &["--version"],
];

fn folder() -> tempfile::TempDir {
    let line = |client: u32, minute: u32| {
        format!("192.0.2.{client} - - [10/Oct/2000:13:{minute:02}:00 +0000] \"GET / HTTP/1.1\" 200 5\n")
    };
    let many: String = (0..60).map(|minute| line(minute, minute)).collect();
    folder_with(&[("tollgate.yaml", RULES), ("access.log", &line(7, 1)), ("many.log", &many)])
}

#[test]
fn an_answer_that_cannot_be_written_ends_with_2_and_the_reason() {
    let Ok(full) = OpenOptions::new().write(true).open("/dev/full") else { return };
    let folder = folder();
    for arguments in COMMANDS {
        let output = run_into(full.try_clone().expect("a file"), folder.path(), arguments);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.contains("cannot write the answer to stdout: "), "{arguments:?}: {stderr}");
    }
    // The manual pages of all commands are files, and `/dev/full` has no say in them.
    fs::create_dir(folder.path().join("man1")).unwrap();
    assert_eq!(run_into(full, folder.path(), &["man", "man1"]).status.code(), Some(0));
}

#[test]
fn a_reader_that_has_read_enough_is_no_error() {
    let folder = folder();
    for arguments in COMMANDS {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = run_into(writer, folder.path(), arguments);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), &*stderr), (Some(0), ""), "{arguments:?}");
    }
}

#[test]
fn a_server_serves_even_if_its_addresses_cannot_be_written() {
    let Ok(full) = OpenOptions::new().write(true).open("/dev/full") else { return };
    let folder = folder();
    let log = folder.path().join("stderr.txt");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(["serve", "--listen", "127.0.0.1:0"]).current_dir(folder.path());
    let mut server = command.stdout(full).stderr(File::create(&log).expect("a file")).spawn().expect("it starts");
    let said = testkit::wait::wait_until(|| {
        Some(fs::read_to_string(&log).expect("a file")).filter(|said| said.contains("gateway http://127.0.0.1:"))
    });
    let is_running = server.try_wait().expect("it can be waited for").is_none();
    server.kill().expect("it runs");
    server.wait().expect("it ends");
    let said = said.expect("the addresses are on stderr");
    assert!(said.contains("cannot write the answer to stdout: ") && is_running, "{said}");
}
