//! Starting, stopping and changing routes while clients are served.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use testkit::client::{Client, Protocol, each_http2, each_protocol};
use testkit::gateway::{Gateway, site};
use testkit::http1::Connection;
use testkit::http2::is_unprocessed;
use testkit::port::Port;
use testkit::tollgate::fails;
use testkit::upstream::{Raw, runtime};
use testkit::wait::{PATIENCE, SetOnDrop, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

/// The state that clients share.
#[derive(Default)]
struct Clients {
    answered: AtomicUsize,
    done: AtomicBool,
    /// Whether the gateway was asked to stop.
    stopping: AtomicBool,
}

/// Sends requests one after the other, and opens a new connection when it is asked to, until the gateway has stopped or
/// the test is done. No request may fail.
fn honest_client(address: SocketAddr, protocol: Protocol, clients: &Clients) {
    let Clients { answered, done, stopping } = clients;
    'connections: while !done.load(Relaxed) {
        let mut client = match Client::try_to(address, protocol) {
            Ok(client) => client,
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => return,
            // The kernel had accepted this connection when the port was closed, but the gateway never did.
            Err(_) if stopping.load(Relaxed) => continue 'connections,
            Err(error) => panic!("a connection failed: {error}"),
        };
        let mut is_first = true;
        while !done.load(Relaxed) {
            let sent = client.try_send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
            let answer = match sent.and_then(|()| client.try_receive()) {
                Ok(answer) => answer,
                // Only HTTP/2 can ask for a new connection while the client is sending.
                Err(error) if is_unprocessed(&error) => continue 'connections,
                Err(_) if is_first && stopping.load(Relaxed) => continue 'connections,
                Err(error) => panic!("a request failed, the first: {is_first}: {error}"),
            };
            assert_eq!(answer.status, 200);
            answered.fetch_add(1, Relaxed);
            is_first = false;
            if answer.header("connection") == Some("close") {
                continue 'connections;
            }
        }
    }
}

#[test]
fn a_stop_under_load_fails_no_request() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            while conversation.request().is_some() {
                std::thread::sleep(Duration::from_millis(2));
                conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            }
        });
        let gateway = protocol.start_before(&upstream.url());
        let (clients, address) = (Clients::default(), gateway.address);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| honest_client(address, protocol, &clients));
            }
            let _done = SetOnDrop(&clients.done);
            until("some load", || clients.answered.load(Relaxed) > 200);
            clients.stopping.store(true, Relaxed);
            gateway.signal("TERM");
            assert_eq!(gateway.wait().code(), Some(0));
        });
        assert_eq!(clients.answered.load(Relaxed), upstream.requests(), "whatever reached the upstream was answered");
    });
}

#[test]
fn a_slow_request_under_way_is_finished_before_the_end() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            _ = conversation.request();
            std::thread::sleep(Duration::from_secs(2));
            conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nsl");
            std::thread::sleep(Duration::from_millis(500));
            conversation.send("ow");
        });
        let gateway = protocol.start_before(&upstream.url());
        let mut idle = gateway.client();
        let mut connection = gateway.client();
        connection.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
        until("a request under way", || upstream.requests() == 1);
        gateway.signal("TERM");
        let answer = connection.receive();
        assert_eq!((answer.status, answer.text()), (200, "slow"));
        // HTTP/2 has GOAWAY instead.
        assert_eq!(answer.header("connection"), (!protocol.is_http2()).then_some("close"));
        assert!(connection.is_closed() && idle.is_closed());
        let gateway = gateway.ended();
        assert!(!gateway.said().contains("cut off"), "{}", gateway.said());
    });
}

#[test]
fn a_request_that_never_ends_holds_up_the_end_for_drain_and_no_longer() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| conversation.await_end());
        let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
        let gateway = protocol.start(&site("timeouts: { drain: 1s }", &[route], ""));
        let mut connection = gateway.client();
        connection.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
        until("a request under way", || upstream.requests() == 1);
        gateway.signal("TERM");
        // The upstream ends nothing, so only the timeout does.
        let gateway = gateway.ended();
        assert!(connection.is_closed());
        gateway.await_said("1 connection with requests in flight cut off at the end of gateway.timeouts.drain", 1);
    });
}

/// No timeout closes a connection before the test gives up.
const NOTHING_ENDS: &str = "timeouts: { head: 1h, idle: 1h, drain: 1h }";

#[test]
fn idle_connections_and_clients_that_said_nothing_do_not_hold_up_the_end() {
    each_protocol(|protocol| {
        let gateway = protocol.start(&site(NOTHING_ENDS, &["{ path: /**, respond: { body: ok } }"], ""));
        let (mut silent, mut half, mut used) = (gateway.client(), gateway.connect(), gateway.client());
        // With TLS, this client has not even begun the handshake.
        let mut without_a_byte = Connection::to(gateway.address);
        half.send("GET / HTTP/1.1\r\nHo");
        assert_eq!(used.get("/").text(), "ok");
        gateway.signal("TERM");
        assert!(used.is_closed() && silent.is_closed() && without_a_byte.is_closed());
        assert!(half.is_closed());
        let gateway = gateway.ended();
        assert!(!gateway.said().contains("cut off"), "{}", gateway.said());
    });
}

/// Neither a preface nor the reply to a ping is awaited.
#[test]
fn http_2_clients_that_said_nothing_do_not_hold_up_the_end() {
    const PREFACE: &str = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    const SETTINGS: &str = "\0\0\0\x04\0\0\0\0\0";
    each_http2(|protocol| {
        for sent in ["", &PREFACE[..10], PREFACE, &format!("{PREFACE}{SETTINGS}")] {
            let settings = format!("workers: 1\n  {NOTHING_ENDS}");
            let gateway = protocol.start(&site(&settings, &["{ path: /**, respond: { body: ok } }"], ""));
            let mut silent = runtime().block_on(protocol.open(gateway.address)).unwrap();
            runtime().block_on(silent.write_all(sent.as_bytes())).unwrap();
            assert_eq!(gateway.get("/").text(), "ok");
            gateway.signal("TERM");
            let closed = runtime().block_on(async { timeout(PATIENCE, silent.read_to_end(&mut Vec::new())).await });
            assert!(closed.is_ok(), "a client that has sent {sent:?} holds up the end");
        }
    });
}

#[test]
fn changing_routes_under_load_fails_no_request() {
    each_protocol(|protocol| {
        let upstreams = [(); 2].map(|()| Raw::named("either"));
        let rules = |number: usize| {
            let extra = format!("{{ path: /extra-{number}, respond: {{ body: extra }} }}");
            site("", &[format!("{{ path: /**, upstream: {} }}", upstreams[number % 2].url()), extra], "")
        };
        let gateway = protocol.start(&rules(0));
        let clients = Clients::default();
        let answered = || clients.answered.load(Relaxed);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| honest_client(gateway.address, protocol, &clients));
            }
            let _done = SetOnDrop(&clients.done);
            for turn in 1..=6 {
                gateway.save(&rules(turn));
                gateway.await_said("is in force", turn);
                assert_eq!(gateway.get(&format!("/extra-{turn}")).text(), "extra");
                let before = answered();
                until("more answers", || answered() > before + 20);
            }
        });
        assert!(upstreams.iter().all(|upstream| upstream.requests() > 0));
    });
}

#[test]
fn a_bad_file_changes_no_route() {
    each_protocol(|protocol| {
        let route = |body: &str| site("", &[format!("{{ path: /**, respond: {{ body: {body} }} }}")], "");
        let gateway = protocol.start(&route("first"));
        let mut connection = gateway.client();
        assert_eq!(connection.get("/").text(), "first");
        for (times, bad) in [
            route("first").replace("path:", "pth:"),
            site("", &["{ path: /**, upstream: 'https://127.0.0.1:1', upstream_tls: { ca: absent.pem } }"], ""),
            // Without the gateway section, the gateway would run without routes, and elsewhere.
            "service: { http: 127.0.0.1:0 }\nlimits: []\n".to_owned(),
        ]
        .iter()
        .enumerate()
        {
            gateway.save(bad);
            gateway.await_said("is rejected, and the previous rules stay in force", times + 1);
            assert_eq!(connection.get("/").text(), "first");
        }
        gateway.save(&route("second"));
        gateway.await_said("is in force", 1);
        assert_eq!(connection.get("/").text(), "second");
    });
}

#[test]
fn a_port_in_use_ends_with_2_and_the_fix() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let rules = site("", &["{ path: /**, upstream: echo }"], "").replace("127.0.0.1:0", &address);
    let (said, code) = fails(&[("tollgate.yaml", &rules)]);
    assert!(said.contains(&format!("cannot listen on {address}: Address already in use")), "{said}");
    assert!(said.contains(": stop the process that uses it, or choose another port"), "{said}");
    assert_eq!(code, Some(2));
}

#[test]
fn port_in_use_at_a_reload_is_logged_with_the_fix() {
    each_protocol(|protocol| {
        let route = |listen: &str| site("", &["{ path: /**, upstream: echo }"], "").replace("127.0.0.1:0", listen);
        let gateway = protocol.start(&route("127.0.0.1:0"));
        // Each of the two ways that the log line names.
        let hangs_up = |_: &str| gateway.signal("HUP");
        let changes_the_file = |rules: &str| gateway.save(&format!("{rules}# changed\n"));
        let mut reached = None;
        for (before, way) in [&hangs_up as &dyn Fn(&str), &changes_the_file].into_iter().enumerate() {
            let taken = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = taken.local_addr().unwrap().to_string();
            gateway.save(&route(&address));
            let expected = format!(
                "tollgate.yaml is rejected, and the previous rules stay in force: gateway.listen: cannot listen on {address}: \
                 Address already in use (os error 98); all listeners stay unchanged: stop the process that uses it, or choose another port, \
                 and send SIGHUP or change the file\n"
            );
            gateway.await_said(&expected, 1);
            let listens = reached.unwrap_or(gateway.address);
            assert_eq!(Client::to(listens, protocol).get("/").status, 200);
            drop(taken);
            way(&route(&address));
            gateway.await_said("tollgate.yaml is in force", before + 1);
            reached = Some(address.parse().unwrap());
            assert_eq!(Client::to(address.parse().unwrap(), protocol).get("/").status, 200);
        }
    });
}

/// Workers share a port, and two gateways would share it, too, if nothing prevented it.
#[test]
fn two_gateways_do_not_share_a_port() {
    let first = Gateway::start(&site("", &["{ path: /**, upstream: echo }"], ""));
    let address = first.address.to_string();
    let rules = site("", &["{ path: /**, upstream: echo }"], "").replace("127.0.0.1:0", &address);
    let (said, code) = fails(&[("tollgate.yaml", &rules)]);
    assert!(said.contains("Address already in use"), "{said}");
    assert_eq!(code, Some(2));
}

#[test]
fn a_port_can_be_used_again_at_once() {
    each_protocol(|protocol| {
        let port = Port::claim();
        let address = format!("127.0.0.1:{}", port.number());
        let rules = site("", &["{ path: /**, upstream: echo }"], "").replace("127.0.0.1:0", &address);
        let first = protocol.start(&rules);
        let mut connection = first.client();
        assert_eq!(connection.get("/").status, 200);
        first.signal("TERM");
        assert_eq!(first.wait().code(), Some(0));
        assert_eq!(protocol.start(&rules).get("/").status, 200);
    });
}
