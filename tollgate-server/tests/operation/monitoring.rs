//! The alert rules, the dashboard and the runbook fit the metrics of the server and one another. `tests/peers` runs the
//! rules and queries with Prometheus itself.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::path::Path;

use serde_json::Value;
use testkit::metrics::EveryMetric;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn alert_rules() -> String {
    read("contrib/prometheus/alerts.yaml")
}

fn dashboard() -> Value {
    serde_json::from_str(&read("contrib/grafana/tollgate.json")).expect("the dashboard is JSON")
}

/// Returns the names of the alerts with their rules.
fn alerts(rules: &str) -> BTreeMap<&str, &str> {
    let blocks = rules.split("- alert: ").skip(1);
    blocks.map(|block| block.split_once('\n').expect("a rule has lines")).collect()
}

/// Returns all names of metrics in a text: words that begin like ours, without the suffixes of histograms.
fn metric_names(text: &str, types: &BTreeMap<String, String>) -> BTreeSet<String> {
    let words = text.split(|char: char| !char.is_ascii_alphanumeric() && char != '_');
    let names = words.filter(|word| word.starts_with("tollgate_") || word.starts_with("process_"));
    let of_histogram = |name: &str| {
        let family = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix))?;
        (types.get(family)? == "histogram").then(|| family.to_owned())
    };
    names.map(|name| of_histogram(name).unwrap_or_else(|| name.to_owned())).collect()
}

#[test]
fn alerts_and_dashboard_use_metrics_that_exist() {
    let types = EveryMetric::start().types();
    let expressions: String = alerts(&alert_rules())
        .values()
        .filter_map(|rule| Some(rule.split_once("expr:")?.1.split_once("labels:")?.0.to_owned()))
        .chain(expressions(&dashboard()).into_iter().map(|expression| format!(" {expression} ")))
        .collect();
    let names = metric_names(&expressions, &types);
    assert!(names.len() > 40, "{names:?}");
    let unknown: Vec<&String> = names.iter().filter(|name| !types.contains_key(*name)).collect();
    assert!(unknown.is_empty(), "no server has these metrics: {unknown:?}");
}

#[test]
fn every_alert_has_a_section_in_the_runbook_and_every_section_an_alert() {
    let (rules, runbook, operating) = (alert_rules(), read("docs/runbook.md"), read("docs/operating.md"));
    let alerts = alerts(&rules);
    let mut sections: BTreeMap<&str, &str> =
        runbook.split("\n## ").skip(1).map(|section| section.split_once('\n').expect("a section has lines")).collect();
    for (alert, rule) in alerts {
        let section = sections.remove(alert).unwrap_or_else(|| panic!("docs/runbook.md has no section {alert}"));
        for part in ["**Meaning.** ", "**Check.** ", "**Fix.** "] {
            assert!(section.contains(&format!("\n{part}")), "the section {alert} of docs/runbook.md lacks {part}");
        }
        let anchor = format!("runbook.html#{}", alert.to_lowercase());
        assert!(rule.lines().any(|line| line.contains("runbook_url: ") && line.ends_with(&anchor)), "{alert}: {rule}");
        for part in ["summary: ", "description: ", "severity: "] {
            assert!(rule.contains(part), "{alert} lacks {part}");
        }
        let row = format!("| [{alert}](runbook.md#{}) |", alert.to_lowercase());
        assert!(operating.contains(&row), "the table in docs/operating.md lacks {row}");
    }
    assert!(sections.is_empty(), "these sections of docs/runbook.md have no alert: {:?}", sections.keys());
}

#[test]
fn every_alert_is_tested_to_fire_and_to_be_silent() {
    let (rules, tests) = (alert_rules(), read("contrib/prometheus/alerts_test.yaml"));
    for alert in alerts(&rules).keys() {
        assert!(tests.contains(&format!("{{ alertname: {alert}, eval_time: 100m, exp_alerts: [] }}")), "{alert}");
        let fires = tests.split(&format!("- alertname: {alert}\n")).nth(1).unwrap_or_default();
        let fires = fires.split("- name: ").next().unwrap_or_default();
        assert!(fires.contains("- exp_labels: {"), "no test of contrib/prometheus/alerts_test.yaml has {alert} fire");
    }
}

/// Returns the panels, without the rows.
fn panels(dashboard: &Value) -> impl Iterator<Item = &Value> {
    dashboard["panels"].as_array().expect("panels").iter().filter(|panel| panel["type"] != "row")
}

/// Returns the queries of all panels, annotations and variables.
fn expressions(dashboard: &Value) -> Vec<&str> {
    let targets = panels(dashboard).flat_map(|panel| panel["targets"].as_array().expect("targets"));
    let annotations = dashboard["annotations"]["list"].as_array().expect("annotations").iter();
    let queries = targets.chain(annotations).map(|query| query["expr"].as_str().expect("an expression"));
    let variables = dashboard["templating"]["list"].as_array().expect("variables").iter();
    queries.chain(variables.filter_map(|variable| variable["definition"].as_str())).collect()
}

#[test]
fn the_dashboard_has_the_form_that_grafana_expects() {
    let dashboard = dashboard();
    assert_eq!((&dashboard["title"], &dashboard["uid"]), (&"Tollgate".into(), &"tollgate".into()));
    assert!(dashboard["id"].is_null(), "Grafana chooses the id");
    assert!(dashboard["schemaVersion"].as_u64().is_some_and(|version| version >= 36));
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    let names: Vec<&str> = variables.iter().map(|variable| variable["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["datasource", "job", "instance", "limit"]);
    let mut ids = HashSet::new();
    let mut cells = HashSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().filter(|title| !title.is_empty()).expect("a title");
        assert!(panel["id"].as_u64().is_some_and(|id| ids.insert(id)), "{title}: the id is used twice");
        let [x, y, width, height] = ["x", "y", "w", "h"].map(|name| panel["gridPos"][name].as_u64().unwrap());
        assert!(width > 0 && height > 0 && x + width <= 24, "{title}: {}", panel["gridPos"]);
        for cell in (x..x + width).flat_map(|x| (y..y + height).map(move |y| (x, y))) {
            assert!(cells.insert(cell), "{title} overlaps another panel");
        }
    }
    const TYPES: [&str; 5] = ["timeseries", "stat", "bargauge", "state-timeline", "table"];
    for panel in panels(&dashboard) {
        let title = panel["title"].as_str().unwrap();
        assert!(panel["type"].as_str().is_some_and(|kind| TYPES.contains(&kind)), "{title}: {}", panel["type"]);
        assert!(panel["description"].as_str().is_some_and(|text| text.ends_with('.')), "{title}: describe it");
        let (targets, mut references) = (panel["targets"].as_array().unwrap(), HashSet::new());
        assert!(!targets.is_empty(), "{title}: no query");
        for query in targets.iter().chain([panel]) {
            assert_eq!(query["datasource"]["uid"], "${datasource}", "{title}");
        }
        for query in targets {
            assert!(references.insert(query["refId"].as_str().unwrap()), "{title}: a refId is used twice");
            let expression = query["expr"].as_str().filter(|text| !text.is_empty()).expect("an expression");
            let selects = r#"{job=~"$job",instance=~"$instance""#;
            assert!(expression.contains(selects), "{title}: {expression} ignores the variables");
        }
    }
}
