//! The rule file: text to rules that make sense, or every reason why not.
//!
//! ```
//! use tollgate::rules::file::RuleFile;
//!
//! let text = "limits:\n  - name: per-user\n    key: header:x-user-id\n    capacity: 0\n    algorithm: token_bucket\n";
//! let problems = RuleFile::parse("tollgate.yaml", text).unwrap_err();
//! assert_eq!(
//!     problems.to_string(),
//!     "tollgate.yaml:4:15: capacity 0 admits nothing; use 1 or more, or `blocked` to refuse every request"
//! );
//! ```
//!
//! Four steps, each in a module of its own: `yaml` reads nodes with positions, `shape` holds them against the
//! [`schema`] that the `types` generate, serde makes the types, and `meaning` asks whether they can be meant. Each
//! step goes on after a problem, so that all are told at once.
//!
//! Deliberately not here: opening files, watching them, and compiling rules for matching.

mod compile;
mod expressions;
mod flaw;
mod forms;
mod meaning;
mod node;
mod problem;
mod schema;
mod shape;
#[cfg(feature = "redis")]
mod store;
mod types;
mod yaml;

use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Deref;
use std::path::{Path, PathBuf};

use self::node::Node;
use self::problem::Findings;

pub use self::flaw::{Flaw, Part};
pub use self::forms::{
    Address, ByteSize, Cidr, ContentType, CostText, Expression, HeaderName, HostGlob, KeyPart, KeyPrefix, LimitName,
    MethodName, PathGlob, PathText, Pattern, PlanSource, RateText, SettleSource, Span, StatusClass, StoreUrl,
    TokenSource, Upstream,
};
pub use self::problem::{Position, Problem, Problems, Severity};
pub use self::schema::schema;
pub use self::types::{
    AccessLogRule, AdminRule, AlgorithmName, Align, Balance, BanRule, BodyName, BodyRule, CertificateRule,
    ClientCertificates, ComputedCost, ConsistencyName, CostRule, CountName, CountRule, EjectRule, FailurePolicy,
    ForwardingName, GatewayRule, HeaderEdits, HeaderFamily, HealthCheckRule, HostHeader, JwtAlgorithm, JwtRule,
    LimitRule, ListRule, Listener, LogFormat, MatchRule, Missing, Modes, Numbers, Overflow, OverrideRule, PathsRule,
    RefillMode, RespondRule, RewriteRule, RouteRule, RuleFile, ServiceRule, Several, StatusRule, StoreRule,
    TemplateRule, TimeoutsRule, TlsRule, Told, UnderscoreHeaders, UpstreamConnectionsRule, UpstreamRule,
    UpstreamTlsRule,
};

/// A rule file that was read, and where each part of it stands.
#[derive(Clone)]
pub struct Parsed {
    name: String,
    source: String,
    /// Where files that it names are looked for.
    folder: PathBuf,
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
            Some((rules, root)) if !refused => {
                let (name, source) = (file_name.to_owned(), source.into_owned());
                let folder = PathBuf::new();
                Ok(Parsed { name, source, folder, rules, root, warnings: problems })
            }
            _ => Err(problems),
        }
    }
}

impl RuleFile {
    /// Reads the rule file at that path. Files that it names are looked for beside it.
    ///
    /// # Errors
    ///
    /// When it cannot be read, or what [`parse`](Self::parse) says of it.
    pub fn load(path: &Path) -> Result<Parsed, LoadError> {
        let unreadable = |source| LoadError::Unreadable { path: path.to_owned(), source };
        let mut text = Vec::new();
        let bound = yaml::MAX_FILE as u64 + 1;
        File::open(path).and_then(|file| file.take(bound).read_to_end(&mut text)).map_err(unreadable)?;
        let mut parsed = Self::parse(&path.display().to_string(), text).map_err(LoadError::Refused)?;
        parsed.folder = path.parent().unwrap_or(Path::new("")).to_owned();
        Ok(parsed)
    }
}

/// Why a rule file was not loaded.
#[derive(Debug)]
#[non_exhaustive]
pub enum LoadError {
    /// It cannot be read.
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It says what cannot be.
    Refused(Problems),
}

impl fmt::Display for LoadError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { path, source } => {
                write!(out, "cannot read {}: {source}; name a file that is there and may be read", path.display())
            }
            Self::Refused(problems) => problems.fmt(out),
        }
    }
}

impl std::error::Error for LoadError {}

impl Parsed {
    /// What was read.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The same, with files that it names looked for in that folder: for a file that came by another way than
    /// [`load`](RuleFile::load).
    #[must_use]
    pub fn in_folder(self, folder: &Path) -> Self {
        Self { folder: folder.to_owned(), ..self }
    }

    /// The same with its counts kept elsewhere: `memory`, or the URL of a Redis. Other settings of the store stay, unless
    /// they mean nothing there; a login in the URL takes the place of `username` and `password_file`.
    ///
    /// # Errors
    ///
    /// When the text is neither.
    pub fn with_store(mut self, store: &str) -> Result<Self, String> {
        let read = <StoreUrl as forms::Form>::read(store);
        let url = read.map_err(|misfit| format!("{}; {}", misfit.problem, misfit.fix))?;
        self.rules.store = self.rules.store.at(url);
        Ok(self)
    }

    /// The same with the gateway of another file: what it listens on, its routes, and whom it believes.
    #[must_use]
    pub fn with_gateway_of(mut self, other: &RuleFile) -> Self {
        self.rules.gateway.clone_from(&other.gateway);
        self
    }

    /// The folder in which files that it names are looked for.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

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
            findings.error(Position::after(good), "the file is not in UTF-8", "save it as UTF-8");
            Cow::Borrowed("")
        }
    }
}
