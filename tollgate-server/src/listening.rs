//! Why something does not listen, for people: which setting asked for it, and what to do.

use std::fmt;
use std::io;

use tollgate::rules::file::Address;

/// What says where something listens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting {
    name: &'static str,
    /// The flag that may say it instead.
    flag: Option<&'static str>,
}

impl Setting {
    /// A key of the rule file.
    pub(crate) const fn key(name: &'static str) -> Self {
        Self { name, flag: None }
    }

    /// A key of the rule file, or the flag in its place if that is given.
    pub(crate) const fn key_or_flag(name: &'static str, flag: &'static str, given: Option<&Address>) -> Self {
        match given {
            None => Self { name, flag: Some(flag) },
            Some(_) => Self::key(flag),
        }
    }
}

/// An address that cannot be listened on.
#[derive(Debug)]
pub(crate) struct CannotListen {
    pub(crate) setting: Setting,
    pub(crate) address: String,
    pub(crate) source: io::Error,
}

impl CannotListen {
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
        let instead = self.setting.flag.map(|flag| format!(" there or with {flag}"));
        match self.source.kind() {
            io::ErrorKind::AddrInUse => format!("{}{}", self.fix(), instead.as_deref().unwrap_or(" there")),
            _ => self.fix().to_owned(),
        }
    }
}

impl fmt::Display for CannotListen {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setting, address, source } = self;
        write!(out, "{}: cannot listen on {address}: {source}", setting.name)
    }
}
