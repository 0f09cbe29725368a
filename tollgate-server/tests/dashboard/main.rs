//! The dashboard in Chromium, on the real server.

mod access;
mod appearance;
mod browser;
mod changes;
mod hostile_keys;
mod playground;
mod resources;
mod screenshots;
mod views;

use std::net::SocketAddr;

use testkit::gateway::Gateway;

use crate::browser::Page;

/// A screen of a laptop.
const LAPTOP: (u32, u32) = (1280, 900);
/// A screen of a phone.
const PHONE: (u32, u32) = (390, 844);

/// A gateway that answers every request itself, with keys that are shown and a limit per user.
const RULES: &str = "\
gateway: { routes: [{ name: all, path: /**, respond: { status: 204 } }] }
admin: { listen: 127.0.0.1:0, show_keys: true }
limits:
  - { name: per-user, key: 'header:x-user-id', limit: 3, window: 1h, algorithm: fixed_window, align: first_request }
  - { name: trial, key: 'header:x-user-id', algorithm: sliding_window_log, limit: 1, window: 1h, shadow: true }
  - { name: logins, match: { path: /login }, key: ip, limit: 5, window: 1m, description: Slows down guessing }
";

/// Returns the address of a view.
fn at(admin: SocketAddr, view: &str) -> String {
    format!("http://{admin}/#{view}")
}

/// Opens a view of a server. Returns `None` if there is no browser on this machine.
fn open(server: &Gateway, view: &str) -> Option<Page> {
    let page = Page::open(LAPTOP)?;
    page.load(&at(server.admin(), view));
    page.until("document.querySelector('#connection').dataset.state === 'live'");
    Some(page)
}

/// Sends requests in the name of a user.
fn send(server: &Gateway, user: &str, requests: usize) {
    let mut connection = server.connect();
    for _ in 0..requests {
        connection.get_as(user, "/");
    }
}
