//! Networks, addresses to listen on, and the URLs of upstreams and stores.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use ipnet::IpNet;

use super::super::problem::{InvalidValue, shown};
use super::form;

/// A network such as `10.0.0.0/8`, or a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cidr(IpNet);

impl fmt::Display for Cidr {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(out)
    }
}

form! {
    Cidr { format: "cidr", noun: "a network", example: "10.0.0.0/8", pattern: "^[0-9A-Fa-f:.]+(/[0-9]+)?$" }
}

impl Cidr {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Self(address.into()));
        }
        let invalid = |problem: &str| {
            let problem = format!("`{}` is not a network{problem}", shown(text));
            InvalidValue::new(problem, "write an address, or a network such as 10.0.0.0/8 or 2001:db8::/32")
        };
        let (address, bits) = text.split_once('/').ok_or_else(|| invalid(""))?;
        let address: IpAddr =
            address.parse().map_err(|_| invalid(", because the part before the `/` is not an address"))?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        // `IpNet` would accept `/+8`.
        let bits = Some(bits).filter(|bits| bits.bytes().all(|byte| byte.is_ascii_digit()));
        let bits: Option<u8> = bits.and_then(|bits| bits.parse().ok()).filter(|bits| *bits <= most);
        let net = bits.and_then(|bits| IpNet::new(address, bits).ok());
        let net =
            net.ok_or_else(|| invalid(&format!(", because the part after the `/` is not a number from 0 to {most}")))?;
        if net.addr() != net.network() {
            let problem = format!("`{}` has host bits set", shown(text));
            return Err(InvalidValue::new(
                problem,
                format!("write {} for the network, or {address} alone", net.trunc()),
            ));
        }
        Ok(Self(net))
    }

    pub(crate) fn net(self) -> IpNet {
        self.0
    }
}

form! {
    /// An address to listen on: `127.0.0.1:8080`, `[::]:8080`, `localhost:8080`.
    text Address { format: "address", noun: "an address and a port", example: "127.0.0.1:8080", pattern: "^.+:[0-9]+$" }
}

impl Address {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        if text.parse::<SocketAddr>().is_ok() {
            return Ok(Self(text.to_owned()));
        }
        let problem = format!("`{}` is not an address and port", shown(text));
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

    pub(crate) fn new(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// Returns whether only this machine reaches the address.
    pub fn is_loopback(&self) -> bool {
        match self.0.parse::<SocketAddr>() {
            Ok(address) => address.ip().to_canonical().is_loopback(),
            Err(_) => self.0.rsplit_once(':').is_some_and(|(host, _)| host.eq_ignore_ascii_case("localhost")),
        }
    }

    /// Returns whether the system chooses the port.
    pub(crate) fn is_any_port(&self) -> bool {
        self.0.ends_with(":0")
    }
}

impl FromStr for Address {
    /// The problem and the fix.
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::read(text).map_err(|invalid| invalid.to_string())
    }
}

/// The built-in echo server.
const ECHO: &str = "echo";

form! {
    /// The URL of an upstream: `http://127.0.0.1:8081`, `https://api.internal`, `h2c://127.0.0.1:50051`, or `echo`.
    text Upstream {
        format: "upstream", noun: "a URL", example: "http://127.0.0.1:8081",
        pattern: "^(https?|h2c)://.+$|^echo$"
    }
}

impl Upstream {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        let invalid = |problem: &str| {
            InvalidValue::new(format!("the upstream {problem}"), "write a URL such as http://127.0.0.1:8081")
        };
        if text == ECHO {
            return Ok(Self(text.to_owned()));
        }
        let rest = ["http://", "https://", "h2c://"].iter().find_map(|scheme| text.strip_prefix(scheme));
        let rest = rest.ok_or_else(|| invalid("has no http://, https:// or h2c://"))?;
        let uri: http::Uri = text.parse().map_err(|_| invalid("is not a URL"))?;
        if rest.contains('@') {
            return Err(invalid("contains a user or password, which is not supported"));
        }
        if rest.contains(['?', '#']) {
            return Err(invalid("contains a query or fragment, which is not supported"));
        }
        // `Uri` ignores an invalid port, and the default port would be used.
        let host = uri.host().unwrap_or_default();
        let port = uri.authority().and_then(|authority| authority.as_str().strip_prefix(host)).unwrap_or_default();
        let is_good = port.is_empty() || port.strip_prefix(':').is_some_and(is_port);
        if host.is_empty() || !is_good {
            return Err(invalid("has no host, or an invalid port"));
        }
        if uri.port_u16() == Some(0) {
            return Err(invalid("has port 0, which cannot be connected to"));
        }
        Ok(Self(text.to_owned()))
    }

    /// Returns whether it is the built-in echo server, which returns the request.
    pub fn is_echo(&self) -> bool {
        self.0 == ECHO
    }

    /// Returns one spelling for all equivalent URLs.
    pub(crate) fn normal(&self) -> String {
        let Ok(uri) = self.0.parse::<http::Uri>() else { return self.0.clone() };
        let scheme = uri.scheme_str().unwrap_or_default();
        let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
        let host = uri.host().unwrap_or_default().to_ascii_lowercase();
        format!("{scheme}://{host}:{port}{}", uri.path().trim_end_matches('/'))
    }
}

/// The store of the counts: memory, or the URL of a Redis.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum StoreUrl {
    /// The memory of this process.
    #[default]
    Memory,
    /// Redis or Valkey, by a URL for `tollgate::redis`. It may contain a password.
    Redis(String),
}

/// The parts of a store's URL.
struct Parts<'u> {
    scheme: &'u str,
    /// `user:password`.
    login: Option<&'u str>,
    rest: &'u str,
}

/// Leaves out the URL: its password must not reach a log through `{:?}`.
impl fmt::Debug for StoreUrl {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(if *self == Self::Memory { "Memory" } else { "Redis(…)" })
    }
}

/// The notation of a rule file, without the user and password.
impl fmt::Display for StoreUrl {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.without_login() {
            Some((scheme, rest)) => write!(out, "{scheme}://{rest}"),
            None => out.write_str("memory"),
        }
    }
}

form! {
    StoreUrl {
        format: "store", noun: "memory or the URL of a Redis", example: "redis://127.0.0.1:6379",
        pattern: r"^(memory|rediss?(\+cluster|\+sentinel)?://.+|unix://.+)$"
    }
}

impl StoreUrl {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
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
        let (scheme, rest) =
            text.split_once("://").ok_or_else(|| invalid("the store is neither `memory` nor a URL"))?;
        if scheme == "unix" {
            return socket(rest).map(|()| Self::Redis(text.to_owned())).map_err(invalid);
        }
        let (base, kind) = scheme.split_once('+').unwrap_or((scheme, ""));
        if !matches!(base, "redis" | "rediss") || !matches!(kind, "" | "cluster" | "sentinel") || scheme.ends_with('+')
        {
            return Err(invalid(&format!("`{}` is not a scheme of a store", shown(scheme))));
        }
        let rest = rest.rsplit_once('@').map_or(rest, |(_, hosts)| hosts);
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        if hosts.split(',').any(|host| host.is_empty() || host.starts_with(':')) {
            return Err(invalid("the store's URL has no host"));
        }
        if kind.is_empty() && hosts.contains(',') {
            return Err(invalid("the URL of a single Redis has more than one host"));
        }
        if kind == "sentinel" && path.split('/').next().is_none_or(str::is_empty) {
            return Err(invalid("the store's URL has no master name after the sentinels"));
        }
        if hosts.contains('?') {
            return Err(invalid("the store's URL has a `?` without a `/` before it"));
        }
        // The message must not repeat the text: it may be a password whose @ was forgotten.
        if !hosts.split(',').all(has_port_or_none) {
            return Err(invalid("the store's URL has an invalid port, or credentials not followed by `@`"));
        }
        if kind == "cluster" && !matches!(path, "" | "0") {
            return Err(invalid("a cluster has only database 0"));
        }
        let database = if kind == "sentinel" { path.split_once('/').map_or("", |(_, rest)| rest) } else { path };
        let database = database.split('?').next().unwrap_or_default().trim_matches('/');
        if !database.is_empty() && database.parse::<i64>().is_err() {
            return Err(invalid("the store's URL has a database that is not a number"));
        }
        Ok(Self::Redis(text.to_owned()))
    }

    /// Returns whether the URL contains a user or a password.
    pub fn has_login(&self) -> bool {
        self.parts().is_some_and(|parts| parts.login.is_some())
    }

    pub(crate) fn has_user(&self) -> bool {
        let login = self.parts().and_then(|parts| parts.login);
        login.is_some_and(|login| !login.split(':').next().unwrap_or_default().is_empty())
    }

    pub(crate) fn has_password(&self) -> bool {
        self.parts().and_then(|parts| parts.login).is_some_and(|login| login.contains(':'))
    }

    pub(crate) fn is_tls(&self) -> bool {
        matches!(self, Self::Redis(url) if url.starts_with("rediss"))
    }

    pub(crate) fn has_sentinels(&self) -> bool {
        self.parts().is_some_and(|parts| parts.scheme.ends_with("+sentinel"))
    }

    /// Returns the scheme and the rest, without the user and the password.
    pub(crate) fn without_login(&self) -> Option<(&str, &str)> {
        self.parts().map(|parts| (parts.scheme, parts.rest))
    }

    fn parts(&self) -> Option<Parts<'_>> {
        let Self::Redis(url) = self else { return None };
        let (scheme, rest) = url.split_once("://")?;
        // The path of a socket may contain an @.
        let end = if scheme == "unix" { rest.find('/')? } else { rest.len() };
        let at = rest[..end].rfind('@');
        let (login, rest) = at.map_or((None, rest), |at| (Some(&rest[..at]), &rest[at + 1..]));
        Some(Parts { scheme, login, rest })
    }
}

/// Checks the part after `unix://`: `[user:password@]/path/to/socket[?db=n]`.
fn socket(rest: &str) -> Result<(), &'static str> {
    let (authority, path) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
    if !authority.is_empty() && !authority.ends_with('@') {
        return Err("the path of the socket does not start with a slash");
    }
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    if path.len() < 2 {
        return Err("the path of the socket is missing");
    }
    match query.strip_prefix("db=") {
        Some(number) if number.parse::<i64>().is_ok() => Ok(()),
        Some(_) => Err("the store's URL has a database that is not a number"),
        None if query.is_empty() => Ok(()),
        None => Err("the socket's URL has parameters other than `db`"),
    }
}

/// Returns whether a host is followed by a port or by nothing.
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
