//! Notices when a file may have changed, however it was changed.
//!
//! Editors write another file and rename it; Kubernetes swaps a symbolic link in the path. A watch on the file itself
//! would stay on the old inode, so the folders of the file and of every link in its path are watched.
//!
//! [`FileSnapshot`] has the contents of the rule file at one moment, so that touching the file without a change does
//! nothing. [`Hangup`] is SIGHUP, which asks the server to read its rule file again.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{Event, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tollgate_config::Parsed;
use tollgate_telemetry::notice;

use super::QUIET_PERIOD;
use crate::config;

/// The longest wait for a quiet period. Constant writes to another file in the folder must not delay a reload further.
const MAX_BURST: Duration = Duration::from_secs(1);

/// The most links that are followed for one path, as in Linux.
const MAX_LINKS: usize = 40;

pub(super) struct FileWatcher {
    /// `None` if the system has no way to watch files.
    watcher: Option<RecommendedWatcher>,
    folders: BTreeSet<PathBuf>,
    events: mpsc::Receiver<()>,
}

impl FileWatcher {
    pub(super) fn new(path: &Path) -> Self {
        // One pending event is enough: the file is read after it.
        let (sender, events) = mpsc::channel(1);
        let watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
            if event.is_ok_and(|event| is_change(event.kind)) {
                _ = sender.try_send(());
            }
        });
        let watcher = watcher.map_err(|error| warn_not_watched(path, &error)).ok();
        let mut watch = Self { watcher, folders: BTreeSet::new(), events };
        watch.follow(path, &[]);
        watch
    }

    /// Creates a watcher that watches nothing.
    pub(super) fn idle() -> Self {
        Self { watcher: None, folders: BTreeSet::new(), events: mpsc::channel(1).1 }
    }

    /// Watches the folders that these paths go through now.
    pub(super) fn follow(&mut self, path: &Path, others: &[PathBuf]) {
        let Some(watcher) = &mut self.watcher else { return };
        let mut wanted = folders_to_watch(path);
        wanted.extend(others.iter().flat_map(|other| folders_to_watch(other)));
        for gone in self.folders.difference(&wanted) {
            // Fails if the folder was removed, and its watch with it.
            _ = watcher.unwatch(gone);
        }
        let mut watched = BTreeSet::new();
        for folder in wanted {
            // Watched again even if it was before: a new folder may have the same name.
            match watcher.watch(&folder, RecursiveMode::NonRecursive) {
                Ok(()) => _ = watched.insert(folder),
                Err(error) if self.folders.is_empty() => warn_not_watched(path, &error),
                // Tried again at the next poll.
                Err(_) => {}
            }
        }
        self.folders = watched;
    }

    /// Waits for a change and then for a quiet period.
    pub(super) async fn touched(&mut self) {
        if self.events.recv().await.is_none() {
            // Nothing is watched.
            std::future::pending::<()>().await;
        }
        let settled = async { while let Ok(Some(())) = timeout(QUIET_PERIOD, self.events.recv()).await {} };
        _ = timeout(MAX_BURST, settled).await;
    }
}

fn warn_not_watched(path: &Path, error: &notify::Error) {
    let seconds = super::POLL_INTERVAL.as_secs();
    notice::warn(format_args!(
        "{} cannot be watched: {error}; it is read every {seconds} s, and on SIGHUP",
        path.display()
    ));
}

/// Returns whether the event may change a file. Reading must not count: each reload would cause the next.
fn is_change(kind: EventKind) -> bool {
    match kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => true,
        EventKind::Access(_) => false,
        _ => true,
    }
}

/// Returns the folders whose entries determine which file the path resolves to.
fn folders_to_watch(path: &Path) -> BTreeSet<PathBuf> {
    let mut folders = BTreeSet::new();
    let mut path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    for _ in 0..MAX_LINKS {
        // From the root on, so that a link is resolved before the rest of the path.
        let ancestors: Vec<&Path> = path.ancestors().collect();
        let link = ancestors.iter().rev().find_map(|part| Some((*part, std::fs::read_link(part).ok()?)));
        let Some((link, target)) = link else { break };
        let folder = link.parent().unwrap_or(Path::new("/"));
        folders.insert(folder.to_owned());
        let rest = path.strip_prefix(link).unwrap_or(Path::new(""));
        path = if rest.as_os_str().is_empty() { folder.join(target) } else { folder.join(target).join(rest) };
    }
    folders.extend(path.parent().map(Path::to_owned));
    folders
}

/// The contents of the rule file, and of the files that it names. Equal snapshots mean equal rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileSnapshot {
    /// The text, or the reason why it cannot be read.
    text: Result<Vec<u8>, String>,
    /// The named files; `None` for one that cannot be read.
    named: Vec<(PathBuf, Option<Vec<u8>>)>,
}

impl FileSnapshot {
    pub(super) fn read(path: &Path, named: Vec<PathBuf>) -> Self {
        let unreadable = |error| format!("cannot read {}: {error}", path.display());
        let text = config::read(path).map(without_bom).map_err(unreadable);
        let read = |path: PathBuf| {
            let text = config::read(&path).ok().map(without_bom);
            (path, text)
        };
        Self { text, named: named.into_iter().map(read).collect() }
    }

    /// Reads these files alone.
    pub(super) fn of_files(named: Vec<PathBuf>) -> Self {
        let read = |path: PathBuf| {
            let text = config::read(&path).ok();
            (path, text)
        };
        Self { text: Ok(Vec::new()), named: named.into_iter().map(read).collect() }
    }

    /// Returns whether one of its named files has changed.
    pub(super) fn has_changed(&self) -> bool {
        *self != Self::of_files(self.paths())
    }

    /// Returns the paths of its named files.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        self.named.iter().map(|(path, _)| path.clone()).collect()
    }

    /// The snapshot of a file that was loaded: what it was made of, not what the disk has now. A change since then must
    /// be noticed.
    pub(crate) fn of_loaded(file: &Parsed) -> Self {
        Self { text: Ok(file.source().into()), named: config::loaded_files(file) }
    }

    /// Returns the same text with the files that were loaded. Of a file that the snapshot has, it keeps the contents:
    /// the file may have changed since.
    pub(super) fn with_loaded(mut self, loaded: Vec<(PathBuf, Option<Vec<u8>>)>) -> Self {
        let before = std::mem::take(&mut self.named);
        // The rules know a path as text, in which bytes that are not UTF-8 are replaced.
        let text = |path: &Path| path.display().to_string();
        let known = |path: &Path| before.iter().find(|(known, _)| text(known) == text(path)).cloned();
        self.named = loaded.into_iter().map(|(path, contents)| known(&path).unwrap_or((path, contents))).collect();
        self
    }

    pub(super) fn text(&self) -> Result<&[u8], &str> {
        self.text.as_deref().map_err(String::as_str)
    }
}

/// Removes a byte order mark, which the parser removes too.
fn without_bom(text: Vec<u8>) -> Vec<u8> {
    match text.strip_prefix(b"\xEF\xBB\xBF") {
        Some(rest) => rest.to_vec(),
        None => text,
    }
}

#[cfg(unix)]
pub(crate) struct Hangup(tokio::signal::unix::Signal);

#[cfg(unix)]
impl Hangup {
    /// Installs the signal handler.
    pub(crate) fn listen() -> io::Result<Self> {
        tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup()).map(Self)
    }

    pub(super) async fn received(&mut self) {
        if self.0.recv().await.is_none() {
            std::future::pending().await
        }
    }
}

/// Without Unix signals, SIGHUP is never received.
#[cfg(not(unix))]
pub(crate) struct Hangup;

#[cfg(not(unix))]
impl Hangup {
    pub(crate) fn listen() -> io::Result<Self> {
        Ok(Self)
    }

    pub(super) async fn received(&mut self) {
        std::future::pending().await
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    use super::*;
    use tollgate_telemetry::notice::captured::lines_of;

    #[test]
    fn file_that_cannot_be_watched_is_reported_with_the_consequence() {
        let error = notify::Error::new(notify::ErrorKind::MaxFilesWatch);
        insta::assert_snapshot!(lines_of(|| warn_not_watched(Path::new("/etc/tollgate/tollgate.yaml"), &error)));
    }

    #[test]
    fn every_folder_that_the_path_goes_through_is_watched() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        for folder in ["mount", "mount/..1", "etc"] {
            std::fs::create_dir(root.join(folder)).unwrap();
        }
        std::fs::write(root.join("mount/..1/rules.yaml"), "").unwrap();
        symlink("..1", root.join("mount/..data")).unwrap();
        symlink("..data/rules.yaml", root.join("mount/rules.yaml")).unwrap();
        symlink(root.join("mount"), root.join("etc/current")).unwrap();

        let found = folders_to_watch(&root.join("etc/current/rules.yaml"));
        let expected = ["etc", "mount", "mount/..1"].map(|folder| root.join(folder));
        assert_eq!(found, BTreeSet::from(expected));
    }

    #[test]
    fn circular_links_are_not_followed_forever() {
        let root = tempfile::tempdir().unwrap();
        symlink("b", root.path().join("a")).unwrap();
        symlink("a", root.path().join("b")).unwrap();
        assert!(!folders_to_watch(&root.path().join("a")).is_empty());
    }

    #[test]
    fn pipes_are_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("tokens");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let snapshot = FileSnapshot::of_files(vec![pipe.clone()]);
        assert!(!snapshot.has_changed());
        std::fs::remove_file(&pipe).unwrap();
        std::fs::write(&pipe, "token").unwrap();
        assert!(snapshot.has_changed(), "it is a regular file now");
    }

    #[test]
    fn a_file_that_is_added_while_others_are_loaded_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        // A name that is not UTF-8.
        let root = folder.path().join(std::ffi::OsStr::from_bytes(b"caf\xe9"));
        std::fs::create_dir(&root).unwrap();
        let path = root.join("rules.yaml");
        let domain = |name: &str| format!("domain: {name}\ndescriptors: []\n");
        std::fs::write(&path, "limits: []\nservice: { grpc: 127.0.0.1:0, envoy: { files: '*.envoy' } }\n").unwrap();
        std::fs::write(root.join("a.envoy"), domain("a")).unwrap();
        let load = || config::understand(&path, &std::fs::read(&path).unwrap()).unwrap();
        let now = |file| FileSnapshot::read(&path, config::named_files(file));

        let file = load();
        let snapshot = now(&file);
        assert_eq!(snapshot.clone().with_loaded(config::loaded_files(&file)), now(&file), "nothing has changed");
        std::fs::write(root.join("b.envoy"), domain("b")).unwrap();
        let read = snapshot.with_loaded(config::loaded_files(&file));
        assert_ne!(read, now(&file));

        let file = load();
        let read = now(&file).with_loaded(config::loaded_files(&file));
        assert_eq!(read, now(&file), "it is loaded now");
        std::fs::write(root.join("a.envoy"), domain("c")).unwrap();
        assert_ne!(read.with_loaded(config::loaded_files(&load())), now(&file), "a changed file is loaded once more");
    }
}
