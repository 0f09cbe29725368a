//! Installed proxies and clients.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use testkit::process::ForeignServer;
use testkit::skip::skipped;

/// Starts a proxy in a folder and waits until it listens.
pub(crate) fn start(command: Command, folder: TempDir, port: u16) -> ForeignServer {
    let mut peer = ForeignServer::spawn(command, folder).expect("the installed program starts");
    assert!(peer.listens_on(SocketAddr::from(([127, 0, 0, 1], port))), "it did not start: {}", peer.output());
    peer
}

/// Returns an installed file, or reports that the test is skipped. With `CI=true` the file must be there.
pub(crate) fn installed(name: &str) -> Option<PathBuf> {
    let path = tools().join(name);
    if path.exists() {
        return Some(path);
    }
    skip(&format!("{name} is not installed: run `tools/install-peers`"));
    None
}

/// Returns a program of the system, or reports that the test is skipped. With `CI=true` the program must be there, unless
/// `tools/install-peers` has found no way to install it on this machine.
pub(crate) fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Debian keeps HAProxy where only root's PATH looks.
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
    let found = folders.map(|folder| folder.join(name)).find(|path| path.exists());
    if found.is_none() {
        let unavailable = std::fs::read_to_string(tools().join("unavailable")).unwrap_or_default();
        let problem = format!("{name} is not on the PATH: run `tools/install-peers`");
        if unavailable.lines().any(|line| line == name) { skipped(&problem) } else { skip(&problem) }
    }
    found
}

fn skip(message: &str) {
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{message}");
    skipped(message);
}

/// Returns `python3` with the installed packages.
pub(crate) fn python() -> Option<Command> {
    let packages = installed("python/requirements.txt")?;
    let mut command = Command::new("python3");
    command.env("PYTHONPATH", packages.parent()?).env("PYTHONPYCACHEPREFIX", tools().join("pycache"));
    Some(command)
}

fn tools() -> PathBuf {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/tools/peers");
    target.canonicalize().unwrap_or(target)
}
