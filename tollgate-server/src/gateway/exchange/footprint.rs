//! Bounds on the memory of a request while its client uploads slowly. A client decides how many uploads it starts and
//! how long they take, so each must be small. hyper adds two buffers of 8 KiB per side.

use http::HeaderValue;

use super::*;

/// Returns the size of the future that a function returns.
fn future_bytes<A, F: Future>(_: impl FnOnce(A) -> F) -> usize {
    size_of::<F>()
}

#[test]
fn a_connection_to_an_upstream_allocates_little_room_for_requests() {
    // hyper's channel has 32 slots from the start.
    let bytes = 32 * size_of::<UpstreamRequest>();
    assert!(bytes <= 8 << 10, "{bytes} bytes");
}

#[test]
fn a_request_on_its_way_is_a_small_future() {
    let pass =
        |(exchange, outcome, forwarding): (&'static Exchange, Outcome, Forwarding)| exchange.pass(outcome, forwarding);
    let bytes = future_bytes(pass);
    assert!(bytes <= 7 << 10, "{bytes} bytes");
}

#[test]
fn a_copied_header_value_does_not_hold_the_buffer_of_its_head() {
    let head = Bytes::from(b"host: example.com\r\n".to_vec());
    let value = HeaderValue::from_maybe_shared(head.slice(6..17)).unwrap();
    let copy = forward::copied(&value);
    drop(value);
    assert_eq!(copy, "example.com");
    assert!(head.is_unique());
}
