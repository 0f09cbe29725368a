//! The certificates of a server with TLS and of its clients, new for each server.

use crate::certificates::Authority;

pub(super) const CA_FILE: &str = "ca.pem";
pub(super) const CLIENT_FILE: &str = "client.pem";
pub(super) const CLIENT_KEY_FILE: &str = "client-key.pem";
const CERTIFICATE_FILE: &str = "server.pem";
const KEY_FILE: &str = "server-key.pem";

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

/// Name and content of each file that [`args`] mentions, and a certificate for a client.
pub(super) fn files() -> [(&'static str, String); 5] {
    let authority = Authority::new();
    let (server, client) = (authority.sign(&["localhost", "127.0.0.1"]), authority.sign(&["limiter"]));
    [
        (CA_FILE, authority.pem()),
        (CERTIFICATE_FILE, server.cert),
        (KEY_FILE, server.key),
        (CLIENT_FILE, client.cert),
        (CLIENT_KEY_FILE, client.key),
    ]
}
