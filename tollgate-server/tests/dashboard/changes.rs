//! Changes of keys and rules, and explanations.

use testkit::gateway::Gateway;

use crate::{RULES, open, send};

/// Confirms the dialog that is open.
fn confirm(page: &crate::browser::Page) {
    page.until("document.querySelector('#confirm').open");
    page.click("#confirm-yes");
    page.until("!document.querySelector('#confirm').open");
}

fn status(server: &Gateway) -> u16 {
    server.connect().get_as("ann", "/").status
}

#[test]
fn key_is_inspected_reset_granted_banned_and_unbanned() {
    let server = Gateway::with_admin(RULES);
    send(&server, "ann", 5);
    assert_eq!(status(&server), 429);
    let Some(page) = open(&server, "keys") else { return };
    page.fill("#keys-key", "ann");
    page.fill("#keys-form [name=limit]", "per-user");
    page.press("Enter");
    let left = "#states tbody tr:first-child td:nth-child(2)";
    page.until_shows(left, "0 of 3");
    let button = |name: &str| format!("#states tbody tr:first-child button[aria-label^='{name}']");
    // Nothing happens before the confirmation.
    page.click(&button("Reset"));
    page.until_shows("#confirm", "Key: ann");
    page.press("Escape");
    page.until("!document.querySelector('#confirm').open");
    assert_eq!(status(&server), 429);
    page.click(&button("Grant"));
    page.fill("#confirm-input", "many");
    page.click("#confirm-yes");
    page.until_shows("#confirm-error", "many is not a number of units");
    page.fill("#confirm-input", "2");
    confirm(&page);
    page.until_shows(left, "2 of 3");
    page.click(&button("Reset"));
    confirm(&page);
    page.until_shows(left, "3 of 3");
    page.until_shows("#keys-result", "The key was reset.");
    page.click(&button("Ban"));
    page.fill("#confirm-input", "5x");
    page.click("#confirm-yes");
    // The message of the server.
    page.until_shows("#confirm-error", "for");
    page.fill("#confirm-input", "1h");
    confirm(&page);
    page.until_shows("#states tbody tr:first-child", "banned for");
    assert!(status(&server) >= 400);
    page.click(&button("Unban"));
    confirm(&page);
    page.until_shows(&button("Ban"), "Ban");
    assert_eq!(status(&server), 204);
    page.click(&button("Ban"));
    confirm(&page);
    // The list of bans.
    page.until_shows("#bans tbody tr", "ann");
    assert!(page.text("#bans").contains("local at 127.0.0.1"), "{}", page.shown());
    page.click("#bans tbody button");
    confirm(&page);
    page.until_shows("#bans-empty", "No key is banned by an operator.");
    page.click(&button("Reset"));
    confirm(&page);
    page.until_shows("#keys-result", "The key was reset.");
    page.click(&button("Reset"));
    confirm(&page);
    page.until_shows("#keys-result", "Nothing changed: the key had its whole quota.");
    page.has_no_problems();
}

#[test]
fn request_is_explained() {
    let server = Gateway::with_admin(RULES);
    send(&server, "ann", 5);
    let Some(page) = open(&server, "explain") else { return };
    page.fill("#explain-form [name=path]", "/login");
    page.fill("#explain-headers", "no colon");
    page.click("#explain-form button");
    page.until_shows("#banner", "has no colon: write NAME: VALUE");
    page.fill("#explain-headers", "X-User-Id: ann");
    page.fill("#explain-form [name=ip]", "192.0.2.7");
    page.click("#explain-form button");
    page.until_shows("#explain-answer", "Refused by per-user");
    page.until("document.querySelectorAll('#explained tbody tr').length === 3");
    assert!(page.text("#explained").contains("192.0.2.7"));
    page.fill("#explain-form [name=ip]", "no address");
    page.click("#explain-form button");
    page.until("!document.querySelector('#banner').hidden");
    page.fill("#explain-form [name=ip]", "192.0.2.7");
    page.fill("#explain-headers", "X-User-Id: bob");
    page.click("#explain-form button");
    page.until_shows("#explain-answer", "Allowed.");
    assert_eq!(page.value("document.querySelector('#banner').hidden"), true);
    page.has_no_problems();
}

#[test]
fn rules_are_edited_checked_applied_and_rolled_back() {
    let server = Gateway::with_admin(RULES);
    let Some(page) = open(&server, "rules") else { return };
    page.until_shows("#limits", "per-user");
    assert!(page.text("#limits").contains("Slows down guessing"));
    page.until("document.querySelector('#rules-text').value.includes('per-user')");
    let edit = |from: &str, to: &str| {
        let text = page.value("document.querySelector('#rules-text').value");
        page.fill("#rules-text", &text.as_str().expect("a text").replace(from, to));
    };
    edit("limit: 3,", "limit: 0,");
    page.click("#rules-check");
    page.until_shows("#rules-result", "Not valid:");
    page.click("#rules-result button");
    let selected = "document.querySelector('#rules-text').value.slice(0, document.querySelector('#rules-text').selectionStart).split('\\n').length";
    assert_eq!(page.value(selected), 4, "the button goes to the line");
    edit("limit: 0,", "limit: 4,");
    page.click("#rules-apply");
    page.until_shows("#confirm", "per-user");
    confirm(&page);
    page.until_shows("#rules-result", "Applied as version");
    page.until_shows("#limits tbody tr:first-child", "4 per");
    send(&server, "bob", 4);
    assert_eq!(server.connect().get_as("bob", "/").status, 429);
    page.until("document.querySelectorAll('#history tbody tr').length > 0");
    page.click("#history tbody button:not(:disabled)");
    confirm(&page);
    page.until_shows("#rules-result", "Rolled back");
    page.until_shows("#limits tbody tr:first-child", "3 per");
    page.until("document.querySelector('#rules-text').value.includes('limit: 3,')");
    page.has_no_problems();
}

/// Of two people who edit the same version, the second is informed and keeps the text.
#[test]
fn rules_that_changed_meanwhile_are_not_overwritten() {
    let server = Gateway::with_admin(RULES);
    let Some(page) = open(&server, "rules") else { return };
    page.until("document.querySelector('#rules-text').value.includes('limit: 3,')");
    let text = page.value("document.querySelector('#rules-text').value");
    page.fill("#rules-text", &text.as_str().expect("a text").replace("limit: 3,", "limit: 30,"));
    page.click("#rules-apply");
    page.until("document.querySelector('#confirm').open");
    // Another client changes the rules between the question and the confirmation.
    page.value(
        "fetch('/v1/rules').then((answer) => answer.json()).then(({ version, text }) => fetch('/v1/rules', { method: 'PUT', \
         headers: { 'content-type': 'application/yaml', 'if-match': `\"${version}\"` }, body: text.replace('limit: 5,', 'limit: 6,') }))",
    );
    page.click("#confirm-yes");
    page.until_shows("#confirm-error", "Somebody else has changed the rules");
    page.click("#confirm-no");
    let kept = page.value("document.querySelector('#rules-text').value");
    assert!(kept.as_str().is_some_and(|text| text.contains("limit: 30,")), "{kept}");
    page.until_shows("#limits", "6 per");
    page.has_no_problems();
}
