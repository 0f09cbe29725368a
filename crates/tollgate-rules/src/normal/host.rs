//! Hosts: a name or an address, with an optional port.
//!
//! A host has one form: in lower case, without its port and trailing dot. An IPv6 address is in its shortest text, and
//! one that stands for an IPv4 address is that address.

use std::borrow::Cow;
use std::net::{IpAddr, Ipv6Addr};

use http::header::HOST;
use tollgate_http::Headers;

use super::{ReadErrors, Unreadable, only};
use crate::Facts;
use crate::named_key::{InvalidPart, shown};

/// The longest DNS name.
pub(crate) const MAX_HOST_BYTES: usize = 253;

/// Rejects a `Host` that is not a host name, an IPv4 address or an IPv6 address in brackets, with an optional port.
///
/// Frameworks truncate an invalid host at different places: some read `node.test:x` as `node.test`. This is stricter
/// than RFC 3986: registered names have no percent escapes or sub-delimiters.
///
/// # Errors
///
/// If the host is invalid.
pub fn check_host(host: &[u8]) -> Result<(), Unreadable> {
    Host::read(host).map(drop).ok_or(Unreadable::InvalidHost)
}

/// Returns `true` if two spellings name one host: in any case, with or without the final dot, and with or without the
/// default port of the scheme. If the scheme is unknown, a missing port equals every other. Invalid hosts equal none.
#[must_use]
pub fn is_same_host(one: &[u8], other: &[u8], default_port: Option<u16>) -> bool {
    let (Some(one), Some(other)) = (Host::read(one), Host::read(other)) else { return false };
    let port = |host: &Host<'_>| host.port.or(default_port);
    let same_port = match (port(&one), port(&other)) {
        (Some(one), Some(other)) => one == other,
        _ => true,
    };
    same_port && (one.name.eq_ignore_ascii_case(other.name) || one.form() == other.form())
}

/// Records an error if the `Host` header names another host than the target of the request. The service may read either.
pub(crate) fn check_only_host(facts: &Facts<'_>, errors: &ReadErrors) {
    let (Some(own), Some(headers)) = (facts.own_host(), facts.all_headers()) else { return };
    let mut others = headers.get_all(&HOST);
    if others.any(|other| !is_same_host(own.as_bytes(), other, facts.default_port())) {
        errors.note(Unreadable::SeveralHosts);
    }
}

/// Returns the normal form of a request's host. An invalid host, or several differing ones, are recorded as an error.
pub(crate) fn host<'a>(facts: &Facts<'a>, errors: &ReadErrors) -> Option<Cow<'a, str>> {
    let given = match facts.own_host() {
        Some(host) => {
            check_only_host(facts, errors);
            host.as_bytes()
        }
        None => only_host(facts.all_headers()?, errors)?,
    };
    match Host::read(given) {
        Some(host) => host.form(),
        None => {
            errors.note(Unreadable::InvalidHost);
            let name = facts.host_name()?;
            // Rules that refuse nothing are still found by it.
            Some(Cow::Owned(name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()))
        }
    }
}

/// Returns the normal form of a host that a caller names.
///
/// # Errors
///
/// If it is not a host.
pub(crate) fn named(value: &[u8]) -> Result<Cow<'_, str>, InvalidPart> {
    Host::read(value).and_then(|host| host.form()).ok_or_else(|| {
        let fix = match std::str::from_utf8(value).ok().and_then(|text| text.parse::<Ipv6Addr>().ok()) {
            Some(address) => format!("write [{address}]"),
            None => "write a name such as api.example.com, or an address".to_owned(),
        };
        InvalidPart::new(format!("`{}` is not a host", shown(value)), fix)
    })
}

/// Returns the normal form of a pattern for hosts, in which `*` matches anything.
///
/// # Errors
///
/// If the normal form of no host matches it. A limit with such a pattern would count nothing.
pub(crate) fn pattern(text: &str) -> Result<Cow<'_, str>, InvalidPart> {
    let invalid =
        |problem: &str, fix: &str| InvalidPart::new(format!("host `{}` {problem}", shown(text.as_bytes())), fix);
    if text.contains("://") {
        return Err(invalid("is a URL", "write the host alone, such as api.example.com"));
    }
    let address_bytes = match text.rfind(']') {
        Some(end) => end + 1,
        // The end of the address is part of `*`.
        None if text.starts_with('[') && text.ends_with('*') => text.len(),
        None => 0,
    };
    let (address, rest) = text.split_at(address_bytes);
    match rest.split_once(':') {
        Some(_) if text.parse::<Ipv6Addr>().is_ok() => {}
        Some((_, port)) if port.contains(':') => {
            return Err(invalid("is not an address", "put the address in brackets, as in [2001:db8:*]"));
        }
        Some((name, _)) => {
            let fix = format!("write {}", shown(format!("{address}{name}").as_bytes()));
            return Err(invalid("has a port, but ports are not compared", &fix));
        }
        None => {}
    }
    if !text.contains('*') {
        return named(text.as_bytes());
    }
    let may_be_in_host = |byte: u8| IN_NAMES[usize::from(byte)] || matches!(byte, b'*' | b'[' | b':' | b']');
    if !text.bytes().all(may_be_in_host) {
        return Err(invalid("is not a host", "write a name such as api.example.com or *.example.com"));
    }
    Ok(Cow::Owned(text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase()))
}

/// Returns the normal form of a valid host without a port and a trailing dot.
pub(crate) fn form(name: &str) -> Cow<'_, str> {
    let literal = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    if let Some(address) = literal.and_then(|address| address.parse::<Ipv6Addr>().ok()) {
        let text = match address.to_canonical() {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        };
        return if text == name { Cow::Borrowed(name) } else { Cow::Owned(text) };
    }
    if name.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Cow::Owned(name.to_ascii_lowercase());
    }
    Cow::Borrowed(name)
}

/// Returns the normal form of the value of a `Host` header. An invalid one stays.
pub(super) fn text(value: &[u8]) -> Cow<'_, [u8]> {
    match Host::read(value).and_then(|host| host.form()) {
        None => Cow::Borrowed(value),
        Some(Cow::Borrowed(name)) => Cow::Borrowed(name.as_bytes()),
        Some(Cow::Owned(name)) => Cow::Owned(name.into_bytes()),
    }
}

/// Returns the `Host` header. Several differing values are recorded as an error.
fn only_host<'a>(headers: Headers<'a>, errors: &ReadErrors) -> Option<&'a [u8]> {
    if headers.has_no_repeats() {
        return headers.get_named(&HOST);
    }
    only(headers.get_all(&HOST), errors, || Unreadable::SeveralHosts)
}

/// A valid host.
struct Host<'h> {
    /// The name without the trailing dot, or the address.
    name: &'h [u8],
    port: Option<u16>,
    /// Whether the name is an address, or has letters in upper case.
    needs_form: bool,
}

impl<'h> Host<'h> {
    /// Reads a host with an optional port. Returns `None` if it is invalid.
    fn read(host: &'h [u8]) -> Option<Self> {
        if let [b'[', rest @ ..] = host {
            let end = rest.iter().position(|byte| *byte == b']')?;
            std::str::from_utf8(&rest[..end]).ok()?.parse::<std::net::Ipv6Addr>().ok()?;
            let (name, port) = host.split_at(end + 2);
            return Some(Self { name, port: port_of(port)?, needs_form: true });
        }
        let mut needs_form = false;
        let is_end = |byte: &u8| {
            needs_form |= byte.is_ascii_uppercase();
            !IN_NAMES[usize::from(*byte)]
        };
        let name_bytes = host.iter().position(is_end).unwrap_or(host.len());
        let (name, port) = host.split_at(name_bytes);
        let name = name.strip_suffix(b".").unwrap_or(name);
        let is_name = !name.is_empty() && name.len() <= MAX_HOST_BYTES && !matches!(name, [b'.', ..] | [.., b'.']);
        if is_name { Some(Self { name, port: port_of(port)?, needs_form }) } else { None }
    }

    /// Returns the normal form of the name.
    fn form(&self) -> Option<Cow<'h, str>> {
        let name = std::str::from_utf8(self.name).ok()?;
        Some(if self.needs_form { form(name) } else { Cow::Borrowed(name) })
    }
}

/// Reads the text behind the name: nothing, or a colon with an optional port. Returns `None` if it is invalid.
#[expect(clippy::option_option, reason = "whether the text is valid, and then whether there is a port")]
fn port_of(text: &[u8]) -> Option<Option<u16>> {
    match text {
        [] | [b':'] => Some(None),
        [b':', digits @ ..] => {
            let mut port = 0_u16;
            for digit in digits {
                let value = digit.is_ascii_digit().then(|| u16::from(digit - b'0'))?;
                port = port.checked_mul(10)?.checked_add(value)?;
            }
            Some(Some(port))
        }
        _ => None,
    }
}

/// The bytes of host names, in a table because every request has one.
static IN_NAMES: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0;
    while byte < table.len() {
        let letter = byte as u8;
        table[byte] = letter.is_ascii_alphanumeric() || matches!(letter, b'-' | b'.' | b'_');
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_a_host_have_one_form() {
        for (host, expected) in [
            ("API.example.com.:80", "api.example.com"),
            ("[0::1]", "[::1]"),
            ("[2001:DB8::0007]:443", "[2001:db8::7]"),
            ("[::ffff:192.0.2.1]", "192.0.2.1"),
            ("192.0.2.1", "192.0.2.1"),
        ] {
            assert_eq!(named(host.as_bytes()).unwrap(), expected);
            assert_eq!(named(expected.as_bytes()).unwrap(), expected);
        }
        for (host, fix) in
            [("::1", "write [::1]"), ("a b", "write a name"), ("", "write a name"), ("a:x", "write a name")]
        {
            assert!(named(host.as_bytes()).unwrap_err().fix.starts_with(fix), "{host}");
        }
    }

    #[test]
    fn the_host_of_a_request_is_in_lower_case_even_if_it_is_invalid() {
        for (given, expected, error) in [
            ("API.test:80", "api.test", None),
            ("api.test.", "api.test", None),
            ("API.test:x", "api.test:x", Some(Unreadable::InvalidHost.into())),
            ("API..", "api", Some(Unreadable::InvalidHost.into())),
        ] {
            let errors = ReadErrors::default();
            assert_eq!(host(&Facts::new("GET", "/").host(given), &errors).as_deref(), Some(expected), "{given}");
            assert_eq!(errors.take(), error, "{given}");
        }
    }

    #[test]
    fn one_host_has_several_spellings() {
        for (one, other, default) in [
            ("h", "H", None),
            ("h.example", "H.Example.", None),
            ("h", "h:", Some(80)),
            ("h", "h:80", Some(80)),
            ("h:443", "h.", Some(443)),
            ("h:080", "h:80", None),
            ("h", "h:81", None),
            ("[::A]:80", "[0::a]", Some(80)),
        ] {
            assert!(is_same_host(one.as_bytes(), other.as_bytes(), default), "{one} {other}");
            assert!(is_same_host(other.as_bytes(), one.as_bytes(), default), "{other} {one}");
        }
        for (one, other, default) in [
            ("h", "i", None),
            ("h", "h.h", None),
            ("h", "h:81", Some(80)),
            ("h", "h:80", Some(443)),
            ("h:80", "h:81", None),
            ("h", "h:x", None),
            ("h", "", None),
            ("", "", None),
            ("a@h", "a@h", None),
        ] {
            assert!(!is_same_host(one.as_bytes(), other.as_bytes(), default), "{one} {other}");
            assert!(!is_same_host(other.as_bytes(), one.as_bytes(), default), "{other} {one}");
        }
    }

    #[test]
    fn hosts_are_names_or_addresses_with_an_optional_port() {
        let longest = format!("{}.example.com", "a.".repeat(120));
        for host in [
            "h",
            "node.test",
            "node.test.",
            "NODE.test:80",
            "node.test:",
            "my_service:8080",
            "10.0.0.1:65535",
            "[::1]",
            "[2001:db8::7]:443",
            &longest,
        ] {
            assert_eq!(check_host(host.as_bytes()), Ok(()), "{host}");
        }
        let too_long = format!("{}.example.com", "a.".repeat(125));
        for host in [
            "",
            ".",
            "..",
            ".a",
            "a..",
            ":80",
            "node.test:x",
            "node.test:80:90",
            "node.test:65536",
            "node.test: 80",
            "[node.test]",
            "[::1",
            "[::1]x",
            "[::1]:x",
            "::1",
            "a@b",
            "a/b",
            "a b",
            "a%2eb",
            "a,b",
            "a;b",
            "é",
            "a\\b",
            "*",
            &too_long,
        ] {
            assert_eq!(check_host(host.as_bytes()), Err(Unreadable::InvalidHost), "{host}");
        }
    }
}
