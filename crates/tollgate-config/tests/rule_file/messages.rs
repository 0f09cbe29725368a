//! Every message, with the file that causes it.
//!
//! Read the snapshots: each lists files and the messages about them.

use std::fmt::Write;

use tollgate_config::{Problems, RuleFile};

/// Files that do not fit the schema, which editors report too.
pub(crate) const SHAPES: [&str; 50] = [
    // The file as a whole.
    "- name: a\n",
    "just text\n",
    "limitz:\n  - name: a\n",
    "something: else\n",
    "limits: 5\n",
    "limits:\n",
    "limits: { name: a }\n",
    // Keys.
    "limits:\n  - name: a\n    capcity: 5\n",
    "limits:\n  - name: a\n    path: /x\n",
    "limits:\n  - name: a\n    banana: 5\n",
    "limits:\n  - limit: 5\n",
    "limits:\n  - name: a\n    ban: { after: 5, for: 1m }\n",
    "limits:\n  - name: a\n    match: { headers: { \"x y\": a } }\n",
    // Types.
    "limits:\n  - name: 5\n",
    "limits:\n  - name: a\n    key: 42\n",
    "limits:\n  - name: a\n    limit: ten\n",
    "limits:\n  - name: a\n    limit: 1.5\n",
    "limits:\n  - name: a\n    limit: -5\n",
    "limits:\n  - name: a\n    limit: 99999999999999999999999\n",
    "limits:\n  - name: a\n    segments: 5000000000\n",
    "gateway: { workers: 70000, routes: [{ path: /, upstream: http://h, retries: 300 }] }\n",
    "limits:\n  - name: a\n    limit: [5]\n",
    "limits:\n  - name: a\n    window: 60\n",
    "limits:\n  - name: a\n    algorithm: token_bucket\n    refill: 10\n",
    "limits:\n  - name: a\n    shadow: yes\n",
    "limits:\n  - name: a\n    shadow: maybe\n",
    "limits:\n  - name: a\n    cost: true\n",
    "limits:\n  - name: a\n    match: /api\n",
    "limits:\n  - name: a\n    match: { methods: GET }\n",
    "limits:\n  - name: a\n    match: { domain: \"\" }\n",
    "service: { http: 8090 }\nlimits: [{ name: a }]\n",
    "max_memory: 1000000\nlimits: [{ name: a }]\n",
    "body: text\nlimits: [{ name: a }]\n",
    "body: [json]\nlimits: [{ name: a }]\n",
    "cors: any\nlimits: [{ name: a }]\n",
    "cors: { origins: all }\nlimits: [{ name: a }]\n",
    // Words.
    "headers: [legcy]\nlimits: [{ name: a }]\n",
    "on_store_failure: panic\nlimits: [{ name: a }]\n",
    "limits:\n  - name: a\n    algorithm: token-bucket\n",
    "limits:\n  - name: a\n    missing: forbid\n    key: ip\n",
    "limits:\n  - name: a\n    algorithm: token_bucket\n    refill_mode: portions\n",
    "limits:\n  - name: a\n    count: failurs\n",
    "limits:\n  - name: a\n    count: { statuses: [401], when: later }\n",
    "limits:\n  - name: a\n    count: { status: 401 }\n",
    "limits:\n  - name: a\n    count: 5xx\n",
    "limits:\n  - name: a\n    count: 401\n",
    // Lists.
    "limits:\n  - name: a\n    count: []\n",
    "limits:\n  - name: a\n    match: { methods: [] }\n",
    "limits:\n  - name: a\n    key: []\n",
    "limits:\n  - name: a\n    match: { methods: [GET, 5] }\n",
];

/// Keys and values of other rate limiters.
pub(crate) const MIGRANTS: [&str; 75] = [
    // In the wrong place.
    "limits:\n  - name: a\n    keys: ip\n",
    "limits:\n  - name: a\n    when: 'request.path == \"/\"'\n",
    "limits:\n  - name: a\n    ips: [10.0.0.0/8]\n",
    "listen: 0.0.0.0:80\nlimits: [{ name: a }]\n",
    "gateway: { tls: { cert: a.pem, key: a.key } }\nlimits: [{ name: a }]\n",
    "gateway: { tls: {} }\nlimits: [{ name: a }]\n",
    "rate_limits: [{ name: a }]\n",
    // In quotes.
    "limits:\n  - name: a\n    limit: \"10\"\n",
    "limits:\n  - name: a\n    shadow: 'true'\n",
    // Numbers and times.
    "limits:\n  - name: a\n    rate: 10r/s\n    burst: 5\n    nodelay: true\n",
    "limits:\n  - name: a\n    rate: fast\n",
    "limits:\n  - name: a\n    algorithm: token_bucket\n    refill: 10r/s\n",
    "limits:\n  - name: a\n    requests_per_unit: 100\n    unit: minute\n",
    "limits:\n  - name: a\n    requests: 100\n    per: 1m\n",
    "limits:\n  - name: a\n    max: 100\n    windowMs: 60000\n",
    "limits:\n  - name: a\n    limit: 100\n    period: 60\n",
    "limits:\n  - name: a\n    limit: 100\n    interval: often\n",
    "limits:\n  - name: a\n    capacity: 5\n",
    "limits:\n  - name: a\n    concurrency: 5\n",
    // Algorithms.
    "limits:\n  - name: a\n    algorithm: gcra\n",
    "limits:\n  - name: a\n    gcra: true\n",
    "limits:\n  - name: a\n    algorithm: token\n",
    "limits:\n  - name: a\n    algorithm: leaky\n",
    "limits:\n  - name: a\n    algorithm: sliding_window\n",
    "limits:\n  - name: a\n    algorithm: Fixed-Window\n",
    // Parts of a key.
    "limits:\n  - name: a\n    key: remote_addr\n",
    "limits:\n  - name: a\n    key: $binary_remote_addr\n",
    "limits:\n  - name: a\n    key: client_ip\n",
    "limits:\n  - name: a\n    key: x_forwarded_for\n",
    "limits:\n  - name: a\n    key: $http_x_api_key\n",
    "limits:\n  - name: a\n    key: user\n",
    "limits:\n  - name: a\n    key: api_key\n",
    "limits:\n  - name: a\n    key: token\n",
    "limits:\n  - name: a\n    key: x-api-key\n",
    "limits:\n  - name: a\n    key: global\n",
    "limits:\n  - name: a\n    key: [ip, eu]\n",
    "limits:\n  - name: a\n    key: id\n",
    "limits:\n  - name: a\n    client_ip: true\n",
    "limits:\n  - name: a\n    api_key: x\n",
    // The rest.
    "limits:\n  - name: a\n    match: { when: true }\n",
    "limits:\n  - name: a\n    enabled: \"false\"\n    comment: old\n",
    // A rate in place of a number.
    "limits:\n  - name: a\n    limit: 10r/s\n",
    "limits:\n  - name: a\n    limit: 100/minute\n",
    "limits:\n  - name: a\n    limit: 5 per 30s\n",
    "limits:\n  - name: a\n    algorithm: token_bucket\n    capacity: 10/s\n",
    // GCRA with the numbers of a window.
    "limits:\n  - name: a\n    algorithm: gcra\n    limit: 100\n    window: 1m\n",
    "limits:\n  - name: a\n    algorithm: GCRA\n    limit: 100\n",
    "limits:\n  - name: a\n    algorithm: gcra\n    limit: 5\n    window: 30s\n",
    "limits:\n  - name: a\n    algorithm: token_bucket\n    limit: 100\n    window: 1m\n",
    "limits:\n  - name: a\n    algorithm: leaky_bucket\n    capacity: 100\n    window: 1h\n",
    // nginx.
    "limits:\n  - name: a\n    rate: 10r/s\n",
    "limits:\n  - name: a\n    rate: 10r/s\n    burst: 5\n",
    "limits:\n  - name: a\n    rate: 30r/m\n    burst: 20\n    nodelay: true\n",
    // Traefik and Go.
    "limits:\n  - name: a\n    average: 100\n    burst: 50\n",
    // express-rate-limit, and other libraries.
    "limits:\n  - name: a\n    windowMs: 900000\n    max: 100\n    keyGenerator: (req) => req.ip\n",
    "limits:\n  - name: a\n    standardHeaders: true\n    legacyHeaders: false\n",
    "limits:\n  - name: a\n    skipSuccessfulRequests: true\n    message: slow down\n",
    "limits:\n  - name: a\n    skipFailedRequests: true\n    statusCode: 429\n",
    "limits:\n  - name: a\n    points: 5\n    duration: 1\n    blockDuration: 60\n",
    "limits:\n  - name: a\n    passOnStoreError: true\n    store: redis\n",
    "limits:\n  - name: a\n    minute: 5\n    policy: local\n",
    "limits:\n  - name: a\n    max_tokens: 10\n    tokens_per_fill: 10\n    fill_interval: 60s\n",
    // Paths of routers, and regular expressions.
    "limits: [{ name: a, match: { path: /api/:id } }]\n",
    "limits: [{ name: a, match: { path: \"/files/:path*\" } }]\n",
    "limits: [{ name: a, match: { path: /users/<id> } }]\n",
    "limits: [{ name: a, match: { path: ^/api } }]\n",
    "limits: [{ name: a, match: { path: ^/api/v1$ } }]\n",
    "limits: [{ name: a, match: { path: .* } }]\n",
    "limits: [{ name: a, match: { path: /api/.* } }]\n",
    "limits: [{ name: a, match: { path: '/users/\\d+' } }]\n",
    "limits: [{ name: a, match: { path: '/users/[0-9]+' } }]\n",
    "limits: [{ name: a, match: { path: '/(a|b)/c' } }]\n",
    // Classes of statuses where only statuses count.
    "gateway: { routes: [{ path: /, upstream: http://h, eject: { statuses: 5xx } }] }\n",
    "gateway: { routes: [{ path: /, upstream: http://h, eject: { statuses: [5xx] } }] }\n",
    "gateway: { routes: [{ path: /, upstream: http://h, eject: { statuses: 503 } }] }\n",
];

/// Files that are not YAML, or use YAML that is not supported.
const YAML: [&str; 17] = [
    "",
    "# nothing but a comment\n",
    "---\n",
    "limits:\n\t- name: a\n",
    "limits:\n  - name: a\n---\nlimits: []\n",
    "limits:\n  - name: \"a\n",
    "limits: [{ name: a }\n",
    "limits:\n  - name: a\n limit: 5\n",
    "limits:\n  - name: a: b\n",
    "limits:\n  - name: a\n    match: { hosts: [*.example.com] }\n",
    "limits:\n  - name: a\n    match: { hosts: [*] }\n",
    "limits:\n  - name: a\n    limit: 5\n    limit: 6\n",
    "limits:\n  - name: !secret a\n",
    "limits:\n  - &a\n    name: a\n    match: *a\n",
    "limits:\n  - name: a\n    <<: 5\n",
    "limits:\n  - name: a\n    { x: y }: 5\n",
    "limits:\n  - name: a\n    key: @user\n",
];

/// Strings with the wrong syntax.
const FORMS: [&str; 50] = [
    "store: memry\n",
    "store: http://user:hunter2@h\n",
    "store: redis://\n",
    "store: redis://a,b\n",
    "store: redis+sentinel://u:hunter2@a:1,b:2\n",
    "store: redis://u:hunter2@h:99999\n",
    "store: redis://ann:hunter2\n",
    "store: redis://h:6379?protocol=resp3\n",
    "store: 'redis+cluster://u:hunter2@a:1,[::1]:x'\n",
    "store: redis+sentinel://u:hunter2@a:1,b:2/mymaster/abc\n",
    "store: redis+cluster://u:hunter2@a:1/7\n",
    "store_timeout: 50 ms\n",
    "max_memory: 512MB\n",
    "gateway: { listen: localhost }\n",
    "gateway: { listen: \":8080\" }\n",
    "gateway: { listen: \"::1:8080\" }\n",
    "gateway: { listen: 300.1.1.1:80 }\n",
    "gateway: { listen: 127.0.0.1:99999 }\n",
    "gateway: { trusted_proxies: [10.1.2.3/8] }\n",
    "gateway: { trusted_proxies: [10.0.0.0/33] }\n",
    "gateway: { trusted_proxies: [proxies] }\n",
    "gateway: { trusted_proxies: [proxies/8] }\n",
    "gateway: { routes: [{ path: /a, upstream: 127.0.0.1:80 }] }\n",
    "gateway: { routes: [{ path: /a, upstream: http://u:hunter2@h }] }\n",
    "gateway: { routes: [{ path: /a, upstream: [\"http://h?x\"] }] }\n",
    "gateway: { routes: [{ path: /a, upstream: \"http://h:\" }] }\n",
    "body: { template: x, content_type: html }\n",
    "jwt: { jwks_file: k, from: body }\n",
    "jwt: { jwks_file: k, algorithms: [none] }\n",
    "limits: [{ name: \"\" }]\n",
    "limits: [{ name: \"a\\nb\" }]\n",
    "limits: [{ name: a, window: 1 minute }]\n",
    "limits: [{ name: a, algorithm: token_bucket, refill: 10 per s }]\n",
    "limits: [{ name: a, key: pth }]\n",
    "limits: [{ name: a, key: header }]\n",
    "limits: [{ name: a, key: heder:x }]\n",
    "limits: [{ name: a, key: claim:sub }]\n",
    "limits: [{ name: a, key: \"header:\" }]\n",
    "limits: [{ name: a, key: \"header:a b\" }]\n",
    "limits: [{ name: a, key: ip/129 }]\n",
    "limits: [{ name: a, key: a/b }]\n",
    "limits: [{ name: a, key: \"cert:\" }]\n",
    "limits: [{ name: a, key: cert:serial }]\n",
    "limits: [{ name: a, plan: cookie:plan }]\n",
    "limits: [{ name: a, count: [401, 6xx] }]\n",
    "limits: [{ name: a, settle: x-cost }]\n",
    "limits: [{ name: a, cost: \" \" }]\n",
    "limits: [{ name: a, cost: \"header:a b\" }]\n",
    "limits: [{ name: a, match: { when: \"\" } }]\n",
    "limits: [{ name: a, exempt: { ips: [\"2001:db8::1/64\"] } }]\n",
];

/// Conditions that no request can meet.
const UNREACHABLE: [&str; 37] = [
    "gateway:\n  routes:\n    - { path: /a, methods: [GET, POST], upstream: echo }\n    - { path: /a, methods: [GET], upstream: echo }\n    - { path: /b/**, upstream: echo }\nlimits: [{ name: a }]\n",
    "limits: [{ name: a, match: { path: api/** } }]\n",
    "limits: [{ name: a, match: { path: \"/api?x=1\" } }]\n",
    "limits: [{ name: a, match: { path: \"/users/{id}\" } }]\n",
    "limits: [{ name: a, match: { path: \"/a b\" } }]\n",
    "limits: [{ name: a, match: { path: /a**b } }]\n",
    "limits: [{ name: a, match: { path: /a/../b } }]\n",
    "limits: [{ name: a, match: { methods: [get] } }]\n",
    "limits: [{ name: a, match: { methods: [PSOT] } }]\n",
    "limits: [{ name: a, match: { methods: [\"*\"] } }]\n",
    "limits: [{ name: a, match: { methods: [\"A B\"] } }]\n",
    "limits: [{ name: a, match: { hosts: [\"https://example.com/\"] } }]\n",
    "limits: [{ name: a, match: { hosts: [\"example.com:443\"] } }]\n",
    "limits: [{ name: a, match: { hosts: [\"::1\"] } }]\n",
    "limits: [{ name: a, match: { hosts: [\"a.*.com\"] } }]\n",
    "limits: [{ name: a, match: { hosts: [\"a..com\"] } }]\n",
    "limits: [{ name: a, match: { headers: { x: \" a\" } } }]\n",
    "limits: [{ name: a, match: { headers: { X-A: a, x-a: b } } }]\n",
    "limits: [{ name: a, match: { when: \"false\" } }]\n",
    "limits: [{ name: a, exempt: { when: \"true\" } }]\n",
    "limits: [{ name: a, exempt: { ips: [0.0.0.0/0, \"::/0\"] } }]\n",
    "limits: [{ name: a, exempt: { ips: [10.0.0.0/8] }, blocked: { ips: [10.0.0.0/8] } }]\n",
    "limits: [{ name: a, key: host, exempt: { keys: [x] }, blocked: { keys: [x] } }]\n",
    "limits: [{ name: a, exempt: { keys: [x] } }]\n",
    "limits: [{ name: a, key: [ip, path], blocked: { keys: [x] } }]\n",
    "limits: [{ name: a, key: ip, blocked: { keys: [[x, y]] } }]\n",
    "limits: [{ name: a, key: ip, blocked: { keys: [not-an-ip, 10.0.0.0/8, \"2001:db8::/48\"] } }]\n",
    "limits: [{ name: a, key: [host, path], exempt: { keys: [[a b, /x/../y]] } }]\n",
    "limits: [{ name: a, key: [method, const:eu], overrides: [{ key: [G T, us], limit: 5 }] }]\n",
    "limits: [{ name: a, key: host, exempt: { keys: [API.test] }, blocked: { keys: [api.test.] } }]\n",
    "limits: [{ name: a, key: ip, overrides: [{ key: \"::ffff:192.0.2.1\", limit: 5 }, { key: 192.0.2.1, limit: 6 }] }]\n",
    "limits: [{ name: a, match: { hosts: [\"[::x]\"] } }]\n",
    "limits: [{ name: a, match: { headers: { Host: \"*:8443\" } } }]\n",
    "limits: [{ name: a, match: { headers: { host: \"api.example.com:8443\" } } }]\n",
    "limits: [{ name: a, match: { headers: { host: \"https://api.example.com\" } } }]\n",
    "gateway: { routes: [{ path: /a, upstream: echo, headers: { x: a, host: \"*:8443\" } }] }\nlimits: [{ name: a }]\n",
    "gateway: { routes: [{ path: /a, upstream: echo, headers: { x: \" a\", X: b } }] }\nlimits: [{ name: a }]\n",
];

/// Numbers that cannot be used.
const NUMBERS: [&str; 52] = [
    "limits: [{ name: a, limit: 10_000 }]\n",
    "limits: [{ name: a, limit: 0 }]\n",
    "limits: [{ name: a, limit: 4294967297 }]\n",
    "limits: [{ name: a, window: 0s }]\n",
    "limits: [{ name: a, window: 20000d }]\n",
    "limits: [{ name: a, segments: 0 }]\n",
    "limits: [{ name: a, segments: 2000 }]\n",
    "limits: [{ name: a, algorithm: token_bucket, capacity: 0 }]\n",
    "limits: [{ name: a, algorithm: token_bucket, refill: 0/s }]\n",
    "limits: [{ name: a, algorithm: token_bucket, capacity: 4000000000, refill: 1/d }]\n",
    "limits: [{ name: a, algorithm: leaky_bucket, overflow: queue, max_wait: 20000d }]\n",
    "limits: [{ name: a, capacity: 5 }]\n",
    "limits: [{ name: a, algorithm: fixed_window, capacity: 5, segments: 2 }]\n",
    "limits: [{ name: a, algorithm: leaky_bucket, max_wait: 5s }]\n",
    "limits: [{ name: a, algorithm: leaky_bucket, overflow: queue }]\n",
    "limits: [{ name: a, cost: 0 }]\n",
    "limits: [{ name: a, limit: 5, cost: 6 }]\n",
    "limits: [{ name: a, cost: 11 }]\n",
    "limits: [{ name: a, cost: { expression: '1', when_error: 0 } }]\n",
    "limits: [{ name: a, cost: { expression: '1', when_error: 11 } }]\n",
    "limits: [{ name: a, cost: { when_error: 11 } }]\n",
    "limits: [{ name: a, key: host, cost: 5, overrides: [{ key: x, limit: 3 }] }]\n",
    "limits: [{ name: a, key: host, overrides: [{ key: x, limit: 0 }] }]\n",
    "limits: [{ name: a, key: host, segments: 1000, window: 1s, overrides: [{ key: x, window: 1us }] }]\n",
    "limits: [{ name: a, key: host, overrides: [{ key: x }] }]\n",
    "limits: [{ name: a, key: ip, overrides: [{ limit: 5 }] }]\n",
    "limits: [{ name: a, key: host, overrides: [{ key: x, capacity: 5 }] }]\n",
    "limits: [{ name: a, key: host, plan: header:p, overrides: [{ key: x, plan: y, limit: 5 }] }]\n",
    "limits: [{ name: a, overrides: [{ plan: gold, limit: 5 }] }]\n",
    "limits: [{ name: a, overrides: [{ key: x, limit: 5 }] }]\n",
    "limits: [{ name: a, key: host, overrides: [{ key: x, limit: 5 }, { key: x, limit: 6 }] }]\n",
    "limits: [{ name: a, algorithm: leaky_bucket, key: host, overrides: [{ key: x, max_wait: 5s }] }]\n",
    "limits: [{ name: a, key: ip, ban: { after: 0, within: 1m, for: 1m } }]\n",
    "limits: [{ name: a, key: ip, ban: { after: 5000000000, within: 1m, for: 1m } }]\n",
    "limits: [{ name: a, key: ip, ban: { after: 5, within: 1us, for: 20000d } }]\n",
    "limits: [{ name: a, count: [401, 99, 600] }]\n",
    "limits: [{ name: a, in_flight: 0 }]\n",
    "limits: [{ name: a, in_flight: 4294967297 }]\n",
    "limits: [{ name: a, in_flight: 5, limit: 10, cost: 2, algorithm: token_bucket, count: failures }]\n",
    "limits: [{ name: a, in_flight: 5, settle: header:x, ban: { after: 1, within: 1m, for: 1m }, consistency: leased }]\n",
    "limits: [{ name: a, in_flight: 5, key: host, overrides: [{ key: x }, { key: y, limit: 5 }, { key: z, in_flight: 0 }] }]\n",
    "limits: [{ name: a, key: host, overrides: [{ key: x, in_flight: 5 }] }]\n",
    "gateway: { workers: 0, max_connections: 0 }\n",
    "gateway: { routes: [{ path: /, upstream: [{ url: http://h, weight: 0 }, { url: http://i, weight: 1001 }] }] }\n",
    "gateway: { routes: [{ path: /, upstream: { url: http://h, weight: 0 }, retries: 11, eject: { after: 0 } }] }\n",
    "gateway: { routes: [{ path: /, upstream: http://h, health_check: { path: /, unhealthy_after: 0, healthy_after: 101 } }] }\n",
    "gateway: { routes: [{ path: /, upstream: http://h, eject: { statuses: [503, 404, 600] } }] }\n",
    "gateway: { routes: [{ path: /, upstream: http://h, upstream_connections: { idle: 0s, max_age: 2d, max_requests: 0 } }] }\n",
    "store_timeout: 0s\nlimits: [{ name: a }]\n",
    "max_memory: 5KiB\nlimits: [{ name: a }]\n",
    "expected_nodes: 0\nlimits: [{ name: a }]\n",
    "expected_nodes: 10001\nlimits: [{ name: a }]\n",
];

/// Names, keys, routes, listeners and tokens that contradict each other.
const TOGETHER: [&str; 51] = [
    "gateway: { proxy_protocol: true }\nservice: { http: { listen: '[::1]:8090', proxy_protocol: true } }\nlimits: [{ name: a, key: ip }]\n",
    "gateway: { routes: [{ path: /**, upstream: 'http://a:1', request_headers: { set: { X-User: guest, x_user: { from: ip } }, add: { X-Ip: a } } }] }\n",
    "gateway: { routes: [{ path: /**, upstream: 'http://a:1', request_headers: { set: { X-Ip: { from: ip } }, add: { x.ip: a } } }] }\n",
    "gateway: { routes: [{ path: /**, upstream: 'http://a:1', request_headers: { set: { Content_Length: { from: ip } } } }] }\n",
    "cors:\n  origins:\n    - https://shop.example.com/\n    - shop.example.com\nlimits: [{ name: a }]\n",
    "gateway:\n  access_log: { format: combined, key: hash }\n  routes: [{ path: /**, upstream: echo }]\n",
    "limits:\n  - name: a\n  - name: b\n  - name: a\n",
    "limits: [&a { name: a }, *a]\n",
    "limits: [{ name: a, missing: deny }]\n",
    "limits: [{ name: a, key: [ip, path, ip] }]\n",
    "limits: [{ name: a, key: ['const:a', 'const:b', 'const:c', 'const:d', 'const:e', 'const:f', 'const:g', 'const:h', 'const:i'] }]\n",
    "limits: [{ name: a, key: jwt:sub }]\n",
    "limits: [{ name: a, plan: jwt:p, overrides: [{ plan: x, limit: 5 }] }]\n",
    "limits: [{ name: a, algorithm: leaky_bucket, overflow: queue, max_wait: 5s, count: failures, settle: header:x }]\n",
    "limits: [{ name: a, algorithm: leaky_bucket, overflow: queue, max_wait: 5s, count: { statuses: [401], when: after } }]\n",
    "limits: [{ name: a, in_flight: 5, count: { when: after } }]\n",
    "limits: [{ name: a, match: { when: \"request.paht == '/'\" } }]\n",
    "limits: [{ name: a, match: { when: \"request.path + 1\" } }]\n",
    "limits: [{ name: a, match: { when: \"request.path\" } }]\n",
    "limits: [{ name: a, match: { when: 'request.ip.inCidr(\"10.0.0.1/8\")' } }]\n",
    "limits: [{ name: a, match: { when: 'request.path.matches(\"(\")' } }]\n",
    "limits:\n  - name: a\n    exempt:\n      when: >-\n        request.method ==\n    cost: \"request.path\"\n",
    "limits: [{ name: a, cost: \"size(request.path, 2)\" }]\n",
    "limits: [{ name: a, exempt: { when: \"jwt.admin == true\" } }]\n",
    "limits: [{ name: a, match: { path: /a/**/b/**/c } }]\n",
    "limits: [{ name: a, match: { when: LONG } }]\n",
    "gateway: { routes: [{ path: /a/**, upstream: http://h }, { path: /a/**/**, upstream: http://i }] }\n",
    "gateway: { routes: [{ path: [/a, /b], respond: {} }, { path: [/b, /c], respond: {} }] }\n",
    "gateway: { routes: [{ path: /a, upstream: http://h, respond: {} }, { path: /b }] }\n",
    "gateway: { routes: [{ path: /a, upstream: [echo, http://h] }] }\n",
    "gateway: { max_head: 1KiB, timeouts: { idle: 0ms } }\n",
    "gateway: { routes: [{ path: /a, upstream: http://h, request_headers: { set: { te: x }, remove: [connection] } }] }\n",
    "gateway: { routes: [{ path: /a, upstream: http://h, request_headers: { set: { a: { from: header:x }, b: { from: const:x }, c: { form: ip }, d: [ip], e: { from: ip/0 } } } }] }\n",
    "gateway: { routes: [{ path: /a, upstream: http://h, request_headers: { set: { a: { from: jwt:sub }, b: { from: cert:cn }, Host: { from: ip }, te: { from: ip } } } }] }\n",
    "gateway:\n  routes:\n    - { path: /a, upstream: [http://h, h2c://i], upstream_tls: { ca: a.pem } }\n    - { path: /b, respond: {}, upstream_tls: {} }\n",
    "gateway: { listen: 127.0.0.1:80 }\nservice: { http: 127.0.0.1:80 }\n",
    "service: { grpc: 127.0.0.1:80, resp: { listen: 127.0.0.1:80 } }\nadmin: { listen: 127.0.0.1:80 }\n",
    "service: { http: { listen: 127.0.0.1:80, hosts: [a.example], max_connections: 0 }, resp: { listen: 127.0.0.1:81, hosts: [a.example] } }\n",
    "jwt: { issuer: x }\n",
    "jwt: { key_file: a, jwks_file: b, algorithms: [RS256] }\n",
    "jwt: { key_file: a }\n",
    "jwt: { key_file: a, algorithms: [HS256, RS256] }\n",
    "jwt: { jwks_file: a, leeway: 2h }\n",
    "admin: {}\n",
    "gateway: { routes: [{ path: /, respond: { status: 99 } }, { path: /a, respond: { status: 1000 } }] }\n",
    "gateway: { routes: [{ path: /, upstream: [http://h/x, 'http://H:80/x/', { url: http://h/x, weight: 2 }, http://h/y, https://h/x] }] }\n",
    "gateway: { routes: [{ path: /, upstream: [{ url: http://h, weight: 5 }, http://h] }] }\n",
    "gateway: { routes: [{ path: /, upstream: [{ url: http://h, weight: 5 }, { url: http://h, weight: 1000 }] }] }\n",
    "gateway: { routes: [{ path: /, upstream: [http://h:99999, http://h:0, 'http://h:', 'http://[::1]:99999'] }] }\n",
    "gateway: { tls: { certificates: [{ cert: a, key: b }], client_certificates: required }, routes: [] }\n",
    "admin: { listen: 127.0.0.1:1, tls: { listen: 127.0.0.1:2, certificates: [{ cert: a, key: b }] } }\n",
];

/// Files that are accepted with a warning.
const WARNINGS: [&str; 18] = [
    "limits: [{ name: a, key: [ip, host], blocked: { keys: [[\"2001:db8::7\", a.test]] } }]\n",
    "store: memory\n",
    "limits: []\n",
    "headers: [ietf, ietf]\nlimits: [{ name: a }]\n",
    "limits: [{ name: a, match: { path: [/a, /a], methods: [GET, GET], hosts: [a, A] } }]\n",
    "limits: [{ name: a, count: [401, 5xx, 401] }]\n",
    "limits: [{ name: a, count: { statuses: [401, 5xx, 401], when: after } }]\n",
    "limits: [{ name: a, plan: header:p }]\n",
    "limits: [{ name: a, ban: { after: 5, within: 1m, for: 1m } }]\n",
    "limits: [{ name: a, match: { when: 'request.query[\"dry_run\"] != \"1\"' } }]\n",
    "limits: [{ name: a, exempt: { when: 'true && request.headers[\"X-Internal\"] == \"1\"' } }]\n",
    "limits: [{ name: a, blocked: { when: 'descriptors.tier == \"x\"' } }]\n",
    "limits: [{ name: a, cost: 'int(request.query.n)' }]\n",
    "limits: [{ name: a, cost: { expression: 'request.query.all(n, int(request.headers[n]) > 0) ? 2 : 1' } }]\n",
    "jwt: { key_file: a, algorithms: [RS256] }\nlimits:\n  - name: a\n    match:\n      when: >-\n        request.method == \"GET\" &&\n        jwt.realm.roles.size() > 2\n",
    "gateway: { trusted_proxies: [0.0.0.0/0] }\nlimits: [{ name: a }]\n",
    "gateway:\n  routes:\n    - { path: [/api/**, /v1], strip_prefix: /v2, upstream: echo }\n    - { path: [/a/**, /b/**], strip_prefix: /b, upstream: echo }\nlimits: [{ name: a }]\n",
    "admin: { listen: 0.0.0.0:8099 }\nlimits: [{ name: a }]\n",
];

/// A file with many problems. A rejected value causes no further problems.
const MANY: &str = "
store: memry
headrs: [legacy]
gateway:
  trusted_proxies: [10.1.2.3/8]
  routes:
    - path: api/**
      upstream: 127.0.0.1:80
limits:
  - name: per-user
    kye: ip
    missing: deny
    algorithm: token-bucket
    capacity: 100
    exempt: { keys: [ops] }
  - limit: 5
  - name: per-user
    algorithm: fixed_window
    limit: 0
    capacity: 7
    cost: 20
    overrides:
      - { plan: gold, limit: ten }
      - { key: x, limit: 5000 }
    ban: { after: 0, within: 1m, for: 10m }
";

fn message(text: &str) -> String {
    match RuleFile::parse("tollgate.yaml", text) {
        Ok(file) => file.warnings().to_string(),
        Err(problems) => problems.to_string(),
    }
}

fn messages(files: &[&str]) -> String {
    files.iter().fold(String::new(), |mut out, text| {
        let text = text.replace("LONG", &format!("\"{}\"", "true || ".repeat(1000)));
        let shown: String = text.chars().take(200).collect();
        write!(out, "{}\n=> {}\n\n", shown.trim_end(), message(&text).replace('\n', "\n=> "))
            .expect("a string takes it");
        out
    })
}

fn problems(text: &str) -> Problems {
    RuleFile::parse("tollgate.yaml", text).expect_err("should be refused")
}

#[test]
fn yaml_errors_name_the_fix() {
    insta::assert_snapshot!(messages(&YAML));
}

#[test]
fn wrong_types_and_unknown_keys_name_the_fix() {
    insta::assert_snapshot!(messages(&SHAPES));
}

#[test]
fn keys_of_other_limiters_lead_to_ours() {
    insta::assert_snapshot!(messages(&MIGRANTS));
}

#[test]
fn malformed_values_name_the_fix() {
    insta::assert_snapshot!(messages(&FORMS));
}

#[test]
fn unreachable_limits_are_reported() {
    insta::assert_snapshot!(messages(&UNREACHABLE));
}

#[test]
fn impossible_numbers_are_reported() {
    insta::assert_snapshot!(messages(&NUMBERS));
}

#[test]
fn contradictory_settings_are_reported() {
    insta::assert_snapshot!(messages(&TOGETHER));
}

#[test]
fn suspicious_settings_are_warnings() {
    insta::assert_snapshot!(messages(&WARNINGS));
}

#[test]
fn every_file_that_should_be_refused_is_refused() {
    for text in YAML.iter().chain(&SHAPES).chain(&MIGRANTS).chain(&FORMS).chain(&UNREACHABLE).chain(&NUMBERS) {
        assert!(RuleFile::parse("tollgate.yaml", text).is_err(), "{text}");
    }
    for text in WARNINGS {
        assert!(RuleFile::parse("tollgate.yaml", text).is_ok_and(|file| file.warnings().iter().count() > 0), "{text}");
    }
}

#[test]
fn all_problems_are_reported_in_file_order() {
    insta::assert_snapshot!(problems(MANY).to_string());
}

#[test]
fn a_problem_has_its_position_its_text_and_its_fix() {
    let problems = problems("limits:\n  - name: a\n    algorithm: token_bucket\n    capacity: 0   # why not\n");
    let problem = problems.iter().next().unwrap();
    assert_eq!((problem.position().line, problem.position().column), (4, 15));
    assert_eq!(problem.text(), "0   # why not");
    assert_eq!(
        (problem.message(), problem.fix()),
        ("capacity 0 admits nothing", "use 1 or more, or `blocked` to refuse every request")
    );
}

#[test]
fn a_semicolon_in_an_expression_belongs_to_the_problem() {
    let problems = problems("limits: [{ name: a, match: { when: 'request.path.matches(\"a; (\")' } }]\n");
    let problem = problems.iter().next().unwrap();
    assert!(problem.message().starts_with("the pattern `a; (` cannot be read"), "{problem}");
    assert_eq!(problem.fix(), "write a regular expression");
}

#[test]
fn columns_count_characters() {
    let problems = problems("limits: [{ name: \"gr\u{f6}\u{df}e\", limit: 0 }]\n");
    assert_eq!(problems.iter().next().unwrap().position().column, 34);
}

#[test]
fn a_password_is_not_repeated() {
    for text in ["store: redis+x://u:hunter2@h\n", "gateway: { routes: [{ path: /, upstream: http://u:hunter2@h }] }\n"]
    {
        let problems = problems(text);
        let all: String = problems.iter().map(|problem| format!("{problem} {}", problem.text())).collect();
        assert!(!all.contains("hunter2"), "{all}");
    }
}

#[test]
fn a_file_in_another_encoding_is_refused_where_it_begins() {
    let problems = RuleFile::parse("tollgate.yaml", b"limits:\n  - name: gr\xF6\n").unwrap_err();
    assert_eq!(problems.to_string(), "tollgate.yaml:2:13: the file is not UTF-8: save it as UTF-8");
    // YAML ends lines at carriage returns too.
    let problems = RuleFile::parse("tollgate.yaml", b"limits:\r\n  - name: a\r    key: gr\xF6\r").unwrap_err();
    assert_eq!(problems.to_string(), "tollgate.yaml:3:12: the file is not UTF-8: save it as UTF-8");
}

#[test]
fn control_characters_of_an_expression_are_not_repeated() {
    let text = r#"limits: [{ name: a, match: { when: "1 |\0\e[2J\n| 2" } }]"#;
    let problems = problems(text);
    assert!(problems.iter().count() > 0);
    for problem in problems.iter() {
        assert!(!problem.to_string().contains(char::is_control), "{:?}", problem.to_string());
    }
}
