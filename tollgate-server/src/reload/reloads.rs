//! Metrics of reloads: how often rules changed, and whether the last attempt succeeded.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use tollgate::redis::Repairs;

use crate::metrics::Page;
use crate::seconds::unix_now;
use crate::service::xds::XdsStatus;

/// Counts reloads.
#[derive(Debug)]
pub(crate) struct Reloads {
    applied: AtomicU64,
    refused: AtomicU64,
    last_was_refused: AtomicBool,
    /// Seconds since the Unix epoch.
    last_at: AtomicI64,
    in_force_since: AtomicI64,
    /// Version and id of the published rules in force. `None` if the file's rules are in force.
    published: Mutex<Option<(u64, String)>>,
    /// Published rules that Redis lost: the times this node restored them, and the times newer rules replaced them.
    restored: AtomicU64,
    replaced: AtomicU64,
    pub(crate) xds: XdsStatus,
}

impl Reloads {
    /// Starts with the rules of the start in force.
    pub(crate) fn new() -> Self {
        let now = unix_now();
        Self {
            applied: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            last_was_refused: AtomicBool::new(false),
            last_at: AtomicI64::new(now),
            in_force_since: AtomicI64::new(now),
            published: Mutex::new(None),
            restored: AtomicU64::new(0),
            replaced: AtomicU64::new(0),
            xds: XdsStatus::default(),
        }
    }

    pub(super) fn record_applied(&self) {
        let now = unix_now();
        self.applied.fetch_add(1, Relaxed);
        self.last_was_refused.store(false, Relaxed);
        self.last_at.store(now, Relaxed);
        self.in_force_since.store(now, Relaxed);
    }

    pub(super) fn record_refused(&self) {
        self.refused.fetch_add(1, Relaxed);
        self.last_was_refused.store(true, Relaxed);
        self.last_at.store(unix_now(), Relaxed);
    }

    /// Records that earlier rules are in force again. Nothing was read, so the last result stays.
    pub(super) fn record_put_back(&self) {
        self.in_force_since.store(unix_now(), Relaxed);
    }

    /// Records that published rules are in force.
    pub(super) fn record_published(&self, version: u64, id: &str) {
        *self.published.lock().unwrap_or_else(PoisonError::into_inner) = Some((version, id.to_owned()));
    }

    /// Records that the rules of the file are in force.
    pub(super) fn record_file(&self) {
        *self.published.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(super) fn record_repairs(&self, repairs: &Repairs) {
        self.restored.fetch_add(repairs.restored, Relaxed);
        self.replaced.fetch_add(repairs.replaced, Relaxed);
    }

    fn write_published(&self, page: &mut Page<'_>) -> fmt::Result {
        let published = self.published.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (source, (version, id)) = match published {
            Some((version, id)) => ("published", (version.to_string(), id)),
            None => ("file", <(String, String)>::default()),
        };
        let row = ([("source", source), ("version", version.as_str()), ("id", id.as_str())], 1);
        let help = "Source of the rules in force, with version and id of published rules; equal ids mean equal rules";
        page.gauges("tollgate_rules_info", help, std::iter::once(row))?;
        let help = "Published rules that Redis lost and this node restored";
        page.counter("tollgate_published_rules_restored", help, self.restored.load(Relaxed))?;
        let help = "Published rules that Redis lost and that rules published later replaced on this node";
        page.counter("tollgate_published_rules_replaced", help, self.replaced.load(Relaxed))
    }

    pub(crate) fn write_metrics(&self, page: &mut Page<'_>) -> fmt::Result {
        let counts = [("applied", &self.applied), ("refused", &self.refused)];
        let counts = counts.into_iter().map(|(result, count)| ([("result", result)], count.load(Relaxed)));
        page.counters("tollgate_reloads", "Reloads of rules from the file or from Redis, by result", counts)?;
        let is_good = i64::from(!self.last_was_refused.load(Relaxed));
        let help = "1 if the last reload succeeded, 0 if it was refused and the previous rules stay in force";
        page.gauge("tollgate_last_reload_successful", help, is_good)?;
        let (last, since) = (self.last_at.load(Relaxed), self.in_force_since.load(Relaxed));
        page.gauge("tollgate_last_reload_timestamp_seconds", "Unix time of the last reload, successful or not", last)?;
        page.gauge(
            "tollgate_rules_in_force_timestamp_seconds",
            "Unix time at which the rules in force were applied",
            since,
        )?;
        self.write_published(page)?;
        self.xds.write_metrics(page)
    }
}
