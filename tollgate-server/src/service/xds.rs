//! The xDS client: receives rate limits in the format of envoyproxy/ratelimit from a management server.
//!
//! Speaks ADS, the state-of-the-world variant: each response has all resources of a type and is accepted (ACK) or
//! rejected (NACK) as a whole. The last configuration that was accepted stays in force while the server cannot be
//! reached. Deliberately not here: applying the configuration, which is a reload of rules.

mod bounds;
mod resources;
mod settings;
mod status;

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::uri::PathAndQuery;
use prost::Message;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tollgate::internal::is_control_or_format;
use tollgate_config::internal::DomainConfig;
use tollgate_telemetry::notice;
use tonic::client::Grpc;

use self::bounds::{MAX_RESPONSE_BYTES, ResponseId, UndecodedResponses};
pub(crate) use self::settings::XdsSettings;
pub(crate) use self::status::XdsStatus;
use super::proto::envoy::config::core::v3::Node;
use super::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use super::proto::google::rpc::Status as RpcStatus;

/// The type of the resources.
const TYPE_URL: &str = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig";

/// The method of the aggregated discovery service.
const METHOD: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";

/// The waits between two connections: the first, and the longest. Each is longer than the one before, and random, so
/// that nodes that lost the same server do not return together.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// The code of a response that is rejected: `INVALID_ARGUMENT`.
const INVALID_ARGUMENT: i32 = 3;

/// The longest message of a rejection.
const MAX_MESSAGE_BYTES: usize = 8 << 10;

/// The longest reason in the log for a connection that ended.
const MAX_REASON_BYTES: usize = 200;

/// A configuration that the server has sent.
pub(crate) struct XdsUpdate {
    pub(crate) domains: Vec<DomainConfig>,
    pub(crate) version: String,
    /// Takes the result: an error rejects the configuration.
    pub(crate) result: oneshot::Sender<Result<(), String>>,
}

/// A running client. It ends when it is dropped.
pub(crate) struct XdsClient {
    url: String,
    updates: mpsc::Receiver<XdsUpdate>,
    task: JoinHandle<()>,
}

impl XdsClient {
    pub(crate) fn start(settings: XdsSettings, status: XdsStatus) -> Self {
        let (sender, updates) = mpsc::channel(1);
        let url = settings.url().to_owned();
        status.start();
        let session = Session { settings, status, updates: sender, accepted: String::new() };
        Self { url, updates, task: tokio::spawn(session.run()) }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Waits for the next configuration.
    pub(crate) async fn next(&mut self) -> XdsUpdate {
        match self.updates.recv().await {
            Some(update) => update,
            None => std::future::pending().await,
        }
    }
}

impl Drop for XdsClient {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Session {
    settings: XdsSettings,
    status: XdsStatus,
    updates: mpsc::Sender<XdsUpdate>,
    /// The version of the last configuration that was accepted.
    accepted: String,
}

/// The reason that a connection ended, and whether the server had answered on it.
struct Ended {
    reason: String,
    had_answer: bool,
}

impl Session {
    async fn run(mut self) {
        let (mut wait, mut last_reason) = (FIRST_WAIT, String::new());
        while !self.updates.is_closed() {
            let Ended { reason, had_answer } = self.connection().await;
            self.status.disconnected();
            if had_answer {
                (wait, last_reason) = (FIRST_WAIT, String::new());
            }
            // A server that stays away is reported once.
            if reason != last_reason {
                let url = self.settings.url();
                let kept = if self.accepted.is_empty() {
                    "no configuration was received yet"
                } else {
                    "the last configuration stays in force"
                };
                notice::warn(format_args!(
                    "xDS server {url} is not connected: {reason}; {kept}, and the client retries"
                ));
                last_reason = reason;
            }
            sleep(with_jitter(wait)).await;
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }

    /// Connects, and handles responses until the connection ends.
    async fn connection(&mut self) -> Ended {
        let mut had_answer = false;
        let reason = match self.responses(&mut had_answer).await {
            Ok(()) => "the server closed the stream".to_owned(),
            Err(reason) => reason,
        };
        Ended { reason, had_answer }
    }

    async fn responses(&mut self, had_answer: &mut bool) -> Result<(), String> {
        let channel = self.settings.connect().await?;
        let mut client = Grpc::new(channel).max_decoding_message_size(MAX_RESPONSE_BYTES);
        client.ready().await.map_err(|error| error.to_string())?;
        // The first request has no version: the server sends all resources, also if it counts versions anew.
        let first = DiscoveryRequest { node: Some(self.node()), type_url: TYPE_URL.to_owned(), ..Default::default() };
        let (requests, queue) = mpsc::channel(1);
        requests.send(first).await.map_err(|error| error.to_string())?;
        let queue = stream::unfold(queue, async |mut queue| queue.recv().await.map(|request| (request, queue)));
        let method = PathAndQuery::from_static(METHOD);
        let response = client.streaming(tonic::Request::new(queue), method, UndecodedResponses).await;
        let response = response.map_err(|status| describe(&status))?;
        let mut responses = response.into_inner();
        self.status.connected();
        while let Some(response) = responses.message().await.map_err(|status| describe(&status))? {
            *had_answer = true;
            let ResponseId { version_info: version, type_url, nonce } = ResponseId::decode(response.clone())
                .map_err(|error| format!("the server sent a response that cannot be decoded: {error}"))?;
            let result = self.apply(&type_url, response).await;
            let error_detail = match result {
                Ok(()) => {
                    self.status.accepted(&version);
                    self.accepted = version;
                    None
                }
                Err(mut message) => {
                    self.status.rejected();
                    shorten(&mut message, MAX_MESSAGE_BYTES);
                    Some(RpcStatus { code: INVALID_ARGUMENT, message, ..Default::default() })
                }
            };
            let request = DiscoveryRequest {
                version_info: self.accepted.clone(),
                type_url: TYPE_URL.to_owned(),
                response_nonce: nonce,
                error_detail,
                ..Default::default()
            };
            requests.send(request).await.map_err(|_| "the server closed the stream".to_owned())?;
        }
        Ok(())
    }

    /// Has a response applied, and waits for the result.
    async fn apply(&self, type_url: &str, response: Bytes) -> Result<(), String> {
        if type_url != TYPE_URL {
            return Err(format!("unexpected resources of type `{type_url}`: send only those of type {TYPE_URL}"));
        }
        bounds::check(&response)?;
        let response = DiscoveryResponse::decode(response)
            .map_err(|error| format!("the response cannot be decoded: {error}: send a valid DiscoveryResponse"))?;
        let domains = resources::read(&response.resources)?;
        let (result, applied) = oneshot::channel();
        let update = XdsUpdate { domains, version: response.version_info, result };
        let stopping = "the rate limiter is stopping";
        self.updates.send(update).await.map_err(|_| stopping.to_owned())?;
        applied.await.unwrap_or_else(|_| Err(stopping.to_owned()))
    }

    fn node(&self) -> Node {
        Node { id: self.settings.node_id().to_owned(), user_agent_name: "tollgate".to_owned(), ..Node::default() }
    }
}

/// Describes the error of a call without the parts that repeat.
fn describe(status: &tonic::Status) -> String {
    let mut text = match status.message() {
        "" => status.code().description().to_owned(),
        message => message.to_owned(),
    };
    shorten(&mut text, MAX_REASON_BYTES);
    text.chars().map(|letter| if is_control_or_format(letter) { ' ' } else { letter }).collect()
}

/// Shortens a text to at most `max_bytes`, without splitting a character.
fn shorten(text: &mut String, max_bytes: usize) {
    let is_whole = |end: &usize| text.is_char_boundary(*end);
    let end = (0..=max_bytes.min(text.len())).rev().find(is_whole);
    text.truncate(end.unwrap_or_default());
}

/// Returns a random time between half of `wait` and all of it.
fn with_jitter(wait: Duration) -> Duration {
    let half = wait / 2;
    let share = RandomState::new().hash_one(()) % 1024;
    half + half * (share as u32) / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_stay_between_half_and_the_whole() {
        for _ in 0..100 {
            let wait = with_jitter(LONGEST_WAIT);
            assert!(wait >= LONGEST_WAIT / 2 && wait <= LONGEST_WAIT);
        }
    }
}
