//! The built binary with a gateway and an upstream, and HTTP clients for both of its listeners.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::Deref;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tempfile::TempDir;

use crate::common::{self, PATIENCE, Process, RULES};
pub(crate) use crate::common::{run_in, wait_until};

/// A running gateway.
pub(crate) struct Gateway {
    process: Process,
    pub(crate) address: SocketAddr,
    pub(crate) admin: SocketAddr,
}

impl Gateway {
    /// Starts a gateway with these rules, on free ports.
    pub(crate) fn start(rules: &str) -> Self {
        Self::start_at("127.0.0.1:0", rules)
    }

    /// Starts a gateway that listens on this address.
    pub(crate) fn start_at(listen: &str, rules: &str) -> Self {
        let arguments = ["serve", "--config", RULES, "--listen", listen, "--admin", "127.0.0.1:0"];
        let process = Process::start(folder_with(rules), &arguments);
        let (address, admin) = (process.address_of("gateway"), process.address_of("admin"));
        Self { process, address, admin }
    }

    pub(crate) fn get(&self, target: &str) -> Answer {
        ask(self.address, format!("GET {target} HTTP/1.1\r\nhost: shop.example\r\nconnection: close\r\n\r\n"))
    }

    pub(crate) fn send(&self, request: impl AsRef<[u8]>) -> Answer {
        ask(self.address, request)
    }

    pub(crate) fn ask_admin(&self, path: &str) -> Answer {
        ask(self.admin, format!("GET {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n"))
    }

    /// Returns the value of a metric.
    pub(crate) fn metric(&self, series: &str) -> Option<f64> {
        let text = self.ask_admin("/metrics").text;
        let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.map(|value| value.parse().expect("a number"))
    }

    /// Waits until a metric has that value. Counts at the end of a response may change after the client has read it.
    #[track_caller]
    pub(crate) fn await_metric(&self, series: &str, wanted: f64) {
        let found = wait_until(|| self.metric(series).filter(|value| (value - wanted).abs() < 1e-9));
        assert!(found.is_some(), "{series} is {:?} and not {wanted}", self.metric(series));
    }

    pub(crate) fn save_rules(&self, rules: &str) {
        std::fs::write(self.path(RULES), rules).expect("the folder is writable");
    }

    /// Waits until it ends. Its folder stays.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.process.wait()
    }

    /// Returns the lines of a log, once there are this many.
    #[track_caller]
    pub(crate) fn await_lines(&self, path: &Path, count: usize) -> Vec<String> {
        let lines = || -> Vec<String> {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
            whole.map(|line| line.trim_end().to_owned()).filter(|line| !line.starts_with("tollgate ")).collect()
        };
        wait_until(|| Some(lines()).filter(|lines| lines.len() >= count))
            .unwrap_or_else(|| panic!("there are not {count} lines, but: {:?}", lines()))
    }
}

impl Deref for Gateway {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

/// A response, read to the end of its connection.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) text: String,
}

pub(crate) fn ask(address: SocketAddr, request: impl AsRef<[u8]>) -> Answer {
    let mut stream = connect(address);
    stream.write_all(request.as_ref()).expect("it reads");
    read_answer(stream)
}

pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("it accepts");
    stream.set_read_timeout(Some(PATIENCE)).expect("the timeout is not zero");
    stream
}

pub(crate) fn read_answer(mut stream: TcpStream) -> Answer {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("it answers and closes");
    let text = String::from_utf8_lossy(&bytes);
    let (head, text) = text.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status line");
    Answer { status, head: head.to_owned(), text: text.to_owned() }
}

/// Starts an upstream that answers every request with these bytes and closes the connection. It runs as long as the
/// test.
pub(crate) fn upstream(answer: &'static [u8]) -> SocketAddr {
    slow_upstream(answer, Duration::ZERO)
}

/// Starts the same upstream with a delay.
#[expect(clippy::disallowed_methods, reason = "an upstream that takes its time has a thread to wait on")]
pub(crate) fn slow_upstream(answer: &'static [u8], after: Duration) -> SocketAddr {
    moody_upstream(move || {
        std::thread::sleep(after);
        answer
    })
}

/// Starts the same upstream, with a response that a closure returns.
pub(crate) fn moody_upstream(answer: impl Fn() -> &'static [u8] + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let (address, answer) = (listener.local_addr().expect("it is bound"), Arc::new(answer));
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let answer = Arc::clone(&answer);
            std::thread::spawn(move || {
                let mut reader = BufReader::new(&stream);
                let mut line = String::new();
                while reader.read_line(&mut line).is_ok_and(|read| read > 2) {
                    line.clear();
                }
                // The client may have disconnected.
                _ = (&stream).write_all(answer());
                // Closing with unread bytes would reset the connection and lose the response.
                _ = stream.shutdown(Shutdown::Write);
                _ = std::io::copy(&mut reader, &mut std::io::sink());
            });
        }
    });
    address
}

/// Returns an address whose listen queue is full while the other value is held: connection attempts time out.
pub(crate) fn full_listener() -> std::io::Result<(SocketAddr, impl Sized)> {
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    listener.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())?;
    listener.listen(0)?;
    let address = listener.local_addr()?.as_socket().ok_or(std::io::ErrorKind::AddrNotAvailable)?;
    let dial = || TcpStream::connect_timeout(&address, Duration::from_millis(300)).ok();
    let taken: Vec<TcpStream> = std::iter::from_fn(dial).collect();
    Ok((address, (listener, taken)))
}

/// The response of a healthy upstream.
pub(crate) const HELLO: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello";

pub(crate) fn folder_with(rules: &str) -> TempDir {
    common::folder_with(&[(RULES, rules)])
}
