//! Envoy's rate limit service, with a real gRPC client.

use std::net::SocketAddr;

use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message as _;
use prost_types::value::Kind;
use serde_json::json;
use testkit::folder::folder_with;
use testkit::redis::RedisServer;
use testkit::tollgate::{Process, RULES};
use testkit::wait::PATIENCE;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code as GrpcCode, Request, Status, Streaming};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use crate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use crate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{Entry, RateLimitOverride};
use crate::proto::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};
use crate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_service_server::SERVICE_NAME;
use crate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};

const LIMITS: &str = "
limits:
  - { name: per-user, key: 'descriptor:user', algorithm: sliding_window_log, limit: 3, window: 1h }
  - { name: per-path, key: 'descriptor:path', match: { domain: edge }, algorithm: sliding_window_log, limit: 1, window: 1m }
  - { name: per-address, key: ip, limit: 1, window: 1h }
";

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

fn server(settings: &str) -> (Process, SocketAddr) {
    let folder = folder_with(&[(RULES, &format!("{settings}{LIMITS}")), ("tokens", TOKEN)]);
    let server = Process::start(folder, &["serve", "--config", RULES]);
    let address = server.address_of("decisions grpc");
    (server, address)
}

async fn connect(address: SocketAddr) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("the address is valid");
    endpoint.connect().await.expect("the server accepts connections")
}

async fn plain() -> (Process, RateLimitServiceClient<Channel>) {
    let (server, address) = server("service: { grpc: '127.0.0.1:0' }");
    (server, RateLimitServiceClient::new(connect(address).await))
}

fn descriptor(name: &str, value: &str) -> RateLimitDescriptor {
    let entries = vec![Entry { key: name.to_owned(), value: value.to_owned() }];
    RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }
}

async fn check(
    client: &mut RateLimitServiceClient<Channel>,
    descriptors: Vec<RateLimitDescriptor>,
) -> Result<RateLimitResponse, Status> {
    let request = RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 0 };
    client.should_rate_limit(request).await.map(tonic::Response::into_inner)
}

fn remaining(status: &DescriptorStatus) -> (Code, u32) {
    (status.code(), status.limit_remaining)
}

#[tokio::test]
async fn denied_requests_are_counted_for_the_admin_api() {
    let admin = "admin: { listen: '127.0.0.1:0', show_keys: true }";
    let (server, address) = server(&format!("service: {{ grpc: '127.0.0.1:0' }}\n{admin}"));
    let mut client = RateLimitServiceClient::new(connect(address).await);
    for _ in 0..5 {
        check(&mut client, vec![descriptor("user", "ann")]).await.expect("a valid request");
    }
    let request = "GET /v1/top HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let top = testkit::http1::ask(server.address_of("admin"), request).json();
    let key = &top["keys"][0];
    assert_eq!(
        (&key["limit"], &key["parts"], &key["count"]),
        (&json!("per-user"), &json!(["ann"]), &json!(2)),
        "{top}"
    );
}

#[tokio::test]
async fn descriptors_are_decided_all_or_nothing_on_redis() {
    let redis = RedisServer::start();
    let store = format!("store: '{}'\nstore_timeout: 5s\n", redis.url());
    let (_server, address) = server(&format!("{store}service: {{ grpc: '127.0.0.1:0' }}"));
    let mut client = RateLimitServiceClient::new(connect(address).await);
    let both = || vec![descriptor("user", "ann"), descriptor("path", "/a")];
    let allowed = check(&mut client, both()).await.expect("a valid request");
    assert_eq!(allowed.statuses.iter().map(remaining).collect::<Vec<_>>(), [(Code::Ok, 2), (Code::Ok, 0)]);
    let denied = check(&mut client, both()).await.expect("a valid request");
    let codes: Vec<_> = denied.statuses.iter().map(DescriptorStatus::code).collect();
    assert_eq!((denied.overall_code(), &codes[..]), (Code::OverLimit, &[Code::Ok, Code::OverLimit][..]));
    // This node knows the denial by now. The other descriptor shows what it has left nevertheless.
    let again = check(&mut client, both()).await.expect("a valid request");
    for denied in [&denied, &again] {
        assert_eq!(remaining(&denied.statuses[0]), (Code::Ok, 2));
        assert!(denied.statuses[0].duration_until_reset.is_some_and(|time| (3_000..=3_600).contains(&time.seconds)));
        assert_eq!(remaining(&denied.statuses[1]), (Code::OverLimit, 0));
    }
    // Hits on the same key are added up, and the denied requests took nothing: two of the three are left.
    let hits = |hits| RateLimitDescriptor { hits_addend: Some(hits), ..descriptor("user", "ann") };
    let denied = check(&mut client, vec![hits(1), hits(2)]).await.expect("a valid request");
    assert_eq!(denied.overall_code(), Code::OverLimit);
    let allowed = check(&mut client, vec![hits(1), hits(1)]).await.expect("a valid request");
    assert_eq!(allowed.statuses.iter().map(remaining).collect::<Vec<_>>(), [(Code::Ok, 0), (Code::Ok, 0)]);
}

#[tokio::test]
async fn descriptors_are_decided_all_or_nothing() {
    let (_server, mut client) = plain().await;
    let both = || vec![descriptor("user", "ann"), descriptor("path", "/a"), descriptor("other", "x")];
    let allowed = check(&mut client, both()).await.expect("a valid request");
    assert_eq!(allowed.overall_code(), Code::Ok);
    let statuses: Vec<_> = allowed.statuses.iter().map(remaining).collect();
    assert_eq!(statuses, [(Code::Ok, 2), (Code::Ok, 0), (Code::Ok, 0)]);
    let limits: Vec<_> = allowed
        .statuses
        .iter()
        .map(|status| status.current_limit.as_ref().map(|limit| (&*limit.name, limit.requests_per_unit, limit.unit())))
        .collect();
    assert_eq!(limits, [Some(("per-user", 3, Unit::Hour)), Some(("per-path", 1, Unit::Minute)), None]);
    let header = |response: &RateLimitResponse, name: &str| {
        response.response_headers_to_add.iter().find(|header| header.key == name).map(|header| header.value.clone())
    };
    assert_eq!(header(&allowed, "x-ratelimit-remaining").as_deref(), Some("0"));
    assert!(allowed.raw_body.is_empty());

    let denied = check(&mut client, both()).await.expect("a valid request");
    assert_eq!(denied.overall_code(), Code::OverLimit);
    let statuses: Vec<_> = denied.statuses.iter().map(remaining).collect();
    // Nothing was taken from ann.
    assert_eq!(statuses, [(Code::Ok, 2), (Code::OverLimit, 0), (Code::Ok, 0)]);
    assert!(denied.statuses[1].duration_until_reset.is_some_and(|time| (0..=60).contains(&time.seconds)));
    assert!(header(&denied, "retry-after").is_some());
    assert_eq!(header(&denied, "content-type").as_deref(), Some("application/json"));
    assert!(denied.raw_body.starts_with(br#"{"error":"rate_limit_exceeded""#));
    let metadata = denied.dynamic_metadata.expect("a denial has metadata").fields;
    assert_eq!(metadata["limit"].kind, Some(Kind::StringValue("per-path".to_owned())));
    assert_eq!(metadata["reason"].kind, Some(Kind::StringValue("limited".to_owned())));
}

#[tokio::test]
async fn hits_are_taken_peeked_and_refunded() {
    let (_server, mut client) = plain().await;
    let with_hits = |hits, is_negative_hits| RateLimitDescriptor {
        hits_addend: Some(hits),
        is_negative_hits,
        ..descriptor("user", "ann")
    };
    let mut status = async |descriptor| {
        let response = check(&mut client, vec![descriptor]).await.expect("a valid request");
        remaining(&response.statuses[0])
    };
    assert_eq!(status(with_hits(2, false)).await, (Code::Ok, 1));
    assert_eq!(status(with_hits(2, false)).await, (Code::OverLimit, 1));
    assert_eq!(status(with_hits(0, false)).await, (Code::Ok, 1));
    assert_eq!(status(with_hits(1, true)).await, (Code::Ok, 2));
    assert_eq!(status(with_hits(2, false)).await, (Code::Ok, 0));
    // A refund gives back at most what was taken.
    assert_eq!(status(with_hits(100, true)).await, (Code::Ok, 3));

    let request = RateLimitRequest {
        domain: "edge".to_owned(),
        descriptors: vec![descriptor("user", "bob"), with_hits(1, false)],
        hits_addend: 3,
    };
    let response = client.should_rate_limit(request).await.expect("a valid request").into_inner();
    assert_eq!(response.statuses.iter().map(remaining).collect::<Vec<_>>(), [(Code::Ok, 0), (Code::Ok, 2)]);
}

#[tokio::test]
async fn a_limit_in_the_descriptor_replaces_those_of_the_rule_file() {
    let (_server, mut client) = plain().await;
    let with_limit = |requests_per_unit, unit| RateLimitDescriptor {
        limit: Some(RateLimitOverride { requests_per_unit, unit }),
        ..descriptor("user", "ann")
    };
    for expected in [(Code::Ok, 1), (Code::Ok, 0), (Code::OverLimit, 0)] {
        let response = check(&mut client, vec![with_limit(2, 3), descriptor("user", "bob")]).await.expect("valid");
        assert_eq!(remaining(&response.statuses[0]), expected);
        assert_eq!(response.overall_code(), expected.0);
    }
    // The denied request took nothing from bob.
    let response = check(&mut client, vec![descriptor("user", "bob")]).await.expect("valid");
    assert_eq!(remaining(&response.statuses[0]), (Code::Ok, 0));
    let response = check(&mut client, vec![with_limit(0, 3)]).await.expect("valid");
    assert_eq!(response.overall_code(), Code::OverLimit);
    let error = check(&mut client, vec![with_limit(1, 0)]).await.expect_err("the unit is unknown");
    assert_eq!(error.code(), GrpcCode::InvalidArgument);
    assert!(error.message().starts_with("descriptors[0].limit.unit is"), "{error}");
}

#[tokio::test]
async fn limits_in_descriptors_are_all_or_nothing() {
    let (_server, mut client) = plain().await;
    let with_limit = |user, requests_per_unit| RateLimitDescriptor {
        limit: Some(RateLimitOverride { requests_per_unit, unit: 3 }),
        ..descriptor("user", user)
    };
    for expected in [Code::Ok, Code::OverLimit, Code::OverLimit] {
        let response = check(&mut client, vec![with_limit("ann", 5), with_limit("bob", 1)]).await.expect("valid");
        assert_eq!(response.overall_code(), expected);
        assert_eq!(remaining(&response.statuses[0]), (Code::Ok, 4));
        assert_eq!(remaining(&response.statuses[1]), (expected, 0));
    }
}

#[tokio::test]
async fn invalid_requests_are_refused_with_the_field() {
    let (_server, mut client) = plain().await;
    let request = RateLimitRequest { descriptors: vec![descriptor("user", "ann")], ..RateLimitRequest::default() };
    let error = client.should_rate_limit(request).await.expect_err("there is no domain");
    assert_eq!(error.code(), GrpcCode::InvalidArgument);
    assert_eq!(error.message(), "rate limit domain must not be empty: set `domain`");
    for (descriptors, problem) in [
        (vec![], "rate limit descriptor list must not be empty"),
        (vec![RateLimitDescriptor::default()], "descriptors[0] has no entries"),
        (vec![descriptor("", "x")], "descriptors[0].entries[0].key is empty"),
        (vec![descriptor("user", "ann"); 101], "the request has 101 descriptors"),
    ] {
        let error = check(&mut client, descriptors).await.expect_err(problem);
        assert_eq!(error.code(), GrpcCode::InvalidArgument);
        assert!(error.message().starts_with(problem), "{error}");
    }
}

/// A limit that read the first value could be left by a client that controls one of the entries.
#[tokio::test]
async fn two_values_of_an_entry_that_a_limit_reads_are_an_error() {
    let (_server, mut client) = plain().await;
    let of = |pairs: &[(&str, &str)]| RateLimitDescriptor {
        entries: pairs.iter().flat_map(|(name, value)| descriptor(name, value).entries).collect(),
        ..RateLimitDescriptor::default()
    };
    let twice = of(&[("user", "ann"), ("user", "bob")]);
    for descriptors in [vec![twice.clone()], vec![descriptor("user", "ann"), of(&[("path", "/"), ("path", "/b")])]] {
        let error = check(&mut client, descriptors).await.expect_err("a limit reads two values");
        assert_eq!(error.code(), GrpcCode::InvalidArgument);
        assert!(error.message().ends_with("has several differing values: send it once."), "{error}");
    }
    let refund = RateLimitDescriptor { is_negative_hits: true, ..twice };
    assert!(check(&mut client, vec![refund]).await.is_err());
    // No limit reads the other entry, and equal values are one.
    let fine = of(&[("user", "ann"), ("generic_key", "a"), ("generic_key", "b"), ("user", "ann")]);
    let response = check(&mut client, vec![fine]).await.expect("valid");
    assert_eq!(remaining(&response.statuses[0]), (Code::Ok, 2), "refused requests take nothing");
}

#[tokio::test]
async fn clients_need_a_token_except_for_health_checks() {
    let (_server, address) = server("service: { grpc: { listen: '127.0.0.1:0', tokens_file: tokens } }");
    let channel = connect(address).await;
    let request = |token: Option<&str>| {
        let descriptors = vec![descriptor("user", "ann")];
        let mut request = Request::new(RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 0 });
        if let Some(token) = token {
            let value = MetadataValue::try_from(format!("Bearer {token}")).expect("the token is ASCII");
            request.metadata_mut().insert("authorization", value);
        }
        request
    };
    let mut client = RateLimitServiceClient::new(channel.clone());
    for token in [None, Some("wrong")] {
        let error = client.should_rate_limit(request(token)).await.expect_err("there is no valid token");
        assert_eq!(error.code(), GrpcCode::Unauthenticated);
    }
    assert!(client.should_rate_limit(request(Some(TOKEN))).await.is_ok());
    let mut health = HealthClient::new(channel);
    for service in ["", "envoy.service.ratelimit.v3.RateLimitService"] {
        let request = HealthCheckRequest { service: service.to_owned() };
        let response = health.check(request).await.expect("health checks need no token").into_inner();
        assert_eq!(response.status(), ServingStatus::Serving);
    }
}

/// Requests that are longer than any real one are refused before they are decoded.
#[tokio::test]
async fn long_requests_are_refused() {
    let (_server, address) = server("service: { grpc: '127.0.0.1:0' }");
    let channel = connect(address).await;
    let long = vec![descriptor("user", &"x".repeat(300 * 1024))];
    let error = check(&mut RateLimitServiceClient::new(channel.clone()), long).await.expect_err("it is too long");
    assert_eq!(error.code(), GrpcCode::OutOfRange, "{error}");
    let request = HealthCheckRequest { service: "x".repeat(5 * 1024) };
    let error = HealthClient::new(channel).check(request).await.expect_err("it is too long");
    assert_eq!(error.code(), GrpcCode::OutOfRange, "{error}");
}

/// A client that stops waiting does not interrupt the decision: units that were taken for a request that is denied in
/// the end are given back.
#[tokio::test]
async fn deadline_of_the_client_takes_nothing_from_denied_requests() {
    let redis = RedisServer::start();
    let store = format!("store: '{}'\nstore_timeout: 5s\n", redis.url());
    let (_server, address) = server(&format!("{store}service: {{ grpc: '127.0.0.1:0' }}"));
    let mut client = RateLimitServiceClient::new(connect(address).await);
    let spent = || RateLimitDescriptor {
        limit: Some(RateLimitOverride { requests_per_unit: 1, unit: 3 }),
        ..descriptor("page", "/")
    };
    assert!(check(&mut client, vec![spent()]).await.is_ok());
    for _ in 0..50 {
        let descriptors = vec![descriptor("user", "ann"), spent()];
        let mut request = Request::new(RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 1 });
        request.metadata_mut().insert("grpc-timeout", MetadataValue::from_static("1u"));
        match client.should_rate_limit(request).await {
            Ok(response) => assert_eq!(response.into_inner().overall_code(), Code::OverLimit),
            Err(status) => {
                assert!(matches!(status.code(), GrpcCode::DeadlineExceeded | GrpcCode::Cancelled), "{status}")
            }
        }
    }
    // The last decisions may still be under way.
    for _ in 0..200 {
        let peek = RateLimitDescriptor { hits_addend: Some(0), ..descriptor("user", "ann") };
        let response = check(&mut client, vec![peek]).await.expect("a valid request");
        if remaining(&response.statuses[0]) == (Code::Ok, 3) {
            return;
        }
    }
    panic!("denied requests have taken units");
}

/// A refund of a descriptor that the configuration does not limit gives nothing back to limits that did not count it.
#[tokio::test]
async fn refund_of_an_unlimited_descriptor_changes_nothing() {
    let configuration = "domain: edge\ndescriptors:\n  - { key: user, value: ann, rate_limit: { unlimited: true } }\n";
    let rules = format!("service: {{ grpc: '127.0.0.1:0', envoy: {{ files: edge.yaml }} }}{LIMITS}");
    let folder = folder_with(&[(RULES, &rules), ("edge.yaml", configuration)]);
    let server = Process::start(folder, &["serve", "--config", RULES]);
    let mut client = RateLimitServiceClient::new(connect(server.address_of("decisions grpc")).await);
    let request = |domain: &str, descriptor| RateLimitRequest {
        domain: domain.to_owned(),
        descriptors: vec![descriptor],
        hits_addend: 0,
    };
    let hits = |hits, is_negative_hits| RateLimitDescriptor {
        hits_addend: Some(hits),
        is_negative_hits,
        ..descriptor("user", "ann")
    };
    let mut status = async |domain: &str, descriptor| {
        let response = client.should_rate_limit(request(domain, descriptor)).await.expect("a valid request");
        remaining(&response.into_inner().statuses[0])
    };
    assert_eq!(status("other", hits(2, false)).await, (Code::Ok, 1));
    assert_eq!(status("edge", hits(2, true)).await, (Code::Ok, u32::MAX));
    assert_eq!(status("other", hits(0, false)).await, (Code::Ok, 1));
}

/// The listener stays healthy while a reload changes its settings: watchers only have to reconnect.
#[tokio::test]
async fn settings_of_the_listener_change_on_reload() {
    let (process, address) = server("service: { grpc: '127.0.0.1:0' }");
    let channel = connect(address).await;
    assert!(check(&mut RateLimitServiceClient::new(channel.clone()), vec![descriptor("user", "ann")]).await.is_ok());
    let watch = HealthClient::new(channel).watch(HealthCheckRequest { service: String::new() }).await;
    let mut statuses = watch.expect("a stream").into_inner();
    await_status(&mut statuses, ServingStatus::Serving).await;

    let rules = format!("service: {{ grpc: {{ listen: '127.0.0.1:0', tokens_file: tokens }} }}{LIMITS}");
    std::fs::write(process.path(RULES), rules).expect("the folder is writable");
    process.await_said("tollgate.yaml is in force", 1);
    let mut client = RateLimitServiceClient::new(connect(address).await);
    let error = check(&mut client, vec![descriptor("user", "ann")]).await.expect_err("there is no token");
    assert_eq!(error.code(), GrpcCode::Unauthenticated);
    let next = statuses.message().await;
    assert!(!matches!(next, Ok(Some(_))), "the stream ends without another status: {next:?}");
}

/// Reads statuses until there is this one. A server that has just started reports that it is not ready yet, and may
/// report the same status twice.
async fn await_status(statuses: &mut Streaming<HealthCheckResponse>, wanted: ServingStatus) {
    let reading = async { while statuses.message().await.expect("a message").expect("a status").status() != wanted {} };
    tokio::time::timeout(PATIENCE, reading).await.unwrap_or_else(|_| panic!("no status is {wanted:?}"));
}

#[tokio::test]
async fn watchers_learn_that_the_server_stops() {
    let (mut process, address) = server("service: { grpc: '127.0.0.1:0' }");
    let mut health = HealthClient::new(connect(address).await);
    let watch = health.watch(HealthCheckRequest { service: String::new() }).await.expect("a stream");
    let mut statuses = watch.into_inner();
    await_status(&mut statuses, ServingStatus::Serving).await;
    process.signal("TERM");
    await_status(&mut statuses, ServingStatus::NotServing).await;
    assert!(process.wait().success());
}

#[tokio::test]
async fn messages_that_are_too_long_are_refused() {
    let (_server, address) = server("service: { grpc: '127.0.0.1:0' }");
    let channel = connect(address).await;
    let mut client = RateLimitServiceClient::new(channel.clone());
    let error = check(&mut client, vec![descriptor("user", &"a".repeat(256 * 1024))]).await;
    assert_eq!(error.expect_err("the message is too long").code(), GrpcCode::OutOfRange);
    let request = HealthCheckRequest { service: "a".repeat(4 * 1024) };
    let error = HealthClient::new(channel.clone()).check(request).await.expect_err("the message is too long");
    assert_eq!(error.code(), GrpcCode::OutOfRange);
    // The connection is still of use, and a message of several frames is read.
    assert!(check(&mut client, vec![descriptor("user", &"a".repeat(200 * 1024))]).await.is_ok());
}

/// Streams of one connection run in its task until they have to wait.
#[tokio::test]
async fn a_request_that_waits_for_the_store_ends_at_its_deadline_and_holds_up_no_other() {
    let mut redis = RedisServer::start();
    let store = format!("store: '{}'\nstore_timeout: 30s\n", redis.url());
    let (_server, address) = server(&format!("{store}service: {{ grpc: '127.0.0.1:0' }}"));
    let channel = connect(address).await;
    let mut client = RateLimitServiceClient::new(channel.clone());
    assert!(check(&mut client, vec![descriptor("user", "ann")]).await.is_ok());
    redis.stop();
    let waiting = tokio::spawn({
        let mut client = client.clone();
        async move { check(&mut client, vec![descriptor("user", "ann")]).await }
    });
    // A client of tonic would end the call itself.
    let connection = tokio::net::TcpStream::connect(address).await.expect("the server accepts connections");
    let (mut sender, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(connection)).await.expect("the server speaks HTTP/2");
    tokio::spawn(connection);
    let descriptors = vec![descriptor("user", "ann")];
    let message = RateLimitRequest { domain: "edge".to_owned(), descriptors, hits_addend: 0 }.encode_to_vec();
    let length = u32::try_from(message.len()).expect("it is short");
    let body = [&[0][..], &length.to_be_bytes(), &message].concat();
    let request = hyper::Request::post(format!("http://{address}/{SERVICE_NAME}/ShouldRateLimit"))
        .header("grpc-timeout", "100m")
        .body(Full::new(Bytes::from(body)))
        .expect("a valid request");
    let response = sender.send_request(request).await.expect("a response");
    assert_eq!(response.headers()["grpc-status"], "4", "Redis hangs");
    let health = HealthClient::new(channel).check(HealthCheckRequest { service: String::new() }).await;
    assert_eq!(health.expect("no store is needed").into_inner().status(), ServingStatus::Serving);
    assert!(!waiting.is_finished(), "its deadline is later");
    redis.cont();
    assert!(waiting.await.expect("no panic").is_ok());
}

#[tokio::test]
async fn descriptors_that_no_limit_applies_to_are_denied_if_the_rule_file_says_so() {
    for deny in [false, true] {
        let unknown = if deny { "deny" } else { "allow" };
        let (server, address) = server(&format!("service: {{ grpc: '127.0.0.1:0', unknown: {unknown} }}"));
        let mut client = RateLimitServiceClient::new(connect(address).await);
        for _ in 0..2 {
            let both = vec![descriptor("user", "ann"), descriptor("usr", "ann")];
            let response = check(&mut client, both).await.expect("a valid request");
            let codes: Vec<_> = response.statuses.iter().map(DescriptorStatus::code).collect();
            let expected = if deny { Code::OverLimit } else { Code::Ok };
            assert_eq!((response.overall_code(), &codes[..]), (expected, &[Code::Ok, expected][..]));
        }
        let response = check(&mut client, vec![descriptor("user", "ann")]).await.expect("a valid request");
        // Nothing was taken by requests that were denied.
        assert_eq!(remaining(&response.statuses[0]), (Code::Ok, if deny { 2 } else { 0 }));
        let said = server.said();
        assert_eq!(said.matches("no limit applies to a request with the descriptors `usr`").count(), 1, "{said}");
    }
}
