//! The page on a server with many limits, and after a day.

use std::time::Duration;

use testkit::gateway::Gateway;
use testkit::wait::within;

use crate::browser::Page;
use crate::{LAPTOP, RULES, at, open, send};

/// 10,000 limits stay fluid: a bounded number of rows, and a search.
#[test]
fn ten_thousand_limits_are_searched_and_shown_in_parts() {
    let limits: String = (0..10_000)
        .map(|number| {
            format!("  - {{ name: limit-{number:05}, match: {{ path: /{number} }}, key: ip, limit: 10, window: 1m }}\n")
        })
        .collect();
    let rules = format!("gateway: {{ routes: [{{ path: /**, respond: {{ status: 204 }} }}] }}\nlimits:\n{limits}");
    let server = Gateway::with_admin(&rules);
    let Some(page) = open(&server, "rules") else { return };
    let rows = "document.querySelectorAll('#limits tbody tr').length";
    // An unoptimised server takes seconds to read the rules.
    let count = "document.querySelector('#limits-count').innerText";
    within(Duration::from_secs(120), "the limits are shown", || page.value(count) == "10,000");
    assert_eq!(page.value(rows), 200);
    page.click("#limits-more");
    assert_eq!(page.value(rows), 400);
    page.fill("#limits-search", "limit-09999");
    page.until(&format!("{rows} === 1"));
    assert!(page.text("#limits tbody").contains("limit-09999"));
    page.fill("#limits-search", "no such limit");
    page.until_shows("#limits-empty", "No limit matches");
    page.click("nav a[href='#overview']");
    page.until_shows("#busiest-count", "20 of 10,000");
    page.has_no_problems();
}

/// Timers run a hundred times as fast here, so a thousand polls take seconds.
#[test]
fn polls_leave_nothing_behind() {
    const FASTER: &str =
        "{ const real = setTimeout; window.setTimeout = (run, after, ...rest) => real(run, after / 100, ...rest); }";
    let server = Gateway::with_admin(RULES);
    let Some(page) = Page::open(LAPTOP) else { return };
    page.before_load(FASTER);
    page.before_load("{ const real = fetch; window.polls = 0; window.fetch = (...all) => { window.polls += 1; return real(...all); }; }");
    page.load(&at(server.admin(), "overview"));
    // The browser itself keeps a bounded list of what was loaded.
    page.value("performance.setResourceTimingBufferSize(0)");
    let views = ["overview", "top", "rules", "keys?key=ann", "overview"];
    let visit = |polls: u64| {
        send(&server, "ann", 5);
        let start = page.value("polls").as_u64().expect("a number");
        for (index, view) in views.iter().enumerate() {
            page.value(&format!("location.hash = '#{view}'"));
            let wanted = start + polls * (index as u64 + 1) / views.len() as u64;
            page.until(&format!("polls >= {wanted}"));
        }
    };
    visit(200);
    let metrics = ["Nodes", "JSEventListeners", "JSHeapUsedSize"];
    let before = metrics.map(|name| page.metric(name));
    visit(1_000);
    let after = metrics.map(|name| page.metric(name));
    let [nodes, listeners, heap] = [0, 1, 2].map(|index| after[index] - before[index]);
    assert!(nodes.abs() <= 50.0, "{before:?} {after:?}");
    assert!(listeners.abs() <= 10.0, "{before:?} {after:?}");
    // The same views with the same data: less than 150 bytes for each poll, which is noise of the engine.
    assert!(heap < 150_000.0, "{before:?} {after:?}");
    page.has_no_problems();
}
