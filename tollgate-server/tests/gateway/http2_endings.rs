//! Ends of HTTP/2 connections, and responses that are not written because their clients do not read.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use testkit::gateway::{Gateway, site};
use testkit::upstream::{Conversation, Raw};

use crate::http2_deadlines::Frames;
use crate::http2_misuse::{
    CANCEL, DATA, END_HEADERS, END_STREAM, GET, GOAWAY, HEADERS, RST_STREAM, SETTINGS, WINDOW_UPDATE, head,
};

/// Each response is short enough that h2 takes all of it.
const RESPONSES: u32 = 99;
const RESPONSE_BYTES: usize = 30_000;

/// A client that has not read the end of [`RESPONSES`], which the gateway has passed to h2.
struct Unread {
    gateway: Gateway,
    frames: Frames,
    #[expect(dead_code, reason = "it serves until it is dropped")]
    upstream: Raw,
}

impl Unread {
    /// Starts a gateway with these settings, and requests this path. A long response before the others fills the socket.
    fn start(settings: &str, path: &str) -> Self {
        let sent = Arc::new(AtomicUsize::new(0));
        let upstream = Raw::start({
            let sent = Arc::clone(&sent);
            move |conversation| serve(conversation, &sent)
        });
        let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
        let settings = format!("access_log: {{ format: json, file: access.log }}\n  {settings}");
        let gateway = Gateway::with_admin(&site(&settings, &[route], ""));
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
            frames.send_on(2 * number + 1, HEADERS, END_HEADERS | END_STREAM, &head(GET, path)).unwrap();
        }
        gateway.await_lines(&gateway.path("access.log"), RESPONSES as usize);
        frames.send_on(1, RST_STREAM, 0, &CANCEL).unwrap();
        gateway.await_lines(&gateway.path("access.log"), RESPONSES as usize + 1);
        Self { gateway, frames, upstream }
    }

    /// Reads all responses.
    #[track_caller]
    fn read(&mut self) {
        let mut complete = 0;
        while complete < RESPONSES {
            match self.frames.next() {
                Some((DATA, flags, _)) if flags & END_STREAM != 0 => complete += 1,
                Some(_) => {}
                None => panic!("{complete} of {RESPONSES} responses arrived"),
            }
        }
    }

    /// Lets time pass that is longer than the idle timeout, the moment for late requests, and the interval of checks.
    /// Then reads everything.
    #[track_caller]
    fn assert_responses_arrive(mut self) {
        std::thread::sleep(Duration::from_secs(6));
        self.read();
        while self.frames.next().is_some() {}
    }
}

/// Serves responses, and counts the pieces of a long one.
fn serve(conversation: &mut Conversation, sent: &AtomicUsize) {
    while let Some(asked) = conversation.request() {
        let body = "x".repeat(RESPONSE_BYTES);
        if asked.head.starts_with("GET /long ") {
            conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n");
            while conversation.send(vec![b'x'; 64 << 10]) {
                sent.fetch_add(1, Relaxed);
            }
        } else if asked.head.starts_with("GET /chunked ") {
            conversation
                .send(format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{RESPONSE_BYTES:x}\r\n{body}\r\n"));
            conversation.send("0\r\n\r\n");
        } else {
            conversation.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {RESPONSE_BYTES}\r\n\r\n{body}"));
        }
    }
}

#[test]
fn responses_that_are_not_yet_written_survive_the_idle_timeout() {
    Unread::start("timeouts: { idle: 1s }", "/").assert_responses_arrive();
}

#[test]
fn responses_that_are_not_yet_written_survive_a_stop() {
    let unread = Unread::start("", "/");
    unread.gateway.signal("TERM");
    unread.assert_responses_arrive();
}

#[test]
fn responses_that_are_not_yet_written_count_as_buffered() {
    for path in ["/", "/chunked"] {
        let mut unread = Unread::start("", path);
        let held = unread.gateway.metric("tollgate_buffered_bytes").unwrap();
        // Some were written, and a part of each one is not counted.
        assert!(held > 0.8 * f64::from(RESPONSES) * RESPONSE_BYTES as f64, "{path}: {held} bytes");
        unread.read();
        unread.gateway.await_metric("tollgate_buffered_bytes", 0);
    }
}

/// A client that sends nothing more is not closed only with the next ping.
#[test]
fn connection_is_closed_a_moment_after_the_last_response_of_a_stop() {
    let (release, released) = mpsc::channel::<()>();
    let released = Mutex::new(released);
    let upstream = Raw::start(move |conversation| {
        if conversation.request().is_some_and(|asked| asked.head.starts_with("GET /last ")) {
            released.lock().unwrap().recv().unwrap();
            conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        }
        conversation.await_end();
    });
    // The request that ends with this timeout shows that less time has passed. The next ping, with which the connection was
    // once closed, is only a little later.
    let routes = [
        format!("{{ path: /late, upstream: {}, timeout: 15s }}", upstream.url()),
        format!("{{ path: /**, upstream: {} }}", upstream.url()),
    ];
    let timeouts = "timeouts: { head: 1h, body: 1h, idle: 1h, write: 1h, drain: 1h }";
    let gateway = Gateway::start(&site(timeouts, &routes, ""));
    let (mut frames, mut late) = (Frames::to(&gateway), gateway.connect());
    frames.send_on(1, HEADERS, END_HEADERS | END_STREAM, &head(GET, "/last")).unwrap();
    late.send("GET /late HTTP/1.1\r\nHost: h\r\n\r\n");
    testkit::wait::until("requests under way", || upstream.requests() == 2);
    gateway.signal("TERM");
    while frames.next().expect("GOAWAY comes first").0 != GOAWAY {}
    // The moment for late requests passes while this one is under way.
    std::thread::sleep(Duration::from_secs(4));
    release.send(()).unwrap();
    while frames.next().is_some() {}
    assert!(!late.has_answer_within_a_moment(), "the connection was closed late");
}
