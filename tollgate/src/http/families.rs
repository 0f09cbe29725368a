//! Which headers tell a client what is left: four families that clients in the world look for.

use std::fmt;
use std::str::FromStr;

use super::error::{InvalidAnswer, shown};

/// One way to tell a client what is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HeaderFamily {
    /// `X-RateLimit-Limit`, `X-RateLimit-Remaining`, and `X-RateLimit-Reset` in seconds since the Unix epoch.
    Legacy,
    /// `RateLimit-Limit`, `RateLimit-Remaining`, `RateLimit-Reset` in seconds from now, and
    /// `RateLimit-Policy: 100;w=60`, of draft-ietf-httpapi-ratelimit-headers-06.
    Draft6,
    /// `RateLimit: limit=100, remaining=50, reset=30` and `RateLimit-Policy: 100;w=60`, of the draft's
    /// version 07.
    Draft7,
    /// `RateLimit: "per-user";r=50;t=30` and `RateLimit-Policy: "per-user";q=100;w=60`, of the draft's
    /// version 11.
    Ietf,
}

impl HeaderFamily {
    /// All of them, oldest first.
    pub const ALL: [Self; 4] = [Self::Legacy, Self::Draft6, Self::Draft7, Self::Ietf];

    /// The name it has in a rule file.
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
    type Err = InvalidAnswer;

    fn from_str(name: &str) -> Result<Self, InvalidAnswer> {
        Self::ALL.into_iter().find(|family| family.name() == name).ok_or_else(|| {
            let problem = format!("`{}` is not a family of headers", shown(name));
            InvalidAnswer::new("headers", problem, "use legacy, draft6, draft7 or ietf")
        })
    }
}

/// The families that answers carry; by default `legacy` and `ietf`.
///
/// The drafts gave the same names to fields of different form: `RateLimit-Policy` is in three families and
/// `RateLimit` in two. A field can have one form only, so it is written in that of the newest family chosen.
///
/// ```
/// use tollgate::http::{Families, HeaderFamily};
///
/// let families = Families::from_names(["legacy", "draft6"])?;
/// assert!(families.has(HeaderFamily::Draft6) && !families.has(HeaderFamily::Ietf));
/// # Ok::<(), tollgate::http::InvalidAnswer>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Families(u8);

impl Families {
    /// None: only refusals say something, in `Retry-After`.
    pub const NONE: Self = Self(0);

    /// The families of these names.
    ///
    /// # Errors
    ///
    /// When one is not the name of a family; the error lists them.
    pub fn from_names<'n>(names: impl IntoIterator<Item = &'n str>) -> Result<Self, InvalidAnswer> {
        names.into_iter().map(str::parse::<HeaderFamily>).collect()
    }

    /// Whether answers carry that family.
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
    fn an_unknown_family_is_told_the_known_ones() {
        let error = Families::from_names(["legacy", "draft\u{1b}8"]).unwrap_err();
        assert_eq!(
            (error.field(), error.to_string().as_str()),
            ("headers", "`draft 8` is not a family of headers; use legacy, draft6, draft7 or ietf")
        );
    }
}
