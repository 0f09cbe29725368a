//! The layer for axum's own body type.

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use http::{Method, Request, StatusCode};
use http_body_util::BodyExt;
use tollgate_rules::{KeyPart, Rule};
use tower::{Layer, Service, ServiceExt, service_fn};

use super::server::{Server, TestResponse, http1, http2, layer};
use super::{gate, per_minute};

#[tokio::test]
async fn clients_get_the_same_responses_as_from_the_other_layer() {
    for key in [KeyPart::ip(), KeyPart::method()] {
        for client in [http1(), http2()] {
            let mut responses = Vec::new();
            for for_axum in [false, true] {
                let (gate, _) = gate([per_minute("all", 1).key(key.clone())]);
                let app = Router::new().route("/", get(async || "hello"));
                let app = if for_axum { app.layer(layer(&gate).for_axum()) } else { app.layer(layer(&gate)) };
                let server = Server::serving(app).await;
                for (method, kind) in
                    [(Method::GET, ""), (Method::GET, ""), (Method::HEAD, ""), (Method::GET, "application/grpc")]
                {
                    let TestResponse { status, version, mut headers, body } =
                        server.send(&client, method, "/", &[("content-type", kind)]).await;
                    headers.remove("date");
                    responses.push((for_axum, status, version, headers, body));
                }
            }
            let (other, for_axum) = responses.split_at(4);
            for (other, for_axum) in other.iter().zip(for_axum) {
                assert_eq!((other.1, other.2, &other.3, &other.4), (for_axum.1, for_axum.2, &for_axum.3, &for_axum.4));
            }
        }
    }
}

#[tokio::test]
async fn a_body_passes_unchanged_and_its_permit_is_held_until_it_ends() {
    let (gate, _) = gate([Rule::in_flight("at-once", 1).unwrap()]);
    let inner = service_fn(|_: Request<()>| {
        std::future::ready(Ok::<_, std::convert::Infallible>(http::Response::new(Body::from("hello"))))
    });
    let mut service = layer(&gate).for_axum().layer(inner);
    let mut send = async || service.ready().await.unwrap().call(Request::new(())).await.unwrap();
    let first = send().await;
    assert_eq!(send().await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(first.into_body().collect().await.unwrap().to_bytes(), "hello");
    let last: http::Response<Body> = send().await;
    assert_eq!(last.status(), StatusCode::OK);
}
