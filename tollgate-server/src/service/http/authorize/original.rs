//! Reads the original request from the request of a proxy.
//!
//! | proxy | method | path and query | host |
//! |---|---|---|---|
//! | Traefik, Caddy | `X-Forwarded-Method` | `X-Forwarded-Uri` | `X-Forwarded-Host` |
//! | nginx, HAProxy | `X-Original-Method` | `X-Original-URI`, or `X-Original-URL` with the host | `X-Original-Host` |
//! | Envoy | its own | its own, after `/v1/authorize` | `Host` |
//!
//! Proxies copy the headers of the client, so a client can add headers of another row. A request with paths of two rows
//! is refused, because only the operator knows which one the proxy wrote. So is a request without a method: a proxy that
//! does not write it would pass on the client's.

use std::net::IpAddr;

use axum::http::request::Parts;
use axum::http::uri::{Authority, Scheme};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use tollgate_rules::internal::{check_host, check_method, hop_address, is_same_host};

use super::PATH;
use crate::service::error_body::{ErrorBody, quoted};

static FORWARDED_URI: HeaderName = HeaderName::from_static("x-forwarded-uri");
static FORWARDED_METHOD: HeaderName = HeaderName::from_static("x-forwarded-method");
static FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
static FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
static ORIGINAL_URI: HeaderName = HeaderName::from_static("x-original-uri");
static ORIGINAL_URL: HeaderName = HeaderName::from_static("x-original-url");
static ORIGINAL_METHOD: HeaderName = HeaderName::from_static("x-original-method");
static ORIGINAL_HOST: HeaderName = HeaderName::from_static("x-original-host");

/// The request that the client sent to the proxy. Its headers are those of the proxy's request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Original {
    pub(super) method: String,
    pub(super) target: String,
    /// `None` if the proxy does not send it.
    pub(super) host: Option<String>,
    /// The address that connected to the proxy; `None` if the proxy does not send it.
    pub(super) peer: Option<IpAddr>,
}

/// The reason why the original request is unknown.
#[derive(Debug)]
pub(super) struct Problem {
    pub(super) error: ErrorBody,
    /// `false` if the proxy is not set up as it should be.
    pub(super) is_by_client: bool,
}

impl Problem {
    fn by_client(message: String) -> Self {
        let error = ErrorBody { status: StatusCode::BAD_REQUEST, error: "invalid_original_request", message };
        Self { error, is_by_client: true }
    }

    fn by_proxy(message: &str) -> Self {
        let message = message.to_owned();
        let error = ErrorBody { status: StatusCode::BAD_REQUEST, error: "original_request_missing", message };
        Self { error, is_by_client: false }
    }
}

/// The header with the original path, if there is exactly one.
#[derive(Clone, Copy)]
enum Source {
    /// The path of the request itself.
    Path,
    ForwardedUri,
    OriginalUri,
    OriginalUrl,
}

impl Source {
    fn of(parts: &Parts) -> Result<Self, Problem> {
        let is_sent = |name: &HeaderName| parts.headers.contains_key(name);
        let sent = [
            (parts.uri.path() != PATH, Self::Path),
            (is_sent(&FORWARDED_URI), Self::ForwardedUri),
            (is_sent(&ORIGINAL_URI), Self::OriginalUri),
            (is_sent(&ORIGINAL_URL), Self::OriginalUrl),
        ];
        let mut sent = sent.into_iter().filter(|(is_sent, _)| *is_sent).map(|(_, source)| source);
        match (sent.next(), sent.next()) {
            (Some(Self::Path), None) if !is_from_envoy(&parts.headers) => Err(Problem::by_proxy(
                "the request has no header of Envoy and no X-Forwarded-For: let the proxy send X-Forwarded-For, or send \
                 the original path in X-Forwarded-Uri to /v1/authorize",
            )),
            (Some(source), None) => Ok(source),
            (None, _) => Err(Problem::by_proxy(
                "the original request is not described: let the proxy send X-Original-URI and X-Original-Method, or \
                 X-Forwarded-Uri and X-Forwarded-Method",
            )),
            (Some(_), Some(_)) => Err(Problem::by_client(
                "the path of the original request is sent in two ways: send one of X-Forwarded-Uri, X-Original-URI, \
                 X-Original-URL or a path after /v1/authorize, and let the proxy remove the others"
                    .to_owned(),
            )),
        }
    }
}

/// Returns whether a header was added that a web page of another site cannot send. Envoy always adds some.
fn is_from_envoy(headers: &HeaderMap) -> bool {
    headers.contains_key(&FORWARDED_FOR) || headers.keys().any(|name| name.as_str().starts_with("x-envoy-"))
}

impl Original {
    /// Removes the description of the original request from the proxy's request, so that the headers of the original
    /// request are left.
    pub(super) fn take(parts: &mut Parts) -> Result<Self, Problem> {
        let source = Source::of(parts)?;
        let original = Self::read(source, parts)?;
        for name in [
            &FORWARDED_URI,
            &FORWARDED_METHOD,
            &ORIGINAL_URI,
            &ORIGINAL_URL,
            &ORIGINAL_METHOD,
            &ORIGINAL_HOST,
            // The original host is among the facts; in most cases this one is the host of this server.
            &header::HOST,
        ] {
            parts.headers.remove(name);
        }
        Ok(original)
    }

    fn read(source: Source, parts: &Parts) -> Result<Self, Problem> {
        let headers = &parts.headers;
        let (method, target, host) = match source {
            Source::Path => (parts.method.as_str(), path_after_prefix(&parts.uri), host(parts)?),
            Source::ForwardedUri => {
                let method = required(headers, &FORWARDED_METHOD, "X-Forwarded-Method")?;
                (method, uri(headers, &FORWARDED_URI)?, single(headers, &FORWARDED_HOST)?)
            }
            Source::OriginalUri => {
                let method = required(headers, &ORIGINAL_METHOD, "X-Original-Method")?;
                (method, uri(headers, &ORIGINAL_URI)?, single(headers, &ORIGINAL_HOST)?)
            }
            Source::OriginalUrl => {
                let method = required(headers, &ORIGINAL_METHOD, "X-Original-Method")?;
                let (host, target) = url(headers)?;
                (method, target, Some(host))
            }
        };
        let refuse = |field: &str, value: &str, problem: &str| {
            Err(Problem::by_client(format!("the {field} {} of the original request {problem}", quoted(value))))
        };
        if let Some(problem) = target_problem(target) {
            return refuse("path", target, problem);
        }
        let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        if method.is_empty() || !method.bytes().all(is_token) || check_method(method, target).is_err() {
            return refuse("method", method, "is not a method of this path: send it as it was sent, such as POST");
        }
        if let Some(host) = host
            && check_host(host.as_bytes()).is_err()
        {
            return refuse("host", host, "is not a host: send a name or an address, with or without a port");
        }
        Ok(Self {
            method: method.to_owned(),
            target: target.to_owned(),
            host: host.map(str::to_owned),
            peer: peer(headers)?,
        })
    }
}

/// Returns the path and query behind the prefix.
fn path_after_prefix(uri: &Uri) -> &str {
    let target = uri.path_and_query().map_or("", |target| target.as_str());
    target.strip_prefix(PATH).unwrap_or_default()
}

fn host(parts: &Parts) -> Result<Option<&str>, Problem> {
    let sent = single(&parts.headers, &header::HOST)?;
    // HTTP/2, or a whole URL as the target.
    let Some(authority) = parts.uri.authority().map(Authority::as_str) else { return Ok(sent) };
    let default_port = if parts.uri.scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 };
    match sent {
        Some(sent) if !is_same_host(sent.as_bytes(), authority.as_bytes(), Some(default_port)) => {
            let sent = quoted(sent);
            Err(Problem::by_client(format!(
                "Host {sent} differs from the host {authority} of the target: send one host"
            )))
        }
        _ => Ok(Some(authority)),
    }
}

/// Returns the only value of a header. Proxies replace what a client sent, so several values are no proxy's.
fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, Problem> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => match text(value) {
            Some(text) => Ok(Some(text)),
            None => Err(Problem::by_client(format!("{name} is not UTF-8: encode it"))),
        },
        _ => Err(Problem::by_client(format!("{name} is sent several times: let the proxy replace it"))),
    }
}

fn text(value: &HeaderValue) -> Option<&str> {
    std::str::from_utf8(value.as_bytes()).ok()
}

fn required<'a>(headers: &'a HeaderMap, name: &HeaderName, spelled: &str) -> Result<&'a str, Problem> {
    single(headers, name)?.ok_or_else(|| {
        Problem::by_proxy(&format!("the method of the original request is missing: let the proxy send {spelled}"))
    })
}

fn uri<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<&'a str, Problem> {
    Ok(single(headers, name)?.unwrap_or_default())
}

/// Returns the host and the path of `X-Original-URL`.
fn url(headers: &HeaderMap) -> Result<(&str, &str), Problem> {
    let url = uri(headers, &ORIGINAL_URL)?;
    let parts = url.split_once("://").and_then(|(_, rest)| Some(rest.split_at(rest.find('/')?)));
    parts.ok_or_else(|| Problem::by_client(format!("X-Original-URL {} is not a URL: send all of it", quoted(url))))
}

/// Returns the problem with a path that no server would receive.
fn target_problem(target: &str) -> Option<&'static str> {
    if target != "*" && !target.starts_with('/') {
        return Some("does not begin with a slash: send the path and the query");
    }
    if target.contains('#') {
        return Some("has a fragment: send it without `#` and the text behind it");
    }
    let is_blank = |byte: u8| byte.is_ascii_whitespace() || byte.is_ascii_control();
    target.bytes().any(is_blank).then_some("has white space or control characters: send it encoded, as it was sent")
}

/// Returns the last address of `X-Forwarded-For`, which the proxy itself has added.
fn peer(headers: &HeaderMap) -> Result<Option<IpAddr>, Problem> {
    let lines = headers.get_all(&FORWARDED_FOR).iter().rev();
    let mut hops = lines.flat_map(|line| line.as_bytes().rsplit(|byte| *byte == b',')).map(<[u8]>::trim_ascii);
    let Some(last) = hops.find(|hop| !hop.is_empty()) else { return Ok(None) };
    match hop_address(last) {
        Some(address) => Ok(Some(address)),
        None => Err(Problem::by_client(format!(
            "the last entry {} of X-Forwarded-For is not an address: let the proxy add the address of its client",
            quoted(&String::from_utf8_lossy(last))
        ))),
    }
}

/// Returns the status for refusals that the query of a proxy's request sets.
///
/// Caddy passes on the client's query, unless it is set up otherwise. A query that is also the original one is
/// therefore ignored, and so is the query of Envoy's form.
pub(super) fn deny_status(parts: &Parts) -> Result<Option<StatusCode>, ErrorBody> {
    let Some(query) = parts.uri.query().filter(|_| parts.uri.path() == PATH) else { return Ok(None) };
    let is_original = |name| {
        let sent = parts.headers.get(name).and_then(text).and_then(|target| target.split_once('?'));
        sent.is_some_and(|(_, original)| original == query)
    };
    if is_original(&FORWARDED_URI) || is_original(&ORIGINAL_URI) || is_original(&ORIGINAL_URL) {
        return Ok(None);
    }
    let mut given = query.split('&').filter_map(|pair| pair.strip_prefix("deny_status="));
    let (Some(first), None) = (given.next(), given.next()) else {
        return if query.contains("deny_status=") { Err(invalid_status(query)) } else { Ok(None) };
    };
    let status =
        Some(first).filter(|text| text.bytes().all(|byte| byte.is_ascii_digit())).and_then(|text| text.parse().ok());
    let status =
        status.filter(|status| (400..600).contains(status)).and_then(|status: u16| StatusCode::from_u16(status).ok());
    status.map(Some).ok_or_else(|| invalid_status(first))
}

fn invalid_status(sent: &str) -> ErrorBody {
    ErrorBody {
        status: StatusCode::BAD_REQUEST,
        error: "invalid_deny_status",
        message: format!("deny_status {} is invalid: send one status from 400 to 599, such as 403", quoted(sent)),
    }
}

#[cfg(test)]
mod tests {
    use axum::http::Request;

    use super::*;

    fn parts(method: &str, uri: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn read(method: &str, uri: &str, headers: &[(&str, &str)]) -> Result<Original, &'static str> {
        Original::take(&mut parts(method, uri, headers)).map_err(|problem| problem.error.error)
    }

    fn original(method: &str, target: &str, host: Option<&str>, peer: Option<&str>) -> Result<Original, &'static str> {
        let peer = peer.map(|peer| peer.parse().unwrap());
        Ok(Original { method: method.to_owned(), target: target.to_owned(), host: host.map(str::to_owned), peer })
    }

    #[test]
    fn each_proxy_describes_the_original_request_in_its_own_way() {
        let forwarded = [
            ("host", "127.0.0.1:8090"),
            ("x-forwarded-method", "POST"),
            ("x-forwarded-uri", "/a%2Fb?x=1"),
            ("x-forwarded-host", "api.example.com"),
            ("x-forwarded-for", "6.6.6.6, 203.0.113.9"),
        ];
        let expected = original("POST", "/a%2Fb?x=1", Some("api.example.com"), Some("203.0.113.9"));
        assert_eq!(read("GET", "/v1/authorize", &forwarded), expected);
        let nginx = [
            ("host", "tollgate"),
            ("x-original-method", "POST"),
            ("x-original-uri", "/a%2Fb?x=1"),
            ("x-original-host", "api.example.com"),
            ("x-forwarded-host", "forged.example.com"),
            ("x-forwarded-method", "GET"),
            ("x-forwarded-for", "203.0.113.9"),
        ];
        assert_eq!(read("GET", "/v1/authorize?deny_status=403", &nginx), expected);
        let ingress = [
            ("x-original-method", "POST"),
            ("x-original-url", "https://api.example.com/a%2Fb?x=1"),
            ("x-forwarded-for", "203.0.113.9"),
        ];
        assert_eq!(read("GET", "/v1/authorize", &ingress), expected);
        let envoy =
            [("host", "api.example.com"), ("x-forwarded-for", "6.6.6.6,203.0.113.9"), ("x-envoy-internal", "true")];
        assert_eq!(read("POST", "/v1/authorize/a%2Fb?x=1", &envoy), expected);
        assert_eq!(
            read("GET", "/v1/authorize/", &[("x-envoy-internal", "true")]),
            original("GET", "/", None, None),
            "the root"
        );
    }

    #[test]
    fn the_description_is_not_among_the_original_headers() {
        let mut parts = parts(
            "GET",
            "/v1/authorize",
            &[("host", "a"), ("x-original-uri", "/"), ("x-original-method", "GET"), ("x-user-id", "ann")],
        );
        Original::take(&mut parts).unwrap();
        assert_eq!(parts.headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["x-user-id"]);
    }

    #[test]
    fn two_descriptions_of_one_request_are_refused() {
        let (method, uri) = (("x-original-method", "GET"), ("x-original-uri", "/"));
        for headers in [
            &[method, uri, ("x-forwarded-uri", "/"), ("x-forwarded-method", "GET")][..],
            &[method, uri, ("x-original-url", "http://a/")],
            &[method, uri, uri],
            &[method, method, uri],
        ] {
            assert_eq!(read("GET", "/v1/authorize", headers), Err("invalid_original_request"), "{headers:?}");
        }
        let beside_path = [method, uri, ("x-forwarded-for", "192.0.2.1")];
        assert_eq!(read("GET", "/v1/authorize/x", &beside_path), Err("invalid_original_request"));
    }

    #[test]
    fn a_proxy_that_describes_half_of_a_request_is_refused() {
        for headers in [
            &[][..],
            &[("x-original-method", "GET")],
            &[("x-original-uri", "/")],
            &[("x-original-uri", "/"), ("x-forwarded-method", "GET")],
            &[("x-forwarded-uri", "/"), ("x-original-method", "GET")],
        ] {
            assert_eq!(read("GET", "/v1/authorize", headers), Err("original_request_missing"), "{headers:?}");
        }
        // A browser can send this one for a page of another site.
        assert_eq!(read("GET", "/v1/authorize/x", &[("accept", "*/*")]), Err("original_request_missing"));
    }

    #[test]
    fn a_request_that_no_server_would_receive_is_refused() {
        let read_with = |name, value| {
            let mut headers = vec![("x-original-uri", "/"), ("x-original-method", "GET")];
            headers.retain(|(known, _)| *known != name);
            headers.push((name, value));
            read("GET", "/v1/authorize", &headers)
        };
        for (name, value) in [
            ("x-original-uri", ""),
            ("x-original-uri", "api"),
            ("x-original-uri", "http://a/"),
            ("x-original-uri", "/a b"),
            ("x-original-uri", "/a#b"),
            ("x-original-uri", "*"),
            ("x-original-method", ""),
            ("x-original-method", "post"),
            ("x-original-method", "GET POST"),
            ("x-original-host", "a/b"),
            ("x-forwarded-for", "192.0.2.1, unknown"),
        ] {
            assert_eq!(read_with(name, value), Err("invalid_original_request"), "{name}: {value}");
        }
        assert!(read_with("x-original-uri", "/stra\u{df}e").is_ok(), "some clients send UTF-8");
        assert!(read_with("x-original-method", "PROPFIND").is_ok());
    }

    #[test]
    fn an_authority_that_differs_from_the_host_header_is_refused() {
        let envoy = |authority: &str, host| {
            let target = format!("http://{authority}/v1/authorize/x");
            read("GET", &target, &[("host", host), ("x-envoy-internal", "true")])
        };
        assert_eq!(envoy("api.example", "API.example.:80"), original("GET", "/x", Some("api.example"), None));
        for host in ["other.example", "api.example:81", "", "api.example:x"] {
            assert_eq!(envoy("api.example", host), Err("invalid_original_request"), "{host}");
        }
    }

    #[test]
    fn only_the_proxy_sets_the_status_of_refusals() {
        let status = |uri: &str, original: &str| {
            let parts = parts("GET", uri, &[("x-forwarded-uri", original)]);
            deny_status(&parts).map(|status| status.map(|status| status.as_u16())).map_err(|error| error.error)
        };
        assert_eq!(status("/v1/authorize", "/"), Ok(None));
        assert_eq!(status("/v1/authorize?deny_status=403", "/"), Ok(Some(403)));
        assert_eq!(status("/v1/authorize?x=1&deny_status=599", "/"), Ok(Some(599)));
        assert_eq!(status("/v1/authorize?deny_status=503", "/?deny_status=503"), Ok(None), "the client's");
        assert_eq!(status("/v1/authorize/?deny_status=503", "/"), Ok(None), "the client's");
        for invalid in ["200", "399", "600", "", "four", "403&deny_status=404", "+403"] {
            let sent = format!("/v1/authorize?deny_status={invalid}");
            assert_eq!(status(&sent, "/"), Err("invalid_deny_status"), "{invalid}");
        }
    }
}
