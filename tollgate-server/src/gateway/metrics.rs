//! The gateway's metrics, summed over its workers.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use tollgate_net::tls::CertificateReloads;
use tollgate_rules::internal::Unreadable;
use tollgate_telemetry::decisions::{FallbackSums, Sums, TokenSums};
use tollgate_telemetry::page::Page;

use super::Gateway;
use super::listener::Port;
use super::tally::{self, BOUNDS_NANOS, CLASSES, RouteTotals, Tally};

impl Gateway {
    /// Writes all metrics of the gateway.
    pub(crate) fn write_metrics(&self, page: &mut Page<'_>) -> fmt::Result {
        self.write_connections(page)?;
        self.write_tls(page)?;
        self.write_routes(page)?;
        self.write_upstreams(page)
    }

    fn sum(&self, count: impl Fn(&Tally) -> u64) -> u64 {
        self.tallies.iter().map(|tally| count(tally)).sum()
    }

    fn sum_by_reason<const N: usize>(
        &self,
        counts: impl Fn(&Tally) -> [(&'static str, u64); N],
    ) -> impl Iterator<Item = (&'static str, u64)> {
        self.tallies.iter().map(|tally| counts(tally)).reduce(tally::sum).into_iter().flatten()
    }

    fn write_connections(&self, page: &mut Page<'_>) -> fmt::Result {
        let open: i64 = self.tallies.iter().map(|tally| tally.connections.load(Relaxed)).sum();
        page.gauge("tollgate_connections", "Open client connections", open)?;
        let accepted = self.sum(|tally| tally.accepted.value());
        page.counter("tollgate_connections_accepted", "Accepted client connections", accepted)?;
        let above_all = self.sum(|tally| tally.refused_connections.value());
        let above_address = self.sum(|tally| tally.refused_by_address.value());
        page.counters(
            "tollgate_connections_refused",
            "Client connections refused because of max_connections or max_connections_per_address",
            [("max_connections", above_all), ("max_connections_per_address", above_address)]
                .into_iter()
                .map(|(reason, count)| ([("reason", reason)], count)),
        )?;
        page.counters(
            "tollgate_connections_closed",
            "HTTP/2 connections closed with GOAWAY because of misuse by the client",
            self.sum_by_reason(|tally| tally.closed.values()).map(|(reason, count)| ([("reason", reason)], count)),
        )?;
        if let Some(tally) = self.tallies.first() {
            let help = "Upper bound of the bytes of bodies buffered because one side does not read them";
            page.gauge("tollgate_buffered_bytes", help, tally.buffer_budget.used())?;
            let help = "Bodies refused or cut off because max_buffered was reached";
            page.counter("tollgate_overloaded_bodies", help, tally.buffer_budget.refused())?;
        }
        let framing = self.sum_by_reason(|tally| tally.ambiguous.values());
        let reading = Unreadable::REASONS.iter().enumerate();
        let reading = reading.map(|(number, reason)| (*reason, self.sum(|tally| tally.unreadable(number))));
        page.counters(
            "tollgate_ambiguous_requests",
            "Requests refused because they have more than one interpretation",
            framing.chain(reading).map(|(reason, count)| ([("reason", reason)], count)),
        )?;
        let underscore = self.sum(|tally| tally.underscore_headers.value());
        let forwarding = self.sum(|tally| tally.forwarding_headers.value());
        page.counters(
            "tollgate_request_headers_dropped",
            "Request headers dropped because of a special character in their name, or because only trusted proxies may send them",
            [("underscore", underscore), ("forwarding", forwarding)]
                .into_iter()
                .map(|(reason, count)| ([("reason", reason)], count)),
        )?;
        let help = "Access log lines lost because they could not be written, or not fast enough";
        page.counter("tollgate_access_log_lost", help, self.lost.load(Relaxed))?;
        let abandoned = self.sum(|tally| tally.abandoned.load(Relaxed).into());
        let help = "Requests whose permit of an in_flight limit is held after their clients left";
        page.gauge("tollgate_abandoned_requests", help, i64::try_from(abandoned).unwrap_or(i64::MAX))?;
        let to_upstreams = i64::try_from(self.upstream_slots.used()).unwrap_or(i64::MAX);
        page.gauge("tollgate_upstream_connections", "Open connections to upstreams, idle ones included", to_upstreams)?;
        let queued = i64::from(self.queued.load(Relaxed));
        page.gauge("tollgate_queued_requests", "Requests waiting in the queue of a limit", queued)
    }

    fn write_tls(&self, page: &mut Page<'_>) -> fmt::Result {
        let failed = self.sum_by_reason(|tally| tally.failed_handshakes.values());
        page.counters(
            "tollgate_tls_handshakes_failed",
            "Failed TLS handshakes with clients",
            failed.map(|(reason, count)| ([("reason", reason)], count)),
        )
    }

    /// Returns the certificate reloads of each TLS listener, by its address.
    pub(crate) fn certificate_reloads(&self) -> Vec<(SocketAddr, Arc<CertificateReloads>)> {
        self.handles().iter().flat_map(|handles| &handles.ports).filter_map(Port::certificate_reloads).collect()
    }

    fn write_routes(&self, page: &mut Page<'_>) -> fmt::Result {
        let routes = self.routes();
        let each = || routes.iter().map(|totals| (totals, ("route", totals.name.as_str())));
        page.counters(
            "tollgate_requests",
            "Finished requests by status class; aborted ones had no response when their client left",
            each().flat_map(|(totals, route)| {
                CLASSES.iter().zip(totals.ended).map(move |(class, count)| ([route, ("status", *class)], count))
            }),
        )?;
        page.gauges(
            "tollgate_requests_in_flight",
            "Requests in flight",
            each().map(|(totals, route)| ([route], i64::try_from(totals.in_flight()).unwrap_or(i64::MAX))),
        )?;
        page.counters(
            "tollgate_upstream_failures",
            "Failed attempts at upstreams, by kind",
            each().flat_map(|(totals, route)| {
                totals.failures.into_iter().map(move |(kind, count)| ([route, ("kind", kind)], count))
            }),
        )?;
        let retries = each().map(|(totals, route)| ([route], totals.retries));
        page.counters("tollgate_retries", "Retries after a failed attempt at an upstream", retries)?;
        page.histograms(
            "tollgate_request_duration_seconds",
            "Time from the complete head of a request to the end of its response",
            each().map(|(totals, route)| ([route], seconds(totals.nanos), buckets(totals))),
        )
    }

    /// Returns the totals of every route name, although several routes may share one. Requests without a route come
    /// first.
    fn routes(&self) -> Vec<RouteTotals> {
        let site = self.site.load();
        let mut names = HashSet::new();
        let unrouted = RouteTotals::of(self.tallies.iter().map(|tally| tally.unrouted()));
        let routed = site.routes.iter().filter(|route| names.insert(&route.name));
        std::iter::once(unrouted).chain(routed.map(|route| RouteTotals::of(route.tallies()))).collect()
    }

    /// Adds the decisions of limits to `sums`.
    pub(crate) fn add_decisions_to(&self, sums: &mut Sums) {
        for tally in &self.tallies {
            tally.decisions().add_to(sums);
        }
    }

    /// Adds the decisions by `on_store_failure` to `sums`.
    pub(crate) fn add_fallbacks_to(&self, sums: &mut FallbackSums) {
        for tally in &self.tallies {
            tally.decisions().add_fallbacks_to(sums);
        }
    }

    /// Adds the results of token checks to `sums`.
    pub(crate) fn add_tokens_to(&self, sums: &mut TokenSums) {
        for tally in &self.tallies {
            tally.decisions().add_tokens_to(sums);
        }
    }

    /// Returns the upstreams by address, whether they are healthy, and the routes that use them.
    pub(crate) fn upstreams(&self) -> BTreeMap<String, (bool, BTreeSet<String>)> {
        let (site, now) = (self.site.load(), self.ticks.now());
        let mut upstreams = BTreeMap::new();
        for route in &site.routes {
            for upstream in route.upstreams() {
                let target = &upstream.target;
                let name = format!("{}:{}", target.address.host, target.address.port);
                let (healthy, routes) = upstreams.entry(name).or_insert_with(|| (true, BTreeSet::new()));
                // The same address with another certificate is another upstream. Both have to be healthy.
                *healthy &= upstream.is_healthy(now);
                routes.insert(route.name.clone());
            }
        }
        upstreams
    }

    fn write_upstreams(&self, page: &mut Page<'_>) -> fmt::Result {
        let (site, upstreams) = (self.site.load(), self.upstreams());
        let rows = upstreams.iter().map(|(name, (healthy, _))| ([("upstream", name.as_str())], i64::from(*healthy)));
        let help = "1 if an upstream is healthy: neither ejected nor failing its checks";
        page.gauges("tollgate_upstream_up", help, rows)?;
        let mut routes = BTreeMap::new();
        for route in site.routes.iter().filter(|route| route.targets().next().is_some()) {
            let healthy = i64::try_from(route.healthy_upstreams()).unwrap_or(i64::MAX);
            // Of routes with the same name, report the lowest number.
            routes.entry(&route.name).and_modify(|least: &mut i64| *least = healthy.min(*least)).or_insert(healthy);
        }
        let rows = routes.iter().map(|(name, healthy)| ([("route", name.as_str())], *healthy));
        let help = "Healthy upstreams of a route; after an ejection, once a request or check has succeeded";
        page.gauges("tollgate_route_upstreams_up", help, rows)
    }
}

fn buckets(totals: &RouteTotals) -> Vec<(f64, u64)> {
    let bounds = BOUNDS_NANOS.iter().map(|nanos| seconds(*nanos)).chain([f64::INFINITY]);
    bounds.zip(totals.durations).collect()
}

#[expect(clippy::cast_precision_loss, reason = "15 digits are enough for a sum of durations")]
fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}
