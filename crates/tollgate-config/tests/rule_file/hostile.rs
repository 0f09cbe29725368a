//! Hostile files: bounds on size, depth, aliases and messages.

use std::fmt::Write;

use proptest::prelude::*;
use tollgate_config::RuleFile;

fn refused(text: &str) -> String {
    RuleFile::parse("tollgate.yaml", text).expect_err("should be refused").to_string()
}

#[test]
fn a_file_of_more_than_4_mib_is_not_read() {
    let text = format!("limits:\n  - name: {}\n", "a".repeat(5 << 20));
    assert_eq!(
        refused(&text),
        format!("tollgate.yaml:1:1: the file has {} bytes, more than 4 MiB: remove some limits", text.len())
    );
}

/// Each pattern counts with 256 KiB. Ten thousand of them would take gigabytes, in a file of half a megabyte.
#[test]
fn patterns_of_a_file_are_bounded_together() {
    let mut text = String::from("gateway:\n  routes:\n");
    for route in 0..70 {
        let rewrite = r"rewrite: { pattern: '\w{4}', to: / }";
        writeln!(text, "    - {{ path: /{route}, upstream: http://h, {rewrite} }}").expect("memory is written");
    }
    text += "limits:\n";
    for limit in 0..70 {
        let when = r#"when: 'request.path.matches("\\w{4}")'"#;
        writeln!(text, "  - {{ name: l{limit}, match: {{ {when} }} }}").expect("memory is written");
    }
    text += "  - { name: last, match: { when: 'request.path.matches(\"(\")' } }\n";
    let message = refused(&text);
    let problem = "the regular expressions of the file take more than 32 MiB together: use fewer of them";
    let lines: Vec<&str> = message.lines().collect();
    assert!(lines[0].starts_with("tollgate.yaml:132:") && lines[0].contains(problem), "{message}");
    assert_eq!(lines.len(), 13, "each pattern that does not fit, and the last one: {message}");
    assert!(lines[12].starts_with("tollgate.yaml:144:") && lines[12].contains("unclosed group"), "{message}");
}

#[test]
fn depth_ends_the_reading() {
    let deep = [
        format!("limits: {}{}", "[".repeat(100_000), "]".repeat(100_000)),
        format!("limits: {}", "{a: ".repeat(100_000)),
        (0..1_000).fold(String::new(), |text, level| format!("{text}{}a:\n", " ".repeat(level))),
        format!("limits:\n  {}a\n", "- ".repeat(100_000)),
    ];
    for text in deep {
        let message = refused(&text);
        assert!(message.contains("more than 32 nested levels"), "{message}");
    }
}

#[test]
fn aliases_cannot_make_a_small_file_large() {
    let mut text = String::from("a: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..20 {
        let aliases = vec![format!("*a{}", level - 1); 10].join(", ");
        writeln!(text, "b{level}: &a{level} [{aliases}]").unwrap();
    }
    let message = refused(&text);
    assert!(message.contains("more than 500000 values, with aliases expanded"), "{message}");
}

#[test]
fn aliases_cannot_make_a_flat_file_deep() {
    let mut text = String::from("a: &a0 [x]\n");
    for level in 1..10_000 {
        writeln!(text, "b{level}: &a{level} [*a{}]", level - 1).unwrap();
    }
    let message = refused(&text);
    assert!(message.contains("more than 32 nested levels"), "{message}");
}

#[test]
fn a_million_anchors_are_too_many() {
    let text = (0..1_000_000).fold(String::from("a: ["), |text, _| text + "&a,");
    let message = refused(&format!("{text}]"));
    assert!(message.contains("more than 500000 values"), "{message}");
}

#[test]
fn many_problems_are_counted_and_not_all_listed() {
    let text = (0..50_000).fold(String::new(), |mut text, index| {
        writeln!(text, "unknown{index}: 5").unwrap();
        text
    });
    let message = refused(&text);
    assert_eq!(message.lines().count(), 101);
    assert!(message.ends_with("\nand 900 more"), "{}", message.lines().last().unwrap());
}

#[test]
fn more_limits_than_a_limiter_holds_are_refused() {
    let text = (0..10_001).fold(String::from("limits:\n"), |mut text, index| {
        writeln!(text, "  - name: n{index}").unwrap();
        text
    });
    assert_eq!(refused(&text), "tollgate.yaml:2:3: `limits` has 10001 entries, more than 10000: use 10000 or fewer");
}

#[test]
fn a_message_repeats_little_of_the_file_and_nothing_that_a_terminal_obeys() {
    let message = refused(&format!("\"\\e[31m{}\": 5\nlimits: []\n", "x".repeat(10_000)));
    assert!(message.len() < 500 && !message.contains('\u{1b}'), "{message}");
}

/// Lines that are similar enough to rules to pass the first steps.
fn nearly_a_file() -> impl Strategy<Value = String> {
    let line = prop::sample::select(vec![
        "limits:\n",
        "  - name: a\n",
        "  - &x\n",
        "    name: b\n",
        "    <<: *x\n",
        "    key: [ip, path]\n",
        "    key: \n",
        "    limit: 0\n",
        "    limit: 18446744073709551615\n",
        "    window: 4294967295d\n",
        "    cost: 7\n",
        "    algorithm: leaky_bucket\n",
        "    algorithm: nothing\n",
        "    leak: 999999999/1us\n",
        "    overflow: queue\n",
        "    overrides:\n",
        "      - { plan: p, limit: 1 }\n",
        "      - { key: [a], capacity: 0 }\n",
        "    match:\n",
        "      path: [/a/**, \"**\"]\n",
        "      headers: { a: b, A: c }\n",
        "    exempt: { ips: [::/0] }\n",
        "gateway: { routes: [{ path: /a, upstream: http://h }] }\n",
        "jwt: {}\n",
        "---\n",
        "? [a]\n",
        "\t\n",
        "- \n",
        "    when: |\n      true\n",
        "'\n",
        "headers: [legacy, 5]\n",
        "service: { http: { listen: 1.1.1.1:1 } }\n",
    ]);
    prop::collection::vec(line, 0..20).prop_map(|lines| lines.concat())
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "\\PC{0,200}|(?s:.{0,200})") {
        check(&text);
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _answer = RuleFile::parse("tollgate.yaml", bytes);
    }

    #[test]
    fn text_that_is_almost_a_rule_file_is_read_or_refused(text in nearly_a_file()) {
        check(&text);
    }
}

/// Every rejected file has problems with positions in it; every accepted file compiles to limits.
fn check(text: &str) {
    match RuleFile::parse("tollgate.yaml", text) {
        Ok(file) => {
            for rule in &file.limits {
                assert!(rule.limit().is_ok(), "{text}");
                assert!(rule.overrides.iter().all(|by| rule.overridden(by).is_ok()), "{text}");
            }
        }
        Err(problems) => {
            let lines = text.replace("\r\n", "\n").split(['\n', '\r']).count() as u32;
            assert!(problems.iter().count() > 0, "{text}");
            for problem in problems.iter() {
                assert!((1..=lines).contains(&problem.position().line), "{problem}\n{text}");
            }
        }
    }
}

/// Parsing a pattern takes two hundred times its length in memory, before the bound on the compiled pattern applies.
#[test]
fn a_regular_expression_that_is_too_long_or_too_large_is_refused_with_the_bound() {
    let refused = |pattern: &str| {
        let text = format!(
            "gateway: {{ routes: [{{ path: /**, upstream: echo, rewrite: {{ pattern: '{pattern}', to: / }} }}] }}\nlimits: []\n"
        );
        RuleFile::parse("tollgate.yaml", text).err().map(|problems| problems.to_string()).unwrap_or_default()
    };
    for length in [1025, 1 << 20] {
        let message = refused(&"a".repeat(length));
        assert!(
            message.contains(&format!("a regular expression of {length} bytes is too long: use 1024 bytes or less")),
            "{message}"
        );
    }
    let message = refused("(a{1000}){1000}");
    assert!(message.contains("compiles to more than 262144 bytes"), "{message}");
    assert_eq!(refused(&"a".repeat(1024)), "");
}
