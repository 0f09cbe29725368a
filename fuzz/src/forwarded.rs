//! Forwarding headers: a client cannot impersonate another one with them.

use std::net::{IpAddr, SocketAddr};

use http::{HeaderMap, HeaderName, HeaderValue};
use tollgate_rules::{Facts, ForwardingHeader, TrustedProxies};

const STRANGER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(198, 51, 100, 7));
const PROXY: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 9));

/// The number of hops that are read.
const MAX_HOPS: usize = 32;

/// Reads each line as a line of `X-Forwarded-For`, and as one of `Forwarded`.
pub fn forwarded(input: &[u8]) {
    let lines = input.split(|byte| *byte == b'\n').filter_map(|line| HeaderValue::from_bytes(line).ok());
    let lines: Vec<HeaderValue> = lines.collect();
    for written in [Written::X_FORWARDED_FOR, Written::FORWARDED] {
        let forged = written.headers(&lines);
        assert_eq!(written.client(STRANGER, &forged), STRANGER, "a stranger is believed");
        behind_a_proxy(&written, &lines);
        let client = written.client(PROXY, &forged);
        assert_eq!(client, client.to_canonical(), "one client has two addresses");
    }
    agrees_with_std(&lines);
    only_one_header_is_believed(&lines);
}

/// The syntax of one of the headers.
struct Written {
    name: HeaderName,
    believing: ForwardingHeader,
    client: &'static str,
    /// The client, and a second trusted proxy between it and the first.
    client_and_proxy: &'static str,
}

impl Written {
    const X_FORWARDED_FOR: Self = Self {
        name: HeaderName::from_static("x-forwarded-for"),
        believing: ForwardingHeader::XForwardedFor,
        client: "203.0.113.9",
        client_and_proxy: "203.0.113.9:4711 , 10.0.0.2",
    };
    const FORWARDED: Self = Self {
        name: http::header::FORWARDED,
        believing: ForwardingHeader::Forwarded,
        client: "for=203.0.113.9",
        client_and_proxy: "proto=https;For=\"203.0.113.9:4711\", for=10.0.0.2;by=_x",
    };

    fn headers(&self, lines: &[HeaderValue]) -> HeaderMap {
        lines.iter().map(|line| (self.name.clone(), line.clone())).collect()
    }

    fn client(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        client(self.believing, peer, headers)
    }
}

fn client(believing: ForwardingHeader, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
    let Ok(proxies) = TrustedProxies::parse(["10.0.0.0/8", "2001:db8::/32"]) else { panic!("these are networks") };
    let facts = Facts::new("GET", "/").peer(peer).headers(headers);
    let Some(client) = proxies.with_header(believing).client(&facts) else { panic!("the peer is known") };
    client
}

/// Checks that trusted proxies name the client, whatever it sent: they append its address to the same line or to a line
/// of their own.
fn behind_a_proxy(written: &Written, lines: &[HeaderValue]) {
    for appended in [written.client, written.client_and_proxy] {
        let Ok(own) = HeaderValue::from_str(appended) else { panic!("{appended} is a header") };
        let mut in_its_own_line = lines.to_vec();
        in_its_own_line.push(own.clone());
        let mut in_the_same_line = lines.to_vec();
        if let Some(last) = in_the_same_line.last_mut() {
            let joined = [last.as_bytes(), b", ", own.as_bytes()].concat();
            let Ok(joined) = HeaderValue::from_bytes(&joined) else { panic!("both are headers") };
            *last = joined;
        } else {
            in_the_same_line.push(own);
        }
        for lines in [in_its_own_line, in_the_same_line] {
            assert_eq!(written.client(PROXY, &written.headers(&lines)), CLIENT, "{lines:?}");
        }
    }
}

/// Compares with a simple walk, as long as the standard library can parse every hop.
fn agrees_with_std(lines: &[HeaderValue]) {
    let whole: Vec<&[u8]> = lines.iter().map(HeaderValue::as_bytes).collect();
    let whole = whole.join(&b',');
    let hops = whole.rsplit(|byte| *byte == b',').map(<[u8]>::trim_ascii).filter(|hop| !hop.is_empty());
    let mut reached = PROXY;
    for hop in hops.take(MAX_HOPS) {
        let Some(address) = std::str::from_utf8(hop).ok().and_then(std_address) else { return };
        reached = address.to_canonical();
        let is_proxy = match reached {
            IpAddr::V4(address) => address.octets()[0] == 10,
            IpAddr::V6(address) => address.segments()[..2] == [0x2001, 0xdb8],
        };
        if !is_proxy {
            break;
        }
    }
    let written = Written::X_FORWARDED_FOR;
    assert_eq!(written.client(PROXY, &written.headers(lines)), reached, "{lines:?}");
}

fn std_address(hop: &str) -> Option<IpAddr> {
    hop.parse().ok().or_else(|| hop.parse::<SocketAddr>().ok().map(|address| address.ip()))
}

/// Checks that a forged `Forwarded` changes nothing if there is an `X-Forwarded-For`.
fn only_one_header_is_believed(lines: &[HeaderValue]) {
    let Ok(honest) = HeaderValue::from_str(Written::X_FORWARDED_FOR.client) else { panic!("it is a header") };
    let mut headers = Written::FORWARDED.headers(lines);
    headers.insert(Written::X_FORWARDED_FOR.name, honest);
    assert_eq!(client(ForwardingHeader::Either, PROXY, &headers), CLIENT, "{lines:?}");
}
