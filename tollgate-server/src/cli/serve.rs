//! `tollgate serve`: starts the gateway, the decision service and the admin listener, and stops them in order.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tollgate_config::Parsed;
use tollgate_config::internal::Address;
use tollgate_net::listening::{Ending, Flag};
use tollgate_net::passed_sockets::PassedSockets;
use tollgate_rules::Gate;
use tollgate_telemetry::limit_summary;
use tollgate_telemetry::limited::Limited;
use tollgate_telemetry::notice::{self, LogFormat};
use tollgate_telemetry::seconds::unix_seconds;
use tollgate_telemetry::traces;

use super::{Error, StoreArgument, print, whole_number};
use crate::bans::Bans;
use crate::control::{Commands, ControlSocket, Handover, Inheritance, Predecessor, Successor};
use crate::gateway::Gateway;
use crate::learning::Learners;
use crate::listeners::Listeners;
use crate::readiness::Readiness;
use crate::reload::changes::CliOverrides;
use crate::reload::reloads::Reloads;
use crate::reload::versions::RulesSource;
use crate::reload::{FileSnapshot, Hangup, Reload, Started};
use crate::server_state::ServerState;
use crate::service::throttle::Throttles;
use crate::state::{self, StateFile, StateWriter};
use crate::{builtin, config, listeners, service_manager, shutdown, threads};

/// The longest wait at exit for leases to be returned to Redis. Those that are not returned expire there.
const RETURN_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) const EXAMPLES: &str = "\
Examples:
  tollgate serve
  tollgate serve --config tollgate.yaml --admin 127.0.0.1:8099
  tollgate serve --config tollgate.yaml --store redis://10.0.0.5:6379
  tollgate serve --config tollgate.yaml --state /var/lib/tollgate/state
  tollgate serve --config tollgate.yaml --control /run/tollgate/control";

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
        value_parser = whole_number(1..=86_400_u64))]
    state_interval: u64,
    /// Unix socket for `tollgate reload` and `tollgate restart`; a server that listens there already hands over to this one
    #[arg(long, value_name = "PATH", env = "TOLLGATE_CONTROL")]
    control: Option<PathBuf>,
    /// Format of the log on stderr
    #[arg(long, value_name = "FORMAT", env = "TOLLGATE_LOG_FORMAT", value_enum, default_value_t = LogFormatArgument::Text)]
    log_format: LogFormatArgument,
}

/// The argument for a [`LogFormat`].
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum LogFormatArgument {
    /// Time, level and message
    Text,
    /// One JSON object per line
    Json,
}

impl From<LogFormatArgument> for LogFormat {
    fn from(argument: LogFormatArgument) -> Self {
        match argument {
            LogFormatArgument::Text => Self::Text,
            LogFormatArgument::Json => Self::Json,
        }
    }
}

pub(super) async fn run(arguments: Arguments, passed: PassedSockets) -> Result<(), Error> {
    notice::start(arguments.log_format.into());
    let file = rules(&arguments)?;
    let Arguments { config: path, listen, http, admin, store, state, state_interval, control, log_format: _ } =
        arguments;
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
    let traces = traces::start().map_err(Error::Usage)?;
    // One each for the access log, the watcher of the rule file, and the state file.
    threads::check(file.gateway.as_ref().map_or(0, Gateway::workers) + 3).map_err(Error::Threads)?;
    let descriptors = listeners::check(&file, &overrides)?;
    let passed = Arc::new(passed);
    let control = control.map(ControlSocket::bind).transpose().map_err(Error::Control)?;
    let found = match &control {
        Some(control) => Predecessor::find(control.path(), &passed).await.map_err(Error::Control)?,
        None => None,
    };
    let (predecessor, inheritance) = found.unzip();
    // Counts on Redis stay there.
    let inherited = inheritance.filter(|inherited| inherited.counts.is_some() && file.store.is_memory());
    let learners = match &inherited {
        Some(inherited) => Learners::taken_over(state.as_deref(), &inherited.learned),
        None => Learners::restored(state.as_deref()).map_err(Error::State)?,
    };
    let learners = Arc::new(learners);
    let (file, learned) = learners.attach(file);
    learners.commit(learned);
    config::compile(&file, listen.as_ref()).map_err(|problems| Error::Open(problems.into()))?;
    let loaded = FileSnapshot::of_loaded(&file);
    let state_path = state.clone();
    let state = state.map(StateFile::new);
    let (counts, bans) = inherited.map(|Inheritance { counts, bans, .. }| (counts, bans)).unzip();
    let gate = match (counts.flatten(), &state) {
        (Some(counts), _) => state::open_taken_over(&file, counts).await.map_err(Error::from_state)?,
        (None, Some(state)) => state.open(&file).await.map_err(Error::from_state)?,
        (None, None) => tollgate_config::open_gate(&file).await.map_err(Error::Open)?,
    };
    notice::warn_if_store_unavailable(&gate);
    let source = if path.is_some() { RulesSource::File } else { RulesSource::BuiltIn };
    let (readiness, reloads) = (Arc::new(Readiness::default()), Arc::new(Reloads::new(&file, source)));
    if file.service.xds.is_some() {
        readiness.await_xds(reloads.xds.clone());
    }
    let throttles = Arc::new(Throttles::new(&gate));
    let limited = Arc::new(Limited::new(gate.clone()));
    let bans = Arc::new(match bans {
        Some(bans) => Bans::taken_over(gate.clone(), state_path.as_deref(), &bans),
        None => Bans::restored(gate.clone(), state_path.as_deref()),
    });
    let shared = ServerState {
        gate: gate.clone(),
        throttles: Arc::clone(&throttles),
        decisions: Arc::default(),
        surfaces: Arc::default(),
        readiness: Arc::clone(&readiness),
        reloads: Arc::clone(&reloads),
        learners: Arc::clone(&learners),
        listening: Arc::default(),
        bans: Arc::clone(&bans),
        key_display: Arc::default(),
        limited: Arc::clone(&limited),
        started_at: unix_seconds(),
        passed: Arc::clone(&passed),
    };
    let listeners = Arc::new(Listeners::new(shared, overrides.clone(), descriptors));
    let (admin, service) = listeners.prepare(&file).await?.split_admin();
    // It starts first and ends last, so that `/readyz` can report both. While another process serves, nothing accepts
    // connections before everything that can fail has succeeded.
    let waiting = match predecessor {
        None => {
            listeners.start(admin);
            service
        }
        Some(_) => service.with(admin),
    };
    let gateway = match &file.gateway {
        Some(_) => {
            let gateway = Gateway::start(&file, &gate, listen, descriptors.plan, Arc::clone(&passed)).await;
            Some(Arc::new(gateway.map_err(Error::Gateway)?))
        }
        None => None,
    };
    // Before the service starts: the file may contain reservations, which this process settles from then on.
    let pause = Duration::from_secs(state_interval);
    let writer = if predecessor.is_some() { StateWriter::wait } else { StateWriter::start };
    let mut state = state.map(|state| writer(state, gate.clone(), pause)).transpose().map_err(Error::State)?;
    listeners.start(waiting);
    readiness.set_started(gateway.clone());
    // Installed before the line below is printed, so that its reader can already signal the server.
    let shutdown = shutdown::signal().map_err(Error::Runtime)?;
    // Without a rule file too: SIGHUP must not end the server.
    let hangup = Hangup::listen().map_err(Error::Runtime)?;
    // Nothing after this may end the process: the other one serves no more.
    if let Some(predecessor) = predecessor {
        gate.accept_reservations(&predecessor.take_over(&passed));
        if let Some(state) = &state {
            state.begin();
        }
    }
    passed.warn_of_unused();
    let (successor, mut successors) = mpsc::channel(1);
    let control = control.and_then(|socket| {
        let handover = Handover {
            gate: gate.clone(),
            learners: Arc::clone(&learners),
            bans: Arc::clone(&bans),
            gateway: gateway.clone(),
            listeners: Arc::clone(&listeners),
            passed: Arc::clone(&passed),
            successor,
        };
        let commands = Commands::new(Arc::clone(&reloads), Arc::clone(&readiness), handover);
        match socket.serve(commands) {
            Ok(server) => Some(server),
            Err(error) => {
                notice::error(error);
                None
            }
        }
    });
    announce(gateway.as_deref(), &listeners, &file);
    tokio::spawn(notice::monitor_store(gate.clone()));
    tokio::spawn(notice::monitor_memory(gate.clone()));
    tokio::spawn(free_memory(gate.clone(), Arc::clone(&throttles)));
    tokio::spawn(limited.run());
    let learning = tokio::spawn(Arc::clone(&learners).run(gate.clone()));
    tokio::spawn(bans.run());
    let drain = file.gateway.as_ref().map_or(Duration::ZERO, |gateway| gateway.timeouts.drain.duration());
    let reloading = {
        let (gate, gateway, listeners) = (gate.clone(), gateway.clone(), Arc::clone(&listeners));
        let learners = Arc::clone(&learners);
        Reload::new(Started {
            gate,
            throttles,
            path,
            file,
            loaded,
            hangup,
            gateway,
            listeners,
            overrides,
            reloads,
            learners,
        })
        .spawn()
    };
    service_manager::notify_ready();
    let successor = tokio::select! {
        () = shutdown => None,
        Some(successor) = successors.recv() => Some(successor),
    };
    if successor.is_none() {
        readiness.set_stopping();
    }
    reloading.end().await;
    let ending = match successor {
        None => {
            service_manager::notify_stopping(drain);
            Ending::Stop
        }
        Some(Successor { process, used, released }) => {
            let ending = Ending::TakenOver { used };
            // The other process writes the files from now on.
            learning.abort();
            if let Some(state) = state.take() {
                state.leave().await;
            }
            listeners.begin_stop(&ending);
            if let Some(gateway) = &gateway {
                gateway.hand_over(&ending);
            }
            if let Some(process) = process {
                service_manager::notify_successor(process);
            }
            notice::log("another process has taken over: this one finishes its requests");
            // The other process may have ended in the meantime.
            _ = released.send(());
            ending
        }
    };
    listeners.begin_stop(&ending);
    if let Some(gateway) = &gateway {
        gateway.stop(&ending).await;
    }
    listeners.drained().await;
    if ending == Ending::Stop {
        if let Some(state) = state {
            state.end().await;
        }
        learners.end(&gate);
    }
    if let Some(store) = gate.redis() {
        _ = timeout(RETURN_TIMEOUT, store.leave()).await;
    }
    if let Some(traces) = traces {
        traces.end().await;
    }
    listeners.stop_admin().await;
    if let Some(control) = control {
        control.end(&ending).await;
    }
    Ok(())
}

/// Returns the rule file, or the built-in one, with the store of the command line.
fn rules(arguments: &Arguments) -> Result<Parsed, Error> {
    let file = match &arguments.config {
        Some(path) => {
            let parsed = config::load(path).map_err(Error::Load)?;
            notice::log_problems(parsed.warnings());
            parsed
        }
        None => builtin::rules().map_err(|problems| Error::Open(problems.into()))?,
    };
    arguments.store.apply_to(file)
}

/// Frees memory that a burst of keys has left empty. Never returns.
async fn free_memory(gate: Gate, throttles: Arc<Throttles>) {
    const COMPACT_INTERVAL: Duration = Duration::from_secs(60);
    /// By then most requests that use the larger table have ended, and it can be freed.
    const RECHECK_AFTER: Duration = Duration::from_secs(5);
    let mut pause = COMPACT_INTERVAL;
    loop {
        sleep(pause).await;
        let (gate, throttles) = (gate.clone(), Arc::clone(&throttles));
        // Scanning millions of keys takes milliseconds.
        let is_replaced = tokio::task::spawn_blocking(move || gate.compact() | throttles.compact()).await;
        pause = if matches!(is_replaced, Ok(true)) { RECHECK_AFTER } else { COMPACT_INTERVAL };
    }
}

/// Prints the listeners and the limits in force.
fn announce(gateway: Option<&Gateway>, listeners: &Listeners, file: &Parsed) {
    let (version, limits) = (env!("CARGO_PKG_VERSION"), limit_summary::summary(file));
    let of_gateway = gateway.into_iter().flat_map(Gateway::addresses);
    let of_gateway = of_gateway.map(|(scheme, address)| format!("gateway {scheme}://{address}"));
    let addresses: Vec<String> = of_gateway.chain(listeners.descriptions()).collect();
    let line = format!("tollgate {version}: {}; {limits}", addresses.join(", "));
    // A full disk behind stdout must not stop the server.
    if let Err(error) = print(notice::start_line(&line)) {
        notice::warn(error);
        notice::log(line);
    }
}
