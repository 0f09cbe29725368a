//! Messages of the HTTP RFCs and of published research on request smuggling, sent through the gateway to real servers.
//!
//! The files in `messages/` are the corpus. A message has a name, the statuses of its responses, its bytes, and the
//! requests that an upstream gets:
//!
//! ```text
//! ## RFC 9112, section 6                  the source of the messages below
//! # A comment.
//! length-body: 200                        the name, and a status for each response
//!     POST /{id} HTTP/1.1\r\n             bytes, with \r \n \t \0 \\ \xHH, {id} for the name, and {a*9} for nine times a
//!     Content-Length: 5\r\n\r\nhello
//!   -> POST /{id} hello                   method, target and body of a request that an upstream gets
//!   !! nginx 405: the reason              a server that answers with another status, and so need not record the request
//! ```
//!
//! `none` instead of statuses means that the message is incomplete: no response follows.
//!
//! A message that is refused reaches no upstream. One that is forwarded reaches it once, as the gateway has read it, and
//! nothing in it is taken for another request. Afterwards the connection is closed, or the next request on it gets its
//! own response.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use testkit::folder::folder_with;
use testkit::tollgate::{Process, RULES};
use testkit::wait::wait_until;

use crate::http1::{HasBody, Response, connect, read_response};
use crate::upstreams::Upstream;

/// The fewest messages. With fewer, something is wrong with the files.
const FEWEST_MESSAGES: usize = 500;
const CLIENTS: usize = 4;
const TIMEOUT: Duration = Duration::from_secs(20);

/// A message of the corpus.
#[derive(Debug)]
struct Message {
    name: String,
    /// The statuses of the responses, none for an incomplete message.
    statuses: Vec<u16>,
    sent: Vec<u8>,
    /// The requests that an upstream gets.
    forwarded: Vec<Seen>,
    /// The servers that refuse it, with the status of the last response.
    refused_by: BTreeMap<String, u16>,
}

/// A request as an upstream reads it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Seen {
    method: String,
    target: String,
    body: String,
}

#[test]
fn every_message_is_refused_or_read_by_upstreams_as_by_the_gateway() {
    let messages = read_all();
    assert!(messages.len() >= FEWEST_MESSAGES, "the corpus has {} messages", messages.len());
    let upstreams = Upstream::start_recorders();
    let findings: Vec<String> = std::thread::scope(|scope| {
        let running: Vec<_> = upstreams.iter().map(|upstream| scope.spawn(|| replay(upstream, &messages))).collect();
        running.into_iter().flat_map(|thread| thread.join().expect("a server was tested")).collect()
    });
    assert!(findings.is_empty(), "{} findings:\n{}", findings.len(), findings.join("\n"));
}

/// The table in `docs/http1.md` names messages that are here, and refused.
#[test]
fn every_message_in_the_documentation_is_refused() {
    let statuses: BTreeMap<_, _> = read_all().into_iter().map(|message| (message.name, message.statuses)).collect();
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/http1.md");
    let text = std::fs::read_to_string(page).expect("the page can be read");
    let rows = text.lines().filter_map(|line| line.strip_prefix('|')?.strip_suffix('|')?.rsplit_once('|'));
    let names: Vec<_> = rows.flat_map(|(_, messages)| messages.split('`').skip(1).step_by(2)).collect();
    assert!(names.len() > 30, "the table has only {} messages", names.len());
    for name in names {
        let statuses = statuses.get(name).unwrap_or_else(|| panic!("{name} is not in the corpus"));
        assert!(statuses.iter().all(|status| *status >= 400), "{name} is not refused");
    }
}

/// Sends all messages through a gateway to a server. Returns what is wrong.
fn replay(upstream: &Upstream, messages: &[Message]) -> Vec<String> {
    let gateway = Process::start(folder_with(&[(RULES, &rules(upstream.address))]), &["serve", "--config", RULES]);
    let address = gateway.address_of("gateway");
    let mut findings: Vec<String> = std::thread::scope(|scope| {
        let part = |client| messages.iter().skip(client).step_by(CLIENTS);
        let send = |message: &Message| exchange(address, upstream.name, message).err();
        let clients: Vec<_> =
            (0..CLIENTS).map(|client| scope.spawn(move || part(client).filter_map(send).collect::<Vec<_>>())).collect();
        clients.into_iter().flat_map(|client| client.join().expect("a client did its part")).collect()
    });
    findings.extend(compare_records(upstream, messages));
    let named = |finding: String| format!("{}: {finding}", upstream.name);
    findings.into_iter().map(named).collect()
}

/// Sends a message and then a plain request. Returns what is wrong with the responses.
fn exchange(gateway: SocketAddr, upstream: &str, message: &Message) -> Result<(), String> {
    let name = &message.name;
    let failed = |what: &str, error: std::io::Error| format!("{name}: {what}: {error}");
    let stream = connect(gateway, TIMEOUT).map_err(|error| failed("cannot connect", error))?;
    let mut stream = BufReader::new(stream);
    // The gateway may refuse the start of a long message, and close.
    _ = stream.get_mut().write_all(&message.sent);
    if message.statuses.is_empty() {
        return expect_no_answer(stream, name);
    }
    let mut statuses = message.statuses.clone();
    if let (Some(status), Some(last)) = (message.refused_by.get(upstream), statuses.last_mut()) {
        *last = *status;
    }
    for (number, expected) in statuses.iter().enumerate() {
        let method = message.forwarded.get(number).map(|seen| &seen.method[..]);
        let is_head = method.map_or_else(|| message.sent.starts_with(b"HEAD "), |method| method == "HEAD");
        let has_body = if is_head { HasBody::No } else { HasBody::ByItsHead };
        let what = format!("response {} is missing", number + 1);
        let response = read_response(&mut stream, has_body).map_err(|error| failed(&what, error))?;
        if response.status != *expected {
            return Err(format!("{name}: {} instead of {expected}: {}", response.status, shown(&response)));
        }
    }
    let next = format!("/after-{name}");
    let request = format!("GET {next} HTTP/1.1\r\nHost: h\r\n\r\n");
    let sent = stream.get_mut().write_all(request.as_bytes());
    match sent.and_then(|()| read_response(&mut stream, HasBody::ByItsHead)) {
        // The connection is closed.
        Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => Ok(()),
        Err(error) => Err(failed("the connection neither ends nor answers the next request", error)),
        Ok(response) if response.status == 200 && parse(&response.body).is_some_and(|seen| seen.target == next) => {
            Ok(())
        }
        Ok(response) => Err(format!("{name}: the next request gets another response: {}", shown(&response))),
    }
}

/// Ends the client's side, and expects the end of the connection without a response of an upstream.
fn expect_no_answer(mut stream: BufReader<TcpStream>, name: &str) -> Result<(), String> {
    let mut rest = Vec::new();
    let ended = stream.get_ref().shutdown(Shutdown::Write).and_then(|()| stream.read_to_end(&mut rest));
    if let Err(error) = ended
        && error.kind() == std::io::ErrorKind::WouldBlock
    {
        return Err(format!("{name}: the connection does not end"));
    }
    if rest.starts_with(b"HTTP/1.1 2") {
        return Err(format!("{name}: it was answered: {}", rest.escape_ascii()));
    }
    Ok(())
}

fn shown(response: &Response) -> String {
    let body: Vec<u8> = response.body.iter().copied().take(200).collect();
    format!("{} {}", response.status, body.escape_ascii())
}

/// Compares the requests that a server has recorded with those that the messages announce.
fn compare_records(upstream: &Upstream, messages: &[Message]) -> Vec<String> {
    let is_forwarded = |message: &&Message| !message.refused_by.contains_key(upstream.name);
    let mut expected: BTreeMap<Seen, usize> = BTreeMap::new();
    for seen in messages.iter().filter(is_forwarded).flat_map(|message| &message.forwarded) {
        *expected.entry(seen.clone()).or_default() += 1;
    }
    // A response can be ahead of its record.
    let mut recorded = BTreeMap::new();
    let is_complete = wait_until(|| {
        recorded = records(&upstream.output());
        expected.iter().all(|(seen, count)| recorded.get(seen).is_some_and(|found| found >= count)).then_some(())
    });
    let mut findings = Vec::new();
    if is_complete.is_none() {
        let missing = expected.iter().filter(|(seen, _)| !recorded.contains_key(*seen));
        findings.extend(missing.map(|(seen, _)| format!("not recorded: {seen:?}")));
    }
    // A request that a server refuses may still be recorded by it.
    let allowed: BTreeSet<_> = messages.iter().flat_map(|message| &message.forwarded).collect();
    for (seen, count) in &recorded {
        let is_next = seen.target.starts_with("/after-") && seen.body.is_empty() && seen.method == "GET" && *count == 1;
        let is_expected = expected.get(seen) == Some(count);
        let is_of_refused = !expected.contains_key(seen) && allowed.contains(seen) && *count == 1;
        if !is_next && !is_expected && !is_of_refused {
            findings.push(format!("recorded {count} times, by none of the messages: {seen:?}"));
        }
    }
    findings
}

/// Returns how often each request was recorded.
fn records(output: &str) -> BTreeMap<Seen, usize> {
    let mut records = BTreeMap::new();
    for seen in output.lines().filter_map(|line| parse(line.as_bytes())) {
        *records.entry(seen).or_default() += 1;
    }
    records
}

fn parse(line: &[u8]) -> Option<Seen> {
    let record: serde_json::Value = serde_json::from_slice(line).ok()?;
    let text = |name: &str| record[name].as_str().unwrap_or_default().to_owned();
    Some(Seen { method: text("method"), target: text("target"), body: text("body") })
}

fn rules(upstream: SocketAddr) -> String {
    format!(
        "gateway:\n  listen: 127.0.0.1:0\n  workers: 1\n  routes:\n    - {{ path: /**, upstream: 'http://{upstream}', \
         timeout: 15s, retries: 0, eject: {{ after: 1000000, for: 1s }} }}\nlimits:\n  - {{ name: all, limit: 1000000, \
         window: 1h }}\n"
    )
}

fn read_all() -> Vec<Message> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/frameworks/messages");
    let files = std::fs::read_dir(folder).expect("the folder can be read");
    let mut paths: Vec<_> = files.map(|file| file.expect("the folder can be read").path()).collect();
    paths.sort();
    let texts = paths.iter().map(|path| std::fs::read_to_string(path).expect("the file is text"));
    let messages: Vec<_> = texts.flat_map(|text| read_file(&text)).collect();
    let names: BTreeSet<_> = messages.iter().map(|message| &message.name).collect();
    assert_eq!(names.len(), messages.len(), "two messages have the same name");
    let unnamed = |message: &Message| message.sent.escape_ascii().to_string().replace(&message.name, "{id}");
    let texts: BTreeSet<_> = messages.iter().map(unnamed).collect();
    assert_eq!(texts.len(), messages.len(), "two messages have the same bytes");
    messages
}

fn read_file(text: &str) -> Vec<Message> {
    let mut messages: Vec<Message> = Vec::new();
    for line in text.lines() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some((name, statuses)) = line.split_once(": ").filter(|_| !line.starts_with(' ')) {
            let statuses = statuses.split(' ').filter(|word| *word != "none");
            messages.push(Message {
                name: name.to_owned(),
                statuses: statuses.map(|status| status.parse().expect("a status is a number")).collect(),
                sent: Vec::new(),
                forwarded: Vec::new(),
                refused_by: BTreeMap::new(),
            });
            continue;
        }
        let message = messages.last_mut().unwrap_or_else(|| panic!("`{line}` belongs to no message"));
        let unescaped = |text: &str| unescape(text, &message.name);
        if let Some(bytes) = line.strip_prefix("    ") {
            let bytes = unescaped(bytes);
            message.sent.extend(bytes);
        } else if let Some(seen) = line.strip_prefix("  -> ") {
            let mut words = seen.splitn(3, ' ').map(|word| unescaped(word).into_iter().map(char::from).collect());
            let mut word = || words.next().unwrap_or_default();
            let seen = Seen { method: word(), target: word(), body: word() };
            message.forwarded.push(seen);
        } else if let Some((server, status)) = line.strip_prefix("  !! ").and_then(|rest| rest.split_once(' ')) {
            let status = status.split(':').next().and_then(|status| status.parse().ok());
            message.refused_by.insert(server.to_owned(), status.expect("a status is a number"));
        } else {
            panic!("`{line}` is no part of a message");
        }
    }
    messages
}

/// Returns the bytes of a text with escapes.
fn unescape(text: &str, name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let (byte, length) = match (first, rest.as_bytes().get(1)) {
            ('{', _) => {
                let (inner, after) = rest[1..].split_once('}').expect("a brace is closed");
                match inner.split_once('*') {
                    Some((byte, count)) => {
                        let count = count.parse().expect("a count is a number");
                        bytes.extend(byte.as_bytes().repeat(count));
                    }
                    None => bytes.extend(name.bytes()),
                }
                rest = after;
                continue;
            }
            ('\\', Some(b'r')) => (b'\r', 2),
            ('\\', Some(b'n')) => (b'\n', 2),
            ('\\', Some(b't')) => (b'\t', 2),
            ('\\', Some(b'0')) => (0, 2),
            ('\\', Some(b'\\')) => (b'\\', 2),
            ('\\', Some(b'x')) => (u8::from_str_radix(&rest[2..4], 16).expect("two hexadecimal digits"), 4),
            (other, _) => (u8::try_from(other).expect("an ASCII character"), 1),
        };
        bytes.push(byte);
        rest = &rest[length..];
    }
    bytes
}
