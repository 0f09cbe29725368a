//! Clients that send plain HTTP to a TLS port, or TLS to a plain HTTP port. Both are mistakes in a URL, and should not
//! look like attacks.

use std::io;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::super::client::LINGER;
use super::super::io::Stream;

/// The first byte of a TLS handshake. No HTTP request starts with it.
const TLS_HANDSHAKE: u8 = 0x16;

/// The response to plain HTTP on a TLS port.
const USE_HTTPS: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n\
    content-length: 69\r\n\r\n\
    {\"error\":\"plain_http\",\"message\":\"This port requires TLS: use https.\"}";

/// Returns whether these are the first bytes of a TLS handshake.
pub(in super::super) fn is_hello(first: &[u8]) -> bool {
    first.first() == Some(&TLS_HANDSHAKE)
}

/// Returns whether the first byte is a letter, as in HTTP and never in TLS. The bytes stay unread.
pub(in super::super) async fn begins_with_a_letter(tcp: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    Ok(tcp.peek(&mut first).await? > 0 && first[0].is_ascii_alphabetic())
}

/// Sends a plain HTTP client the instruction to use https.
pub(in super::super) async fn send_use_https(mut tcp: TcpStream) -> io::Result<()> {
    let reply = async {
        tcp.write_all(USE_HTTPS).await?;
        Stream::Plain(tcp).end().await
    };
    timeout(LINGER, reply).await?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn response_has_the_length_that_it_announces() {
        let text = std::str::from_utf8(USE_HTTPS).expect("the response is text");
        let (head, body) = text.split_once("\r\n\r\n").expect("the head has an end");
        assert!(head.ends_with(&format!("content-length: {}", body.len())), "{head}");
        serde_json::from_str::<serde_json::Value>(body).expect("the body is JSON");
    }
}
