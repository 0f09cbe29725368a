//! Paths in the syntax of routers and proxies: regular expressions, and parameters such as `:id`.
//!
//! As globs they would match these characters literally, which is rarely intended, so they are rejected. To match them
//! literally, escape them.

use super::super::super::problem::shown;

/// Returns the fix if a path is a regular expression. `/files/report.*` and `/Products(5)` are not.
pub(super) fn regex(text: &str) -> Option<String> {
    let is_anchored = text.starts_with('^') || text.ends_with('$');
    let has_class = text.contains('\\') || ["[^", "[0-9", "[a-z", "[A-Z"].iter().any(|class| text.contains(class));
    let has_group = text.contains("(?") || text.contains("(.") || (text.contains('(') && text.contains('|'));
    let begins_anything = |segment: &str| segment.starts_with(".*") || segment.starts_with(".+");
    if !is_anchored && !has_class && !has_group && !text.split('/').any(begins_anything) {
        return None;
    }
    let ends = text.ends_with('$');
    let plain = text.trim_start_matches('^').trim_end_matches('$');
    let is_literal =
        |segment: &&str| segment.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_~".contains(&byte));
    let segments: Vec<&str> = plain.split('/').filter(|segment| !segment.is_empty()).collect();
    let literal: Vec<&str> = segments.iter().copied().take_while(is_literal).collect();
    let path = format!("/{}", literal.join("/"));
    let is_rest = |segment: &&str| matches!(*segment, ".*" | ".+" | "(.*)" | "(.+)");
    let glob = match segments.get(literal.len()..).unwrap_or_default() {
        [] if ends => format!("write {} for that path alone", shown(&path)),
        [one] if literal.is_empty() && is_rest(one) => "write /** for every path".into(),
        _ if literal.is_empty() => "write a glob for each path, where * matches one segment and ** any number".into(),
        _ => format!("write {}/** for {} and everything under it", shown(&path), shown(&path)),
    };
    let escaped = text.chars().find_map(|letter| match letter {
        '^' => Some("%5E"),
        '$' => Some("%24"),
        '.' => Some("%2E"),
        '(' => Some("%28"),
        '[' => Some("%5B"),
        _ => None,
    });
    let letters = escaped
        .map_or_else(String::new, |escape| format!("; to match these characters literally, escape them: {escape}"));
    Some(format!("{glob}; a limit can match a regular expression in `when: request.path.matches(\"…\")`{letters}"))
}

/// Returns the fix if a segment is a parameter such as `:id` or `<id>`.
pub(super) fn parameters(text: &str) -> Option<String> {
    let parameter = |segment: &str| {
        let name = segment.strip_prefix(':').or_else(|| segment.strip_prefix('<')?.strip_suffix('>'))?;
        let begins = name.starts_with(|letter: char| letter.is_ascii_alphabetic() || letter == '_');
        begins.then(|| if name.ends_with(['*', '+']) || name.starts_with("path:") { "**" } else { "*" })
    };
    if !text.split('/').any(|segment| parameter(segment).is_some()) {
        return None;
    }
    let glob: Vec<&str> = text.split('/').map(|segment| parameter(segment).unwrap_or(segment)).collect();
    let mut fix = format!("write {}, where * matches one segment and ** any number", shown(&glob.join("/")));
    if text.contains("/:") {
        fix.push_str("; to match a colon literally, escape it: %3A");
    }
    Some(fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_and_paths_of_services_are_not_refused() {
        for text in [
            "/",
            "/**",
            "/api/**",
            "/files/report.*",
            "/*.json",
            "/.well-known/**",
            "/Products(5)",
            "/odata/$metadata",
            "/v1/docs/7:batchGet",
            "/users/@me",
            "/pages/[id].js",
            "/a/%3Aid",
            "/a/%2E*",
            "/price/10$/x",
        ] {
            assert_eq!((regex(text), parameters(text)), (None, None), "{text}");
        }
    }

    #[test]
    fn what_is_suggested_is_taken() {
        let paths =
            ["^/api", "^/api/v1$", "/api/.*", ".*", "/users/[0-9]+", "^/a/(b|c)$", "/a/:id/b", "/f/:rest*", "/u/<id>"];
        for text in paths {
            let fix = regex(text).or_else(|| parameters(text)).unwrap();
            let path = fix.strip_prefix("write ").unwrap().split([' ', ',']).next().unwrap();
            assert!(path.parse::<crate::rules::PathGlob>().is_ok(), "{fix}");
            assert_eq!((regex(path), parameters(path)), (None, None), "{fix}");
        }
    }
}
