//! Replies of the Redis protocol, in version 2 or 3.

/// The protocol version of a connection: 2 until `HELLO 3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    Resp2,
    Resp3,
}

/// Writes the replies to one connection.
#[derive(Debug)]
pub(super) struct Replies {
    pub(super) bytes: Vec<u8>,
    pub(super) version: Version,
    /// Errors since they were last counted.
    pub(super) errors: u32,
    /// Those among them that were replied to clients without a valid token.
    pub(super) unauthenticated: u32,
}

impl Replies {
    pub(super) fn new() -> Self {
        Self::with_version(Version::Resp2)
    }

    pub(super) fn with_version(version: Version) -> Self {
        Self { bytes: Vec::new(), version, errors: 0, unauthenticated: 0 }
    }

    /// Writes a status such as `OK`.
    pub(super) fn status(&mut self, text: &str) {
        self.line(b'+', text.as_bytes());
    }

    /// Writes an error. `text` starts with its code, such as `ERR`.
    pub(super) fn error(&mut self, text: &str) {
        self.errors += 1;
        // A line end in the text would end the reply.
        let clean: Vec<u8> = text.bytes().map(|byte| if byte.is_ascii_control() { b' ' } else { byte }).collect();
        self.line(b'-', &clean);
    }

    /// Writes an error for a client without a valid token.
    pub(super) fn refusal(&mut self, text: &str) {
        self.unauthenticated += 1;
        self.error(text);
    }

    pub(super) fn integer(&mut self, number: i64) {
        self.number(b':', number);
    }

    pub(super) fn bulk(&mut self, bytes: &[u8]) {
        self.number(b'$', bytes.len() as i64);
        self.bytes.extend_from_slice(bytes);
        self.bytes.extend_from_slice(b"\r\n");
    }

    /// Writes the header of an array. Its elements follow.
    pub(super) fn array(&mut self, elements: usize) {
        self.number(b'*', elements as i64);
    }

    /// Writes the header of a map, or in version 2 of an array of keys and values. The pairs follow.
    pub(super) fn map(&mut self, pairs: usize) {
        match self.version {
            Version::Resp2 => self.array(2 * pairs),
            Version::Resp3 => self.number(b'%', pairs as i64),
        }
    }

    pub(super) fn null(&mut self) {
        self.bytes.extend_from_slice(match self.version {
            Version::Resp2 => b"$-1\r\n",
            Version::Resp3 => b"_\r\n",
        });
    }

    fn number(&mut self, kind: u8, number: i64) {
        self.line(kind, itoa::Buffer::new().format(number).as_bytes());
    }

    fn line(&mut self, kind: u8, text: &[u8]) {
        self.bytes.push(kind);
        self.bytes.extend_from_slice(text);
        self.bytes.extend_from_slice(b"\r\n");
    }
}
