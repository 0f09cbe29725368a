//! A client of every protocol that the gateway serves, so that one test covers all of them.
//!
//! A test writes its requests as HTTP/1 messages. Over HTTP/1 the bytes are sent unchanged. Over HTTP/2 each message
//! becomes a stream: see [`crate::http2`]. Responses have one form for all protocols.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};
use std::thread;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;

use crate::certificates::{Authority, Signed};
use crate::folder::folder_with;
use crate::gateway::{Gateway, site};
use crate::http1::{Connection, Response};
use crate::http2;
use crate::tollgate::RULES;
use crate::wait::PATIENCE;

/// The protocol between a client and the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1
    Http1,
    /// HTTP/2 with prior knowledge
    Http2,
    /// HTTP/1.1 over TLS
    Http1Tls,
    /// HTTP/2 over TLS, chosen by ALPN
    Http2Tls,
}

use Protocol::{Http1, Http1Tls, Http2, Http2Tls};

/// Runs a test over every protocol, at the same time. A failure names the protocol.
///
/// `test` starts its own gateway with [`Protocol::start`], so that protocols share no limits.
#[track_caller]
pub fn each_protocol(test: impl Fn(Protocol) + Sync) {
    each_of(&[Http1, Http2, Http1Tls, Http2Tls], test);
}

/// Runs a test over HTTP/1, with and without TLS, at the same time. For tests that depend on the bytes of HTTP/1.
#[track_caller]
pub fn each_http1(test: impl Fn(Protocol) + Sync) {
    each_of(&[Http1, Http1Tls], test);
}

/// Runs a test over HTTP/2, with and without TLS, at the same time.
#[track_caller]
pub fn each_http2(test: impl Fn(Protocol) + Sync) {
    each_of(&[Http2, Http2Tls], test);
}

/// Runs a test over TLS, with HTTP/1 and HTTP/2, at the same time.
#[track_caller]
pub fn each_tls(test: impl Fn(Protocol) + Sync) {
    each_of(&[Http1Tls, Http2Tls], test);
}

#[track_caller]
fn each_of(protocols: &[Protocol], test: impl Fn(Protocol) + Sync) {
    let failed: Vec<&str> = thread::scope(|scope| {
        let start = |protocol: &Protocol| {
            let (protocol, test) = (*protocol, &test);
            // The name of the thread is part of its panic message.
            let named = thread::Builder::new().name(protocol.name().to_owned());
            (protocol, named.spawn_scoped(scope, move || test(protocol)).expect("threads can start"))
        };
        let running: Vec<_> = protocols.iter().map(start).collect();
        let ended = running.into_iter().map(|(protocol, thread)| (protocol, thread.join()));
        ended.filter_map(|(protocol, result)| result.is_err().then(|| protocol.name())).collect()
    });
    assert!(failed.is_empty(), "failed over {}", failed.join(", "));
}

impl Protocol {
    /// Returns its name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Http1 => "HTTP/1.1",
            Http2 => "HTTP/2",
            Http1Tls => "HTTP/1.1 with TLS",
            Http2Tls => "HTTP/2 with TLS",
        }
    }

    /// Returns whether it is HTTP/2.
    pub fn is_http2(self) -> bool {
        matches!(self, Http2 | Http2Tls)
    }

    /// Returns the scheme of its URLs.
    pub fn scheme(self) -> &'static str {
        match self {
            Http1 | Http2 => "http",
            Http1Tls | Http2Tls => "https",
        }
    }

    /// Starts a gateway with this rule file, whose clients use this protocol.
    pub fn start(self, rules: &str) -> Gateway {
        self.start_in(folder_with(&[(RULES, rules)]))
    }

    /// Starts a gateway with a route for every path to one upstream, and no limits.
    pub fn start_before(self, upstream: &str) -> Gateway {
        self.start(&site("", &[format!("{{ path: /**, upstream: {upstream} }}")], ""))
    }

    /// Starts a gateway in a folder that has a rule file, whose clients use this protocol.
    pub fn start_in(self, folder: TempDir) -> Gateway {
        self.prepare(&folder);
        Gateway::with_protocol(folder, self)
    }

    /// Changes the rule file of a folder to one with the settings that this protocol needs, and adds their files.
    pub fn prepare(self, folder: &TempDir) {
        if self.scheme() == "https" {
            let write =
                |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("it is writable");
            let rules = std::fs::read_to_string(folder.path().join(RULES)).expect("the folder has a rule file");
            write(RULES, &self.rules(&rules));
            write("gateway.crt", &identity().signed.cert);
            write("gateway.key", &identity().signed.key);
        }
    }

    /// Returns a rule file with the settings that this protocol needs.
    pub fn rules(self, rules: &str) -> String {
        if self.scheme() == "http" || !rules.contains("gateway:") {
            return rules.to_owned();
        }
        let tls = "gateway:\n  tls: { certificates: { cert: gateway.crt, key: gateway.key } }\n";
        assert!(rules.contains("gateway:\n") && !rules.contains("tls: { cert"), "no place for `tls` in {rules}");
        rules.replacen("gateway:\n", tls, 1)
    }

    /// Opens a connection to a gateway that [`Protocol::start`] has started, for asynchronous clients.
    pub async fn open(self, address: SocketAddr) -> io::Result<AsyncStream> {
        let tcp = tokio::net::TcpStream::connect(address).await?;
        tcp.set_nodelay(true)?;
        if self.scheme() == "http" {
            return Ok(Box::new(tcp));
        }
        let stream = TlsConnector::from(tls_config(self.alpn())).connect(server_name(), tcp).await?;
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(self.alpn()), "the server speaks {}", self.name());
        Ok(Box::new(stream))
    }

    fn alpn(self) -> &'static [u8] {
        if self.is_http2() { b"h2" } else { b"http/1.1" }
    }
}

/// A connection of an asynchronous client, with or without TLS.
pub type AsyncStream = Box<dyn Duplex>;

/// Both directions of a connection.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Duplex for S {}

/// The certificate of gateways that [`Protocol::start`] starts, and the authority that clients trust.
struct Identity {
    authority: Authority,
    signed: Signed,
}

fn identity() -> &'static Identity {
    static IDENTITY: OnceLock<Identity> = OnceLock::new();
    IDENTITY.get_or_init(|| {
        let authority = Authority::new();
        Identity { signed: authority.sign(&[SERVER_NAME]), authority }
    })
}

/// A connection of a client to a gateway, over any protocol. It is blocking. A read that takes longer than [`PATIENCE`]
/// panics, also in methods that return errors.
pub enum Client {
    /// HTTP/1.1, with or without TLS
    Http1(Connection<Stream>),
    /// HTTP/2, with or without TLS
    Http2(http2::Connection),
}

impl Client {
    /// Connects to a gateway.
    #[track_caller]
    pub fn to(address: SocketAddr, protocol: Protocol) -> Self {
        Self::try_to(address, protocol).expect("the gateway accepts")
    }

    /// Connects to a gateway, or fails if it does not accept the connection.
    pub fn try_to(address: SocketAddr, protocol: Protocol) -> io::Result<Self> {
        if protocol.is_http2() {
            return Ok(Self::Http2(http2::Connection::to(address, protocol)?));
        }
        let stream = if protocol == Http1Tls { Stream::tls(address)? } else { Stream::tcp(address)? };
        Ok(Self::Http1(Connection::on(stream)))
    }

    /// Sends a GET.
    #[track_caller]
    pub fn get(&mut self, target: &str) -> Response {
        self.ask(format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n"))
    }

    /// Sends a GET in the name of a user.
    #[track_caller]
    pub fn get_as(&mut self, user: &str, target: &str) -> Response {
        self.ask(format!("GET {target} HTTP/1.1\r\nHost: h\r\nX-User-Id: {user}\r\n\r\n"))
    }

    /// Sends a request and reads the response.
    #[track_caller]
    pub fn ask(&mut self, request: impl AsRef<[u8]>) -> Response {
        // The gateway may respond before it has read the whole request, and read no more.
        _ = self.try_send(request);
        self.receive()
    }

    /// Sends bytes of a request.
    #[track_caller]
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.try_send(bytes).expect("the gateway reads");
    }

    /// Sends bytes of a request, or fails if the gateway does not read any more.
    pub fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        match self {
            Self::Http1(connection) => connection.try_send(bytes),
            Self::Http2(connection) => connection.send(bytes.as_ref()),
        }
    }

    /// Reads the next response.
    #[track_caller]
    pub fn receive(&mut self) -> Response {
        self.try_receive().expect("the gateway answers")
    }

    /// Reads the next response. Fails if the connection or the stream ends before the response does.
    #[track_caller]
    pub fn try_receive(&mut self) -> io::Result<Response> {
        match self {
            Self::Http1(connection) => connection.try_receive(),
            Self::Http2(connection) => connection.receive(),
        }
    }

    /// Reads the head of the next response. The next response to read is the one after it.
    #[track_caller]
    pub fn receive_head(&mut self) -> io::Result<Response> {
        match self {
            Self::Http1(connection) => connection.receive_head(),
            Self::Http2(connection) => connection.receive_head(),
        }
    }

    /// Reads this many bytes of the body whose head was read. Fails if the body ends before.
    #[track_caller]
    pub fn body_bytes(&mut self, count: usize) -> io::Result<Vec<u8>> {
        match self {
            Self::Http1(connection) => connection.body_bytes(count),
            Self::Http2(connection) => connection.body_bytes(count),
        }
    }

    /// Returns whether the gateway ends the connection. It may have to finish responses first.
    pub fn is_closed(&mut self) -> bool {
        match self {
            Self::Http1(connection) => connection.is_closed(),
            Self::Http2(connection) => connection.is_closed(),
        }
    }

    /// Returns whether a response begins within a time in which a gateway without a reason to wait would answer many
    /// times.
    pub fn has_answer_within_a_moment(&mut self) -> bool {
        match self {
            Self::Http1(connection) => connection.has_answer_within_a_moment(),
            Self::Http2(connection) => connection.has_answer_within_a_moment(),
        }
    }

    /// Leaves without waiting for responses: closes a connection of HTTP/1, or resets the streams of HTTP/2.
    pub fn abandon(&mut self) {
        match self {
            // It fails if the gateway has closed the connection.
            Self::Http1(connection) => _ = connection.tcp().shutdown(Shutdown::Both),
            Self::Http2(connection) => connection.reset_streams(),
        }
    }
}

/// A connection with or without TLS.
pub enum Stream {
    /// Without TLS
    Tcp(TcpStream),
    /// With TLS
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

impl Stream {
    /// Connects without TLS.
    pub fn tcp(address: SocketAddr) -> io::Result<Self> {
        Ok(Self::Tcp(connect(address)?))
    }

    /// Connects to a gateway that [`Protocol::start`] has started with TLS.
    pub fn tls(address: SocketAddr) -> io::Result<Self> {
        let mut tcp = connect(address)?;
        let mut tls = ClientConnection::new(tls_config(Http1Tls.alpn()), server_name()).map_err(io::Error::other)?;
        while tls.is_handshaking() {
            tls.complete_io(&mut tcp)?;
        }
        Ok(Self::Tls(Box::new(StreamOwned::new(tls, tcp))))
    }

    /// Ends the direction to the gateway, with TLS's own end if there is one. The gateway may still respond.
    pub fn end_sending(&mut self) -> io::Result<()> {
        if let Self::Tls(tls) = self {
            tls.conn.send_close_notify();
            tls.flush()?;
        }
        TcpStream::from(self.as_fd().try_clone_to_owned()?).shutdown(Shutdown::Write)
    }
}

/// Connects to a server, with [`PATIENCE`] for each call.
pub(crate) fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let tcp = TcpStream::connect(address)?;
    tcp.set_read_timeout(Some(PATIENCE))?;
    tcp.set_write_timeout(Some(PATIENCE))?;
    tcp.set_nodelay(true)?;
    Ok(tcp)
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(tcp) => tcp.as_fd(),
            Self::Tls(tls) => tls.get_ref().as_fd(),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(tcp) => tcp.read(buffer),
            Self::Tls(tls) => read_tls(tls, buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(tcp) => tcp.write(bytes),
            Self::Tls(tls) => tls.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Tcp(tcp) => tcp.flush(),
            Self::Tls(tls) => tls.flush(),
        }
    }
}

/// Reads also if writing fails, as on a TCP connection: a server may respond before it has read a request, and close.
fn read_tls(tls: &mut StreamOwned<ClientConnection, TcpStream>, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match tls.conn.reader().read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            read => return read,
        }
        tls.conn.read_tls(&mut tls.sock)?;
        tls.conn.process_new_packets().map_err(io::Error::other)?;
    }
}

/// Returns the name that the certificate of gateways has.
fn server_name() -> ServerName<'static> {
    ServerName::try_from(SERVER_NAME).expect("it is a name")
}

const SERVER_NAME: &str = "localhost";

fn tls_config(alpn: &[u8]) -> Arc<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions().expect("the provider has them");
    let mut config = builder.with_root_certificates(identity().authority.roots()).with_no_client_auth();
    config.alpn_protocols = vec![alpn.to_vec()];
    Arc::new(config)
}
