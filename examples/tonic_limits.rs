//! A gRPC server behind the layer. A client that exceeds its limit gets `RESOURCE_EXHAUSTED` and the time to wait.

use tokio::net::TcpListener;
use tollgate::{FixedWindow, Limit, MINUTE};
use tollgate_rules::{Gate, KeyPart, Match, Rule, RuleSet};
use tollgate_tower::RateLimitLayer;
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};
use tonic::transport::{Endpoint, Server};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt;

fn rules() -> Result<RuleSet, Box<dyn std::error::Error>> {
    // To rules, a call is a request for `/package.Service/Method`, and metadata are headers.
    let checks = Match::everything().path("/grpc.health.v1.Health/Check");
    let limit = Limit::new("checks", FixedWindow::new(2, MINUTE).from_first_request())?;
    Ok(RuleSet::builder().rule(Rule::new(limit).matching(checks).key(KeyPart::ip())).build()?)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limits = RateLimitLayer::new(Gate::in_memory(rules()?)?).peer_address(|extensions| {
        // tonic stores the peer address in this extension.
        extensions.get::<TcpConnectInfo>().and_then(TcpConnectInfo::remote_addr).map(|address| address.ip())
    });
    let (_reporter, service) = tonic_health::server::health_reporter();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(Server::builder().layer(limits).add_service(service).serve_with_incoming(TcpIncoming::from(listener)));

    let channel = Endpoint::from_shared(format!("http://{address}"))?.connect().await?;
    let mut client = HealthClient::new(channel);
    for call in 1..=3 {
        match client.check(HealthCheckRequest::default()).await {
            Ok(_) => println!("call {call} is answered"),
            Err(status) => {
                let wait = status.get_details_retry_info().and_then(|info| info.retry_delay);
                let seconds = wait.map_or(0.0, |wait| wait.as_secs_f64().ceil());
                println!("call {call} is refused: {:?}, retry in {seconds} s", status.code());
            }
        }
    }
    Ok(())
}
