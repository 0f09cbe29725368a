//! An authority and a server certificate, new for each server.

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};

pub(super) const CA_FILE: &str = "ca.pem";
pub(super) const CLIENT_FILE: &str = "client.pem";
pub(super) const CLIENT_KEY_FILE: &str = "client-key.pem";
const CERTIFICATE_FILE: &str = "server.pem";
const KEY_FILE: &str = "server-key.pem";

pub(super) const ARGS: [&str; 8] = [
    "--tls-ca-cert-file",
    CA_FILE,
    "--tls-cert-file",
    CERTIFICATE_FILE,
    "--tls-key-file",
    KEY_FILE,
    // Clients show a password, not a certificate.
    "--tls-auth-clients",
    "no",
];

/// The same for a server that requires a certificate of its clients.
pub(super) const ARGS_WITH_CLIENTS: [&str; 8] = [
    "--tls-ca-cert-file",
    CA_FILE,
    "--tls-cert-file",
    CERTIFICATE_FILE,
    "--tls-key-file",
    KEY_FILE,
    "--tls-auth-clients",
    "yes",
];

/// Name and content of each file that [`ARGS`] mention, and a certificate for a client.
pub(super) fn files() -> [(&'static str, String); 5] {
    let ca_key = KeyPair::generate().expect("the system has randomness");
    let mut ca = CertificateParams::default();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let ca_certificate = ca.self_signed(&ca_key).expect("the authority is well formed");
    let issuer = Issuer::new(ca, ca_key);

    let key = KeyPair::generate().expect("the system has randomness");
    let names = ["localhost", "127.0.0.1"].map(String::from);
    let mut server = CertificateParams::new(names).expect("the names are valid");
    server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    server.use_authority_key_identifier_extension = true;
    let certificate = server.signed_by(&key, &issuer).expect("the certificate is well formed");

    let client_key = KeyPair::generate().expect("the system has randomness");
    let mut client = CertificateParams::new(["limiter".to_owned()]).expect("the name is valid");
    // Another name than the authority's: OpenSSL takes a certificate whose issuer has its name for a self-signed one.
    client.distinguished_name.push(DnType::CommonName, "limiter");
    client.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    client.use_authority_key_identifier_extension = true;
    let client_certificate = client.signed_by(&client_key, &issuer).expect("the certificate is well formed");

    [
        (CA_FILE, ca_certificate.pem()),
        (CERTIFICATE_FILE, certificate.pem()),
        (KEY_FILE, key.serialize_pem()),
        (CLIENT_FILE, client_certificate.pem()),
        (CLIENT_KEY_FILE, client_key.serialize_pem()),
    ]
}
