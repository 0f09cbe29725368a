//! `tollgate serve`: everything that a rule file names and this version has.

use std::net::{AddrParseError, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::time::timeout;
use tollgate::Gate;
use tollgate::rules::file::{Listener, RuleFile};

use super::{Error, load, say};
use crate::reload::{Hangup, Reload, Started};
use crate::service::Options;
use crate::{builtin, limits_told, notice, service, shutdown};

/// What is not given back by then is missing until the limits give it back by themselves.
const RETURN_DEADLINE: Duration = Duration::from_secs(1);

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// The rule file; without one, 10 requests a minute for each user on 127.0.0.1:8090
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The address and port to listen on, whatever the rule file says; port 0 takes any free one
    #[arg(long, value_name = "ADDR", value_parser = socket_address)]
    listen: Option<SocketAddr>,
}

/// Where to listen, and how.
struct Place {
    address: String,
    options: Options,
}

pub(super) async fn run(arguments: Arguments) -> Result<(), Error> {
    let Arguments { config, listen } = arguments;
    let file = match &config {
        Some(path) => load(path)?,
        None => builtin::rules().map_err(|problems| Error::Open(problems.into()))?,
    };
    warn_of_what_is_not_served(&file);
    let place =
        place(&file, listen).ok_or_else(|| Error::NothingToServe { config: config.clone().unwrap_or_default() })?;
    let gate = Gate::open(&file).await.map_err(Error::Open)?;
    notice::warn_of_an_absent_store(&gate, &file);
    let cannot_listen = |source| Error::Listen { address: place.address.clone(), source };
    let listener = TcpListener::bind(&place.address).await.map_err(cannot_listen)?;
    let bound = listener.local_addr().map_err(cannot_listen)?;
    // Before the line below is read, so that whoever reads it can already signal the server.
    let shutdown = shutdown::signal().map_err(Error::Runtime)?;
    let hangup = config.is_some().then(Hangup::listen).transpose().map_err(Error::Runtime)?;
    announce(bound, &file);
    let reloading = config.zip(hangup).map(|(path, hangup)| {
        let listener = if listen.is_none() { file.service.http.clone() } else { None };
        Reload::new(Started { gate: gate.clone(), path, file, listener, hangup }).spawn()
    });
    service::http::run(listener, gate.clone(), place.options, shutdown).await;
    if let Some(reloading) = reloading {
        reloading.end().await;
    }
    if let Some(store) = gate.redis() {
        _ = timeout(RETURN_DEADLINE, store.return_leases()).await;
    }
    Ok(())
}

fn place(file: &RuleFile, listen: Option<SocketAddr>) -> Option<Place> {
    let named = file.service.http.as_ref();
    let options = named.map(Options::of).unwrap_or_default();
    let address = match listen {
        Some(address) => address.to_string(),
        None => named?.listen.as_str().to_owned(),
    };
    Some(Place { address, options })
}

fn warn_of_what_is_not_served(file: &RuleFile) {
    let listeners = |listener: &Option<Listener>| listener.is_some();
    for (name, named) in [
        ("gateway", file.gateway.is_some()),
        ("service.grpc", listeners(&file.service.grpc)),
        ("service.resp", listeners(&file.service.resp)),
        ("admin", file.admin.is_some()),
    ] {
        if named {
            notice::warn(format_args!("{name} is named, but this version does not serve it yet; service.http it does"));
        }
    }
}

/// Says what listens where, and what is in force.
fn announce(address: SocketAddr, file: &RuleFile) {
    let (version, limits) = (env!("CARGO_PKG_VERSION"), limits_told::in_force(file));
    say(format_args!("tollgate {version} answers POST http://{address}/v1/check; {limits}"));
}

fn socket_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|error: AddrParseError| format!("{error}; use ADDRESS:PORT, such as 127.0.0.1:8090"))
}
