//! Parses one element of `Forwarded` (RFC 7239), whose `for` parameter names the hop.
//!
//! Parsing is strict, because an invalid element ends the walk and no client is mistaken for another. It is lenient in
//! two things that proxies do and that cannot mislead: blanks around semicolons, and unquoted addresses.

use std::net::IpAddr;

use super::address;

/// Returns the address in `for`, or `None` if it is missing, obfuscated or repeated, or if the element is invalid.
pub(super) fn address(element: &[u8]) -> Option<IpAddr> {
    let mut found = None;
    let mut rest = element;
    loop {
        let pair = Pair::read(rest.trim_ascii_start())?;
        if pair.name.eq_ignore_ascii_case(b"for") && found.replace(pair.value).is_some() {
            return None;
        }
        match pair.behind.trim_ascii_start() {
            [] => break,
            [b';', behind @ ..] => rest = behind,
            _ => return None,
        }
        // A semicolon may end the element.
        if rest.trim_ascii_start().is_empty() {
            break;
        }
    }
    address::hop_address(found?)
}

struct Pair<'a> {
    name: &'a [u8],
    /// The value without its quotes. Escapes are kept: no address has any, so such a value does not parse.
    value: &'a [u8],
    behind: &'a [u8],
}

impl<'a> Pair<'a> {
    fn read(text: &'a [u8]) -> Option<Self> {
        let (name, rest) = text.split_at(text.iter().position(|byte| *byte == b'=')?);
        let rest = rest.get(1..)?;
        if name.is_empty() || !name.iter().copied().all(is_token) {
            return None;
        }
        let (value, behind) = match rest {
            [b'"', quoted @ ..] => until_quote(quoted)?,
            bare => {
                let end = bare.iter().position(|byte| !is_bare(*byte)).unwrap_or(bare.len());
                bare.split_at(end)
            }
        };
        Some(Self { name, value, behind })
    }
}

/// Splits a text at its closing quote.
fn until_quote(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut at = 0;
    loop {
        match text.get(at)? {
            b'"' => return Some((text.get(..at)?, text.get(at + 1..)?)),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Excludes quotes and backslashes, which appear in a quoted text that was split at a comma.
fn is_bare(byte: u8) -> bool {
    is_token(byte) || matches!(byte, b'[' | b']' | b':')
}
