//! Notices when a file may have changed, however it was changed.
//!
//! Editors write another file and rename it; Kubernetes swaps a symbolic link in the path. A watch on the file itself
//! would stay on the old inode, so the folders of the file and of every link in its path are watched.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{Event, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::QUIET_PERIOD;
use crate::notice;

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

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

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
}
