//! Access logs of AWS Application Load Balancers: fields between spaces, some of them quoted.

use memchr::memchr;

use super::fields::{address, present};
use super::request_line::{self, closing_quote};
use super::time::read_rfc3339;
use super::{Format, ReadLine, Record};

/// The first field of a line.
const TYPES: [&[u8]; 6] = [b"http ", b"https ", b"h2 ", b"grpcs ", b"ws ", b"wss "];

/// Returns whether a line starts like one of a load balancer.
pub(super) fn is_likely(line: &[u8]) -> bool {
    TYPES.iter().any(|kind| line.starts_with(kind))
}

pub(super) fn read(line: &[u8], record: &mut Record) -> ReadLine {
    find(line, record).unwrap_or(ReadLine::Unknown)
}

/// `type time elb client:port target:port` and three durations, then the status, two more numbers of which the first is
/// the target's status, the sizes, the request and the user agent.
fn find(line: &[u8], record: &mut Record) -> Option<ReadLine> {
    let (_kind, rest) = field(line)?;
    let (time, rest) = field(rest)?;
    record.set_micros(read_rfc3339(time)?);
    let (_balancer, rest) = field(rest)?;
    let (client, mut rest) = field(rest)?;
    record.set_client(address(client));
    for _skipped in ["target:port", "request time", "target time", "response time"] {
        rest = field(rest)?.1;
    }
    let (status, mut rest) = field(rest)?;
    record.set_status(std::str::from_utf8(status).ok().and_then(|status| status.parse().ok()));
    for _skipped in ["target status", "received bytes", "sent bytes"] {
        rest = field(rest)?.1;
    }
    let (request, rest) = field(rest)?;
    // Where a request was malformed, the line has "- http://host:80- ".
    let is_request = request_line::read(request, record);
    if let Some(agent) = field(rest).and_then(|(agent, _)| present(agent)) {
        record.add_header("user-agent", agent);
    }
    Some(if is_request { ReadLine::Request(Format::Alb) } else { ReadLine::NoRequest(Format::Alb) })
}

/// Splits off the first field, without its quotes.
fn field(text: &[u8]) -> Option<(&[u8], &[u8])> {
    match text {
        [] => None,
        [b'"', text @ ..] => {
            let end = closing_quote(text)?;
            Some((&text[..end], text[end + 1..].trim_ascii_start()))
        }
        _ => {
            let end = memchr(b' ', text).unwrap_or(text.len());
            Some((&text[..end], text[end..].trim_ascii_start()))
        }
    }
}
