//! Servers whose pages of metrics together have every metric.

use std::collections::BTreeMap;

use tempfile::TempDir;

use crate::folder::folder_with;
use crate::gateway::Gateway;
use crate::http1::{Connection, Response};
use crate::redis::RedisServer;
use crate::upstream::{HELLO, upstream};

/// A gateway with its counts in memory, and one on Redis. Both have answered requests.
pub struct EveryMetric {
    /// Has the metrics of tables, tokens, limits that learn and an xDS server.
    pub in_memory: Gateway,
    /// Has the metrics of the store.
    pub on_redis: Gateway,
    /// The store of the second gateway.
    pub redis: RedisServer,
    /// The files that the rules of the first gateway name.
    _files: TempDir,
}

impl EveryMetric {
    /// Starts both.
    pub fn start() -> Self {
        let secret = "0123456789abcdef0123456789abcdef";
        let files = folder_with(&[("secret.key", secret), ("tokens", secret)]);
        let (key_file, tokens_file) = (files.path().join("secret.key"), files.path().join("tokens"));
        let routes = format!("routes: [{{ name: shop, path: '/**', upstream: 'http://{}' }}]", upstream(HELLO));
        let in_memory = Gateway::with_admin(&format!(
            "jwt: {{ key_file: '{}', algorithms: [HS256] }}
service: {{ http: {{ listen: '127.0.0.1:0', tokens_file: '{}' }}, xds: 'http://127.0.0.1:1' }}
gateway: {{ workers: 2, {routes} }}
limits:
  - {{ name: per-token, key: 'jwt:sub', limit: 2, window: 10220d, match: {{ path: /tokens }} }}
  - {{ name: per-client, key: ip, limit: 2, window: 10220d }}
  - {{ name: learning, key: ip, limit: {{ learn: {{ from: 10, to: 20 }} }}, window: 1m }}
  - {{ name: tried, key: ip, limit: 1, window: 10220d, shadow: true }}
  - {{ name: searches, limit: 90, window: 1h, match: {{ when: 'int(request.query[\"page\"]) > 9' }} }}
",
            key_file.display(),
            tokens_file.display()
        ));
        let redis = RedisServer::start();
        let on_redis = Gateway::with_admin(&format!(
            "store: {}
store_timeout: 5s
gateway: {{ workers: 2, {routes} }}
limits:
  - {{ name: per-client, key: ip, limit: 2, window: 10220d, match: {{ path: /few }} }}
  - {{ name: all, algorithm: token_bucket, capacity: 4000, refill: 4000/s, consistency: leased }}
",
            redis.url()
        ));
        for (gateway, path) in [(&in_memory, "/"), (&in_memory, "/tokens"), (&on_redis, "/"), (&on_redis, "/few")] {
            for _ in 0..10 {
                gateway.get(path);
            }
        }
        Self { in_memory, on_redis, redis, _files: files }
    }

    /// Returns the pages of both in the format for this `Accept` header.
    pub fn pages(&self, accept: &str) -> [String; 2] {
        [&self.in_memory, &self.on_redis].map(|gateway| metrics(gateway, accept).text().to_owned())
    }

    /// Returns the names of all metrics, as the samples have them, with their types.
    pub fn types(&self) -> BTreeMap<String, String> {
        let pages = self.pages("text/plain").concat();
        let types = pages.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
        types.map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect()
    }
}

/// Requests the page of metrics with this `Accept` header.
pub fn metrics(gateway: &Gateway, accept: &str) -> Response {
    let head = format!("GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\naccept: {accept}\r\n\r\n");
    Connection::to(gateway.admin()).ask(head)
}
