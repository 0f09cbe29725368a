//! One element of `Forwarded` (RFC 7239): pairs of which `for` names the hop.
//!
//! Strict, for what cannot be read ends the walk, and nobody is taken for somebody else. Lenient in two things that
//! proxies do and that cannot mislead: blanks around semicolons, and addresses that should have been quoted.

use std::net::IpAddr;

use super::address;

/// The address behind `for`; none if it is missing, hidden, given twice, or if anything in the element is not legal.
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
    address::parse(found?)
}

struct Pair<'a> {
    name: &'a [u8],
    /// Without its quotes. Escapes stand as they are: no address has any, so it will not be read as one.
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

/// What stands before the closing quote, and what behind it.
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

/// Quotes and backslashes are not among them: in a piece of a quoted text that a comma divided, they tell.
fn is_bare(byte: u8) -> bool {
    is_token(byte) || matches!(byte, b'[' | b']' | b':')
}
