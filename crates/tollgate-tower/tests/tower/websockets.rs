//! WebSockets hold their permits until their handlers drop them.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::routing::get;
use futures_util::{SinkExt, StreamExt};
use http::{Request, StatusCode, header};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio_tungstenite::tungstenite::{Error, Message as Sent};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};
use tollgate_rules::Rule;
use tower::ServiceExt;

use super::gate;
use super::server::{Server, layer};

type Client = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// Echoes messages until the client says `bye` or closes the connection.
async fn echo(mut socket: WebSocket) {
    while let Some(Ok(message)) = socket.recv().await {
        match message {
            Message::Text(text) if text == "bye" => return,
            Message::Text(_) | Message::Binary(_) => _ = socket.send(message).await,
            _ => {}
        }
    }
}

fn echoing() -> Router {
    let chat = async |upgrade: WebSocketUpgrade| upgrade.on_upgrade(echo);
    Router::new().route("/chat", get(chat)).route("/", get(async || "hello"))
}

/// Starts servers that allow one request at a time: with the layer for any body type, and with the layer for axum's.
async fn servers(app: &Router) -> [Server; 2] {
    let one_at_once = || layer(&gate([Rule::in_flight("at-once", 1).unwrap()]).0);
    let around_any = Server::serving(app.clone().layer(one_at_once())).await;
    [around_any, Server::serving(app.clone().layer(one_at_once().for_axum())).await]
}

/// Opens a WebSocket as soon as a permit is free.
async fn open(server: &Server) -> Client {
    loop {
        match connect_async(format!("ws://{}/chat", server.address)).await {
            Ok((client, _)) => return client,
            Err(Error::Http(refused)) => assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS),
            Err(error) => panic!("{error}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn status(server: &Server) -> u16 {
    server.get("/", &[]).await.status
}

/// A permit is returned a moment after the connection has ended.
async fn until_free(server: &Server) {
    let freed = async {
        while status(server).await != 200 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), freed).await.expect("the permit comes back");
}

#[tokio::test]
async fn a_websocket_holds_its_permit_until_either_side_closes_it() {
    for server in servers(&echoing()).await {
        for end in ["client", "gone", "handler"] {
            let mut client = open(&server).await;
            for message in [Sent::text("hello"), Sent::binary(vec![7; 3 << 20]), Sent::text("again")] {
                client.send(message.clone()).await.unwrap();
                assert_eq!(client.next().await.unwrap().unwrap(), message);
                assert_eq!(status(&server).await, 429, "the connection is open");
            }
            match end {
                "client" => {
                    client.close(None).await.unwrap();
                    while let Some(Ok(_)) = client.next().await {}
                }
                "gone" => drop(client),
                _ => {
                    client.send(Sent::text("bye")).await.unwrap();
                    let last = client.next().await;
                    assert!(!matches!(last, Some(Ok(Sent::Text(_)))), "the handler has hung up: {last:?}");
                }
            }
            until_free(&server).await;
        }
    }
}

#[tokio::test]
async fn a_handler_that_outlives_its_client_keeps_the_permit() {
    let done = Arc::new(Notify::new());
    let wait = Arc::clone(&done);
    let chat = async move |upgrade: WebSocketUpgrade| {
        upgrade.on_upgrade(async move |mut socket| {
            while let Some(Ok(_)) = socket.recv().await {}
            wait.notified().await;
        })
    };
    let app = Router::new().route("/chat", get(chat)).route("/", get(async || "hello"));
    for server in servers(&app).await {
        drop(open(&server).await);
        for _ in 0..20 {
            assert_eq!(status(&server).await, 429);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        done.notify_one();
        until_free(&server).await;
    }
}

/// It never sees that the client has closed the connection, only that it cannot write.
#[tokio::test]
async fn a_handler_that_only_writes_ends_with_its_client() {
    let ticker = async |upgrade: WebSocketUpgrade| {
        upgrade.on_upgrade(async |mut socket| {
            while socket.send(Message::Binary(vec![7; 1 << 10].into())).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
    };
    let app = Router::new().route("/chat", get(ticker)).route("/", get(async || "hello"));
    for server in servers(&app).await {
        let mut client = open(&server).await;
        assert!(client.next().await.unwrap().is_ok());
        assert_eq!(status(&server).await, 429, "the connection is open");
        drop(client);
        until_free(&server).await;
    }
}

#[tokio::test]
async fn a_handler_that_does_not_upgrade_returns_the_permit_with_its_response() {
    for server in servers(&echoing()).await {
        for _ in 0..5 {
            let mut status = StatusCode::TOO_MANY_REQUESTS;
            // The previous response may hold the permit for a moment longer.
            while status == StatusCode::TOO_MANY_REQUESTS {
                let answered = connect_async(format!("ws://{}/", server.address)).await;
                let Err(Error::Http(response)) = answered else { panic!("{answered:?}") };
                status = response.status();
            }
            assert_eq!(status, StatusCode::OK);
            until_free(&server).await;
        }
    }
}

/// hyper creates upgrades. Without hyper there are no upgrades, with or without the layer.
#[tokio::test]
async fn a_request_that_cannot_be_upgraded_is_served_normally() {
    let (gate, _) = gate([Rule::in_flight("at-once", 1).unwrap()]);
    let app = echoing().layer(layer(&gate).for_axum());
    let request = Request::get("/chat")
        .header(header::CONNECTION, "upgrade")
        .header(header::UPGRADE, "websocket")
        .header(header::SEC_WEBSOCKET_VERSION, "13")
        .header(header::SEC_WEBSOCKET_KEY, "dGhlIHNhbXBsZSBub25jZQ==");
    let answer = app.oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
    assert_eq!(answer.status(), StatusCode::UPGRADE_REQUIRED);
}
