//! What upstreams are asked for in place of what a client asked for.

use http::Uri;
use http::uri::PathAndQuery;
use tollgate::internal::CleanPath;
use tollgate::rules::file::internal::{RewriteRule, RouteRule, SettingError, UpstreamRule};
use tollgate::rules::{PathCase, PathReading};

use super::super::failure::Failure;

/// How a route changes paths.
pub(super) struct PathRewrite {
    strip_prefix: Option<String>,
    rewrite: Option<RewriteRule>,
    case: PathCase,
}

impl PathRewrite {
    /// Reads how a route of a gateway with that reading changes paths. The gateway's reading chooses the route and the
    /// route's own is that of the upstreams: if either ignores case, so do the changes. Otherwise a path in another case
    /// would reach the route and escape its changes.
    ///
    /// # Errors
    ///
    /// When the pattern takes too much memory without regard to case.
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

    /// Whether it may.
    pub(super) fn is_active(&self) -> bool {
        self.strip_prefix.is_some() || self.rewrite.is_some()
    }

    /// What an upstream with that prefix is asked for instead of `uri`, whose path is clean: with `..` in it, it could lead
    /// out of what the upstream's URL names.
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

/// What the path of an upstream's URL puts before the request's.
pub(super) fn prefix(rule: &UpstreamRule) -> Option<String> {
    let uri = rule.url.as_str().parse::<Uri>().ok()?;
    Some(uri.path().trim_end_matches('/').to_owned()).filter(|path| !path.is_empty())
}

/// The URLs that the upstreams of a route are asked for when a client asks for that path; as the file has them where it
/// cannot be asked for.
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

/// The same with another path and query. One that is longer than a URI can be leads nowhere: as it was before, it could
/// reach what the change keeps from it.
pub(in super::super) fn with_path(uri: &Uri, path: String) -> Result<Uri, Failure> {
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::try_from(path).map_err(|_| Failure::NoRoute)?);
    Uri::from_parts(parts).map_err(|_| Failure::NoRoute)
}

/// What is left of a path without whole segments at its beginning.
fn stripped<'p>(path: &'p str, prefix: &str, case: PathCase) -> Option<&'p str> {
    let (beginning, rest) = path.split_at_checked(prefix.len())?;
    let is_prefix = match case {
        PathCase::Insensitive => beginning.eq_ignore_ascii_case(prefix),
        _ => beginning == prefix,
    };
    let rest = Some(rest).filter(|rest| is_prefix && (rest.is_empty() || rest.starts_with('/')))?;
    Some(if rest.is_empty() { "/" } else { rest })
}
