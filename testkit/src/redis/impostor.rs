//! A server that speaks the protocol of Redis and replies whatever a test wants.

use std::io::{self, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The reply to a command.
pub enum Reply {
    /// That of an empty Redis.
    Usual,
    /// These bytes.
    Bytes(Vec<u8>),
    /// The first bytes, and then the others again and again until the client closes the connection.
    Endless(Vec<u8>, Vec<u8>),
}

/// A server that replies to a few commands as an empty Redis does, and to the others as the test says. Its threads end when
/// the clients close their connections.
pub struct Impostor {
    port: u16,
    connections: Arc<AtomicUsize>,
}

impl Impostor {
    /// Starts a server. `reply` gets the words of each command.
    pub fn start(reply: impl Fn(&[String]) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let port = listener.local_addr().expect("bound").port();
        let (reply, connections) = (Arc::new(reply), Arc::new(AtomicUsize::new(0)));
        let count = connections.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                count.fetch_add(1, Ordering::Relaxed);
                let reply = reply.clone();
                // An error means that the client has closed the connection.
                std::thread::spawn(move || serve(&client, &*reply));
            }
        });
        Self { port, connections }
    }

    /// The port of the server.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL for clients.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Returns the number of connections that clients have opened.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

fn serve(client: &TcpStream, reply: &dyn Fn(&[String]) -> Reply) -> io::Result<()> {
    let (mut requests, mut replies) = (BufReader::new(client), client);
    loop {
        let command = read_command(&mut requests)?;
        match reply(&command) {
            Reply::Usual => replies.write_all(usual(&command).as_bytes())?,
            Reply::Bytes(bytes) => replies.write_all(&bytes)?,
            Reply::Endless(first, others) => {
                replies.write_all(&first)?;
                loop {
                    replies.write_all(&others)?;
                }
            }
        }
    }
}

/// Reads an array of strings.
fn read_command(requests: &mut impl io::BufRead) -> io::Result<Vec<String>> {
    let count = read_number(requests)?;
    let mut words = Vec::with_capacity(count);
    for _ in 0..count {
        let mut word = vec![0; read_number(requests)? + 2];
        requests.read_exact(&mut word)?;
        word.truncate(word.len() - 2);
        words.push(String::from_utf8_lossy(&word).into_owned());
    }
    Ok(words)
}

/// Reads a line with the length of an array or a string.
fn read_number(requests: &mut impl io::BufRead) -> io::Result<usize> {
    let mut line = String::new();
    requests.read_line(&mut line)?;
    let digits = line.get(1..).map(str::trim_end);
    digits.and_then(|digits| digits.parse().ok()).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Returns the reply of an empty Redis to the commands that the limiter sends besides decisions.
fn usual(command: &[String]) -> String {
    let word = |index: usize| command.get(index).map(|word| word.to_ascii_uppercase()).unwrap_or_default();
    match &*word(0) {
        "PING" => "+PONG\r\n".to_owned(),
        // The probe.
        "EVAL" => ":1\r\n".to_owned(),
        "EXISTS" => ":0\r\n".to_owned(),
        "SUBSCRIBE" => {
            let channel = command.get(1).map_or("", String::as_str);
            format!("*3\r\n$9\r\nsubscribe\r\n${}\r\n{channel}\r\n:1\r\n", channel.len())
        }
        "SCRIPT" => format!("$40\r\n{}\r\n", "0".repeat(40)),
        "INFO" => "$-1\r\n".to_owned(),
        _ => "+OK\r\n".to_owned(),
    }
}

/// Returns a reply to `CLUSTER SLOTS`: the first and the last slot of each range, with the address of its master.
pub fn cluster_slots(ranges: &[(u16, u16, &str, u16)]) -> Vec<u8> {
    let range = |(first, last, host, port): &(u16, u16, &str, u16)| {
        format!("*3\r\n:{first}\r\n:{last}\r\n*3\r\n${}\r\n{host}\r\n:{port}\r\n$2\r\nid\r\n", host.len())
    };
    let ranges: Vec<String> = ranges.iter().map(range).collect();
    format!("*{}\r\n{}", ranges.len(), ranges.concat()).into_bytes()
}
