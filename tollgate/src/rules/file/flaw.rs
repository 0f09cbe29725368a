//! What others find wrong with a file that was read: whoever serves it knows more than its text, such as the files that it
//! names.

use std::fmt;

use super::node::Node;
use super::problem::Findings;
use super::{Parsed, Position, Problems};

/// Something that is wrong with a part of a rule file, found by whoever uses the file.
///
/// Which part that is is said from the inside outwards, so that who finds a flaw need not know where in the file its
/// part is. [`Parsed::problems`] makes of it what the file's own problems are.
///
/// ```
/// use tollgate::rules::file::{Flaw, RuleFile};
///
/// let text = "limits: []\ngateway:\n  routes:\n    - { path: /**, upstream: http://api.internal }\n";
/// let file = RuleFile::parse("tollgate.yaml", text)?;
/// let flaw = Flaw::new("nobody is at http://api.internal", "start it first, or name another").of("upstream");
/// let problems = file.problems([flaw.of(0).of("routes").of("gateway")]);
/// assert_eq!(
///     problems.to_string(),
///     "tollgate.yaml:4:30: nobody is at http://api.internal; start it first, or name another"
/// );
/// # Ok::<(), tollgate::rules::file::Problems>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flaw {
    message: String,
    fix: String,
    /// The inmost first.
    parts: Vec<Part>,
    /// Where it stands, if that is no part.
    at: Option<Position>,
}

/// A part of something in a rule file: made of the key or of the number that it has there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part(Name);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Name {
    Key(String),
    Item(usize),
}

/// What stands under a key.
impl From<&str> for Part {
    fn from(key: &str) -> Self {
        Self(Name::Key(key.to_owned()))
    }
}

/// An item of a list, from 0 on.
impl From<usize> for Part {
    fn from(index: usize) -> Self {
        Self(Name::Item(index))
    }
}

impl Flaw {
    /// What is wrong, and what to do about it.
    #[must_use]
    pub fn new(message: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { message: message.into(), fix: fix.into(), parts: Vec::new(), at: None }
    }

    /// The same flaw of that part, which those that were named before are in. Without any, it is one of the whole file.
    #[must_use]
    pub fn of(mut self, part: impl Into<Part>) -> Self {
        self.parts.push(part.into());
        self
    }

    /// The same flaw at that place, whatever its part: in a comment, for instance.
    #[must_use]
    pub fn at(mut self, place: Position) -> Self {
        self.at = Some(place);
        self
    }

    /// Its part of the file, or of what would have that if it were there.
    fn node<'n>(&self, root: &'n Node) -> &'n Node {
        self.parts.iter().rev().fold(root, |node, Part(name)| match name {
            Name::Key(key) => node.get(key).unwrap_or(node),
            Name::Item(index) => node.item(*index),
        })
    }
}

/// Without its place, which only the file knows.
impl fmt::Display for Flaw {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}; {}", self.message, self.fix)
    }
}

impl Parsed {
    /// Flaws as problems of this file, with their places: that of the part, or of what would have it where it is left out.
    #[must_use]
    pub fn problems(&self, flaws: impl IntoIterator<Item = Flaw>) -> Problems {
        let mut findings = Findings::default();
        for flaw in flaws {
            findings.error(flaw.at.unwrap_or(flaw.node(&self.root).at), flaw.message, flaw.fix);
        }
        findings.told(&self.name, &self.source)
    }
}

#[cfg(test)]
mod tests {
    use super::super::RuleFile;
    use super::*;

    const TEXT: &str = "\
limits: []
gateway:
  routes:
    - { path: /a, upstream: http://a, request_headers: { set: { '0': zero } } }
    - { path: /b, upstream: [http://b, { url: http://c }] }
";

    fn told(flaws: impl IntoIterator<Item = Flaw>) -> String {
        RuleFile::parse("file", TEXT).unwrap().problems(flaws).to_string()
    }

    fn flaw() -> Flaw {
        Flaw::new("bad", "mend it")
    }

    fn of_route(flaw: Flaw, index: usize) -> Flaw {
        flaw.of(index).of("routes").of("gateway")
    }

    #[test]
    fn a_flaw_is_told_at_its_part() {
        assert_eq!(told([flaw()]), "file:1:1: bad; mend it");
        assert_eq!(told([flaw().of("gateway")]), "file:3:3: bad; mend it");
        assert_eq!(told([flaw().of("gateway").at(Position { line: 1, column: 9 })]), "file:1:9: bad; mend it");
        assert_eq!(told([of_route(flaw().of("path"), 1)]), "file:5:15: bad; mend it");
        assert_eq!(told([of_route(flaw().of("url").of(1).of("upstream"), 1)]), "file:5:47: bad; mend it");
    }

    #[test]
    fn a_part_that_is_left_out_is_told_at_what_would_have_it() {
        assert_eq!(told([flaw().of("store")]), "file:1:1: bad; mend it");
        assert_eq!(told([of_route(flaw().of("ca").of("upstream_tls"), 0)]), "file:4:7: bad; mend it");
        assert_eq!(told([of_route(flaw(), 7)]), "file:4:5: bad; mend it");
        // One that is alone need be in no list, and the URL of one is all that is said of it.
        assert_eq!(told([of_route(flaw().of("url").of(0).of("upstream"), 0)]), "file:4:29: bad; mend it");
    }

    #[test]
    fn a_key_may_be_a_number() {
        let of_headers = |flaw: Flaw| of_route(flaw.of("set").of("request_headers"), 0);
        assert_eq!(told([of_headers(flaw().of("0"))]), "file:4:70: bad; mend it");
        assert_eq!(told([of_headers(flaw().of(0))]), "file:4:63: bad; mend it");
    }

    #[test]
    fn flaws_are_told_in_the_order_of_the_file() {
        let flaws = [of_route(flaw(), 1), of_route(flaw(), 0)];
        assert_eq!(flaws[0].to_string(), "bad; mend it");
        assert_eq!(told(flaws), "file:4:7: bad; mend it\nfile:5:7: bad; mend it");
    }
}
