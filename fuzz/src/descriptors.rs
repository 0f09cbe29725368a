//! Requests of Envoy's rate limit service: any message gets one status for each descriptor or an error with a message,
//! and a denied request takes nothing.

use tollgate_server::fuzzing::{Descriptors, Service};

const INVALID_ARGUMENT: i32 = 3;
const RESOURCE_EXHAUSTED: i32 = 8;

/// Decodes bytes as a request, and decides it several times.
pub fn descriptors(input: &[u8]) {
    let Some(request) = Descriptors::decode(input) else { return };
    let again = Descriptors::decode(&request.encode());
    assert_eq!(again.as_ref(), Some(&request), "another message after a round trip");
    let service = Service::default();
    for _ in 0..4 {
        let before = service.rate_limit(&request.peek());
        let limited = match service.rate_limit(&request) {
            Ok(limited) => limited,
            Err((code, message)) => {
                assert!([INVALID_ARGUMENT, RESOURCE_EXHAUSTED].contains(&code), "{code} {message}");
                assert!(message.contains(": "), "{message} has no fix");
                return;
            }
        };
        assert_eq!(limited.statuses.len(), request.count());
        let denied = limited.statuses.iter().filter(|(is_allowed, _)| !is_allowed).count();
        assert_eq!(limited.is_allowed, denied == 0, "{limited:?}");
        if !limited.is_allowed && !request.has_refund() {
            let remaining = |peeked: Result<_, _>| {
                let limited: tollgate_server::fuzzing::Limited = peeked.unwrap_or_else(|error| panic!("{error:?}"));
                limited.statuses.iter().map(|(_, remaining)| *remaining).collect::<Vec<_>>()
            };
            let after = remaining(service.rate_limit(&request.peek()));
            assert_eq!(after, remaining(before), "a denied request has taken hits");
        }
    }
}
