//! Reloads rules at run time: when the file is saved, on SIGHUP or `tollgate reload`, when rules are published on
//! Redis, when an xDS server sends limits, or when a client of the admin API replaces them.
//!
//! The newest of these wins. Rules with problems change nothing, and the problems are logged. Files are read on a
//! separate thread, so a slow disk delays no request.
//!
//! Listeners change too. The layout of the gateway needs a restart, and a warning says so.

pub(crate) mod api;
pub(crate) mod changes;
mod file_watcher;
pub(crate) mod reloads;
mod subscriptions;
pub(crate) mod versions;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tollgate::redis::{PublishError, PublishedRules, Repairs};
use tollgate_config::internal::SettingError;
use tollgate_config::{Parsed, Problems, RuleFile};
use tollgate_net::listening::ListenError;
use tollgate_rules::Gate;
use tollgate_telemetry::notice::{self, Level};

use self::api::{
    ChangeKind, ChangeRefused, ChangeRequest, CurrentRules, Reach, RuleChange, RulesChanged, parse, publishable,
};
use self::changes::{CliOverrides, StartupOnly, StoreChange, WrittenRules};
use self::file_watcher::FileWatcher;
pub(crate) use self::file_watcher::{FileSnapshot, Hangup};
use self::reloads::{FileRequest, Inbox, Reloads};
use self::subscriptions::{PublishedEvent, RuleUpdates, Xds};
use self::versions::RulesSource;
use crate::gateway::{Gateway, StartError};
use crate::learning::Learners;
use crate::listeners::{self, Listeners, Refusal};
use crate::service::throttle::Throttles;
use crate::service::xds::XdsUpdate;
use crate::{config, service_manager};

/// The time between two polls of the file. Some file systems do not report changes, and a folder that is replaced takes
/// its watch with it.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// The longest wait at exit for a thread that is still reading a file. It holds nothing that could be lost.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(500);

/// A file is read once it has not changed for this long, because saving takes several steps.
const QUIET_PERIOD: Duration = Duration::from_millis(100);

/// The most reads of a file that keeps changing. The last one is used, and the next poll reads it again.
const MAX_READS: usize = 20;

/// The state of the server after its start.
pub(crate) struct Started {
    pub(crate) gate: Gate,
    pub(crate) throttles: Arc<Throttles>,
    /// The rule file. `None` for the built-in rules.
    pub(crate) path: Option<PathBuf>,
    pub(crate) file: Parsed,
    /// What the file was made of. Taken before the server serves, so that every later change is noticed.
    pub(crate) loaded: FileSnapshot,
    pub(crate) hangup: Hangup,
    pub(crate) gateway: Option<Arc<Gateway>>,
    pub(crate) listeners: Arc<Listeners>,
    pub(crate) overrides: CliOverrides,
    pub(crate) reloads: Arc<Reloads>,
    pub(crate) learners: Arc<Learners>,
}

/// Applies new rules.
pub(crate) struct Reload {
    gate: Gate,
    throttles: Arc<Throttles>,
    path: Option<PathBuf>,
    /// The last valid file. Its store is in force.
    file: Parsed,
    /// Its compiled rules, so that returning to them needs no disk.
    compiled: tollgate_rules::RuleSet,
    /// The rules in force, for log lines: the file's, published ones, or those of the admin API.
    rules: WrittenRules,
    /// Whether `rules` are not the file's.
    are_published: bool,
    /// The rules in force in place of the file's with their positions, to add the limits of the xDS server.
    published_rules: Option<Parsed>,
    /// The version of the publication or withdrawal that was handled last, or 0 without any. A newer one may have been
    /// received already.
    publication: u64,
    /// The id of the publication that was applied last.
    published_id: Option<String>,
    gateway: Option<Arc<Gateway>>,
    listeners: Arc<Listeners>,
    overrides: CliOverrides,
    /// Settings that the server was started with. Changes to them need a restart.
    startup_only: StartupOnly,
    reloads: Arc<Reloads>,
    learners: Arc<Learners>,
    /// The file when it was last read, valid or not.
    last_read: FileSnapshot,
    /// The files that the file needed when it was refused, such as certificates. It is read again when one changes.
    refused_for: Option<FileSnapshot>,
    watcher: FileWatcher,
    hangup: Hangup,
    published: RuleUpdates,
    xds: Xds,
    inbox: Inbox,
}

/// The running reload task.
pub(crate) struct ReloadTask {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl ReloadTask {
    /// Ends it. A thread that still waits for a disk is abandoned.
    pub(crate) async fn end(self) {
        drop(self.stop);
        _ = timeout(SHUTDOWN_TIMEOUT, self.thread).await;
    }
}

enum Cause {
    /// The file may have changed.
    FileTouched,
    /// SIGHUP was received.
    Hangup,
    /// A client of the control socket asks to read the file.
    Requested(FileRequest),
    Published(PublishedRules),
    /// Redis had lost published rules.
    Repaired(Repairs),
    /// The xDS server has sent limits.
    Xds(XdsUpdate),
    /// A limit that learns has another number.
    Learned,
    /// A client of the admin API replaces the rules.
    Api(RuleChange),
}

/// The source of new rules. Logs and counts the result.
struct Origin {
    name: String,
    reloads: Arc<Reloads>,
}

impl Reload {
    pub(crate) fn new(started: Started) -> Self {
        let Started { gate, throttles, path, file, loaded, hangup, gateway, listeners, overrides, reloads, learners } =
            started;
        let watcher = path.as_deref().map_or_else(FileWatcher::idle, FileWatcher::new);
        let published = RuleUpdates::subscribe(&file);
        // Only the first task gets the requests, and there is one.
        let inbox = reloads
            .take_inbox()
            .unwrap_or_else(|| Inbox { changes: mpsc::channel(1).1, file_requests: mpsc::channel(1).1 });
        let (rules, compiled, are_published) = (WrittenRules::of(&file), gate.rules(), false);
        let startup_only = StartupOnly::of(&file);
        let mut reload = Self {
            gate,
            throttles,
            path,
            file,
            compiled,
            are_published,
            published_rules: None,
            publication: 0,
            published_id: None,
            gateway,
            listeners,
            startup_only,
            rules,
            overrides,
            reloads,
            learners,
            last_read: loaded,
            refused_for: None,
            watcher,
            hangup,
            published,
            xds: Xds::default(),
            inbox,
        };
        reload.follow_xds(None);
        reload
    }

    pub(crate) fn spawn(self) -> ReloadTask {
        let (stop, stopped) = oneshot::channel();
        let runtime = Handle::current();
        let thread = tokio::task::spawn_blocking(move || {
            runtime.block_on(async {
                tokio::select! {
                    // Polled first, so that nothing starts after the end.
                    biased;
                    _ = stopped => {}
                    () = self.run() => {}
                }
            });
        });
        ReloadTask { stop, thread }
    }

    async fn run(mut self) {
        // Finds changes that were saved between the start and the first watch.
        let mut cause = Cause::FileTouched;
        let learners = Arc::clone(&self.learners);
        loop {
            match cause {
                Cause::FileTouched => self.check_file().await,
                Cause::Hangup => self.hang_up().await,
                Cause::Requested(reply) => {
                    // A client that has left needs no reply.
                    _ = reply.send(self.reread_file().await);
                }
                // The admin API of this node has published and applied these.
                Cause::Published(PublishedRules { id, .. }) if self.published_id.as_deref() == Some(&*id) => {}
                Cause::Published(PublishedRules { version, id, rules: Some(rules), .. }) => {
                    // It is logged.
                    _ = self.apply_published(version, &id, &rules);
                }
                Cause::Published(PublishedRules { version, .. }) => self.withdraw_published(version).await,
                Cause::Repaired(repairs) => self.report_repairs(&repairs),
                Cause::Xds(update) => self.apply_xds(update),
                Cause::Learned => self.apply_learned(),
                Cause::Api(change) => self.apply_api(change).await,
            }
            if let Some(path) = &self.path {
                let mut others = config::watched_paths(&self.file);
                others.extend(self.refused_for.iter().flat_map(FileSnapshot::paths));
                self.watcher.follow(path, &others);
            }
            cause = tokio::select! {
                () = self.watcher.touched() => Cause::FileTouched,
                () = sleep(POLL_INTERVAL) => Cause::FileTouched,
                () = self.hangup.received() => Cause::Hangup,
                event = self.published.next() => match event {
                    PublishedEvent::Published(rule_set) => Cause::Published(rule_set),
                    PublishedEvent::Repaired(repairs) => Cause::Repaired(repairs),
                },
                update = self.xds.next() => Cause::Xds(update),
                () = learners.changed() => Cause::Learned,
                Some(change) = self.inbox.changes.recv() => Cause::Api(change),
                Some(reply) = self.inbox.file_requests.recv() => Cause::Requested(reply),
            };
        }
    }

    fn origin(&self, name: String) -> Origin {
        Origin { name, reloads: Arc::clone(&self.reloads) }
    }

    /// Applies the file if it has changed.
    async fn check_file(&mut self) {
        let Some(path) = self.path.clone() else { return };
        // Rules that were published in the meantime are newer.
        let may_be_accepted = !self.are_published && self.refused_for.as_ref().is_some_and(FileSnapshot::has_changed);
        if may_be_accepted || self.snapshot(&path) != self.last_read {
            let snapshot = self.stable_snapshot(&path).await;
            if may_be_accepted || snapshot != self.last_read {
                // The result is logged.
                _ = self.apply_file(&path, snapshot).await;
            }
        }
    }

    /// Returns to this node's own rules, and reads the file again if there is one.
    async fn hang_up(&mut self) {
        match (self.path.is_some(), self.are_published) {
            // The result is logged.
            (true, _) => _ = self.reread_file().await,
            (false, true) => self.put_back_own("SIGHUP received"),
            (false, false) => notice::log(
                "SIGHUP received, and nothing changes: the built-in rules are in force, and there is no rule file to \
                 read; use --config FILE for one",
            ),
        }
    }

    /// Applies the file whether it has changed or not: published rules may have replaced it. Returns the changes, or
    /// the problems.
    async fn reread_file(&mut self) -> Result<String, String> {
        let Some(path) = self.path.clone() else {
            return Err("the server has no rule file: start it with `tollgate serve --config FILE`".to_owned());
        };
        service_manager::notify_reloading();
        let snapshot = self.stable_snapshot(&path).await;
        let result = self.apply_file(&path, snapshot).await;
        service_manager::notify_ready();
        result
    }

    /// Returns the name of this node's own rules.
    fn own_name(&self) -> String {
        self.path
            .as_ref()
            .map_or_else(|| "the built-in rules".to_owned(), |path| format!("the rules of {}", path.display()))
    }

    fn snapshot(&self, path: &Path) -> FileSnapshot {
        FileSnapshot::read(path, config::named_files(&self.file))
    }

    /// Reads the file until it stays the same for a moment. Half a file can be a valid one, with fewer limits.
    async fn stable_snapshot(&self, path: &Path) -> FileSnapshot {
        let mut snapshot = self.snapshot(path);
        for _ in 0..MAX_READS {
            sleep(QUIET_PERIOD).await;
            let before = std::mem::replace(&mut snapshot, self.snapshot(path));
            if before == snapshot {
                break;
            }
        }
        snapshot
    }

    /// Applies a version of the file. Returns the changes, or the problems.
    async fn apply_file(&mut self, path: &Path, snapshot: FileSnapshot) -> Result<String, String> {
        let origin = self.origin(path.display().to_string());
        let mut required = None;
        let result = match snapshot.text() {
            // An accidentally emptied file must not allow everything.
            Ok(text) if text.trim_ascii().is_empty() => {
                Err(origin.rejected_because("it is empty: write `limits: []` to allow everything"))
            }
            Ok(text) => {
                // Before they are used, so that every later change is noticed.
                required = Some(FileSnapshot::of_files(config::required_files(path, text)));
                match config::understand(path, text).and_then(|file| self.with_xds(file)) {
                    Ok(file) => self.apply(self.with_store_override(file), &origin).await,
                    Err(problems) => Err(origin.rejected(&problems)),
                }
            }
            Err(problem) => Err(origin.rejected_because(&format!("{problem}: check the path and its permissions"))),
        };
        self.refused_for = required.filter(|_| result.is_err());
        self.last_read = match &result {
            // Not the files that are there now: one that was added since is not loaded yet.
            Ok(_) => snapshot.with_loaded(config::loaded_files(&self.file)),
            Err(_) => snapshot,
        };
        result
    }

    async fn apply(&mut self, file: Parsed, origin: &Origin) -> Result<String, String> {
        let (file, learned) = self.learners.attach(file);
        let rules = match config::compile(&file, self.gateway.as_ref().and_then(|gateway| gateway.listen())) {
            Ok(rules) => rules,
            Err(problems) => return Err(origin.rejected(&problems)),
        };
        let change = StoreChange::between(&self.file, &file);
        if self.gateway.is_none() && !listeners::wants_service(&file, &self.overrides) {
            return Err(origin.rejected_because("it configures nothing to serve: add a listener, such as `service: { http: 127.0.0.1:8090 }`, `grpc` or `resp`"));
        }
        let listeners = match self.listeners.prepare(&file).await {
            Ok(listeners) => listeners,
            Err(Refusal::Listen(problem)) => return Err(origin.cannot_listen(&problem)),
            Err(problem) => return Err(origin.rejected_because(&problem.to_string())),
        };
        let next = match &self.gateway {
            Some(_) if file.gateway.is_none() => {
                return Err(
                    origin.rejected_because("it has no gateway, and one is running: restart the server to remove it")
                );
            }
            Some(gateway) => match gateway.prepare(&file).await {
                Ok(next) => Some((gateway, next)),
                Err(StartError::Refused(problems)) => return Err(origin.rejected(&problems)),
                Err(StartError::Listen(problem)) => return Err(origin.cannot_listen(&problem)),
                Err(problem) => return Err(origin.rejected_because(&problem.to_string())),
            },
            None => None,
        };
        let changed = match &change {
            StoreChange::None => self.gate.replace(rules).map_err(|error| error.to_string()),
            _ => self.open_store(&file).await,
        };
        if let Err(problem) = changed {
            return Err(origin.rejected_because(&problem));
        }
        self.learners.commit(learned);
        if let Some((gateway, next)) = next {
            gateway.change(next);
        }
        self.listeners.change(listeners).await;
        notice::log_problems(file.warnings());
        let rules = WrittenRules::of(&file);
        let mut changes = changes::between(&self.rules, &rules);
        changes.extend(changes::of_domains(self.file.envoy_rules(), file.envoy_rules()));
        let message = origin.applied(&changes);
        let own = Arc::new(file.clone());
        self.reloads.record_own_file(&own);
        self.reloads.record_in_force(&own, RulesSource::File, changes);
        change.log();
        if change != StoreChange::None {
            notice::warn_if_store_unavailable(&self.gate);
        }
        self.startup_only.warn_of_changes(&StartupOnly::of(&self.file), &StartupOnly::of(&file));
        if self.file.store != file.store {
            self.published = RuleUpdates::subscribe(&file);
        }
        self.reloads.record_file();
        (self.rules, self.are_published, self.compiled) = (rules, false, self.gate.rules());
        self.published_rules = None;
        let before = std::mem::replace(&mut self.file, file);
        self.follow_xds(before.service.xds.as_ref());
        Ok(message)
    }

    /// Changes to the store of another file.
    async fn open_store(&self, file: &Parsed) -> Result<(), String> {
        let other = tollgate_config::open_gate(file).await.map_err(|error| error.to_string())?;
        let before = self.gate.redis();
        self.gate.adopt(&other);
        self.throttles.follow_store();
        if let Some(before) = before {
            // Other nodes cannot use its leases until they are returned.
            tokio::spawn(async move { before.leave().await });
        }
        Ok(())
    }

    /// Applies published rules in place of the file's.
    fn apply_published(&mut self, version: u64, id: &str, rules: &[u8]) -> Result<(), ChangeRefused> {
        let name = format!("published version {version}");
        let origin = self.origin(name.clone());
        (self.publication, self.published_id) = (version, Some(id.to_owned()));
        let file = RuleFile::parse(&name, rules).map_err(|problems| origin.rejected_change(problems))?;
        if let Some(problems) = api::problems_on_node(&file, &self.file) {
            return Err(origin.rejected_change(problems));
        }
        let file = match file.gateway.is_some() {
            true => file.in_folder(self.file.folder()),
            false => file.in_folder(self.file.folder()).with_gateway_of(&self.file),
        };
        self.apply_override(file.with_domains_of(&self.file), &origin, RulesSource::Published)?;
        self.reloads.record_published(version, id);
        Ok(())
    }

    /// Applies rules in place of the file's. The store and the listeners stay this node's own, and so do
    /// `trusted_proxies` and `forwarding_header` if these rules have no gateway.
    fn apply_override(&mut self, file: Parsed, origin: &Origin, source: RulesSource) -> Result<(), ChangeRefused> {
        let (file, learned) = self.learners.attach(file);
        let rules = file.compile().map_err(|problems| origin.rejected_change(problems))?;
        if let Err(error) = self.gate.replace(rules) {
            origin.rejected_because(&error.to_string());
            let limit = error.limit().map_or_else(String::new, |limit| format!("limit `{limit}`: "));
            let problem = SettingError::new(format!("{limit}{}", error.problem()), error.fix()).of(error.field());
            return Err(ChangeRefused::Invalid(file.problems([problem])));
        }
        self.learners.commit(learned);
        self.published_rules = Some(file.clone());
        let rules = WrittenRules::published(&file, &self.file);
        let changes = changes::between(&self.rules, &rules);
        origin.applied(&changes);
        self.reloads.record_in_force(&Arc::new(file), source, changes);
        (self.rules, self.are_published) = (rules, true);
        Ok(())
    }

    fn report_repairs(&self, repairs: &Repairs) {
        self.reloads.record_repairs(repairs);
        if let Some(repair) = &repairs.latest {
            notice::warn(repair);
        }
    }

    /// Returns to the file's rules, unless they are already in force.
    async fn withdraw_published(&mut self, version: u64) {
        self.publication = version;
        if !self.are_published {
            return;
        }
        // It is logged.
        _ = self.reread_file().await;
        let withdraws = format!("version {version} withdraws the published rules");
        if !self.are_published {
            return notice::log(format_args!("{withdraws}; {} are back", self.own_name()));
        }
        // A withdrawal is received once, and the file may stay invalid, so the last valid rules are used.
        self.put_back_own(&withdraws);
    }

    /// Puts the last valid rules of this node in force again, for a reason.
    fn put_back_own(&mut self, reason: &str) {
        match self.gate.replace(self.compiled.clone()) {
            Ok(()) => {
                let rules = WrittenRules::of(&self.file);
                let changes = changes::between(&self.rules, &rules);
                let own = self.own_name();
                let which = if self.path.is_some() { own.replacen("the", "the last valid", 1) } else { own };
                let message = format!("{reason}; {which} are back: {}", changes::in_one_line(&changes));
                Level::Info.log(message, &[("changes", changes.as_slice().into())]);
                self.reloads.record_put_back();
                let source = if self.path.is_some() { RulesSource::File } else { RulesSource::BuiltIn };
                self.reloads.record_in_force(&Arc::new(self.file.clone()), source, changes);
                self.reloads.record_file();
                (self.rules, self.are_published) = (rules, false);
                self.published_rules = None;
                // The numbers of limits that learn may have moved since these rules were compiled.
                if self.learners.are_any() {
                    self.apply_learned();
                }
            }
            Err(error) => notice::error(format_args!("{reason}, but the present rules stay in force: {error}")),
        }
    }

    /// Applies the numbers that limits have learned to the rules in force.
    fn apply_learned(&mut self) {
        let in_force = self.published_rules.as_ref().unwrap_or(&self.file).clone();
        let (in_force, learned) = self.learners.attach(in_force);
        let replaced = in_force.compile().map(|rules| self.gate.replace(rules).map_err(|error| error.to_string()));
        let problem = match replaced {
            Ok(Ok(())) => {
                self.learners.commit(learned);
                match &mut self.published_rules {
                    Some(published) => *published = in_force,
                    None => (self.file, self.compiled) = (in_force, self.gate.rules()),
                }
                return;
            }
            Ok(Err(error)) => error,
            Err(problems) => problems.to_string(),
        };
        notice::warn(format_args!("learned numbers are not in force yet, because the rules do not compile: {problem}"));
    }

    /// Returns the file with the store of the command line, if there is one.
    fn with_store_override(&self, file: Parsed) -> Parsed {
        match &self.overrides.store {
            // It was valid when the server started.
            Some(store) => file.clone().with_store(store).unwrap_or(file),
            None => file,
        }
    }
}

impl Reload {
    /// Replaces the rules for the admin API.
    async fn apply_api(&mut self, RuleChange { request, reply }: RuleChange) {
        // The client has left before anything was done.
        if reply.is_closed() {
            return;
        }
        let result = self.change_rules(&request).await;
        if let Ok(RulesChanged { version, changes, .. }) = &result {
            let action = match request.kind {
                ChangeKind::Replace => "replace_rules",
                ChangeKind::RollBack => "roll_back_rules",
            };
            let fields = [
                ("from", request.expected.as_str().into()),
                ("to", version.as_str().into()),
                ("changes", changes.as_slice().into()),
            ];
            notice::audit(action, &request.caller, &fields);
        }
        // The client may have left meanwhile.
        _ = reply.send(result);
    }

    async fn change_rules(&mut self, request: &ChangeRequest) -> Result<RulesChanged, ChangeRefused> {
        let version = self.reloads.version();
        if request.expected != version {
            return Err(ChangeRefused::Conflict { version });
        }
        let in_force = self.reloads.in_force();
        let current = CurrentRules { own: &self.file, in_force: &in_force.file };
        let file = parse(&request.text, current, request.kind).map_err(ChangeRefused::Invalid)?;
        file.compile().map_err(ChangeRefused::Invalid)?;
        let Some(rule_sets) = self.published.rule_sets() else {
            let origin = self.origin("the rule set of the admin API".to_owned());
            self.apply_override(file, &origin, RulesSource::Api)?;
            self.reloads.record_file();
            return Ok(self.changed(Reach::ThisNode));
        };
        let unavailable = |problem: String| ChangeRefused::Unavailable(problem);
        let text = publishable(&request.text).map_err(ChangeRefused::Invalid)?;
        // The rules in force are those of this publication, so a later one is a conflict even if it was received already.
        rule_sets.publish(text.as_bytes(), Some(self.publication)).await.map_err(|error| match error {
            PublishError::Conflict { .. } => ChangeRefused::PublishedElsewhere,
            error => unavailable(error.to_string()),
        })?;
        // Another node may have published since. Its rules are the ones in force then.
        let newest = rule_sets.newest().await.map_err(|error| unavailable(error.to_string()))?;
        if let Some(published) = newest
            && let Some(rules) = &published.rules
        {
            self.apply_published(published.version, &published.id, rules)?;
        }
        Ok(self.changed(Reach::AllNodes))
    }

    fn changed(&self, reach: Reach) -> RulesChanged {
        let in_force = self.reloads.in_force();
        RulesChanged { version: in_force.version.clone(), changes: in_force.changes.clone(), reach }
    }
}

impl Origin {
    /// Logs the changes, and returns them.
    fn applied(&self, changes: &[String]) -> String {
        self.reloads.record_applied();
        let message = format!("{} is in force: {}", self.name, changes::in_one_line(changes));
        Level::Info.log(&message, &[("rules", self.name.as_str().into()), ("changes", changes.into())]);
        message
    }

    /// Logs the problems, and returns them.
    fn rejected(&self, problems: &Problems) -> String {
        self.reloads.record_refused();
        let message = format!("{} is rejected, and the previous rules stay in force:", self.name);
        Level::Error.log(&message, &[("rules", self.name.as_str().into())]);
        notice::log_problems(problems);
        format!("{message}\n{problems}")
    }

    /// Logs the rejection, and returns it for the admin API.
    fn rejected_change(&self, problems: Problems) -> ChangeRefused {
        self.rejected(&problems);
        ChangeRefused::Invalid(problems)
    }

    /// There is no automatic retry: the address could become free at a moment when nobody expects a change.
    fn cannot_listen(&self, problem: &ListenError) -> String {
        let fix = problem.fix();
        let meanwhile = "all listeners stay unchanged";
        // Saving the file without a change does nothing (see `FileSnapshot`), but changing it helps: the address is in
        // the file, because the address of a flag has been bound since the start.
        self.rejected_because(&format!("{problem}; {meanwhile}: {fix}, and send SIGHUP or change the file"))
    }

    /// Logs the problem, and returns it.
    fn rejected_because(&self, problem: &str) -> String {
        self.reloads.record_refused();
        let message = format!("{} is rejected, and the previous rules stay in force: {problem}", self.name);
        Level::Error.log(&message, &[("rules", self.name.as_str().into())]);
        message
    }
}
