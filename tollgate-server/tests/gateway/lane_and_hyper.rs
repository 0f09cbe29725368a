//! The lane serves plain requests, hyper serves all others. Clients and upstreams must not be able to distinguish them.

use testkit::gateway::{Gateway, site};
use testkit::upstream::Raw;

/// Names no header, so the only effect is that hyper serves the request.
const BY_HYPER: &str = "Connection: x-absent\r\n";

/// Returns the lines of a head in a fixed order and case, without those that always differ.
fn lines(head: &str) -> Vec<String> {
    let mut lines: Vec<String> = head
        .lines()
        .skip(1)
        .filter(|line| !line.is_empty())
        .map(|line| {
            let (name, value) = line.split_once(':').unwrap();
            let is_new = ["x-request-id", "date", "x-ratelimit-reset"].contains(&name.to_ascii_lowercase().as_str())
                && value.trim() != "given";
            format!("{}:{}", name.to_ascii_lowercase(), if is_new { " *" } else { value })
        })
        .collect();
    lines.sort();
    lines
}

/// Returns the request that the upstream got and the response that the client got.
fn exchanged(gateway: &Gateway, upstream: &Raw, (method, target, headers): (&str, &str, &str), way: &str) -> String {
    let before: Vec<usize> = upstream.seen().iter().map(String::len).collect();
    let mut connection = gateway.connect();
    let answers: Vec<String> = (0..2)
        .map(|_| {
            connection.send(format!("{method} {target} HTTP/1.1\r\nHost: Shop.example.com:81\r\n{way}{headers}\r\n"));
            let answer = match method {
                "HEAD" => connection.receive_head().unwrap(),
                _ => connection.receive(),
            };
            let head: Vec<String> = answer.headers.iter().map(|(name, value)| format!("{name}: {value}")).collect();
            let head = lines(&format!("{}\n{}", answer.status, head.join("\n")));
            format!("{} {head:#?}\n{:?}", answer.status, answer.text())
        })
        .collect();
    let seen = upstream.seen();
    let new = seen.iter().enumerate().map(|(number, seen)| &seen[before.get(number).copied().unwrap_or(0)..]);
    let seen = new.collect::<String>();
    let asked: Vec<String> = seen
        .split("\r\n\r\n")
        .filter(|head| !head.is_empty())
        .map(|head| format!("{:?} {:#?}", head.lines().next(), lines(head)))
        .collect();
    assert!(asked.len() >= 2, "{asked:?}");
    format!("{asked:#?}\n{answers:#?}")
}

fn same_both_ways(gateway: &Gateway, upstream: &Raw, request: (&str, &str, &str)) {
    let [plain, by_hyper] = ["", BY_HYPER].map(|way| exchanged(gateway, upstream, request, way));
    assert_eq!(plain, by_hyper, "{request:?}");
}

const FORWARDED: &str = "X-Forwarded-For: 1.2.3.4\r\nx-forwarded-for: 5.6.7.8\r\nX-Forwarded-Proto: https\r\n\
    X-Forwarded-Host: shop\r\nForwarded: for=1.2.3.4\r\nVia: 1.0 edge\r\nX-Request-Id: given\r\n";

#[test]
fn an_upstream_cannot_tell_the_ways_apart() {
    let upstream = Raw::answering("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    let url = upstream.url();
    for settings in ["", "trusted_proxies: [127.0.0.1/32]", "tell_upstreams: []", "tell_upstreams: [x-forwarded, via]"]
    {
        let routes = [
            format!("{{ path: /own-host/**, host: upstream, upstream: {url} }}"),
            format!("{{ path: /strip/**, strip_prefix: /strip, upstream: {url}/base }}"),
            format!(
                "{{ path: /edited/**, upstream: {url}, request_headers: {{ remove: [X-Gone, via], \
                 set: {{ X-Set: a, X-Forwarded-For: none }}, add: {{ X-Many: b, Accept: c }} }} }}"
            ),
            format!("{{ path: /hosted/**, upstream: {url}, request_headers: {{ set: {{ Host: other }} }} }}"),
            format!("{{ path: /hostless/**, upstream: {url}, request_headers: {{ remove: [host] }} }}"),
            format!("{{ path: /**, upstream: {url} }}"),
        ];
        let gateway = Gateway::start(&site(settings, &routes, ""));
        for target in ["/own-host", "/strip/a/../b?c", "/edited", "/hosted", "/hostless", "/other?x=%2F//y"] {
            let own = "X-Gone: 1\r\nX-Many: a\r\nx-set: z\r\nACCEPT: d\r\nKeep-Alive: 5\r\nProxy-Authorization: x\r\n";
            for headers in ["", FORWARDED, own, "X-Request-Id: \u{e9}\r\n", "Content-Length: 0\r\n"] {
                same_both_ways(&gateway, &upstream, ("GET", target, headers));
            }
        }
        same_both_ways(&gateway, &upstream, ("DELETE", "/x", "Cookie: a=b\r\n"));
    }
}

#[test]
fn a_client_cannot_tell_the_ways_apart() {
    let limit = "{ name: all, algorithm: token_bucket, capacity: 1000, refill: 1/h }";
    let many: String = (0..90).map(|number| format!("X-{number}: y\r\n")).collect();
    let many_headers = format!("HTTP/1.1 200 OK\r\n{many}Content-Length: 2\r\n\r\nok");
    for answer in [
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\nSet-Cookie: a\r\nset-cookie: b\r\n\r\nhello",
        "HTTP/1.1 404 Nothing here\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "HTTP/1.1 204 No Content\r\nX-A: b\r\n\r\n",
        "HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\n\r\n",
        "HTTP/1.1 200 OK\r\nConnection: X-Own, keep-alive\r\nX-Own: a\r\nKeep-Alive: 5\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nDate: then\r\nVia: 1.1 other\r\nX-Request-Id: theirs\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/1.1 200 OK\r\nX-RateLimit-Limit: 9\r\nX-RateLimit-Remaining: 3\r\nX-RateLimit-Reset: 60\r\n\
         RateLimit: \"theirs\";r=1;t=5\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5 ;x=y\r\nhello\r\n6  \r\n world\r\n0\r\nX-A: secret\r\n\r\n",
        &many_headers,
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok!",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        "nonsense\r\n\r\n",
    ] {
        let upstream = Raw::answering(answer);
        let edits = "response_headers: { remove: [x-a, via], set: { X-B: c }, add: { Set-Cookie: d } }";
        let routes = [
            format!("{{ path: /edited, upstream: {}, {edits} }}", upstream.url()),
            format!("{{ path: /**, upstream: {} }}", upstream.url()),
        ];
        let gateway = Gateway::start(&site("workers: 1", &routes, limit));
        for (method, target) in [("GET", "/edited"), ("GET", "/x")] {
            // The remaining quota must be the same both times.
            let expected = |way| {
                let text = exchanged(&gateway, &upstream, (method, target, ""), way);
                let is_count =
                    |line: &&str| line.contains("x-ratelimit-remaining") || line.contains("ratelimit: \\\"all");
                text.lines().filter(|line| !is_count(line)).collect::<Vec<_>>().join("\n")
            };
            assert_eq!(expected(""), expected(BY_HYPER), "{answer}");
        }
    }
}
