//! Refuses requests that a browser sends on behalf of another web site.
//!
//! A page on any site can make its visitors' browsers send requests to addresses that only they can reach, such as
//! 127.0.0.1. Browsers mark them with `Origin` and `Sec-Fetch-Site`. With DNS rebinding, a site resolves its name to
//! itself first and to such an address later. The request then looks like one of the same site, but its `Host` is still
//! that name. So only hosts that no web site can have are served: IP addresses, `localhost`, names without a dot such
//! as those of containers, names that public DNS cannot contain such as those of Kubernetes, and the names in the rule
//! file.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn};
use axum::response::IntoResponse;

use super::error_body::{ErrorBody, quoted};

/// The hosts that a listener serves, in addition to IP addresses, `localhost` and other local names.
#[derive(Clone, Debug)]
pub(crate) struct Hosts {
    /// Names, or `*.` and a suffix.
    listed: Arc<[String]>,
    /// The setting that lists them.
    setting: &'static str,
}

impl Hosts {
    /// Creates the list from the hosts of a rule file and the name in the listener's address.
    pub(crate) fn new<'l>(
        setting: &'static str,
        listed: impl IntoIterator<Item = &'l str>,
        listen: Option<&'l str>,
    ) -> Self {
        let listed = listed.into_iter().chain(listen.map(without_port));
        Self { listed: listed.map(str::to_ascii_lowercase).collect(), setting }
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
        let name = without_port(host).to_ascii_lowercase();
        let name = name.strip_suffix('.').unwrap_or(&name);
        let address = name.strip_prefix('[').and_then(|v6| v6.strip_suffix(']')).unwrap_or(name);
        let is_listed = |listed: &String| match listed.strip_prefix('*') {
            Some(ending) => name.len() > ending.len() && name.ends_with(ending),
            None => name == listed,
        };
        address.parse::<IpAddr>().is_ok() || is_local_name(name) || self.listed.iter().any(is_listed)
    }
}

/// Suffixes of names that public DNS never contains: reserved by RFC 6761 (`localhost`), RFC 6762 (`local`, and with it
/// Kubernetes's `cluster.local`), RFC 8375 (`home.arpa`) and ICANN (`internal`), and the `NAME.NAMESPACE.svc` of
/// Kubernetes: `svc` is not a top-level domain.
const LOCAL_ENDINGS: [&str; 5] = [".localhost", ".local", ".internal", ".home.arpa", ".svc"];

/// Returns whether no web site can have this name. Names without a dot belong to a local network.
fn is_local_name(name: &str) -> bool {
    let is_label = |label: &str| {
        !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    let has_local_ending = |ending: &str| name.strip_suffix(ending).is_some_and(|rest| rest.split('.').all(is_label));
    is_label(name) || LOCAL_ENDINGS.into_iter().any(has_local_ending)
}

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
    let text = |name| headers.get(name).map(readable);
    hosts.check(uri, headers)?;
    let is_own = |origin: &str| {
        named_hosts(uri, headers).any(|host| origin.split_once("://").is_some_and(|(_, own)| own == host))
    };
    let cross_site = |sent: &str, value: &str| ErrorBody {
        status: StatusCode::FORBIDDEN,
        error: "cross_site",
        message: format!(
            "{sent} {} is of another site: send the request from a server, not from a web page",
            quoted(value)
        ),
    };
    if let Some(origin) = text(header::ORIGIN).filter(|origin| !is_own(origin)) {
        return Err(cross_site("Origin", origin));
    }
    let site = text(HeaderName::from_static("sec-fetch-site"));
    if let Some(site) = site.filter(|site| !matches!(*site, "same-origin" | "none")) {
        return Err(cross_site("Sec-Fetch-Site", site));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(headers: &[(&'static str, &'static str)]) -> Option<u16> {
        let listed = ["limits.example.com", "*.internal.example.com"];
        let hosts = Hosts::new("service.http.hosts", listed, Some("tollgate.example.com:8090"));
        let headers =
            headers.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        check(&Uri::from_static("/v1/check"), &headers.collect(), &hosts).err().map(|refusal| refusal.status.as_u16())
    }

    #[test]
    fn local_and_listed_hosts_are_served() {
        for host in [
            "127.0.0.1:8090",
            "[::1]:8090",
            "[::1]",
            "10.1.2.3",
            "localhost",
            "LocalHost:8090",
            "a.localhost",
            "redis-1:8090",
            "tollgate.prod.svc:8090",
            "tollgate.prod.svc.cluster.local",
            "Tollgate.prod.svc.cluster.local.",
            "metrics.corp.internal",
            "nas.home.arpa",
            "limits.example.com:8090",
            "Limits.Example.com.",
            "a.b.internal.example.com",
            "tollgate.example.com",
        ] {
            assert_eq!(refused(&[("host", host)]), None, "{host}");
        }
        assert_eq!(refused(&[]), None, "HTTP/1.0");
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
            "a b.local",
            "arpa.home",
            "",
            "a b",
        ] {
            assert_eq!(refused(&[("host", host)]), Some(421), "{host}");
        }
    }

    #[test]
    fn requests_of_other_sites_are_refused() {
        let host = ("host", "127.0.0.1:8090");
        for (headers, wanted) in [
            ([host, ("origin", "https://evil.example")], Some(403)),
            ([host, ("origin", "null")], Some(403)),
            ([host, ("origin", "http://127.0.0.1:3000")], Some(403)),
            ([host, ("origin", "http://127.0.0.1:8090")], None),
            ([host, ("sec-fetch-site", "cross-site")], Some(403)),
            ([host, ("sec-fetch-site", "same-site")], Some(403)),
            ([host, ("sec-fetch-site", "same-origin")], None),
            ([host, ("sec-fetch-site", "none")], None),
        ] {
            assert_eq!(refused(&headers), wanted, "{headers:?}");
        }
    }
}
