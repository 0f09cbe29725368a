//! HTTP/2 clients that send frames which cost them nothing, and clients that are merely busy.

use std::sync::mpsc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use testkit::gateway::{Gateway, site};
use testkit::upstream::{Raw, Served, Speaks, full};
use testkit::wait::{PATIENCE, until};

use crate::http2_deadlines::Frames;

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
const UNKNOWN: u8 = 0x2a;

const ACK: u8 = 1;
pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;
const NO_ERROR: [u8; 4] = [0; 4];
pub(crate) const CANCEL: [u8; 4] = [0, 0, 0, 8];
const ENHANCE_YOUR_CALM: [u8; 4] = [0, 0, 0, 11];

/// Returns the head of a request to the host `h`: everything but the host is in HPACK's static table, or a short
/// literal.
pub(crate) fn head(method: u8, path: &str) -> Vec<u8> {
    let length = u8::try_from(path.len()).unwrap();
    [&[method, 0x86, 0x04, length], path.as_bytes(), &[0x01, 1], b"h"].concat()
}
pub(crate) const GET: u8 = 0x82;
const POST: u8 = 0x83;

fn with_admin(rules: &str) -> String {
    format!("admin: {{ listen: '127.0.0.1:0' }}\n{rules}")
}

/// Reads to the end of the connection. Returns the error code of its GOAWAY.
fn goaway_code(frames: &mut Frames) -> Option<Vec<u8>> {
    let mut code = None;
    while let Some((kind, _, payload)) = frames.next() {
        if kind == GOAWAY {
            code = payload.get(4..8).map(<[u8]>::to_vec);
        }
    }
    code
}

#[test]
fn a_flood_of_cheap_frames_ends_its_connection() {
    let upstream = Raw::start(|conversation| conversation.await_end());
    let routes = [
        format!("{{ path: /upload, upstream: {} }}", upstream.url()),
        "{ path: /**, respond: { body: ok } }".to_owned(),
    ];
    let gateway = Gateway::start(&with_admin(&site("", &routes, "")));
    let floods: [(&str, u32, u8, u8, &[u8]); 8] = [
        ("window updates", 0, WINDOW_UPDATE, 0, &[0, 0, 0, 1]),
        ("window updates of a stream", 1, WINDOW_UPDATE, 0, &[0, 0, 0, 1]),
        ("priorities", 3, PRIORITY, 0, &[0, 0, 0, 0, 7]),
        ("settings", 0, SETTINGS, 0, &[]),
        ("pings", 0, PING, 0, &[7; 8]),
        ("acknowledged pings", 0, PING, ACK, &[7; 8]),
        ("unknown frames", 0, UNKNOWN, 0, &[7; 8]),
        ("empty data", 1, DATA, 0, &[]),
    ];
    for (number, (name, stream, kind, flags, payload)) in floods.into_iter().enumerate() {
        let mut frames = Frames::to(&gateway);
        frames.send_on(1, HEADERS, END_HEADERS, &head(POST, "/upload")).unwrap();
        // The gateway may close the connection before it has read everything.
        let sent = (0..4_000).take_while(|_| frames.send_on(stream, kind, flags, payload).is_ok()).count();
        let code = goaway_code(&mut frames);
        assert_eq!(code.as_deref(), Some(&ENHANCE_YOUR_CALM[..]), "{name}: after {sent}");
        // h2 refuses a flood of empty DATA frames earlier than the gateway does.
        if kind != DATA {
            let series = "tollgate_connections_closed_total{reason=\"control_frame_flood\"}";
            gateway.await_metric(series, number as u64 + 1);
        }
    }
    gateway.await_said("warning: HTTP/2 connection of 127.0.0.1 closed: it sent too many frames", 1);
    assert!(gateway.said().matches("closed: it sent").count() < 4, "lines are few: {}", gateway.said());
    assert_eq!(gateway.get("/").status, 200);
}

/// Heads that are not requests, and more concurrent requests than allowed.
#[test]
fn a_flood_of_heads_that_are_refused_ends_its_connection() {
    let upstream = Raw::start(|conversation| conversation.await_end());
    let gateway =
        Gateway::start(&with_admin(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], "")));
    for (number, block) in [vec![], head(GET, "/")].into_iter().enumerate() {
        let mut frames = Frames::to(&gateway);
        for number in 0..8_000 {
            if frames.send_on(2 * number + 1, HEADERS, END_HEADERS | END_STREAM, &block).is_err() {
                break;
            }
        }
        // h2 or the gateway closes it, whichever counts faster.
        assert_eq!(goaway_code(&mut frames).as_deref(), Some(&ENHANCE_YOUR_CALM[..]));
        gateway.await_metric("tollgate_connections", 0);
        gateway.await_metric("tollgate_connections_accepted_total", number as u64 + 1);
    }
}

/// 50 MB through a window of four kilobytes: two frames for each of them, and a PING, as gRPC clients send them.
#[test]
fn a_client_that_reads_much_through_small_windows_is_left_alone() {
    const BYTES: usize = 50 << 20;
    let upstream = Served::start(Speaks::Http1, |_: Request<Incoming>| async { Response::new(full(vec![7; BYTES])) });
    let route = format!("{{ path: /**, upstream: 'http://{}' }}", upstream.address);
    let gateway = Gateway::start(&with_admin(&site("", &[route], "")));
    let mut frames = Frames::to(&gateway);
    // SETTINGS_INITIAL_WINDOW_SIZE.
    frames.send_on(0, SETTINGS, 0, &[0, 4, 0, 0, 16, 0]).unwrap();
    frames.send_on(1, HEADERS, END_HEADERS | END_STREAM, &head(GET, "/")).unwrap();
    let (mut read, mut is_over) = (0, false);
    while !is_over {
        let (kind, flags, payload) = frames.next().expect("the connection goes on");
        match kind {
            SETTINGS if flags & ACK == 0 => frames.send_on(0, SETTINGS, ACK, &[]).unwrap(),
            PING if flags & ACK == 0 => frames.send_on(0, PING, ACK, &payload).unwrap(),
            DATA => {
                read += payload.len();
                is_over = flags & END_STREAM != 0;
                let increment = u32::try_from(payload.len()).unwrap().to_be_bytes();
                if !is_over && !payload.is_empty() {
                    frames.send_on(0, WINDOW_UPDATE, 0, &increment).unwrap();
                    frames.send_on(1, WINDOW_UPDATE, 0, &increment).unwrap();
                    frames.send_on(0, PING, 0, &[7; 8]).unwrap();
                }
            }
            GOAWAY => panic!("GOAWAY after {read} bytes: {payload:?}"),
            _ => {}
        }
    }
    assert_eq!(read, BYTES);
    gateway.await_metric("tollgate_connections_closed_total{reason=\"control_frame_flood\"}", 0);
}

/// Sends a request that the upstream does not answer, and resets it once it has arrived. Returns false if the gateway
/// has closed the connection.
fn reset(frames: &mut Frames, number: usize, (gateway, upstream): (&Gateway, &Raw)) -> bool {
    let (stream, before) = (u32::try_from(2 * number + 1).unwrap(), upstream.requests());
    let is_sent = frames.send_on(stream, HEADERS, END_HEADERS | END_STREAM, &head(GET, "/slow")).is_ok();
    let is_closed = || gateway.said().contains("closed: it reset too many requests");
    until("it is at the upstream", || upstream.requests() > before || is_closed());
    is_sent && !is_closed() && frames.send_on(stream, RST_STREAM, 0, &CANCEL).is_ok()
}

#[test]
fn client_that_resets_request_after_request_gets_goaway() {
    let upstream = Raw::start(|conversation| conversation.await_end());
    let gateway =
        Gateway::start(&with_admin(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], "")));
    let mut frames = Frames::to(&gateway);
    // Some are forgiven in the meantime.
    let resets = (0..400).take_while(|number| reset(&mut frames, *number, (&gateway, &upstream))).count();
    assert!(resets > 200, "{resets}");
    let series = "tollgate_connections_closed_total{reason=\"premature_resets\"}";
    gateway.await_metric(series, 1);
    assert_eq!(goaway_code(&mut frames).as_deref(), Some(&ENHANCE_YOUR_CALM[..]));
    gateway.await_said("warning: HTTP/2 connection of 127.0.0.1 closed: it reset too many requests", 1);
}

#[test]
fn a_client_that_resets_some_requests_and_lets_others_finish_is_left_alone() {
    let upstream = Raw::start(|conversation| conversation.await_end());
    let routes =
        [format!("{{ path: /slow, upstream: {} }}", upstream.url()), "{ path: /**, respond: { body: ok } }".to_owned()];
    let gateway = Gateway::start(&site("", &routes, ""));
    let mut frames = Frames::to(&gateway);
    for number in 0..300 {
        assert!(reset(&mut frames, 2 * number, (&gateway, &upstream)), "the connection goes on");
        let stream = u32::try_from(4 * number + 3).unwrap();
        frames.send_on(stream, HEADERS, END_HEADERS | END_STREAM, &head(GET, "/")).unwrap();
        loop {
            let (kind, flags, payload) = frames.next().expect("the connection goes on");
            match kind {
                SETTINGS if flags & ACK == 0 => frames.send_on(0, SETTINGS, ACK, &[]).unwrap(),
                DATA if flags & END_STREAM != 0 => break,
                GOAWAY => panic!("GOAWAY after {number}: {payload:?}"),
                _ => {}
            }
        }
    }
}

/// Sends a GET and waits for the end of the response. Skips frames of other streams.
#[track_caller]
fn get_ok(frames: &mut Frames, stream: u32, path: &str) {
    frames.send_on(stream, HEADERS, END_HEADERS | END_STREAM, &head(GET, path)).unwrap();
    loop {
        let (kind, flags, payload) = frames.next().expect("the connection goes on");
        match kind {
            DATA if flags & END_STREAM != 0 => return,
            GOAWAY => panic!("the connection is closed: {payload:?}"),
            _ => {}
        }
    }
}

/// A page that is left cancels all of its requests, and a busy gateway may read them all at once.
#[test]
fn requests_that_are_reset_at_once_do_not_end_the_connection() {
    let gateway = Gateway::start(&site("", &["{ path: /**, respond: { body: ok } }"], ""));
    let mut frames = Frames::to(&gateway);
    let requests = (0..90).map(|number| 2 * number + 1).flat_map(|stream| {
        let request = Frames::frame(stream, HEADERS, END_HEADERS | END_STREAM, &head(GET, "/"));
        [request, Frames::frame(stream, RST_STREAM, 0, &CANCEL)].concat()
    });
    frames.send_bytes(&requests.collect::<Vec<u8>>()).unwrap();
    get_ok(&mut frames, 201, "/");
}

const PREMATURE_RESETS: &str = "tollgate_connections_closed_total{reason=\"premature_resets\"}";

#[test]
fn resets_of_old_streams_are_not_premature() {
    let upstream = Raw::start(|conversation| {
        _ = conversation.head();
        conversation.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n");
        conversation.await_end();
    });
    let routes = [
        format!("{{ path: /events, upstream: {} }}", upstream.url()),
        "{ path: /**, respond: { body: ok } }".to_owned(),
    ];
    let gateway = Gateway::start(&with_admin(&site("", &routes, "")));
    let mut frames = Frames::to(&gateway);
    let mut streams = (0..).map(|number| 2 * number + 1);
    for round in 1..=4 {
        let open: Vec<u32> = streams.by_ref().take(80).collect();
        for stream in &open {
            frames.send_on(*stream, HEADERS, END_HEADERS | END_STREAM, &head(GET, "/events")).unwrap();
        }
        until("they are at the upstream", || upstream.requests() == 80 * round);
        std::thread::sleep(Duration::from_millis(1_200));
        for stream in &open {
            frames.send_on(*stream, RST_STREAM, 0, &CANCEL).unwrap();
        }
        get_ok(&mut frames, streams.next().unwrap(), "/");
    }
    get_ok(&mut frames, streams.next().unwrap(), "/");
    gateway.await_metric(PREMATURE_RESETS, 0);
}

#[test]
fn resets_that_a_trusted_proxy_passes_on_are_not_counted() {
    let upstream = Raw::start(|conversation| conversation.await_end());
    let routes =
        [format!("{{ path: /slow, upstream: {} }}", upstream.url()), "{ path: /**, respond: { body: ok } }".to_owned()];
    let gateway = Gateway::start(&with_admin(&site("trusted_proxies: [127.0.0.0/8]", &routes, "")));
    let mut frames = Frames::to(&gateway);
    for number in 0..300 {
        assert!(reset(&mut frames, number, (&gateway, &upstream)), "the connection goes on");
    }
    get_ok(&mut frames, 601, "/");
    gateway.await_metric(PREMATURE_RESETS, 0);
}

#[test]
fn answers_that_the_gateway_cuts_off_are_not_resets_of_the_client() {
    const HOLDERS: u32 = 40;
    let upstream = Raw::start(|conversation| {
        while conversation.request().is_some() {
            conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n");
            if !conversation.send(vec![b'x'; 200_000]) {
                return;
            }
        }
    });
    let routes =
        [format!("{{ path: /big, upstream: {} }}", upstream.url()), "{ path: /**, respond: { body: ok } }".to_owned()];
    let settings = "max_buffered: 1MiB\n  timeouts: { write: 1h }";
    let gateway = Gateway::start(&with_admin(&site(settings, &routes, "")));
    let mut frames = Frames::to(&gateway);
    // The window of the connection has room for all responses, the windows of the streams do not.
    frames.send_on(0, WINDOW_UPDATE, 0, &[0x3f, 0, 0, 0]).unwrap();
    let (mut cut, mut stream) = (0, 1);
    let mut begin = |frames: &mut Frames| {
        frames.send_on(stream, HEADERS, END_HEADERS | END_STREAM, &head(GET, "/big")).unwrap();
        stream += 2;
    };
    for _ in 0..HOLDERS {
        begin(&mut frames);
    }
    while cut < 300 {
        let (kind, _, payload) = frames.next().expect("the connection goes on");
        match kind {
            RST_STREAM => {
                cut += 1;
                begin(&mut frames);
            }
            GOAWAY => panic!("the connection is closed after {cut}: {payload:?}"),
            _ => {}
        }
    }
    gateway.await_metric(PREMATURE_RESETS, 0);
}

#[test]
fn upload_that_the_client_resets_never_looks_complete_to_the_upstream() {
    for code in [NO_ERROR, CANCEL] {
        let (sender, uploads) = mpsc::channel();
        let upstream = Raw::start(move |conversation| {
            let Some(mut request) = conversation.head() else { return };
            _ = sender.send(conversation.body_of(&mut request).is_some());
        });
        let gateway = Gateway::start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], ""));
        let mut frames = Frames::to(&gateway);
        frames.send_on(1, HEADERS, END_HEADERS, &head(POST, "/")).unwrap();
        frames.send_on(1, DATA, 0, b"a part").unwrap();
        until("it is at the upstream", || upstream.requests() == 1);
        frames.send_on(1, RST_STREAM, 0, &code).unwrap();
        assert_eq!(uploads.recv_timeout(PATIENCE), Ok(false), "reset with {code:?}");
    }
}

#[test]
fn short_response_that_the_client_does_not_read_is_reset() {
    for (body, window) in [("ok".to_owned(), 0), ("x".repeat(300), 1)] {
        let route = format!("{{ path: /**, respond: {{ body: {body} }} }}");
        let gateway = Gateway::start(&site("timeouts: { write: 1s }", &[route], ""));
        let mut frames = Frames::to(&gateway);
        frames.send_on(0, SETTINGS, 0, &[0, 4, 0, 0, 0, window]).unwrap();
        frames.send_on(1, HEADERS, END_HEADERS | END_STREAM, &head(GET, "/")).unwrap();
        loop {
            let (kind, flags, payload) = frames.next().expect("the connection goes on");
            match kind {
                RST_STREAM => break assert_eq!(payload, CANCEL),
                DATA => assert!(
                    flags & END_STREAM == 0,
                    "the whole response was sent to a client with a window of {window}"
                ),
                GOAWAY => panic!("the connection is closed: {payload:?}"),
                _ => {}
            }
        }
    }
}
