//! The rule file: text to rules that make sense, or every reason why not.
//!
//! ```
//! use tollgate::rules::file::RuleFile;
//!
//! let text = "limits:\n  - name: per-user\n    key: header:x-user-id\n    capacity: 0\n    algorithm: token_bucket\n";
//! let problems = RuleFile::parse("tollgate.yaml", text).unwrap_err();
//! assert_eq!(
//!     problems.to_string(),
//!     "tollgate.yaml:4:15: capacity 0 admits nothing; use 1 or more, or remove the limit"
//! );
//! ```
//!
//! Four steps, each in a module of its own: `yaml` reads nodes with positions, `shape` holds them against the
//! [`schema`] that the `types` generate, serde makes the types, and `meaning` asks whether they can be meant. Each
//! step goes on after a problem, so that all are told at once.
//!
//! Deliberately not here: opening files, watching them, and compiling rules for matching.

mod expressions;
mod forms;
mod meaning;
mod node;
mod problem;
mod schema;
mod shape;
mod types;
mod yaml;

use std::borrow::Cow;
use std::fmt;
use std::ops::Deref;

use self::node::Node;
use self::problem::Findings;

pub use self::forms::{
    Address, ByteSize, Cidr, ContentType, CostText, Expression, HeaderName, HostGlob, KeyPart, LimitName, MethodName,
    PathGlob, PlanSource, RateText, Span, StoreUrl, TokenSource, Upstream,
};
pub use self::problem::{Position, Problem, Problems, Severity};
pub use self::schema::schema;
pub use self::types::{
    AdminRule, AlgorithmName, Align, BanRule, BodyName, BodyRule, ConsistencyName, CostRule, FailurePolicy,
    GatewayRule, HeaderFamily, JwtAlgorithm, JwtRule, LimitRule, ListRule, Listener, MatchRule, Missing, Modes,
    Numbers, Overflow, OverrideRule, RefillMode, RouteRule, RuleFile, ServiceRule, Several, TemplateRule,
};

/// A rule file that was read, and where each part of it stands.
#[derive(Clone)]
pub struct Parsed {
    rules: RuleFile,
    root: Node,
    warnings: Problems,
}

impl RuleFile {
    /// Reads a rule file. The name is only for messages.
    ///
    /// # Errors
    ///
    /// When the file is no YAML, has keys that nobody knows, or says what cannot be meant. All of that is told at
    /// once, with positions.
    pub fn parse(file_name: &str, text: impl AsRef<[u8]>) -> Result<Parsed, Problems> {
        let mut findings = Findings::default();
        let source = decoded(text.as_ref(), &mut findings);
        let parsed = if findings.refused() { None } else { read(&source, &mut findings) };
        let refused = findings.refused();
        let problems = findings.told(file_name, &source);
        match parsed {
            Some((rules, root)) if !refused => Ok(Parsed { rules, root, warnings: problems }),
            _ => Err(problems),
        }
    }
}

impl Parsed {
    /// What was taken although it is hardly what was meant.
    #[must_use]
    pub fn warnings(&self) -> &Problems {
        &self.warnings
    }

    /// The rules, without positions.
    #[must_use]
    pub fn into_rules(self) -> RuleFile {
        self.rules
    }

    /// Where a limit stands in the file, by its place among the limits.
    #[must_use]
    pub fn position_of_limit(&self, index: usize) -> Option<Position> {
        self.rules.limits.get(index)?;
        Some(self.root.get("limits")?.item(index).at)
    }
}

/// The nodes are left out: they repeat the rules, and the password of a store with them.
impl fmt::Debug for Parsed {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Parsed").field("rules", &self.rules).field("warnings", &self.warnings).finish_non_exhaustive()
    }
}

impl Deref for Parsed {
    type Target = RuleFile;

    fn deref(&self) -> &RuleFile {
        &self.rules
    }
}

fn read(source: &str, findings: &mut Findings) -> Option<(RuleFile, Node)> {
    let root = yaml::read(source, findings)?;
    let root = shape::check(root, schema::borrowed(), findings)?;
    match serde_json::from_value::<RuleFile>(root.to_json()) {
        Ok(rules) => {
            meaning::check(&rules, &root, findings);
            Some((rules, root))
        }
        // The shape allows nothing that the types refuse; should it ever, the file is refused all the same.
        Err(error) => {
            findings.error(root.at, format!("the file cannot be read: {error}"), "compare it with the JSON Schema");
            None
        }
    }
}

/// The text without its byte order mark.
fn decoded<'t>(bytes: &'t [u8], findings: &mut Findings) -> Cow<'t, str> {
    let bytes = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes);
    match std::str::from_utf8(bytes) {
        Ok(text) => Cow::Borrowed(text),
        Err(error) => {
            let good = std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default();
            let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
            let line = count(good.matches('\n').count()).saturating_add(1);
            let column = count(good.chars().rev().take_while(|letter| *letter != '\n').count()).saturating_add(1);
            findings.error(Position { line, column }, "the file is not in UTF-8", "save it as UTF-8");
            Cow::Borrowed("")
        }
    }
}
