//! The web pages that may read refusals. Without these headers a browser hides status, headers and body from a script.

use ::http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ORIGIN,
};
use ::http::{HeaderName, HeaderValue, Uri};

use super::families::{InvalidResponse, shown};
use super::headers::Headers;

/// The headers that a script may read, besides those that it may always read.
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "retry-after, ratelimit, ratelimit-policy, ratelimit-limit, ratelimit-remaining, ratelimit-reset, \
     x-ratelimit-limit, x-ratelimit-remaining, x-ratelimit-reset, x-request-id, www-authenticate",
);

/// The most headers of a response.
const MOST_HEADERS: usize = 3;

/// The origins whose web pages may read refusals.
///
/// Browsers hide a response of another origin from a script unless the response names the origin of the page. An allowed
/// request gets these headers from the service behind the limiter; a refused one does not reach it.
///
/// ```
/// use tollgate_http::Cors;
///
/// assert!(Cors::origins(["https://shop.example.com"]).is_ok());
/// assert!(Cors::origins(["shop.example.com"]).is_err());
/// ```
#[derive(Clone, Debug)]
pub struct Cors(Origins);

#[derive(Clone, Debug)]
enum Origins {
    Any,
    Listed(Box<[HeaderValue]>),
}

impl Cors {
    /// Every page may read refusals, but not those to requests with cookies.
    #[must_use]
    pub const fn any() -> Self {
        Self(Origins::Any)
    }

    /// Pages of these origins may read refusals, also those to requests with cookies. An origin is a scheme, a host and,
    /// if it is not the scheme's own, a port: `https://shop.example.com`.
    ///
    /// # Errors
    ///
    /// If a text is not an origin as browsers send it. The error has the fix.
    pub fn origins<O: AsRef<str>>(origins: impl IntoIterator<Item = O>) -> Result<Self, InvalidResponse> {
        let listed: Result<_, _> = origins.into_iter().map(|origin| valid_origin(origin.as_ref())).collect();
        listed.map(|listed| Self(Origins::Listed(listed)))
    }

    /// Returns the headers of the response to a request.
    #[doc(hidden)]
    pub fn headers(&self, request: Headers<'_>) -> impl Iterator<Item = (HeaderName, HeaderValue)> + use<> {
        let origin = request.get_named(&ORIGIN).and_then(|origin| match &self.0 {
            Origins::Any => Some((HeaderValue::from_static("*"), false)),
            Origins::Listed(listed) => Some((listed.iter().find(|one| one.as_bytes() == origin)?.clone(), true)),
        });
        let headers = origin.map(|(origin, with_cookies)| -> [Option<(HeaderName, HeaderValue)>; MOST_HEADERS] {
            let cookies = (ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
            [
                Some((ACCESS_CONTROL_ALLOW_ORIGIN, origin)),
                with_cookies.then_some(cookies),
                Some((ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED)),
            ]
        });
        headers.into_iter().flatten().flatten()
    }

    /// Returns the same headers as lines of HTTP/1.1, after others. `None` if there are none.
    #[doc(hidden)]
    pub fn lines(&self, request: Headers<'_>, others: &[u8]) -> Option<Vec<u8>> {
        let mut headers = self.headers(request).peekable();
        headers.peek()?;
        let mut lines = others.to_vec();
        for (name, value) in headers {
            for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
                lines.extend_from_slice(part);
            }
        }
        Some(lines)
    }
}

/// Returns the origin as browsers send it: in lower case, without the port of the scheme and without a path.
fn valid_origin(text: &str) -> Result<HeaderValue, InvalidResponse> {
    let invalid = |fix: String| {
        InvalidResponse::new("origins", format!("`{}` is not an origin as browsers send it", shown(text)), fix)
    };
    let general = || invalid("write a scheme and a host, such as https://shop.example.com".to_owned());
    let uri: Uri = text.parse().map_err(|_| general())?;
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else { return Err(general()) };
    if authority.host().is_empty() || authority.as_str().contains('@') {
        return Err(general());
    }
    let own_port = matches!((scheme, authority.port_u16()), ("https", Some(443)) | ("http", Some(80)));
    let port = authority.port_u16().filter(|_| !own_port).map_or_else(String::new, |port| format!(":{port}"));
    let sent = format!("{scheme}://{}{port}", authority.host().to_ascii_lowercase());
    if sent != text {
        return Err(invalid(format!("write `{}`", shown(&sent))));
    }
    HeaderValue::try_from(sent).map_err(|_| general())
}

#[cfg(test)]
mod tests {
    use ::http::HeaderMap;

    use super::*;

    fn lines(cors: &Cors, origin: Option<&'static str>) -> String {
        let request: HeaderMap = origin.map(|origin| (ORIGIN, HeaderValue::from_static(origin))).into_iter().collect();
        let lines = cors.lines(Headers::from(&request), b"date: x\r\n");
        lines.map_or_else(String::new, |lines| String::from_utf8(lines).expect("text"))
    }

    #[test]
    fn listed_origins_are_repeated_and_may_send_cookies() {
        let cors = Cors::origins(["https://shop.example.com", "http://localhost:3000"]).expect("valid origins");
        let exposed = EXPOSED.to_str().expect("text").to_owned();
        for origin in ["https://shop.example.com", "http://localhost:3000"] {
            let expected = format!(
                "date: x\r\naccess-control-allow-origin: {origin}\r\naccess-control-allow-credentials: true\r\n\
                 access-control-expose-headers: {exposed}\r\n"
            );
            assert_eq!(lines(&cors, Some(origin)), expected);
        }
        for other in [
            None,
            Some("https://shop.example.com.evil.example"),
            Some("http://shop.example.com"),
            Some("https://shop.example.com:8443"),
            Some("null"),
        ] {
            assert_eq!(lines(&cors, other), "", "{other:?}");
        }
    }

    #[test]
    fn any_origin_gets_a_star_and_no_cookies() {
        let any = lines(&Cors::any(), Some("https://a.example"));
        assert!(any.contains("access-control-allow-origin: *\r\n") && !any.contains("credentials"), "{any}");
        assert_eq!(lines(&Cors::any(), None), "");
    }

    #[test]
    fn an_origin_that_no_browser_sends_is_refused_with_the_one_that_it_sends() {
        for (text, fix) in [
            ("https://shop.example.com/", "write `https://shop.example.com`"),
            ("https://shop.example.com/cart", "write `https://shop.example.com`"),
            ("https://Shop.example.com", "write `https://shop.example.com`"),
            ("https://shop.example.com:443", "write `https://shop.example.com`"),
            ("shop.example.com", "write a scheme and a host, such as https://shop.example.com"),
            ("https://user@shop.example.com", "write a scheme and a host, such as https://shop.example.com"),
            ("*", "write a scheme and a host, such as https://shop.example.com"),
            ("null", "write a scheme and a host, such as https://shop.example.com"),
            ("", "write a scheme and a host, such as https://shop.example.com"),
        ] {
            let error = Cors::origins([text]).expect_err(text);
            assert_eq!((error.field(), error.fix()), ("origins", fix), "{text}");
        }
    }
}
