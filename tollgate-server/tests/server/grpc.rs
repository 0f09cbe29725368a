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

/// Quotas of envoyproxy/ratelimit's `token-quota.sh` and `multiservice-tokenquota.sh`, and a limit for larger charges.
const QUOTAS: &str = "
domain: edge
descriptors:
  - { key: service, value: service_1, quota_mode: true, rate_limit: { unit: day, requests_per_unit: 1 }, metadata: { name: service_1 } }
  - { key: service, value: service_2, quota_mode: true, rate_limit: { unit: day, requests_per_unit: 2 }, metadata: { name: service_2 } }
  - { key: tokens, rate_limit: { unit: day, requests_per_unit: 20 } }
";

/// The same limits in a rule file, which count after the response, and one that counts at once.
const NATIVE: &str = "
limits:
  - { name: quota, key: 'descriptor:quota', algorithm: fixed_window, limit: 2, window: 1d, count: { when: after } }
  - { name: tokens, key: 'descriptor:counted', algorithm: fixed_window, limit: 20, window: 1d, count: { when: after } }
  - { name: bucket, key: 'descriptor:bucket', algorithm: token_bucket, capacity: 20, refill: 1/h, count: { when: after } }
  - { name: at-once, key: 'descriptor:at-once', algorithm: fixed_window, limit: 20, window: 1d }
";

/// Runs `sequence` with limits in memory and on Redis.
async fn on_both_stores<S: Future<Output = ()>>(sequence: impl Fn(RateLimitServiceClient<Channel>) -> S) {
    let redis = RedisServer::start();
    for store in [String::new(), format!("store: '{}'\nstore_timeout: 5s\n", redis.url())] {
        let rules = format!("{store}service: {{ grpc: '127.0.0.1:0', envoy: {{ files: edge.yaml }} }}{NATIVE}");
        let server =
            Process::start(folder_with(&[(RULES, &rules), ("edge.yaml", QUOTAS)]), &["serve", "--config", RULES]);
        let client = RateLimitServiceClient::new(connect(server.address_of("decisions grpc")).await);
        sequence(client).await;
    }
}

/// A descriptor with this number of hits.
fn hits(name: &str, value: &str, hits: u64) -> RateLimitDescriptor {
    RateLimitDescriptor { hits_addend: Some(hits), ..descriptor(name, value) }
}

async fn overall(client: &mut RateLimitServiceClient<Channel>, descriptors: Vec<RateLimitDescriptor>) -> Code {
    check(client, descriptors).await.expect("a valid request").overall_code()
}

/// `token-quota.sh` of envoyproxy/ratelimit: each request checks with 0 hits and is charged 1 when its stream is done.
#[tokio::test]
async fn charge_after_the_response_denies_later_checks() {
    on_both_stores(async |mut client| {
        for (name, value) in [("service", "service_2"), ("quota", "ann")] {
            for request in 1..=3 {
                assert_eq!(
                    overall(&mut client, vec![hits(name, value, 0)]).await,
                    Code::Ok,
                    "{name}, request {request}"
                );
                let charged = if request < 3 { Code::Ok } else { Code::OverLimit };
                assert_eq!(
                    overall(&mut client, vec![hits(name, value, 1)]).await,
                    charged,
                    "{name}, request {request}"
                );
            }
            assert_eq!(overall(&mut client, vec![hits(name, value, 0)]).await, Code::OverLimit, "{name}");
        }
    })
    .await;
}

/// `multiservice-tokenquota.sh` of envoyproxy/ratelimit: the service that the metadata names is charged 1 afterwards.
#[tokio::test]
async fn charges_of_one_quota_leave_the_other_one() {
    on_both_stores(async |mut client| {
        for service in ["service_1", "service_1", "service_2", "service_2", "service_2"] {
            let both = vec![hits("service", "service_1", 0), hits("service", "service_2", 0)];
            let allowed = check(&mut client, both).await.expect("a valid request");
            assert_eq!(allowed.overall_code(), Code::Ok);
            let metadata = allowed.dynamic_metadata.expect("the limits have metadata").fields;
            let Some(Kind::StructValue(metadata)) = &metadata["metadata"].kind else { panic!("{metadata:?}") };
            assert_eq!(metadata.fields["name"].kind, Some(Kind::StringValue(service.to_owned())));
            overall(&mut client, vec![hits("service", service, 1)]).await;
        }
        let both = vec![hits("service", "service_1", 0), hits("service", "service_2", 0)];
        assert_eq!(overall(&mut client, both).await, Code::OverLimit);
    })
    .await;
}

#[tokio::test]
async fn late_charge_counts_in_full() {
    on_both_stores(async |mut client| {
        for (name, is_late) in [("tokens", true), ("counted", true), ("bucket", true), ("at-once", false)] {
            let mut status = async |cost| {
                let response = check(&mut client, vec![hits(name, "ann", cost)]).await.expect("a valid request");
                (response.overall_code(), response.statuses[0].limit_remaining)
            };
            assert_eq!(status(0).await, (Code::Ok, 20), "{name}");
            assert_eq!(status(15).await, (Code::Ok, 5), "{name}");
            assert_eq!(status(0).await, (Code::Ok, 5), "{name}");
            let (charged, left) = status(15).await;
            assert_eq!(charged, Code::OverLimit, "{name}");
            let owes = if is_late { (Code::OverLimit, 0) } else { (Code::Ok, 5) };
            if name == "tokens" || !is_late {
                assert_eq!(left, owes.1, "{name}");
            }
            assert_eq!(status(0).await, owes, "{name}");
            // A refund pays the debt of 10 units, and the quota is not a debt.
            let refund = RateLimitDescriptor { is_negative_hits: true, ..hits(name, "ann", 10) };
            assert_eq!(overall(&mut client, vec![refund]).await, Code::Ok, "{name}");
            let left = if is_late { 0 } else { 15 };
            let looked = check(&mut client, vec![hits(name, "ann", 0)]).await.expect("a valid request");
            assert_eq!(remaining(&looked.statuses[0]), (Code::Ok, left), "{name}");
        }
    })
    .await;
}

#[tokio::test]
async fn denied_requests_without_hits_addend_take_nothing() {
    on_both_stores(async |mut client| {
        assert_eq!(overall(&mut client, vec![hits("tokens", "ann", 20)]).await, Code::Ok);
        for _ in 0..3 {
            assert_eq!(overall(&mut client, vec![descriptor("tokens", "ann")]).await, Code::OverLimit);
        }
        assert_eq!(overall(&mut client, vec![hits("tokens", "ann", 0)]).await, Code::Ok);
    })
    .await;
}

/// A check of a key that owes denies its request, so the other descriptors are not charged.
#[tokio::test]
async fn check_of_a_key_that_owes_takes_nothing_from_the_others() {
    on_both_stores(async |mut client| {
        assert_eq!(overall(&mut client, vec![hits("tokens", "ann", 25)]).await, Code::OverLimit);
        let both = vec![hits("tokens", "ann", 0), descriptor("at-once", "bob"), hits("tokens", "bob", 3)];
        let denied = check(&mut client, both).await.expect("a valid request");
        assert_eq!(denied.overall_code(), Code::OverLimit);
        let statuses: Vec<_> = denied.statuses.iter().map(remaining).collect();
        // Hits that were spent are charged nevertheless.
        assert_eq!(statuses, [(Code::OverLimit, 0), (Code::Ok, 20), (Code::Ok, 17)]);
        let both = vec![hits("at-once", "bob", 0), hits("tokens", "bob", 0)];
        let looked = check(&mut client, both).await.expect("a valid request");
        assert_eq!(looked.statuses.iter().map(remaining).collect::<Vec<_>>(), [(Code::Ok, 20), (Code::Ok, 17)]);
        let denial = denied.dynamic_metadata.expect("a denial has metadata").fields;
        assert!(matches!(denial["retry_after"].kind, Some(Kind::NumberValue(wait)) if wait > 0.0 && wait <= 86_400.0));
    })
    .await;
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
