//! JSON lines, as nginx, Envoy, Caddy, Traefik and Tollgate write them.
//!
//! The operator of nginx and Envoy chooses the names of the fields, so each value is looked for under the usual names.
//! Where a line has several of them, the most precise one is used.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::fields::{address, present};
use super::request_line;
use super::time::{read_epoch, read_rfc3339};
use super::{Format, LineReader, Mappings, ReadLine, Record};

/// Objects inside a line are read up to this depth: Caddy has headers in `request`.
const MAX_DEPTH: usize = 4;

/// The names of a value; those that come first are preferred.
const TIMES: [&str; 13] = [
    "StartUTC",
    "StartLocal",
    "start_time",
    "msec",
    "ts",
    "@timestamp",
    "timestamp",
    "time_iso8601",
    "time",
    "datetime",
    "date",
    "time_local",
    "StartTime",
];
const CLIENTS: [&str; 12] = [
    "request.client_ip",
    "request.remote_ip",
    "downstream_remote_address_without_port",
    "downstream_remote_address",
    "ClientHost",
    "ClientAddr",
    "client_ip",
    "remote_addr",
    "client",
    "remote_ip",
    "ip",
    "clientip",
];
const METHODS: [&str; 5] = ["request.method", "request_method", "method", "RequestMethod", "verb"];
const TARGETS: [&str; 9] = [
    "request.uri",
    "x_envoy_original_path",
    "request_uri",
    "target",
    "RequestPath",
    "path",
    "url",
    "uri",
    "request_path",
];
const HOSTS: [&str; 8] =
    ["request.host", "http_host", "authority", ":authority", "RequestHost", "host", "vhost", "server_name"];
const STATUSES: [&str; 5] = ["status", "response_code", "DownstreamStatus", "status_code", "response_status"];
const USERS: [&str; 5] = ["user_id", "remote_user", "ClientUsername", "user", "username"];

/// The values of a line, with the rank of the name under which each was found.
#[derive(Default)]
struct Values<'l> {
    time: Ranked<'l>,
    client: Ranked<'l>,
    method: Ranked<'l>,
    target: Ranked<'l>,
    host: Ranked<'l>,
    status: Ranked<'l>,
    user: Ranked<'l>,
    /// A whole request line, such as nginx's `$request`.
    request: Ranked<'l>,
}

type Ranked<'l> = Option<(usize, Cow<'l, str>)>;

impl LineReader {
    pub(super) fn read_json(&mut self, line: &[u8], record: &mut Record) -> ReadLine {
        let Ok(text) = std::str::from_utf8(line) else { return ReadLine::Unknown };
        let mut values = Values::default();
        if read_object(text, "", &self.mappings, &mut values, record).is_err() {
            return ReadLine::Unknown;
        }
        let time = values.time.as_ref().and_then(|(_, text)| {
            let text = text.as_bytes();
            read_rfc3339(text).or_else(|| self.times.read(text)).or_else(|| read_epoch(text))
        });
        let Some(micros) = time else { return ReadLine::Unknown };
        record.set_micros(micros);
        record.set_client(values.client.and_then(|(_, text)| address(text.as_bytes())));
        record.set_status(values.status.and_then(|(_, text)| text.parse().ok()));
        if let Some((_, host)) = values.host {
            record.set_host(host.as_bytes());
        }
        if let Some((_, user)) = values.user {
            record.set_user(user.as_bytes());
        }
        let is_request = match (values.method, values.target, values.request) {
            (Some((_, method)), Some((_, target)), _) => {
                request_line::set(method.as_bytes(), target.as_bytes(), record)
            }
            (_, _, Some((_, line))) => request_line::read(line.as_bytes(), record),
            _ => false,
        };
        if is_request { ReadLine::Request(Format::Json) } else { ReadLine::NoRequest(Format::Json) }
    }
}

/// Reads the fields of an object. `path` is its name, with a dot at its end unless it is the line itself.
fn read_object<'l>(
    text: &'l str,
    path: &str,
    mappings: &Mappings,
    values: &mut Values<'l>,
    record: &mut Record,
) -> Result<(), serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    deserializer.deserialize_map(Fields(|name: &str, value: &'l RawValue| {
        read_field(name, value.get(), path, mappings, values, record)
    }))?;
    deserializer.end()
}

fn read_field<'l>(
    name: &str,
    value: &'l str,
    path: &str,
    mappings: &Mappings,
    values: &mut Values<'l>,
    record: &mut Record,
) -> Result<(), serde_json::Error> {
    let joined;
    let name = match path {
        "" => name,
        _ => {
            joined = format!("{path}{name}");
            &joined
        }
    };
    if value.starts_with('{') {
        let depth = name.split('.').count();
        let is_headers = matches!(name, "request.headers" | "headers" | "request_headers");
        if depth < MAX_DEPTH && (is_headers || name == "request" || mappings.reach_into(name)) {
            return read_object(value, &format!("{name}."), mappings, values, record);
        }
        return Ok(());
    }
    if let Some(header) = header_of_object(name) {
        return read_header(header, value, record);
    }
    let Some(value) = scalar(value)? else { return Ok(()) };
    for header in mappings.headers_of(name) {
        record.add_header(header, value.as_bytes());
    }
    values.take(name, value, record);
    Ok(())
}

/// Returns the name of a header in an object of headers.
fn header_of_object(name: &str) -> Option<&str> {
    ["request.headers.", "headers.", "request_headers."].iter().find_map(|object| name.strip_prefix(object))
}

/// Reads a header whose value is a text, or a list of texts.
fn read_header(name: &str, value: &str, record: &mut Record) -> Result<(), serde_json::Error> {
    if value.starts_with('[') {
        let list: Vec<Cow<'_, str>> = serde_json::from_str(value).unwrap_or_default();
        list.iter().for_each(|value| record.add_header(name, value.as_bytes()));
    } else if let Some(value) = scalar(value)? {
        record.add_header(name, value.as_bytes());
    }
    Ok(())
}

/// Returns a text or a number, or `None` if there is no value.
fn scalar(value: &str) -> Result<Option<Cow<'_, str>>, serde_json::Error> {
    let inside = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
    let value = match inside {
        Some(inside) if !inside.contains('\\') => Cow::Borrowed(inside),
        Some(_) => Cow::Owned(serde_json::from_str(value)?),
        None if value.starts_with(['{', '[', 'n']) => return Ok(None),
        None => Cow::Borrowed(value),
    };
    Ok(present(value.as_bytes()).is_some().then_some(value))
}

impl<'l> Values<'l> {
    /// Keeps a value if it is needed.
    fn take(&mut self, name: &str, value: Cow<'l, str>, record: &mut Record) {
        let slots = [
            (&TIMES[..], &mut self.time),
            (&CLIENTS[..], &mut self.client),
            (&METHODS[..], &mut self.method),
            (&TARGETS[..], &mut self.target),
            (&HOSTS[..], &mut self.host),
            (&STATUSES[..], &mut self.status),
            (&USERS[..], &mut self.user),
            (&["request"][..], &mut self.request),
        ];
        for (names, slot) in slots {
            if let Some(rank) = names.iter().position(|known| *known == name) {
                if slot.as_ref().is_none_or(|(before, _)| rank < *before) {
                    *slot = Some((rank, value));
                }
                return;
            }
        }
        match name {
            "user_agent" | "http_user_agent" | "agent" => record.add_header("user-agent", value.as_bytes()),
            "referer" | "http_referer" | "referrer" => record.add_header("referer", value.as_bytes()),
            _ => {
                // nginx's $http_x_user_id, Traefik's request_X-User-Id, and names of headers themselves.
                let of_traefik = || {
                    name.strip_prefix("request_")
                        .filter(|name| name.starts_with(|char: char| char.is_ascii_uppercase()))
                };
                let header = name.strip_prefix("http_").or_else(of_traefik);
                let header = header.or_else(|| (name.starts_with("x_") || name.starts_with("x-")).then_some(name));
                if let Some(header) = header {
                    record.add_header_of_field(header, value.as_bytes());
                }
            }
        }
    }
}

/// Calls a function for each field of an object.
struct Fields<F>(F);

impl<'l, F: FnMut(&str, &'l RawValue) -> Result<(), serde_json::Error>> Visitor<'l> for Fields<F> {
    type Value = ();

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object")
    }

    fn visit_map<A: MapAccess<'l>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<Name<'l>>()? {
            let value = map.next_value::<&RawValue>()?;
            (self.0)(&name.0, value).map_err(A::Error::custom)?;
        }
        Ok(())
    }
}

/// The name of a field, borrowed unless it has escapes.
#[derive(serde::Deserialize)]
#[serde(transparent)]
struct Name<'l>(#[serde(borrow)] Cow<'l, str>);
