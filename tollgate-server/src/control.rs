//! The control socket of a server: a Unix socket for `tollgate reload`, `tollgate restart`, and for a new process that
//! takes over from the running one.
//!
//! A new process connects, and gets the listening sockets and the counts in memory. It starts everything, and reports
//! that it is ready. Only then does the old process stop accepting connections. If the new one fails before that, the old
//! one continues as if nothing had happened. Both accept from the same sockets, so no connection is refused or reset.
//!
//! Only the user of the server and root can use the socket: its mode is 0600, and the kernel reports the user of each
//! peer. A new process takes over only from its own user or root: sockets of another user could be in use by another
//! process, too, which would get a part of the requests.

mod channel;
mod client;
mod handover;
mod predecessor;
mod server;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tokio::net::unix::UCred;
use tollgate_net::passed_sockets::{ListenerName, Owner};

pub(crate) use self::client::{Answer, ask};
pub(crate) use self::handover::{Handover, Successor};
pub(crate) use self::predecessor::{Inheritance, Predecessor};
pub(crate) use self::server::{Commands, ControlSocket};

/// A request to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    /// Read the rule file again.
    Reload,
    /// Start a new process, which takes over.
    Restart,
    /// Hand over to the process that asks.
    HandOver,
}

/// The reply to a request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    Done(String),
    Failed(String),
    /// The server stops, and closes the connection when it ends.
    Stopping,
    /// The sockets follow, then the counts.
    Offer(Offer),
}

/// The sockets of a server that another process may take over, in the order in which they follow.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    sockets: Vec<OfferedSocket>,
    /// Whether the counts are in memory. A stream with them follows the sockets.
    has_counts: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct OfferedSocket {
    owner: Owner,
    listener: Option<ListenerName>,
}

/// The last message of a process that takes over: it serves.
#[derive(Debug, Serialize, Deserialize)]
struct Ready {
    /// The addresses whose sockets it uses.
    used: Vec<SocketAddr>,
}

/// Why a control socket cannot be used.
#[derive(Debug)]
pub(crate) enum ControlError {
    Bind {
        path: PathBuf,
        source: io::Error,
    },
    Connect {
        path: PathBuf,
        source: io::Error,
    },
    Foreign {
        path: PathBuf,
        user: u32,
    },
    /// The path is that of another file.
    Occupied {
        path: PathBuf,
    },
    Broken {
        path: PathBuf,
        source: io::Error,
    },
    Refused {
        path: PathBuf,
        problem: String,
    },
}

impl fmt::Display for ControlError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bind { path, source } => write!(
                out,
                "cannot create the control socket {}: {source}: make its folder writable for the user of this process, or \
                 name another with --control",
                path.display()
            ),
            Self::Connect { path, source } => {
                let path = path.display();
                let fix = match source.kind() {
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                        format!("start a server with `tollgate serve --control {path}`, or name the socket of another")
                    }
                    _ => "run the command as the user of the server, or as root".to_owned(),
                };
                write!(out, "no server answers on the control socket {path}: {source}: {fix}")
            }
            Self::Foreign { path, user } => write!(
                out,
                "the server on the control socket {} belongs to user {user}: run both as the same user, or name another \
                 socket with --control",
                path.display()
            ),
            Self::Occupied { path } => write!(
                out,
                "{} is not a socket, and is not replaced: name another path with --control, or remove it",
                path.display()
            ),
            Self::Broken { path, source } => write!(
                out,
                "the server on the control socket {} ended the connection: {source}: look at its log",
                path.display()
            ),
            Self::Refused { path, problem } => {
                write!(out, "the server on the control socket {} refuses: {problem}", path.display())
            }
        }
    }
}

/// Returns whether a process of that user may control this one, or hand its sockets over.
fn is_trusted(peer: &UCred) -> bool {
    peer.uid() == own_user() || peer.uid() == ROOT
}

const ROOT: u32 = 0;

fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}
