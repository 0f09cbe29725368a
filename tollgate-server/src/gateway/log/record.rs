//! The data of one line, collected while the request is served.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::header::{HOST, REFERER, USER_AGENT};
use http::{HeaderValue, Method, StatusCode, Uri, Version};
use tollgate::Outcome;
use tollgate::http::{Headers, Refusal, TokenError};
use tollgate::rules::{Facts, TrustedProxies};

use super::super::client::Client;
use super::super::fault::Fault;
use super::super::target::Target;
use super::AccessLog;
use crate::decisions::DecisionLabel;

/// The status of a request whose client left before the response, as in nginx.
const CLIENT_LEFT: u16 = 499;

/// The logged facts of a request.
pub(in super::super) struct Record {
    log: Arc<AccessLog>,
    worker: usize,
    pub(super) client: IpAddr,
    /// The request line, if it could be parsed.
    pub(super) line: Option<RequestLine>,
    host: Option<HeaderValue>,
    pub(super) user_agent: Option<HeaderValue>,
    pub(super) referer: Option<HeaderValue>,
    pub(super) limit: Option<Box<str>>,
    outcome: Option<DecisionLabel>,
    /// The reason why the gateway refused it as malformed or ambiguous.
    pub(super) reason: Option<&'static str>,
    /// The reason why its token was rejected, if a rule reads one.
    pub(super) token: Option<TokenError>,
    pub(super) delay: Duration,
    pub(super) id: Option<HeaderValue>,
    pub(super) upstream: Option<Arc<Target>>,
    /// The error of that upstream.
    pub(super) fault: Option<Box<str>>,
}

/// The request line.
pub(super) struct RequestLine {
    pub(super) method: Method,
    uri: Uri,
    version: Version,
}

/// The end of a request.
pub(in super::super) struct Completion<'a> {
    pub(in super::super) status: Option<StatusCode>,
    pub(in super::super) sent_bytes: u64,
    /// Whether the upstream or the gateway cut off the response.
    pub(in super::super) is_broken: bool,
    pub(in super::super) nanos: u64,
    pub(in super::super) route: Option<&'a str>,
}

impl Record {
    pub(in super::super) fn new(
        (method, uri, version): (Method, Uri, Version),
        headers: Headers<'_>,
        client: &Client,
        proxies: &TrustedProxies,
        (log, worker): (&Arc<AccessLog>, usize),
    ) -> Self {
        let peer = client.address.ip();
        let facts = Facts::new(method.as_str(), "/").headers(headers).peer(peer);
        let value = |name| HeaderValue::from_bytes(headers.get_named(name)?).ok();
        let address = proxies.client(&facts).unwrap_or(peer);
        Self {
            host: value(&HOST),
            user_agent: value(&USER_AGENT),
            referer: value(&REFERER),
            line: Some(RequestLine { method, uri, version }),
            ..Self::unparsed(address, (log, worker))
        }
    }

    /// Returns the record of a request that could not be parsed.
    pub(in super::super) fn unparsed(client: IpAddr, (log, worker): (&Arc<AccessLog>, usize)) -> Self {
        Self {
            log: Arc::clone(log),
            worker,
            client,
            line: None,
            host: None,
            user_agent: None,
            referer: None,
            limit: None,
            outcome: None,
            reason: None,
            token: None,
            delay: Duration::ZERO,
            id: None,
            upstream: None,
            fault: None,
        }
    }

    pub(in super::super) fn note_reason(&mut self, reason: &'static str) {
        self.reason = Some(reason);
    }

    pub(in super::super) fn note_outcome(&mut self, outcome: &Outcome) {
        if let Some(Refusal::Unreadable(request)) = outcome.refusal() {
            self.reason = Some(request.reason);
        }
        self.token = outcome.token().error();
        if let Some(limit) = outcome.limit() {
            (self.limit, self.outcome) = (Some(limit.into()), Some(DecisionLabel::of(outcome)));
            self.delay = outcome.delay();
        }
    }

    pub(in super::super) fn note_id(&mut self, id: &HeaderValue) {
        self.id = Some(id.clone());
    }

    pub(in super::super) fn note_upstream(&mut self, upstream: &Arc<Target>) {
        self.upstream = Some(Arc::clone(upstream));
    }

    pub(in super::super) fn note_fault(&mut self, fault: &Fault) {
        self.fault = Some(fault.to_string().into());
    }

    /// Writes the line.
    pub(in super::super) fn write(&self, completion: &Completion<'_>) {
        self.log.write(self.worker, self, completion);
    }

    pub(super) fn host(&self) -> Option<&[u8]> {
        let named = self.line.as_ref().and_then(|line| line.uri.authority());
        named.map(|authority| authority.as_str().as_bytes()).or_else(|| self.host.as_ref().map(HeaderValue::as_bytes))
    }

    /// Returns the decision; `none` if no limit applied to the request.
    pub(super) fn decision(&self) -> &'static str {
        self.outcome.map_or("none", DecisionLabel::as_str)
    }
}

impl RequestLine {
    /// Returns the path and the query.
    pub(super) fn target(&self) -> &str {
        self.uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str)
    }

    pub(super) fn protocol(&self) -> &'static str {
        match self.version {
            Version::HTTP_2 => "HTTP/2.0",
            Version::HTTP_10 => "HTTP/1.0",
            _ => "HTTP/1.1",
        }
    }
}

impl Completion<'_> {
    pub(super) fn status(&self) -> u16 {
        self.status.map_or(CLIENT_LEFT, |status| status.as_u16())
    }
}
