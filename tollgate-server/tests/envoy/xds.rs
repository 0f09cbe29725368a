//! Limits come from an xDS server.

use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use testkit::certificates::Authority;
use testkit::folder::folder_with;
use testkit::http1::ask;
use testkit::service::Server;
use testkit::tollgate::RULES;
use tokio_rustls::TlsAcceptor;

use crate::proto::ratelimit::config::ratelimit::v3::{
    RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitUnit,
};
use crate::remaining;
use crate::xds_server::{TYPE_URL, XdsServer};

/// Returns the configuration of a domain with one limit per year for each value of a key.
fn config(domain: &str, key: &str, requests_per_unit: u32) -> RateLimitConfig {
    let rate_limit =
        RateLimitPolicy { unit: RateLimitUnit::Year.into(), requests_per_unit, ..RateLimitPolicy::default() };
    let entry = RateLimitDescriptor { key: key.to_owned(), rate_limit: Some(rate_limit), ..Default::default() };
    RateLimitConfig { name: format!("{domain}-config"), domain: domain.to_owned(), descriptors: vec![entry] }
}

fn rules(xds: &str) -> String {
    format!("service: {{ http: '127.0.0.1:0', xds: {xds} }}\nadmin: {{ listen: '127.0.0.1:0' }}\nlimits: []\n")
}

fn server(xds: &XdsServer) -> Server {
    Server::in_folder(folder_with(&[(RULES, &rules(&format!("'http://{}'", xds.address)))]))
}

fn metrics(server: &Server) -> String {
    let request = "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    ask(server.address_of("admin"), request).text().to_owned()
}

#[test]
fn limits_are_accepted_changed_and_removed() {
    let xds = XdsServer::start();
    let server = server(&xds);
    let first = xds.request();
    let node = first.node.expect("the first request names the node");
    assert_eq!((&*first.type_url, &*node.id, &*first.version_info), (TYPE_URL, "default", ""));
    assert_eq!(remaining(&server, "edge.user", "ann"), None);

    xds.send("1", &[config("edge", "user", 3), config("mail", "to", 1)]);
    let accepted = xds.request();
    assert_eq!((&*accepted.version_info, &*accepted.response_nonce), ("1", "nonce-1"));
    assert_eq!(accepted.error_detail, None);
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(2));
    server.await_said("is in force: added edge.user, mail.to", 1);

    xds.send("2", &[config("edge", "user", 5)]);
    assert_eq!(xds.request().version_info, "2");
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(3));
    assert_eq!(remaining(&server, "mail.to", "x"), None);

    xds.send("3", &[]);
    assert_eq!(xds.request().version_info, "3");
    assert_eq!(remaining(&server, "edge.user", "ann"), None);
}

#[test]
fn a_configuration_with_problems_is_rejected_and_changes_nothing() {
    let xds = XdsServer::start();
    let server = server(&xds);
    xds.request();
    xds.send("1", &[config("edge", "user", 3)]);
    assert_eq!(xds.request().version_info, "1");
    xds.send("2", &[config("edge", "user", 9), config("mail", "", 1)]);
    let rejected = xds.request();
    assert_eq!((&*rejected.version_info, &*rejected.response_nonce), ("1", "nonce-2"));
    let problem = rejected.error_detail.expect("the problem is reported");
    assert_eq!(problem.code, 3);
    assert_eq!(problem.message, "mail-config: a descriptor of domain `mail` has no key: write `key: NAME`");
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(2));
    let metrics = metrics(&server);
    for line in [
        "tollgate_xds_connected 1",
        "tollgate_xds_responses_total{result=\"accepted\"} 1",
        "tollgate_xds_responses_total{result=\"rejected\"} 1",
        "tollgate_xds_info{version=\"1\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    xds.send("3", &[config("edge", "user", 4)]);
    assert_eq!(xds.request().version_info, "3");
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(2));
}

/// A few megabytes of descriptors would take gigabytes when they are in force.
#[test]
fn a_configuration_with_more_parts_than_allowed_is_rejected_and_changes_nothing() {
    let xds = XdsServer::start();
    let server = server(&xds);
    xds.request();
    xds.send("1", &[config("edge", "user", 3)]);
    assert_eq!(xds.request().version_info, "1");
    let before = server.peak_memory_kib();
    let mut flood = config("mail", "to", 1);
    let entry = RateLimitDescriptor { key: "to".to_owned(), ..Default::default() };
    flood.descriptors.extend(vec![entry; 400_000]);
    xds.send("2", &[flood]);
    let rejected = xds.request();
    assert_eq!((&*rejected.version_info, &*rejected.response_nonce), ("1", "nonce-2"));
    let problem = rejected.error_detail.expect("the problem is reported");
    assert_eq!(
        problem.message,
        "the response has more than 20000 descriptors: send fewer, or divide them between several servers"
    );
    let taken = server.peak_memory_kib() - before;
    assert!(taken < 64 << 10, "it took {taken} KiB");
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(2));
}

/// Without its nonce, a response that is too long cannot be rejected: it ends the connection.
#[test]
fn a_response_with_more_bytes_than_allowed_is_not_read() {
    let xds = XdsServer::start();
    let server = server(&xds);
    xds.request();
    let mut long = config("edge", "user", 3);
    long.name = "n".repeat(5 << 20);
    xds.send("1", &[long]);
    server.await_said("is not connected: ", 1);
    server.await_said("4194304", 1);
}

#[test]
fn the_last_configuration_stays_in_force_while_the_server_is_away() {
    let xds = XdsServer::start();
    let server = server(&xds);
    xds.request();
    xds.send("7", &[config("edge", "user", 3)]);
    assert_eq!(xds.request().version_info, "7");
    let address = xds.address;
    drop(xds);
    server.await_said("the last configuration stays in force", 1);
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(2));

    let xds = XdsServer::start_at(address, None);
    xds.send("1", &[config("edge", "user", 10)]);
    let first = xds.request();
    assert_eq!((&*first.version_info, first.node.is_some()), ("", true));
    assert_eq!(xds.request().version_info, "1");
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(8));
}

#[test]
fn changes_of_the_file_keep_the_limits_of_the_server_until_it_is_removed() {
    let xds = XdsServer::start();
    let server = server(&xds);
    xds.request();
    xds.send("1", &[config("edge", "user", 3)]);
    assert_eq!(xds.request().version_info, "1");
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(2));
    let url = format!("'http://{}'", xds.address);
    let own = "limits: [{ name: own, limit: 5, window: 1h }]";
    std::fs::write(server.path(RULES), rules(&url).replace("limits: []", own)).expect("the folder is writable");
    server.await_said("is in force: added own", 1);
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(1));
    let without = rules(&url).replace(&format!(", xds: {url}"), "");
    std::fs::write(server.path(RULES), without).expect("the folder is writable");
    server.await_said("is in force: removed own; removed edge.user", 1);
    assert_eq!(remaining(&server, "edge.user", "ann"), None);
}

/// Returns the TLS settings of a server that only accepts clients with certificates of the authority.
fn acceptor(authority: &Authority) -> TlsAcceptor {
    let own = authority.sign(&["xds.internal"]);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(authority.roots()), Arc::clone(&provider)).build();
    let certificate = CertificateDer::from_pem_slice(own.cert.as_bytes()).expect("a certificate");
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the versions of ring")
        .with_client_cert_verifier(verifier.expect("an authority"))
        .with_single_cert(vec![certificate], PrivateKeyDer::from_pem_slice(own.key.as_bytes()).expect("a key"))
        .expect("a certificate with its key");
    tls.alpn_protocols = vec![b"h2".to_vec()];
    TlsAcceptor::from(Arc::new(tls))
}

#[test]
fn client_certificates_are_supported_and_read_again_for_every_connection() {
    let authority = Authority::new();
    let client = authority.sign(&["tollgate"]);
    let xds = XdsServer::start_at("127.0.0.1:0".parse().expect("an address"), Some(acceptor(&authority)));
    let address = xds.address;

    let settings = format!(
        "{{ url: 'https://{}', node_id: envoy-ratelimit, server_name: xds.internal, ca: ca.pem, client_cert: client.pem, \
         client_key: client.key }}",
        xds.address
    );
    let server = Server::in_folder(folder_with(&[
        (RULES, &rules(&settings)),
        ("ca.pem", &authority.pem()),
        ("client.pem", &client.cert),
        ("client.key", &client.key),
    ]));
    assert_eq!(xds.request().node.map(|node| node.id).as_deref(), Some("envoy-ratelimit"));
    xds.send("1", &[config("edge", "user", 3)]);
    assert_eq!(xds.request().version_info, "1");
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(2));

    // Another authority signs the next certificates.
    let next = Authority::new();
    let client = next.sign(&["tollgate"]);
    for (name, text) in [("ca.pem", &next.pem()), ("client.pem", &client.cert), ("client.key", &client.key)] {
        std::fs::write(server.path(name), text).expect("the folder is writable");
    }
    drop(xds);
    let xds = XdsServer::start_at(address, Some(acceptor(&next)));
    xds.send("2", &[config("edge", "user", 10)]);
    assert_eq!(xds.request().node.map(|node| node.id).as_deref(), Some("envoy-ratelimit"));
    assert_eq!(xds.request().version_info, "2");
    assert_eq!(remaining(&server, "edge.user", "ann"), Some(8));
}

#[test]
fn server_is_ready_once_it_has_the_first_configuration() {
    let xds = XdsServer::start();
    let server = server(&xds);
    let ready = || {
        let request = "GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        ask(server.address_of("admin"), request).text().to_owned()
    };
    xds.request();
    assert!(ready().contains("waiting for the first configuration of the xDS server"), "{}", ready());
    xds.send("1", &[]);
    // The acknowledgement is sent after the configuration is in force.
    assert_eq!(xds.request().version_info, "1");
    assert!(ready().contains("ready"), "{}", ready());
}
