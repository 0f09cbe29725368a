//! Errors of listeners, with the setting that names the address and the fix.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use tollgate_config::internal::Address;

use crate::service::Stop;

/// The source of a listener's address.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Setting {
    /// A key of the rule file, and the flag that overrides it.
    Key(&'static str, Option<Flag>),
    /// The flag that overrides a key.
    Flag(Flag),
}

/// A command-line flag and its environment variable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flag {
    name: &'static str,
    pub(crate) variable: &'static str,
}

impl Flag {
    pub(crate) const LISTEN: Self = Self { name: "--listen", variable: "TOLLGATE_LISTEN" };
    pub(crate) const HTTP: Self = Self { name: "--http", variable: "TOLLGATE_HTTP" };
    pub(crate) const ADMIN: Self = Self { name: "--admin", variable: "TOLLGATE_ADMIN" };
}

/// Names both, because a variable that was set long ago is easily overlooked.
impl fmt::Display for Flag {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} or {}", self.name, self.variable)
    }
}

impl Setting {
    /// Returns the flag if it is given, otherwise the key of the rule file.
    pub(crate) const fn key_or_flag(key: &'static str, flag: Flag, given: Option<&Address>) -> Self {
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

/// How the server ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Nothing serves in its place.
    Stop,
    /// Another process accepts the connections of these addresses.
    TakenOver { used: Vec<SocketAddr> },
}

impl Ending {
    /// Returns how the listener on an address ends.
    pub(crate) fn of(&self, bound: SocketAddr) -> Stop {
        match self {
            Self::TakenOver { used } if used.contains(&bound) => Stop::TakenOver,
            Self::Stop | Self::TakenOver { .. } => Stop::Close,
        }
    }
}

/// A listener that cannot be bound.
#[derive(Debug)]
pub(crate) struct ListenError {
    pub(crate) setting: Setting,
    pub(crate) address: String,
    pub(crate) source: io::Error,
}

impl ListenError {
    /// Returns the fix.
    pub(crate) fn fix(&self) -> &'static str {
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
    pub(crate) fn fix_at_start(&self) -> String {
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
