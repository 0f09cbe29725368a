//! A client of the admin API.

use std::net::SocketAddr;

use serde_json::Value;
use testkit::http1::{Connection, Response};

/// A request to the admin API.
#[derive(Clone)]
pub(crate) struct AdminRequest {
    method: &'static str,
    target: String,
    headers: Vec<(String, String)>,
    body: String,
}

impl AdminRequest {
    pub(crate) fn get(target: &str) -> Self {
        Self { method: "GET", target: target.to_owned(), headers: Vec::new(), body: String::new() }
    }

    pub(crate) fn post(target: &str, body: &Value) -> Self {
        Self { method: "POST", ..Self::get(target) }.header("content-type", "application/json").body(&body.to_string())
    }

    pub(crate) fn post_rules(target: &str, rules: &str) -> Self {
        Self { method: "POST", ..Self::get(target) }.header("content-type", "application/yaml").body(rules)
    }

    pub(crate) fn put_rules(rules: &str, version: &str) -> Self {
        Self { method: "PUT", ..Self::get("/v1/rules") }
            .header("content-type", "application/yaml")
            .header("if-match", &format!("\"{version}\""))
            .body(rules)
    }

    /// Sets a header.
    pub(crate) fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.retain(|(known, _)| known != name);
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(known, _)| known != name);
        self
    }

    pub(crate) fn body(mut self, body: &str) -> Self {
        body.clone_into(&mut self.body);
        self
    }

    pub(crate) fn text(&self) -> String {
        let Self { method, target, headers, body } = self;
        let has_host = headers.iter().any(|(name, _)| name == "host");
        let host = if has_host { "" } else { "host: 127.0.0.1\r\n" };
        let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        format!("{method} {target} HTTP/1.1\r\n{host}{headers}content-length: {}\r\n\r\n{body}", body.len())
    }

    pub(crate) fn send(&self, address: SocketAddr) -> Response {
        Connection::to(address).ask(self.text())
    }

    /// Sends it, and returns the JSON of a response with this status.
    #[track_caller]
    pub(crate) fn expect(&self, status: u16, address: SocketAddr) -> Value {
        let response = self.send(address);
        assert_eq!(response.status, status, "{}: {}", self.target, response.text());
        response.json()
    }
}
