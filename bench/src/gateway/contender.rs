//! The contenders: Tollgate and its peers, with a separate process for each set of limits.

use std::fs;
use std::net::SocketAddr;
use std::process::Command;

use anyhow::Context as _;
use tempfile::TempDir;

use super::config::{self, Limits, Protocol, Task};
use super::peers::Programs;
use crate::cores::{Cores, pinned};
use crate::server::{Server, free_port};

pub(super) const SMALL_BYTES: usize = 1024;
pub(super) const LARGE_BYTES: usize = 100 * 1024;

pub(super) const TOLLGATE: &str = "tollgate";
pub(super) const TOLLGATE_THREE: &str = "tollgate, three limits";
pub(super) const TOLLGATE_WATCHED: &str = "tollgate, watched";
pub(super) const NGINX: &str = "nginx";
pub(super) const HAPROXY: &str = "HAProxy";

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Product {
    Tollgate,
    /// With an admin listener, so that it counts limited keys.
    TollgateWatched,
    Nginx,
    Haproxy,
}

impl Product {
    pub(super) const ALL: [Self; 3] = [Self::Tollgate, Self::Nginx, Self::Haproxy];

    fn name(self) -> &'static str {
        match self {
            Self::Tollgate => TOLLGATE,
            Self::TollgateWatched => TOLLGATE_WATCHED,
            Self::Nginx => NGINX,
            Self::Haproxy => HAPROXY,
        }
    }
}

/// A running contender. Dropping it stops the process.
pub(super) struct Contender {
    pub(super) name: &'static str,
    pub(super) server: Server,
    /// Tollgate's admin listener, if it has one.
    pub(super) admin: Option<SocketAddr>,
    _folder: TempDir,
}

impl Contender {
    pub(super) fn start(
        product: Product,
        limits: Limits,
        protocol: Protocol,
        programs: &Programs,
        (upstream_port, cores): (u16, Cores),
    ) -> anyhow::Result<Self> {
        let name = if limits == Limits::Three { TOLLGATE_THREE } else { product.name() };
        let folder = tempfile::tempdir()?;
        let port = free_port()?;
        let admin_port = (product == Product::TollgateWatched).then(free_port).transpose()?;
        let task = Task { port, upstream_port, limits, protocol, admin_port, folder: folder.path() };
        let file = folder.path().join("config.yaml");
        let (text, program) = match product {
            Product::Tollgate | Product::TollgateWatched => (config::tollgate(&task), &programs.tollgate),
            Product::Nginx => (config::nginx(&task), &programs.nginx),
            Product::Haproxy => (config::haproxy(&task), &programs.haproxy),
        };
        fs::write(&file, text)?;
        let mut command = pinned(cores.contender(), program);
        match product {
            Product::Tollgate | Product::TollgateWatched => command.args(["serve", "--config"]).arg(&file),
            Product::Nginx => with_nginx_arguments(&mut command, &folder).arg("-c").arg(&file),
            Product::Haproxy => command.args(["-db", "-f"]).arg(&file),
        };
        let server = Server::start(command, port, &folder.path().join("log")).with_context(|| name.to_owned())?;
        let admin = admin_port.map(|port| ([127, 0, 0, 1], port).into());
        Ok(Self { name, server, admin, _folder: folder })
    }
}

/// The upstream of all contenders.
pub(super) struct Upstream {
    server: Server,
    _folder: TempDir,
}

impl Upstream {
    pub(super) fn start(programs: &Programs, cores: Cores) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let port = free_port()?;
        let file = folder.path().join("nginx.conf");
        fs::write(folder.path().join("large"), "x".repeat(LARGE_BYTES))?;
        fs::write(&file, config::upstream(port, &"x".repeat(SMALL_BYTES), folder.path()))?;
        let mut command = pinned(cores.upstream(), &programs.nginx);
        with_nginx_arguments(&mut command, &folder).arg("-c").arg(&file);
        let server = Server::start(command, port, &folder.path().join("log")).context("the upstream")?;
        Ok(Self { server, _folder: folder })
    }

    pub(super) fn port(&self) -> u16 {
        self.server.address.port()
    }
}

/// Options without which nginx opens the log of the system's own nginx before it reads its configuration.
fn with_nginx_arguments<'a>(command: &'a mut Command, folder: &TempDir) -> &'a mut Command {
    command.args(["-e", "stderr", "-p"]).arg(folder.path())
}
