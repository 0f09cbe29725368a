//! The programs to run: peers and load generators from the PATH, Tollgate from this workspace.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::programs::{build_tollgate, find, workspace};

/// Installs the programs of this benchmark.
const SCRIPT: &str = "install-gateway-peers";

/// The paths of all programs.
pub(super) struct Programs {
    pub(super) nginx: PathBuf,
    pub(super) haproxy: PathBuf,
    pub(super) tollgate: PathBuf,
    pub(super) wrk: PathBuf,
    pub(super) h2load: PathBuf,
}

impl Programs {
    /// Installs missing programs, and builds Tollgate unless a binary is given.
    pub(super) fn find(tollgate: Option<&Path>) -> anyhow::Result<Self> {
        if ["nginx", "haproxy", "wrk", "h2load", "taskset"].iter().any(|name| find(name, SCRIPT).is_err()) {
            // The script reports its own errors, and the programs are searched for again below.
            let _ = Command::new(workspace().join("tools").join(SCRIPT)).status();
        }
        find("taskset", SCRIPT)?;
        Ok(Self {
            nginx: find("nginx", SCRIPT)?,
            haproxy: find("haproxy", SCRIPT)?,
            wrk: find("wrk", SCRIPT)?,
            h2load: find("h2load", SCRIPT)?,
            tollgate: tollgate.map_or_else(build_tollgate, |path| Ok(path.to_owned()))?,
        })
    }
}
