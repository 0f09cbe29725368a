//! Hosts: a name or an address, with an optional port.

use http::header::HOST;

use super::{ReadErrors, Unreadable, only};
use crate::http::Headers;
use crate::rules::Facts;

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

/// Returns the host of a request without its port and trailing dot. An invalid host, or several differing ones, are
/// recorded as an error.
pub(in crate::rules) fn host<'a>(facts: &Facts<'a>, errors: &ReadErrors) -> Option<&'a str> {
    let given = match facts.own_host() {
        Some(host) => host.as_bytes(),
        None => only_host(facts.all_headers()?, errors)?,
    };
    match host_name(given) {
        Some(name) => std::str::from_utf8(name).ok(),
        None => {
            errors.note(Unreadable::InvalidHost);
            facts.host_name()
        }
    }
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
