//! Clients that speak plain HTTP where TLS is spoken, and the other way round. Both are mistakes of whoever wrote a URL, and
//! should not look like attacks.

use std::io;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::super::client::LINGER;
use super::super::io::Stream;

/// How a client of TLS begins: with a record of the handshake. No request of HTTP has such a byte.
const TLS_HANDSHAKE: u8 = 0x16;

/// What a client is told that speaks plain HTTP where TLS is spoken.
const USE_HTTPS: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n\
    content-length: 98\r\n\r\n\
    {\"error\":\"plain_http\",\"message\":\"A plain HTTP request came to a port that speaks TLS. Use https.\"}";

/// Whether these are the first bytes of a client that wants to speak TLS.
pub(in super::super) fn is_hello(first: &[u8]) -> bool {
    first.first() == Some(&TLS_HANDSHAKE)
}

/// Whether a client begins as HTTP does, and TLS never: with a letter. What it sent stays to be read.
pub(in super::super) async fn begins_with_a_letter(tcp: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    Ok(tcp.peek(&mut first).await? > 0 && first[0].is_ascii_alphabetic())
}

/// Tells a client of plain HTTP that it has to speak TLS, in words that it understands.
pub(in super::super) async fn send_use_https(mut tcp: TcpStream) -> io::Result<()> {
    let reply = async {
        tcp.write_all(USE_HTTPS).await?;
        Stream::Plain(tcp).end().await
    };
    timeout(LINGER, reply).await?
}
