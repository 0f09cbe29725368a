//! Checks of the settings at the top of the file: the store, listeners, trusted proxies and tokens.

use tollgate_http::Cors;

use super::{FirstPositions, gateway, store};
use crate::compile::challenge;
use crate::forms::Address;
use crate::node::Node;
use crate::problem::{Findings, Position};
use crate::types::{AdminRule, CorsRule, GatewayRule, JwtRule, Listener, OriginsRule, RuleFile, ServiceRule, TlsRule};

pub(super) fn check(file: &RuleFile, root: &Node, findings: &mut Findings) {
    if let Some(node) = root.get("store") {
        store::check(&file.store, node, findings);
    }
    store::check_named(file, root, findings);
    let mut families = FirstPositions::new();
    for (family, item) in file.headers.iter().zip(root.items("headers")) {
        if let Some(first) = families.duplicate_of(family, item.at) {
            findings.warning(item.at, format!("duplicate family of headers, first at {first}"), "remove one of them");
        }
    }
    if let (Some(rule), Some(node)) = (&file.cors, root.get("cors")) {
        origins(rule, node, findings);
    }
    if let (Some(gateway), Some(node)) = (&file.gateway, root.get("gateway")) {
        networks(gateway, node, findings);
        gateway::check(gateway, node, root.mentions("jwt"), findings);
    }
    if let Some(node) = root.get("service") {
        service(&file.service, node, findings);
    }
    if let (Some(admin), Some(node)) = (&file.admin, root.get("admin")) {
        admin_listener(admin, node, findings);
    }
    let mut listeners = FirstPositions::new();
    for (listen, at) in listening(file, root).into_iter().filter(|(listen, _)| !listen.is_any_port()) {
        if let Some(first) = listeners.duplicate_of(listen, at) {
            let message = format!("another listener already uses {} (at {first})", listen.as_str());
            findings.error(at, message, "give each listener its own port");
        }
    }
    if let (Some(jwt), Some(node)) = (&file.jwt, root.get("jwt")) {
        tokens(jwt, node, findings);
    }
}

fn origins(rule: &CorsRule, node: &Node, findings: &mut Findings) {
    let OriginsRule::Listed(origins) = &rule.origins else { return };
    for (origin, item) in origins.iter().zip(node.items("origins")) {
        if let Err(error) = Cors::origins([origin]) {
            findings.error(item.at, error.problem(), error.fix());
        }
    }
}

/// Checks the listeners of the decision service.
fn service(rule: &ServiceRule, node: &Node, findings: &mut Findings) {
    let ServiceRule { http, grpc, resp, .. } = rule;
    for (key, listener) in [("http", http), ("grpc", grpc), ("resp", resp)] {
        let (Some(listener), Some(node)) = (listener, node.get(key)) else { continue };
        gateway::proxy_protocol(&listener.proxy_protocol, node, findings);
        if let (Some(tls), Some(node)) = (&listener.tls, node.get("tls")) {
            listener_tls(tls, &format!("service.{key}"), node, findings);
        }
        if key != "http" && node.mentions("hosts") {
            let message = format!("hosts has no effect in service.{key}, because browsers cannot use that protocol");
            findings.error(node.key_at("hosts"), message, "remove it, or set it in service.http");
        }
    }
}

/// Checks the admin listener.
fn admin_listener(rule: &AdminRule, node: &Node, findings: &mut Findings) {
    if let (Some(tls), Some(node)) = (&rule.tls, node.get("tls")) {
        listener_tls(tls, "admin", node, findings);
    }
    let is_protected = rule.tokens_file.is_some() || rule.requires_certificates();
    if !is_protected && !rule.listen.is_loopback() && !node.lost("tokens_file") && !node.lost("tls") {
        let address = rule.listen.as_str();
        let message =
            format!("admin listens on {address}, where other machines reach it, without tokens: its API is closed");
        let fix = "set `admin.tokens_file`, or listen on 127.0.0.1; health checks and metrics need no token";
        findings.warning(node.value_at("listen"), message, fix);
    }
}

/// Checks the TLS of a listener.
fn listener_tls(tls: &TlsRule, listener: &str, node: &Node, findings: &mut Findings) {
    gateway::client_certificates(tls, node, findings);
    if tls.listen.is_some() {
        let message = format!("tls.listen has no effect in {listener}");
        findings.error(node.key_at("listen"), message, "remove it: the whole listener has TLS");
    }
}

/// Returns every address to listen on, with its position.
fn listening<'f>(file: &'f RuleFile, root: &Node) -> Vec<(&'f Address, Position)> {
    let ServiceRule { http, grpc, resp, .. } = &file.service;
    let tls = file.gateway.as_ref().and_then(|gateway| gateway.tls.as_ref());
    let of_service = |listener: &'f Option<Listener>| listener.as_ref().map(|listener| &listener.listen);
    let service = root.get("service");
    let addresses = [
        (file.gateway.as_ref().map(|gateway| &gateway.listen), root.get("gateway")),
        (tls.and_then(|tls| tls.listen.as_ref()), root.get("gateway").and_then(|gateway| gateway.get("tls"))),
        (of_service(http), service.and_then(|service| service.get("http"))),
        (of_service(grpc), service.and_then(|service| service.get("grpc"))),
        (of_service(resp), service.and_then(|service| service.get("resp"))),
        (file.admin.as_ref().map(|admin| &admin.listen), root.get("admin")),
    ];
    addresses.into_iter().filter_map(|(address, node)| Some((address?, node?.value_at("listen")))).collect()
}

fn networks(gateway: &GatewayRule, node: &Node, findings: &mut Findings) {
    for (network, item) in gateway.trusted_proxies.iter().zip(node.items("trusted_proxies")) {
        if network.net().prefix_len() == 0 {
            let message = format!("{network} trusts every client, so any client can claim any address");
            findings.warning(item.at, message, "list only the networks of your proxies");
        }
    }
}

fn tokens(jwt: &JwtRule, node: &Node, findings: &mut Findings) {
    match (node.mentions("key_file"), node.mentions("jwks_file")) {
        (false, false) => findings.error(
            node.at,
            "jwt has neither key_file nor jwks_file",
            "add `key_file: public.pem` or `jwks_file: keys.json`",
        ),
        (true, true) => {
            findings.error(node.key_at("jwks_file"), "jwt has both key_file and jwks_file", "remove one of them")
        }
        _ => {}
    }
    if node.mentions("key_file") && !node.lost("algorithms") {
        if jwt.algorithms.is_empty() {
            let fix = "add `algorithms: [RS256]`, or one of HS256, ES256 and EdDSA";
            findings.error(node.at, "key_file needs the algorithm of its key", fix);
        } else if jwt.algorithms.iter().any(|other| *other != jwt.algorithms[0]) {
            let fix = "keep the algorithm of the key, or use jwks_file for several keys";
            findings.error(node.value_at("algorithms"), "key_file takes one algorithm", fix);
        }
    }
    if jwt.realm.is_some() && !jwt.challenge && !node.lost("challenge") {
        let message = "realm has no effect without `challenge: true`";
        findings.error(node.key_at("realm"), message, "add `challenge: true`, or remove it");
    }
    challenge(jwt, node, findings);
}
