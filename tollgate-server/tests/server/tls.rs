//! TLS and mutual TLS of the decision service, with curl and redis-cli.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConnection, StreamOwned};
use testkit::certificates::{Authority, Signed};
use testkit::folder::folder_with;
use testkit::service::Server;
use testkit::tollgate::{RULES, run_in, transcript};
use testkit::wait::wait_until;
use time::OffsetDateTime;

const SETTINGS: &str = "listen: '127.0.0.1:0', tls: { certificates: { cert: server.pem, key: server.key }";

/// Returns what a program prints.
fn output_of(folder: &Path, program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).current_dir(folder).output().expect("it is installed");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Asks for a decision with curl, and returns the status and the version of HTTP.
fn curl(server: &Server, folder: &Path, arguments: &[&str]) -> String {
    let url = format!("https://localhost:{}/v1/check", server.address.port());
    let format = ["--write-out", " %{http_code} %{http_version}", "--silent", "--json", r#"{"limit":"per-user"}"#];
    let output = output_of(folder, "curl", &[&["--cacert", "ca.pem"], &format[..], arguments, &[&url]].concat());
    output.rsplit_once('}').map_or(output.as_str(), |(_, status)| status).trim().to_owned()
}

fn write(folder: &Path, name: &str, signed: &Signed) {
    std::fs::write(folder.join(format!("{name}.pem")), &signed.cert).expect("the folder is writable");
    std::fs::write(folder.join(format!("{name}.key")), &signed.key).expect("the folder is writable");
}

#[test]
fn every_listener_has_tls_and_certificates_are_read_again_when_they_change() {
    let authority = Authority::new();
    let rules = format!(
        "service: {{ http: {{ {SETTINGS} }} }}, resp: {{ {SETTINGS} }} }} }}\nadmin: {{ listen: '127.0.0.1:0' }}\n\
         limits: [{{ name: per-user, limit: 1000 }}]\n"
    );
    let folder = folder_with(&[(RULES, &rules), ("ca.pem", &authority.pem())]);
    write(folder.path(), "server", &authority.sign(&["localhost"]));
    let server = Server::in_folder(folder);
    let (ca, rule_file) = (server.path("ca.pem"), server.path(RULES));
    let folder = rule_file.parent().expect("it is in a folder");
    assert_eq!(curl(&server, folder, &["--http1.1"]), "200 1.1");
    assert_eq!(curl(&server, folder, &["--http2"]), "200 2");
    let port = server.address_of("rediss").port().to_string();
    let redis = ["--tls", "--cacert", "ca.pem", "-h", "localhost", "-p", &port];
    let check = [&redis[..], &["TOLLGATE.CHECK", "per-user"]].concat();
    assert!(output_of(folder, "redis-cli", &check).starts_with("allowed\n1\n"));

    // Another authority signs the next certificate.
    let other = Authority::new();
    std::fs::write(ca, other.pem()).expect("the folder is writable");
    write(folder, "server", &other.sign(&["localhost"]));
    let status = wait_until(|| Some(curl(&server, folder, &["--http2"])).filter(|status| status == "200 2"));
    assert!(status.is_some(), "the new certificate is not served: {}", server.said());
    assert!(output_of(folder, "redis-cli", &[&redis[..], &["PING"]].concat()).starts_with("PONG"));

    let metrics = crate::connections::metrics(&server);
    let count = |series: &str| {
        let line = metrics.lines().find_map(|line| line.strip_prefix(series)).expect(series);
        line.trim().parse::<f64>().expect("a number")
    };
    assert!(count(r#"tollgate_service_requests_total{surface="http",outcome="ok"}"#) >= 3.0);
    assert!(count(r#"tollgate_service_requests_total{surface="resp",outcome="ok"}"#) >= 2.0);
    assert!(count(r#"tollgate_service_duration_seconds_count{surface="http"}"#) >= 3.0);
    assert!(count(r#"tollgate_service_duration_seconds_count{surface="resp"}"#) >= 2.0);
    // There is no gateway, whose metrics include those of its own certificates.
    for listener in [server.address, server.address_of("rediss")] {
        let applied = format!(r#"tollgate_certificate_reloads_total{{listener="{listener}",result="applied"}}"#);
        assert!(count(&applied) >= 1.0, "{applied}");
        let last = format!(r#"tollgate_last_certificate_reload_successful{{listener="{listener}"}}"#);
        assert_eq!(count(&last), 1.0, "{last}");
    }
    assert!(count(r#"tollgate_certificate_expiry_timestamp_seconds{file="server.pem"}"#) > 1e9);
}

/// A listener with `client_ca` may be reached by other machines without tokens.
#[test]
fn clients_authenticate_by_certificates() {
    let authority = Authority::new();
    let settings = SETTINGS.replace("127.0.0.1", "0.0.0.0");
    let rules = format!(
        "service: {{ http: {{ {settings}, client_ca: ca.pem }} }}, resp: {{ {settings}, client_ca: ca.pem }} }} }}\n\
         limits: [{{ name: per-user, limit: 1000 }}]\n"
    );
    let folder = folder_with(&[(RULES, &rules), ("ca.pem", &authority.pem())]);
    write(folder.path(), "server", &authority.sign(&["localhost"]));
    write(folder.path(), "client", &authority.sign(&["client"]));
    write(folder.path(), "stranger", &Authority::new().sign(&["client"]));
    let server = Server::in_folder(folder);
    let rule_file = server.path(RULES);
    let folder = rule_file.parent().expect("it is in a folder");
    for (name, http, resp) in [("client", "200 2", "PONG\n"), ("stranger", "000 0", "")] {
        let (cert, key) = (format!("{name}.pem"), format!("{name}.key"));
        assert_eq!(curl(&server, folder, &["--cert", &cert, "--key", &key]), http, "{name}");
        let port = server.address_of("rediss").port().to_string();
        let arguments = ["--tls", "--cacert", "ca.pem", "--cert", &cert, "--key", &key, "-h", "localhost", "-p", &port];
        assert_eq!(output_of(folder, "redis-cli", &[&arguments[..], &["PING"]].concat()), resp, "{name}");
    }
    assert_eq!(curl(&server, folder, &[]), "000 0");
}

#[test]
fn listeners_without_authentication_or_with_unusable_certificates_are_refused() {
    let optional = "{ listen: '0.0.0.0:1', tls: { certificates: { cert: server.pem, key: server.key }, \
                    client_ca: ca.pem, client_certificates: optional } }";
    for (name, service) in [
        ("grpc", "grpc: '0.0.0.0:1'".to_owned()),
        ("optional", format!("http: {optional}")),
        ("missing", "resp: { listen: '127.0.0.1:0', tls: { certificates: { cert: no.pem, key: no.key } } }".to_owned()),
    ] {
        let authority = Authority::new();
        let rules = format!("service: {{ {service} }}\nlimits: [{{ name: per-user, limit: 1000 }}]\n");
        let folder = folder_with(&[(RULES, &rules), ("ca.pem", &authority.pem())]);
        write(folder.path(), "server", &authority.sign(&["localhost"]));
        let text = transcript(&run_in(folder.path(), &["validate", RULES]));
        insta::assert_snapshot!(
            format!("refused_listener_{name}"),
            text.replace(&*folder.path().to_string_lossy(), "")
        );
    }
}

/// Connects to a listener, and makes the handshake with the first write.
fn connect(server: &Server, scheme: &str, authority: &Authority) -> StreamOwned<ClientConnection, TcpStream> {
    connect_as(None, server, scheme, authority)
}

fn connect_as(
    own: Option<&Signed>,
    server: &Server,
    scheme: &str,
    authority: &Authority,
) -> StreamOwned<ClientConnection, TcpStream> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the versions of ring")
        .with_root_certificates(authority.roots());
    let config = match own {
        None => config.with_no_client_auth(),
        Some(own) => {
            let chain = vec![CertificateDer::from_pem_slice(own.cert.as_bytes()).expect("a certificate")];
            let key = PrivateKeyDer::from_pem_slice(own.key.as_bytes()).expect("a key");
            config.with_client_auth_cert(chain, key).expect("they belong together")
        }
    };
    let name = "localhost".try_into().expect("a name");
    let client = ClientConnection::new(Arc::new(config), name).expect("a client");
    let stream = TcpStream::connect(server.address_of(scheme)).expect("the server accepts connections");
    stream.set_read_timeout(Some(std::time::Duration::from_secs(60))).expect("a timeout can be set");
    StreamOwned::new(client, stream)
}

/// The client may not wait for an answer: its commands are in flight for a moment only.
#[test]
fn connections_end_with_their_client_certificate() {
    let authority = Authority::new();
    let settings = format!("{SETTINGS}, client_ca: people.pem }}");
    let rules = format!(
        "service: {{ http: {{ {settings} }}, resp: {{ {settings} }} }}\nadmin: {{ {settings} }}\n\
         limits: [{{ name: per-user, limit: 1000 }}]\n"
    );
    let folder = folder_with(&[(RULES, &rules), ("people.pem", &authority.pem())]);
    write(folder.path(), "server", &authority.sign(&["localhost"]));
    let server = Server::in_folder(folder);
    let healthz = "GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let check = "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                 content-length: 20\r\n\r\n{\"limit\":\"per-user\"}";
    let begin = |own: &Signed| {
        [("https", check), ("rediss", "PING\r\n"), ("admin https", healthz)].map(|(scheme, request)| {
            let mut stream = connect_as(Some(own), &server, scheme, &authority);
            stream.write_all(request.as_bytes()).expect("the server reads");
            assert!(stream.read(&mut [0; 4096]).is_ok_and(|read| read > 0), "{scheme}");
            (scheme, stream)
        })
    };
    let open = begin(&authority.sign(&["bob"]));
    let now = OffsetDateTime::now_utc();
    let soon = authority.sign_for(&["ann"], now - time::Duration::DAY, now + time::Duration::seconds(6));
    for (scheme, mut stream) in begin(&soon) {
        let ended = stream.read_to_end(&mut Vec::new());
        assert!(ended.is_ok(), "{scheme}: {ended:?}");
    }
    let other = Authority::new();
    std::fs::write(server.path("people.pem"), other.pem()).expect("the folder is writable");
    for (scheme, mut stream) in open {
        let ended = stream.read_to_end(&mut Vec::new());
        assert!(ended.is_ok(), "{scheme}: {ended:?}");
    }
}

/// Without `close_notify`, rustls reports the end of a connection as an error.
#[test]
fn every_connection_ends_with_close_notify() {
    let authority = Authority::new();
    let rules = format!(
        "service: {{ http: {{ {SETTINGS} }} }}, resp: {{ {SETTINGS} }} }}, grpc: {{ {SETTINGS} }} }} }}\n\
         limits: [{{ name: per-user, limit: 1000 }}]\n"
    );
    let folder = folder_with(&[(RULES, &rules), ("ca.pem", &authority.pem())]);
    write(folder.path(), "server", &authority.sign(&["localhost"]));
    let server = Server::in_folder(folder);
    let check = "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                 content-length: 20\r\nconnection: close\r\n\r\n{\"limit\":\"per-user\"}";
    let preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let cases = [
        ("rediss", "QUIT\r\n", "+OK\r\n"),
        ("rediss", "*1\r\n:1\r\n", "-ERR Protocol error: expected '$', got ':'\r\n"),
        // The server ends what is not complete in time.
        ("rediss", "PI", ""),
        ("https", check, "HTTP/1.1 200 OK\r\n"),
        ("https", "nonsense\r\n\r\n", "HTTP/1.1 400 Bad Request\r\n"),
        ("https", "POST /v1/", ""),
        ("decisions grpc", "nonsense\r\n\r\n", "HTTP/1.1 400 Bad Request\r\n"),
        ("decisions grpc", &format!("{preface}nonsense-nonsense-nonsense"), ""),
    ];
    std::thread::scope(|threads| {
        for (scheme, request, expected) in cases {
            let mut stream = connect(&server, scheme, &authority);
            threads.spawn(move || {
                stream.write_all(request.as_bytes()).expect("the server reads");
                let mut response = Vec::new();
                let ended = stream.read_to_end(&mut response);
                assert!(ended.is_ok(), "{scheme} {request:?}: {ended:?}");
                assert!(response.starts_with(expected.as_bytes()), "{scheme} {request:?}: {response:?}");
            });
        }
    });
}

/// The replies of a long pipeline are many TLS records, and the client reads them after it has sent everything.
#[test]
fn long_replies_arrive_whole() {
    let authority = Authority::new();
    let rules =
        format!("service: {{ http: '127.0.0.1:0', resp: {{ {SETTINGS} }} }} }}\nlimits: [{{ name: a, limit: 10 }}]\n");
    let folder = folder_with(&[(RULES, &rules), ("ca.pem", &authority.pem())]);
    write(folder.path(), "server", &authority.sign(&["localhost"]));
    let server = Server::in_folder(folder);
    let mut stream = connect(&server, "rediss", &authority);
    let echo = format!("*2\r\n$4\r\nECHO\r\n$50000\r\n{}\r\n", "x".repeat(50_000));
    // Fits into the buffers of the sockets.
    let count = 20;
    for _ in 0..count {
        stream.write_all(echo.as_bytes()).expect("the server reads");
    }
    let mut replies = vec![0; count * "$50000\r\n\r\n".len() + count * 50_000];
    stream.read_exact(&mut replies).expect("all replies arrive");
    assert!(replies.starts_with(b"$50000\r\nxxx") && replies.ends_with(b"xxx\r\n"));
}
