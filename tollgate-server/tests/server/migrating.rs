//! The questions to `POST /v1/check` in `docs/migrating` are answered as the pages show.

use serde_json::Value;

use crate::process::{RULES, Server, folder_with};

const PAGES: [(&str, &str); 2] = [
    ("envoy-ratelimit.md", include_str!("../../../docs/migrating/envoy-ratelimit.md")),
    ("bucket4j.md", include_str!("../../../docs/migrating/bucket4j.md")),
];

/// Returns the first block of a language.
fn block<'t>(page: &'t str, language: &str) -> &'t str {
    let rest = page.split_once(&format!("```{language}\n")).map(|(_, rest)| rest).expect("the page has such a block");
    rest.split("```").next().unwrap_or_default()
}

#[test]
fn questions_are_answered_as_the_pages_show() {
    for (name, page) in PAGES {
        let folder = folder_with(&[(RULES, block(page, "yaml"))]);
        let arguments = ["serve", "--config", RULES, "--store", "memory", "--http", "127.0.0.1:0"];
        let server = Server::run(folder, &arguments);
        let (command, answer) = block(page, "console").split_once('\n').expect("a command and its answer");
        let question = command.split('\'').nth(1).expect("the question is quoted");
        let mut shown: Value = serde_json::from_str(answer).expect("the answer is JSON");
        let mut given = server.connect().check(&serde_json::from_str(question).expect("the question is JSON"));
        for answer in [&mut shown, &mut given] {
            // It depends on the time of day.
            answer["reset_after"].take();
        }
        assert_eq!(given, shown, "{name}");
    }
}
