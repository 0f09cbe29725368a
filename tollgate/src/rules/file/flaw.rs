//! What others find wrong with a file that was read: whoever serves it knows more than its text, such as the files that it
//! names.

use std::fmt;

use super::problem::Findings;
use super::{Parsed, Problems};

/// Something that is wrong with a part of a rule file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flaw {
    at: String,
    message: String,
    fix: String,
}

impl Flaw {
    /// What is wrong, of a part that [`at`](Self::at) names.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        Self { at: String::new(), message: message.into(), fix: String::new() }
    }

    /// What to do about it.
    #[must_use]
    pub fn fix(self, fix: impl Into<String>) -> Self {
        Self { fix: fix.into(), ..self }
    }

    /// Which part it is: keys and numbers from the whole to the part, as in `/gateway/routes/0/upstream`. A flaw that is
    /// at a part already is at that part of this one.
    #[must_use]
    pub fn at(self, part: &str) -> Self {
        Self { at: format!("{part}{}", self.at), ..self }
    }
}

impl fmt::Display for Flaw {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}; {}", self.message, self.fix)
    }
}

impl Parsed {
    /// Flaws as problems of this file, with their places: that of a part, or of what would have it where it is left out.
    #[must_use]
    pub fn problems(&self, flaws: impl IntoIterator<Item = Flaw>) -> Problems {
        let mut findings = Findings::default();
        for Flaw { at, message, fix } in flaws {
            let steps = at.split('/').filter(|step| !step.is_empty());
            let part = steps.fold(&self.root, |node, step| match step.parse() {
                Ok(index) => node.item(index),
                Err(_) => node.get(step).unwrap_or(node),
            });
            findings.error(part.at, message, fix);
        }
        findings.told(&self.name, &self.source)
    }
}
