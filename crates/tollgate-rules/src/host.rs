//! Hosts, and the patterns that match them.

use std::fmt;

use super::normal::check_host;
use super::normal::host::form;
use super::path::InvalidGlob;

/// The longest DNS name.
const MAX_BYTES: usize = 253;

/// A host pattern: `api.example.com`, or `*.example.com` for every name below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostGlob {
    /// In lower case. For a wildcard, the part after `*.`.
    pub(super) name: Box<str>,
    pub(super) is_wildcard: bool,
}

impl std::str::FromStr for HostGlob {
    type Err = InvalidGlob;

    fn from_str(text: &str) -> Result<Self, InvalidGlob> {
        let invalid = |problem, fix| InvalidGlob::new(text, problem, fix);
        let (name, is_wildcard) = text.strip_prefix("*.").map_or((text, false), |name| (name, true));
        if name.contains("://") {
            return Err(invalid("is a URL", "write the host alone, such as api.example.com"));
        }
        let is_v6 = name.starts_with('[') && name.ends_with(']');
        if name.contains(':') && !is_v6 {
            return Err(invalid("has a port", "hosts are compared without it, so write the name alone"));
        }
        if name.is_empty() || name.len() > MAX_BYTES {
            return Err(invalid("is not a host", "write a name such as api.example.com"));
        }
        if name.contains('*') {
            return Err(invalid("has a star in the middle", "put the star at the front, as in *.example.com"));
        }
        if name.contains(|letter: char| letter.is_whitespace() || letter.is_control() || letter == '/') {
            return Err(invalid("is not a host", "write a name such as api.example.com"));
        }
        if is_v6 && !is_wildcard && check_host(name.as_bytes()).is_err() {
            return Err(invalid("is not an address", "write one such as [2001:db8::7]"));
        }
        Ok(Self { name: form(name.trim_end_matches('.')).into(), is_wildcard })
    }
}

impl HostGlob {
    /// Returns `true` if a host without a port matches, in any case.
    pub(super) fn matches(&self, host: &str) -> bool {
        let host = host.strip_suffix('.').unwrap_or(host);
        if !self.is_wildcard {
            return self.name.eq_ignore_ascii_case(host);
        }
        let Some(cut) = host.len().checked_sub(self.name.len() + 1) else { return false };
        cut > 0 && host.as_bytes()[cut] == b'.' && host.as_bytes()[cut + 1..].eq_ignore_ascii_case(self.name.as_bytes())
    }
}

impl fmt::Display for HostGlob {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}{}", if self.is_wildcard { "*." } else { "" }, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_match_without_regard_to_case() {
        let exact: HostGlob = "API.example.com".parse().unwrap();
        assert!(exact.matches("api.EXAMPLE.com") && exact.matches("api.example.com."));
        assert!(!exact.matches("www.api.example.com") && !exact.matches("example.com"));
        let below: HostGlob = "*.example.com".parse().unwrap();
        assert!(below.matches("a.example.com") && below.matches("A.B.Example.COM"));
        assert!(!below.matches("example.com") && !below.matches(".example.com") && !below.matches("anexample.com"));
    }

    #[test]
    fn an_invalid_host_reports_the_fix() {
        for (text, fix) in [
            ("https://a.com", "write the host alone"),
            ("a.com:80", "without it"),
            ("a.*.com", "star at the front"),
            ("", "such as api.example.com"),
            ("a b", "such as api.example.com"),
        ] {
            let error = text.parse::<HostGlob>().unwrap_err().to_string();
            assert!(error.contains(fix), "{error}");
        }
    }
}
