//! Configuration of envoyproxy/ratelimit, from files and from a real xDS server.

mod files;
#[path = "../../src/service/proto.rs"]
mod proto;
mod xds;
mod xds_server;

use serde_json::{Value, json};
use testkit::service::Server;

/// Takes one unit of a key, and returns what is left; `None` if there is no such limit.
fn remaining(server: &Server, limit: &str, key: &str) -> Option<i64> {
    let response = server.connect().post(json!({ "limit": limit, "key": key }).to_string());
    match response.status {
        200 => {
            let decision: Value = response.json();
            let is_allowed = decision["allowed"].as_bool().expect("a decision");
            Some(if is_allowed { decision["remaining"].as_i64().expect("a number") } else { -1 })
        }
        400 => None,
        status => panic!("{status}: {}", response.text()),
    }
}
