//! Hosts: a name or an address, with an optional port.
//!
//! A host has one form: in lower case, without its port and trailing dot. An IPv6 address is in its shortest text, and
//! one that stands for an IPv4 address is that address.

use std::borrow::Cow;
use std::net::{IpAddr, Ipv6Addr};

use http::header::HOST;

use super::{ReadErrors, Unreadable, only};
use crate::http::Headers;
use crate::rules::Facts;
use crate::rules::named_key::{InvalidPart, shown};

/// The longest DNS name.
pub(in crate::rules) const MAX_HOST_BYTES: usize = 253;

/// Rejects a `Host` that is not a host name, an IPv4 address or an IPv6 address in brackets, with an optional port.
///
/// Frameworks truncate an invalid host at different places: some read `node.test:x` as `node.test`. This is stricter
/// than RFC 3986: registered names have no percent escapes or sub-delimiters.
///
/// # Errors
///
/// If the host is invalid.
pub fn check_host(host: &[u8]) -> Result<(), Unreadable> {
    host_name(host).map(drop).ok_or(Unreadable::InvalidHost)
}

/// Returns the normal form of a request's host. An invalid host, or several differing ones, are recorded as an error.
pub(in crate::rules) fn host<'a>(facts: &Facts<'a>, errors: &ReadErrors) -> Option<Cow<'a, str>> {
    let given = match facts.own_host() {
        Some(host) => host.as_bytes(),
        None => only_host(facts.all_headers()?, errors)?,
    };
    match host_name(given) {
        Some(name) => std::str::from_utf8(name).ok().map(form),
        None => {
            errors.note(Unreadable::InvalidHost);
            facts.host_name().map(Cow::Borrowed)
        }
    }
}

/// Returns the normal form of a host that a caller names.
///
/// # Errors
///
/// If it is not a host.
pub(in crate::rules) fn named(value: &[u8]) -> Result<Cow<'_, str>, InvalidPart> {
    let name = host_name(value).and_then(|name| std::str::from_utf8(name).ok());
    name.map(form).ok_or_else(|| {
        let fix = match std::str::from_utf8(value).ok().and_then(|text| text.parse::<Ipv6Addr>().ok()) {
            Some(address) => format!("write [{address}]"),
            None => "write a name such as api.example.com, or an address".to_owned(),
        };
        InvalidPart::new(format!("`{}` is not a host", shown(value)), fix)
    })
}

/// Returns the normal form of a valid host without a port and a trailing dot.
pub(in crate::rules) fn form(name: &str) -> Cow<'_, str> {
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

/// Returns the `Host` header. Several differing values are recorded as an error.
fn only_host<'a>(headers: Headers<'a>, errors: &ReadErrors) -> Option<&'a [u8]> {
    if headers.has_no_repeats() {
        return headers.get_named(&HOST);
    }
    only(headers.get_all(&HOST), errors, || Unreadable::InvalidHost)
}

/// Returns a host without its port and trailing dot, or `None` if it is invalid.
fn host_name(host: &[u8]) -> Option<&[u8]> {
    if let [b'[', rest @ ..] = host {
        let end = rest.iter().position(|byte| *byte == b']')?;
        let address = std::str::from_utf8(&rest[..end]).ok().and_then(|text| text.parse::<std::net::Ipv6Addr>().ok());
        let (name, port) = host.split_at(end + 2);
        return (address.is_some() && is_port(port)).then_some(name);
    }
    let name_bytes = host.iter().position(|byte| !IN_NAMES[usize::from(*byte)]).unwrap_or(host.len());
    let (name, port) = host.split_at(name_bytes);
    let name = name.strip_suffix(b".").unwrap_or(name);
    let is_name = !name.is_empty() && name.len() <= MAX_HOST_BYTES && !matches!(name, [b'.', ..] | [.., b'.']);
    (is_name && is_port(port)).then_some(name)
}

/// Returns `true` for an empty text, or a colon with an optional port.
fn is_port(text: &[u8]) -> bool {
    match text {
        [] => true,
        [b':', digits @ ..] => {
            let value = digits.iter().try_fold(0_u32, |value, byte| {
                byte.is_ascii_digit().then(|| value.saturating_mul(10).saturating_add(u32::from(byte - b'0')))
            });
            value.is_some_and(|value| value <= u32::from(u16::MAX))
        }
        _ => false,
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
