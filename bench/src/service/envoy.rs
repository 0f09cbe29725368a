//! Envoy's rate limit service: the messages, one checked call, and the load by h2load.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use prost::Message;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;
use tonic_prost::ProstCodec;

use super::Bench;
use super::load::{Load, Pace};
use crate::cores::pinned;
use crate::gateway::load::{figure_before, read_log, run};
use crate::race::quantile;

pub(super) const SERVICE: &str = "envoy.service.ratelimit.v3.RateLimitService";
const METHOD: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// The code of an allowed request.
pub(super) const OK: i32 = 1;

const CONNECTIONS: usize = 8;
const STREAMS: usize = 32;
/// The time a load may take beyond its length before it is killed.
const GRACE: Duration = Duration::from_secs(15);

/// The fields of the request that this benchmark sends.
#[derive(Clone, PartialEq, Message)]
pub(super) struct RateLimitRequest {
    #[prost(string, tag = "1")]
    domain: String,
    #[prost(message, repeated, tag = "2")]
    descriptors: Vec<Descriptor>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Descriptor {
    #[prost(message, repeated, tag = "1")]
    entries: Vec<Entry>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Entry {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "2")]
    value: String,
}

/// The field of the response that this benchmark reads.
#[derive(Clone, PartialEq, Message)]
pub(super) struct RateLimitResponse {
    #[prost(int32, tag = "1")]
    pub(super) overall_code: i32,
}

fn request() -> RateLimitRequest {
    let entry = Entry { key: "user".to_owned(), value: "user:000001".to_owned() };
    RateLimitRequest { domain: "edge".to_owned(), descriptors: vec![Descriptor { entries: vec![entry] }] }
}

/// Sends one request and checks that it is allowed.
pub(super) fn check(address: SocketAddr) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let response: RateLimitResponse = runtime.block_on(async {
        let channel = Endpoint::from_shared(format!("http://{address}"))?.connect().await?;
        let mut grpc = tonic::client::Grpc::new(channel);
        grpc.ready().await?;
        let path = PathAndQuery::from_static(METHOD);
        let response = grpc.unary(tonic::Request::new(request()), path, ProstCodec::default()).await?;
        anyhow::Ok(response.into_inner())
    })?;
    let code = response.overall_code;
    ensure!(code == OK, "ShouldRateLimit was answered with the code {code}, not {OK}");
    Ok(())
}

/// Loads a server with h2load. It can send only one body, so there is one key.
pub(super) fn load(bench: &Bench, address: SocketAddr, pace: Pace) -> anyhow::Result<Load> {
    let folder = tempfile::tempdir()?;
    let (body, log) = (folder.path().join("body"), folder.path().join("h2load.tsv"));
    let message = request().encode_to_vec();
    // gRPC: not compressed, and the length.
    let mut frame = vec![0];
    frame.extend(u32::try_from(message.len())?.to_be_bytes());
    frame.extend(message);
    fs::write(&body, frame)?;
    let seconds = pace.length.as_secs();
    let cores = bench.cores.load();
    let mut command = pinned(cores.clone(), Path::new("timeout"));
    command.arg((seconds + GRACE.as_secs()).to_string()).arg(&bench.programs.h2load);
    command.args([
        format!("-t{}", cores.len()),
        format!("-c{CONNECTIONS}"),
        format!("-m{STREAMS}"),
        format!("-D{seconds}"),
    ]);
    if let Some(per_second) = pace.per_second {
        command.arg(format!("--rps={:.0}", per_second / CONNECTIONS as f64));
    }
    command.arg("-d").arg(&body).arg(format!("--log-file={}", log.display()));
    command
        .args(["-H", "content-type: application/grpc", "-H", "te: trailers"])
        .arg(format!("http://{address}{METHOD}"));
    let printed = run(command, "h2load")?;
    let failed = figure_before(&printed, "requests: ", " failed")? + figure_before(&printed, "requests: ", " errored")?;
    let (statuses, micros) = read_log(&log).context("h2load")?;
    ensure!(failed == 0, "{failed} requests had no answer");
    ensure!(
        !statuses.is_empty() && statuses.iter().all(|status| *status == 200),
        "a request was not answered with 200"
    );
    Ok(Load {
        requests: statuses.len() as u64,
        elapsed: Duration::from_secs(seconds),
        p50_us: quantile(micros.clone(), 0.5),
        p99_us: quantile(micros, 0.99),
    })
}
