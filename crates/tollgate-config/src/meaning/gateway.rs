//! Checks of the gateway: reachable routes, upstreams and headers.

use std::collections::{BTreeMap, HashMap};

use http::HeaderValue;
use http::header::HOST;
use tollgate_http::internal::reads_as;
use tollgate_rules::Match;
use tollgate_rules::internal::config::{Shadowed, can_begin_with, shadowed};

use super::FirstPositions;
use super::limits::header_values;
use crate::compile::route_matching;
use crate::forms::{HeaderName, HeaderSource, KeyPart};
use crate::node::Node;
use crate::problem::{Findings, Position, shown};
use crate::types::{
    GatewayRule, HeaderEdits, HeaderValueRule, LogFormat, MAX_WEIGHT, ProxyProtocolRule, RequestHeaderEdits, RouteRule,
    TlsRule, UpstreamHeader, UpstreamRule,
};

/// Headers of the connection and of the message framing. Setting them would allow request smuggling.
const OF_THE_CONNECTION: [&str; 8] =
    ["connection", "content-length", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"];

pub(super) fn check(gateway: &GatewayRule, node: &Node, has_jwt: bool, findings: &mut Findings) {
    let is_repeated =
        |header: &UpstreamHeader| gateway.tell_upstreams.iter().filter(|other| *other == header).count() > 1;
    if gateway.tell_upstreams.iter().any(is_repeated) {
        let message = "tell_upstreams has a duplicate entry";
        findings.warning(node.value_at("tell_upstreams"), message, "remove one of them");
    }
    if let (Some(log), Some(node)) = (&gateway.access_log, node.get("access_log"))
        && (log.format, log.key.is_some()) == (LogFormat::Combined, true)
    {
        let message = "lines of the format combined have no key";
        findings.error(node.value_at("key"), message, "use `format: json`, or remove key");
    }
    if let (Some(tls), Some(node)) = (&gateway.tls, node.get("tls")) {
        client_certificates(tls, node, findings);
    }
    proxy_protocol(&gateway.proxy_protocol, node, findings);
    let verified =
        Verified { tokens: has_jwt, certificates: gateway.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some()) };
    let mut seen = FirstPositions::new();
    let mut names = FirstPositions::new();
    for (route, at) in gateway.routes.iter().zip(node.items("routes")) {
        reach(route, at, &mut seen, findings);
        header_values(&route.headers, at, findings);
        if let Some(first) = route.name.is_some().then(|| names.duplicate_of(route.name().to_owned(), at.at)).flatten()
        {
            let message = format!("duplicate route name `{}`, first at {first}", shown(route.name()));
            findings.error(at.value_at("name"), message, "give each route its own name");
        }
        leads_somewhere(route, at, findings);
        shares(route, at, findings);
        upstream_tls(route, at, findings);
        if let Some(headers) = at.get("request_headers") {
            request_edits(&route.request_headers, headers, verified, findings);
        }
        if let Some(headers) = at.get("response_headers") {
            edits(&route.response_headers, headers, findings);
        }
        if let (Some(respond), Some(node)) = (&route.respond, at.get("respond")) {
            values(&respond.headers, node.get("headers").unwrap_or(node), findings);
        }
    }
    // After an error, this may be only its consequence.
    if !findings.refused() {
        shadows(gateway, node, findings);
    }
}

/// Reports a listener that believes the headers of everybody.
pub(super) fn proxy_protocol(rule: &ProxyProtocolRule, listener: &Node, findings: &mut Findings) {
    if *rule == ProxyProtocolRule::Unrestricted {
        let message = "`proxy_protocol: true` lets everybody who can connect name any address as the client's";
        let fix = "name the networks of the load balancer: `proxy_protocol: { from: [10.0.0.0/8] }`";
        findings.error(listener.value_at("proxy_protocol"), message, fix);
    }
}

/// Reports routes that other routes hide. `reach` reports equal routes.
fn shadows(gateway: &GatewayRule, node: &Node, findings: &mut Findings) {
    let matches: Vec<Match> = gateway.routes.iter().map(route_matching).collect();
    for Shadowed { route, by } in shadowed(&matches) {
        let at = |index: usize| node.get("routes").map_or(node.at, |routes| routes.item(index).value_at("path"));
        let Position { line, column } = at(by);
        let message =
            format!("no request reaches this route, because the route at {line}:{column} serves all of its requests");
        findings.error(at(route), message, "remove it, or change the requests that one of them matches");
    }
}

/// Reports routes that are equal to an earlier one. The most specific route is chosen, whatever the order.
fn reach(route: &RouteRule, at: &Node, seen: &mut FirstPositions<String>, findings: &mut Findings) {
    let (mut methods, mut hosts) = (route.methods.clone().unwrap_or_default(), route.hosts.clone().unwrap_or_default());
    methods.sort_unstable();
    hosts.sort_unstable();
    for path in &route.path {
        let conditions = format!("{} {methods:?} {hosts:?} {:?}", path.normal(), route.headers);
        if let Some(first) = seen.duplicate_of(conditions, at.value_at("path")) {
            let path = shown(path.as_str());
            let (message, fix) = if route.path.len() == 1 {
                let message = format!("no request reaches this route, because {path} is already routed at {first}");
                (message, "remove one of them, or give one route both upstreams in a list")
            } else {
                let message =
                    format!("no request for {path} reaches this route, because it is already routed at {first}");
                (message, "remove the path from one of them")
            };
            findings.error(at.value_at("path"), message, fix);
        }
    }
}

fn leads_somewhere(route: &RouteRule, at: &Node, findings: &mut Findings) {
    let echoes = |upstream: &UpstreamRule| upstream.url.is_echo();
    match (at.mentions("upstream"), at.mentions("respond")) {
        (false, false) => findings.error(
            at.at,
            "this route has neither `upstream` nor `respond`",
            "add `upstream: http://127.0.0.1:8081`, or a fixed response with `respond`",
        ),
        (true, true) => {
            findings.error(at.key_at("respond"), "this route has both `upstream` and `respond`", "remove one of them")
        }
        (true, false) => {
            let upstreams = route.upstream.iter().flatten();
            if upstreams.clone().count() > 1 && upstreams.clone().any(echoes) {
                let message = "`echo` cannot be combined with other upstreams";
                findings.error(at.value_at("upstream"), message, "use it alone, or remove it");
            }
        }
        (false, true) => {}
    }
    let is_prefix = |prefix: &str| !prefix.contains(['?', '*']);
    if route.strip_prefix.as_ref().is_some_and(|prefix| !is_prefix(prefix.as_str())) {
        let message = "strip_prefix contains `*` or `?`";
        findings.error(at.value_at("strip_prefix"), message, "write the start of a path, such as /api");
    } else if let Some(prefix) = &route.strip_prefix {
        let mut globs = route.path.iter().filter_map(|path| path.as_str().parse().ok());
        if !globs.any(|glob| can_begin_with(&glob, prefix.as_str())) {
            let message = format!(
                "strip_prefix has no effect, because no path of this route starts with {}",
                shown(prefix.as_str())
            );
            findings.warning(at.value_at("strip_prefix"), message, "write the start of the route's path");
        }
    }
}

/// Checks that each upstream is named once.
fn shares(route: &RouteRule, at: &Node, findings: &mut Findings) {
    let mut sums = HashMap::new();
    for upstream in route.upstream.iter().flatten() {
        let sum: &mut u32 = sums.entry(upstream.url.normal()).or_default();
        *sum = sum.saturating_add(upstream.weight);
    }
    let mut seen = FirstPositions::new();
    for (upstream, node) in route.upstream.iter().flatten().zip(at.items("upstream")) {
        let place = node.value_at("url");
        if let Some(first) = seen.duplicate_of(upstream.url.normal(), place).filter(|_| !upstream.url.is_echo()) {
            let url = shown(upstream.url.as_str());
            let message = format!("duplicate upstream {url}, first at {first}");
            let all = sums.get(&upstream.url.normal()).map_or(1, |sum| (*sum).clamp(1, MAX_WEIGHT));
            let fix = format!("remove it, and write the first as {{ url: {url}, weight: {all} }}");
            findings.error(place, message, fix);
        }
    }
}

/// Checks that TLS settings are for an upstream with TLS. Without one, requests would be sent in plain text.
fn upstream_tls(route: &RouteRule, at: &Node, findings: &mut Findings) {
    let has_tls = |upstream: &UpstreamRule| upstream.url.as_str().starts_with("https://");
    let is_known = at.get("upstream").is_some() || at.get("respond").is_some();
    if at.mentions("upstream_tls") && is_known && !route.upstream.iter().flatten().any(has_tls) {
        let message = "upstream_tls has no effect, because no upstream of this route uses TLS";
        findings.error(at.key_at("upstream_tls"), message, "write https:// in the URL of the upstream, or remove it");
    }
}

/// Checks that client certificates can be verified.
pub(super) fn client_certificates(tls: &TlsRule, node: &Node, findings: &mut Findings) {
    if node.get("client_certificates").is_some() && tls.client_ca.is_none() {
        findings.error(
            node.value_at("client_certificates"),
            "client_certificates needs client_ca to verify them",
            "add `client_ca: clients.pem` with the authorities that you trust",
        );
    }
}

/// The credentials of clients that the gateway verifies.
#[derive(Clone, Copy)]
struct Verified {
    tokens: bool,
    certificates: bool,
}

fn request_edits(edits: &RequestHeaderEdits, node: &Node, verified: Verified, findings: &mut Findings) {
    if let Some(node) = node.get("set") {
        for (name, value) in &edits.set {
            framing(name, node.key_at(name), findings);
            match value {
                HeaderValueRule::Constant(text) => sendable(name, text, node, findings),
                HeaderValueRule::From(rule) => {
                    fact(name, &rule.from, node, verified, findings);
                    alone(name, edits, node, findings);
                }
            }
        }
    }
    if let Some(node) = node.get("add") {
        values(&edits.add, node, findings);
    }
    removed(&edits.remove, node, findings);
}

/// Checks that no other value is sent under the name of a fact, or under a name that upstreams may take for it.
fn alone(name: &str, edits: &RequestHeaderEdits, node: &Node, findings: &mut Findings) {
    let mut others = edits.set.keys().filter(|other| *other != name).chain(edits.add.keys());
    if let Some(other) = others.find(|other| reads_as(other, name)) {
        let message = format!("upstreams take {} and {} for one header", shown(name), shown(other));
        findings.error(node.key_at(name), message, "remove one of them");
    }
}

/// Checks a header whose value is a fact about the request.
fn fact(name: &str, source: &HeaderSource, node: &Node, verified: Verified, findings: &mut Findings) {
    let at = node.get(name).map_or_else(|| node.value_at(name), |value| value.value_at("from"));
    if name.eq_ignore_ascii_case(HOST.as_str()) {
        let message = "a request must have a Host, which a fact about it may lack";
        return findings.error(at, message, "write a fixed name, or use `host: upstream` of the route");
    }
    match source {
        HeaderSource::Part(KeyPart::Jwt(_)) if !verified.tokens => super::keys::no_jwt(at, findings),
        HeaderSource::Part(KeyPart::Certificate(_)) if !verified.certificates => {
            let message = format!("`{source}` is always missing, because the gateway verifies no client certificates");
            findings.error(at, message, "add `client_ca` to `gateway.tls`, or remove the header");
        }
        _ => {}
    }
}

fn edits(edits: &HeaderEdits, node: &Node, findings: &mut Findings) {
    for (map, key) in [(&edits.set, "set"), (&edits.add, "add")] {
        if let Some(node) = node.get(key) {
            values(map, node, findings);
        }
    }
    removed(&edits.remove, node, findings);
}

fn removed(names: &[HeaderName], node: &Node, findings: &mut Findings) {
    for (name, item) in names.iter().zip(node.items("remove")) {
        framing(name.as_str(), item.at, findings);
    }
}

/// Checks that headers can be sent.
fn values(headers: &BTreeMap<String, String>, node: &Node, findings: &mut Findings) {
    for (name, value) in headers {
        framing(name, node.key_at(name), findings);
        sendable(name, value, node, findings);
    }
}

fn sendable(name: &str, value: &str, node: &Node, findings: &mut Findings) {
    if HeaderValue::try_from(value).is_err() {
        let message = format!("the value of {} has characters that a header cannot have", shown(name));
        findings.error(node.value_at(name), message, "use one line of printable text");
    }
}

fn framing(name: &str, at: Position, findings: &mut Findings) {
    if OF_THE_CONNECTION.iter().any(|header| reads_as(name, header)) {
        let message = format!("the gateway sets {} itself", shown(name));
        findings.error(at, message, "remove it (headers of a connection are not forwarded)");
    }
}
