//! Upstreams whose name has several addresses, which the system resolves from the gateway's own hosts file.

#![cfg(target_os = "linux")]

use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use socket2::{Domain, Socket, Type};
use testkit::client::{Client, Protocol, each_protocol};
use testkit::gateway::{Gateway, site};
use testkit::skip::skipped;
use testkit::upstream::Raw;
use testkit::wait::until;

const ONE: [u8; 4] = [127, 0, 0, 1];
const TWO: [u8; 4] = [127, 0, 0, 2];

/// Returns whether a process may have its own `/etc/hosts` here. Containers can forbid it.
fn can_have_own_hosts() -> bool {
    let tried = std::process::Command::new("unshare").args(["--map-root-user", "--mount", "true"]).status();
    let can = tried.is_ok_and(|status| status.success());
    assert!(can || std::env::var_os("CI").is_none(), "`unshare --map-root-user --mount` is not allowed here");
    can
}

/// Returns an upstream of that name at an address, and a socket that has the same port at another address.
fn upstream_beside(name: &'static str, at: [u8; 4], other: [u8; 4]) -> (Raw, Socket) {
    loop {
        let taken = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        taken.bind(&SocketAddr::from((other, 0)).into()).unwrap();
        let port = taken.local_addr().unwrap().as_socket().unwrap().port();
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::from(at), port)) {
            return (Raw::on_named(listener, name), taken);
        }
    }
}

/// Returns an upstream of that name on a socket of [`upstream_beside`].
fn upstream_on(taken: Socket, name: &'static str) -> Raw {
    taken.listen(16).unwrap();
    Raw::on_named(taken.into(), name)
}

fn gateway(protocol: Protocol, port: u16, addresses: &[&str], connections: &str) -> Gateway {
    let hosts: String = addresses.iter().map(|address| format!("{address} many.test\n")).collect();
    let route = format!(
        "{{ path: /**, upstream: 'http://many.test:{port}', retries: 0, upstream_connections: {{ {connections} }} }}"
    );
    Gateway::with_hosts(protocol, &hosts, &site("workers: 1", &[route], ""))
}

fn upstream_of(connection: &mut Client) -> String {
    let answer = connection.get("/");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.header("x-upstream").unwrap().to_owned()
}

#[test]
fn address_that_does_not_answer_does_not_hide_a_good_one() {
    if !can_have_own_hosts() {
        return skipped("a mount namespace for /etc/hosts is not allowed");
    }
    each_protocol(|protocol| {
        let (good, silent) = upstream_beside("good", TWO, ONE);
        // The queue of connections is full, so the system answers no further attempt.
        silent.listen(0).unwrap();
        let _waiting: Vec<Socket> = (0..8)
            .map(|_| {
                let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
                socket.set_nonblocking(true).unwrap();
                _ = socket.connect(&silent.local_addr().unwrap());
                socket
            })
            .collect();
        let gateway = gateway(protocol, good.address.port(), &["127.0.0.1", "127.0.0.2"], "max_requests: 1");
        let mut connection = gateway.client();
        for _ in 0..6 {
            assert_eq!(upstream_of(&mut connection), "good");
        }
    });
}

#[test]
fn address_that_refuses_does_not_hide_a_good_one() {
    if !can_have_own_hosts() {
        return skipped("a mount namespace for /etc/hosts is not allowed");
    }
    each_protocol(|protocol| {
        let (good, _refuses) = upstream_beside("good", TWO, ONE);
        let gateway = gateway(protocol, good.address.port(), &["::1", "127.0.0.1", "127.0.0.2"], "max_requests: 1");
        let mut connection = gateway.client();
        for _ in 0..6 {
            assert_eq!(upstream_of(&mut connection), "good");
        }
    });
}

#[test]
fn connections_are_spread_over_the_addresses() {
    if !can_have_own_hosts() {
        return skipped("a mount namespace for /etc/hosts is not allowed");
    }
    each_protocol(|protocol| {
        let (one, taken) = upstream_beside("one", ONE, TWO);
        let _two = upstream_on(taken, "two");
        let gateway = gateway(protocol, one.address.port(), &["127.0.0.1", "127.0.0.2"], "max_requests: 1");
        let mut connection = gateway.client();
        let of_one = (0..10).filter(|_| upstream_of(&mut connection) == "one").count();
        // An attempt that is slow on a busy machine is overtaken by the next address.
        assert!((3..=7).contains(&of_one), "{of_one} of 10 connections went to one address");
    });
}

/// The connection to the old address is in use all the time, and still open.
#[test]
fn address_that_the_name_no_longer_has_is_left() {
    if !can_have_own_hosts() {
        return skipped("a mount namespace for /etc/hosts is not allowed");
    }
    each_protocol(|protocol| {
        let (old, taken) = upstream_beside("old", ONE, TWO);
        let _new = upstream_on(taken, "new");
        let gateway = gateway(protocol, old.address.port(), &["127.0.0.1"], "idle: 1h, max_age: 1h");
        let mut connection = gateway.client();
        assert_eq!(upstream_of(&mut connection), "old");
        // In place: the mount is of this file.
        std::fs::write(gateway.path("hosts"), "127.0.0.2 many.test\n").unwrap();
        until("the change of address", || upstream_of(&mut connection) == "new");
        assert_eq!(upstream_of(&mut connection), "new");
    });
}
