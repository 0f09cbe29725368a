//! Prometheus reads our metrics, alert rules and the queries of the dashboard.
//!
//! `promtool check metrics` reads the classic format only. OpenMetrics is checked by the parser of the Python client,
//! which follows the specification more strictly than Prometheus, and by Prometheus itself.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use serde_json::{Value, json};
use testkit::folder::{folder, folder_with};
use testkit::gateway::Gateway;
use testkit::http1::ask;
use testkit::metrics::EveryMetric;
use testkit::port::Port;
use testkit::process::ForeignServer;
use testkit::redis::Cluster;
use testkit::wait::wait_until;

use crate::http::send;
use crate::peer::{on_path, python, start};

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0";

fn contrib(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../contrib").join(name)
}

/// Runs a command with this input, and checks that it succeeds. Returns its output.
#[track_caller]
fn succeeds(command: &mut Command, input: &str) -> String {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the installed program runs");
    child.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("it reads its input");
    let output = child.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{input}");
    text
}

/// A gateway on a cluster, with decisions on several of its servers.
fn on_cluster(cluster: &Cluster) -> Gateway {
    let gateway = Gateway::with_admin(&format!(
        "store: {}\nstore_timeout: 5s\ngateway: {{ routes: [{{ path: '/**', respond: {{ status: 204 }} }}] }}\n\
         limits: [{{ name: per-path, key: path, limit: 5, window: 1h }}]\n",
        cluster.url()
    ));
    for number in 0..20 {
        gateway.get(&format!("/{number}"));
    }
    gateway
}

#[test]
fn promtool_finds_no_fault_in_the_metrics() {
    let Some(promtool) = on_path("promtool") else { return };
    let (servers, cluster) = (EveryMetric::start(), Cluster::start());
    let on_cluster = on_cluster(&cluster);
    // Without a header, as curl is used in a pipe.
    let page = on_cluster.get_admin("/metrics").text().to_owned();
    assert!(page.matches("tollgate_store_server_breaker_state{").count() >= 9, "three servers: {page}");
    let pages = servers.pages("*/*").into_iter().chain(servers.pages("text/plain;version=0.0.4")).chain([page]);
    for page in pages {
        let text = succeeds(Command::new(&promtool).args(["check", "metrics"]), &page);
        assert_eq!(text, "", "{page}");
    }
}

/// Names of limits and routes are free text, so every character that a format escapes has to arrive.
#[test]
fn both_formats_are_read_by_the_client_of_prometheus_and_have_the_same_samples() {
    let Some(mut python) = python() else { return };
    let servers = EveryMetric::start();
    let odd = "a \\ \"quoted\" {name} # with=everything, é";
    let name = serde_json::to_string(odd).expect("JSON is YAML");
    let odd_names = Gateway::with_admin(&format!(
        "gateway: {{ routes: [{{ name: {name}, path: '/**', respond: {{ status: 204 }} }}] }}\nlimits: []\n"
    ));
    odd_names.get("/");
    let pages = |accept: &str| {
        let odd = testkit::metrics::metrics(&odd_names, accept).text().to_owned();
        Vec::from_iter(servers.pages(accept).into_iter().chain([odd]))
    };
    // The time of the processor and the like change from page to page.
    let script = r#"
import json, sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as classic
pages = json.load(sys.stdin)
def series(families):
    return sorted((sample.name, sorted(sample.labels.items())) for family in families for sample in family.samples)
for one, other in zip(pages["open_metrics"], pages["classic"]):
    one, other = list(open_metrics(one)), list(classic(other))
    assert series(one) == series(other), (series(one), series(other))
    assert {family.type for family in one} == {"counter", "gauge", "histogram"}, one
    assert [family.type for family in one] == [family.type for family in other]
    assert all(family.documentation for family in one), one
routes = {sample.labels["route"] for family in one for sample in family.samples if "route" in sample.labels}
print(json.dumps(sorted(routes)))
"#;
    let input = json!({ "open_metrics": pages(OPEN_METRICS), "classic": pages("text/plain") });
    let output = succeeds(python.args(["-c", script]), &input.to_string());
    let routes: Value = serde_json::from_str(&output).expect("JSON");
    assert_eq!(routes, json!(["", odd]));
}

#[test]
fn the_alert_rules_are_valid_and_pass_their_tests() {
    let Some(promtool) = on_path("promtool") else { return };
    let folder = contrib("prometheus");
    let text = succeeds(Command::new(&promtool).args(["check", "rules", "alerts.yaml"]).current_dir(&folder), "");
    assert!(text.contains("SUCCESS"), "{text}");
    let text = succeeds(Command::new(&promtool).args(["test", "rules", "alerts_test.yaml"]).current_dir(&folder), "");
    assert!(text.contains("SUCCESS"), "{text}");
}

/// Returns the queries of the dashboard, with values for its variables.
fn dashboard_queries() -> Vec<String> {
    let text = std::fs::read_to_string(contrib("grafana/tollgate.json")).expect("there is a dashboard");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels").iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let annotations = dashboard["annotations"]["list"].as_array().expect("annotations").iter();
    let queries = targets.chain(annotations).map(|query| query["expr"].as_str().expect("an expression"));
    let in_grafana = |query: &str| {
        ["$job", "$instance", "$limit"].iter().fold(query.to_owned(), |query, name| query.replace(name, ".*"))
    };
    queries.map(|query| in_grafana(query).replace("$__rate_interval", "1m").replace("$__interval", "1m")).collect()
}

#[test]
fn promtool_reads_every_query_of_the_dashboard() {
    let Some(promtool) = on_path("promtool") else { return };
    let rule = |(number, query): (usize, &String)| json!({ "record": format!("query:{number}"), "expr": query });
    let rules: Vec<Value> = dashboard_queries().iter().enumerate().map(rule).collect();
    // JSON is YAML.
    let file = json!({ "groups": [{ "name": "dashboard", "rules": rules }] }).to_string();
    let folder = folder_with(&[("rules.yaml", &file)]);
    let command = &mut Command::new(promtool);
    let text = succeeds(command.args(["check", "rules", "rules.yaml"]).current_dir(folder.path()), "");
    assert!(text.contains(&format!("SUCCESS: {} rules found", rules.len())), "{text}");
}

/// Serves the page of a server as a client gets it that sends no `Accept` header. Prometheus 2 always asks for
/// OpenMetrics.
fn classic_relay(admin: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address");
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            let mut head = [0; 4096];
            // A client that disconnects gets nothing.
            _ = stream.read(&mut head);
            let page = ask(admin, "GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
            let content_type = page.header("content-type").unwrap_or_default();
            let length = page.text().len();
            _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{}",
                page.text()
            );
        }
    });
    address
}

/// A Prometheus that scrapes these targets, by job, with our alert rules.
struct Prometheus {
    _server: ForeignServer,
    port: Port,
}

impl Prometheus {
    fn start(program: &Path, jobs: &[(&str, Vec<SocketAddr>)]) -> Self {
        let port = Port::claim();
        let job = |(name, targets): &(&str, Vec<SocketAddr>)| {
            let targets: Vec<String> = targets.iter().map(ToString::to_string).collect();
            json!({ "job_name": name, "static_configs": [{ "targets": targets }] })
        };
        let config = json!({
            "global": { "scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms" },
            "rule_files": [contrib("prometheus/alerts.yaml").canonicalize().expect("it is there")],
            "scrape_configs": jobs.iter().map(job).collect::<Vec<_>>(),
        });
        let folder = folder();
        std::fs::write(folder.path().join("prometheus.yml"), config.to_string()).expect("the folder is writable");
        let mut command = Command::new(program);
        command.args(["--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn"]);
        command.arg(format!("--web.listen-address=127.0.0.1:{}", port.number()));
        let server = start(command, folder, port.number());
        Self { _server: server, port }
    }

    /// Calls the API, and returns the data. `None` if it is not ready yet.
    fn get(&self, path: &str) -> Option<Value> {
        let response = send(self.port.number(), &format!("GET /api/v1/{path}"), &[])?;
        let answer: Value = serde_json::from_str(&response.body).ok()?;
        assert_eq!(answer["status"], "success", "{path}: {answer}");
        Some(answer["data"].clone())
    }

    /// Runs a query, and returns the labels and values of its result.
    fn query(&self, query: &str) -> Vec<(Value, f64)> {
        let encode =
            |byte: u8| if byte.is_ascii_alphanumeric() { char::from(byte).to_string() } else { format!("%{byte:02X}") };
        let encoded: String = query.bytes().map(encode).collect();
        let data = self.get(&format!("query?query={encoded}")).expect("it answers");
        let rows = data["result"].as_array().cloned().unwrap_or_default();
        let value = |row: &Value| row["value"][1].as_str().and_then(|text| text.parse().ok()).unwrap_or(f64::NAN);
        rows.iter().map(|row| (row["metric"].clone(), value(row))).collect()
    }
}

#[test]
fn prometheus_scrapes_both_formats_and_answers_the_queries_of_the_dashboard() {
    let Some(program) = on_path("prometheus") else { return };
    let servers = EveryMetric::start();
    let (in_memory, on_redis) = (servers.in_memory.admin(), servers.on_redis.admin());
    let classic = classic_relay(in_memory);
    let jobs = [("tollgate", vec![in_memory, on_redis]), ("tollgate-classic", vec![classic])];
    let prometheus = Prometheus::start(&program, &jobs);

    let healthy = wait_until(|| {
        let targets = prometheus.get("targets")?["activeTargets"].as_array()?.clone();
        (targets.len() == 3 && targets.iter().all(|target| target["health"] == "up")).then_some(())
    });
    assert!(healthy.is_some(), "{:?}", prometheus.get("targets"));

    let denied = r#"tollgate_decisions_total{limit="per-client",outcome="denied"}"#;
    let of_job = |job: &str, instance: SocketAddr| {
        let query = format!(r#"{},job="{job}",instance="{instance}"}}"#, denied.trim_end_matches('}'));
        prometheus.query(&query).first().map(|(_, value)| *value)
    };
    let both = wait_until(|| Some((of_job("tollgate", in_memory)?, of_job("tollgate-classic", classic)?)));
    assert_eq!(both, Some((18.0, 18.0)), "of twenty requests, two are allowed");
    // Prometheus keeps the type of a family under its name there, which counters have with and without a suffix.
    let metadata = prometheus.get("metadata").expect("it answers");
    for name in ["tollgate_decisions_total", "tollgate_request_duration_seconds", "tollgate_connections"] {
        assert!(metadata.get(name).is_some_and(|entries| entries[0]["help"] != ""), "{name}: {metadata}");
    }

    // A rate needs two scrapes.
    let quantile = r#"histogram_quantile(0.99, sum by (le) (rate(tollgate_service_duration_seconds_bucket{surface="admin"}[1m])))"#;
    let is_number = |rows: &[(Value, f64)]| rows.first().is_some_and(|(_, value)| value.is_finite());
    assert!(wait_until(|| is_number(&prometheus.query(quantile)).then_some(())).is_some(), "the histogram is complete");
    let queries = dashboard_queries();
    let answered = queries.iter().filter(|query| !prometheus.query(query).is_empty()).count();
    assert!(answered * 10 > queries.len() * 6, "only {answered} of {} queries have a result", queries.len());

    let rules = wait_until(|| {
        let groups = prometheus.get("rules")?["groups"].as_array()?.clone();
        let rules = groups.iter().flat_map(|group| group["rules"].as_array().cloned().unwrap_or_default());
        let rules: Vec<Value> = rules.collect();
        (rules.len() >= 25 && rules.iter().all(|rule| rule["health"] == "ok")).then_some(rules)
    });
    assert!(rules.is_some(), "{:?}", prometheus.get("rules"));
}
