//! Regular expressions of a rule file, with a bound on the memory of each and of all together.
//!
//! Matching takes linear time for any pattern and text. Compiling takes time and memory in proportion to the size of the
//! compiled pattern, which can be thousands of times that of its text: `\w{4}` takes more than 64 KiB.

use regex::{Regex, RegexBuilder};

/// Memory of one compiled pattern: far more than any path needs.
pub const MAX_PATTERN_BYTES: usize = 256 << 10;

/// Memory of all compiled patterns of a file: thousands of patterns that people write, or 128 of the largest. They take
/// about a second to compile.
const MAX_FILE_BYTES: usize = 32 << 20;

/// The sizes that patterns are counted with. The regex crate takes a bound, but does not report a size, so a pattern
/// counts with the smallest bound that it fits into.
const SIZES: [usize; 4] = [4 << 10, 16 << 10, 64 << 10, MAX_PATTERN_BYTES];

/// The memory that is left for the patterns of a file.
#[derive(Clone, Copy, Debug)]
pub struct PatternBudget {
    left: usize,
}

impl Default for PatternBudget {
    fn default() -> Self {
        Self { left: MAX_FILE_BYTES }
    }
}

/// Why a pattern cannot be used.
#[derive(Debug)]
pub enum PatternError {
    /// It is not a regular expression, for this reason.
    Syntax(String),
    /// It takes more than [`MAX_PATTERN_BYTES`].
    TooLarge,
    /// It does not fit beside the other patterns of the file.
    FileTooLarge,
}

/// The problem of patterns that do not fit into the budget, and its fix.
pub const FILE_TOO_LARGE: (&str, &str) = (
    "the regular expressions of the file take more than 32 MiB together",
    "use fewer of them, repeat less in them, or use globs of paths",
);

impl PatternBudget {
    /// Compiles a pattern, and takes its size from the budget.
    pub fn compile(&mut self, text: &str) -> Result<Regex, PatternError> {
        let mut builder = RegexBuilder::new(text);
        builder.dfa_size_limit(MAX_PATTERN_BYTES);
        for size in SIZES {
            // The syntax is checked first, so an invalid pattern is reported even if nothing is left.
            match builder.size_limit(size.min(self.left)).build() {
                Ok(pattern) => {
                    // The bound of the crate does not apply to a plain text, which compiles to nothing larger.
                    self.left = self.left.checked_sub(size).ok_or(PatternError::FileTooLarge)?;
                    return Ok(pattern);
                }
                Err(regex::Error::CompiledTooBig(_)) if size > self.left => return Err(PatternError::FileTooLarge),
                Err(regex::Error::CompiledTooBig(_)) => {}
                // The crate draws the pattern with a marker below it, and describes the problem in the last line.
                Err(error) => {
                    let drawn = error.to_string();
                    let reason = drawn.lines().last().unwrap_or_default().trim_start_matches("error: ");
                    return Err(PatternError::Syntax(reason.to_owned()));
                }
            }
        }
        Err(PatternError::TooLarge)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small budget, because compiling takes long without optimisation.
    fn budget() -> PatternBudget {
        PatternBudget { left: 1 << 20 }
    }

    #[test]
    fn patterns_share_a_budget() {
        let mut budget = budget();
        assert!(matches!(budget.compile("("), Err(PatternError::Syntax(reason)) if reason == "unclosed group"));
        assert!(matches!(budget.compile(r"\w{50}"), Err(PatternError::TooLarge)));
        let small = (0..).take_while(|_| budget.compile("^/api/v[0-9]+/(users|orders)$").is_ok()).count();
        assert_eq!(small, (1 << 20) / SIZES[0]);
        assert!(matches!(budget.compile("a"), Err(PatternError::FileTooLarge)));
        assert!(matches!(budget.compile("("), Err(PatternError::Syntax(_))), "problems of others are still found");
    }

    #[test]
    fn large_patterns_use_up_the_budget_sooner() {
        let mut budget = budget();
        let large = (0..).take_while(|_| budget.compile(r"\w{4}").is_ok()).count();
        assert_eq!(large, (1 << 20) / MAX_PATTERN_BYTES);
    }
}
