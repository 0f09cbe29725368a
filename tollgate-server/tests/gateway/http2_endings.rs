//! Ends of HTTP/2 connections while their clients do not read.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use testkit::gateway::{Gateway, site};
use testkit::upstream::Raw;

use crate::http2_deadlines::Frames;
use crate::http2_misuse::{
    CANCEL, DATA, END_HEADERS, END_STREAM, GET, HEADERS, RST_STREAM, SETTINGS, WINDOW_UPDATE, head,
};

/// More responses than the gateway passes to the system at once, each short enough that h2 takes all of it.
const RESPONSES: u32 = 99;
const RESPONSE_BYTES: usize = 30_000;

/// Requests [`RESPONSES`] from a gateway and reads nothing, until the gateway has passed all of them to h2. Then `end`
/// lets it end the connection, and everything is read.
#[track_caller]
fn assert_responses_arrive(settings: &str, end: impl FnOnce(&Gateway)) {
    let sent = Arc::new(AtomicUsize::new(0));
    let upstream = Raw::start({
        let sent = Arc::clone(&sent);
        move |conversation| {
            conversation.head();
            conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n");
            while conversation.send(vec![b'x'; 64 << 10]) {
                sent.fetch_add(1, Relaxed);
            }
        }
    });
    let routes = [
        format!("{{ path: /long, upstream: {} }}", upstream.url()),
        format!("{{ path: /**, respond: {{ body: {} }} }}", "x".repeat(RESPONSE_BYTES)),
    ];
    let settings = format!("access_log: {{ format: json, file: access.log }}\n  {settings}");
    let gateway = Gateway::start(&site(&settings, &routes, ""));
    let mut frames = Frames::to(&gateway);
    // SETTINGS_INITIAL_WINDOW_SIZE: only the socket keeps the gateway from writing.
    frames.send_on(0, SETTINGS, 0, &[0, 4, 0x7f, 0xff, 0xff, 0xff]).unwrap();
    frames.send_on(0, WINDOW_UPDATE, 0, &[0x7f, 0xff, 0, 0]).unwrap();
    frames.send_on(1, HEADERS, END_HEADERS | END_STREAM, &head(GET, "/long")).unwrap();
    let mut before = 0;
    while before == 0 || before != sent.load(Relaxed) {
        before = sent.load(Relaxed);
        std::thread::sleep(Duration::from_millis(500));
    }
    for number in 1..=RESPONSES {
        frames.send_on(2 * number + 1, HEADERS, END_HEADERS | END_STREAM, &head(GET, "/")).unwrap();
    }
    gateway.await_lines(&gateway.path("access.log"), RESPONSES as usize);
    frames.send_on(1, RST_STREAM, 0, &CANCEL).unwrap();
    gateway.await_lines(&gateway.path("access.log"), RESPONSES as usize + 1);
    end(&gateway);
    // Longer than the idle timeout, the moment for late requests, and the interval of checks.
    std::thread::sleep(Duration::from_secs(6));
    let mut complete = 0;
    while complete < RESPONSES {
        match frames.next() {
            Some((DATA, flags, _)) if flags & END_STREAM != 0 => complete += 1,
            Some(_) => {}
            None => panic!("{complete} of {RESPONSES} responses arrived"),
        }
    }
    // Afterwards the connection is closed.
    while frames.next().is_some() {}
}

#[test]
fn responses_that_are_not_yet_written_survive_the_idle_timeout() {
    assert_responses_arrive("timeouts: { idle: 1s }", |_gateway| {});
}

#[test]
fn responses_that_are_not_yet_written_survive_a_stop() {
    assert_responses_arrive("", |gateway| gateway.signal("TERM"));
}
