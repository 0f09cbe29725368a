//! Hundreds of bodies that one side sends and the other does not read.

use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use testkit::client::{Protocol, each_http2, each_protocol};
use testkit::gateway::{Gateway, site};
use testkit::http1::Connection;
use testkit::upstream::{AnyBody, Raw, full, runtime};
use testkit::wait::until;

use crate::http2::{connect_over, get};

const MAX_BUFFERED: u64 = 8 << 20;
const CONNECTIONS: usize = 8;
const STREAMS: usize = 100;

fn gateway(protocol: Protocol, upstream: &Raw) -> Gateway {
    let routes = [
        "{ path: /small, respond: { body: ok } }".to_owned(),
        format!("{{ path: /**, upstream: {}, timeout: 1h }}", upstream.url()),
    ];
    let settings = "max_buffered: 8MiB\n  timeouts: { body: 1h, write: 1h }";
    protocol.start(&format!("{}admin: {{ listen: 127.0.0.1:0 }}\n", site(settings, &routes, "")))
}

fn metric(gateway: &Gateway, name: &str) -> u64 {
    let text = Connection::to(gateway.address_of("admin")).get("/metrics").text().to_owned();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("there is no {name}")).parse().unwrap()
}

/// Waits until bodies are refused, and checks that the bound holds and others are served in the meantime.
fn assert_bounded(gateway: &Gateway, before_kib: u64) {
    until("bodies are refused", || {
        let held = metric(gateway, "tollgate_buffered_bytes");
        assert!(held <= MAX_BUFFERED, "{held} bytes are held");
        metric(gateway, "tollgate_overloaded_bodies_total") > 100
    });
    assert_eq!(gateway.get("/small").status, 200, "others are served");
    let grown_kib = gateway.memory_kib().saturating_sub(before_kib);
    // The buffered bytes, and connections, streams and heads.
    assert!(grown_kib < 128 << 10, "{grown_kib} KiB more");
}

#[test]
fn answers_that_nobody_reads_hold_no_more_than_the_bound() {
    each_http2(|protocol| {
        let upstream = Raw::start(|conversation| {
            while conversation.request().is_some() {
                conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n");
                if !conversation.send(vec![b'x'; 1_000_000]) {
                    return;
                }
            }
        });
        let gateway = gateway(protocol, &upstream);
        let before_kib = gateway.memory_kib();
        let _held = runtime().block_on(async {
            let mut held = Vec::new();
            for _ in 0..CONNECTIONS {
                let mut sender = connect_over(protocol, gateway.address).await;
                let asked = (0..STREAMS).map(|_| sender.send_request(get(&gateway, "/big").body(full("")).unwrap()));
                // Each response is kept, and nothing of it is read.
                held.push((futures_util::future::join_all(asked.collect::<Vec<_>>()).await, sender));
            }
            held
        });
        assert_bounded(&gateway, before_kib);
    });
}

#[test]
fn uploads_that_no_upstream_reads_hold_no_more_than_the_bound() {
    each_http2(|protocol| {
        // It reads the head, and nothing after it.
        let upstream = Raw::start(|conversation| {
            conversation.head();
            std::thread::sleep(Duration::from_secs(3600));
        });
        let gateway = gateway(protocol, &upstream);
        let before_kib = gateway.memory_kib();
        let endless = || -> AnyBody {
            let frames = futures_util::stream::repeat_with(|| Ok(Frame::data(Bytes::from_static(&[b'x'; 16 << 10]))));
            BodyExt::boxed(StreamBody::new(frames))
        };
        let runtime = runtime();
        let held = runtime.block_on(async {
            let mut held = Vec::new();
            for _ in 0..CONNECTIONS {
                let mut sender = connect_over(protocol, gateway.address).await;
                for _ in 0..STREAMS {
                    let request = Request::post(format!("{}://{}/upload", protocol.scheme(), gateway.address))
                        .body(endless())
                        .unwrap();
                    held.push(tokio::spawn(sender.send_request(request)));
                }
            }
            held
        });
        assert_bounded(&gateway, before_kib);
        // Some were refused before their body arrived, and some in the middle of it.
        until("clients have their answers", || held.iter().filter(|upload| upload.is_finished()).count() > 100);
        let finished = held.into_iter().filter(tokio::task::JoinHandle::is_finished);
        let ended = runtime.block_on(futures_util::future::join_all(finished));
        let statuses: Vec<u16> =
            ended.into_iter().filter_map(|ended| Some(ended.ok()?.ok()?.status().as_u16())).collect();
        assert!(!statuses.is_empty() && statuses.iter().all(|status| *status == 503), "{statuses:?}");
    });
}

#[test]
fn responses_that_are_cut_off_are_marked_in_the_access_log_and_stay_in_flight() {
    each_protocol(|protocol| {
        // It never has more than a little on its way, so that the rest of a response takes a while.
        let upstream = Raw::start(|conversation| {
            while conversation.request().is_some() {
                conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n");
                while conversation.send(vec![b'x'; 64 << 10]) {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        });
        let settings =
            "max_buffered: 1MiB\n  access_log: { format: json, file: access.log }\n  timeouts: { write: 1h }";
        let route = format!("{{ path: /**, upstream: {}, timeout: 1h }}", upstream.url());
        let at_once = "{ name: at-once, key: const:all, in_flight: 200 }";
        let gateway =
            protocol.start(&format!("{}admin: {{ listen: 127.0.0.1:0 }}\n", site(settings, &[route], at_once)));
        // Nothing is read of their responses, and they do not leave.
        let connections: Vec<_> = (0..40)
            .map(|_| {
                let mut connection = gateway.client();
                connection.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
                connection
            })
            .collect();
        // The upstream still works on them.
        until("a permit is held", || metric(&gateway, "tollgate_abandoned_requests") > 0);
        for line in gateway.await_lines(&gateway.path("access.log"), 5) {
            let line: serde_json::Value = serde_json::from_str(&line).unwrap();
            assert_eq!((&line["status"], &line["broken"]), (&200.into(), &true.into()), "{line}");
        }
        drop(connections);
    });
}
