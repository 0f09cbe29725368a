//! Keys that clients chose to attack the reader of the page.

use serde_json::json;
use testkit::gateway::Gateway;

use crate::{LAPTOP, RULES, open};

#[test]
fn hostile_keys_are_shown_as_text() {
    let server = Gateway::with_admin(RULES);
    let keys = [
        "<img src=x onerror=document.title='owned'>".to_owned(),
        "\"><script>document.title='owned'</script>".to_owned(),
        "\u{202e}gnp.exe".to_owned(),
        "a\u{200b}nn\u{85}x".to_owned(),
        "عميل".to_owned(),
        "k".repeat(1024),
    ];
    for key in &keys {
        let mut connection = server.connect();
        for _ in 0..5 {
            connection.get_as(key, "/");
        }
    }
    let Some(page) = open(&server, "top") else { return };
    page.until(&format!("document.querySelectorAll('#top-keys tbody tr').length === {}", keys.len()));
    let shown = page.text("#top-keys tbody");
    for text in ["<img src=x onerror=", "\"><script>", "\\u{202e}gnp.exe", "عميل", "kkkkkkkkkk"] {
        assert!(shown.contains(text), "{text} is not in {shown}");
    }
    assert!(!shown.contains(['\u{202e}', '\u{200b}', '\u{85}']), "invisible characters are escaped: {shown}");
    assert_eq!(page.value("document.querySelectorAll('main img, main script').length"), 0);
    assert_eq!(page.value("document.title"), "Top limited · Tollgate");
    let width = format!("document.documentElement.scrollWidth <= {}", LAPTOP.0);
    assert_eq!(page.value(&width), true);
    // The link leads to the state of the same key, whatever it is made of.
    for key in &keys[..5] {
        let link = "[...document.querySelectorAll('#top-keys a')].find((link) => \
                    new URLSearchParams(link.hash.split('?')[1]).get('key') === KEY)";
        page.value(&format!("{}.click()", link.replace("KEY", &json!(key).to_string())));
        page.until_shows("#states tbody tr:first-child", "0 of 3");
        page.click("nav a[href='#top']");
        page.until("document.querySelectorAll('#top-keys a').length > 0");
    }
    assert_eq!(page.value("document.title"), "Top limited · Tollgate");
    page.has_no_problems();
}

#[test]
fn keys_are_hashes_unless_the_file_shows_them() {
    let server = Gateway::with_admin(&RULES.replace("show_keys: true", "show_keys: false"));
    let mut connection = server.connect();
    for _ in 0..5 {
        connection.get_as("ann@example.com", "/");
    }
    let Some(page) = open(&server, "top") else { return };
    page.until("document.querySelectorAll('#top-keys tbody tr').length === 1");
    page.until_shows("#top-hashed", "show_keys: true");
    assert!(!page.shown().contains("ann@example.com"));
    assert_eq!(page.value("document.querySelector('#top-keys a').hidden"), true, "a hash cannot be looked up");
}
