//! Refusals of gRPC requests, as read by tonic, which shares no code with ours.

use std::time::Duration;

use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue};
use tollgate_http::{Families, Policy, Refusal, RefusalBuilder, is_grpc};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::denied_for;

#[test]
fn a_denial_is_resource_exhausted_with_the_exact_wait() {
    let wait = Duration::from_micros(1_200_001);
    let (limit, decision) = denied_for(wait);
    let policy = Policy::new(&limit, Families::default());
    let response = RefusalBuilder::new(&Refusal::Limited).limit(&policy).decision(&decision).grpc();
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "application/grpc");
    assert_eq!(response.headers()["grpc-status"], "8");
    assert_eq!(response.headers()["grpc-message"], "Too many requests. Please retry after 2 seconds.");
    assert_eq!(response.headers()["x-ratelimit-remaining"], "0");
    assert_eq!(response.headers()["retry-after"], "2");

    let status = Status::from_header_map(response.headers()).unwrap();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(status.message(), "Too many requests. Please retry after 2 seconds.");
    assert_eq!(status.get_details_retry_info().unwrap().retry_delay, Some(wait));
    let whole = status.get_error_details();
    assert!(whole.retry_info().is_some() && whole.quota_failure().is_none());
}

#[test]
fn every_refusal_has_its_status() {
    let missing = Refusal::KeyMissing { part: "한도 100%".into() };
    let banned = Refusal::Banned { retry_after: Duration::from_secs(600) };
    let table = [
        (&banned, Code::ResourceExhausted, Some(600)),
        (&Refusal::Blocked, Code::PermissionDenied, None),
        (&missing, Code::PermissionDenied, None),
        (&Refusal::StoreUnavailable, Code::Unavailable, Some(1)),
        (&Refusal::ClientAddressUnknown, Code::Internal, None),
    ];
    for (refusal, code, retry_secs) in table {
        let status = Status::from_header_map(RefusalBuilder::new(refusal).grpc().headers()).unwrap();
        assert_eq!(status.code(), code, "{refusal:?}");
        let delay = status.get_details_retry_info().and_then(|info| info.retry_delay);
        assert_eq!(delay, retry_secs.map(Duration::from_secs), "{refusal:?}");
    }
    let status = Status::from_header_map(RefusalBuilder::new(&missing).grpc().headers()).unwrap();
    assert_eq!(status.message(), "The request lacks 한도 100%, which the limit counts by.");
}

#[test]
fn grpc_is_told_by_its_content_type() {
    let table = [
        ("application/grpc", true),
        ("application/grpc+proto", true),
        ("Application/GRPC; charset=utf-8", true),
        ("application/grpc-web", false),
        ("application/json", false),
        ("application/grp", false),
    ];
    for (content_type, expected) in table {
        let request = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(content_type))]);
        assert_eq!(is_grpc(&request), expected, "{content_type}");
    }
    assert!(!is_grpc(&HeaderMap::new()));
}
