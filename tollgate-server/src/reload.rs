//! Rules change while the server runs: the file is saved, SIGHUP comes, or a rule set is published on Redis.
//!
//! The newest of these wins. What is refused changes nothing, and whoever runs the server reads why. Files are read
//! on a thread of its own, which may wait for a disk as long as it likes: no request waits with it.
//!
//! The gateway's listeners change too; whoever changes the others has to start the server again, and is told so.

mod changes;
mod hangup;
mod published;
mod reloads;
mod restart;
mod settings;
mod sight;
mod watch;

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

pub(crate) use self::hangup::Hangup;
use self::published::{News, Published};
pub(crate) use self::reloads::Reloads;
pub(crate) use self::restart::Given;
use self::restart::Settled;
use self::settings::StoreChange;
use self::sight::Sight;
use self::watch::Watch;
use crate::gateway::{Gateway, StartError};
use crate::listening::CannotListen;
use crate::{config, notice};

/// Some file systems tell nobody that a file has changed, and a folder that is replaced takes its watch with it. So
/// the file is looked at now and then as well.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// How long the end may wait for whoever still looks at a file. Nothing is lost with it.
const END_DEADLINE: Duration = Duration::from_millis(500);

/// Saving takes several steps; a file is taken once they have been over for this long.
const QUIET: Duration = Duration::from_millis(100);

/// A file that is written all the time is taken as it is in the end, and looked at again soon.
const MAX_LOOKS: usize = 20;

/// How the server was started.
pub(crate) struct Started {
    pub(crate) gate: Gate,
    pub(crate) path: PathBuf,
    pub(crate) file: Parsed,
    pub(crate) hangup: Hangup,
    pub(crate) gateway: Option<Arc<Gateway>>,
    pub(crate) given: Given,
    pub(crate) reloads: Arc<Reloads>,
}

/// Puts other rules in force.
pub(crate) struct Reload {
    gate: Gate,
    path: PathBuf,
    /// The file whose store is in force: the last good one.
    file: Parsed,
    /// Its rules as they were put in force: who goes back to them needs no disk.
    compiled: tollgate::rules::RuleSet,
    /// The rules in force: those of the file, or published ones.
    rules: RuleFile,
    /// Whether they are published ones.
    are_published: bool,
    gateway: Option<Arc<Gateway>>,
    given: Given,
    /// What the server was started with, and stays so.
    settled: Settled,
    reloads: Arc<Reloads>,
    /// What the file was when it was last looked at, good or bad.
    seen: Sight,
    watch: Watch,
    hangup: Hangup,
    published: Published,
}

/// Rules change until this ends.
pub(crate) struct Reloading {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Reloading {
    /// Ends it. Whoever still waits for a disk is left behind.
    pub(crate) async fn end(self) {
        drop(self.stop);
        _ = timeout(END_DEADLINE, self.thread).await;
    }
}

enum Cause {
    /// The file may have changed.
    Look,
    /// Somebody wants the file to be read again.
    Hangup,
    Published(PublishedRules),
    /// Redis had lost a rule set.
    Repaired(Repairs),
}

/// What rules came from, for whoever reads or counts what became of them.
struct Origin {
    name: String,
    reloads: Arc<Reloads>,
}

impl Reload {
    pub(crate) fn new(started: Started) -> Self {
        let Started { gate, path, file, hangup, gateway, given, reloads } = started;
        let (watch, published) = (Watch::begin(&path), Published::on(&file));
        let seen = Sight::of_text(file.source()).with_keys(config::key_file(&file).as_deref());
        let (rules, compiled, are_published) = ((*file).clone(), gate.rules(), false);
        Self {
            gate,
            path,
            file,
            compiled,
            are_published,
            gateway,
            settled: Settled::by(&rules, &given),
            rules,
            given,
            reloads,
            seen,
            watch,
            hangup,
            published,
        }
    }

    pub(crate) fn spawn(self) -> Reloading {
        let (stop, stopped) = oneshot::channel();
        let runtime = Handle::current();
        let thread = tokio::task::spawn_blocking(move || {
            runtime.block_on(async {
                tokio::select! {
                    // Seen first, so that nothing is begun after the end.
                    biased;
                    _ = stopped => {}
                    () = self.run() => {}
                }
            });
        });
        Reloading { stop, thread }
    }

    async fn run(mut self) {
        // What was saved between the start and the first watch is found by this look.
        let mut cause = Cause::Look;
        loop {
            match cause {
                Cause::Look => self.look().await,
                Cause::Hangup => self.read_again().await,
                Cause::Published(PublishedRules { version, id, rules: Some(rules), .. }) => {
                    self.take_published(version, &id, &rules);
                }
                Cause::Published(PublishedRules { version, .. }) => self.go_back(version).await,
                Cause::Repaired(repairs) => self.report_repairs(&repairs),
            }
            self.watch.follow(&self.path, config::key_file(&self.file).as_deref());
            cause = tokio::select! {
                () = self.watch.touched() => Cause::Look,
                () = sleep(LOOK_EVERY) => Cause::Look,
                () = self.hangup.came() => Cause::Hangup,
                news = self.published.next() => match news {
                    News::RuleSet(rule_set) => Cause::Published(rule_set),
                    News::Repaired(repairs) => Cause::Repaired(repairs),
                },
            };
        }
    }

    fn origin(&self, name: String) -> Origin {
        Origin { name, reloads: Arc::clone(&self.reloads) }
    }

    /// Takes the file if it is not what it was.
    async fn look(&mut self) {
        if self.sight() != self.seen {
            let sight = self.steady_sight().await;
            if sight != self.seen {
                self.take_file(sight).await;
            }
        }
    }

    /// Takes the file whether it has changed or not: published rules may have taken its place.
    async fn read_again(&mut self) {
        let sight = self.steady_sight().await;
        self.take_file(sight).await;
    }

    fn sight(&self) -> Sight {
        Sight::look(&self.path, config::key_file(&self.file).as_deref())
    }

    /// What the file is once it stays the same for a moment. Half of a file can be a valid file, with fewer limits.
    async fn steady_sight(&self) -> Sight {
        let mut sight = self.sight();
        for _ in 0..MAX_LOOKS {
            sleep(QUIET).await;
            let before = std::mem::replace(&mut sight, self.sight());
            if before == sight {
                break;
            }
        }
        sight
    }

    async fn take_file(&mut self, sight: Sight) {
        let origin = self.origin(self.path.display().to_string());
        match sight.text() {
            // Whoever empties the file by accident must not let everything pass by it.
            Ok(text) if text.trim_ascii().is_empty() => {
                origin.kept("it is empty; write `limits: []` if everything is to pass");
            }
            Ok(text) => match config::understand(&self.path, text) {
                Ok(file) => self.put_in_force(self.on_store(file), &origin).await,
                Err(problems) => origin.refused(&problems),
            },
            Err(problem) => origin.kept(&format!("{problem}; name a file that is there and may be read")),
        }
        self.seen = sight.with_keys(config::key_file(&self.file).as_deref());
    }

    async fn put_in_force(&mut self, file: Parsed, origin: &Origin) {
        let compiled = match &self.gateway {
            Some(gateway) => config::compile(&file, gateway.listen()),
            None => file.compile(),
        };
        let rules = match compiled {
            Ok(rules) => rules,
            Err(problems) => return origin.refused(&problems),
        };
        let change = StoreChange::between(&self.file, &file);
        let next = match &self.gateway {
            Some(_) if file.gateway.is_none() => {
                return origin.kept("it has no gateway, and one runs; start the server again if it is to end");
            }
            Some(gateway) => match gateway.prepare(&file).await {
                Ok(next) => Some((gateway, next)),
                Err(StartError::Refused(problems)) => return origin.refused(&problems),
                Err(StartError::Listen(problem)) => return origin.cannot_listen(&problem),
                Err(problem) => return origin.kept(&problem.to_string()),
            },
            None => None,
        };
        let changed = match change {
            StoreChange::None => self.gate.replace(rules).map_err(|error| error.to_string()),
            _ => self.open_store(&file).await,
        };
        if let Err(problem) = changed {
            return origin.kept(&problem);
        }
        if let Some((gateway, next)) = next {
            gateway.change(next);
        }
        notice::tell_problems(file.warnings());
        origin.in_force(&changes::told(&self.rules, &file));
        change.tell();
        if change != StoreChange::None {
            notice::warn_of_an_absent_store(&self.gate);
        }
        self.settled.tell(&Settled::by(&self.file, &self.given), &Settled::by(&file, &self.given));
        if self.file.store != file.store {
            self.published = Published::on(&file);
        }
        self.reloads.note_file();
        (self.rules, self.are_published, self.compiled) = ((*file).clone(), false, self.gate.rules());
        self.file = file;
    }

    /// Goes over to the store of another file.
    async fn open_store(&self, file: &Parsed) -> Result<(), String> {
        let other = Gate::open(file).await.map_err(|error| error.to_string())?;
        let before = self.gate.redis();
        self.gate.adopt(&other);
        if let Some(before) = before {
            // What it has leased is missing elsewhere until it is given back.
            tokio::spawn(async move { before.return_leases().await });
        }
        Ok(())
    }

    /// Published rules take the place of the file's, but for the store and the listeners, which are this node's own. Whom
    /// limits believe about the client is too, where nothing is published of that.
    fn take_published(&mut self, version: u64, id: &str, rules: &[u8]) {
        let name = format!("published version {version}");
        let origin = self.origin(name.clone());
        let parsed = RuleFile::parse(&name, rules);
        let file = match parsed {
            Ok(parsed) if parsed.gateway.is_some() => parsed.in_folder(self.file.folder()),
            Ok(parsed) => parsed.in_folder(self.file.folder()).with_gateway_of(&self.file),
            Err(problems) => return origin.refused(&problems),
        };
        match file.compile().map(|rules| self.gate.replace(rules)) {
            Ok(Ok(())) => {
                let rules = self.with_own_gateway(file.into_rules());
                self.reloads.note_published(version, id);
                origin.in_force(&changes::told(&self.rules, &rules));
                (self.rules, self.are_published) = (rules, true);
            }
            Ok(Err(error)) => origin.kept(&error.to_string()),
            Err(problems) => origin.refused(&problems),
        }
    }

    /// Published rules as they are in force here: of a gateway, only whom it believes is taken.
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
        self.reloads.note_repairs(repairs);
        if let Some(repair) = &repairs.latest {
            notice::warn(repair);
        }
    }

    /// What was published is withdrawn. Where a file has taken its place since, that is nothing new.
    async fn go_back(&mut self, version: u64) {
        if !self.are_published {
            return;
        }
        self.read_again().await;
        let withdraws = format!("version {version} withdraws the published rules");
        let path = self.path.display();
        if !self.are_published {
            return notice::tell(format_args!("{withdraws}; those of {path} come back"));
        }
        // A withdrawal is heard once, and a file may be bad for as long as it likes.
        match self.gate.replace(self.compiled.clone()) {
            Ok(()) => {
                let changes = changes::told(&self.rules, &self.file);
                notice::tell(format_args!("{withdraws}; those of the last good {path} come back: {changes}"));
                self.reloads.note_put_back();
                self.reloads.note_file();
                (self.rules, self.are_published) = ((*self.file).clone(), false);
            }
            Err(error) => notice::tell(format_args!("{withdraws}, but they stay in force: {error}")),
        }
    }

    /// The file with the store that the command line named, if it named one.
    fn on_store(&self, file: Parsed) -> Parsed {
        match &self.given.store {
            // It was good when the server started.
            Some(store) => file.clone().with_store(store).unwrap_or(file),
            None => file,
        }
    }
}

impl Origin {
    fn in_force(&self, changes: &str) {
        self.reloads.note_applied();
        notice::tell(format_args!("{} is in force: {changes}", self.name));
    }

    fn refused(&self, problems: &Problems) {
        self.reloads.note_refused();
        notice::tell(format_args!("{} is refused, and the rules before it stay in force:", self.name));
        notice::tell_problems(problems);
    }

    /// Nobody tries again by itself: another process may take an address that is free for a moment.
    fn cannot_listen(&self, problem: &CannotListen) {
        let fix = problem.fix();
        let meanwhile = "the gateway goes on where it listens";
        // A file that is saved as it was is no news: see `Sight`. To change it helps, for the address is one of its own:
        // what a flag names has been listened on since the start.
        self.kept(&format!("{problem}; {meanwhile}; {fix}, and send SIGHUP or change the file"));
    }

    fn kept(&self, problem: &str) {
        self.reloads.note_refused();
        notice::tell(format_args!("{} is refused, and the rules before it stay in force: {problem}", self.name));
    }
}
