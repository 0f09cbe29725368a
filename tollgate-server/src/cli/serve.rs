//! `tollgate serve`: starts the gateway, the decision service and the admin listener, and stops them in order.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};
use tollgate::Gate;
use tollgate::rules::file::Parsed;
use tollgate::rules::file::internal::Address;

use super::{Error, StoreArgument, load, print};
use crate::gateway::Gateway;
use crate::learning::Learners;
use crate::listeners::{Listeners, Shared};
use crate::listening::Flag;
use crate::readiness::Readiness;
use crate::reload::{CliOverrides, Hangup, Reload, Reloads, Started};
use crate::service::throttle::Throttles;
use crate::state::{StateFile, StateWriter};
use crate::{builtin, config, limit_summary, listeners, notice, shutdown, threads};

/// The longest wait at exit for leases to be returned to Redis. Those that are not returned expire there.
const RETURN_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) const EXAMPLES: &str = "\
Examples:
  tollgate serve
  tollgate serve --config tollgate.yaml --admin 127.0.0.1:8099
  tollgate serve --config tollgate.yaml --store redis://10.0.0.5:6379
  tollgate serve --config tollgate.yaml --state /var/lib/tollgate/state";

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Rule file; without one, a gateway in front of an echo server allows 10 requests per minute for each X-User-Id
    #[arg(long, value_name = "FILE", env = "TOLLGATE_CONFIG")]
    config: Option<PathBuf>,
    /// Address of the gateway, instead of the one in the rule file; port 0 picks a free port
    #[arg(long, value_name = "ADDR", env = Flag::LISTEN.variable)]
    listen: Option<Address>,
    /// Address of the decision service (POST /v1/check), instead of the one in the rule file
    #[arg(long, value_name = "ADDR", env = Flag::HTTP.variable)]
    http: Option<Address>,
    /// Address of health checks and metrics, instead of the one in the rule file
    #[arg(long, value_name = "ADDR", env = Flag::ADMIN.variable)]
    admin: Option<Address>,
    #[command(flatten)]
    store: StoreArgument,
    /// Keep counts in this file across restarts; only for the in-memory store
    #[arg(long, value_name = "FILE", env = "TOLLGATE_STATE")]
    state: Option<PathBuf>,
    /// Seconds between two writes of the state file, which is also written on exit
    #[arg(long, value_name = "SECONDS", env = "TOLLGATE_STATE_INTERVAL", requires = "state", default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(1..=86_400))]
    state_interval: u64,
}

pub(super) async fn run(arguments: Arguments) -> Result<(), Error> {
    let file = rules(&arguments)?;
    let Arguments { config: path, listen, http, admin, store, state, state_interval } = arguments;
    if listen.is_some() && file.gateway.is_none() {
        let fix = "add `gateway: { routes: [...] }` to it, or use --http for the decision service";
        return Err(Error::Usage(format!("{} needs a gateway, and the rule file has none: {fix}", Flag::LISTEN)));
    }
    let overrides = CliOverrides { http, admin, store: store.store };
    if file.gateway.is_none() && !listeners::wants_service(&file, &overrides) {
        return Err(Error::NothingToServe { config: path.unwrap_or_default() });
    }
    if state.is_some() && !file.store.is_memory() {
        let fix = "remove it, or use `store: memory`";
        return Err(Error::Usage(format!(
            "--state is only for the in-memory store, because Redis keeps its own keys: {fix}"
        )));
    }
    // One each for the access log, the watcher of the rule file, and the state file.
    threads::check(file.gateway.as_ref().map_or(0, Gateway::workers) + 3).map_err(Error::Threads)?;
    let descriptors = listeners::check(&file, &overrides)?;
    let learners = Arc::new(Learners::restored(state.as_deref()));
    let (file, learned) = learners.attach(file);
    learners.commit(learned);
    config::compile(&file, listen.as_ref()).map_err(|problems| Error::Open(problems.into()))?;
    let state = state.map(StateFile::new);
    let gate = match &state {
        Some(state) => state.open(&file).await.map_err(Error::from_state)?,
        None => Gate::open(&file).await.map_err(Error::Open)?,
    };
    notice::warn_if_store_unavailable(&gate);
    let (readiness, reloads) = (Arc::new(Readiness::default()), Arc::new(Reloads::new()));
    if file.service.xds.is_some() {
        readiness.await_xds(reloads.xds.clone());
    }
    let throttles = Arc::new(Throttles::new(&gate));
    let shared = Shared {
        gate: gate.clone(),
        throttles: Arc::clone(&throttles),
        decisions: Arc::default(),
        surfaces: Arc::default(),
        readiness: Arc::clone(&readiness),
        reloads: Arc::clone(&reloads),
        learners: Arc::clone(&learners),
    };
    let listeners = Arc::new(Listeners::new(shared, overrides.clone(), descriptors));
    let (admin, service) = listeners.prepare(&file).await?.split_admin();
    // It starts first and ends last, so that `/readyz` can report both.
    listeners.start(admin);
    let gateway = match &file.gateway {
        Some(_) => {
            let gateway = Gateway::start(&file, &gate, listen, descriptors.plan).await.map_err(Error::Gateway)?;
            Some(Arc::new(gateway))
        }
        None => None,
    };
    listeners.start(service);
    let pause = Duration::from_secs(state_interval);
    let state = state.map(|state| StateWriter::start(state, gate.clone(), pause)).transpose().map_err(Error::State)?;
    readiness.set_started(gateway.clone());
    // Installed before the line below is printed, so that its reader can already signal the server.
    let shutdown = shutdown::signal().map_err(Error::Runtime)?;
    // Without a rule file there is nothing to reload, but SIGHUP must not end the server.
    let hangup = Hangup::listen().map_err(Error::Runtime)?;
    announce(gateway.as_deref(), &listeners, &file);
    tokio::spawn(notice::monitor_store(gate.clone()));
    tokio::spawn(notice::monitor_memory(gate.clone()));
    tokio::spawn(free_memory(gate.clone()));
    tokio::spawn(Arc::clone(&learners).run(gate.clone()));
    let reloading = path.map(|path| {
        let (gate, gateway, listeners) = (gate.clone(), gateway.clone(), Arc::clone(&listeners));
        let learners = Arc::clone(&learners);
        let started = Started { gate, throttles, path, file, hangup, gateway, listeners, overrides, reloads, learners };
        Reload::new(started).spawn()
    });
    shutdown.await;
    readiness.set_stopping();
    if let Some(reloading) = reloading {
        reloading.end().await;
    }
    listeners.begin_stop();
    if let Some(gateway) = &gateway {
        gateway.stop().await;
    }
    listeners.drained().await;
    if let Some(state) = state {
        state.end().await;
    }
    learners.save(&gate);
    if let Some(store) = gate.redis() {
        _ = timeout(RETURN_TIMEOUT, store.return_leases()).await;
    }
    listeners.stop_admin().await;
    Ok(())
}

/// Returns the rule file, or the built-in one, with the store of the command line.
fn rules(arguments: &Arguments) -> Result<Parsed, Error> {
    let file = match &arguments.config {
        Some(path) => load(path)?,
        None => builtin::rules().map_err(|problems| Error::Open(problems.into()))?,
    };
    arguments.store.apply_to(file)
}

/// Frees memory that a burst of keys has left empty. Never returns.
async fn free_memory(gate: Gate) {
    const COMPACT_INTERVAL: Duration = Duration::from_secs(60);
    /// By then most requests that use the larger table have ended, and it can be freed.
    const RECHECK_AFTER: Duration = Duration::from_secs(5);
    let mut pause = COMPACT_INTERVAL;
    loop {
        sleep(pause).await;
        let gate = gate.clone();
        // Scanning millions of keys takes milliseconds.
        let is_replaced = tokio::task::spawn_blocking(move || gate.compact()).await;
        pause = if matches!(is_replaced, Ok(true)) { RECHECK_AFTER } else { COMPACT_INTERVAL };
    }
}

/// Prints the listeners and the limits in force.
fn announce(gateway: Option<&Gateway>, listeners: &Listeners, file: &Parsed) {
    let (version, limits) = (env!("CARGO_PKG_VERSION"), limit_summary::summary(file));
    let of_gateway = gateway.into_iter().flat_map(Gateway::addresses);
    let of_gateway = of_gateway.map(|(scheme, address)| format!("gateway {scheme}://{address}"));
    let addresses: Vec<String> = of_gateway.chain(listeners.descriptions()).collect();
    print(format_args!("tollgate {version}: {}; {limits}", addresses.join(", ")));
}
