//! The dashboard: one page, which is part of the binary and needs nothing else from the network.
//!
//! The page has no data. It reads the admin API as any other client does, and asks for a token if the API needs one. The
//! content security policy allows the scripts and styles of this file by their hashes, requests to this server, and
//! nothing else; trusted types keep text from the API out of the parser.

use std::sync::LazyLock;

use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest as _, Sha256};

const PAGE: &str = include_str!("dashboard/page.html");
const STYLE: &str = include_str!("dashboard/style.css");
/// One module. Each part uses those above it.
const SCRIPT: &str = concat!(
    include_str!("dashboard/dom.js"),
    include_str!("dashboard/api.js"),
    include_str!("dashboard/chart.js"),
    include_str!("dashboard/overview.js"),
    include_str!("dashboard/top.js"),
    include_str!("dashboard/rules.js"),
    include_str!("dashboard/keys.js"),
    include_str!("dashboard/explain.js"),
    include_str!("dashboard/playground.js"),
    include_str!("dashboard/app.js"),
);

static DASHBOARD: LazyLock<String> = LazyLock::new(|| PAGE.replace("{style}", STYLE).replace("{script}", SCRIPT));

static POLICY: LazyLock<String> = LazyLock::new(|| {
    let hash = |text: &str| STANDARD.encode(Sha256::digest(text.as_bytes()));
    format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
         trusted-types 'none'",
        hash(SCRIPT),
        hash(STYLE)
    )
});

/// Returns whether a client prefers the page to the list of paths: a browser does, `curl` does not.
pub(super) fn is_wanted(headers: &HeaderMap) -> bool {
    let mut accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepted
        .any(|value| value.split(',').any(|range| range.split(';').next().unwrap_or_default().trim() == "text/html"))
}

/// Returns the page.
pub(super) fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY.as_str()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        // A new version of the server has a new page. `Accept` chooses between the page and the list of paths.
        (header::CACHE_CONTROL, "no-cache"),
        (header::VARY, "accept"),
    ];
    (headers, DASHBOARD.as_str()).into_response()
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn browsers_get_the_page_and_programs_the_list() {
        let wanted = |accept: &'static str| {
            is_wanted(&HeaderMap::from_iter([(header::ACCEPT, HeaderValue::from_static(accept))]))
        };
        assert!(wanted("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"));
        assert!(wanted("application/json, text/html;q=0.9"));
        assert!(!wanted("*/*"));
        assert!(!wanted("application/json"));
        assert!(!is_wanted(&HeaderMap::new()));
    }

    /// Files that the page would load are neither in the binary nor allowed by its policy.
    #[test]
    fn page_refers_to_nothing_outside_itself() {
        assert!(!DASHBOARD.contains("{style}") && !DASHBOARD.contains("{script}"));
        for outside in ["src=", "@import", "url(", "http://", "https://"] {
            let found: Vec<&str> =
                DASHBOARD.split(outside).skip(1).map(|rest| rest.split('\n').next().unwrap()).collect();
            let is_namespace = |rest: &&str| rest.starts_with("www.w3.org/2000/svg");
            assert!(found.iter().all(is_namespace), "{outside}: {found:?}");
        }
        for sink in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
            assert!(!SCRIPT.contains(sink), "{sink}");
        }
    }
}
