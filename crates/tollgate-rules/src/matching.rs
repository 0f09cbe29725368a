//! Conditions on requests.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::sync::Arc;

use http::header::{COOKIE, HOST};
use http::{HeaderName, HeaderValue};
use smallvec::SmallVec;
use tollgate::InvalidLimit;

use super::Request;
use super::host::HostGlob;
use super::index::IndexedBy;
use super::key_part::header_name;
use super::normal::header::{self, cookie_lines};
use super::normal::path::folded;
use super::normal::{PathCase, host};
use super::path::{PathGlob, wildcard_in_any_case};

/// A condition in code: a closure, or an expression of a rule file.
pub(super) type Condition = Arc<dyn Fn(&Request<'_>) -> bool + Send + Sync>;

/// The requests that a rule applies to. One of the paths, one of the methods and one of the hosts must match, and all
/// headers and other conditions must hold. Without conditions, every request matches.
///
/// ```
/// use tollgate_rules::Match;
///
/// let expensive = Match::everything().path("/api/expensive/**").method("POST");
/// let partners = Match::everything().host("*.partners.example.com").header("x-tier", "gold*");
/// ```
///
/// [`RuleSetBuilder::build`](super::RuleSetBuilder::build) and [`Routes::new`](super::Routes::new) report invalid
/// paths, methods, hosts and headers.
#[derive(Clone, Default)]
#[must_use]
pub struct Match {
    pub(super) paths: Vec<PathGlob>,
    /// `true` if the paths match in any case, even if requests are otherwise matched case-sensitively.
    pub(super) ignores_path_case: bool,
    pub(super) methods: SmallVec<[Box<str>; 2]>,
    pub(super) hosts: Vec<HostGlob>,
    /// Names, with patterns in their normal form.
    pub(super) headers: Vec<(HeaderName, Box<str>)>,
    pub(super) domain: Option<Box<str>>,
    pub(super) conditions: Vec<(Box<str>, Condition)>,
    /// The error of the first invalid text.
    problem: Option<Box<InvalidLimit>>,
}

impl Match {
    /// Matches every request.
    pub fn everything() -> Self {
        Self::default()
    }

    /// Adds a path: a glob such as `/api/**`.
    pub fn path(mut self, glob: impl AsRef<str>) -> Self {
        let glob = self.checked(glob.as_ref().parse::<PathGlob>().map_err(|error| error.of_field("path")));
        self.paths.extend(glob);
        self
    }

    /// Ignores the case of paths.
    pub fn ignoring_path_case(mut self) -> Self {
        self.ignores_path_case = true;
        self
    }

    /// Adds a method. `GET` includes `HEAD`, which services answer with the same handlers, unless another rule names
    /// `HEAD` and counts every request that this one matches.
    pub fn method(mut self, method: &str) -> Self {
        if self.checked(check_method(method)).is_some() {
            self.methods.push(method.into());
        }
        self
    }

    /// Adds a host: a name, or `*.` and a name.
    pub fn host(mut self, glob: impl AsRef<str>) -> Self {
        let glob = self.checked(glob.as_ref().parse::<HostGlob>().map_err(|error| error.of_field("host")));
        self.hosts.extend(glob);
        self
    }

    /// Requires a header with this value, in which `*` matches anything. Case is ignored: media types, encodings and
    /// schemes have none, and a limit must not be left by writing `Application/JSON`. `Host` is compared without its
    /// port, so its value must not have one.
    pub fn header(mut self, name: impl AsRef<str>, value: &str) -> Self {
        let required = header_name("headers", name.as_ref()).and_then(|name| Ok((header_pattern(&name, value)?, name)));
        let required =
            required.and_then(|(pattern, name)| match self.headers.iter().any(|(other, _)| *other == name) {
                true => Err(InvalidLimit::new("headers", format!("duplicate header `{name}`"), "remove one of them")),
                false => Ok((name, pattern)),
            });
        let required = self.checked(required);
        self.headers.extend(required);
        self
    }

    /// Keeps the first error. A match that lacks one of its conditions must not be used, because it matches more.
    fn checked<T>(&mut self, read: Result<T, InvalidLimit>) -> Option<T> {
        read.map_err(|problem| self.problem.get_or_insert_with(|| Box::new(problem))).ok()
    }

    /// Returns the first error.
    pub(super) fn problem(&self) -> Option<&InvalidLimit> {
        self.problem.as_deref()
    }

    /// Requires a domain, which a client of the decision service sends.
    pub fn domain(mut self, domain: &str) -> Self {
        self.domain = Some(domain.into());
        self
    }

    /// Requires that a condition holds.
    pub fn when(self, condition: impl Fn(&Request<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.when_described("a condition", condition)
    }

    /// Requires that a condition holds, with a description for explanations.
    pub fn when_described(
        mut self,
        description: &str,
        condition: impl Fn(&Request<'_>) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.conditions.push((description.into(), Arc::new(condition)));
        self
    }

    /// Splits the match into one for each combination of host and path.
    pub(super) fn split(self) -> Vec<Self> {
        fn each<T: Clone>(items: &[T]) -> Vec<Vec<T>> {
            if items.is_empty() { vec![Vec::new()] } else { items.iter().map(|item| vec![item.clone()]).collect() }
        }
        let (paths, hosts) = (each(&self.paths), each(&self.hosts));
        let pairs = hosts.iter().flat_map(|host| paths.iter().map(move |path| (host, path)));
        pairs.map(|(host, path)| Self { paths: path.clone(), hosts: host.clone(), ..self.clone() }).collect()
    }

    /// Returns a smaller value the more specific the match is, apart from host and path.
    pub(super) fn narrowness(&self) -> impl Ord + use<> {
        (self.methods.is_empty(), Reverse(self.headers.len()), Reverse(self.conditions.len()))
    }

    /// Returns `true` if there are no conditions.
    pub(super) fn is_everything(&self) -> bool {
        self.paths.is_empty() && self.hosts.is_empty() && self.has_no_other_condition()
    }

    fn has_no_other_condition(&self) -> bool {
        self.methods.is_empty() && self.headers.is_empty() && self.domain.is_none() && self.conditions.is_empty()
    }

    /// Returns the conditions that are known to hold for requests that the index finds for this rule.
    pub(super) fn known_if_found_by(&self, indexed_by: IndexedBy) -> Known {
        let any_path = self.paths.is_empty() || self.paths.iter().any(PathGlob::is_everything);
        // The index ignores case.
        let is_found_by_path = indexed_by == IndexedBy::Path && !self.paths.iter().any(PathGlob::has_upper_case);
        let on_path = any_path || is_found_by_path;
        let on_host = self.hosts.is_empty() || indexed_by == IndexedBy::Host;
        let nothing_else = self.has_no_other_condition();
        match indexed_by {
            _ if on_path && on_host && nothing_else => Known::Everything,
            IndexedBy::Path if !is_found_by_path => Known::Nothing,
            IndexedBy::Path => Known::Path,
            IndexedBy::Host => Known::Host,
            IndexedBy::Always | IndexedBy::Never => Known::Nothing,
        }
    }

    /// Returns the first condition that does not hold, apart from those known to hold.
    #[inline]
    pub(super) fn first_miss(&self, request: &Request<'_>, known: Known) -> Option<Miss<'_>> {
        if known == Known::Everything { None } else { self.first_miss_beyond(request, known) }
    }

    fn first_miss_beyond(&self, request: &Request<'_>, known: Known) -> Option<Miss<'_>> {
        let facts = request.facts();
        let is_off_path = || {
            let fits = |path: &str, case| self.paths.iter().any(|glob| glob.matches_reading(path, case));
            let mut readings = request.path_readings().iter();
            !readings.any(|path| match request.path_case() {
                PathCase::Sensitive if self.ignores_path_case => {
                    fits(&folded(Cow::Borrowed(path), PathCase::Insensitive), PathCase::Insensitive)
                }
                case => fits(path, case),
            })
        };
        if known != Known::Path && !self.paths.is_empty() && is_off_path() {
            return Some(Miss::Path(&self.paths));
        }
        if !self.methods.is_empty() && !self.methods.iter().any(|method| method.eq_ignore_ascii_case(facts.method())) {
            return Some(Miss::Method(&self.methods));
        }
        if known != Known::Host && !self.hosts.is_empty() {
            let host = request.host();
            if !host.is_some_and(|host| self.hosts.iter().any(|glob| glob.matches(&host))) {
                return Some(Miss::Host(&self.hosts));
            }
        }
        let missed = |(name, value): &&(HeaderName, Box<str>)| {
            let matches = |given: &[u8]| wildcard_in_any_case(value.as_bytes(), given);
            let headers = facts.all_headers();
            if *name == COOKIE {
                return !headers.and_then(cookie_lines).is_some_and(|given| matches(&given));
            }
            if *name == HOST {
                return !request.host().is_some_and(|host| matches(host.as_bytes()));
            }
            let mut values = headers.into_iter().flat_map(|headers| headers.get_all(name));
            !values.any(|given| matches(&header::checked_text(name, given, request.errors())))
        };
        if let Some((name, value)) = self.headers.iter().find(missed) {
            return Some(Miss::Header(name, value));
        }
        if self.domain.is_some() && self.domain.as_deref() != facts.domain_name() {
            return self.domain.as_deref().map(Miss::Domain);
        }
        let failed = self.conditions.iter().find(|(_, condition)| !request.in_any_reading(|| condition(request)));
        failed.map(|(description, _)| Miss::Condition(description))
    }
}

/// Checks that a request can have a method.
fn check_method(text: &str) -> Result<(), InvalidLimit> {
    if text != "*" && http::Method::from_bytes(text.as_bytes()).is_ok() {
        return Ok(());
    }
    let shown: String = text.chars().take(80).collect();
    let problem = format!("method `{}` is not valid", shown.escape_debug());
    let fix =
        if text == "*" { "leave out the methods to match all of them" } else { "write a method such as GET or POST" };
    Err(InvalidLimit::new("methods", problem, fix))
}

/// Returns the normal form of a required header value, in which `*` matches anything.
///
/// # Errors
///
/// If no request can have such a value.
pub fn header_pattern(name: &HeaderName, value: &str) -> Result<Box<str>, InvalidLimit> {
    if HeaderValue::from_bytes(value.as_bytes()).is_err() || value.trim() != value {
        let problem = "no request matches, because header values have no line breaks and no surrounding spaces".into();
        return Err(InvalidLimit::new("headers", problem, "write the value without them, with * for any part"));
    }
    if *name == HOST {
        let pattern = host::pattern(value);
        return pattern.map(Into::into).map_err(|error| InvalidLimit::new("headers", error.problem, error.fix));
    }
    Ok(String::from_utf8_lossy(&header::text(name, value.as_bytes())).to_ascii_lowercase().into())
}

/// The conditions that are known to hold before a rule is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    Nothing,
    /// One of the paths matches.
    Path,
    /// One of the hosts matches.
    Host,
    /// All conditions hold.
    Everything,
}

/// The reason that a rule does not match a request.
pub(crate) enum Miss<'a> {
    Path(&'a [PathGlob]),
    Method(&'a [Box<str>]),
    Host(&'a [HostGlob]),
    Header(&'a HeaderName, &'a str),
    Domain(&'a str),
    Condition(&'a str),
}

impl std::fmt::Display for Miss<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        fn list<T: ToString>(items: &[T]) -> String {
            items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
        }
        let (what, wanted): (_, Cow<'_, str>) = match self {
            Self::Path(globs) => ("path", list(globs).into()),
            Self::Method(methods) => ("method", list(methods).into()),
            Self::Host(globs) => ("host", list(globs).into()),
            Self::Header(name, value) => return write!(out, "header {name} is not {value}"),
            Self::Domain(domain) => ("domain", (*domain).into()),
            Self::Condition(text) => return write!(out, "not true: {text}"),
        };
        write!(out, "{what} is not {wanted}")
    }
}

impl std::fmt::Debug for Match {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let conditions: Vec<&str> = self.conditions.iter().map(|(text, _)| &**text).collect();
        out.debug_struct("Match")
            .field("paths", &self.paths)
            .field("ignores_path_case", &self.ignores_path_case)
            .field("methods", &self.methods)
            .field("hosts", &self.hosts)
            .field("headers", &self.headers)
            .field("domain", &self.domain)
            .field("conditions", &conditions)
            .finish()
    }
}
