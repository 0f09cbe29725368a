//! Rules are replaced while the server runs, without a restart. Clients keep what they have spent.
//!
//! The rules come from a rule file: run `cargo run --bin hot_reload -- tollgate.yaml`, and edit the file while you send
//! requests.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use tollgate_config::RuleFile;
use tollgate_rules::{Gate, RuleSet};
use tollgate_tower::RateLimitLayer;

fn load(file: &Path) -> Result<RuleSet, Box<dyn std::error::Error>> {
    Ok(RuleFile::load(file)?.compile()?)
}

/// Checks periodically whether the file has changed. An invalid file changes nothing.
async fn watch(file: PathBuf, gate: Gate) {
    let written = || std::fs::metadata(&file).and_then(|metadata| metadata.modified()).ok();
    let mut known = written();
    loop {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let now = written();
        if now != known {
            known = now;
            let replaced = load(&file).and_then(|rules| Ok(gate.replace(rules)?));
            match replaced {
                Ok(()) => println!("new rules are in force"),
                Err(error) => println!("the old rules stay in force: {error}"),
            }
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = PathBuf::from(arguments.next().unwrap_or_else(|| "tollgate.yaml".to_owned()));
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:3000".to_owned());

    // Clones share the gate, so rules can be replaced from anywhere.
    let gate = tollgate_config::open_gate(&RuleFile::load(&file)?).await?;
    tokio::spawn(watch(file, gate.clone()));
    let app = Router::new().route("/", get(async || "hello\n")).layer(RateLimitLayer::new(gate).for_axum());

    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
