//! Listening sockets that another process has bound: a service manager, or the server that this one takes over from.
//!
//! A listener uses a passed socket in place of binding its address. Connections that wait in the queue of such a socket
//! are never lost: the queue belongs to the socket, and lasts while any process has it open.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Mutex, MutexGuard, PoisonError};

use listenfd::ListenFd;
use rustix::net::sockopt::socket_acceptconn;
use serde::{Deserialize, Serialize};
use tollgate_telemetry::notice;

/// The number of the first socket that a service manager passes.
const FIRST_DESCRIPTOR: usize = 3;

/// The process that keeps a socket open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Owner {
    /// This server. The socket is closed with its listener.
    Server,
    /// A service manager. It passes the socket to the next server too.
    ServiceManager,
}

/// The listener that a socket belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenerName {
    /// Its key in the rule file.
    pub key: String,
    /// The configured address, which may have port 0.
    pub address: String,
}

/// A socket that another process has bound.
#[derive(Debug)]
pub struct PassedSocket {
    /// The socket, which does not block.
    pub socket: TcpListener,
    /// The address that it is bound to.
    pub bound: SocketAddr,
    /// The process that keeps it open.
    pub owner: Owner,
    /// The listener that used it before.
    pub listener: Option<ListenerName>,
}

/// The sockets for a listener, all bound to one address.
#[derive(Debug)]
pub struct ListenerSockets {
    /// The sockets.
    pub sockets: Vec<TcpListener>,
    /// The address that they are bound to.
    pub bound: SocketAddr,
    /// The process that keeps them open.
    pub owner: Owner,
}

/// The sockets that were passed to this process.
#[derive(Debug, Default)]
pub struct PassedSockets {
    sockets: Mutex<Vec<PassedSocket>>,
    /// The addresses of those that listeners have used.
    used: Mutex<Vec<SocketAddr>>,
}

impl PassedSocket {
    /// Takes a socket that is bound.
    pub fn new(socket: TcpListener, owner: Owner, listener: Option<ListenerName>) -> io::Result<Self> {
        let bound = socket.local_addr()?;
        socket.set_nonblocking(true)?;
        Ok(Self { socket, bound, owner, listener })
    }

    fn try_clone(&self) -> io::Result<Self> {
        let Self { bound, owner, ref listener, .. } = *self;
        Ok(Self { socket: self.socket.try_clone()?, bound, owner, listener: listener.clone() })
    }
}

impl PassedSockets {
    /// Returns the sockets of the service manager (`LISTEN_FDS`), or an error with the fix. Changes the environment, so
    /// it must be called before any other thread runs.
    pub fn from_service_manager() -> Result<Self, String> {
        let mut passed = ListenFd::from_env();
        let mut sockets = Vec::new();
        for index in 0..passed.len() {
            let socket = passed.take_tcp_listener(index).ok().flatten();
            let socket = socket.filter(|socket| socket_acceptconn(socket).unwrap_or(false));
            let socket = socket.and_then(|socket| PassedSocket::new(socket, Owner::ServiceManager, None).ok());
            sockets.push(socket.ok_or_else(|| {
                format!(
                    "descriptor {} of LISTEN_FDS is not a listening TCP socket: use ListenStream= with an address and a \
                     port, and Accept=no, in the socket unit",
                    FIRST_DESCRIPTOR + index
                )
            })?);
        }
        Ok(Self { sockets: Mutex::new(sockets), used: Mutex::default() })
    }

    /// Adds sockets that the server before has passed.
    pub fn add(&self, sockets: Vec<PassedSocket>) {
        self.all().extend(sockets);
    }

    /// Returns the sockets for a listener, if any were passed. Sockets match by their address. One that was bound to port
    /// 0 matches the listener that had it before. Those of the service manager stay here for another use.
    pub async fn find(&self, key: &str, address: &str) -> io::Result<Option<ListenerSockets>> {
        if self.all().is_empty() {
            return Ok(None);
        }
        let has_any_port = address.ends_with(":0");
        let resolved: Vec<SocketAddr> =
            if has_any_port { Vec::new() } else { tokio::net::lookup_host(address).await?.collect() };
        let is_match = |passed: &PassedSocket| match &passed.listener {
            Some(listener) if has_any_port => listener.key == key && listener.address == address,
            _ => resolved.contains(&passed.bound),
        };
        let mut all = self.all();
        let Some((bound, owner)) = all.iter().find(|one| is_match(one)).map(|one| (one.bound, one.owner)) else {
            return Ok(None);
        };
        let is_match = |passed: &PassedSocket| is_match(passed) && passed.bound == bound && passed.owner == owner;
        let sockets = match owner {
            Owner::Server => all.extract_if(.., |one| is_match(one)).map(|one| one.socket).collect(),
            Owner::ServiceManager => {
                let matching = all.iter().filter(|one| is_match(one));
                matching.map(|one| one.socket.try_clone()).collect::<io::Result<_>>()?
            }
        };
        self.used.lock().unwrap_or_else(PoisonError::into_inner).push(bound);
        Ok(Some(ListenerSockets { sockets, bound, owner }))
    }

    /// Returns copies of the sockets of the service manager, to pass them on.
    pub fn of_service_manager(&self) -> io::Result<Vec<PassedSocket>> {
        let all = self.all();
        all.iter().filter(|one| one.owner == Owner::ServiceManager).map(PassedSocket::try_clone).collect()
    }

    /// Closes the sockets of the server before that no listener uses.
    pub fn close_unused(&self) {
        self.all().retain(|one| one.owner == Owner::ServiceManager);
    }

    /// Returns the addresses of the sockets that listeners use.
    pub fn used(&self) -> Vec<SocketAddr> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Warns about sockets of the service manager that no listener uses.
    pub fn warn_of_unused(&self) {
        let used = self.used();
        for unused in self.all().iter().filter(|one| !used.contains(&one.bound)) {
            notice::warn(format_args!(
                "the service manager passed a socket for {}, and no listener uses it, so its clients wait forever: use the \
                 address in the rule file, or remove it from the socket unit",
                unused.bound
            ));
        }
    }

    fn all(&self) -> MutexGuard<'_, Vec<PassedSocket>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket(owner: Owner, listener: Option<(&str, &str)>) -> PassedSocket {
        let listener = listener.map(|(key, address)| ListenerName { key: key.into(), address: address.into() });
        let socket = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        PassedSocket::new(socket, owner, listener).expect("it is bound")
    }

    #[tokio::test]
    async fn sockets_are_found_by_address() {
        let (one, other) = (socket(Owner::ServiceManager, None), socket(Owner::ServiceManager, None));
        let address = one.bound;
        let passed = PassedSockets::default();
        passed.add(vec![one, other]);
        for _ in 0..2 {
            let found = passed.find("admin", &address.to_string()).await.expect("it resolves");
            let found = found.expect("sockets of the service manager stay");
            assert_eq!((found.bound, found.owner, found.sockets.len()), (address, Owner::ServiceManager, 1));
        }
        assert!(passed.find("admin", "127.0.0.1:0").await.expect("it resolves").is_none());
        assert!(passed.find("admin", "127.0.0.1:1").await.expect("it resolves").is_none());
        assert_eq!(passed.used(), [address, address]);
        passed.close_unused();
        assert_eq!(passed.all().len(), 2, "the service manager keeps its sockets");
    }

    #[tokio::test]
    async fn a_listener_with_port_0_keeps_its_sockets() {
        let first = socket(Owner::Server, Some(("gateway", "127.0.0.1:0")));
        let second = PassedSocket {
            bound: first.bound,
            ..socket(Owner::Server, first.listener.as_ref().map(|_| ("gateway", "127.0.0.1:0")))
        };
        let admin = socket(Owner::Server, Some(("admin", "127.0.0.1:0")));
        let passed = PassedSockets::default();
        passed.add(vec![admin, first, second]);
        let found = passed.find("gateway", "127.0.0.1:0").await.expect("it resolves").expect("it is passed");
        assert_eq!((found.sockets.len(), found.owner), (2, Owner::Server));
        assert!(passed.find("gateway", "127.0.0.1:0").await.expect("it resolves").is_none(), "they are taken");
        assert_eq!(passed.used(), [found.bound]);
        passed.close_unused();
        assert!(passed.all().is_empty());
    }
}
