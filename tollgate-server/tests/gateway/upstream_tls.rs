//! TLS to upstreams.

use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, IsCa, date_time_ymd};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::version::{TLS12, TLS13};
use rustls::{ServerConfig, ServerConnection, StreamOwned, SupportedProtocolVersion};
use tempfile::TempDir;
use testkit::certificates::{Authority, Signed, params};
use testkit::client::{Protocol, each_http1, each_protocol};
use testkit::folder::folder_with;
use testkit::gateway::site;
use testkit::tollgate::run_in;
use testkit::upstream::{Raw, accepting, full, runtime};
use testkit::wait::until;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Returns a server configuration with this certificate.
pub(crate) fn server(signed: &Signed) -> ServerConfig {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let (cert, key) = ders(signed);
    builder.with_no_client_auth().with_single_cert(vec![cert], key).unwrap()
}

fn ders(signed: &Signed) -> (CertificateDer<'static>, PrivateKeyDer<'static>) {
    let cert = CertificateDer::from_pem_slice(signed.cert.as_bytes()).unwrap();
    (cert, PrivateKeyDer::from_pem_slice(signed.key.as_bytes()).unwrap())
}

/// Returns a TLS upstream that answers one request on each connection.
fn tls_upstream(signed: &Signed) -> Raw {
    serving(server(signed))
}

fn serving(config: ServerConfig) -> Raw {
    let config = Arc::new(config);
    Raw::start(move |conversation| {
        use std::io::{Read, Write};
        let tcp = conversation.stream.try_clone().unwrap();
        let mut tls = StreamOwned::new(ServerConnection::new(Arc::clone(&config)).unwrap(), tcp);
        let mut buffer = [0; 4096];
        if tls.read(&mut buffer).is_ok_and(|read| read > 0) {
            _ = tls.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 6\r\n\r\nsecret");
            tls.conn.send_close_notify();
            _ = tls.flush();
        } else {
            // A connection that is closed with unread bytes is reset, and its last bytes may be lost.
            _ = tls.sock.shutdown(Shutdown::Write);
            conversation.await_end();
        }
    })
}

#[test]
fn an_authority_of_upstreams_that_is_replaced_is_read_at_the_next_reload() {
    each_protocol(|protocol| {
        let (before, after) = (Authority::new(), Authority::new());
        let upstream = tls_upstream(&after.sign(&["api.internal"]));
        let tls = "{ ca: ca.pem, server_name: api.internal }";
        let route =
            format!("{{ path: /**, retries: 0, upstream: 'https://{}', upstream_tls: {tls} }}", upstream.address);
        let rules = site("", &[route], "");
        let gateway = protocol.start_in(folder_with(&[("tollgate.yaml", &rules), ("ca.pem", &before.pem())]));
        assert_eq!(gateway.get("/").status, 502);
        std::fs::write(gateway.path("ca.pem"), after.pem()).unwrap();
        gateway.signal("HUP");
        gateway.await_said("is in force", 1);
        assert_eq!(gateway.get("/").status, 200);
    });
}

#[test]
fn tls_upstream_is_trusted_if_its_authority_and_name_match() {
    each_protocol(|protocol| {
        let (authority, stranger) = (Authority::new(), Authority::new());
        let good = tls_upstream(&authority.sign(&["api.internal"]));
        let strange = tls_upstream(&stranger.sign(&["api.internal"]));
        let pem = authority.pem();
        for (upstream, tls, wanted) in [
            (&good, "{ ca: ca.pem, server_name: api.internal }", 200),
            (&good, "{ ca: ca.pem, server_name: other.internal }", 502),
            (&good, "{ ca: ca.pem }", 502),
            (&good, "{ server_name: api.internal }", 502),
            (&strange, "{ ca: ca.pem, server_name: api.internal }", 502),
        ] {
            let route =
                format!("{{ path: /**, retries: 0, upstream: 'https://{}', upstream_tls: {tls} }}", upstream.address);
            let gateway =
                protocol.start_in(folder_with(&[("tollgate.yaml", &site("", &[route], "")), ("ca.pem", &pem)]));
            let answer = gateway.get("/");
            assert_eq!(answer.status, wanted, "{tls}");
            assert_eq!(answer.text() == "secret", wanted == 200, "{tls}");
        }
    });
}

/// Asserts that the reason of a 502 and the fix are in the log line about the upstream. Clients get only that it cannot
/// be reached.
#[track_caller]
fn assert_reported(protocol: Protocol, upstream: &Raw, (tls, ca): (&str, &str), fault: &str, kind: &str) {
    let address = upstream.address;
    let route = format!(
        "{{ name: all, path: /**, upstream: 'https://{address}', upstream_tls: {tls}, eject: {{ after: 1 }} }}"
    );
    let rules = format!("admin: {{ listen: '127.0.0.1:0' }}\n{}", site("workers: 1", &[route], ""));
    let gateway = protocol.start_in(folder_with(&[("tollgate.yaml", &rules), ("ca.pem", ca)]));
    let expected = r#"{"error":"bad_gateway","message":"The upstream cannot be reached."}"#;
    // A request that may be retried, and one that may not.
    for (number, request) in
        ["GET / HTTP/1.1\r\nHost: h\r\n\r\n", "POST / HTTP/1.1\r\nHost: h\r\n\r\n"].into_iter().enumerate()
    {
        let answer = gateway.send(request);
        assert_eq!((answer.status, answer.text()), (502, expected), "{fault}");
        let failures = format!("tollgate_upstream_failures_total{{route=\"all\",kind=\"{kind}\"}}");
        gateway.await_metric(&failures, number as u64 + 1);
    }
    gateway.await_said(&format!("upstream {address} of route all failed: {fault}; it still gets requests"), 1);
}

const NAMED: &str = "{ ca: ca.pem, server_name: api.internal }";

#[test]
fn untrusted_certificate_is_reported_with_the_fix() {
    each_protocol(|protocol| {
        let (authority, stranger) = (Authority::new(), Authority::new());
        let [past, present, future] = [1999, 2001, 4001].map(|year| date_time_ymd(year, 1, 1));
        let names = ["api.internal", "*.shop.internal", "192.0.2.1"];
        let unknown = "its certificate was issued by an unknown authority: name that authority in upstream_tls.ca";
        for (signed, tls, fault) in [
            (Signed::by_itself(&params(&names)), NAMED, unknown),
            (authority.sign(&names), "{ server_name: api.internal }", unknown),
            (
                stranger.sign(&names),
                NAMED,
                "a signature in its certificate or handshake does not verify: it does not have the key of that certificate, or another authority of the same name has issued it: check its key, and that upstream_tls.ca contains its authority",
            ),
            (
                authority.sign_for(&names, past, present),
                NAMED,
                "its certificate expired on 2001-01-01T00:00:00Z: install a new one",
            ),
            (
                authority.sign_for(&names, future, date_time_ymd(4002, 1, 1)),
                NAMED,
                "its certificate is not valid before 4001-01-01T00:00:00Z: install one that is valid now, or set the clock \
                 of this machine",
            ),
            (
                authority.sign(&names),
                "{ ca: ca.pem, server_name: other.internal }",
                "its certificate is for api.internal, *.shop.internal, 192.0.2.1, and other.internal was expected: set upstream_tls.server_name to one of its names, or create one for other.internal",
            ),
            (
                authority.sign(&[]),
                "{ ca: ca.pem }",
                "its certificate has no name, and 127.0.0.1 was expected: create one with subjectAltName for 127.0.0.1",
            ),
        ] {
            assert_reported(protocol, &tls_upstream(&signed), (tls, &authority.pem()), fault, "bad_certificate");
        }
    });
}

/// The default of `openssl req -x509`.
#[test]
fn ca_certificate_is_reported_with_a_fix_that_works() {
    each_protocol(|protocol| {
        let mut params = params(&["api.internal"]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let signed = Signed::by_itself(&params);
        let fault = "its certificate is a CA certificate (CA:TRUE): create it with CA:FALSE (openssl req -x509 -addext \
                     basicConstraints=CA:FALSE), or have that authority issue one for it";
        assert_reported(protocol, &tls_upstream(&signed), (NAMED, &signed.cert), fault, "bad_certificate");

        params.is_ca = IsCa::ExplicitNoCa;
        let signed = Signed::by_itself(&params);
        let upstream = tls_upstream(&signed);
        let route = format!("{{ path: /**, upstream: 'https://{}', upstream_tls: {NAMED} }}", upstream.address);
        let files = [("tollgate.yaml", &*site("", &[route], "")), ("ca.pem", &signed.cert)];
        assert_eq!(protocol.start_in(folder_with(&files)).get("/").text(), "secret");
    });
}

#[test]
fn upstream_without_tls_is_reported() {
    each_protocol(|protocol| {
        let authority = Authority::new();
        let plain = Raw::start(|conversation| {
            if conversation.more() {
                conversation.send("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            }
        });
        let fault = "it does not speak TLS: use http://, or h2c:// for HTTP/2";
        assert_reported(protocol, &plain, (NAMED, &authority.pem()), fault, "cannot_connect");
        let silent = Raw::start(|conversation| _ = conversation.more());
        let fault = "it closed the connection during the TLS handshake: if it does not speak TLS, use http://";
        assert_reported(protocol, &silent, (NAMED, &authority.pem()), fault, "cannot_connect");
    });
}

/// Returns the configuration of a server that accepts only clients with a certificate of this authority.
fn wants_certificate(authority: &Authority, version: &'static SupportedProtocolVersion) -> ServerConfig {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let people = Arc::new(authority.roots());
    let verifier = WebPkiClientVerifier::builder_with_provider(people, Arc::clone(&provider)).build().unwrap();
    let builder = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[version]).unwrap();
    let (cert, key) = ders(&authority.sign(&["api.internal"]));
    builder.with_client_cert_verifier(verifier).with_single_cert(vec![cert], key).unwrap()
}

const WANTS_CERTIFICATE: &str = "it requires a client certificate that it trusts: set upstream_tls.client_cert and \
     client_key to one that its authority has issued";

#[test]
fn upstream_that_requires_a_client_certificate_is_reported() {
    each_protocol(|protocol| {
        let authority = Authority::new();
        // In TLS 1.3 it can report this only after the handshake is complete for the gateway.
        for (version, alpn) in [(&TLS12, "http/1.1"), (&TLS13, "http/1.1"), (&TLS13, "h2")] {
            let mut config = wants_certificate(&authority, version);
            config.alpn_protocols = vec![alpn.into()];
            assert_reported(protocol, &serving(config), (NAMED, &authority.pem()), WANTS_CERTIFICATE, "cannot_connect");
        }
    });
}

const WITH_CERTIFICATE: &str =
    "{ ca: ca.pem, server_name: api.internal, client_cert: client.pem, client_key: client-key.pem }";

/// Returns a folder with the files of a gateway that has a client certificate.
fn with_certificate(rules: &str, ca: &Authority, client: &Signed) -> TempDir {
    let files = [
        ("tollgate.yaml", rules),
        ("ca.pem", &ca.pem()),
        ("client.pem", &client.cert),
        ("client-key.pem", &client.key),
    ];
    folder_with(&files)
}

#[test]
fn upstreams_get_the_client_certificate() {
    each_protocol(|protocol| {
        let (authority, stranger) = (Authority::new(), Authority::new());
        for version in [&TLS12, &TLS13] {
            let upstream = serving(wants_certificate(&authority, version));
            let route = format!(
                "{{ path: /**, retries: 0, upstream: 'https://{}', upstream_tls: {WITH_CERTIFICATE}, eject: {{ after: 1 }} }}",
                upstream.address
            );
            let rules = site("", &[route], "");
            for (issuer, status) in [(&authority, 200), (&stranger, 502)] {
                let gateway = protocol.start_in(with_certificate(&rules, &authority, &issuer.sign(&["gateway"])));
                assert_eq!(gateway.get("/").status, status, "{version:?}");
                if status == 502 {
                    assert_eq!(gateway.get("/").status, status, "{version:?}");
                    gateway.await_said(WANTS_CERTIFICATE, 1);
                }
            }
        }
    });
}

#[test]
fn a_client_certificate_that_is_replaced_is_read_at_the_next_reload() {
    each_protocol(|protocol| {
        let (authority, stranger) = (Authority::new(), Authority::new());
        let upstream = serving(wants_certificate(&authority, &TLS13));
        let route = format!(
            "{{ path: /**, retries: 0, upstream: 'https://{}', upstream_tls: {WITH_CERTIFICATE} }}",
            upstream.address
        );
        let folder = with_certificate(&site("", &[route], ""), &authority, &stranger.sign(&["gateway"]));
        let gateway = protocol.start_in(folder);
        assert_eq!(gateway.get("/").status, 502);
        let trusted = authority.sign(&["gateway"]);
        std::fs::write(gateway.path("client.pem"), trusted.cert).unwrap();
        std::fs::write(gateway.path("client-key.pem"), trusted.key).unwrap();
        gateway.signal("HUP");
        gateway.await_said("is in force", 1);
        assert_eq!(gateway.get("/").status, 200);
    });
}

#[test]
fn client_certificates_that_cannot_be_used_are_refused() {
    let authority = Authority::new();
    let (client, other) = (authority.sign(&["gateway"]), authority.sign(&["gateway"]));
    let mut problems = Vec::new();
    for tls in [
        "{ client_cert: client.pem }",
        "{ client_key: client-key.pem }",
        "{ client_cert: absent.pem, client_key: client-key.pem }",
        "{ client_cert: client-key.pem, client_key: client-key.pem }",
        "{ client_cert: client.pem, client_key: client.pem }",
        "{ client_cert: client.pem, client_key: other-key.pem }",
    ] {
        // The same upstream without settings that can be wrong.
        let first = "{ path: /first, upstream: 'https://127.0.0.1:9' }";
        let route = format!("{{ path: /**, upstream: 'https://127.0.0.1:9', upstream_tls: {tls} }}");
        let rules = site("", &[first, &route], "");
        let files = [
            ("tollgate.yaml", rules.as_str()),
            ("client.pem", &client.cert),
            ("client-key.pem", &client.key),
            ("other-key.pem", &other.key),
        ];
        let folder = folder_with(&files);
        let validated = run_in(folder.path(), &["validate", "tollgate.yaml"]);
        assert_eq!(validated.status.code(), Some(1), "{tls}");
        problems.push(String::from_utf8(validated.stdout).expect("it is text"));
    }
    insta::assert_snapshot!(problems.concat());
}

/// Returns an upstream that speaks HTTP/2 if the client offers it, and switches protocols otherwise.
fn modern_upstream(signed: &Signed) -> std::net::SocketAddr {
    let mut config = server(signed);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    runtime().spawn(async move {
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        while let Ok((tcp, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut tls) = acceptor.accept(tcp).await else { return };
                if tls.get_ref().1.alpn_protocol() == Some(b"h2") {
                    let service = hyper::service::service_fn(|_| async {
                        Ok::<_, std::convert::Infallible>(http::Response::new(full("by HTTP/2")))
                    });
                    let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    _ = builder.serve_connection(TokioIo::new(tls), service).await;
                    return;
                }
                let mut buffer = [0; 4096];
                _ = tls.read(&mut buffer).await;
                let switch = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
                _ = tls.write_all(switch.as_bytes()).await;
                while let Ok(read @ 1..) = tls.read(&mut buffer).await {
                    _ = tls.write_all(&buffer[..read]).await;
                    _ = tls.flush().await;
                }
            });
        }
    });
    address
}

#[test]
fn a_websocket_reaches_an_upstream_that_would_rather_speak_http_2() {
    each_http1(|protocol| {
        let authority = Authority::new();
        let address = modern_upstream(&authority.sign(&["api.internal"]));
        let route = format!(
            "{{ path: /**, upstream: 'https://{address}', upstream_tls: {{ ca: ca.pem, server_name: api.internal }} }}"
        );
        let rules = site("workers: 1", &[route], "");
        let gateway = protocol.start_in(folder_with(&[("tollgate.yaml", &rules), ("ca.pem", &authority.pem())]));
        // With and without a shared connection.
        for _ in 0..2 {
            let mut connection = gateway.connect();
            let answer =
                connection.ask("GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n");
            assert_eq!(answer.status, 101);
            connection.send("hello");
            assert_eq!(connection.bytes(5), b"hello");
            assert_eq!(gateway.get("/").text(), "by HTTP/2");
        }
    });
}

#[test]
fn rules_that_were_refused_for_a_missing_file_are_read_again_when_it_appears() {
    each_protocol(|protocol| {
        let authority = Authority::new();
        let gateway = protocol.start(&site("", &["{ path: /**, respond: { status: 204 } }"], ""));
        std::fs::create_dir(gateway.path("certs")).unwrap();
        let tls = "upstream_tls: { ca: certs/late.pem }";
        gateway.save(&site("", &[format!("{{ path: /**, upstream: 'https://127.0.0.1:9', retries: 0, {tls} }}")], ""));
        gateway.await_said("upstream_tls.ca certs/late.pem: No such file", 1);
        assert_eq!(gateway.get("/").status, 204);
        // A file that cannot be used is reported, and waits for the next change.
        std::fs::write(gateway.path("certs/late.pem"), "nonsense").unwrap();
        gateway.await_said("upstream_tls.ca certs/late.pem: it contains no certificate", 1);
        std::fs::write(gateway.path("certs/late.pem"), authority.pem()).unwrap();
        gateway.await_said("is in force", 1);
        assert_eq!(gateway.get("/").status, 502);
    });
}

#[test]
fn an_upstream_that_is_replaced_by_one_without_http_2_gets_requests_of_http_1_directly() {
    each_http1(|protocol| {
        let authority = Authority::new();
        let mut config = server(&authority.sign(&["api.internal"]));
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let both = Arc::new(config.clone());
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let (only_http1, is_replaced) = (Arc::new(config), Arc::new(AtomicBool::new(false)));
        let has_new_config = Arc::clone(&is_replaced);
        let (address, _) = accepting(move |tcp| {
            let is_replaced = Arc::clone(&has_new_config);
            let config = if is_replaced.load(Relaxed) { &only_http1 } else { &both };
            let acceptor = tokio_rustls::TlsAcceptor::from(Arc::clone(config));
            async move {
                let Ok(mut tls) = acceptor.accept(tcp).await else { return };
                if tls.get_ref().1.alpn_protocol() == Some(b"h2") {
                    let service = hyper::service::service_fn(|_| async {
                        Ok::<_, std::convert::Infallible>(http::Response::new(full("by HTTP/2")))
                    });
                    let replaced = async {
                        while !is_replaced.load(Relaxed) {
                            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                        }
                    };
                    let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    tokio::select! {
                        _ = builder.serve_connection(TokioIo::new(tls), service) => {}
                        () = replaced => {}
                    }
                    return;
                }
                let mut buffer = [0; 4096];
                while let Ok(1..) = tls.read(&mut buffer).await {
                    let hint = "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n";
                    _ = tls.write_all(hint.as_bytes()).await;
                    _ = tls.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
                    _ = tls.flush().await;
                }
            }
        });
        let tls = "{ ca: ca.pem, server_name: api.internal }";
        let route = format!("{{ path: /**, upstream: 'https://{address}', upstream_tls: {tls} }}");
        let rules = site("workers: 1", &[route], "");
        let gateway = protocol.start_in(folder_with(&[("tollgate.yaml", &rules), ("ca.pem", &authority.pem())]));
        assert_eq!(gateway.get("/").text(), "by HTTP/2");
        is_replaced.store(true, Relaxed);
        // Only requests that are forwarded directly get interim responses.
        until("a hint arrives", || gateway.get("/").status == 103);
    });
}
