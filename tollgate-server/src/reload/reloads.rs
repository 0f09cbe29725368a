//! Metrics of reloads: how often rules changed, and whether the last attempt succeeded.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tollgate::redis::Repairs;
use tollgate_config::Parsed;
use tollgate_telemetry::page::Page;
use tollgate_telemetry::seconds::unix_now;

use super::api::{ChangeRefused, ChangeRequest, RuleChange, RulesChanged};
use super::versions::{EarlierRules, RulesInForce, RulesSource, Versions};
use crate::service::xds::XdsStatus;

/// The most changes by the admin API that wait.
const MAX_CHANGES: usize = 4;

/// The longest wait for a change by the admin API: several timeouts of Redis, and the time to compile 4 MiB of rules.
const CHANGE_DEADLINE: Duration = Duration::from_secs(30);

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
    versions: Versions,
    /// The rule file of this node, which published rules and those of the admin API replace in part.
    own_file: Mutex<Arc<Parsed>>,
    /// Changes by the admin API, for the task that replaces rules.
    changes: mpsc::Sender<RuleChange>,
    /// Requests to read the rule file again, for the same task.
    file_requests: mpsc::Sender<FileRequest>,
    /// The other ends, until the task has started.
    inbox: Mutex<Option<Inbox>>,
}

/// A request to read the rule file again. Its reply has the changes, or the problems.
pub(super) type FileRequest = oneshot::Sender<Result<String, String>>;

/// The requests to the task that replaces rules.
#[derive(Debug)]
pub(super) struct Inbox {
    pub(super) changes: mpsc::Receiver<RuleChange>,
    pub(super) file_requests: mpsc::Receiver<FileRequest>,
}

impl Reloads {
    /// Starts with the rules of the start in force.
    pub(crate) fn new(file: &Parsed, source: RulesSource) -> Self {
        let now = unix_now();
        let own = Arc::new(file.clone());
        let (changes, received) = mpsc::channel(MAX_CHANGES);
        let (file_requests, requested) = mpsc::channel(MAX_CHANGES);
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
            versions: Versions::new(RulesInForce::new(Arc::clone(&own), source, Vec::new())),
            own_file: Mutex::new(own),
            changes,
            file_requests,
            inbox: Mutex::new(Some(Inbox { changes: received, file_requests: requested })),
        }
    }

    /// Returns the rule file of this node, or its built-in rules.
    pub(crate) fn own_file(&self) -> Arc<Parsed> {
        Arc::clone(&self.own_file.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the rules that were in force before, the latest first.
    pub(crate) fn earlier(&self) -> Vec<Arc<EarlierRules>> {
        self.versions.earlier()
    }

    /// Replaces the rules in force, and waits until they are. The task of reloads does it, so that changes by the file,
    /// by Redis and by the API come one after another.
    pub(crate) async fn change(&self, request: ChangeRequest) -> Result<RulesChanged, ChangeRefused> {
        let (reply, replied) = oneshot::channel();
        let unavailable = |message: &str| ChangeRefused::Unavailable(message.to_owned());
        self.changes
            .try_send(RuleChange { request, reply })
            .map_err(|_| unavailable("other changes of rules are under way: try again later"))?;
        match timeout(CHANGE_DEADLINE, replied).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(unavailable("the server stops: try again after its restart")),
            Err(_) => Err(unavailable("the change is not confirmed yet: read /v1/rules to see whether it was made")),
        }
    }

    /// Reads the rule file again, and waits for the result: the changes, or the problems.
    pub(crate) async fn read_file(&self) -> Result<String, String> {
        let (reply, replied) = oneshot::channel();
        let sent = self.file_requests.try_send(reply);
        sent.map_err(|_| "other reloads are under way: try again later".to_owned())?;
        match timeout(CHANGE_DEADLINE, replied).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err("the server stops: try again after its restart".to_owned()),
            Err(_) => Err("the reload is not finished yet: its result will be in the log".to_owned()),
        }
    }

    /// Returns the requests to the task that replaces rules, once.
    pub(super) fn take_inbox(&self) -> Option<Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Records the rule file of this node.
    pub(super) fn record_own_file(&self, file: &Arc<Parsed>) {
        *self.own_file.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(file);
    }

    /// Returns the rules in force.
    pub(crate) fn in_force(&self) -> Arc<RulesInForce> {
        self.versions.in_force()
    }

    /// Returns the version of the rules in force: a hash of their text, which is the same on all nodes.
    pub(crate) fn version(&self) -> String {
        self.versions.in_force().version.clone()
    }

    /// Records the rules that are in force from now on.
    pub(super) fn record_in_force(&self, file: &Arc<Parsed>, source: RulesSource, changes: Vec<String>) {
        self.versions.add(RulesInForce::new(Arc::clone(file), source, changes));
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

    fn write_rules(&self, page: &mut Page<'_>) -> fmt::Result {
        let in_force = self.in_force();
        let published = self.published.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (publication, id) = published.map_or_else(Default::default, |(number, id)| (number.to_string(), id));
        let labels = [
            ("source", in_force.source.as_str()),
            ("version", in_force.version.as_str()),
            ("publication", publication.as_str()),
            ("id", id.as_str()),
        ];
        let help = "Source and version of the rules in force, with number and id of published rules; always 1";
        page.gauges("tollgate_rules_info", help, std::iter::once((labels, 1)))?;
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
        self.write_rules(page)?;
        self.xds.write_metrics(page)
    }
}
