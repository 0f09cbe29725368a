//! One request of a log.

use std::borrow::Cow;
use std::net::IpAddr;
use std::ops::Range;

use smallvec::SmallVec;
use tollgate::Timestamp;
use tollgate_http::internal::HeaderLine;
use tollgate_rules::Facts;

/// The most headers of one record. Others are ignored: a rule file reads a handful.
const MAX_HEADERS: usize = 64;

/// The position of a value in the text of a record.
type Span = Range<usize>;

/// One request of a log. It is filled again for every line, so that reading a line allocates nothing.
#[derive(Clone, Debug, Default)]
pub struct Record {
    micros: u64,
    client: Option<IpAddr>,
    status: Option<u16>,
    text: String,
    method: Span,
    target: Span,
    host: Option<Span>,
    user: Option<Span>,
    /// The names of headers, in `text`, and their values, in `values`.
    headers: Vec<(Span, Span)>,
    /// Values of headers, which may be other than UTF-8.
    values: Vec<u8>,
}

impl Record {
    pub(super) fn clear(&mut self) {
        self.client = None;
        self.status = None;
        self.text.clear();
        self.method = 0..0;
        self.target = 0..0;
        self.host = None;
        self.user = None;
        self.headers.clear();
        self.values.clear();
    }

    /// Returns the time of the request.
    pub fn time(&self) -> Timestamp {
        Timestamp::from_micros(self.micros)
    }

    pub(super) fn micros(&self) -> u64 {
        self.micros
    }

    /// Returns the address of the client, if the log has one.
    pub fn client(&self) -> Option<IpAddr> {
        self.client
    }

    /// Returns the status of the response, if the log has one.
    pub fn status(&self) -> Option<u16> {
        self.status
    }

    /// Returns the method.
    pub fn method(&self) -> &str {
        &self.text[self.method.clone()]
    }

    /// Returns the path with its query.
    pub fn target(&self) -> &str {
        &self.text[self.target.clone()]
    }

    /// Returns the host, if it is logged.
    pub fn host(&self) -> Option<&str> {
        self.host.clone().map(|span| &self.text[span])
    }

    /// Returns the authenticated user, if the log has one. Rules read it through `--map`.
    #[cfg(test)]
    pub fn user(&self) -> Option<&str> {
        self.user.clone().map(|span| &self.text[span])
    }

    /// Returns the names and values of the headers that the log has.
    pub fn headers(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.headers.iter().map(|(name, value)| (&self.text[name.clone()], &self.values[value.clone()]))
    }

    /// Calls `read` with the facts that rules read. Limits on requests in flight do not apply: a log does not show which
    /// requests overlap.
    pub fn with_facts<T>(&self, read: impl FnOnce(&Facts<'_>) -> T) -> T {
        let lines: SmallVec<[HeaderLine<'_>; 8]> =
            self.headers().map(|(name, value)| HeaderLine { name, value }).collect();
        let mut facts = Facts::new(self.method(), self.target()).headers(&lines[..]).served_elsewhere();
        if let Some(host) = self.host() {
            facts = facts.host(host);
        }
        if let Some(client) = self.client {
            facts = facts.peer(client);
        }
        read(&facts)
    }
}

/// Filling a record.
impl Record {
    pub(super) fn set_micros(&mut self, micros: u64) {
        self.micros = micros;
    }

    pub(super) fn set_client(&mut self, client: Option<IpAddr>) {
        self.client = client;
    }

    pub(super) fn set_status(&mut self, status: Option<u16>) {
        self.status = status;
    }

    pub(super) fn set_method(&mut self, method: &[u8]) {
        self.method = self.push(method);
    }

    pub(super) fn set_target(&mut self, target: &[u8]) {
        self.target = self.push(target);
    }

    pub(super) fn set_host(&mut self, host: &[u8]) {
        self.host = Some(self.push(host));
    }

    pub(super) fn set_user(&mut self, user: &[u8]) {
        self.user = Some(self.push(user));
    }

    pub(super) fn has_request(&self) -> bool {
        !self.method.is_empty() && !self.target.is_empty()
    }

    pub(super) fn has_host(&self) -> bool {
        self.host.is_some()
    }

    /// Adds a header. Its name is in lower case or in the case of the log.
    pub(super) fn add_header(&mut self, name: &str, value: &[u8]) {
        if self.headers.len() < MAX_HEADERS {
            let start = self.text.len();
            self.text.push_str(name);
            self.push_header(start, value);
        }
    }

    /// Adds the header of a field such as `x_user_id`, which stands for `x-user-id`.
    pub(super) fn add_header_of_field(&mut self, field: &str, value: &[u8]) {
        if self.headers.len() < MAX_HEADERS {
            let start = self.text.len();
            self.text.extend(field.chars().map(|char| if char == '_' { '-' } else { char }));
            self.push_header(start, value);
        }
    }

    /// Adds the header whose name begins at `start` and ends the text.
    fn push_header(&mut self, start: usize, value: &[u8]) {
        let (name, start) = (start..self.text.len(), self.values.len());
        self.values.extend_from_slice(value);
        self.headers.push((name, start..self.values.len()));
    }

    fn push(&mut self, bytes: &[u8]) -> Span {
        let start = self.text.len();
        match std::str::from_utf8(bytes) {
            Ok(text) => self.text.push_str(text),
            Err(_) => {
                let text: Cow<'_, str> = String::from_utf8_lossy(bytes);
                self.text.push_str(&text);
            }
        }
        start..self.text.len()
    }
}
