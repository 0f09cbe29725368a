//! Families of rate limit headers, as clients expect them.
//! Also the error for settings of responses that cannot be used.

use std::fmt;
use std::str::FromStr;

use tollgate::internal::is_control_or_format;

/// A family of rate limit headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HeaderFamily {
    /// `X-RateLimit-Limit`, `X-RateLimit-Remaining`, and `X-RateLimit-Reset` in seconds since the Unix epoch.
    Legacy,
    /// `RateLimit-Limit`, `RateLimit-Remaining`, `RateLimit-Reset` in seconds from now, and
    /// `RateLimit-Policy: 100;w=60`, of draft-ietf-httpapi-ratelimit-headers-06.
    Draft6,
    /// `RateLimit: limit=100, remaining=50, reset=30` and `RateLimit-Policy: 100;w=60`, of version 07 of the draft.
    Draft7,
    /// `RateLimit: "per-user";r=50;t=30` and `RateLimit-Policy: "per-user";q=100;w=60`, of version 11 of the draft.
    Ietf,
}

impl HeaderFamily {
    /// All families, oldest first.
    pub const ALL: [Self; 4] = [Self::Legacy, Self::Draft6, Self::Draft7, Self::Ietf];

    /// Returns the family's name in the rule file.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Legacy => "legacy",
            Self::Draft6 => "draft6",
            Self::Draft7 => "draft7",
            Self::Ietf => "ietf",
        }
    }

    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

impl fmt::Display for HeaderFamily {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

impl FromStr for HeaderFamily {
    type Err = InvalidResponse;

    fn from_str(name: &str) -> Result<Self, InvalidResponse> {
        Self::ALL.into_iter().find(|family| family.name() == name).ok_or_else(|| {
            let problem = format!("`{}` is not a header family", shown(name));
            InvalidResponse::new("headers", problem, "use legacy, draft6, draft7 or ietf")
        })
    }
}

/// The set of header families that responses carry. The default is `legacy` and `ietf`.
///
/// The drafts use the same field names with different syntax: `RateLimit-Policy` is in three families and `RateLimit`
/// in two. Such a field is written in the syntax of the newest family in the set.
///
/// ```
/// use tollgate_http::{Families, HeaderFamily};
///
/// let families = Families::from_names(["legacy", "draft6"])?;
/// assert!(families.has(HeaderFamily::Draft6) && !families.has(HeaderFamily::Ietf));
/// # Ok::<(), tollgate_http::InvalidResponse>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Families(u8);

impl Families {
    /// No family: only refusals have a header, `Retry-After`.
    pub const NONE: Self = Self(0);

    /// Returns the set of the families with these names.
    ///
    /// # Errors
    ///
    /// If a name is unknown. The error lists the known names.
    pub fn from_names<'n>(names: impl IntoIterator<Item = &'n str>) -> Result<Self, InvalidResponse> {
        names.into_iter().map(str::parse::<HeaderFamily>).collect()
    }

    /// Returns `true` if the set contains `family`.
    #[must_use]
    pub const fn has(self, family: HeaderFamily) -> bool {
        self.0 & family.bit() != 0
    }
}

impl Default for Families {
    fn default() -> Self {
        [HeaderFamily::Legacy, HeaderFamily::Ietf].into_iter().collect()
    }
}

impl FromIterator<HeaderFamily> for Families {
    fn from_iter<I: IntoIterator<Item = HeaderFamily>>(families: I) -> Self {
        families.into_iter().fold(Self::NONE, |set, family| Self(set.0 | family.bit()))
    }
}

impl fmt::Debug for Families {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_set().entries(HeaderFamily::ALL.into_iter().filter(|family| self.has(*family))).finish()
    }
}

/// Headers or a body that cannot be sent: the invalid field, the problem, and the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidResponse {
    field: &'static str,
    problem: String,
    fix: String,
}

/// Length of an invalid text in an error: enough to find it, and short enough for one line.
const MAX_SHOWN: usize = 40;

impl InvalidResponse {
    pub(super) fn new(field: &'static str, problem: String, fix: impl Into<String>) -> Self {
        Self { field, problem, fix: fix.into() }
    }

    /// Returns the invalid field, by its name in the rule file: `headers`, `template`,
    /// `content_type` or `origins`.
    #[must_use]
    pub fn field(&self) -> &str {
        self.field
    }

    /// Returns the problem.
    #[must_use]
    pub fn problem(&self) -> &str {
        &self.problem
    }

    /// Returns the fix.
    #[must_use]
    pub fn fix(&self) -> &str {
        &self.fix
    }
}

impl fmt::Display for InvalidResponse {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.problem, self.fix)
    }
}

impl std::error::Error for InvalidResponse {}

impl From<InvalidResponse> for tollgate::InvalidLimit {
    fn from(InvalidResponse { field, problem, fix }: InvalidResponse) -> Self {
        Self::new(field, problem, fix)
    }
}

/// Returns an invalid text for an error message: truncated, and without control and format characters, which could
/// disturb a terminal.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(MAX_SHOWN).map(|letter| if is_control_or_format(letter) { ' ' } else { letter }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_is_read_by_the_name_it_prints() {
        for family in HeaderFamily::ALL {
            assert_eq!(family.to_string().parse(), Ok(family));
            let others = HeaderFamily::ALL.into_iter().filter(|other| *other != family);
            assert!(others.into_iter().all(|other| !Families::from_iter([family]).has(other)), "{family}");
        }
    }

    #[test]
    fn an_unknown_family_lists_the_known_ones() {
        let error = Families::from_names(["legacy", "draft\u{1b}8"]).unwrap_err();
        assert_eq!(
            (error.field(), error.to_string().as_str()),
            ("headers", "`draft 8` is not a header family: use legacy, draft6, draft7 or ietf")
        );
    }
}
