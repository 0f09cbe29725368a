//! Networks, addresses to listen on, upstreams, and where the store is.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use ipnet::IpNet;

use super::super::problem::{InvalidValue, shown};
use super::Form;

/// A network such as `10.0.0.0/8`, or a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cidr(IpNet);

impl Cidr {
    pub(crate) fn net(self) -> IpNet {
        self.0
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(out)
    }
}

impl Form for Cidr {
    const FORMAT: &'static str = "cidr";
    const PATTERN: &'static str = "^[0-9A-Fa-f:.]+(/[0-9]+)?$";
    const NOUN: &'static str = "a network";
    const EXAMPLE: &'static str = "10.0.0.0/8";

    fn read(text: &str) -> Result<Self, InvalidValue> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Self(address.into()));
        }
        let invalid = |problem: &str| {
            let problem = format!("`{}` is no network: {problem}", shown(text));
            InvalidValue::new(problem, "write an address, or a network such as 10.0.0.0/8 or 2001:db8::/32")
        };
        let (address, bits) = text.split_once('/').ok_or_else(|| invalid("it is no address"))?;
        let address: IpAddr = address.parse().map_err(|_| invalid("what stands before the `/` is no address"))?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        // `IpNet` would take `/+8` too.
        let bits = Some(bits).filter(|bits| bits.bytes().all(|byte| byte.is_ascii_digit()));
        let bits: Option<u8> = bits.and_then(|bits| bits.parse().ok()).filter(|bits| *bits <= most);
        let net = bits.and_then(|bits| IpNet::new(address, bits).ok());
        let net = net.ok_or_else(|| invalid(&format!("what follows the `/` is no number from 0 to {most}")))?;
        if net.addr() != net.network() {
            let problem = format!("`{}` has bits set beyond its /{}", shown(text), net.prefix_len());
            return Err(InvalidValue::new(
                problem,
                format!("write {} for the network, or {address} alone", net.trunc()),
            ));
        }
        Ok(Self(net))
    }
}

/// An address to listen on: `127.0.0.1:8080`, `[::]:8080`, `localhost:8080`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address(String);

impl Address {
    pub(in crate::rules::file) fn new(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// The address as it was written, for whoever listens to look up.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether the system chooses the port.
    pub(in crate::rules::file) fn is_any_port(&self) -> bool {
        self.0.ends_with(":0")
    }
}

impl Form for Address {
    const FORMAT: &'static str = "address";
    const PATTERN: &'static str = "^.+:[0-9]+$";
    const NOUN: &'static str = "an address and a port";
    const EXAMPLE: &'static str = "127.0.0.1:8080";

    fn read(text: &str) -> Result<Self, InvalidValue> {
        if text.parse::<SocketAddr>().is_ok() {
            return Ok(Self(text.to_owned()));
        }
        let problem = format!("`{}` is no address and port", shown(text));
        let (host, port) = text.rsplit_once(':').unwrap_or((text, ""));
        if !is_port(port) {
            return Err(InvalidValue::new(problem, "add a port from 0 to 65535, such as 127.0.0.1:8080"));
        }
        if host.is_empty() {
            return Err(InvalidValue::new(
                problem,
                format!("write 0.0.0.0:{port} for all addresses, or 127.0.0.1:{port}"),
            ));
        }
        if host.contains(':') {
            let address = if host.parse::<std::net::Ipv6Addr>().is_ok() { host } else { "::1" };
            return Err(InvalidValue::new(problem, format!("put an IPv6 address in brackets: [{address}]:{port}")));
        }
        if !is_host_name(host) || host.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
            return Err(InvalidValue::new(
                problem,
                "write an address or a host name before the port, such as 127.0.0.1:8080",
            ));
        }
        Ok(Self(text.to_owned()))
    }
}

/// As in a rule file.
impl FromStr for Address {
    /// What is wrong with it, and the fix.
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::read(text).map_err(|invalid| invalid.to_string())
    }
}

/// Where a route leads: `http://127.0.0.1:8081`, `https://api.internal`, `h2c://127.0.0.1:50051`, or `echo`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Upstream(String);

impl Upstream {
    /// The URL as it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it is the one that is built in, and answers with what it was asked.
    #[must_use]
    pub fn is_echo(&self) -> bool {
        self.0 == ECHO
    }

    /// The same for all URLs that lead to the same place.
    pub(in crate::rules::file) fn normal(&self) -> String {
        let Ok(uri) = self.0.parse::<http::Uri>() else { return self.0.clone() };
        let scheme = uri.scheme_str().unwrap_or_default();
        let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
        let host = uri.host().unwrap_or_default().to_ascii_lowercase();
        format!("{scheme}://{host}:{port}{}", uri.path().trim_end_matches('/'))
    }
}

/// The upstream that is built in.
const ECHO: &str = "echo";

impl Form for Upstream {
    const FORMAT: &'static str = "upstream";
    const PATTERN: &'static str = "^(https?|h2c)://.+$|^echo$";
    const NOUN: &'static str = "a URL";
    const EXAMPLE: &'static str = "http://127.0.0.1:8081";

    fn read(text: &str) -> Result<Self, InvalidValue> {
        let invalid = |problem: &str| {
            InvalidValue::new(format!("the upstream {problem}"), "write a URL such as http://127.0.0.1:8081")
        };
        if text == ECHO {
            return Ok(Self(text.to_owned()));
        }
        let rest = ["http://", "https://", "h2c://"].iter().find_map(|scheme| text.strip_prefix(scheme));
        let rest = rest.ok_or_else(|| invalid("has no http://, https:// or h2c:// before it"))?;
        let uri: http::Uri = text.parse().map_err(|_| invalid("is no URL"))?;
        if rest.contains('@') {
            return Err(invalid("has a user or password in it, which nobody sends on"));
        }
        if rest.contains(['?', '#']) {
            return Err(invalid("has a query or fragment in it, which nobody sends on"));
        }
        // What is no port is none to the URI: it would be taken for the default.
        let host = uri.host().unwrap_or_default();
        let port = uri.authority().and_then(|authority| authority.as_str().strip_prefix(host)).unwrap_or_default();
        let is_good = port.is_empty() || port.strip_prefix(':').is_some_and(is_port);
        if host.is_empty() || !is_good {
            return Err(invalid("names no host, or a port that is none"));
        }
        if uri.port_u16() == Some(0) {
            return Err(invalid("has port 0, where nobody can be reached"));
        }
        Ok(Self(text.to_owned()))
    }
}

/// Where limits are kept: in memory, or at the URL of a Redis.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreUrl {
    /// In this process.
    #[default]
    Memory,
    /// On Redis or Valkey, by the URL that `tollgate::redis` takes. It may hold a password.
    Redis(String),
}

impl StoreUrl {
    /// Whether there is a user or a password in it.
    #[must_use]
    pub fn has_login(&self) -> bool {
        self.parts().is_some_and(|parts| parts.login.is_some())
    }

    pub(in crate::rules::file) fn has_user(&self) -> bool {
        let login = self.parts().and_then(|parts| parts.login);
        login.is_some_and(|login| !login.split(':').next().unwrap_or_default().is_empty())
    }

    pub(in crate::rules::file) fn has_password(&self) -> bool {
        self.parts().and_then(|parts| parts.login).is_some_and(|login| login.contains(':'))
    }

    pub(in crate::rules::file) fn is_tls(&self) -> bool {
        matches!(self, Self::Redis(url) if url.starts_with("rediss"))
    }

    pub(in crate::rules::file) fn has_sentinels(&self) -> bool {
        self.parts().is_some_and(|parts| parts.scheme.ends_with("+sentinel"))
    }

    /// Everything but the user and the password.
    pub(in crate::rules::file) fn without_login(&self) -> Option<(&str, &str)> {
        self.parts().map(|parts| (parts.scheme, parts.rest))
    }

    fn parts(&self) -> Option<Parts<'_>> {
        let Self::Redis(url) = self else { return None };
        let (scheme, rest) = url.split_once("://")?;
        // The path of a socket may have an @ in it.
        let end = if scheme == "unix" { rest.find('/')? } else { rest.len() };
        let at = rest[..end].rfind('@');
        let (login, rest) = at.map_or((None, rest), |at| (Some(&rest[..at]), &rest[at + 1..]));
        Some(Parts { scheme, login, rest })
    }
}

/// The parts of a store's URL.
struct Parts<'u> {
    scheme: &'u str,
    /// `user:password`.
    login: Option<&'u str>,
    rest: &'u str,
}

/// A password must not reach a log by way of `{:?}`.
impl fmt::Debug for StoreUrl {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(if *self == Self::Memory { "Memory" } else { "Redis(…)" })
    }
}

/// As a rule file writes it, but without a user and password.
impl fmt::Display for StoreUrl {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.without_login() {
            Some((scheme, rest)) => write!(out, "{scheme}://{rest}"),
            None => out.write_str("memory"),
        }
    }
}

impl Form for StoreUrl {
    const FORMAT: &'static str = "store";
    const PATTERN: &'static str = r"^(memory|rediss?(\+cluster|\+sentinel)?://.+|unix://.+)$";
    const NOUN: &'static str = "memory or the URL of a Redis";
    const EXAMPLE: &'static str = "redis://127.0.0.1:6379";

    fn read(text: &str) -> Result<Self, InvalidValue> {
        if text == "memory" {
            return Ok(Self::Memory);
        }
        let invalid = |problem: &str| {
            InvalidValue::new(
                problem,
                "use memory, redis://host:6379, rediss://host:6379, redis+cluster://h1:7001,h2:7002, \
                 redis+sentinel://h1:26379,h2:26379/mymaster or unix:///path/to/socket",
            )
        };
        let (scheme, rest) = text.split_once("://").ok_or_else(|| invalid("the store is neither memory nor a URL"))?;
        if scheme == "unix" {
            return socket(rest).map(|()| Self::Redis(text.to_owned())).map_err(invalid);
        }
        let (base, kind) = scheme.split_once('+').unwrap_or((scheme, ""));
        if !matches!(base, "redis" | "rediss") || !matches!(kind, "" | "cluster" | "sentinel") || scheme.ends_with('+')
        {
            return Err(invalid(&format!("`{}` is no scheme of a store", shown(scheme))));
        }
        let rest = rest.rsplit_once('@').map_or(rest, |(_, hosts)| hosts);
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        if hosts.split(',').any(|host| host.is_empty() || host.starts_with(':')) {
            return Err(invalid("the store's URL lacks a host"));
        }
        if kind.is_empty() && hosts.contains(',') {
            return Err(invalid("a single Redis has one host"));
        }
        if kind == "sentinel" && path.split('/').next().is_none_or(str::is_empty) {
            return Err(invalid("the store's URL lacks the master's name after the sentinels"));
        }
        if hosts.contains('?') {
            return Err(invalid("the store's URL has a `?` without a `/` before it"));
        }
        // What stands there may be a password, if the @ behind it was forgotten.
        if !hosts.split(',').all(has_port_or_none) {
            return Err(invalid("the store's URL has a port that is none, or a login without an @ behind it"));
        }
        if kind == "cluster" && !matches!(path, "" | "0") {
            return Err(invalid("a cluster has only database 0"));
        }
        let database = if kind == "sentinel" { path.split_once('/').map_or("", |(_, rest)| rest) } else { path };
        let database = database.split('?').next().unwrap_or_default().trim_matches('/');
        if !database.is_empty() && database.parse::<i64>().is_err() {
            return Err(invalid("the store's URL has a database that is no number"));
        }
        Ok(Self::Redis(text.to_owned()))
    }
}

/// Checks what stands after `unix://`: `[user:password@]/path/to/socket[?db=n]`.
fn socket(rest: &str) -> Result<(), &'static str> {
    let (authority, path) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
    if !authority.is_empty() && !authority.ends_with('@') {
        return Err("the path of the socket does not begin with a slash");
    }
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    if path.len() < 2 {
        return Err("the path of the socket is missing");
    }
    match query.strip_prefix("db=") {
        Some(number) if number.parse::<i64>().is_ok() => Ok(()),
        Some(_) => Err("the store's URL has a database that is no number"),
        None if query.is_empty() => Ok(()),
        None => Err("the socket's URL has settings other than `db`"),
    }
}

/// Whether what stands behind a host is a port, or nothing.
fn has_port_or_none(host: &str) -> bool {
    let behind = match host.strip_prefix('[') {
        Some(address) => address.split_once(']').map(|(_, behind)| behind),
        None => Some(host.find(':').map_or("", |colon| &host[colon..])),
    };
    behind.is_some_and(|behind| matches!(behind, "" | ":") || behind.strip_prefix(':').is_some_and(is_port))
}

fn is_port(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok()
}

pub(super) fn is_host_name(text: &str) -> bool {
    !text.is_empty()
        && text.split('.').all(|label| {
            !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
        })
}
