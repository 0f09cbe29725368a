//! Errors of listeners, with the setting that names the address and the fix.

use std::fmt;
use std::io;
use std::net::SocketAddr;

/// The source of a listener's address.
#[derive(Clone, Copy, Debug)]
pub enum Setting {
    /// A key of the rule file, and the flag that overrides it.
    Key(&'static str, Option<Flag>),
    /// The flag that overrides a key.
    Flag(Flag),
}

/// A command-line flag and its environment variable.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    name: &'static str,
    /// The environment variable.
    pub variable: &'static str,
}

impl Flag {
    /// The address of the gateway.
    pub const LISTEN: Self = Self { name: "--listen", variable: "TOLLGATE_LISTEN" };
    /// The address of the decision service over HTTP.
    pub const HTTP: Self = Self { name: "--http", variable: "TOLLGATE_HTTP" };
    /// The address of the admin listener.
    pub const ADMIN: Self = Self { name: "--admin", variable: "TOLLGATE_ADMIN" };
}

/// Names both, because a variable that was set long ago is easily overlooked.
impl fmt::Display for Flag {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} or {}", self.name, self.variable)
    }
}

impl Setting {
    /// Returns the flag if it is given, otherwise the key of the rule file.
    pub const fn key_or_flag<Address>(key: &'static str, flag: Flag, given: Option<&Address>) -> Self {
        match given {
            None => Self::Key(key, Some(flag)),
            Some(_) => Self::Flag(flag),
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(key, _) => out.write_str(key),
            Self::Flag(flag) => flag.fmt(out),
        }
    }
}

/// How a listener stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Its socket is closed after a moment.
    Close,
    /// Another listener of this process accepts the connections of its socket from now on.
    HandOver,
    /// Another process accepts the connections of its socket from now on.
    TakenOver,
}

/// How the server ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Nothing serves in its place.
    Stop,
    /// Another process accepts the connections of these addresses.
    TakenOver {
        /// The addresses.
        used: Vec<SocketAddr>,
    },
}

impl Ending {
    /// Returns how the listener on an address ends.
    pub fn of(&self, bound: SocketAddr) -> Stop {
        match self {
            Self::TakenOver { used } if used.contains(&bound) => Stop::TakenOver,
            Self::Stop | Self::TakenOver { .. } => Stop::Close,
        }
    }
}

/// A listener that cannot be bound.
#[derive(Debug)]
pub struct ListenError {
    /// The source of the address.
    pub setting: Setting,
    /// The address.
    pub address: String,
    /// The error of the system.
    pub source: io::Error,
}

impl ListenError {
    /// Returns the fix.
    pub fn fix(&self) -> &'static str {
        match self.source.kind() {
            io::ErrorKind::AddrInUse => "stop the process that uses it, or choose another port",
            io::ErrorKind::AddrNotAvailable => "use an address of this host",
            io::ErrorKind::PermissionDenied => {
                "choose a port above 1023, or give the process the capability CAP_NET_BIND_SERVICE"
            }
            _ => "choose another address",
        }
    }

    /// Returns the fix at start, when flags can be used too.
    pub fn fix_at_start(&self) -> String {
        match (self.source.kind(), self.setting) {
            (io::ErrorKind::AddrInUse, Setting::Key(_, Some(flag))) => {
                format!("{} in the rule file or with {}", self.fix(), flag.name)
            }
            _ => self.fix().to_owned(),
        }
    }
}

impl fmt::Display for ListenError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setting, address, source } = self;
        write!(out, "{setting}: cannot listen on {address}: {source}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_cannot_be_used_are_reported_with_the_fix() {
        let settings = [Setting::Key("service.http", Some(Flag::HTTP)), Setting::Flag(Flag::LISTEN)];
        let kinds = [
            io::ErrorKind::AddrInUse,
            io::ErrorKind::AddrNotAvailable,
            io::ErrorKind::PermissionDenied,
            io::ErrorKind::InvalidInput,
        ];
        let lines = settings.iter().flat_map(|setting| {
            kinds.map(|kind| {
                let error = ListenError { setting: *setting, address: "192.0.2.7:80".to_owned(), source: kind.into() };
                format!("{error}: {}\n  reload: {}", error.fix_at_start(), error.fix())
            })
        });
        insta::assert_snapshot!(lines.collect::<Vec<_>>().join("\n"));
    }
}
