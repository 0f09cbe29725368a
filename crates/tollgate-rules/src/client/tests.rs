//! Honest and forged proxy chains.

use std::net::IpAddr;

use http::{HeaderMap, HeaderValue};
use proptest::prelude::*;

use super::*;

/// A trusted proxy, as the peer.
const PROXY: &str = "10.0.0.1";
/// A peer that is not a trusted proxy.
const STRANGER: &str = "198.51.100.7";

fn trusted() -> TrustedProxies {
    TrustedProxies::parse(["10.0.0.0/8", "192.0.2.53", "fd00::/8"]).unwrap()
}

fn headers(lines: &[(&'static str, &[u8])]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        headers.append(*name, HeaderValue::from_bytes(value).unwrap());
    }
    headers
}

fn client_behind(proxies: &TrustedProxies, peer: &str, headers: &HeaderMap) -> String {
    let facts = Facts::new("GET", "/").peer(peer.parse().unwrap()).headers(headers);
    proxies.client(&facts).unwrap().to_string()
}

fn client(peer: &str, lines: &[(&'static str, &str)]) -> String {
    let lines: Vec<_> = lines.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
    client_behind(&trusted(), peer, &headers(&lines))
}

fn by_xff(value: &str) -> String {
    client(PROXY, &[("x-forwarded-for", value)])
}

fn by_forwarded(value: &str) -> String {
    client(PROXY, &[("forwarded", value)])
}

#[test]
fn x_forwarded_for_is_read_from_the_right() {
    for (value, expected) in [
        // One hop, in every form that proxies write.
        ("203.0.113.9", "203.0.113.9"),
        ("203.0.113.9:1234", "203.0.113.9"),
        ("2001:db8::9", "2001:db8::9"),
        ("2001:DB8:0:0:0:0:0:9", "2001:db8::9"),
        ("[2001:db8::9]", "2001:db8::9"),
        ("[2001:db8::9]:1234", "2001:db8::9"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("[::ffff:203.0.113.9]:80", "203.0.113.9"),
        ("fe80::9%eth0", "fe80::9"),
        ("[fe80::9%25eth0]:80", "fe80::9"),
        ("[fe80::9%eth0]:80", "fe80::9"),
        ("203.0.113.9:_hidden", "203.0.113.9"),
        (" \t203.0.113.9 \t", "203.0.113.9"),
        // Trusted hops are skipped in every form.
        ("203.0.113.9, 10.9.9.9", "203.0.113.9"),
        ("203.0.113.9,10.9.9.9:80,192.0.2.53", "203.0.113.9"),
        ("203.0.113.9, [fd00::1]:80, ::ffff:10.2.2.2", "203.0.113.9"),
        // Entries that the client wrote are to the left of its address.
        ("6.6.6.6, 203.0.113.9", "203.0.113.9"),
        ("10.0.0.5, 203.0.113.9, 10.0.0.2", "203.0.113.9"),
        ("unknown, 203.0.113.9", "203.0.113.9"),
        ("\"6.6.6.6, 203.0.113.9", "203.0.113.9"),
        ("6.6.6.6 203.0.113.9, 203.0.113.8", "203.0.113.8"),
        // Only proxies: the leftmost.
        ("10.0.0.5", "10.0.0.5"),
        ("10.0.0.5, 10.0.0.4, 10.0.0.3", "10.0.0.5"),
        // Empty elements are skipped.
        ("", PROXY),
        (" , ,", PROXY),
        ("203.0.113.9,,", "203.0.113.9"),
        ("203.0.113.9, ,10.0.0.2, ", "203.0.113.9"),
        (",10.0.0.2", "10.0.0.2"),
    ] {
        assert_eq!(by_xff(value), expected, "{value:?}");
    }
}

#[test]
fn an_invalid_hop_ends_the_walk_at_the_proxy_that_reported_it() {
    for garbage in [
        "unknown",
        "_hidden",
        "localhost",
        "256.0.0.1",
        "203.0.113",
        "203.0.113.09",
        "203.0.113.9.1",
        "0x7f.0.0.1",
        "3405803785",
        "203.0.113.9:",
        "203.0.113.9:port",
        "203.0.113.9:65536",
        "203.0.113.9:+1",
        "203.0.113.9:80:80",
        "203.0.113.9/32",
        "203.0.113.9 6.6.6.6",
        "203.0.113.9;6.6.6.6",
        "\"203.0.113.9\"",
        "[203.0.113.9]",
        "[2001:db8::9",
        "2001:db8::9]",
        "[2001:db8::9]80",
        "[2001:db8::9]:",
        "[2001:db8::9]:99999",
        "[[2001:db8::9]]",
        "[]",
        "[]:80",
        ":80",
        ":",
        "2001:db8::9::1",
        "2001:db8:::9",
        "fe80::9%",
        "fe80::9%eth0%eth1",
        "fe80::9%a b",
        "12345::",
        "for=203.0.113.9",
        "<script>",
        "%32%30%33.0.113.9",
    ] {
        assert_eq!(by_xff(garbage), PROXY, "{garbage:?}");
        // Nothing to the left of it is read either.
        assert_eq!(by_xff(&format!("6.6.6.6, {garbage}")), PROXY, "{garbage:?}");
        assert_eq!(by_xff(&format!("6.6.6.6, {garbage}, 10.0.0.2")), "10.0.0.2", "{garbage:?}");
        assert_eq!(by_xff(&format!("{garbage}, 203.0.113.9, 10.0.0.2")), "203.0.113.9", "{garbage:?}");
        let quoted = format!("for=6.6.6.6, for=\"{garbage}\", for=10.0.0.2");
        if !matches!(garbage, "\"203.0.113.9\"") {
            assert_eq!(by_forwarded(&quoted), "10.0.0.2", "{quoted:?}");
        }
    }
    let bytes = headers(&[("x-forwarded-for", b"6.6.6.6, 203.0.113.\xff9, 10.0.0.2")]);
    assert_eq!(client_behind(&trusted(), PROXY, &bytes), "10.0.0.2");
    assert_eq!(by_xff(&format!("6.6.6.6, {}, 10.0.0.2", "9".repeat(100_000))), "10.0.0.2");
}

#[test]
fn several_lines_are_one_chain() {
    let lines =
        [("x-forwarded-for", "6.6.6.6"), ("x-forwarded-for", "203.0.113.9, 10.0.0.3"), ("x-forwarded-for", "10.0.0.2")];
    assert_eq!(client(PROXY, &lines), "203.0.113.9");
    assert_eq!(client(PROXY, &lines[..2]), "203.0.113.9");
    assert_eq!(client(PROXY, &lines[..1]), "6.6.6.6");
    let lines = [("forwarded", "for=6.6.6.6"), ("forwarded", "for=203.0.113.9"), ("forwarded", "for=10.0.0.2")];
    assert_eq!(client(PROXY, &lines), "203.0.113.9");
}

#[test]
fn forwarded_is_read_from_the_right() {
    for (value, expected) in [
        ("for=203.0.113.9", "203.0.113.9"),
        ("FOR=203.0.113.9", "203.0.113.9"),
        ("for=\"203.0.113.9:1234\"", "203.0.113.9"),
        ("for=\"[2001:db8::9]\"", "2001:db8::9"),
        ("for=\"[2001:db8::9]:1234\"", "2001:db8::9"),
        ("for=\"[2001:db8::9]:_port\"", "2001:db8::9"),
        ("for=[2001:db8::9]:1234", "2001:db8::9"),
        ("for=203.0.113.9:1234", "203.0.113.9"),
        ("proto=https;for=203.0.113.9;by=10.0.0.2", "203.0.113.9"),
        ("for=203.0.113.9;proto=https;host=\"api.example.com:443\"", "203.0.113.9"),
        ("for=203.0.113.9;host=\"a\\\"b\\\\\"", "203.0.113.9"),
        (" for=203.0.113.9 ; proto=https ;", "203.0.113.9"),
        ("for=6.6.6.6, for=203.0.113.9, for=10.0.0.2;by=10.0.0.1", "203.0.113.9"),
        ("for=203.0.113.9,,for=10.0.0.2,", "203.0.113.9"),
        ("for=10.0.0.3, for=10.0.0.2", "10.0.0.3"),
        ("for=\"\", for=203.0.113.9", "203.0.113.9"),
    ] {
        assert_eq!(by_forwarded(value), expected, "{value:?}");
    }
}

#[test]
fn an_invalid_forwarded_element_ends_the_walk() {
    for garbage in [
        "for=unknown",
        "for=_hidden",
        "for=\"_SEVKISEK\"",
        "by=203.0.113.9",
        "for",
        "for=",
        "for=\"\"",
        "=203.0.113.9",
        ";for=203.0.113.9",
        "203.0.113.9",
        "for = 203.0.113.9",
        "for=203.0.113.9 proto=https",
        "for=203.0.113.9;for=6.6.6.6",
        "for=6.6.6.6;FOR=203.0.113.9",
        "for=203.0.113.9;proto",
        "for=\"203.0.113.9",
        "for=203.0.113.9\"",
        "for=\"203.0.113.9\"6",
        "for=\"203.0.113.\\9\"",
        "for=\"203.0.113.9\\\"",
        "for='203.0.113.9'",
        "f(or=203.0.113.9",
        "for=203.0.113.9;host=a/b",
    ] {
        assert_eq!(by_forwarded(garbage), PROXY, "{garbage:?}");
        assert_eq!(by_forwarded(&format!("for=6.6.6.6, {garbage}, for=10.0.0.2")), "10.0.0.2", "{garbage:?}");
    }
}

#[test]
fn an_open_quote_does_not_swallow_later_hops() {
    for forged in ["for=\"6.6.6.6", "for=6.6.6.6;host=\"", "\"", "for=\"6.6.6.6\\", "for=6.6.6.6;x=\"a\\"] {
        for written in ["for=203.0.113.9", "for=\"203.0.113.9:80\"", "for=203.0.113.9;host=\"a\""] {
            let value = format!("{forged}, {written}, for=\"10.0.0.2:80\"");
            assert_eq!(by_forwarded(&value), "203.0.113.9", "{value:?}");
        }
    }
}

#[test]
fn a_quoted_comma_cannot_forge_a_hop() {
    // A client controls its Host, and a proxy writes it with escapes.
    for host in
        ["a,for=6.6.6.6", "a,for=6.6.6.6;x=", "a\\\",for=6.6.6.6;x=\\\"b", "a,for=6.6.6.6;x=\\\"b", ",for=6.6.6.6,"]
    {
        let value = format!("for=203.0.113.9;host=\"{host}\"");
        assert_eq!(by_forwarded(&value), PROXY, "{value:?}");
    }
}

#[test]
fn forwarding_headers_of_untrusted_peers_are_ignored() {
    for name in ["x-forwarded-for", "forwarded"] {
        for value in ["6.6.6.6", "10.0.0.1", "for=6.6.6.6", "6.6.6.6, 10.0.0.2", "for=10.0.0.1"] {
            assert_eq!(client(STRANGER, &[(name, value)]), STRANGER, "{name}: {value}");
        }
    }
}

#[test]
fn no_proxy_is_trusted_by_default() {
    let forged = headers(&[("x-forwarded-for", b"6.6.6.6"), ("forwarded", b"for=6.6.6.6")]);
    for peer in [PROXY, STRANGER, "127.0.0.1", "::1"] {
        assert_eq!(client_behind(&TrustedProxies::default(), peer, &forged), peer);
    }
}

#[test]
fn a_mapped_peer_is_its_ipv4_address() {
    assert_eq!(client("::ffff:10.0.0.1", &[("x-forwarded-for", "203.0.113.9")]), "203.0.113.9");
    assert_eq!(client("::ffff:198.51.100.7", &[("x-forwarded-for", "6.6.6.6")]), STRANGER);
}

#[test]
fn only_the_configured_header_is_read() {
    let both = headers(&[("x-forwarded-for", b"203.0.113.9"), ("forwarded", b"for=203.0.113.8")]);
    let one = headers(&[("forwarded", b"for=203.0.113.8")]);
    let empty = headers(&[("x-forwarded-for", b""), ("forwarded", b"for=6.6.6.6")]);
    for (header, by_both, by_one, by_empty) in [
        (ForwardingHeader::Either, "203.0.113.9", "203.0.113.8", PROXY),
        (ForwardingHeader::XForwardedFor, "203.0.113.9", PROXY, PROXY),
        (ForwardingHeader::Forwarded, "203.0.113.8", "203.0.113.8", "6.6.6.6"),
    ] {
        let proxies = trusted().with_header(header);
        assert_eq!(client_behind(&proxies, PROXY, &both), by_both, "{header:?}");
        assert_eq!(client_behind(&proxies, PROXY, &one), by_one, "{header:?}");
        assert_eq!(client_behind(&proxies, PROXY, &empty), by_empty, "{header:?}");
    }
}

#[test]
fn a_chain_is_followed_for_a_bounded_number_of_hops() {
    let chain = |hops: usize| {
        let proxies: String = (1..hops).map(|hop| format!(", 10.1.1.{hop}")).collect();
        by_xff(&format!("203.0.113.9{proxies}"))
    };
    assert_eq!(chain(MAX_HOPS), "203.0.113.9");
    assert_eq!(chain(MAX_HOPS + 1), "10.1.1.1");
}

#[test]
fn without_a_peer_there_is_no_client() {
    let forged = headers(&[("x-forwarded-for", b"6.6.6.6")]);
    assert_eq!(trusted().client(&Facts::new("GET", "/").headers(&forged)), None);
}

#[test]
fn without_headers_the_peer_is_the_client() {
    assert_eq!(trusted().client(&Facts::new("GET", "/").peer(PROXY.parse().unwrap())), PROXY.parse().ok());
}

/// Generates forged elements: fragments of valid ones in any order.
fn forged() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        Just("for=".to_owned()),
        Just("\"".to_owned()),
        Just("\\".to_owned()),
        Just(";".to_owned()),
        Just(",".to_owned()),
        Just(" ".to_owned()),
        Just("6.6.6.6".to_owned()),
        Just("10.0.0.1".to_owned()),
        Just("[fd00::1]:80".to_owned()),
        Just("unknown".to_owned()),
        "[ -~]{0,6}",
    ];
    prop::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
}

fn any_address() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        any::<u32>().prop_map(|bits| IpAddr::V4(bits.into())),
        any::<u128>().prop_map(|bits| IpAddr::V6(bits.into()))
    ]
}

fn choice() -> impl Strategy<Value = ForwardingHeader> {
    prop_oneof![
        Just(ForwardingHeader::Either),
        Just(ForwardingHeader::XForwardedFor),
        Just(ForwardingHeader::Forwarded)
    ]
}

proptest! {
    #[test]
    fn no_header_changes_the_address_of_an_untrusted_peer(
        peer in any_address(),
        lines in prop::collection::vec((prop_oneof![Just("x-forwarded-for"), Just("forwarded")], forged()), 0..4),
        header in choice(),
    ) {
        let proxies = trusted().with_header(header);
        prop_assume!(!proxies.networks.contains(peer));
        let lines: Vec<_> = lines.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
        let answer = client_behind(&proxies, &peer.to_string(), &headers(&lines));
        prop_assert_eq!(answer, peer.to_canonical().to_string());
    }

    #[test]
    fn forged_hops_on_the_left_change_nothing(
        forged in forged(),
        on_its_own_line: bool,
        client in any_address(),
        proxies_between in 0_usize..4,
        by in prop_oneof![Just("x-forwarded-for"), Just("forwarded")],
    ) {
        prop_assume!(!trusted().networks.contains(client));
        let hop = |address: String| match (by, address.contains(':')) {
            ("forwarded", true) => format!("for=\"[{address}]\""),
            ("forwarded", false) => format!("for={address}"),
            _ => address,
        };
        let mut chain = hop(client.to_canonical().to_string());
        for at in 0..proxies_between {
            chain += &format!(", {}", hop(format!("10.2.2.{at}")));
        }
        let joined = format!("{forged},{chain}");
        let lines: &[(&'static str, &[u8])] =
            if on_its_own_line { &[(by, forged.as_bytes()), (by, chain.as_bytes())] } else { &[(by, joined.as_bytes())] };
        prop_assert_eq!(client_behind(&trusted(), PROXY, &headers(lines)), client.to_canonical().to_string());
    }

    #[test]
    fn an_address_survives_every_form_of_writing_it(address in any_address(), port: u16) {
        let forms = match address {
            IpAddr::V4(v4) => vec![format!("{v4}"), format!("{v4}:{port}"), format!("::ffff:{v4}")],
            IpAddr::V6(v6) => vec![format!("{v6}"), format!("[{v6}]"), format!("[{v6}]:{port}"), format!("{v6}%eth0")],
        };
        for form in forms {
            prop_assert_eq!(hop_address(form.as_bytes()), Some(address.to_canonical()), "{}", form);
        }
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
        _ = hop_address(&bytes);
        _ = forwarded_address(&bytes);
    }
}
