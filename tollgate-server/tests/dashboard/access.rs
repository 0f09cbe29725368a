//! Tokens, and the headers of the page.

use testkit::folder::folder_with;
use testkit::gateway::Gateway;
use testkit::http1::Connection;
use testkit::tollgate::{Process, RULES as FILE};

use crate::browser::Page;
use crate::{LAPTOP, RULES, at};

const TOKEN: &str = "a-token-of-32-characters-at-least";

#[test]
fn token_is_asked_for_and_kept_for_the_tab() {
    let rules = RULES.replace("show_keys: true", "tokens_file: tokens.txt");
    let folder = folder_with(&[(FILE, &rules), ("tokens.txt", TOKEN)]);
    let arguments = ["serve", "--config", FILE, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"];
    let server = Process::start(folder, &arguments);
    let Some(page) = Page::open(LAPTOP) else { return };
    page.load(&at(server.address_of("admin"), "overview"));
    page.until("document.querySelector('#login').open");
    let message = page.text("#login-text");
    assert!(message.contains("Authorization: Bearer TOKEN") && !message.contains('`'), "{message}");
    page.fill("#login-token", "wrong");
    page.press("Enter");
    page.until_shows("#login-text", "the token is not valid");
    // Dismissed, it does not come back by itself.
    page.press("Escape");
    page.until_shows("#connection", "No access");
    page.until_shows("#banner", "the token is not valid");
    assert_eq!(page.value("document.querySelector('#login').open"), false);
    page.click("#enter-token");
    page.fill("#login-token", TOKEN);
    page.press("Enter");
    page.until_shows("#connection", "Live");
    page.until_shows("#busiest", "per-user");
    page.until("document.querySelector('#banner').hidden");
    page.call("Page.reload", serde_json::json!({}));
    page.until_shows("#busiest", "per-user");
    assert_eq!(page.value("document.querySelector('#login-token').value + document.cookie + localStorage.length"), "0");
    page.has_no_problems();
}

/// The API is closed where other machines reach it and there are no tokens. The page shows the fix.
#[test]
fn closed_api_is_reported_with_the_fix() {
    let folder = folder_with(&[(FILE, RULES)]);
    let arguments = ["serve", "--config", FILE, "--listen", "127.0.0.1:0", "--admin", "0.0.0.0:0"];
    let server = Process::start(folder, &arguments);
    let Some(page) = Page::open(LAPTOP) else { return };
    let port = server.address_of("admin").port();
    page.load(&at(([127, 0, 0, 1], port).into(), "overview"));
    page.until_shows("#banner", "set admin.tokens_file");
    page.until_shows("#connection", "No access");
    page.has_no_problems();
}

#[test]
fn page_is_for_browsers_and_allows_nothing_from_elsewhere() {
    let server = Gateway::with_admin(RULES);
    assert_eq!(server.get_admin("/").header("content-type"), Some("text/plain; charset=utf-8"));
    let request = "GET / HTTP/1.1\r\nhost: localhost\r\naccept: text/html,*/*;q=0.8\r\n\r\n";
    let page = Connection::to(server.admin()).ask(request);
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    let policy = page.header("content-security-policy").expect("a policy");
    for part in
        ["default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "form-action 'none'", "base-uri 'none'"]
    {
        assert!(policy.contains(part), "{part}: {policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
    assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
    assert_eq!(page.header("referrer-policy"), Some("no-referrer"));
    assert!(page.body.len() < 128 << 10, "{} bytes", page.body.len());
}
