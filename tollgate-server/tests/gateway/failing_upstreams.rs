//! Upstreams that refuse, hang, disconnect or send invalid responses: the client gets a clear response, and soon.

use std::net::Shutdown;
use std::time::Duration;

use testkit::client::{Protocol, each_protocol};
use testkit::gateway::{Gateway, site};
use testkit::http1::Response;
use testkit::port::unused_address;
use testkit::upstream::Raw;
use testkit::wait::until;

fn gateway(protocol: Protocol, upstream: &str) -> Gateway {
    protocol.start(&site("", &[format!("{{ path: /**, retries: 0, upstream: {upstream} }}")], ""))
}

/// Returns a gateway that soon gives up an upstream that does not respond.
fn impatient_gateway(protocol: Protocol, upstream: &str) -> Gateway {
    protocol.start(&site("", &[format!("{{ path: /**, timeout: 1s, retries: 0, upstream: {upstream} }}")], ""))
}

/// Returns the response, and checks that the connection still serves.
fn answer(gateway: &Gateway) -> Response {
    let mut connection = gateway.client();
    let answer = connection.get("/");
    assert_eq!(connection.get("/").status, answer.status, "the client's connection is not to blame");
    answer
}

#[test]
fn an_upstream_that_refuses_is_502() {
    each_protocol(|protocol| {
        let answer = answer(&gateway(protocol, &format!("http://{}", unused_address())));
        assert_eq!(answer.status, 502);
        assert!(answer.text().contains("bad_gateway"), "{}", answer.text());
    });
}

#[test]
fn a_name_that_nobody_has_is_502() {
    each_protocol(|protocol| {
        assert_eq!(answer(&gateway(protocol, "http://nobody.invalid:81")).status, 502);
    });
}

#[test]
fn an_upstream_that_hangs_up_is_502() {
    each_protocol(|protocol| {
        for after in ["accept", "request", "half a head"] {
            let upstream = Raw::start(move |conversation| {
                if after != "accept" {
                    _ = conversation.request();
                }
                if after == "half a head" {
                    conversation.send("HTTP/1.1 200 OK\r\nContent-Le");
                }
            });
            assert_eq!(answer(&gateway(protocol, &upstream.url())).status, 502, "after {after}");
        }
    });
}

#[test]
fn an_upstream_that_does_not_begin_to_answer_is_504() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| conversation.await_end());
        let answer = answer(&impatient_gateway(protocol, &upstream.url()));
        assert_eq!(answer.status, 504);
        assert!(answer.text().contains("gateway_timeout"), "{}", answer.text());
    });
}

#[test]
fn an_upstream_that_sends_half_a_head_and_hangs_is_504() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            _ = conversation.request();
            conversation.send("HTTP/1.1 200 OK\r\nContent-Le");
            conversation.await_end();
        });
        assert_eq!(answer(&impatient_gateway(protocol, &upstream.url())).status, 504);
    });
}

/// A response without a length ends when its connection is closed, but not when it is reset.
#[test]
fn a_reset_is_not_the_end_of_an_answer() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            // It has arrived and stays unread, so closing resets the connection.
            assert!(conversation.stream.peek(&mut [0]).is_ok_and(|there| there > 0));
            conversation.send("HTTP/1.1 200 OK\r\n\r\nhalf of it");
            // A reset discards what the gateway has not read; then the client gets a 502.
            std::thread::sleep(Duration::from_millis(300));
        });
        let gateway = gateway(protocol, &upstream.url());
        let mut connection = gateway.client();
        connection.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
        let cut = connection.try_receive();
        let is_reported = cut.as_ref().map_or(true, |answer| answer.status == 502);
        assert!(is_reported, "the client must see that it is not all: {cut:?}");
    });
}

/// The system does not accept it at once, and the upstream responds before it reads.
#[test]
fn a_body_that_does_not_go_in_one_piece_goes_whole() {
    each_protocol(|protocol| {
        // It arrives in one piece, and cannot be sent in one.
        const LENGTH: usize = 40_000;
        let upstream = Raw::far_away(|conversation| {
            assert!(conversation.stream.peek(&mut [0]).is_ok_and(|there| there > 0));
            conversation.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
            std::thread::sleep(Duration::from_millis(300));
            assert!(conversation.head().is_some());
            while conversation.unread().len() < LENGTH && conversation.more() {}
            conversation.send(format!("5\r\n{}\r\n0\r\n\r\n", conversation.unread().len()));
        });
        let gateway = gateway(protocol, &upstream.url());
        let mut connection = gateway.client();
        let body = "x".repeat(LENGTH);
        let head = format!("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: {LENGTH}\r\n\r\n");
        assert_eq!(connection.ask(head + &body).text(), LENGTH.to_string());
    });
}

/// The request itself may be what ends a new connection.
#[test]
fn a_request_that_a_new_connection_ends_with_is_not_sent_again_to_the_same() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| _ = conversation.request());
        assert_eq!(protocol.start_before(&upstream.url()).get("/").status, 502);
        assert_eq!(upstream.requests(), 1);
    });
}

#[test]
fn an_answer_that_stops_in_the_middle_ends_the_clients_connection_too() {
    each_protocol(|protocol| {
        for (head, stays) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhello", true),
            ("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhello", false),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", true),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", false),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nnonsense\r\n", true),
        ] {
            let upstream = Raw::start(move |conversation| {
                _ = conversation.request();
                conversation.send(head);
                if stays {
                    conversation.await_end();
                }
            });
            let gateway = impatient_gateway(protocol, &upstream.url());
            let mut connection = gateway.client();
            connection.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
            let cut = connection.try_receive();
            // An error that is found before the head is sent gets a status.
            let is_reported = cut.as_ref().map_or(true, |answer| matches!(answer.status, 502 | 504));
            assert!(is_reported, "{head:?}, {stays}: the client must see that it is not all: {cut:?}");
        }
    });
}

#[test]
fn an_upstream_that_resets_the_connection_is_502() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            _ = conversation.head();
            // Closing with unread bytes resets the connection.
            _ = conversation.stream.shutdown(Shutdown::Write);
        });
        let gateway = gateway(protocol, &upstream.url());
        let answer = gateway.client().ask("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello");
        assert_eq!(answer.status, 502);
    });
}

#[test]
fn answers_that_make_no_sense_are_502_and_nothing_of_them_is_passed_on() {
    each_protocol(|protocol| {
        let long = format!("HTTP/1.1 200 OK\r\nX: {}\r\nContent-Length: 0\r\n\r\n", "x".repeat(1 << 20));
        for (what, sent) in [
            ("no HTTP", "SSH-2.0-OpenSSH_9.2\r\n\r\n"),
            ("no status", "HTTP/1.1 hello\r\n\r\n"),
            ("a name with a space", "HTTP/1.1 200 OK\r\nX y: z\r\nContent-Length: 0\r\n\r\n"),
            ("a NUL", "HTTP/1.1 200 OK\r\nX: y\0z\r\nContent-Length: 0\r\n\r\n"),
            ("an invalid length", "HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\nhello"),
            ("two lengths", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!"),
            (
                "both lengths",
                "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            ),
            (
                "both lengths, the other way round",
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            ),
            ("lengths in a list", "HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\nhello"),
            (
                "a coding that is not chunked",
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            ),
            ("a head that is too long", &long),
            (
                "an unrequested protocol",
                "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
            ),
        ] {
            let sent = sent.to_owned();
            let upstream = Raw::start(move |conversation| {
                _ = conversation.request();
                conversation.send(&sent);
                conversation.await_end();
            });
            let gateway = gateway(protocol, &upstream.url());
            let answer = gateway.get("/");
            assert_eq!(answer.status, 502, "{what}: {}", answer.text());
            assert!(answer.text().contains("bad_gateway"), "{what}: {}", answer.text());
        }
    });
}

#[test]
fn bytes_after_a_response_never_reach_another_client() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            while conversation.request().is_some() {
                conversation.send(
                    "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
                );
            }
        });
        let gateway =
            protocol.start(&site("workers: 1", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], ""));
        let mut connection = gateway.client();
        for _ in 0..10 {
            let answer = connection.get("/");
            assert!(answer.status == 502 || answer.text() == "ok", "{answer:?}");
        }
    });
}

#[test]
fn response_before_the_end_of_the_request_is_forwarded() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            _ = conversation.head();
            conversation.send("HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno");
            conversation.await_end();
        });
        let gateway = gateway(protocol, &upstream.url());
        let mut connection = gateway.client();
        connection.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\nhello");
        let answer = connection.receive();
        assert_eq!((answer.status, answer.text()), (403, "no"));
    });
}

/// A client that disconnects during an upload is no reason to eject an upstream.
#[test]
fn clients_that_break_off_are_not_the_upstreams_fault() {
    each_protocol(|protocol| {
        let (one, other) = (Raw::named("one"), Raw::named("other"));
        let route = format!(
            "{{ path: /**, balance: round_robin, upstream: [{}, {}], eject: {{ after: 1, for: 1h }} }}",
            one.url(),
            other.url()
        );
        let gateway = protocol.start(&site("workers: 1", &[route], ""));
        for number in 0..6 {
            let mut connection = gateway.client();
            connection.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nhello");
            until("the request at an upstream", || one.requests() + other.requests() == number + 1);
            connection.abandon();
        }
        // An invalid chunk, which only HTTP/1 has.
        for _ in (0..4).filter(|_| !protocol.is_http2()) {
            let mut connection = gateway.client();
            connection.send("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n");
            assert_eq!(connection.receive().status, 400);
        }
        std::thread::sleep(Duration::from_millis(200));
        let mut connection = gateway.client();
        let answers: std::collections::BTreeSet<_> =
            (0..4).map(|_| connection.get("/").header("x-upstream").map(str::to_owned)).collect();
        assert_eq!(answers.len(), 2, "both are used: {answers:?}");
    });
}
