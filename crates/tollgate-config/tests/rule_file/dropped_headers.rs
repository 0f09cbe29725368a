//! Warnings about headers that a rule reads and the gateway drops.

use tollgate_config::RuleFile;

fn warnings(text: &str) -> Vec<String> {
    let file = RuleFile::parse("tollgate.yaml", text).expect("the file is good");
    file.warnings().iter().map(|warning| warning.message().to_owned()).collect()
}

#[test]
fn a_rule_that_reads_a_header_with_an_underscore_is_a_warning_with_the_fix() {
    let file = RuleFile::parse(
        "tollgate.yaml",
        "gateway: { routes: [{ path: /**, upstream: echo }] }\nlimits: [{ name: a, key: header:x_user_id }]\n",
    );
    insta::assert_snapshot!(file.unwrap().warnings());
}

#[test]
fn every_setting_that_reads_a_header_is_checked() {
    for limit in [
        "key: [ip, header:x_id]",
        "plan: header:x_id, overrides: [{ plan: gold, limit: 5 }]",
        "cost: header:x_id",
        "cost: 'int(request.headers[\"x_id\"])'",
        "match: { headers: { x_id: '1' } }",
        "match: { when: 'request.headers.x_id == \"1\"' }",
        "exempt: { when: 'request.headers[\"x_id\"] == \"1\"' }",
        "blocked: { when: 'request.headers[\"x_id\"] == \"1\"' }",
    ] {
        let file = |gateway: &str| format!("{gateway}\nlimits: [{{ name: a, algorithm: fixed_window, {limit} }}]\n");
        let found = warnings(&file("gateway: { routes: [{ path: /**, upstream: echo }] }"));
        assert!(found.iter().any(|message| message.contains("drops `x_id`")), "{limit}: {found:?}");
        let kept = warnings(&file("gateway: { underscore_headers: keep, routes: [{ path: /**, upstream: echo }] }"));
        assert!(!kept.iter().any(|message| message.contains("drops `x_id`")), "{limit}: {kept:?}");
        let service = warnings(&file("service: { http: 127.0.0.1:0 }"));
        assert!(!service.iter().any(|message| message.contains("drops `x_id`")), "{limit}: {service:?}");
    }
    let route = "gateway: { routes: [{ path: /**, headers: { x_id: '1' }, upstream: echo }] }\nlimits: [{ name: a }]\n";
    assert!(warnings(route).iter().any(|message| message.contains("drops `x_id`")));
}

#[test]
fn a_key_that_proxies_write_needs_trusted_proxies() {
    let file = |settings: &str| {
        format!(
            "gateway: {{ {settings}routes: [{{ path: /**, upstream: echo }}] }}\n\
             limits: [{{ name: a, key: header:x-real-ip }}]\n"
        )
    };
    let found = warnings(&file(""));
    assert_eq!(found, ["the gateway drops `x-real-ip` unless it comes from `trusted_proxies`"]);
    assert_eq!(warnings(&file("trusted_proxies: [10.0.0.0/8], ")), [""; 0]);
}
