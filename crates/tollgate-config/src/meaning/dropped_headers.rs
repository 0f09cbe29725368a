//! Headers that a rule reads and the gateway drops before limits see a request.

use tollgate_http::internal::{is_folded_by_servers, is_forwarding_header};
use tollgate_rules::internal::config::jwt;

use crate::forms::{CostText, KeyPart, PlanSource, TokenSource};
use crate::node::Node;
use crate::problem::{Findings, Position, shown};
use crate::types::{CostRule, GatewayRule, LimitRule, RuleFile, UnderscoreHeaders};

pub(super) fn check(file: &RuleFile, root: &Node, findings: &mut Findings) {
    let Some(gateway) = &file.gateway else { return };
    let dropped = Dropped { gateway };
    for (rule, node) in file.limits.iter().zip(root.items("limits")) {
        of_limit(&dropped, rule, node, findings);
    }
    if let (Some(jwt), Some(node)) = (&file.jwt, root.get("jwt"))
        && let TokenSource(jwt::TokenSource::Header(name)) = &jwt.from
    {
        dropped.warn(name.as_str(), node.value_at("from"), findings);
    }
    let routes = root.get("gateway").map_or(&[][..], |gateway| gateway.items("routes"));
    for (route, node) in gateway.routes.iter().zip(routes) {
        if let Some(headers) = node.get("headers") {
            route.headers.keys().for_each(|name| dropped.warn(name, headers.key_at(name), findings));
        }
    }
}

fn of_limit(dropped: &Dropped<'_>, rule: &LimitRule, node: &Node, findings: &mut Findings) {
    for (part, node) in rule.key.iter().flatten().zip(node.items("key")) {
        if let KeyPart::Header(name) = part {
            dropped.warn(name.as_str(), node.at, findings);
        }
    }
    if let Some(PlanSource(KeyPart::Header(name))) = &rule.plan {
        dropped.warn(name.as_str(), node.value_at("plan"), findings);
    }
    if let Some(CostRule::Found(CostText::Header(name))) = &rule.cost {
        dropped.warn(name.as_str(), node.value_at("cost"), findings);
    }
    if let Some(text) = rule.cost.as_ref().and_then(CostRule::expression) {
        dropped.warn_of_expression(text.as_str(), node.value_at("cost"), findings);
    }
    if let Some(headers) = node.get("match").and_then(|matches| matches.get("headers")) {
        rule.matches.headers.keys().for_each(|name| dropped.warn(name, headers.key_at(name), findings));
    }
    let sections = [("match", &rule.matches.when), ("exempt", &rule.exempt.when), ("blocked", &rule.blocked.when)];
    for (section, when) in sections {
        if let (Some(when), Some(section)) = (when, node.get(section)) {
            dropped.warn_of_expression(when.as_str(), section.value_at("when"), findings);
        }
    }
}

/// The headers that the gateway drops.
struct Dropped<'a> {
    gateway: &'a GatewayRule,
}

impl Dropped<'_> {
    /// Warns about a header that the gateway drops.
    fn warn(&self, name: &str, at: Position, findings: &mut Findings) {
        if is_folded_by_servers(name) && self.gateway.underscore_headers != UnderscoreHeaders::Keep {
            let message = format!(
                "the gateway drops `{}`, like every header whose name has other characters than letters, digits and hyphens",
                shown(name)
            );
            findings.warning(at, message, "write the name with hyphens, or set `underscore_headers: keep`");
        } else if is_forwarding_header(name) && self.gateway.trusted_proxies.is_empty() {
            let message = format!("the gateway drops `{}` unless it comes from `trusted_proxies`", shown(name));
            findings.warning(
                at,
                message,
                "use `ip` for the client's address, and list your proxies in `trusted_proxies`",
            );
        }
    }

    fn warn_of_expression(&self, text: &str, at: Position, findings: &mut Findings) {
        headers_of(text).for_each(|name| self.warn(name, at, findings));
    }
}

/// Returns the names in `headers.NAME`, `headers["NAME"]` and `headers['NAME']`.
fn headers_of(expression: &str) -> impl Iterator<Item = &str> {
    expression.split("headers").skip(1).filter_map(|rest| {
        let rest = rest.trim_start();
        if let Some(field) = rest.strip_prefix('.') {
            let field = field.trim_start();
            let end = field.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
            return Some(&field[..end.unwrap_or(field.len())]);
        }
        let index = rest.strip_prefix('[')?.trim_start();
        let quote = index.chars().next().filter(|quote| matches!(quote, '"' | '\''))?;
        index[1..].split_once(quote).map(|(name, _)| name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expression_names_headers_in_three_ways() {
        let names = |text| headers_of(text).collect::<Vec<_>>();
        assert_eq!(
            names("request.headers['a_b'] == '1' && request.headers[ \"x-c\"] == request.headers.d_e + 'f'"),
            ["a_b", "x-c", "d_e"]
        );
        assert_eq!(names("'x' in request.headers || headers[request.path] == 'headers'"), [""; 0]);
    }
}
