//! Changes of a route to requests and responses: the path for upstreams, and headers.

use http::Uri;
use http::uri::PathAndQuery;
use tollgate::internal::CleanPath;
use tollgate::rules::file::internal::{RewriteRule, RouteRule, SettingError, UpstreamRule};
use tollgate::rules::{PathCase, PathReading};

use crate::gateway::failure::Failure;

/// The path changes of a route.
pub(super) struct PathRewrite {
    strip_prefix: Option<String>,
    rewrite: Option<RewriteRule>,
    case: PathCase,
}

impl PathRewrite {
    /// Creates the path changes of a route. The gateway's settings choose the route, and the route's settings describe
    /// its upstreams: if either ignores case, so do the changes. Otherwise a path in another case would match the route
    /// and escape its changes.
    ///
    /// # Errors
    ///
    /// Fails if the pattern takes too much memory without regard to case.
    pub(super) fn of(rule: &RouteRule, gateway: PathReading) -> Result<Self, SettingError> {
        let cases = [gateway.case, rule.paths.over(gateway).case];
        let ignores_case = cases.contains(&PathCase::Insensitive);
        let mut rewrite = rule.rewrite.clone();
        if let Some(rewrite) = rewrite.as_mut().filter(|_| ignores_case) {
            rewrite.pattern = rewrite.pattern.case_insensitive().ok_or_else(|| {
                SettingError::new(
                    "the pattern takes too much memory with `paths.case: insensitive`",
                    "write a shorter one, or one with fewer repetitions",
                )
                .of("pattern")
                .of("rewrite")
            })?;
        }
        Ok(Self {
            strip_prefix: rule.strip_prefix.as_ref().map(|path| path.as_str().trim_end_matches('/').to_owned()),
            rewrite,
            case: if ignores_case { PathCase::Insensitive } else { PathCase::Sensitive },
        })
    }

    /// Returns whether paths may be changed.
    pub(super) fn is_active(&self) -> bool {
        self.strip_prefix.is_some() || self.rewrite.is_some()
    }

    /// Returns the URI for an upstream with that prefix. The path must be normalized: with `..` in it, it could leave
    /// the prefix of the upstream's URL.
    pub(super) fn apply(&self, prefix: Option<&str>, uri: &Uri) -> Result<Uri, Failure> {
        if !(self.is_active() || prefix.is_some()) || uri.path() == "*" {
            return Ok(uri.clone());
        }
        let mut path = uri.path().to_owned();
        if let Some(rest) = self.strip_prefix.as_ref().and_then(|prefix| stripped(&path, prefix, self.case)) {
            path = rest.to_owned();
        }
        if let Some(rewrite) = &self.rewrite {
            path = rewrite.pattern.replace(&path, &rewrite.to).into_owned();
        }
        if !path.starts_with('/') {
            path.insert(0, '/');
        }
        if let Some(prefix) = prefix {
            path.insert_str(0, prefix);
        }
        if let Some(query) = uri.query() {
            path.push('?');
            path.push_str(query);
        }
        with_path(uri, path)
    }
}

impl PathRewrite {
    /// Returns the `Location` for clients, of a response whose upstream is known to itself by another address or path.
    /// `None` if it stays: it leads elsewhere, it is the same for clients, its path cannot be mapped back, or it is not
    /// a URL: browsers leave out tabs, and what is left may lead elsewhere.
    /// `is_own` returns whether a scheme and an authority are the upstream's.
    pub(super) fn location(
        &self,
        prefix: Option<&str>,
        value: &str,
        is_own: impl FnOnce(&str, &str) -> bool,
    ) -> Option<String> {
        if !value.bytes().all(|byte| byte.is_ascii_graphic()) {
            return None;
        }
        let local = match value.split_once("://") {
            _ if value.starts_with('/') => Some(value).filter(|path| !path.starts_with("//"))?,
            Some((scheme, rest)) => {
                let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
                Some(path).filter(|_| is_own(scheme, authority))?
            }
            None => return None,
        };
        let (path, rest) = local.split_at(local.find(['?', '#']).unwrap_or(local.len()));
        let path = if path.is_empty() { "/" } else { path };
        // A path beside that of the upstream's URL is not reachable through the gateway.
        let path = prefix.map_or(Some(path), |prefix| stripped(path, prefix, PathCase::Sensitive))?;
        // An upstream that knows the prefix has written it. What a pattern has replaced is not known.
        let lacks_prefix = |prefix: &&String| self.rewrite.is_none() && stripped(path, prefix, self.case).is_none();
        let prefix = self.strip_prefix.as_ref().filter(lacks_prefix).map_or("", String::as_str);
        let location = [prefix, path, rest].concat();
        // Two slashes would begin a host name.
        let is_path = !location.starts_with("//") && !location.starts_with("/\\");
        (is_path && location != value).then_some(location)
    }
}

/// Returns the path of an upstream's URL, which is prepended to the request's.
pub(super) fn prefix(rule: &UpstreamRule) -> Option<String> {
    let uri = rule.url.as_str().parse::<Uri>().ok()?;
    Some(uri.path().trim_end_matches('/').to_owned()).filter(|path| !path.is_empty())
}

/// Returns the URLs that the upstreams of a route get for a path. Returns the URLs of the file if the path cannot be
/// requested.
pub(crate) fn upstream_urls(rule: &RouteRule, reading: PathReading, path: &str) -> Vec<String> {
    let clean = |path: &str| {
        let (path, query) = path.split_once('?').map_or((path, None), |(path, query)| (path, Some(query)));
        let clean = CleanPath::new(path).ok()?;
        let forwarded = clean.forwarded(rule.paths.over(reading)).ok()?.into_owned();
        query.map_or(forwarded.clone(), |query| format!("{forwarded}?{query}")).parse::<Uri>().ok()
    };
    let (paths, uri) = (PathRewrite::of(rule, reading).ok(), clean(path));
    let upstreams = rule.upstream.iter().flatten();
    let apply = |upstream: &UpstreamRule| {
        let url = upstream.url.as_str();
        let prefix = prefix(upstream);
        let path = paths.as_ref()?.apply(prefix.as_deref(), uri.as_ref()?).ok()?;
        let origin = url.trim_end_matches('/');
        let origin = origin.strip_suffix(prefix.as_deref().unwrap_or_default()).unwrap_or(origin);
        (!upstream.url.is_echo()).then(|| format!("{origin}{path}"))
    };
    upstreams.map(|upstream| apply(upstream).unwrap_or_else(|| upstream.url.as_str().to_owned())).collect()
}

/// Replaces the path and query. Fails if they are too long for a URI: the unchanged path could reach something that the
/// change protects.
pub(super) fn with_path(uri: &Uri, path: String) -> Result<Uri, Failure> {
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::try_from(path).map_err(|_| Failure::NoRoute)?);
    Uri::from_parts(parts).map_err(|_| Failure::NoRoute)
}

/// Removes whole segments from the start of a path.
fn stripped<'p>(path: &'p str, prefix: &str, case: PathCase) -> Option<&'p str> {
    let (beginning, rest) = path.split_at_checked(prefix.len())?;
    let is_prefix = match case {
        PathCase::Insensitive => beginning.eq_ignore_ascii_case(prefix),
        _ => beginning == prefix,
    };
    let rest = Some(rest).filter(|rest| is_prefix && (rest.is_empty() || rest.starts_with('/')))?;
    Some(if rest.is_empty() { "/" } else { rest })
}
