//! Refuses requests that a browser sends on behalf of another web site.
//!
//! A page on any site can make its visitors' browsers send requests to addresses that only they can reach, such as
//! 127.0.0.1. Browsers mark them with `Origin` and `Sec-Fetch-Site`. With DNS rebinding, a site resolves its name to
//! itself first and to such an address later. The request then looks like one of the same site, but its `Host` is still
//! that name. So only hosts that no web site can have are served: IP addresses, `localhost`, names without a dot such as
//! those of containers and of upstreams of a proxy, and the names in the rule file. A listener that other machines reach
//! also serves names that public DNS cannot contain, such as those of Kubernetes.
//!
//! Any machine of a local network can claim such a name with mDNS. It could reach that listener without a browser, but
//! not one on a loopback address. A page whose host is a local name is of another site, whatever the listener.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn};
use axum::response::IntoResponse;
use tollgate_config::internal::Address;

use super::error_body::{ErrorBody, quoted};

/// The hosts that a listener serves, in addition to IP addresses and `localhost`.
#[derive(Clone, Debug)]
pub(crate) struct Hosts {
    /// Names, or `*.` and a suffix.
    listed: Arc<[String]>,
    /// Whether names of local networks are served.
    serves_network: bool,
    /// The setting that lists them.
    setting: &'static str,
}

impl Hosts {
    /// Creates the list from the hosts of a rule file and the listener's address. Without an address, requests come from
    /// this machine.
    pub(crate) fn new<'l>(
        setting: &'static str,
        listed: impl IntoIterator<Item = &'l str>,
        listen: Option<&'l Address>,
    ) -> Self {
        let serves_network = listen.is_some_and(|address| !address.is_loopback());
        let listed = listed.into_iter().chain(listen.map(|address| without_port(address.as_str())));
        Self { listed: listed.map(str::to_ascii_lowercase).collect(), serves_network, setting }
    }

    /// Refuses a request whose host is not served.
    pub(crate) fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), ErrorBody> {
        // A browser always sends a host, so a request without one is not from a browser.
        let Some(host) = named_hosts(uri, headers).find(|host| !self.serve(host)) else { return Ok(()) };
        let setting = self.setting;
        Err(ErrorBody {
            status: StatusCode::MISDIRECTED_REQUEST,
            error: "unknown_host",
            message: format!(
                "the host {} is not served: use an IP address or localhost, or add it to {setting}",
                quoted(host)
            ),
        })
    }

    /// Returns whether requests for this host are served.
    pub(super) fn serve(&self, host: &str) -> bool {
        match self.owner(host) {
            Owner::Server | Owner::Upstream => true,
            Owner::Network => self.serves_network,
            Owner::Stranger => false,
        }
    }

    /// Returns who can have this host.
    fn owner(&self, host: &str) -> Owner {
        let name = without_port(host).to_ascii_lowercase();
        let name = name.strip_suffix('.').unwrap_or(&name);
        let address = name.strip_prefix('[').and_then(|v6| v6.strip_suffix(']')).unwrap_or(name);
        let is_listed = |listed: &String| match listed.strip_prefix('*') {
            Some(ending) => name.len() > ending.len() && name.ends_with(ending),
            None => name == listed,
        };
        let is_label = |label: &str| {
            !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
        };
        let is_below = |ending: &str| name.strip_suffix(ending).is_some_and(|rest| rest.split('.').all(is_label));
        if address.parse::<IpAddr>().is_ok()
            || name == "localhost"
            || is_below(".localhost")
            || self.listed.iter().any(is_listed)
        {
            Owner::Server
        } else if is_label(name) {
            Owner::Upstream
        } else if NETWORK_ENDINGS.into_iter().any(is_below) {
            Owner::Network
        } else {
            Owner::Stranger
        }
    }
}

/// Who can have a host, and so a page in a browser with this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// This server alone: an address, a name that always means this machine, or a name in the rule file.
    Server,
    /// A container, or an upstream of a proxy: it has no dot.
    Upstream,
    /// Any machine of a local network.
    Network,
    /// Any web site.
    Stranger,
}

/// Suffixes of names that public DNS never contains: reserved by RFC 6762 (`local`, and with it Kubernetes's
/// `cluster.local`), RFC 8375 (`home.arpa`) and ICANN (`internal`), and the `NAME.NAMESPACE.svc` of Kubernetes: `svc` is
/// not a top-level domain.
const NETWORK_ENDINGS: [&str; 4] = [".local", ".internal", ".home.arpa", ".svc"];

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Puts the check in front of a router.
pub(crate) fn guard(router: Router, hosts: Hosts) -> Router {
    router.layer(from_fn(move |request: Request, next: Next| {
        let error = check(request.uri(), request.headers(), &hosts).err();
        async move {
            match error {
                Some(error) => error.into_response(),
                None => next.run(request).await,
            }
        }
    }))
}

/// Returns the text of a header, or a text that no check allows.
fn readable(value: &HeaderValue) -> &str {
    value.to_str().unwrap_or("?")
}

/// Returns the hosts that a request names, in its header and in its target.
fn named_hosts<'a>(uri: &'a Uri, headers: &'a HeaderMap) -> impl Iterator<Item = &'a str> {
    let in_header = headers.get_all(header::HOST).iter().map(readable);
    in_header.chain(uri.authority().map(|authority| authority.as_str()))
}

fn check(uri: &Uri, headers: &HeaderMap, hosts: &Hosts) -> Result<(), ErrorBody> {
    let texts = |name: HeaderName| headers.get_all(name).iter().map(readable);
    hosts.check(uri, headers)?;
    let has_own_host = named_hosts(uri, headers).all(|host| hosts.owner(host) == Owner::Server);
    let cross_site = |sent: &str, value: &str, is_own: bool| {
        let (value, setting) = (quoted(value), hosts.setting);
        let message = if is_own {
            format!(
                "{sent} {value} can be of any machine of the local network: use an address, or add its host to {setting}"
            )
        } else {
            format!("{sent} {value} is of another site: send the request from a server, not from a web page")
        };
        ErrorBody { status: StatusCode::FORBIDDEN, error: "cross_site", message }
    };
    for origin in texts(header::ORIGIN) {
        let authority = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        let is_own = named_hosts(uri, headers).any(|host| authority == Some(host));
        if !is_own || !has_own_host {
            return Err(cross_site("Origin", origin, is_own));
        }
    }
    for site in texts(HeaderName::from_static("sec-fetch-site")) {
        let is_own = site == "same-origin";
        if site != "none" && !(is_own && has_own_host) {
            return Err(cross_site("Sec-Fetch-Site", site, is_own));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused_at(listen: &'static str, headers: &[(&'static str, &'static str)]) -> Option<u16> {
        let listed = ["limits.example.com", "*.internal.example.com"];
        let listen = serde_json::from_value::<Address>(listen.into()).expect("an address");
        let hosts = Hosts::new("service.http.hosts", listed, Some(&listen));
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        check(&Uri::from_static("/v1/check"), &map, &hosts).err().map(|refusal| refusal.status.as_u16())
    }

    const LOOPBACK: [&str; 3] = ["127.0.0.1:8090", "[::1]:8090", "localhost:8090"];

    const NETWORK: [&str; 2] = ["0.0.0.0:8090", "tollgate.example.com:8090"];

    #[test]
    fn own_and_listed_hosts_are_served() {
        for host in [
            "127.0.0.1:8090",
            "[::1]:8090",
            "[::1]",
            "10.1.2.3",
            "localhost",
            "LocalHost:8090",
            "localhost.",
            "a.localhost",
            "limits.example.com:8090",
            "Limits.Example.com.",
            "a.b.internal.example.com",
            "redis-1:8090",
        ] {
            for listen in LOOPBACK.into_iter().chain(NETWORK) {
                assert_eq!(refused_at(listen, &[("host", host)]), None, "{host} at {listen}");
                assert_eq!(refused_at(listen, &[]), None, "HTTP/1.0");
            }
        }
        assert_eq!(refused_at("tollgate.example.com:8090", &[("host", "tollgate.example.com")]), None);
    }

    #[test]
    fn hosts_that_a_web_site_can_have_are_not_served() {
        for host in [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "internal.example.com",
            "tollgate.prod.svc.evil.example",
            "tollgate.prod",
            "evilsvc.example",
            ".local",
            "a..svc",
            "a..localhost",
            "a b.local",
            "arpa.home",
            "",
            "a b",
        ] {
            for listen in LOOPBACK.into_iter().chain(NETWORK) {
                assert_eq!(refused_at(listen, &[("host", host)]), Some(421), "{host} at {listen}");
            }
        }
    }

    /// Any machine there can answer for such a name, first with its own address and then with 127.0.0.1.
    #[test]
    fn names_of_a_local_network_are_served_only_where_its_machines_connect() {
        for host in [
            "evil.local",
            "tollgate.prod.svc:8090",
            "tollgate.prod.svc.cluster.local",
            "Tollgate.prod.svc.cluster.local.",
            "metrics.corp.internal",
            "nas.home.arpa",
        ] {
            for listen in LOOPBACK {
                assert_eq!(refused_at(listen, &[("host", host)]), Some(421), "{host} at {listen}");
            }
            for listen in NETWORK {
                assert_eq!(refused_at(listen, &[("host", host)]), None, "{host} at {listen}");
            }
        }
    }

    #[test]
    fn pages_of_a_local_network_are_of_another_site() {
        for (host, origin) in [
            ("evil.local:8090", "http://evil.local:8090"),
            ("a.internal", "https://a.internal"),
            ("tollgate.prod.svc:8090", "http://tollgate.prod.svc:8090"),
        ] {
            let host = ("host", host);
            assert_eq!(refused_at("0.0.0.0:8090", &[host, ("origin", origin)]), Some(403), "{origin}");
            assert_eq!(refused_at("0.0.0.0:8090", &[host, ("sec-fetch-site", "same-origin")]), Some(403), "{origin}");
            assert_eq!(refused_at("127.0.0.1:8090", &[host, ("origin", origin)]), Some(421), "{origin}");
        }
        for listen in LOOPBACK.into_iter().chain(NETWORK) {
            assert_eq!(refused_at(listen, &[("host", "nas"), ("origin", "http://nas")]), Some(403), "{listen}");
        }
    }

    #[test]
    fn requests_of_other_sites_are_refused() {
        let host = ("host", "127.0.0.1:8090");
        for (headers, wanted) in [
            (&[host, ("origin", "https://evil.example")][..], Some(403)),
            (&[host, ("origin", "null")], Some(403)),
            (&[host, ("origin", "")], Some(403)),
            (&[host, ("origin", "http://127.0.0.1:3000")], Some(403)),
            (&[host, ("origin", "http://localhost:8090")], Some(403)),
            (&[host, ("origin", "chrome-extension://127.0.0.1:8090")], Some(403)),
            (&[host, ("origin", "http://127.0.0.1:8090")], None),
            (&[host, ("origin", "http://127.0.0.1:8090"), ("origin", "https://evil.example")], Some(403)),
            (&[("origin", "http://127.0.0.1:8090")], Some(403)),
            (&[("host", "localhost:8090"), ("origin", "http://localhost:8090")], None),
            (&[("host", "limits.example.com"), ("origin", "https://limits.example.com")], None),
            (&[host, ("sec-fetch-site", "cross-site")], Some(403)),
            (&[host, ("sec-fetch-site", "same-site")], Some(403)),
            (&[host, ("sec-fetch-site", "same-origin"), ("sec-fetch-site", "cross-site")], Some(403)),
            (&[host, ("sec-fetch-site", "same-origin")], None),
            (&[host, ("sec-fetch-site", "none")], None),
        ] {
            for listen in ["127.0.0.1:8090", "0.0.0.0:8090"] {
                assert_eq!(refused_at(listen, headers), wanted, "{headers:?} at {listen}");
            }
        }
    }
}
