//! Small and dark screens, the keyboard, and accessibility.

use testkit::gateway::Gateway;
use testkit::skip::skipped;

use crate::browser::{Page, tools};
use crate::{LAPTOP, PHONE, RULES, at, open, send};

const VIEWS: [&str; 6] = ["overview", "top", "rules", "keys?key=ann", "explain", "playground"];

#[test]
fn no_view_is_wider_than_a_phone() {
    let server = Gateway::with_admin(RULES);
    send(&server, &"wide".repeat(60), 5);
    let Some(page) = Page::open(PHONE) else { return };
    for view in VIEWS {
        page.load(&at(server.admin(), view));
        page.until_shows("#connection", "Live");
        let overflowing = "[...document.querySelectorAll('main *')].filter((element) => element.checkVisibility() \
             && element.getBoundingClientRect().right > innerWidth + 1 && !element.closest('svg')).map((element) => element.outerHTML.slice(0, 200))";
        page.until("document.documentElement.scrollWidth <= innerWidth");
        assert_eq!(page.value(overflowing), serde_json::json!([]), "{view}");
    }
    page.has_no_problems();
}

#[test]
fn colours_follow_the_system() {
    let server = Gateway::with_admin(RULES);
    let Some(page) = open(&server, "overview") else { return };
    let background = "getComputedStyle(document.body).backgroundColor";
    page.prefer("prefers-color-scheme", "light");
    assert_eq!(page.value(background), "rgb(245, 246, 248)");
    page.prefer("prefers-color-scheme", "dark");
    assert_eq!(page.value(background), "rgb(14, 17, 22)");
    page.prefer("prefers-reduced-motion", "reduce");
    assert_eq!(page.value("getComputedStyle(document.querySelector('#connection .dot')).animationName"), "none");
}

#[test]
fn keyboard_reaches_every_control_and_shows_the_focus() {
    let server = Gateway::with_admin(RULES);
    let Some(page) = open(&server, "top") else { return };
    page.press("Tab");
    assert_eq!(page.value("document.activeElement.id"), "skip");
    page.press("Enter");
    assert_eq!(page.value("document.activeElement.id"), "main");
    let mut reached = Vec::new();
    loop {
        page.press("Tab");
        // Behind the last control is the end of the page.
        if page.value("document.activeElement === document.body") == true {
            break;
        }
        let outline = page.value(
            "(() => { const at = document.activeElement, shown = at.type === 'radio' ? at.nextElementSibling : at; \
             return [at.name || at.id || at.textContent, getComputedStyle(shown).outlineStyle] })()",
        );
        assert_ne!(outline[1], "none", "{outline}");
        reached.push(outline[0].as_str().unwrap_or_default().to_owned());
    }
    for control in ["kind", "over", "scope", "limit"] {
        assert!(reached.iter().any(|name| name == control), "{control} is not in {reached:?}");
    }
}

/// axe-core knows the rules of WCAG that a program can check: contrast, labels, roles, landmarks.
#[test]
fn views_pass_the_checks_of_axe() {
    let Ok(axe) = std::fs::read_to_string(tools().join("node_modules/axe-core/axe.min.js")) else {
        let message = "axe-core is not installed: run `tools/install-browser`";
        assert!(std::env::var("CI").as_deref() != Ok("true"), "{message}");
        return skipped(message);
    };
    let server = Gateway::with_admin(RULES);
    send(&server, "ann", 5);
    let Some(page) = Page::open(LAPTOP) else { return };
    // The policy of the page keeps other scripts out, and that of a test too.
    page.call("Page.setBypassCSP", serde_json::json!({ "enabled": true }));
    for scheme in ["light", "dark"] {
        page.prefer("prefers-color-scheme", scheme);
        for view in VIEWS {
            page.load(&format!("http://{}/?{scheme}-{}#{view}", server.admin(), &view[..3]));
            page.until_shows("#connection", "Live");
            page.value(&format!("{axe}; true"));
            let found = page.value(
                "axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice'] }).then((result) => \
                 result.violations.flatMap((rule) => rule.nodes.map((node) => `${rule.id}: ${node.html}: ${node.failureSummary}`)))",
            );
            assert_eq!(found, serde_json::json!([]), "{view} in {scheme}");
        }
    }
}
