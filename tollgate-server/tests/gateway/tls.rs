//! TLS with clients.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use rcgen::date_time_ymd;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, HandshakeKind, StreamOwned, SupportedProtocolVersion};
use testkit::certificates::{Authority, Signed};
use testkit::folder::folder_with;
use testkit::gateway::{Gateway, site};
use testkit::http1::Connection;
use testkit::skip::skipped;
use testkit::tollgate::{fails, run_in};
use testkit::upstream::slow_upstream;
use testkit::wait::until;
use time::OffsetDateTime;

/// Returns the configuration of a client that trusts this authority.
pub(crate) fn client(authority: &Authority, own: Option<&Signed>, protocols: &[&str]) -> Arc<ClientConfig> {
    client_with(rustls::DEFAULT_VERSIONS, authority, own, protocols)
}

fn client_with(
    versions: &[&'static SupportedProtocolVersion],
    authority: &Authority,
    own: Option<&Signed>,
    protocols: &[&str],
) -> Arc<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(versions).unwrap();
    let builder = builder.with_root_certificates(authority.roots());
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some(Signed { cert, key }) => builder
            .with_client_auth_cert(
                vec![CertificateDer::from_pem_slice(cert.as_bytes()).unwrap()],
                PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
            )
            .unwrap(),
    };
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
    Arc::new(config)
}

pub(crate) fn connect(
    gateway: &Gateway,
    config: &Arc<ClientConfig>,
    name: &str,
) -> Connection<StreamOwned<ClientConnection, TcpStream>> {
    let tcp = gateway.connect().tcp();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    Connection::on(StreamOwned::new(ClientConnection::new(Arc::clone(config), name).unwrap(), tcp))
}

const TLS: &str = "tls: { certificates: { cert: cert.pem, key: key.pem } }";

fn rules(settings: &str) -> String {
    site(settings, &["{ path: /**, upstream: echo }"], "")
}

fn gateway(settings: &str, signed: &Signed, others: &[(&str, &str)]) -> Gateway {
    let rules = rules(settings);
    let own = [("tollgate.yaml", rules.as_str()), ("cert.pem", &signed.cert), ("key.pem", &signed.key)];
    Gateway::in_folder(folder_with(&[&own, others].concat()))
}

#[test]
fn https_works_and_nothing_else_is_spoken_there() {
    let authority = Authority::new();
    let gateway = gateway(TLS, &authority.sign(&["localhost", "127.0.0.1"]), &[]);
    assert!(gateway.first_line.contains("gateway https://"), "{}", gateway.first_line);
    let config = client(&authority, None, &[]);
    let mut connection = connect(&gateway, &config, "localhost");
    for _ in 0..3 {
        assert_eq!(connection.get("/").status, 200);
    }
    // The framing is checked behind TLS, too.
    assert_eq!(connection.ask("GET / HTTP/1.1\nHost: h\r\n\r\n").status, 400);
    let mut nonsense = gateway.connect();
    nonsense.send("\0GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    assert!(nonsense.rest() < 100, "no more than an alert");
}

#[test]
fn curl_agrees_on_http_2() {
    let authority = Authority::new();
    let pem = authority.pem();
    let gateway = gateway(TLS, &authority.sign(&["localhost"]), &[("ca.pem", &pem)]);
    let port = gateway.address.port();
    let curl = |more: &[&str]| {
        let mut command = Command::new("curl");
        command.args(["--silent", "--show-error", "--max-time", "20", "--cacert"]).arg(gateway.path("ca.pem"));
        command.args(["--resolve", &format!("localhost:{port}:127.0.0.1"), "-o", "/dev/null"]);
        command.args(["-w", "%{http_version} %{http_code}"]).args(more);
        command.arg(format!("https://localhost:{port}/")).output()
    };
    let Ok(output) = curl(&["--http2"]) else { return skipped("curl is not installed") };
    assert_eq!(String::from_utf8_lossy(&output.stdout), "2 200", "{}", String::from_utf8_lossy(&output.stderr));
    let output = curl(&["--http1.1", "--data", "hello"]).unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "1.1 200");
}

#[test]
fn the_name_that_a_client_asks_for_chooses_the_certificate() {
    let (first, second) = (Authority::new(), Authority::new());
    let (one, two) = (first.sign(&["one.example"]), second.sign(&["*.two.example"]));
    let settings = "tls: { certificates: [{ cert: cert.pem, key: key.pem }, { cert: two.pem, key: two.key }] }";
    let gateway = gateway(settings, &one, &[("two.pem", &two.cert), ("two.key", &two.key)]);
    for (authority, name, is_good) in [
        (&first, "one.example", true),
        (&second, "www.two.example", true),
        (&first, "www.two.example", false),
        (&second, "one.example", false),
    ] {
        let mut connection = connect(&gateway, &client(authority, None, &[]), name);
        let answered = connection.try_send("GET / HTTP/1.1\r\nHost: h\r\n\r\n").and_then(|()| connection.try_receive());
        assert_eq!(answered.is_ok(), is_good, "{name}");
    }
}

#[test]
fn certificates_that_are_replaced_are_served_within_seconds_and_bad_ones_are_not() {
    let (before, after) = (Authority::new(), Authority::new());
    let gateway = gateway(TLS, &before.sign(&["localhost"]), &[]);
    let (old, new) = (client(&before, None, &[]), client(&after, None, &[]));
    let mut held = connect(&gateway, &old, "localhost");
    assert_eq!(held.get("/").status, 200);
    std::fs::write(gateway.path("cert.pem"), "nonsense").unwrap();
    gateway.await_said("certificates not reloaded, the previous ones stay in use", 1);
    assert_eq!(connect(&gateway, &old, "localhost").get("/").status, 200);
    let Signed { cert, key } = after.sign(&["localhost"]);
    std::fs::write(gateway.path("key.pem"), key).unwrap();
    std::fs::write(gateway.path("cert.pem"), cert).unwrap();
    gateway.await_said("certificates reloaded: new connections use them", 1);
    until("the new certificate", || {
        let mut connection = connect(&gateway, &new, "localhost");
        std::thread::sleep(Duration::from_millis(50));
        connection.try_send("GET / HTTP/1.1\r\nHost: h\r\n\r\n").is_ok_and(|()| connection.try_receive().is_ok())
    });
    assert_eq!(held.get("/").status, 200, "connections stay");
}

#[test]
fn a_client_must_have_a_certificate_where_one_is_wanted() {
    let (authority, people, strangers) = (Authority::new(), Authority::new(), Authority::new());
    let settings =
        "tls: { certificates: { cert: cert.pem, key: key.pem }, client_ca: people.pem, client_certificates: MODE }";
    for (mode, without) in [("required", false), ("optional", true)] {
        let settings = settings.replace("MODE", mode);
        let gateway = gateway(&settings, &authority.sign(&["localhost"]), &[("people.pem", &people.pem())]);
        let ask = |own: Option<&Signed>| {
            let mut connection = connect(&gateway, &client(&authority, own, &[]), "localhost");
            connection.try_send("GET / HTTP/1.1\r\nHost: h\r\n\r\n").is_ok() && connection.try_receive().is_ok()
        };
        assert!(ask(Some(&people.sign(&["ann"]))), "{mode}");
        assert_eq!(ask(None), without, "{mode}");
        assert!(!ask(Some(&strangers.sign(&["eve"]))), "{mode}");
    }
}

#[test]
fn replaced_client_authority_is_no_longer_trusted() {
    let (authority, before, after) = (Authority::new(), Authority::new(), Authority::new());
    let settings = "tls: { certificates: { cert: cert.pem, key: key.pem }, client_ca: people.pem }";
    let gateway = gateway(settings, &authority.sign(&["localhost"]), &[("people.pem", &before.pem())]);
    let ask = |people: &Authority| {
        let mut connection = connect(&gateway, &client(&authority, Some(&people.sign(&["ann"])), &[]), "localhost");
        connection.try_send("GET / HTTP/1.1\r\nHost: h\r\n\r\n").is_ok() && connection.try_receive().is_ok()
    };
    assert!(ask(&before) && !ask(&after));
    std::fs::write(gateway.path("people.pem"), after.pem()).unwrap();
    until("the other authority", || ask(&after));
    assert!(!ask(&before));
}

const WITH_CLIENT_CA: &str = "tls: { certificates: { cert: cert.pem, key: key.pem }, client_ca: people.pem }";

/// The certificate of a resumed session may have expired since its handshake.
#[test]
fn sessions_are_resumed_only_where_no_client_certificates_are_verified() {
    let (authority, people) = (Authority::new(), Authority::new());
    let ann = people.sign(&["ann"]);
    let optional = WITH_CLIENT_CA.replace("people.pem", "people.pem, client_certificates: optional");
    for (settings, own, is_resumed) in [
        (TLS, None, true),
        (WITH_CLIENT_CA, Some(&ann), false),
        (&optional, Some(&ann), false),
        (&optional, None, false),
    ] {
        let gateway = gateway(settings, &authority.sign(&["localhost"]), &[("people.pem", &people.pem())]);
        for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
            let config = client_with(&[version], &authority, own, &[]);
            let handshake = || {
                let name = ServerName::try_from("localhost").unwrap();
                let tls = ClientConnection::new(Arc::clone(&config), name).unwrap();
                let mut stream = StreamOwned::new(tls, gateway.connect().tcp());
                stream.write_all(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").unwrap();
                let mut answer = Vec::new();
                stream.read_to_end(&mut answer).expect("the connection ends in order");
                assert!(answer.starts_with(b"HTTP/1.1 200 OK"));
                stream.conn.handshake_kind()
            };
            assert_eq!(handshake(), Some(HandshakeKind::Full));
            let kind = if is_resumed { HandshakeKind::Resumed } else { HandshakeKind::Full };
            assert_eq!(handshake(), Some(kind), "{settings} {:?}", version.version);
        }
    }
}

#[test]
fn connections_end_when_their_client_certificate_expires() {
    /// How long requests take. They are in flight when the certificate expires.
    const SLOW: Duration = Duration::from_secs(10);
    let (authority, people) = (Authority::new(), Authority::new());
    let upstream = slow_upstream(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", SLOW);
    let routes =
        [format!("{{ path: /slow, upstream: 'http://{upstream}' }}"), "{ path: /**, upstream: echo }".to_owned()];
    let rules = site(&format!("timeouts: {{ idle: 10m }}\n  {WITH_CLIENT_CA}"), &routes, "");
    let (signed, pem) = (authority.sign(&["localhost"]), people.pem());
    let files =
        [("tollgate.yaml", rules.as_str()), ("cert.pem", &signed.cert), ("key.pem", &signed.key), ("people.pem", &pem)];
    let gateway = Gateway::in_folder(folder_with(&files));
    let now = OffsetDateTime::now_utc();
    let ann = people.sign_for(&["ann"], now - time::Duration::DAY, now + time::Duration::seconds(6));
    let connect_as = |own: &Signed| connect(&gateway, &client(&authority, Some(own), &[]), "localhost");

    let (mut idle, mut busy, mut other) = (connect_as(&ann), connect_as(&ann), connect_as(&people.sign(&["bob"])));
    for connection in [&mut idle, &mut other] {
        assert_eq!(connection.get("/").status, 200);
    }
    busy.send("GET /slow HTTP/1.1\r\nHost: h\r\n\r\n");
    let name = ServerName::try_from("localhost").unwrap();
    let tls = ClientConnection::new(client(&authority, Some(&ann), &["h2"]), name).unwrap();
    let mut http2 = StreamOwned::new(tls, gateway.connect().tcp());
    http2.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap();

    assert!(idle.is_closed_cleanly(), "an idle connection ends");
    let answer = busy.receive();
    assert_eq!((answer.status, answer.header("connection")), (200, Some("close")), "a request in flight is finished");
    assert!(busy.is_closed_cleanly());
    let mut frames = Vec::new();
    // This client does not answer GOAWAY with the end of the connection, so it is cut off.
    _ = http2.read_to_end(&mut frames);
    assert!(kinds_of(&frames).contains(&7), "it ends with GOAWAY");
    assert_eq!(other.get("/").status, 200, "other connections stay");
    let mut again = connect_as(&ann);
    assert!(again.try_send("GET / HTTP/1.1\r\nHost: h\r\n\r\n").and_then(|()| again.try_receive()).is_err());
}

/// Returns the types of HTTP/2 frames.
fn kinds_of(mut frames: &[u8]) -> Vec<u8> {
    let mut kinds = Vec::new();
    while let [a, b, c, kind, _, _, _, _, _, rest @ ..] = frames {
        kinds.push(*kind);
        frames = &rest[u32::from_be_bytes([0, *a, *b, *c]) as usize..];
    }
    kinds
}

#[test]
fn connections_end_when_their_client_authority_is_replaced() {
    let (authority, before, after) = (Authority::new(), Authority::new(), Authority::new());
    let settings = format!("timeouts: {{ idle: 10m }}\n  {WITH_CLIENT_CA}");
    let gateway = gateway(&settings, &authority.sign(&["localhost"]), &[("people.pem", &before.pem())]);
    let connect_as = |people: &Authority| {
        let mut connection = connect(&gateway, &client(&authority, Some(&people.sign(&["ann"])), &[]), "localhost");
        assert_eq!(connection.get("/").status, 200);
        connection
    };
    let mut held = connect_as(&before);
    std::fs::write(gateway.path("people.pem"), format!("{}{}", before.pem(), after.pem())).unwrap();
    gateway.await_said("certificates reloaded: new connections use them", 1);
    assert_eq!(held.get("/").status, 200, "its authority is still there");
    let mut of_the_other = connect_as(&after);
    std::fs::write(gateway.path("people.pem"), after.pem()).unwrap();
    assert!(held.is_closed_cleanly());
    assert_eq!(of_the_other.get("/").status, 200);

    // Without any authority, nothing says whose certificate it is.
    gateway.save(&rules(&format!("timeouts: {{ idle: 10m }}\n  {TLS}")));
    assert!(of_the_other.is_closed_cleanly());
    assert_eq!(connect(&gateway, &client(&authority, None, &[]), "localhost").get("/").status, 200);
}

#[test]
fn tls_can_have_its_own_port() {
    let authority = Authority::new();
    let settings = "tls: { listen: '127.0.0.1:0', certificates: { cert: cert.pem, key: key.pem } }";
    let gateway = gateway(settings, &authority.sign(&["localhost"]), &[]);
    assert_eq!(gateway.get("/").status, 200);
    let (_, beside) = gateway.first_line.split_once("gateway https://").expect("both are listed");
    let address = beside.split([',', ';']).next().unwrap();
    let tcp = TcpStream::connect(address).unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let tls = ClientConnection::new(client(&authority, None, &[]), name).unwrap();
    assert_eq!(Connection::on(StreamOwned::new(tls, tcp)).get("/").status, 200);
}

#[test]
fn second_port_in_use_is_reported() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let Signed { cert, key } = Authority::new().sign(&["localhost"]);
    let tls = format!("tls: {{ listen: '{address}', certificates: {{ cert: cert.pem, key: key.pem }} }}");
    let (said, code) = fails(&[("tollgate.yaml", &rules(&tls)), ("cert.pem", &cert), ("key.pem", &key)]);
    let expected =
        format!("tollgate: gateway.tls.listen: cannot listen on {address}: Address already in use (os error 98): ");
    assert!(said.contains(&expected) && said.ends_with(", or choose another port\n"), "{said}");
    assert_eq!(code, Some(2));
}

#[test]
fn certificate_files_that_cannot_be_used_end_with_2_and_the_fix() {
    let authority = Authority::new();
    let (one, other) = (authority.sign(&["localhost"]), authority.sign(&["localhost"]));
    let rules = site(TLS, &["{ path: /**, upstream: echo }"], "{ name: user, key: ip }");
    let (in_pem, of_it) = (": name a readable PEM file", ": name the key of this certificate, or");
    let no_key = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
    for (cert, key, wanted, fix) in [
        (None, Some(one.key.as_str()), "cert.pem: No such file", in_pem),
        (Some("nonsense"), Some(&one.key), "cert.pem: it contains no certificate", in_pem),
        (Some(one.cert.as_str()), None, "key.pem: No such file", in_pem),
        (Some(&one.cert), Some(no_key), "key.pem: it cannot be used", ": name an RSA, ECDSA or Ed25519 private key"),
        (Some(&one.cert), Some(&other.key), "key.pem does not belong to it", of_it),
    ] {
        let mut files = vec![("tollgate.yaml", rules.as_str())];
        files.extend(cert.map(|cert| ("cert.pem", cert)));
        files.extend(key.map(|key| ("key.pem", key)));
        let (said, code) = fails(&files);
        assert!(said.contains(wanted) && said.contains(fix), "{wanted}: {said}");
        assert_eq!(code, Some(2));
        // `validate` reports the same, and that the file is not valid.
        let place = if wanted.starts_with("cert.pem") { "tollgate.yaml:3:32: " } else { "tollgate.yaml:3:47: " };
        assert!(said.starts_with(place), "{said}");
        let expected = validated(&files);
        assert_eq!(expected, (format!("{said}tollgate.yaml: not valid: 1 error\n"), Some(1)));
    }
}

/// Returns the output and the exit code of `validate` for these files.
fn validated(files: &[(&str, &str)]) -> (String, Option<i32>) {
    let folder = folder_with(files);
    let output = run_in(folder.path(), &["validate", "tollgate.yaml"]);
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.code())
}

#[test]
fn validate_reports_every_unusable_file() {
    let authority = Authority::new();
    let signed = authority.sign(&["localhost"]);
    let tls = "tls: { certificates: [{ cert: cert.pem, key: key.pem }, { cert: absent.crt, key: absent.key }], client_ca: \
               empty.pem }";
    let route = "{ path: /**, upstream: 'https://127.0.0.1:9', upstream_tls: { ca: absent.pem } }";
    let limit = "{ name: user, key: 'jwt:sub' }";
    let rules = format!("jwt: {{ jwks_file: absent.json }}\n{}", site(tls, &[route], limit));
    let files = [("tollgate.yaml", &*rules), ("cert.pem", &signed.cert), ("key.pem", &signed.key), ("empty.pem", "")];
    let (expected, code) = validated(&files);
    for wanted in [
        "tollgate.yaml:1:19: absent.json cannot be read",
        "tollgate.yaml:4:67: gateway.tls.certificates absent.crt: No such file",
        "tollgate.yaml:4:84: gateway.tls.certificates absent.key: No such file",
        "tollgate.yaml:4:110: gateway.tls.client_ca empty.pem: it contains no certificate",
        "tollgate.yaml:6:73: upstream_tls.ca absent.pem: ",
        "tollgate.yaml: not valid: 5 errors",
    ] {
        assert!(expected.contains(wanted), "{wanted}: {expected}");
    }
    assert_eq!(code, Some(1));
    // `serve` reports the same before it starts anything.
    let problems = expected.strip_suffix("tollgate.yaml: not valid: 5 errors\n").unwrap();
    let (said, code) = fails(&files);
    assert_eq!(said, problems);
    assert_eq!(code, Some(2));
    let rules = rules.replace("absent.crt", "cert.pem");
    let rules =
        rules.replace("absent.key", "key.pem").replace("empty.pem", "cert.pem").replace("absent.pem", "cert.pem");
    let rules = rules.replace("jwt: { jwks_file: absent.json }", "").replace("jwt:sub", "ip");
    let files = [("tollgate.yaml", &*rules), ("cert.pem", &signed.cert), ("key.pem", &signed.key)];
    assert_eq!(validated(&files), ("tollgate.yaml: valid, 1 limit\n".to_owned(), Some(0)));
}

#[test]
fn handshakes_that_fail_are_counted_by_why() {
    let (authority, people, strangers) = (Authority::new(), Authority::new(), Authority::new());
    let tls = "tls: { certificates: { cert: cert.pem, key: key.pem }, client_ca: people.pem }";
    let signed = authority.sign(&["localhost"]);
    let rules = format!("admin: {{ listen: '127.0.0.1:0' }}\n{}", rules(&format!("timeouts: {{ head: 1s }}\n  {tls}")));
    let pem = people.pem();
    let own = [("tollgate.yaml", rules.as_str()), ("cert.pem", &signed.cert), ("key.pem", &signed.key)];
    let gateway = Gateway::in_folder(folder_with(&[&own[..], &[("people.pem", &*pem)]].concat()));
    let failed = |why: &str| format!("tollgate_tls_handshakes_failed_total{{reason=\"{why}\"}}");
    let ask = |believed: &Authority, own: Option<&Signed>| {
        let mut connection = connect(&gateway, &client(believed, own, &[]), "localhost");
        connection.try_send("GET / HTTP/1.1\r\nHost: h\r\n\r\n").is_ok() && connection.try_receive().is_ok()
    };
    assert!(ask(&authority, Some(&people.sign(&["ann"]))));
    for why in ["timeout", "disconnected", "refused_by_client", "client_certificate", "protocol"] {
        gateway.await_metric(&failed(why), 0);
    }
    assert!(!ask(&authority, None) && !ask(&authority, Some(&strangers.sign(&["eve"]))));
    gateway.await_metric(&failed("client_certificate"), 2);
    gateway.await_said("TLS connection of 127.0.0.1 refused: it has no client certificate: give the client", 1);
    assert!(!ask(&strangers, Some(&people.sign(&["ann"]))));
    gateway.await_metric(&failed("refused_by_client"), 1);
    gateway.connect().send("\x16\x03\x01\x00\x05nonsense");
    gateway.await_metric(&failed("protocol"), 1);
    drop(gateway.connect());
    gateway.await_metric(&failed("disconnected"), 1);
    let _silent = gateway.connect();
    gateway.await_metric(&failed("timeout"), 1);
    // At most one line in ten seconds: the second certificate was refused within them.
    assert_eq!(gateway.said().matches("TLS connection of").count(), 1, "{}", gateway.said());
}

/// As when a URL has `http://` instead of `https://`.
#[test]
fn plain_http_on_a_tls_port_gets_a_plain_http_400() {
    let rules = format!("admin: {{ listen: '127.0.0.1:0' }}\n{}", rules(TLS));
    let authority = Authority::new();
    let signed = authority.sign(&["localhost"]);
    let own = [("tollgate.yaml", rules.as_str()), ("cert.pem", &signed.cert), ("key.pem", &signed.key)];
    let gateway = Gateway::in_folder(folder_with(&own));
    let body = "x".repeat(100_000);
    for request in [
        "GET / HTTP/1.1\r\nHost: h\r\n\r\n".to_owned(),
        format!("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n{body}"),
    ] {
        let answer = gateway.connect().ask(request);
        assert_eq!((answer.status, answer.header("connection")), (400, Some("close")));
        let expected = r#"{"error":"plain_http","message":"This port requires TLS: use https."}"#;
        assert_eq!(answer.text(), expected);
    }
    gateway.await_metric("tollgate_tls_handshakes_failed_total{reason=\"plain_http\"}", 2);
    gateway.await_metric("tollgate_tls_handshakes_failed_total{reason=\"protocol\"}", 0);
    // Peeking at the first byte does not disturb TLS clients.
    assert_eq!(connect(&gateway, &client(&authority, None, &[]), "localhost").get("/").status, 200);
}

/// As when a URL has `https://` instead of `http://`.
#[test]
fn tls_on_a_plain_http_port_is_closed_and_not_counted_as_a_request() {
    let gateway = Gateway::start(&format!("admin: {{ listen: '127.0.0.1:0' }}\n{}", rules("")));
    let mut connection = connect(&gateway, &client(&Authority::new(), None, &[]), "localhost");
    _ = connection.try_send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    assert!(connection.try_receive().is_err());
    // A TLS hello contains random bytes: with a line feed among them it was ambiguous.
    let mut connection = gateway.connect();
    connection.send("\x16\x03\x01\x00\x05\n\n\n\r\n\r\n");
    assert!(connection.try_receive().is_err());
    // The first byte is enough.
    let mut connection = gateway.connect();
    connection.send("\x16");
    assert!(connection.try_receive().is_err());
    gateway.await_metric("tollgate_tls_handshakes_failed_total{reason=\"tls_hello\"}", 3);
    gateway.await_metric("tollgate_ambiguous_requests_total{reason=\"bare_lf\"}", 0);
    gateway.await_metric("tollgate_requests_total{route=\"\",status=\"4xx\"}", 0);
    // After a request it is not a TLS hello, but an invalid request.
    let mut connection = gateway.connect();
    assert_eq!(connection.get("/").status, 200);
    assert_eq!(connection.ask("\x16\x03\r\n\r\n").status, 400);
    gateway.await_metric("tollgate_tls_handshakes_failed_total{reason=\"tls_hello\"}", 3);
}

#[test]
fn refused_certificates_show_in_metrics_until_valid_ones_arrive() {
    let authority = Authority::new();
    let signed = authority.sign(&["localhost"]);
    let rules = format!("admin: {{ listen: '127.0.0.1:0' }}\n{}", rules(TLS));
    let own = [("tollgate.yaml", rules.as_str()), ("cert.pem", &signed.cert), ("key.pem", &signed.key)];
    let gateway = Gateway::in_folder(folder_with(&own));
    let listener = gateway.address;
    let reloads =
        |result: &str| format!("tollgate_certificate_reloads_total{{listener=\"{listener}\",result=\"{result}\"}}");
    let is_good = format!("tollgate_last_certificate_reload_successful{{listener=\"{listener}\"}}");
    gateway.await_metric(&reloads("refused"), 0);
    gateway.await_metric(&is_good, 1);
    std::fs::write(gateway.path("cert.pem"), "nonsense").unwrap();
    gateway.await_metric(&reloads("refused"), 1);
    gateway.await_metric(&is_good, 0);
    std::fs::write(gateway.path("cert.pem"), &signed.cert).unwrap();
    gateway.await_metric(&reloads("applied"), 1);
    gateway.await_metric(&is_good, 1);
}

#[test]
fn expired_and_expiring_certificates_are_logged_and_served() {
    const DAY: u64 = 24 * 60 * 60;
    let authority = Authority::new();
    let (past, future) = ((2000, 2001), (4000, 4001));
    let [expired, early] = [past, future]
        .map(|(from, to)| authority.sign_for(&["localhost"], date_time_ymd(from, 1, 1), date_time_ymd(to, 1, 1)));
    let now = OffsetDateTime::now_utc();
    let (long_ago, soon) = (now - Duration::from_secs(100 * DAY), now + Duration::from_secs(3 * DAY + DAY / 2));
    let ending = authority.sign_for(&["localhost", "b.example"], long_ago, soon);
    let certificates = "[{ cert: cert.pem, key: key.pem }, { cert: early.pem, key: early.key }]";
    let rules =
        format!("admin: {{ listen: '127.0.0.1:0' }}\n{}", rules(&format!("tls: {{ certificates: {certificates} }}")));
    let gateway = Gateway::in_folder(folder_with(&[
        ("tollgate.yaml", rules.as_str()),
        ("cert.pem", &expired.cert),
        ("key.pem", &expired.key),
        ("early.pem", &early.cert),
        ("early.key", &early.key),
    ]));
    let of_expired = "warning: gateway.tls.certificates cert.pem for localhost expired on 2001-01-01T00:00:00Z, so \
                      clients reject it: install a new one\n";
    gateway.await_said(of_expired, 1);
    gateway.await_said(
        "warning: gateway.tls.certificates early.pem for localhost is not valid before 4000-01-01T00:00",
        1,
    );
    let expiry = |file: &str| format!("tollgate_certificate_expiry_timestamp_seconds{{file=\"{file}\"}}");
    gateway.await_metric(&expiry("cert.pem"), 978_307_200);
    gateway.await_metric(&expiry("early.pem"), 64_092_211_200);
    // It was offered, or the client could not have rejected it.
    let refused = connect(&gateway, &client(&authority, None, &[]), "localhost").try_send("GET / HTTP/1.1\r\n");
    assert!(refused.unwrap_err().to_string().contains("xpired"));
    gateway.signal("HUP");
    gateway.await_said(of_expired, 2);

    std::fs::write(gateway.path("key.pem"), &ending.key).unwrap();
    std::fs::write(gateway.path("cert.pem"), &ending.cert).unwrap();
    gateway.await_metric(&expiry("cert.pem"), u64::try_from(soon.unix_timestamp()).unwrap());
    gateway.await_said("warning: gateway.tls.certificates cert.pem for localhost, b.example expires on ", 1);
    gateway.await_said("Z, in 3 days: install a new one\n", 1);
    assert_eq!(connect(&gateway, &client(&authority, None, &[]), "localhost").get("/").status, 200);
}
