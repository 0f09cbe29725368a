//! The programs of `docs/integrations`, which print what the pages show.

use std::process::{Command, Output};

use testkit::folder::{folder, folder_with};
use testkit::tollgate::{Process, RULES};

use crate::page::{Page, Ports};
use crate::peer::{installed, on_path, python};

/// Runs each program of a page against Tollgate and compares its output with the page.
fn check(page: &str, language: &str, mut run: impl FnMut(&str) -> Output) {
    let page = Page::read(page, Ports::claim(8081));
    let _tollgate = Process::start(folder_with(&[(RULES, page.rules())]), &["serve", "--config", RULES]);
    for (program, expected) in page.programs(language) {
        let output = run(program);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), expected.trim(), "{program}\n{errors}");
    }
}

#[test]
fn python_programs_print_what_the_page_shows() {
    if python().is_none() {
        return;
    }
    check("python.md", "python", |program| {
        let mut command = python().expect("it is installed");
        command.args(["-c", program]).output().expect("python3 runs")
    });
}

#[test]
fn node_programs_print_what_the_page_shows() {
    let Some(modules) = installed("node/node_modules") else { return };
    check("node.md", "javascript", |program| {
        let mut command = Command::new("node");
        command.env("NODE_PATH", &modules).args(["-e", program]).output().expect("node runs")
    });
}

#[test]
fn java_program_prints_what_the_page_shows() {
    let Some(java) = on_path("java") else { return };
    check("java.md", "java", |program| {
        let folder = folder_with(&[("Check.java", program)]);
        Command::new(&java).arg("Check.java").current_dir(folder.path()).output().expect("java runs")
    });
}

#[test]
fn shell_commands_print_what_the_page_shows() {
    if on_path("curl").is_none() || on_path("redis-cli").is_none() {
        return;
    }
    check("shell.md", "sh", |program| {
        Command::new("sh").args(["-c", program]).current_dir(folder().path()).output().expect("sh runs")
    });
}
