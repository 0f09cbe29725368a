//! Names of headers that mean something to a proxy, told apart as they come.

/// What a header is to a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing: it passes.
    Other,
    /// It is between two neighbours, and says nothing else.
    HopByHop,
    Connection,
    /// What only hyper's way knows.
    Special,
    TransferEncoding,
    Host,
    ContentLength,
    ContentType,
    Date,
    Via,
    Forwarded,
    XForwardedFor,
    XForwardedProto,
    XForwardedHost,
    XRequestId,
    /// Of a family that tells what is left of a limit.
    RateLimit,
}

/// The kinds of names, by their length: most lengths have one or none.
pub(super) fn kind(name: &str) -> Kind {
    let is = |wanted: &str| name.eq_ignore_ascii_case(wanted);
    match name.len() {
        2 if is("te") => Kind::Special,
        3 if is("via") => Kind::Via,
        4 if is("host") => Kind::Host,
        4 if is("date") => Kind::Date,
        6 if is("expect") => Kind::Special,
        7 if is("upgrade") => Kind::Special,
        9 if is("forwarded") => Kind::Forwarded,
        9 if is("ratelimit") => Kind::RateLimit,
        10 if is("connection") => Kind::Connection,
        10 if is("keep-alive") => Kind::HopByHop,
        12 if is("content-type") => Kind::ContentType,
        12 if is("x-request-id") => Kind::XRequestId,
        14 if is("content-length") => Kind::ContentLength,
        15 if is("x-forwarded-for") => Kind::XForwardedFor,
        16 if is("x-forwarded-host") => Kind::XForwardedHost,
        16 if is("proxy-connection") => Kind::HopByHop,
        17 if is("x-forwarded-proto") => Kind::XForwardedProto,
        17 if is("transfer-encoding") => Kind::TransferEncoding,
        18 if is("proxy-authenticate") => Kind::HopByHop,
        19 if is("proxy-authorization") => Kind::HopByHop,
        10.. if begins(name, "ratelimit-") || begins(name, "x-ratelimit-") => Kind::RateLimit,
        _ => Kind::Other,
    }
}

fn begins(name: &str, with: &str) -> bool {
    name.get(..with.len()).is_some_and(|beginning| beginning.eq_ignore_ascii_case(with))
}
