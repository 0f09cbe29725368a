//! Metrics for Prometheus, in the OpenMetrics text format or the classic one.
//!
//! Nothing is counted here: each scrape reads the counters where they are. Labels are names from the rule file or fixed
//! words, never keys, so their number is bounded.

mod certificates;
mod format;
mod process;
mod store;
mod tables;

use std::collections::HashMap;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::registry::Registry;
use tollgate_config::internal::LimitRule;
use tollgate_http::TokenError;

pub(crate) use self::format::Format;
use crate::server_state::ServerState;
use tollgate_telemetry::decisions::{DecisionLabel, Fallback, FallbackSums, Sums, TokenSums};
use tollgate_telemetry::page::Page;
use tollgate_telemetry::traces;

/// The metrics of a server.
pub(crate) struct Metrics {
    pub(crate) server: ServerState,
}

impl Metrics {
    /// Returns a registry that collects these metrics.
    pub(crate) fn registry(self) -> Registry {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        registry
    }

    fn write(&self, page: &mut Page<'_>) -> fmt::Result {
        if let Some(gateway) = self.server.readiness.gateway() {
            gateway.write_metrics(page)?;
        }
        self.write_certificates(page)?;
        self.server.surfaces.write_metrics(page)?;
        self.write_decisions(page)?;
        self.server.decisions.unknown.write_metrics(page)?;
        self.write_fallbacks(page)?;
        self.write_tokens(page)?;
        self.write_expression_errors(page)?;
        self.server.reloads.write_metrics(page)?;
        self.write_build(page)?;
        self.server.learners.write_metrics(page)?;
        tables::write(&self.server.gate, page)?;
        store::write(&self.server.gate, page)?;
        traces::write_metrics(page)?;
        process::write(page)
    }

    /// Writes the version of the program, and the number of limits.
    fn write_build(&self, page: &mut Page<'_>) -> fmt::Result {
        let row = ([("version", env!("CARGO_PKG_VERSION"))], 1);
        page.gauges("tollgate_build_info", "Version of tollgate; always 1", std::iter::once(row))?;
        let limits = i64::try_from(self.server.gate.rules().names().count()).unwrap_or(i64::MAX);
        page.gauge("tollgate_limits", "Limits in force", limits)
    }

    /// Writes the certificates of the gateway and the decision service.
    fn write_certificates(&self, page: &mut Page<'_>) -> fmt::Result {
        let gateway = self.server.readiness.gateway();
        let mut listeners = gateway.map(|gateway| gateway.certificate_reloads()).unwrap_or_default();
        listeners.extend(self.server.surfaces.certificate_reloads());
        if listeners.is_empty() && self.server.readiness.gateway().is_none() {
            return Ok(());
        }
        certificates::write(&listeners, page)
    }

    /// Writes decisions by limit, with those of the gateway and the decision service added up.
    fn write_decisions(&self, page: &mut Page<'_>) -> fmt::Result {
        let mut limits = Sums::new();
        self.server.decisions.add_to(&mut limits);
        if let Some(gateway) = self.server.readiness.gateway() {
            gateway.add_decisions_to(&mut limits);
        }
        let (rules, in_force) = (self.server.gate.rules(), self.server.reloads.in_force());
        // Limits of envoyproxy/ratelimit's configuration have no rule of the file.
        let mut file_rules: HashMap<&str, Option<&LimitRule>> = rules.names().map(|name| (name, None)).collect();
        file_rules.extend(in_force.file.limits.iter().map(|limit| (limit.name.as_str(), Some(limit))));
        for name in file_rules.keys() {
            limits.entry((*name).into()).or_default();
        }
        let is_possible = &|name: &str, outcome: DecisionLabel| match file_rules.get(name) {
            Some(Some(limit)) => outcome.is_possible(limit, in_force.file.on_store_failure),
            Some(None) => matches!(outcome, DecisionLabel::Allowed | DecisionLabel::Denied),
            // A limit that was removed.
            None => false,
        };
        let rows = limits.iter().flat_map(|(name, outcomes)| {
            let named = DecisionLabel::ALL.into_iter().zip(outcomes);
            let some = named.filter(move |(outcome, count)| **count > 0 || is_possible(name, *outcome));
            some.map(move |(outcome, count)| ([("limit", &**name), ("outcome", outcome.as_str())], *count))
        });
        let help = "Decisions on requests and checks, by limit and outcome";
        page.counters("tollgate_decisions", help, rows)
    }

    /// Writes the decisions that `on_store_failure` made, for limits on Redis.
    fn write_fallbacks(&self, page: &mut Page<'_>) -> fmt::Result {
        if self.server.gate.redis().is_none() {
            return Ok(());
        }
        let mut limits = FallbackSums::new();
        self.server.decisions.add_fallbacks_to(&mut limits);
        if let Some(gateway) = self.server.readiness.gateway() {
            gateway.add_fallbacks_to(&mut limits);
        }
        let in_force = self.server.reloads.in_force();
        let rules: HashMap<&str, &LimitRule> =
            in_force.file.limits.iter().map(|limit| (limit.name.as_str(), limit)).collect();
        for name in rules.keys() {
            limits.entry((*name).into()).or_default();
        }
        let is_possible = &|name: &str, fallback: Fallback| {
            rules.get(name).is_some_and(|limit| fallback.is_possible(limit, in_force.file.on_store_failure))
        };
        let rows = limits.iter().flat_map(|(name, counts)| {
            let named = Fallback::ALL.into_iter().zip(counts);
            let some = named.filter(move |(fallback, count)| **count > 0 || is_possible(name, *fallback));
            some.map(move |(fallback, count)| {
                let (policy, outcome) = fallback.labels();
                ([("limit", &**name), ("policy", policy), ("outcome", outcome)], *count)
            })
        });
        let help = "Decisions made by on_store_failure because the store failed, by limit, policy and outcome";
        page.counters("tollgate_fallback_decisions", help, rows)
    }

    /// Writes the results of token checks, if rules read tokens.
    fn write_tokens(&self, page: &mut Page<'_>) -> fmt::Result {
        let mut tokens = TokenSums::default();
        self.server.decisions.add_tokens_to(&mut tokens);
        if let Some(gateway) = self.server.readiness.gateway() {
            gateway.add_tokens_to(&mut tokens);
        }
        if !self.server.gate.rules().read_tokens() && tokens.failures.iter().all(|count| *count == 0) {
            return Ok(());
        }
        let rows =
            TokenError::ALL.iter().zip(tokens.failures).map(|(error, count)| ([("reason", error.code())], count));
        page.counters(
            "tollgate_token_failures",
            "Requests without the valid token that a limit needs, by reason",
            rows,
        )?;
        page.counter("tollgate_token_verifications", "Token signatures verified", tokens.signatures)
    }

    /// Writes failed expressions. The rules count them, for the gateway and the decision service together.
    fn write_expression_errors(&self, page: &mut Page<'_>) -> fmt::Result {
        let rules = self.server.gate.rules();
        let rows = rules
            .expression_errors()
            .map(|(limit, field, count)| ([("limit", limit), ("field", field.as_str())], count));
        let help = "Expressions that failed and were decided against the client, by limit and field";
        page.counters("tollgate_expression_errors", help, rows)
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Collector for Metrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.write(&mut Page::new(encoder))
    }
}

/// Renders the metrics as text. Writing to a string does not fail.
pub(crate) fn text(registry: &Registry, format: Format) -> String {
    let mut text = String::new();
    _ = text::encode(&mut text, registry);
    match format {
        Format::OpenMetrics => text,
        Format::Classic => format::to_classic(&text),
    }
}
