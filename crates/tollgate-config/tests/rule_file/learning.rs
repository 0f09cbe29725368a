//! Quotas that learn: their settings, and every message about them.

use std::fmt::Write;
use std::time::Duration;

use tollgate_config::RuleFile;

fn limit(rest: &str) -> String {
    format!("limits:\n  - name: per-user\n    key: header:x-user-id\n{rest}")
}

#[test]
fn settings_have_defaults() {
    let text = limit("    algorithm: token_bucket\n    refill: 1/s\n    capacity: { learn: { from: 50, to: 400 } }\n");
    let file = RuleFile::parse("tollgate.yaml", text).unwrap();
    let rule = &file.limits[0];
    let learn = rule.learn().unwrap();
    let settings = learn.settings().unwrap();
    assert_eq!((settings.from, settings.to, learn.shadow), (50, 400, false));
    assert_eq!(settings.over, Duration::from_secs(7 * 86_400));
    assert_eq!(settings.cover.to_string(), "99.9 %");
    assert_eq!(rule.limit().unwrap().quota(), 50, "the smallest number is in force at first");
}

#[test]
fn windows_learn_their_limit() {
    let text = limit(
        "    window: 1m\n    limit:\n      learn:\n        from: 5\n        to: 5\n        over: 1d\n        cover: 0.5\n        shadow: true\n",
    );
    let file = RuleFile::parse("tollgate.yaml", text).unwrap();
    let learn = file.limits[0].learn().unwrap();
    assert!(learn.shadow);
    let warning = "from and to are both 5, so the limit has nothing to learn: raise `to`, or write `limit: 5`";
    assert!(file.warnings().to_string().contains(warning), "{}", file.warnings());
    assert_eq!(learn.settings().unwrap().cover.to_string(), "50 %");
    assert!(file.compile().is_ok());
}

#[test]
fn every_problem_is_reported_with_its_place_and_fix() {
    let files = [
        "    limit: { learn: { from: 50, to: 40 } }\n",
        "    limit: { learn: { from: 0, to: 40 } }\n",
        "    limit: { learn: { from: 5, to: 99999999999 } }\n",
        "    limit: { learn: { from: 5 } }\n",
        "    limit: { learn: { to: 5 } }\n",
        "    limit: { learn: { from: 5, to: 10, over: 5m } }\n",
        "    limit: { learn: { from: 5, to: 10, over: 1000d } }\n",
        "    limit: { learn: { from: 5, to: 10, over: 7 } }\n",
        "    limit: { learn: { from: 5, to: 10, cover: 1 } }\n",
        "    limit: { learn: { from: 5, to: 10, cover: 0 } }\n",
        "    limit: { learn: { from: 5, to: 10, cover: 0.9999995 } }\n",
        "    limit: { learn: { from: 5, to: 10, cover: 0.0000009 } }\n",
        "    limit: { learn: { from: 5, to: 10, cover: 99.9 } }\n",
        "    limit: { learn: { from: 5, to: 10, cover: 99.9% } }\n",
        "    limit: { learn: { from: 5, to: 10, cover: -1 } }\n",
        "    limit: { learn: { from: 5, to: 10, covers: 0.9 } }\n",
        "    limit: { learn: 5 }\n",
        "    limit: { from: 5, to: 10 }\n",
        "    limit: {}\n",
        "    learn: { from: 5, to: 10 }\n",
        "    capacity: { learn: { from: 5, to: 10 } }\n",
        "    limit: { learn: { from: 5, to: 10 } }\n    cost: 7\n",
        "    limit: { learn: { from: 5, to: 10 } }\n    count: failures\n",
        "    limit: { learn: { from: 5, to: 10 } }\n    settle: header:x-cost\n",
        "    limit: { learn: { from: 5, to: 10 } }\n    count: { when: after }\n",
        "    plan: header:x-plan\n    overrides: [{ plan: pro, limit: { learn: { from: 5, to: 10 } } }]\n",
    ];
    let mut messages = String::new();
    for rest in files {
        let text = limit(rest);
        let problems = RuleFile::parse("tollgate.yaml", &text).unwrap_err();
        writeln!(messages, "{}{problems}\n", rest).unwrap();
    }
    let without_key = "limits:\n  - name: all\n    limit: { learn: { from: 5, to: 10 } }\n";
    writeln!(messages, "{without_key}{}\n", RuleFile::parse("tollgate.yaml", without_key).unwrap_err()).unwrap();
    let many: String = (0..70)
        .map(|index| format!("  - {{ name: l{index}, key: ip, limit: {{ learn: {{ from: 5, to: 10 }} }} }}\n"))
        .collect();
    let many = format!("limits:\n{many}");
    writeln!(messages, "70 limits\n{}", RuleFile::parse("tollgate.yaml", many).unwrap_err()).unwrap();
    insta::assert_snapshot!("learning", messages);
}
