//! The certificates of a server with TLS and of its clients.

use crate::certificates::Authority;

pub(super) const CA_FILE: &str = "ca.pem";
pub(super) const CLIENT_FILE: &str = "client.pem";
pub(super) const CLIENT_KEY_FILE: &str = "client-key.pem";
pub(super) const CERTIFICATE_FILE: &str = "server.pem";
pub(super) const KEY_FILE: &str = "server-key.pem";

/// Whether a server requires a certificate of its clients.
#[derive(Clone, Copy)]
pub(super) enum ClientCertificates {
    Required,
    Unused,
}

/// The arguments of a server with these certificates.
pub(super) fn args(clients: ClientCertificates) -> [&'static str; 8] {
    let clients = match clients {
        ClientCertificates::Required => "yes",
        ClientCertificates::Unused => "no",
    };
    [
        "--tls-ca-cert-file",
        CA_FILE,
        "--tls-cert-file",
        CERTIFICATE_FILE,
        "--tls-key-file",
        KEY_FILE,
        "--tls-auth-clients",
        clients,
    ]
}

/// The arguments with which servers use TLS among themselves, too.
pub(super) const BETWEEN_SERVERS: [&str; 2] = ["--tls-replication", "yes"];
/// The same for the nodes of a cluster.
pub(super) const BETWEEN_NODES: [&str; 2] = ["--tls-cluster", "yes"];

/// Name and content of each file that [`args`] mentions, and a certificate for a client.
pub(super) fn files(authority: &Authority) -> [(&'static str, String); 5] {
    let (server, client) = (authority.sign(&["localhost", "127.0.0.1"]), authority.sign(&["limiter"]));
    [
        (CA_FILE, authority.pem()),
        (CERTIFICATE_FILE, server.cert),
        (KEY_FILE, server.key),
        (CLIENT_FILE, client.cert),
        (CLIENT_KEY_FILE, client.key),
    ]
}
