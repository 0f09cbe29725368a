//! Installed proxies and clients.

use std::fs::File;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use tempfile::TempDir;
use testkit::skip::skipped;
use testkit::wait::wait_until;

/// A running proxy, with its folder. It is killed when the test ends.
pub(crate) struct Peer {
    process: Child,
    folder: TempDir,
}

impl Peer {
    /// Starts a proxy in a folder and waits until it listens.
    pub(crate) fn start(mut command: Command, folder: TempDir, port: u16) -> Self {
        let output = File::create(folder.path().join("output.txt")).unwrap();
        let errors = output.try_clone().unwrap();
        command.current_dir(folder.path()).stdout(output).stderr(errors).process_group(0);
        let process = command.spawn().expect("the installed program starts");
        let mut peer = Self { process, folder };
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let ready = wait_until(|| {
            if peer.process.try_wait().is_ok_and(|ended| ended.is_some()) {
                return Some(false);
            }
            TcpStream::connect(address).is_ok().then_some(true)
        });
        assert_eq!(ready, Some(true), "it did not start: {}", peer.output());
        peer
    }

    /// Returns everything that it printed.
    pub(crate) fn output(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("output.txt")).unwrap_or_default()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        _ = Command::new("sh").args(["-c", &format!("kill -KILL -{}", self.process.id())]).status();
        _ = self.process.wait();
    }
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
