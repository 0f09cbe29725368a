//! Why something does not listen, for people: which setting asked for it, and what to do.

use std::fmt;
use std::io;

use tollgate::rules::file::internal::Address;

/// What says where something listens.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Setting {
    /// A key of the rule file, and the flag that may say it instead.
    Key(&'static str, Option<Flag>),
    /// The flag in the place of a key.
    Flag(Flag),
}

/// A flag of the command line, and the environment variable that is the same.
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

/// Both, for a variable that somebody has set long ago is where nobody looks.
impl fmt::Display for Flag {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} or {}", self.name, self.variable)
    }
}

impl Setting {
    /// A key of the rule file, or the flag in its place if that is given.
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

/// An address that cannot be listened on.
#[derive(Debug)]
pub(crate) struct ListenError {
    pub(crate) setting: Setting,
    pub(crate) address: String,
    pub(crate) source: io::Error,
}

impl ListenError {
    /// What to do about it.
    pub(crate) fn fix(&self) -> &'static str {
        match self.source.kind() {
            io::ErrorKind::AddrInUse => "stop the process that has it, or choose another port",
            io::ErrorKind::AddrNotAvailable => "use an address of this machine",
            io::ErrorKind::PermissionDenied => {
                "choose a port above 1023, or give the process the capability CAP_NET_BIND_SERVICE"
            }
            _ => "choose another address",
        }
    }

    /// The same for whoever is about to start the server, and may use flags.
    pub(crate) fn fix_at_start(&self) -> String {
        match (self.source.kind(), self.setting) {
            (io::ErrorKind::AddrInUse, Setting::Key(_, Some(flag))) => {
                format!("{} there or with {}", self.fix(), flag.name)
            }
            (io::ErrorKind::AddrInUse, _) => format!("{} there", self.fix()),
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
