//! Each view: with data, without, and while the server is gone.

use testkit::folder::folder_with;
use testkit::gateway::Gateway;
use testkit::port::Port;
use testkit::redis::RedisServer;
use testkit::tollgate::{Process, RULES as FILE};

use crate::browser::Page;
use crate::{LAPTOP, RULES, at, open, send};

const EMPTY: &str = "gateway: { routes: [{ path: /**, respond: { status: 204 } }] }\nlimits: []\n";

#[test]
fn overview_shows_decisions_as_they_are_made() {
    let server = Gateway::with_admin(RULES);
    let Some(page) = open(&server, "overview") else { return };
    page.until_shows("#live-empty", "Send a request to the gateway at http://127.0.0.1:");
    page.until("document.querySelectorAll('#busiest tbody tr').length === 3");
    send(&server, "ann", 10);
    page.until("[...document.querySelectorAll('#busiest tbody tr')].map((row) => `${row.cells[0].innerText} ${row.cells[4].innerText}`).toSorted().join() === 'logins 0,per-user 7,trialshadow 9'");
    page.until("document.querySelector('#live-empty').hidden && document.querySelector('#live-chart .denied').getAttribute('d') !== ''");
    page.until_shows("#tile-ready", "ready");
    page.until_shows("#tile-store", "memory");
    page.until_shows("#rules-facts", "file");
    page.has_no_problems();
}

#[test]
fn overview_shows_upstreams_and_their_health() {
    let dead = Port::claim();
    let rules = format!(
        "gateway:\n  routes:\n    - {{ name: api, path: /**, upstream: 'http://127.0.0.1:{}', \
         health_check: {{ path: /, every: 1s }} }}\nlimits: []\n",
        dead.number()
    );
    let server = Gateway::with_admin(&rules);
    let Some(page) = open(&server, "overview") else { return };
    page.until_shows("#upstreams", &format!("127.0.0.1:{}", dead.number()));
    page.until_shows("#upstreams-count", "0 of 1 healthy");
    page.until_shows("#upstreams", "unhealthy");
    page.has_no_problems();
}

#[test]
fn overview_shows_the_store_and_its_breakers() {
    let mut redis = RedisServer::start();
    let server = Gateway::with_admin(&format!("store: {}\n{RULES}", redis.url()));
    let Some(page) = open(&server, "overview") else { return };
    page.until_shows("#tile-store", "redis: available");
    page.until_shows("#servers", "closed");
    redis.kill();
    send(&server, "ann", 3);
    page.until_shows("#tile-store", "redis: not available");
    page.until("!document.querySelector('#servers').innerText.includes('closed')");
    redis.restart();
    page.until_shows("#tile-store", "redis: available");
    page.has_no_problems();
}

#[test]
fn every_view_explains_itself_when_there_is_nothing_to_show() {
    let server = Gateway::with_admin(EMPTY);
    let Some(page) = open(&server, "overview") else { return };
    page.until_shows("#busiest-empty", "No limit has decided anything yet");
    page.until_shows("#upstreams-empty", "No route forwards requests to another server.");
    for (view, element, text) in [
        ("top", "#top-empty", "No key was denied in the last minute"),
        ("rules", "#limits-empty", "There are no limits"),
        ("keys", "#keys-empty", "takes nothing from its quota"),
        ("explain", "#explain-empty", "Nothing is counted"),
    ] {
        page.click(&format!("nav a[href='#{view}']"));
        page.until_shows(element, text);
        assert_eq!(page.value("document.activeElement.tagName"), "H1", "the focus moves to the title of {view}");
    }
    page.has_no_problems();
}

#[test]
fn server_that_is_gone_is_reported_and_found_again() {
    let (port, gateway) = (Port::claim(), Port::claim());
    let admin = format!("127.0.0.1:{}", port.number());
    let listen = format!("127.0.0.1:{}", gateway.number());
    let arguments = ["serve", "--config", FILE, "--listen", &listen, "--admin", &admin];
    let start = || Process::start(folder_with(&[(FILE, RULES)]), &arguments);
    let server = start();
    let Some(page) = Page::open(LAPTOP) else { return };
    page.load(&at(admin.parse().expect("an address"), "overview"));
    page.until_shows("#connection", "Live");
    page.until_shows("#busiest", "per-user");
    drop(server);
    page.until_shows("#connection", "No answer since");
    page.until("document.querySelector('#view-overview').classList.contains('stale')");
    assert!(page.text("#busiest").contains("per-user"), "the last data stays readable");
    assert!(page.text("#announce").contains("does not answer"), "a screen reader is informed");
    // A view that does not poll finds out too.
    page.click("nav a[href='#explain']");
    page.click("#explain-form button");
    page.until_shows("#banner", "the server does not answer");
    let _server = start();
    page.until_shows("#connection", "Live");
    assert!(page.text("#announce").contains("answers again"));
    page.until("document.querySelector('#banner').hidden");
    page.click("nav a[href='#overview']");
    page.until("!document.querySelector('#view-overview').classList.contains('stale')");
    page.has_no_problems();
}

#[test]
fn nothing_is_polled_while_the_page_is_hidden() {
    let server = Gateway::with_admin(RULES);
    let Some(page) = open(&server, "overview") else { return };
    let requests = "performance.getEntriesByType('resource').length";
    page.until(&format!("{requests} > 4"));
    let hide = |hidden: bool| {
        page.value(&format!(
            "Object.defineProperty(document, 'hidden', {{ value: {hidden}, configurable: true }}), \
             document.dispatchEvent(new Event('visibilitychange'))"
        ));
    };
    hide(true);
    let before = page.value(requests);
    // Three polls would fit into this time.
    page.value("new Promise((done) => setTimeout(done, 3000))");
    assert_eq!(page.value(requests), before);
    hide(false);
    page.until(&format!("{requests} > {before}"));
}
