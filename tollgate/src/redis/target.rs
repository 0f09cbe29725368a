//! The URL of a store.
//!
//! `redis://[user:password@]host[:port][/db]`, `rediss://…` for TLS, `redis+cluster://h1:7001,h2:7002`,
//! `redis+sentinel://h1:26379,h2:26379/mymaster[/db]`, the last two with `rediss+…` too, and
//! `unix://[user:password@]/path/to/socket[?db=n]`.

use std::fmt;
use std::path::Path;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};

use super::ConnectError;
use super::dial::Address;

/// A parsed URL.
pub(super) struct Target {
    pub(super) servers: Servers,
    pub(super) tls: bool,
    /// The login at servers that hold keys.
    pub(super) login: RedisConnectionInfo,
}

pub(super) enum Servers {
    Single(Address),
    Sentinel { sentinels: Vec<Address>, service: String },
    Cluster(Vec<Address>),
}

const FORMS: &str = "use redis://host:6379, rediss://host:6379, redis+cluster://h1:7001,h2:7002, \
                     redis+sentinel://h1:26379,h2:26379/mymaster or unix:///path/to/socket";

impl Target {
    pub(super) fn parse(url: &str) -> Result<Self, ConnectError> {
        let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong("the store's URL has no scheme"))?;
        if scheme == "unix" {
            return Self::socket(rest);
        }
        let (base, form) = scheme.split_once('+').unwrap_or((scheme, ""));
        if base != "redis" && base != "rediss" {
            return Err(wrong(&format!("`{scheme}` is not a URL scheme of a store")));
        }
        let (credentials, rest) = rest.rsplit_once('@').map_or(("", rest), |(before, after)| (before, after));
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        if hosts.split(',').any(|host| host.is_empty() || host.starts_with(':')) {
            return Err(wrong("a host is missing in the store's URL"));
        }
        let login = if credentials.is_empty() { String::new() } else { format!("{credentials}@") };
        let info = |login: &str, host: &str, db: &str| {
            let url = format!("{base}://{login}{host}/{db}");
            // Do not repeat the parser's message: it might show the password.
            url.into_connection_info()
                .map_err(|_| wrong(&format!("`{host}/{db}` is not a valid host, port and database")))
        };
        let tls = base == "rediss";
        let made =
            |servers: Servers, login: &ConnectionInfo| Ok(Self { servers, tls, login: login.redis_settings().clone() });
        match form {
            "" if hosts.contains(',') => Err(wrong("the URL of a single Redis has more than one host")),
            "" => {
                let info = info(&login, hosts, path)?;
                made(Servers::Single(address(&info)?), &info)
            }
            "cluster" if !matches!(path, "" | "0") => Err(wrong("a cluster has only database 0")),
            "cluster" => {
                let nodes = hosts.split(',').map(|host| info(&login, host, "")).collect::<Result<Vec<_>, _>>()?;
                let addresses = nodes.iter().map(address).collect::<Result<_, _>>()?;
                let any = nodes.first().ok_or_else(|| wrong("a host is missing in the store's URL"))?;
                made(Servers::Cluster(addresses), any)
            }
            "sentinel" => {
                let (service, db) = path.split_once('/').unwrap_or((path, ""));
                if service.is_empty() {
                    return Err(wrong("the master's name is missing after the sentinels"));
                }
                let sentinel = |host: &str| address(&info("", &with_port(host), "")?);
                let sentinels = hosts.split(',').map(sentinel).collect::<Result<_, _>>()?;
                // Only its login is used: the sentinels have the master's address.
                let master = info(&login, "master", db)?;
                made(Servers::Sentinel { sentinels, service: service.to_owned() }, &master)
            }
            other => Err(wrong(&format!("`redis+{other}` is not a URL scheme of a store"))),
        }
    }

    /// Parses the URL of a Unix socket: `[user:password@]/path[?db=n]`.
    fn socket(rest: &str) -> Result<Self, ConnectError> {
        let (authority, path) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
        let login = match authority {
            "" => "",
            login if login.ends_with('@') => login,
            _ => return Err(wrong("the path of the socket does not begin with a slash")),
        };
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        if path.len() < 2 {
            return Err(wrong("the path of the socket is missing"));
        }
        let db = match query {
            "" => "",
            query => query.strip_prefix("db=").ok_or_else(|| wrong("the socket's URL has settings other than `db`"))?,
        };
        // Only the login and the database are used.
        let info = format!("redis://{login}localhost/{db}").into_connection_info();
        let info = info.map_err(|_| wrong("the socket's URL has an invalid login or database"))?;
        let servers = Servers::Single(Address::Unix(Path::new(path).into()));
        Ok(Self { servers, tls: false, login: info.redis_settings().clone() })
    }
}

fn address(info: &ConnectionInfo) -> Result<Address, ConnectError> {
    match info.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, insecure: false, .. } => {
            Ok(Address::tcp(host.as_str(), *port))
        }
        ConnectionAddr::TcpTls { .. } => Err(wrong("certificates are always verified, `#insecure` cannot be used")),
        _ => Err(wrong("the store's URL has no host")),
    }
}

/// Shows hosts and ports, and never the user or the password.
impl fmt::Display for Target {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts = |all: &[Address]| all.iter().map(Address::to_string).collect::<Vec<_>>().join(", ");
        match &self.servers {
            Servers::Single(address) => address.fmt(out),
            Servers::Sentinel { sentinels, service } => write!(out, "{service} of sentinels {}", hosts(sentinels)),
            Servers::Cluster(nodes) => out.write_str(&hosts(nodes)),
        }
    }
}

fn with_port(host: &str) -> String {
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
    if has_port { host.to_owned() } else { format!("{host}:26379") }
}

fn wrong(problem: &str) -> ConnectError {
    ConnectError::new(problem, FORMS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_understood() {
        let parse = |url: &str| Target::parse(url).expect("a store");
        let single = parse("redis://ann:s3cret@example:6380/3");
        assert!(matches!(&single.servers, Servers::Single(address) if address.to_string() == "example:6380"));
        assert_eq!((single.tls, single.login.db(), single.login.username()), (false, 3, Some("ann")));
        let cluster = parse("rediss+cluster://u:p@a:7001,b:7002");
        assert!(matches!(&cluster.servers, Servers::Cluster(nodes) if nodes.len() == 2));
        assert_eq!((cluster.tls, cluster.login.password()), (true, Some("p")));
        let sentinel = parse("redis+sentinel://a,b:26380/mymaster/2");
        let Servers::Sentinel { sentinels, service } = sentinel.servers else { panic!("sentinel") };
        assert_eq!(sentinels.iter().map(Address::to_string).collect::<Vec<_>>(), ["a:26379", "b:26380"]);
        assert_eq!((service.as_str(), sentinel.login.db()), ("mymaster", 2));
        let socket = parse("unix://ann:s3cret@/run/redis@1.sock?db=3");
        assert!(matches!(&socket.servers, Servers::Single(address) if address.to_string() == "/run/redis@1.sock"));
        assert_eq!(
            (socket.login.db(), socket.login.username(), socket.login.password()),
            (3, Some("ann"), Some("s3cret"))
        );
    }

    #[test]
    fn a_url_is_shown_without_its_credentials() {
        for (url, shown) in [
            ("redis://ann:hunter2@example/3", "example:6379"),
            ("redis+cluster://:hunter2@a:7001,b:7002", "a:7001, b:7002"),
            ("redis+sentinel://:hunter2@a,b:26380/mymaster/2", "mymaster of sentinels a:26379, b:26380"),
            ("unix://ann:hunter2@/run/redis.sock", "/run/redis.sock"),
        ] {
            assert_eq!(Target::parse(url).unwrap().to_string(), shown);
        }
    }

    #[test]
    fn a_wrong_url_is_refused_without_repeating_the_password() {
        for url in ["", "localhost:6379", "http://h", "redis://", "redis://:6379", "redis+sentinel://h", "redis+x://h"]
        {
            assert!(Target::parse(url).is_err(), "{url}");
        }
        for url in [
            "redis://u:hunter2@h:99999999",
            "redis+cluster://u:hunter2@h:1/7",
            "redis://u:hunter2@h/x",
            "unix://u:hunter2@h/s",
        ] {
            let error = Target::parse(url).err().expect("a wrong URL").to_string();
            assert!(!error.contains("hunter2") && error.contains(": use redis://"), "{error}");
        }
    }
}
