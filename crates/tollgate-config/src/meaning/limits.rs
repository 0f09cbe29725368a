//! Checks of limits as a whole: unique names, reachable matches, and expressions.

use std::collections::BTreeMap;

use http::HeaderName;
use tollgate_rules::ExpressionField;
use tollgate_rules::internal::config::cel::{Expression, TextPosition};
use tollgate_rules::internal::config::header_pattern;

use super::{FirstPositions, keys, numbers, report, store};
use crate::forms::{CostText, Expression as Text};
use crate::node::Node;
use crate::problem::{Findings, Position, shown};
use crate::types::{CostRule, LimitRule, RuleFile};

pub(super) fn check(file: &RuleFile, root: &Node, findings: &mut Findings) {
    let has_jwt = root.mentions("jwt");
    let reading = file.path_reading();
    let mut names = FirstPositions::new();
    // After an error, this may be only its consequence.
    let has_others = file.service.envoy.is_some() || file.service.xds.is_some();
    if !findings.refused() && file.limits.is_empty() && !has_others {
        findings.warning(
            root.key_at("limits"),
            "there are no limits, so every request passes",
            "add a limit to `limits`",
        );
    }
    numbers::check_learning(file, root, findings);
    for (rule, node) in file.limits.iter().zip(root.items("limits")) {
        if findings.is_full() {
            return;
        }
        let name_at = node.value_at("name");
        if let Some(first) = names.duplicate_of(rule.name.as_str(), name_at) {
            let message = format!("duplicate limit name `{}`, first at {first}", shown(rule.name.as_str()));
            findings.error(name_at, message, "give each limit its own name");
        }
        store::check_choice(rule, file, (node, root), findings);
        numbers::check(rule, file, node, findings);
        keys::check(rule, node, has_jwt, reading, findings);
        matches(rule, node, findings);
        conditions(rule, node, has_jwt, findings);
    }
}

/// Reports conditions that no request meets, and duplicates.
fn matches(rule: &LimitRule, node: &Node, findings: &mut Findings) {
    let Some(node) = node.get("match") else { return };
    let matches = &rule.matches;
    let lists = [
        ("path", matches.path.iter().flat_map(|paths| paths.iter()).map(|path| path.as_str()).collect::<Vec<_>>()),
        ("methods", matches.methods.iter().flatten().map(|method| method.as_str()).collect()),
        ("hosts", matches.hosts.iter().flatten().map(|host| host.as_str()).collect()),
    ];
    for (key, values) in lists {
        let mut seen = FirstPositions::new();
        for (value, item) in values.into_iter().zip(node.items(key)) {
            if let Some(first) = seen.duplicate_of(value, item.at) {
                findings.warning(
                    item.at,
                    format!("duplicate `{}`, first at {first}", shown(value)),
                    "remove one of them",
                );
            }
        }
    }
    header_values(&matches.headers, node, findings);
}

/// Reports required values of headers that no request has, and duplicates.
pub(super) fn header_values(required: &BTreeMap<String, String>, node: &Node, findings: &mut Findings) {
    let Some(headers) = node.get("headers") else { return };
    let mut names = FirstPositions::new();
    for (name, value) in required {
        let at = headers.key_at(name);
        if let Some(first) = names.duplicate_of(name.to_ascii_lowercase(), at) {
            let message = format!("duplicate header `{}` (case is ignored), first at {first}", shown(name));
            findings.error(at, message, "remove one of them");
        }
        // `shape` reports invalid names.
        if let Ok(header) = HeaderName::from_bytes(name.as_bytes()) {
            report(header_pattern(&header, value).map(drop), headers.value_at(name), findings);
        }
    }
}

/// Reports expressions that do not compile, that have the same result for every request, or that fail for some.
fn conditions(rule: &LimitRule, node: &Node, has_jwt: bool, findings: &mut Findings) {
    let sections = [
        ("match", &rule.matches.when, ExpressionField::MatchWhen),
        ("exempt", &rule.exempt.when, ExpressionField::ExemptWhen),
        ("blocked", &rule.blocked.when, ExpressionField::BlockedWhen),
    ];
    for (section, when, field) in sections {
        let (Some(when), Some(node)) = (when, node.get(section).and_then(|section| section.get("when"))) else {
            continue;
        };
        match (section, when.as_str().trim()) {
            ("match", "false") => {
                findings.error(
                    node.at,
                    "no request reaches this limit, because `when` is never true",
                    "remove the limit",
                );
            }
            ("exempt", "true") => {
                findings.error(
                    node.at,
                    "no request reaches this limit, because every request is exempt",
                    "remove the limit",
                );
            }
            _ => expression(field, when, node, has_jwt, findings),
        }
    }
    let Some(node) = node.get("cost") else { return };
    match &rule.cost {
        Some(CostRule::Found(CostText::Expression(cost))) => {
            expression(ExpressionField::Cost, cost, node, has_jwt, findings);
        }
        Some(CostRule::Computed(cost)) => {
            let node = node.get("expression").unwrap_or(node);
            let compiled = compiled(ExpressionField::Cost, &cost.expression, node, has_jwt, findings);
            // `when_error` covers requests for which it fails.
            if let (Some(compiled), None) = (compiled, cost.when_error) {
                unguarded_reads(ExpressionField::Cost, &compiled, &cost.expression, node, findings);
            }
        }
        _ => {}
    }
}

fn expression(field: ExpressionField, text: &Text, node: &Node, has_jwt: bool, findings: &mut Findings) {
    if let Some(compiled) = compiled(field, text, node, has_jwt, findings) {
        unguarded_reads(field, &compiled, text, node, findings);
    }
}

/// Compiles an expression. Its patterns share a budget with others of the file.
fn compiled(
    field: ExpressionField,
    text: &Text,
    node: &Node,
    has_jwt: bool,
    findings: &mut Findings,
) -> Option<Expression> {
    let read = match field {
        ExpressionField::Cost => Expression::cost_within(text.as_str(), &mut findings.patterns),
        _ => Expression::condition_within(text.as_str(), &mut findings.patterns),
    };
    match read {
        Ok(compiled) => {
            if compiled.reads_token() && !has_jwt {
                keys::no_jwt(node.at, findings);
            }
            Some(compiled)
        }
        Err(error) => {
            findings.error(position_in(node, text, error.position()), error.problem(), error.fix());
            None
        }
    }
}

/// Returns the position of a part of an expression in the file.
fn position_in(node: &Node, text: &Text, part: Option<TextPosition>) -> Position {
    let offset = part.map_or(0, |part| {
        let lines = text.as_str().split_inclusive('\n').take(part.line - 1);
        lines.map(|line| line.chars().count()).sum::<usize>() + part.column - 1
    });
    node.letter_at(offset)
}

/// Warns about reads that fail for some requests, with a fix that changes nothing for all others.
fn unguarded_reads(field: ExpressionField, compiled: &Expression, source: &Text, node: &Node, findings: &mut Findings) {
    for read in compiled.unguarded_reads() {
        let (text, guard) = (shown(&read.text), shown(&read.guard));
        let effect = match field {
            ExpressionField::MatchWhen => "the limit then applies to it",
            ExpressionField::ExemptWhen => "it is then not exempt",
            ExpressionField::BlockedWhen => "it is then blocked",
            // The cost.
            _ => "it then takes the most that the cost can be",
        };
        let message = format!("`{text}` fails for a request without it, and {effect}");
        let fix = match field {
            ExpressionField::Cost => {
                format!("write `{guard} ? … : COST` with the cost of such a request, or set `when_error`")
            }
            ExpressionField::ExemptWhen => {
                format!("write `{guard} && …` to keep that, or `!({guard}) || …` to exempt such a request")
            }
            // What decides against the client if it fails.
            _ => format!(
                "write `!({guard}) || …` to keep that; with `{guard} && …` a client avoids the limit by leaving it out"
            ),
        };
        findings.warning(position_in(node, source, read.position), message, fix);
    }
}
