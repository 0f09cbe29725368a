//! Names of headers in which proxies describe the client and the original request.
//!
//! An upstream trusts these headers because it trusts the proxy in front of it. The gateway drops them unless a trusted
//! proxy sent them, because a client can forge them.

/// Returns `true` for headers in which proxies describe the client or the original request, such as `X-Forwarded-For`,
/// `X-Real-IP`, `CF-Connecting-IP` or `X-Original-URL`. The name is case-insensitive.
///
/// Every character other than a letter or a digit is treated as a hyphen, because CGI, WSGI and PHP map `X-Real-IP` and
/// `X_Real_IP` to the same variable.
///
/// ```
/// use tollgate::internal::is_forwarding_header;
///
/// assert!(is_forwarding_header("X-Forwarded-Prefix"));
/// assert!(is_forwarding_header("x_real_ip"));
/// assert!(!is_forwarding_header("X-User-Id"));
/// ```
#[must_use]
pub fn is_forwarding_header(name: &str) -> bool {
    let is = |expected: &str| reads_as(name, expected);
    // By length, so that most names are compared with few others or none.
    match name.len() {
        // `Proxy` becomes `HTTP_PROXY` in CGI programs, and their own requests then go through it (httpoxy).
        5 => is("proxy"),
        6 => is("x-host"),
        8 => is("x-scheme"),
        9 => is("forwarded") || is("x-real-ip") || is("client-ip") || is("x-arr-ssl"),
        11 => is("x-client-ip") || is("x-forwarded") || is("x-remote-ip") || is("remote-addr"),
        12 => is("x-url-scheme") || is("x-azure-fdid"),
        13 => is("x-remote-addr") || is("x-rewrite-url") || is("x-original-ip") || is("x-client-cert"),
        14 => {
            is("true-client-ip") || is("x-original-url") || is("x-original-uri") || is("x-original-for") || begins(name)
        }
        15 => is("front-end-https") || is("x-original-host") || is("proxy-client-ip") || begins(name),
        16 => {
            is("cf-connecting-ip")
                || is("fastly-client-ip")
                || is("x-azure-clientip")
                || is("x-azure-socketip")
                || is("x-original-proto")
                || is("x-arr-clientcert")
                || begins(name)
        }
        17 => is("x-original-scheme") || is("x-original-prefix") || begins(name),
        18 => is("cf-connecting-ipv6") || is("wl-proxy-client-ip") || begins(name),
        19 => is("x-cluster-client-ip") || is("x-ssl-client-verify") || begins(name),
        24 => is("x-envoy-external-address") || is("x-original-forwarded-for") || begins(name),
        ..12 => false,
        _ => begins(name),
    }
}

/// Returns `true` for `X-Forwarded-*` and for the headers in which a TLS proxy passes on a client certificate.
fn begins(name: &str) -> bool {
    ["x-forwarded-", "x-ssl-client-", "x-original-forwarded-"]
        .iter()
        .any(|family| name.get(..family.len()).is_some_and(|beginning| reads_as(beginning, family)))
}

/// Compares a name with a name in lower case.
fn reads_as(name: &str, expected: &str) -> bool {
    let is_same = |(byte, expected): (&u8, &u8)| match byte {
        byte if byte.is_ascii_alphanumeric() => byte.to_ascii_lowercase() == *expected,
        _ => *expected == b'-',
    };
    name.len() == expected.len() && name.as_bytes().iter().zip(expected.as_bytes()).all(is_same)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwarding_headers_are_recognised_in_any_spelling() {
        for name in [
            "X-Forwarded-For",
            "X-Forwarded-Prefix",
            "X-Forwarded-Port",
            "X-Forwarded-Ssl",
            "X-Forwarded-Server",
            "X-Forwarded-User",
            "X-Forwarded-Client-Cert",
            "X-Forwarded-Tls-Client-Cert-Info",
            "X-Forwarded-By",
            "X-Forwarded",
            "Forwarded",
            "X-Real-IP",
            "X-Client-IP",
            "X-Cluster-Client-IP",
            "True-Client-IP",
            "CF-Connecting-IP",
            "CF-Connecting-IPv6",
            "Fastly-Client-IP",
            "X-Azure-SocketIP",
            "X-Original-URL",
            "X-Rewrite-URL",
            "X-Original-Host",
            "X-Original-Forwarded-For",
            "X-Envoy-External-Address",
            "X-SSL-Client-Cert",
            "X-SSL-Client-Verify",
            "X-SSL-Client-S-DN",
            "Proxy",
        ] {
            assert!(is_forwarding_header(name), "{name}");
            assert!(is_forwarding_header(&name.replace('-', "_")), "{name} with underscores");
            assert!(is_forwarding_header(&name.to_ascii_uppercase().replacen('-', ".", 1)), "{name} with a dot");
        }
    }

    #[test]
    fn other_headers_are_not_forwarding_headers() {
        for name in [
            "",
            "x",
            "Host",
            "Cookie",
            "Authorization",
            "X-User-Id",
            "X-Forwarder",
            "X-Request-Id",
            "User-Agent",
            "Via",
        ] {
            assert!(!is_forwarding_header(name), "{name}");
        }
        assert!(!is_forwarding_header("x-forwarde\u{e9}-for"));
    }
}
