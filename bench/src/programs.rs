//! Programs that benchmarks start: those of the PATH, and Tollgate from this workspace.

use std::fmt::{self, Display, Formatter};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};

/// Debian installs servers here, which is only in root's PATH.
const MORE_PLACES: [&str; 2] = ["/usr/sbin", "/sbin"];
/// The profile of packages: the peers are packages as well.
const PROFILE: &str = "dist";

/// A program could not be installed.
#[derive(Debug)]
pub(crate) struct Missing {
    program: String,
    script: &'static str,
}

impl Display for Missing {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        let Self { program, script } = self;
        write!(out, "`{program}` cannot be found: run tools/{script}, or install it and put it on the PATH")
    }
}

impl std::error::Error for Missing {}

/// Cargo runs even if there is a binary, because it may be outdated.
pub(crate) fn build_tollgate() -> anyhow::Result<PathBuf> {
    let bench = std::env::current_exe().context("this program cannot find itself")?;
    let folder = bench.parent().context("this program is in no folder")?;
    let target = folder.parent().context("this program is in no target folder")?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(workspace()).args(["build", "--profile", PROFILE, "--quiet", "-p", "tollgate-server"]);
    command.arg("--target-dir").arg(target);
    let status = command.status().context("cargo could not be started: name a built tollgate with --tollgate")?;
    ensure!(status.success(), "tollgate did not build: see above, or name a built one with --tollgate");
    Ok(target.join(PROFILE).join("tollgate"))
}

pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Finds a program that the script `script` in `tools/` installs.
pub(crate) fn find(program: &str, script: &'static str) -> Result<PathBuf, Missing> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places = std::env::split_paths(&path).chain(MORE_PLACES.map(PathBuf::from));
    places
        .find_map(|place| Some(place.join(program)).filter(|file| file.is_file()))
        .ok_or(Missing { program: program.to_owned(), script })
}

/// Returns the first line of a program's version output. nginx writes it to stderr.
pub(crate) fn version(program: &Path, flag: &str) -> String {
    let said = Command::new(program).arg(flag).stdin(Stdio::null()).output();
    let text = said.map(|said| [said.stdout, said.stderr].concat()).unwrap_or_default();
    String::from_utf8_lossy(&text).lines().next().unwrap_or("unknown version").trim().to_owned()
}
