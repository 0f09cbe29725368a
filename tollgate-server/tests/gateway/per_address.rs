//! Connections of one client address.

use std::io::Read;

use testkit::client::{Client, Protocol, each_http1, each_protocol};
use testkit::gateway::{Gateway, site};
use testkit::http1::Connection;
use testkit::upstream::Raw;

const ROUTE: &str = "{ path: /**, respond: { body: ok } }";
const REFUSED: &str = "tollgate_connections_refused_total{reason=\"max_connections_per_address\"}";

fn gateway(protocol: Protocol, settings: &str, route: &str) -> Gateway {
    protocol.start(&format!("{}admin: {{ listen: 127.0.0.1:0 }}\n", site(settings, &[route], "")))
}

/// Returns whether the connection is closed without a response, before TLS.
fn is_refused(mut connection: Connection) -> bool {
    connection.is_closed()
}

#[test]
fn connections_beyond_the_maximum_of_an_address_are_closed_and_counted() {
    each_protocol(|protocol| {
        let gateway = gateway(protocol, "max_connections_per_address: 2", ROUTE);
        let mut held: Vec<_> = (0..2).map(|_| gateway.client()).collect();
        assert!(held.iter_mut().all(|connection| connection.get("/").status == 200));
        for _ in 0..20 {
            assert!(is_refused(Connection::to(gateway.address)));
        }
        gateway.await_metric(REFUSED, 20);
        let said = gateway.await_said("127.0.0.1 has 2 open", 1);
        assert_eq!(
            said.matches("max_connections_per_address").count(),
            1,
            "a flood is not logged line by line: {said}"
        );
        assert!(
            held.iter_mut().all(|connection| connection.get("/").status == 200),
            "those that are there are served on"
        );
        held.pop();
        testkit::wait::until("a free place", || {
            let Ok(mut connection) = Client::try_to(gateway.address, protocol) else { return false };
            connection.try_send("GET / HTTP/1.1\r\nHost: h\r\n\r\n").is_ok()
                && connection.try_receive().is_ok_and(|answer| answer.status == 200)
        });
    });
}

#[test]
fn the_address_that_the_proxy_protocol_names_is_the_one_that_is_counted() {
    let gateway =
        gateway(Protocol::Http1, "proxy_protocol: { from: 127.0.0.1 }\n  max_connections_per_address: 1", ROUTE);
    let connect = |source: &str| {
        let mut connection = Connection::to(gateway.address);
        connection.send(format!("PROXY {source} 4321 80\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n"));
        connection
    };
    let mut held = Vec::new();
    for source in ["TCP4 203.0.113.9 10.0.0.1", "TCP4 203.0.113.10 10.0.0.1", "TCP6 2001:db8::1 2001:db8:1::1"] {
        let mut connection = connect(source);
        assert_eq!(connection.receive().status, 200, "{source}");
        held.push(connection);
    }
    for source in ["TCP4 203.0.113.9 10.0.0.1", "TCP6 2001:db8::ffff:2 2001:db8:1::1"] {
        assert!(is_refused(connect(source)), "{source}");
    }
    gateway.await_metric(REFUSED, 2);
}

#[test]
fn trusted_proxies_are_not_counted() {
    each_protocol(|protocol| {
        let gateway = gateway(protocol, "trusted_proxies: [127.0.0.1/32]\n  max_connections_per_address: 1", ROUTE);
        let mut held: Vec<_> = (0..5).map(|_| gateway.client()).collect();
        assert!(held.iter_mut().all(|connection| connection.get("/").status == 200));
    });
}

#[test]
fn a_connection_that_was_upgraded_is_still_counted() {
    each_http1(|protocol| {
        let upstream = Raw::start(|conversation| {
            conversation.request();
            conversation.send("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n");
            conversation.await_end();
        });
        let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
        let gateway = gateway(protocol, "max_connections_per_address: 1", &route);
        let mut upgraded = gateway.connect();
        let switched = upgraded.ask("GET / HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n");
        assert_eq!(switched.status, 101);
        assert!(is_refused(Connection::to(gateway.address)));
        drop(upgraded);
        testkit::wait::until("a free place", || !is_refused_now(&gateway));
    });
}

fn is_refused_now(gateway: &Gateway) -> bool {
    let connection = Connection::to(gateway.address);
    connection.tcp().set_read_timeout(Some(std::time::Duration::from_millis(300))).unwrap();
    // Nothing is sent, so an accepted connection waits.
    !matches!(connection.tcp().read(&mut [0]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
}
