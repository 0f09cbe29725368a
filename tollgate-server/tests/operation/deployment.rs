//! Checks the files that deploy the server against the server.

use std::path::{Path, PathBuf};

use testkit::folder::folder_with;
use testkit::tollgate::{RULES, run_in};

fn contrib(name: &str) -> String {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../contrib").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the block under `tollgate.yaml: |`, without its indentation.
fn rule_file(manifest: &str) -> String {
    let block = manifest.split_once("  tollgate.yaml: |\n").expect("the ConfigMap has a rule file").1;
    let lines = block.lines().take_while(|line| line.is_empty() || line.starts_with("    "));
    lines.map(|line| format!("{}\n", line.strip_prefix("    ").unwrap_or_default())).collect()
}

#[test]
fn rule_file_for_kubernetes_is_valid() {
    let folder = folder_with(&[(RULES, &rule_file(&contrib("kubernetes.yaml")))]);
    let output = run_in(folder.path(), &["validate", "tollgate.yaml"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A fresh installation must not be reachable from other machines before somebody has written rules for it.
#[test]
fn packaged_rule_file_is_valid_and_listens_on_loopback_only() {
    let rules = contrib("tollgate.yaml");
    let folder = folder_with(&[(RULES, &rules)]);
    let output = run_in(folder.path(), &["validate", "--strict", "tollgate.yaml"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let listening: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("listen: ")).collect();
    assert!(listening.len() == 2 && listening.iter().all(|address| address.starts_with("127.0.0.1:")), "{listening:?}");
}

/// A socket that no listener uses would keep its clients waiting.
#[test]
fn socket_unit_has_the_addresses_of_the_packaged_rule_file() {
    let (rules, unit) = (contrib("tollgate.yaml"), contrib("tollgate.socket"));
    let values = |text: &str, key: &str| -> Vec<String> {
        text.lines().filter_map(|line| line.trim().strip_prefix(key).map(str::to_owned)).collect()
    };
    assert_eq!(values(&unit, "ListenStream="), values(&rules, "listen: "));
}

/// Behind SNAT, every connection comes from the cluster's network. If that were trusted, every client could forge its
/// address.
#[test]
fn manifest_for_kubernetes_trusts_nobody_and_is_not_public() {
    let manifest = contrib("kubernetes.yaml");
    let settings: Vec<&str> = manifest.lines().map(str::trim).filter(|line| !line.starts_with('#')).collect();
    assert!(!settings.iter().any(|line| line.starts_with("trusted_proxies")), "{manifest}");
    assert!(settings.contains(&"type: ClusterIP"), "{manifest}");
    assert!(manifest.contains("#   type: LoadBalancer\n  #   externalTrafficPolicy: Local\n"), "{manifest}");
}

#[test]
fn a_pod_has_more_time_to_end_than_it_may_take() {
    let manifest = contrib("kubernetes.yaml");
    let seconds = |name: &str| -> u64 {
        let rest = manifest.split_once(name).unwrap_or_else(|| panic!("there is no {name}")).1;
        let digits = rest.trim_start_matches(|char: char| !char.is_ascii_digit());
        digits[..digits.find(|char: char| !char.is_ascii_digit()).unwrap_or(digits.len())].parse().unwrap()
    };
    let (grace, drain, sleep) = (seconds("terminationGracePeriodSeconds:"), seconds("drain:"), seconds("sleep:"));
    assert!(grace > drain + sleep, "{grace} s is not more than {drain} s and {sleep} s");
}
