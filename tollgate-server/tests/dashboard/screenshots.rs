//! The pictures of `docs/dashboard.md`: `make screenshots`.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use testkit::gateway::Gateway;
use testkit::port::Port;
use testkit::upstream::{HELLO, upstream};
use testkit::wait::{poll, within};

use crate::browser::Page;
use crate::{PHONE, at};

const SCREEN: (u32, u32) = (1200, 980);

const RULES: &str = "\
# Limits of a small shop
gateway:
  routes:
    - name: shop
      path: /**
      upstream: [UPSTREAMS]
      health_check: { path: /healthz, every: 1s }
admin: { listen: 127.0.0.1:0, show_keys: true }
limits:
  - name: global
    limit: 100000
    window: 1m
  - name: per-user
    description: Each signed-in customer
    key: header:x-user-id
    algorithm: token_bucket
    capacity: 60
    refill: 15/s
  - name: search
    description: The search index is slow
    match: { path: /search/** }
    key: header:x-user-id
    limit: 60
    window: 10s
  - name: logins
    match: { path: /login, methods: [POST] }
    key: ip
    limit: 5
    window: 1m
  - name: checkout-trial
    match: { path: /checkout }
    key: header:x-user-id
    limit: 3
    window: 1m
    shadow: true
";

/// Sends requests of many users until it is stopped: a few are greedy, and the rest are not.
fn traffic(server: &Gateway, is_over: &AtomicBool) {
    let users = ["crawler-7", "batch-export", "mallory", "ann", "bob", "carol", "dave", "erin", "frank", "grace"];
    let paths = ["/", "/search/shoes", "/cart", "/checkout", "/search/hats"];
    let mut connection = server.connect();
    for round in 0_usize.. {
        if is_over.load(Relaxed) {
            return;
        }
        // Waves of different lengths, with the same users in each.
        let wave = 5 + (round / 11) % 4 + (round / 37) % 5;
        for step in 0..wave {
            let user = users[(step * step + round) % users.len().min(3 + (round + step) % 8)];
            connection.get_as(user, paths[(round + step) % paths.len()]);
        }
        // Pauses between two rounds.
        _ = poll(Duration::from_millis(40), || None::<()>);
    }
}

fn save(page: &Page, name: &str) {
    let png = STANDARD.decode(page.picture()).expect("Chromium encodes it");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/pictures").join(format!("dashboard-{name}.png"));
    std::fs::write(path, png).expect("docs/pictures is writable");
}

/// A minute of traffic, so only on request.
#[test]
fn screenshots_are_taken() {
    if std::env::var_os("TAKE_SCREENSHOTS").is_none() {
        return;
    }
    // One upstream answers, and nothing listens at the other.
    let (healthy, dead) = (upstream(HELLO), Port::claim());
    let upstreams = format!("'http://{healthy}', 'http://127.0.0.1:{}'", dead.number());
    let server = Gateway::with_admin(&RULES.replace("UPSTREAMS", &upstreams));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| traffic(&server, &is_over));
        let page = Page::open(SCREEN).expect("Chromium is installed");
        page.prefer("prefers-color-scheme", "light");
        page.load(&at(server.admin(), "overview"));
        let points = "document.querySelector('#live-chart .allowed-line').getAttribute('d')?.split('L').length";
        within(Duration::from_secs(90), "a minute of history", || page.value(points) == 60);
        save(&page, "overview");
        page.prefer("prefers-color-scheme", "dark");
        save(&page, "dark");
        page.prefer("prefers-color-scheme", "light");
        for (view, ready, name) in [
            ("top", "document.querySelectorAll('#top-keys tbody tr').length > 3", "top"),
            ("rules", "document.querySelectorAll('#limits tbody tr').length > 3", "rules"),
            ("keys?key=mallory", "document.querySelectorAll('#states tbody tr').length > 1", "keys"),
            ("playground", "document.querySelectorAll('#compared tbody tr').length === 5", "playground"),
        ] {
            page.value(&format!("location.hash = '#{view}'"));
            page.until(ready);
            save(&page, name);
        }
        page.value("location.hash = '#explain'");
        page.fill("#explain-form [name=path]", "/search/shoes");
        page.fill("#explain-headers", "X-User-Id: mallory");
        page.click("#explain-form button");
        page.until("document.querySelectorAll('#explained tbody tr').length > 3");
        save(&page, "explain");
        let phone = Page::open(PHONE).expect("Chromium is installed");
        phone.prefer("prefers-color-scheme", "dark");
        phone.load(&at(server.admin(), "overview"));
        phone.until("document.querySelector('#live-chart .denied').getAttribute('d').length > 100");
        save(&phone, "phone");
        is_over.store(true, Relaxed);
    });
}
