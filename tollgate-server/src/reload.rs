//! Reloads rules at run time: when the file is saved, on SIGHUP, when rules are published on Redis, or when an xDS
//! server sends limits.
//!
//! The newest of these wins. Rules with problems change nothing, and the problems are logged. Files are read on a
//! separate thread, so a slow disk delays no request.
//!
//! Listeners change too. The layout of the gateway needs a restart, and a warning says so.

mod changes;
mod file_snapshot;
mod file_watcher;
mod hangup;
mod published;
mod reloads;
mod startup_only;
mod store_change;
mod xds;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tollgate::Gate;
use tollgate::redis::{PublishedRules, Repairs};
use tollgate::rules::file::{Parsed, Problems, RuleFile};

use self::file_snapshot::FileSnapshot;
use self::file_watcher::FileWatcher;
pub(crate) use self::hangup::Hangup;
use self::published::{PublishedEvent, RuleUpdates};
pub(crate) use self::reloads::Reloads;
pub(crate) use self::startup_only::CliOverrides;
use self::startup_only::StartupOnly;
use self::store_change::StoreChange;
use self::xds::Xds;
use crate::gateway::{Gateway, StartError};
use crate::learning::Learners;
use crate::listeners::{self, Listeners, Refusal};
use crate::listening::ListenError;
use crate::service::throttle::Throttles;
use crate::service::xds::XdsUpdate;
use crate::{config, notice};

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
    pub(crate) path: PathBuf,
    pub(crate) file: Parsed,
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
    path: PathBuf,
    /// The last valid file. Its store is in force.
    file: Parsed,
    /// Its compiled rules, so that returning to them needs no disk.
    compiled: tollgate::rules::RuleSet,
    /// The rules in force: the file's or published ones.
    rules: RuleFile,
    /// Whether `rules` are published ones.
    are_published: bool,
    /// The published rules in force with their positions, to add the limits of the xDS server.
    published_rules: Option<Parsed>,
    gateway: Option<Arc<Gateway>>,
    listeners: Arc<Listeners>,
    overrides: CliOverrides,
    /// Settings that the server was started with. Changes to them need a restart.
    startup_only: StartupOnly,
    reloads: Arc<Reloads>,
    learners: Arc<Learners>,
    /// The file when it was last read, valid or not.
    last_read: FileSnapshot,
    watcher: FileWatcher,
    hangup: Hangup,
    published: RuleUpdates,
    xds: Xds,
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
    Published(PublishedRules),
    /// Redis had lost published rules.
    Repaired(Repairs),
    /// The xDS server has sent limits.
    Xds(XdsUpdate),
    /// A limit that learns has another number.
    Learned,
}

/// The source of new rules. Logs and counts the result.
struct Origin {
    name: String,
    reloads: Arc<Reloads>,
}

impl Reload {
    pub(crate) fn new(started: Started) -> Self {
        let Started { gate, throttles, path, file, hangup, gateway, listeners, overrides, reloads, learners } = started;
        let (watcher, published) = (FileWatcher::new(&path), RuleUpdates::subscribe(&file));
        let last_read = FileSnapshot::of_loaded(&file);
        let (rules, compiled, are_published) = ((*file).clone(), gate.rules(), false);
        let mut reload = Self {
            gate,
            throttles,
            path,
            file,
            compiled,
            are_published,
            published_rules: None,
            gateway,
            listeners,
            startup_only: StartupOnly::of(&rules),
            rules,
            overrides,
            reloads,
            learners,
            last_read,
            watcher,
            hangup,
            published,
            xds: Xds::default(),
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
                Cause::Hangup => self.reread_file().await,
                Cause::Published(PublishedRules { version, id, rules: Some(rules), .. }) => {
                    self.apply_published(version, &id, &rules);
                }
                Cause::Published(PublishedRules { version, .. }) => self.withdraw_published(version).await,
                Cause::Repaired(repairs) => self.report_repairs(&repairs),
                Cause::Xds(update) => self.apply_xds(update),
                Cause::Learned => self.apply_learned(),
            }
            self.watcher.follow(&self.path, &config::watched_paths(&self.file));
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
            };
        }
    }

    fn origin(&self, name: String) -> Origin {
        Origin { name, reloads: Arc::clone(&self.reloads) }
    }

    /// Applies the file if it has changed.
    async fn check_file(&mut self) {
        if self.snapshot() != self.last_read {
            let snapshot = self.stable_snapshot().await;
            if snapshot != self.last_read {
                self.apply_file(snapshot).await;
            }
        }
    }

    /// Applies the file whether it has changed or not: published rules may have replaced it.
    async fn reread_file(&mut self) {
        let snapshot = self.stable_snapshot().await;
        self.apply_file(snapshot).await;
    }

    fn snapshot(&self) -> FileSnapshot {
        FileSnapshot::read(&self.path, config::named_files(&self.file))
    }

    /// Reads the file until it stays the same for a moment. Half a file can be a valid one, with fewer limits.
    async fn stable_snapshot(&self) -> FileSnapshot {
        let mut snapshot = self.snapshot();
        for _ in 0..MAX_READS {
            sleep(QUIET_PERIOD).await;
            let before = std::mem::replace(&mut snapshot, self.snapshot());
            if before == snapshot {
                break;
            }
        }
        snapshot
    }

    async fn apply_file(&mut self, snapshot: FileSnapshot) {
        let origin = self.origin(self.path.display().to_string());
        match snapshot.text() {
            // An accidentally emptied file must not allow everything.
            Ok(text) if text.trim_ascii().is_empty() => {
                origin.rejected_because("it is empty: write `limits: []` to allow everything");
            }
            Ok(text) => match config::understand(&self.path, text).and_then(|file| self.with_xds(file)) {
                Ok(file) => self.apply(self.with_store_override(file), &origin).await,
                Err(problems) => origin.rejected(&problems),
            },
            Err(problem) => origin.rejected_because(&format!("{problem}: check the path and its permissions")),
        }
        self.last_read = snapshot.with_named(config::named_files(&self.file));
    }

    async fn apply(&mut self, file: Parsed, origin: &Origin) {
        let (file, learned) = self.learners.attach(file);
        let rules = match config::compile(&file, self.gateway.as_ref().and_then(|gateway| gateway.listen())) {
            Ok(rules) => rules,
            Err(problems) => return origin.rejected(&problems),
        };
        let change = StoreChange::between(&self.file, &file);
        if self.gateway.is_none() && !listeners::wants_service(&file, &self.overrides) {
            return origin.rejected_because("it configures nothing to serve: add a listener, such as `service: { http: 127.0.0.1:8090 }`, `grpc` or `resp`");
        }
        let listeners = match self.listeners.prepare(&file).await {
            Ok(listeners) => listeners,
            Err(Refusal::Listen(problem)) => return origin.cannot_listen(&problem),
            Err(problem) => return origin.rejected_because(&problem.to_string()),
        };
        let next = match &self.gateway {
            Some(_) if file.gateway.is_none() => {
                return origin
                    .rejected_because("it has no gateway, and one is running: restart the server to remove it");
            }
            Some(gateway) => match gateway.prepare(&file).await {
                Ok(next) => Some((gateway, next)),
                Err(StartError::Refused(problems)) => return origin.rejected(&problems),
                Err(StartError::Listen(problem)) => return origin.cannot_listen(&problem),
                Err(problem) => return origin.rejected_because(&problem.to_string()),
            },
            None => None,
        };
        let changed = match &change {
            StoreChange::None => self.gate.replace(rules).map_err(|error| error.to_string()),
            _ => self.open_store(&file).await,
        };
        if let Err(problem) = changed {
            return origin.rejected_because(&problem);
        }
        self.learners.commit(learned);
        if let Some((gateway, next)) = next {
            gateway.change(next);
        }
        self.listeners.change(listeners);
        notice::log_problems(file.warnings());
        let of_domains = changes::of_domains(self.file.envoy_rules(), file.envoy_rules());
        origin.applied(&changes::joined(changes::describe(&self.rules, &file), of_domains));
        change.log();
        if change != StoreChange::None {
            notice::warn_if_store_unavailable(&self.gate);
        }
        self.startup_only.warn_of_changes(&StartupOnly::of(&self.file), &StartupOnly::of(&file));
        if self.file.store != file.store {
            self.published = RuleUpdates::subscribe(&file);
        }
        self.reloads.record_file();
        (self.rules, self.are_published, self.compiled) = ((*file).clone(), false, self.gate.rules());
        self.published_rules = None;
        let before = std::mem::replace(&mut self.file, file);
        self.follow_xds(before.service.xds.as_ref());
    }

    /// Changes to the store of another file.
    async fn open_store(&self, file: &Parsed) -> Result<(), String> {
        let other = Gate::open(file).await.map_err(|error| error.to_string())?;
        let before = self.gate.redis();
        self.gate.adopt(&other);
        self.throttles.follow(&self.gate);
        if let Some(before) = before {
            // Other nodes cannot use its leases until they are returned.
            tokio::spawn(async move { before.return_leases().await });
        }
        Ok(())
    }

    /// Applies published rules in place of the file's. The store and the listeners stay this node's own, and so do
    /// `trusted_proxies` and `forwarding_header` if the published rules have no gateway.
    fn apply_published(&mut self, version: u64, id: &str, rules: &[u8]) {
        let name = format!("published version {version}");
        let origin = self.origin(name.clone());
        let parsed = RuleFile::parse(&name, rules);
        let file = match parsed {
            Ok(parsed) if parsed.gateway.is_some() => parsed.in_folder(self.file.folder()),
            Ok(parsed) => parsed.in_folder(self.file.folder()).with_gateway_of(&self.file),
            Err(problems) => return origin.rejected(&problems),
        };
        let (file, learned) = self.learners.attach(file.with_domains_of(&self.file));
        match file.compile().map(|rules| self.gate.replace(rules)) {
            Ok(Ok(())) => {
                self.learners.commit(learned);
                self.published_rules = Some(file.clone());
                let rules = self.with_own_gateway(file.into_rules());
                self.reloads.record_published(version, id);
                origin.applied(&changes::describe(&self.rules, &rules));
                (self.rules, self.are_published) = (rules, true);
            }
            Ok(Err(error)) => origin.rejected_because(&error.to_string()),
            Err(problems) => origin.rejected(&problems),
        }
    }

    /// Returns published rules with this node's gateway. Only `trusted_proxies` and `forwarding_header` come from
    /// theirs.
    fn with_own_gateway(&self, mut published: RuleFile) -> RuleFile {
        if let Some(theirs) = &mut published.gateway {
            let own = self.file.gateway.clone().unwrap_or_default();
            let theirs = std::mem::replace(theirs, own);
            if let Some(gateway) = &mut published.gateway {
                gateway.trusted_proxies = theirs.trusted_proxies;
                gateway.forwarding_header = theirs.forwarding_header;
            }
        }
        published
    }

    fn report_repairs(&self, repairs: &Repairs) {
        self.reloads.record_repairs(repairs);
        if let Some(repair) = &repairs.latest {
            notice::warn(repair);
        }
    }

    /// Returns to the file's rules, unless they are already in force.
    async fn withdraw_published(&mut self, version: u64) {
        if !self.are_published {
            return;
        }
        self.reread_file().await;
        let withdraws = format!("version {version} withdraws the published rules");
        let path = self.path.display();
        if !self.are_published {
            return notice::log(format_args!("{withdraws}; the rules of {path} are back"));
        }
        // A withdrawal is received once, and the file may stay invalid, so the last valid rules are used.
        match self.gate.replace(self.compiled.clone()) {
            Ok(()) => {
                let changes = changes::describe(&self.rules, &self.file);
                notice::log(format_args!("{withdraws}; the last valid rules of {path} are back: {changes}"));
                self.reloads.record_put_back();
                self.reloads.record_file();
                (self.rules, self.are_published) = ((*self.file).clone(), false);
                self.published_rules = None;
                // The numbers of limits that learn may have moved since these rules were compiled.
                if self.learners.are_any() {
                    self.apply_learned();
                }
            }
            Err(error) => notice::log(format_args!("{withdraws}, but they stay in force: {error}")),
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

impl Origin {
    fn applied(&self, changes: &str) {
        self.reloads.record_applied();
        notice::log(format_args!("{} is in force: {changes}", self.name));
    }

    fn rejected(&self, problems: &Problems) {
        self.reloads.record_refused();
        notice::log(format_args!("{} is rejected, and the previous rules stay in force:", self.name));
        notice::log_problems(problems);
    }

    /// There is no automatic retry: the address could become free at a moment when nobody expects a change.
    fn cannot_listen(&self, problem: &ListenError) {
        let fix = problem.fix();
        let meanwhile = "all listeners stay unchanged";
        // Saving the file without a change does nothing (see `FileSnapshot`), but changing it helps: the address is in
        // the file, because the address of a flag has been bound since the start.
        self.rejected_because(&format!("{problem}; {meanwhile}: {fix}, and send SIGHUP or change the file"));
    }

    fn rejected_because(&self, problem: &str) {
        self.reloads.record_refused();
        notice::log(format_args!("{} is rejected, and the previous rules stay in force: {problem}", self.name));
    }
}
