//! Metrics for Prometheus, in the OpenMetrics text format.
//!
//! Nothing is counted here: each scrape reads the counters where they are. Labels are names from the rule file or fixed
//! words, never keys, so their number is bounded.

mod certificates;
mod page;
mod process;
mod store;

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::registry::Registry;
use tollgate::Gate;
use tollgate::http::TokenError;

pub(crate) use self::page::Page;
use crate::decisions::{DecisionLabel, Decisions, Sums, TokenSums};
use crate::learning::Learners;
use crate::readiness::Readiness;
use crate::reload::Reloads;
use crate::service::surfaces::Surfaces;

/// The media type of the format.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The sources of the metrics.
pub(crate) struct Metrics {
    pub(crate) gate: Gate,
    pub(crate) readiness: Arc<Readiness>,
    pub(crate) reloads: Arc<Reloads>,
    /// The limits that learn.
    pub(crate) learners: Arc<Learners>,
    /// Decisions of the decision service. The gateway has its own.
    pub(crate) decisions: Arc<Decisions>,
    /// Connections of the decision service and the admin listener.
    pub(crate) surfaces: Arc<Surfaces>,
}

impl Metrics {
    /// Returns a registry that collects these metrics.
    pub(crate) fn registry(self) -> Registry {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        registry
    }

    fn write(&self, page: &mut Page<'_>) -> fmt::Result {
        if let Some(gateway) = self.readiness.gateway() {
            gateway.write_metrics(page)?;
        }
        self.write_certificates(page)?;
        self.surfaces.write_metrics(page)?;
        self.write_decisions(page)?;
        self.write_tokens(page)?;
        self.write_expression_errors(page)?;
        self.reloads.write_metrics(page)?;
        self.learners.write_metrics(page)?;
        self.write_overflow(page)?;
        store::write(&self.gate, page)?;
        process::write(page)
    }

    /// Writes the certificates of the gateway and the decision service.
    fn write_certificates(&self, page: &mut Page<'_>) -> fmt::Result {
        let gateway = self.readiness.gateway();
        let mut listeners = gateway.map(|gateway| gateway.certificate_reloads()).unwrap_or_default();
        listeners.extend(self.surfaces.certificate_reloads());
        if listeners.is_empty() && self.readiness.gateway().is_none() {
            return Ok(());
        }
        certificates::write(&listeners, page)
    }

    /// Writes decisions by limit, with those of the gateway and the decision service added up.
    fn write_decisions(&self, page: &mut Page<'_>) -> fmt::Result {
        let mut limits = Sums::new();
        self.decisions.add_to(&mut limits);
        if let Some(gateway) = self.readiness.gateway() {
            gateway.add_decisions_to(&mut limits);
        }
        let rows = limits.iter().flat_map(|(name, outcomes)| {
            let named = DecisionLabel::ALL.iter().zip(outcomes);
            named.map(move |(outcome, count)| ([("limit", &**name), ("outcome", outcome.as_str())], *count))
        });
        let help = "Decisions on requests and checks, by limit and outcome";
        page.counters("tollgate_decisions", help, rows)
    }

    /// Writes the results of token checks, if rules read tokens.
    fn write_tokens(&self, page: &mut Page<'_>) -> fmt::Result {
        let mut tokens = TokenSums::default();
        self.decisions.add_tokens_to(&mut tokens);
        if let Some(gateway) = self.readiness.gateway() {
            gateway.add_tokens_to(&mut tokens);
        }
        if !self.gate.rules().read_tokens() && tokens.failures.iter().all(|count| *count == 0) {
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
        let rules = self.gate.rules();
        let rows = rules
            .expression_errors()
            .map(|(limit, field, count)| ([("limit", limit), ("field", field.as_str())], count));
        let help = "Expressions that failed and were decided against the client, by limit and field";
        page.counters("tollgate_expression_errors", help, rows)
    }

    /// Writes evictions and denials for lack of memory.
    fn write_overflow(&self, page: &mut Page<'_>) -> fmt::Result {
        let Some(limiter) = self.gate.memory() else { return Ok(()) };
        let overflows = || {
            let named = |limit: &tollgate::Limit| Some((limit.name().to_owned(), limiter.id(limit.name())?));
            let overflow = |(name, id)| (name, limiter.overflow(id));
            limiter.limits().iter().filter_map(named).map(overflow)
        };
        let rows = overflows().map(|(name, overflow)| ([("limit", name)], overflow.evicted));
        let help = "Keys evicted because max_memory is used up, by limit";
        page.counters("tollgate_evicted_keys", help, rows)?;
        let rows = overflows().map(|(name, overflow)| ([("limit", name)], overflow.denied));
        let help = "Requests denied because max_memory is used up and their key has no counter, by limit";
        page.counters("tollgate_overflow_denials", help, rows)
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
pub(crate) fn text(registry: &Registry) -> String {
    let mut text = String::new();
    _ = text::encode(&mut text, registry);
    text
}
