//! Commands to a running server.

use std::path::Path;

use tokio::net::UnixStream;

use super::channel::Channel;
use super::{ControlError, ROOT, Reply, Request, is_trusted, own_user};

/// The answer of a server to a command.
pub(crate) enum Answer {
    Done(String),
    Failed(String),
}

/// What a connection to a server is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A command. Root sends commands to the servers of all users.
    Command,
    /// To take over its sockets and counts.
    TakeOver,
}

/// Connects to the server on a control socket. It has to belong to this user, or to root.
pub(super) async fn connect(path: &Path, purpose: Purpose) -> Result<(Channel, Option<u32>), ControlError> {
    let cannot_connect = |source| ControlError::Connect { path: path.to_owned(), source };
    let stream = UnixStream::connect(path).await.map_err(cannot_connect)?;
    let peer = stream.peer_cred().map_err(cannot_connect)?;
    let is_command_of_root = purpose == Purpose::Command && own_user() == ROOT;
    if !is_trusted(&peer) && !is_command_of_root {
        return Err(ControlError::Foreign { path: path.to_owned(), user: peer.uid() });
    }
    let process = peer.pid().and_then(|id| u32::try_from(id).ok());
    let channel = stream.into_std().and_then(Channel::new).map_err(cannot_connect)?;
    Ok((channel, process))
}

/// Sends a command to the server on a control socket, and waits for its answer.
pub(crate) async fn ask(path: &Path, request: Request) -> Result<Answer, ControlError> {
    let broken = |source| ControlError::Broken { path: path.to_owned(), source };
    let (mut channel, _) = connect(path, Purpose::Command).await?;
    let replied = tokio::task::spawn_blocking(move || {
        channel.send(&request)?;
        // The server has its own deadlines.
        channel.wait_for(None)?;
        channel.receive()
    });
    match replied.await.map_err(|error| broken(error.into()))?.map_err(broken)? {
        Reply::Done(message) => Ok(Answer::Done(message)),
        Reply::Failed(problem) => Ok(Answer::Failed(problem)),
        Reply::Stopping | Reply::Offer(_) => Ok(Answer::Failed("the server stops".to_owned())),
    }
}
