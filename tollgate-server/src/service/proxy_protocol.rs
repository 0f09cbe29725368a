//! The PROXY protocol, versions 1 and 2: a header in which a load balancer sends the client's address.
//!
//! Headers are accepted from the addresses that the rule file names, and required there: a connection without one is
//! closed, since guessing would let a client impersonate the load balancer. So is a connection from any other address. A
//! header that names no client (`UNKNOWN`, `LOCAL`) leaves the client without an address: that of the load balancer may
//! be exempt, or trusted to name others.
//!
//! Exactly the header is read, so the stream continues with HTTP. The length of version 1 is not known in advance, so
//! after the shortest possible header it is read byte by byte, once per connection. Extensions of version 2 (TLS,
//! authority, checksums) are ignored.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ppp::{v1, v2};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::{Instant, timeout};
use tollgate_config::internal::ProxyProtocolRule;
use tollgate_rules::Networks;

use crate::notice;

/// The longest wait for the header. Load balancers send it in the first packet of a connection.
const DEADLINE: Duration = Duration::from_secs(5);

/// The length of `PROXY UNKNOWN\r\n`, the shortest header of version 1. Version 2 has at least one byte more.
const SHORTEST_BYTES: usize = 15;

/// The longest header of version 1, by the specification.
const MAX_V1_BYTES: usize = 107;

/// The fixed part of version 2. Its last two bytes are the length of the rest.
const V2_HEAD_BYTES: usize = 16;

/// Enough for addresses, which take up to 216 bytes, and for extensions such as certificate names.
const MAX_V2_REST_BYTES: usize = 4096;

/// At most one connection from a wrong address is logged in this time.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// Setting of a listener.
#[derive(Clone, Debug, Default)]
pub(crate) enum ProxyProtocol {
    #[default]
    Off,
    /// Connections come from these networks, and begin with a header.
    From(Arc<Networks>),
}

/// The client at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caller {
    /// The client has this address.
    At(SocketAddr),
    /// A load balancer at this address does not name its client.
    Unknown { through: SocketAddr },
}

impl Caller {
    /// Returns the address of the client, or that of the load balancer, for logs and counts of connections.
    pub(crate) fn nearest(self) -> SocketAddr {
        let (Self::At(address) | Self::Unknown { through: address }) = self;
        address
    }
}

impl ProxyProtocol {
    pub(crate) fn of(rule: &ProxyProtocolRule) -> Self {
        match rule {
            ProxyProtocolRule::Off => Self::Off,
            // Refused when the file is loaded; without senders, every connection is closed.
            ProxyProtocolRule::Unrestricted => Self::From(Arc::default()),
            // Their number is bounded when the file is loaded.
            ProxyProtocolRule::From(networks) => {
                Self::From(Arc::new(Networks::parse(networks.iter().map(ToString::to_string)).unwrap_or_default()))
            }
        }
    }

    /// Returns whether connections begin with their first request.
    pub(crate) fn is_off(&self) -> bool {
        matches!(self, Self::Off)
    }

    /// Reads the header of a connection from `peer`, if one is required, and nothing beyond it.
    pub(crate) async fn caller<Io>(&self, io: &mut Io, peer: SocketAddr) -> Result<Caller, HeaderError>
    where
        Io: AsyncRead + Unpin,
    {
        let Self::From(networks) = self else { return Ok(Caller::At(peer)) };
        if !networks.contains(peer.ip()) {
            warn_of_stranger(peer);
            return Err(HeaderError::Stranger);
        }
        Ok(read(io).await?.map_or(Caller::Unknown { through: peer }, Caller::At))
    }
}

/// Logs a connection from an address that may send no headers, but few of them.
fn warn_of_stranger(peer: SocketAddr) {
    static LAST: Mutex<Option<Instant>> = Mutex::new(None);
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    if last.is_none_or(|last| last.elapsed() >= LOG_EVERY) {
        *last = Some(Instant::now());
        let address = peer.ip().to_canonical();
        notice::warn(format_args!("connection from {address} closed: {}", HeaderError::Stranger));
    }
}

/// The reason why a connection is closed before its first request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HeaderError {
    /// The connection begins with something else, or with an invalid header.
    Malformed,
    /// A valid header that is longer than [`MAX_V2_REST_BYTES`].
    TooLong,
    /// The connection comes from an address that may send no headers.
    Stranger,
    /// The client went away, or did not send the whole header within [`DEADLINE`].
    Incomplete,
}

impl fmt::Display for HeaderError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Malformed => {
                "the connection does not begin with a PROXY header: enable the PROXY protocol in the load balancer"
            }
            Self::Stranger => {
                "its address is not in proxy_protocol.from: add it there if it is a load balancer, or let clients connect to the load balancer only"
            }
            Self::TooLong => "the PROXY header is too long: make the load balancer send fewer extensions",
            Self::Incomplete => {
                "the PROXY header did not arrive in time: look for a client that bypasses the load balancer"
            }
        })
    }
}

impl std::error::Error for HeaderError {}

/// Reads the header and nothing beyond it. Returns the client's address, or `None` if the load balancer itself is the
/// client or does not know it.
async fn read<Io: AsyncRead + Unpin>(io: &mut Io) -> Result<Option<SocketAddr>, HeaderError> {
    timeout(DEADLINE, read_header(io)).await.unwrap_or(Err(HeaderError::Incomplete))
}

async fn read_header<Io: AsyncRead + Unpin>(io: &mut Io) -> Result<Option<SocketAddr>, HeaderError> {
    let mut header = Vec::with_capacity(MAX_V1_BYTES);
    read_more(io, &mut header, SHORTEST_BYTES).await?;
    if header.starts_with(v2::PROTOCOL_PREFIX) {
        read_v2(io, header).await
    } else if header.starts_with(v1::PROTOCOL_PREFIX.as_bytes()) {
        read_v1(io, header).await
    } else {
        Err(HeaderError::Malformed)
    }
}

async fn read_v1<Io: AsyncRead + Unpin>(io: &mut Io, mut header: Vec<u8>) -> Result<Option<SocketAddr>, HeaderError> {
    while !header.ends_with(b"\n") {
        if header.len() == MAX_V1_BYTES {
            return Err(HeaderError::Malformed);
        }
        read_more(io, &mut header, 1).await?;
    }
    let parsed = v1::Header::try_from(&*header).map_err(|_| HeaderError::Malformed)?;
    // An earlier line end would mean that bytes of the request were read.
    if parsed.header.len() != header.len() {
        return Err(HeaderError::Malformed);
    }
    Ok(match parsed.addresses {
        v1::Addresses::Tcp4(from) => Some((from.source_address, from.source_port).into()),
        v1::Addresses::Tcp6(from) => Some((from.source_address, from.source_port).into()),
        v1::Addresses::Unknown => None,
    })
}

async fn read_v2<Io: AsyncRead + Unpin>(io: &mut Io, mut header: Vec<u8>) -> Result<Option<SocketAddr>, HeaderError> {
    read_more(io, &mut header, V2_HEAD_BYTES - SHORTEST_BYTES).await?;
    let rest = match *header {
        [.., high, low] => usize::from(u16::from_be_bytes([high, low])),
        _ => return Err(HeaderError::Malformed),
    };
    if rest > MAX_V2_REST_BYTES {
        return Err(HeaderError::TooLong);
    }
    read_more(io, &mut header, rest).await?;
    let parsed = v2::Header::try_from(&*header).map_err(|_| HeaderError::Malformed)?;
    Ok(match (parsed.command, parsed.addresses) {
        (v2::Command::Proxy, v2::Addresses::IPv4(from)) => Some((from.source_address, from.source_port).into()),
        (v2::Command::Proxy, v2::Addresses::IPv6(from)) => Some((from.source_address, from.source_port).into()),
        // A health check of the load balancer, or a client without an address.
        (v2::Command::Local, _) | (_, v2::Addresses::Unspecified | v2::Addresses::Unix(_)) => None,
    })
}

async fn read_more<Io: AsyncRead + Unpin>(io: &mut Io, header: &mut Vec<u8>, count: usize) -> Result<(), HeaderError> {
    let start = header.len();
    header.resize(start + count, 0);
    io.read_exact(&mut header[start..]).await.map(drop).map_err(|_| HeaderError::Incomplete)
}

/// These tests run on tokio's paused clock, which advances whenever all tasks wait.
#[cfg(test)]
mod tests {
    use tokio::io::{AsyncWriteExt, duplex};
    use tokio::time::sleep;

    use super::*;

    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\n\r\n";

    fn v2_header(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
        let length = u16::try_from(rest.len()).unwrap().to_be_bytes();
        [v2::PROTOCOL_PREFIX, &[command, family], &length, rest].concat()
    }

    fn v4_addresses() -> Vec<u8> {
        [&[203, 0, 113, 9][..], &[10, 0, 0, 1], &4321_u16.to_be_bytes(), &443_u16.to_be_bytes()].concat()
    }

    /// Returns the result of reading the header, and the bytes after it.
    async fn outcome(header: &[u8]) -> (Result<Option<SocketAddr>, HeaderError>, Vec<u8>) {
        let (mut client, mut server) = duplex(64 * 1024);
        client.write_all(&[header, REQUEST].concat()).await.unwrap();
        drop(client);
        let answer = read(&mut server).await;
        let mut rest = Vec::new();
        server.read_to_end(&mut rest).await.unwrap();
        (answer, rest)
    }

    async fn caller(header: &[u8]) -> Option<String> {
        let (answer, rest) = outcome(header).await;
        assert_eq!(rest, REQUEST, "{header:?}");
        answer.unwrap().map(|address| address.to_string())
    }

    #[tokio::test]
    async fn version_1_names_the_caller_and_leaves_the_request() {
        for (header, expected) in [
            ("PROXY TCP4 203.0.113.9 10.0.0.1 4321 443\r\n", Some("203.0.113.9:4321")),
            ("PROXY TCP4 1.1.1.1 1.1.1.1 0 0\r\n", Some("1.1.1.1:0")),
            ("PROXY TCP6 2001:db8::9 ::1 4321 443\r\n", Some("[2001:db8::9]:4321")),
            ("PROXY UNKNOWN\r\n", None),
            ("PROXY UNKNOWN ffff::1 ffff::2 65535 65535\r\n", None),
        ] {
            assert_eq!(caller(header.as_bytes()).await.as_deref(), expected, "{header}");
        }
    }

    #[tokio::test]
    async fn version_2_names_the_caller_and_leaves_the_request() {
        let v6 = [&[0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9][..], &[0; 16], &[16, 225, 1, 187]].concat();
        let with_extensions = [v4_addresses(), vec![4, 0, 1, 42]].concat();
        for (header, expected) in [
            (v2_header(0x21, 0x11, &v4_addresses()), Some("203.0.113.9:4321")),
            (v2_header(0x21, 0x11, &with_extensions), Some("203.0.113.9:4321")),
            (v2_header(0x21, 0x21, &v6), Some("[2001:db8::9]:4321")),
            (v2_header(0x20, 0x00, &[]), None),
            (v2_header(0x20, 0x11, &v4_addresses()), None),
            (v2_header(0x21, 0x00, &[]), None),
            (v2_header(0x21, 0x00, &[9; 300]), None),
            (v2_header(0x21, 0x31, &[0; 216]), None),
            (v2_header(0x21, 0x00, &[0; MAX_V2_REST_BYTES]), None),
        ] {
            assert_eq!(caller(&header).await.as_deref(), expected, "{header:?}");
        }
    }

    #[tokio::test]
    async fn headers_are_read_from_named_addresses_only() {
        let [balancer, stranger]: [SocketAddr; 2] = ["10.0.0.1:1", "10.0.1.1:1"].map(|text| text.parse().unwrap());
        let setting = ProxyProtocol::From(Arc::new(Networks::parse(["10.0.0.0/24"]).unwrap()));
        for (header, expected) in [
            (&b"PROXY TCP4 203.0.113.9 10.0.0.1 4321 443\r\n"[..], Caller::At("203.0.113.9:4321".parse().unwrap())),
            (b"PROXY UNKNOWN\r\n", Caller::Unknown { through: balancer }),
            (&v2_header(0x20, 0x00, &[]), Caller::Unknown { through: balancer }),
        ] {
            let (mut of_balancer, mut of_stranger) = (header, header);
            assert_eq!(setting.caller(&mut of_balancer, balancer).await, Ok(expected));
            assert_eq!(setting.caller(&mut of_stranger, stranger).await, Err(HeaderError::Stranger));
            assert_eq!(ProxyProtocol::Off.caller(&mut of_stranger, stranger).await, Ok(Caller::At(stranger)));
            assert_eq!(of_stranger, header, "nothing is read");
        }
        assert_eq!(
            ProxyProtocol::of(&ProxyProtocolRule::Unrestricted).caller(&mut &b""[..], balancer).await,
            Err(HeaderError::Stranger)
        );
    }

    #[tokio::test]
    async fn anything_else_is_not_usable() {
        let long = format!("PROXY TCP6 {} 4 4\r\n", "1".repeat(100));
        for header in [
            &b""[..],
            b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x00\x00\x00\x00\x00",
            b"proxy TCP4 203.0.113.9 10.0.0.1 4321 443\r\n",
            b"PROXY TCP4 203.0.113.9 10.0.0.1 4321 443\n",
            b"PROXY TCP4 203.0.113.9 10.0.0.1 4321\r\n",
            b"PROXY TCP4 203.0.113.999 10.0.0.1 4321 443\r\n",
            b"PROXY TCP4 2001:db8::9 ::1 4321 443\r\n",
            b"PROXY TCP6 203.0.113.9 10.0.0.1 4321 443\r\n",
            b"PROXY TCP4 203.0.113.9 10.0.0.1 4321 65536\r\n",
            b"PROXY TCP4 203.0.113.9 10.0.0.1 4321 443 \r\n",
            b"PROXY UDP4 203.0.113.9 10.0.0.1 4321 443\r\n",
            b"PROXYTCP4 203.0.113.9 10.0.0.1 4321 443\r\n",
            b"PROXY \r\nGET /\r\n\r\n",
            b"PROXY UNKNOWN\rPROXY TCP4\r\n",
            b"PROXY \xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\r\n",
            long.as_bytes(),
            &v2_header(0x11, 0x11, &v4_addresses()),
            &v2_header(0x22, 0x11, &v4_addresses()),
            &v2_header(0x21, 0x41, &v4_addresses()),
            &v2_header(0x21, 0x13, &v4_addresses()),
            &v2_header(0x21, 0x11, &v4_addresses()[1..]),
            &v2_header(0x21, 0x21, &v4_addresses()),
        ] {
            assert_eq!(outcome(header).await.0, Err(HeaderError::Malformed), "{:?}", String::from_utf8_lossy(header));
        }
        let too_long = v2_header(0x21, 0x11, &[0; MAX_V2_REST_BYTES + 1]);
        assert_eq!(outcome(&too_long).await.0, Err(HeaderError::TooLong));
    }

    #[tokio::test(start_paused = true)]
    async fn a_header_may_come_in_pieces_but_within_the_deadline() {
        let v1 = b"PROXY TCP4 203.0.113.9 10.0.0.1 4321 443\r\n".to_vec();
        for header in [v1, v2_header(0x21, 0x11, &v4_addresses())] {
            for (pause_ms, in_time) in [(10, true), (1000, false)] {
                let (mut client, mut server) = duplex(64);
                let bytes = header.clone();
                tokio::spawn(async move {
                    for byte in bytes {
                        if client.write_all(&[byte]).await.is_err() {
                            return;
                        }
                        sleep(Duration::from_millis(pause_ms)).await;
                    }
                });
                let start = Instant::now();
                let answer = read(&mut server).await;
                if in_time {
                    assert_eq!(answer, Ok(Some("203.0.113.9:4321".parse().unwrap())));
                } else {
                    assert_eq!((answer, start.elapsed()), (Err(HeaderError::Incomplete), DEADLINE));
                }
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_client_is_given_up_at_the_deadline() {
        let (_client, mut server) = duplex(64);
        let start = Instant::now();
        assert_eq!(read(&mut server).await, Err(HeaderError::Incomplete));
        assert_eq!(start.elapsed(), DEADLINE);
    }

    #[tokio::test]
    async fn a_client_that_leaves_half_way_is_given_up() {
        for header in [&b"PROXY TCP4 203.0.113.9"[..], &v2_header(0x21, 0x11, &v4_addresses())[..20]] {
            let (mut client, mut server) = duplex(64);
            client.write_all(header).await.unwrap();
            drop(client);
            assert_eq!(read(&mut server).await, Err(HeaderError::Incomplete));
        }
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..80), version in 0..3) {
            let prefix = [&b""[..], b"PROXY ", v2::PROTOCOL_PREFIX][version as usize];
            let bytes = [prefix, &bytes].concat();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            // All bytes are there, so their end ends it, not the deadline.
            _ = runtime.block_on(read(&mut &*bytes));
        }
    }
}
