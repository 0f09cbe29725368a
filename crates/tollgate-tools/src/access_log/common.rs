//! The Common and Combined Log Formats:
//! `192.0.2.7 - ann [10/Oct/2000:13:55:36 -0700] "GET /a HTTP/1.1" 200 2326 "referer" "user agent"`.
//!
//! A host before the address (`vhost_combined`) and more fields at the end are understood, as Traefik and Tollgate write
//! them.

use memchr::memchr;

use super::fields::{address, present};
use super::request_line::{self, closing_quote, unescaped};
use super::time::COMMON_BYTES;
use super::{Format, LineReader, ReadLine, Record};

impl LineReader {
    /// Reads a line in the Common or Combined Log Format.
    pub(super) fn read_common(&mut self, line: &[u8], record: &mut Record) -> ReadLine {
        self.find_common(line, record).unwrap_or(ReadLine::Unknown)
    }

    fn find_common(&mut self, line: &[u8], record: &mut Record) -> Option<ReadLine> {
        // A user name may have brackets.
        let mut start = 0;
        let (bracket, micros) = loop {
            let bracket = start + memchr(b'[', line.get(start..)?)?;
            if let Some(micros) = self.times.read(&line[bracket + 1..]) {
                break (bracket, micros);
            }
            start = bracket + 1;
        };
        record.set_micros(micros);
        let rest = line[bracket + 1 + COMMON_BYTES..].strip_prefix(b"] \"")?;
        let end = closing_quote(rest)?;
        let is_request = unescaped(&rest[..end], |line| request_line::read(line, record));
        let format = self.read_tail(&rest[end + 1..], record);
        self.read_client(line[..bracket].trim_ascii(), record)?;
        Some(if is_request { ReadLine::Request(format) } else { ReadLine::NoRequest(format) })
    }

    /// Reads the fields before the time: the client, the identity and the user, and in some logs the host before them.
    fn read_client(&self, text: &[u8], record: &mut Record) -> Option<()> {
        let (first, rest) = word(text)?;
        let rest = match address(first) {
            Some(client) => {
                record.set_client(Some(client));
                rest
            }
            None => {
                let (second, rest_after) = word(rest)?;
                match address(second) {
                    Some(client) => {
                        record.set_client(Some(client));
                        if let Some(host) = present(first).filter(|_| !record.has_host()) {
                            record.set_host(host);
                        }
                        rest_after
                    }
                    // The server resolved the name of the client.
                    None => rest,
                }
            }
        };
        let user = word(rest).map_or(&[][..], |(_identity, user)| user);
        if let Some(user) = present(user) {
            unescaped(user.strip_prefix(b"\"").and_then(|user| user.strip_suffix(b"\"")).unwrap_or(user), |user| {
                record.set_user(user);
                for header in self.mappings.headers_of("user") {
                    record.add_header(header, user);
                }
            });
        }
        Some(())
    }

    /// Reads the fields after the request: status, size, and in the Combined Log Format the referrer and the user agent.
    fn read_tail(&self, tail: &[u8], record: &mut Record) -> Format {
        let tail = tail.trim_ascii_start();
        let status = tail.first_chunk::<3>().and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
        record.set_status(status);
        let Some(quote) = memchr(b'"', tail) else { return Format::Common };
        let Some(rest) = quoted(&tail[quote..], "referer", record) else { return Format::Common };
        quoted(rest.trim_ascii_start(), "user-agent", record);
        Format::Combined
    }
}

/// Reads a quoted value as a header, and returns the text after it.
fn quoted<'t>(text: &'t [u8], name: &str, record: &mut Record) -> Option<&'t [u8]> {
    let text = text.strip_prefix(b"\"")?;
    let end = closing_quote(text)?;
    if let Some(value) = present(&text[..end]) {
        unescaped(value, |value| record.add_header(name, value));
    }
    Some(&text[end + 1..])
}

/// Splits off the first word.
fn word(text: &[u8]) -> Option<(&[u8], &[u8])> {
    match memchr(b' ', text) {
        _ if text.is_empty() => None,
        Some(end) => Some((&text[..end], text[end + 1..].trim_ascii_start())),
        None => Some((text, &[])),
    }
}
