//! llhttp, the HTTP/1 parser of Node, to compare the gateway with. `tools/install-llhttp` downloads its C sources,
//! because no crate has them. Without them, this crate builds and reads nothing.
//!
//! Calling C needs `unsafe`. Only the fuzzer uses this crate.

/// The kind of the messages of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Requests,
    Responses,
    /// Responses to HEAD, which have no body.
    ResponsesToHead,
}

/// A message, as far as it was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    pub method: Vec<u8>,
    pub target: Vec<u8>,
    pub version: (u8, u8),
    pub status: u16,
    /// Names and values of fields, and of trailers.
    pub fields: Vec<(Vec<u8>, Vec<u8>)>,
    pub has_head: bool,
    pub body: Vec<u8>,
    pub is_complete: bool,
    /// Whether another message can follow.
    pub keeps_alive: bool,
}

/// The messages of a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Connection {
    pub messages: Vec<Message>,
    /// The name of the error that ended it: `HPE_OK` if there was none, `HPE_PAUSED_UPGRADE` if another protocol follows.
    pub end: String,
}

#[cfg(has_llhttp)]
mod c {
    unsafe extern "C" {
        pub(super) fn read_messages(
            input: *const u8,
            length: usize,
            is_response: i32,
            is_head: i32,
            bytes: *mut u8,
            room: usize,
        ) -> usize;
    }
}

/// Returns nothing, because llhttp is not installed.
#[cfg(not(has_llhttp))]
pub fn read(_: &[u8], _: Kind) -> Option<Connection> {
    None
}

/// Reads the messages in the bytes that arrive on a connection before it is closed.
#[cfg(has_llhttp)]
pub fn read(input: &[u8], kind: Kind) -> Option<Connection> {
    // No byte begins more than two records, of five bytes and data that is part of the input.
    let mut records = vec![0; 16 * input.len() + 256];
    let is_response = i32::from(kind != Kind::Requests);
    let is_head = i32::from(kind == Kind::ResponsesToHead);
    // SAFETY: both buffers are valid for their lengths while the function runs, and it keeps neither.
    let length = unsafe {
        c::read_messages(input.as_ptr(), input.len(), is_response, is_head, records.as_mut_ptr(), records.len())
    };
    let mut connection = Connection::default();
    let mut rest = &records[..length];
    let mut field = (Vec::new(), Vec::new());
    while let [tag, a, b, c, d, after @ ..] = rest {
        let length = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
        let (data, after) = after.split_at(length);
        rest = after;
        if *tag == b'x' {
            connection.end = String::from_utf8_lossy(data).into_owned();
            continue;
        }
        if *tag == b'<' {
            connection.messages.push(Message::default());
        }
        let Some(message) = connection.messages.last_mut() else { continue };
        match tag {
            b'm' => message.method.extend(data),
            b't' => message.target.extend(data),
            b'n' => field.0.extend(data),
            b'v' => field.1.extend(data),
            b'f' => message.fields.push(std::mem::take(&mut field)),
            b'h' => {
                message.has_head = true;
                message.version = (data[0], data[1]);
                message.status = u16::from_le_bytes([data[2], data[3]]);
            }
            b'b' => message.body.extend(data),
            b'>' => {
                message.is_complete = true;
                message.keeps_alive = data[0] != 0;
            }
            _ => {}
        }
    }
    assert!(!connection.end.is_empty(), "the records did not fit");
    Some(connection)
}
