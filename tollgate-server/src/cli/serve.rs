//! `tollgate serve`: everything that a rule file names and this version has.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tollgate::Gate;
use tollgate::rules::file::{Address, HostGlob, Listener, Parsed, RuleFile};

use super::{Error, StoreArgument, load, say};
use crate::decisions::Decisions;
use crate::gateway::Gateway;
use crate::listening::{CannotListen, Flag, Setting};
use crate::metrics::Metrics;
use crate::reload::{Given, Hangup, Reload, Reloads, Started};
use crate::service::http::Answering;
use crate::service::{Hosts, Options};
use crate::standing::Standing;
use crate::state::{StateFile, StateWriter};
use crate::{admin, builtin, config, descriptors, limits_told, notice, service, shutdown, threads};

/// What is not given back by then is missing until the limits give it back by themselves.
const RETURN_DEADLINE: Duration = Duration::from_secs(1);

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// The rule file; without one, 10 requests a minute for each user, before an upstream that echoes
    #[arg(long, value_name = "FILE", env = "TOLLGATE_CONFIG")]
    config: Option<PathBuf>,
    /// Where the gateway listens, whatever the rule file says; port 0 takes any free one
    #[arg(long, value_name = "ADDR", env = Flag::LISTEN.variable)]
    listen: Option<Address>,
    /// Where the decision service answers POST /v1/check, whatever the rule file says
    #[arg(long, value_name = "ADDR", env = Flag::HTTP.variable)]
    http: Option<Address>,
    /// Where health and metrics are told, whatever the rule file says
    #[arg(long, value_name = "ADDR", env = Flag::ADMIN.variable)]
    admin: Option<Address>,
    #[command(flatten)]
    store: StoreArgument,
    /// Keeps what keys have spent in this file, so that a restart gives nobody a full quota; for the store in memory
    #[arg(long, value_name = "FILE", env = "TOLLGATE_STATE")]
    state: Option<PathBuf>,
    /// Seconds between two writings of the state file, which is also written when the server ends
    #[arg(long, value_name = "SECONDS", env = "TOLLGATE_STATE_INTERVAL", requires = "state", default_value_t = 10,
        value_parser = clap::value_parser!(u64).range(1..=86_400))]
    state_interval: u64,
}

/// Where to listen, and how.
struct Place {
    address: String,
    setting: Setting,
    options: Options,
    hosts: Hosts,
}

pub(super) async fn run(arguments: Arguments) -> Result<(), Error> {
    let file = rules(&arguments)?;
    let Arguments { config: path, listen, http, admin, store, state, state_interval } = arguments;
    warn_of_what_is_not_served(&file);
    if listen.is_some() && file.gateway.is_none() {
        let fix = "add `gateway: { routes: [...] }` to it, or use --http for the decision service";
        return Err(Error::Usage(format!("{} is for the gateway, and the rule file names none; {fix}", Flag::LISTEN)));
    }
    let given = Given { http, admin, store: store.store };
    let http = place(file.service.http.as_ref(), given.http.as_ref());
    if file.gateway.is_none() && http.is_none() {
        return Err(Error::NothingToServe { config: path.unwrap_or_default() });
    }
    if state.is_some() && !file.store.is_memory() {
        let fix = "leave it out, or use `store: memory`";
        return Err(Error::Usage(format!(
            "--state is for the store in memory, and Redis keeps its keys itself: {fix}"
        )));
    }
    let plan = plan(&file, http.is_some(), given.admin.is_some() || file.admin.is_some())?;
    config::compile(&file, listen.as_ref()).map_err(|problems| Error::Open(problems.into()))?;
    let state = state.map(StateFile::new);
    let gate = match &state {
        Some(state) => state.open(&file).await.map_err(Error::of_state)?,
        None => Gate::open(&file).await.map_err(Error::Open)?,
    };
    notice::warn_of_an_absent_store(&gate);
    let (standing, reloads) = (Arc::new(Standing::default()), Arc::new(Reloads::new()));
    let decisions = Arc::new(Decisions::default());
    let of_admin = Setting::key_or_flag("admin.listen", Flag::ADMIN, given.admin.as_ref());
    let admin = given.admin.clone().or_else(|| file.admin.as_ref().map(|admin| admin.listen.clone()));
    let admin = match admin {
        Some(address) => {
            let (standing, reloads) = (Arc::clone(&standing), Arc::clone(&reloads));
            let decisions = Arc::clone(&decisions);
            let listener = bind(address.as_str(), of_admin).await?;
            let hosts = file.admin.iter().flat_map(|admin| &admin.hosts).map(HostGlob::as_str);
            let hosts = Hosts::new("admin.hosts", hosts, Some(address.as_str()));
            let options = Options { max_connections: plan.admin, ..Options::default() };
            let metrics = Metrics { gate: gate.clone(), standing, reloads, decisions };
            Some(Admin::start(listener, metrics, (options, hosts)))
        }
        None => None,
    };
    let (running, stopping) = watch::channel(());
    let mut surfaces = Served { told: Vec::new(), tasks: Vec::new(), stopping };
    let gateway = match &file.gateway {
        Some(_) => Some(surfaces.gateway(&file, &gate, listen, plan).await?),
        None => None,
    };
    if let Some(mut place) = http {
        place.options.max_connections = plan.service;
        surfaces.service(place, Answering { gate: gate.clone(), decisions }).await?;
    }
    surfaces.told.extend(admin.as_ref().map(|admin| format!("admin http://{}/", admin.bound)));
    let pause = Duration::from_secs(state_interval);
    let state = state.map(|state| StateWriter::start(state, gate.clone(), pause)).transpose().map_err(Error::State)?;
    standing.started(gateway.clone());
    // Before the line below is read, so that whoever reads it can already signal the server.
    let shutdown = shutdown::signal().map_err(Error::Runtime)?;
    // Without a file there is nothing to read again; but whoever asks for it must not end the server.
    let hangup = Hangup::listen().map_err(Error::Runtime)?;
    announce(&surfaces.told, &file);
    tokio::spawn(notice::follow_store(gate.clone()));
    tokio::spawn(notice::watch_memory(gate.clone()));
    tokio::spawn(free_memory(gate.clone()));
    let reloading = path.map(|path| {
        let started = Started { gate: gate.clone(), path, file, hangup, gateway: gateway.clone(), given, reloads };
        Reload::new(started).spawn()
    });
    shutdown.await;
    standing.stopping();
    if let Some(reloading) = reloading {
        reloading.end().await;
    }
    drop(running);
    if let Some(gateway) = &gateway {
        gateway.stop().await;
    }
    for task in surfaces.tasks {
        // A task that panicked has been told of by its panic.
        _ = task.await;
    }
    if let Some(state) = state {
        state.end().await;
    }
    if let Some(store) = gate.redis() {
        _ = timeout(RETURN_DEADLINE, store.return_leases()).await;
    }
    if let Some(admin) = admin {
        admin.end().await;
    }
    Ok(())
}

/// How many connections everything that is served may have, and whether there are threads to serve it.
fn plan(file: &RuleFile, has_service: bool, has_admin: bool) -> Result<descriptors::Plan, Error> {
    let workers = file.gateway.as_ref().map_or(0, Gateway::workers);
    // The access log, what watches the rule file, and the state file have one each.
    threads::check(workers + 3).map_err(Error::Threads)?;
    let max_connections = file.gateway.as_ref().and_then(|gateway| gateway.max_connections);
    descriptors::plan(descriptors::Surfaces { workers, max_connections, has_service, has_admin })
        .map_err(Error::Descriptors)
}

/// The rule file, or the one that is built in, with what the command line says of the store.
fn rules(arguments: &Arguments) -> Result<Parsed, Error> {
    let file = match &arguments.config {
        Some(path) => load(path)?,
        None => builtin::rules().map_err(|problems| Error::Open(problems.into()))?,
    };
    arguments.store.over(file)
}

/// What listens.
struct Served {
    /// What it is, for people.
    told: Vec<String>,
    tasks: Vec<JoinHandle<()>>,
    /// Ends with the server.
    stopping: watch::Receiver<()>,
}

impl Served {
    async fn gateway(
        &mut self,
        file: &Parsed,
        gate: &Gate,
        listen: Option<Address>,
        plan: descriptors::Plan,
    ) -> Result<Arc<Gateway>, Error> {
        let gateway = Gateway::start(file, gate, listen, plan).await.map_err(Error::Gateway)?;
        self.told
            .extend(gateway.addresses().into_iter().map(|(scheme, address)| format!("gateway {scheme}://{address}")));
        Ok(Arc::new(gateway))
    }

    async fn service(&mut self, place: Place, answering: Answering) -> Result<(), Error> {
        let (listener, bound) = bind(&place.address, place.setting).await?;
        self.told.push(format!("decisions POST http://{bound}/v1/check"));
        let stop = self.stop();
        self.tasks.push(tokio::spawn(service::http::run(listener, answering, (place.options, place.hosts), stop)));
        Ok(())
    }

    fn stop(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut stopping = self.stopping.clone();
        async move { _ = stopping.changed().await }
    }
}

/// What is told to operators. It starts before everything else and ends after it, to say how far the server is.
struct Admin {
    bound: SocketAddr,
    running: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Admin {
    fn start((listener, bound): (TcpListener, SocketAddr), metrics: Metrics, asked: (Options, Hosts)) -> Self {
        let (running, stop) = oneshot::channel();
        let task = tokio::spawn(admin::run(listener, metrics, asked, async { _ = stop.await }));
        Self { bound, running, task }
    }

    async fn end(self) {
        drop(self.running);
        // A task that panicked has been told of by its panic.
        _ = self.task.await;
    }
}

async fn bind(address: &str, setting: Setting) -> Result<(TcpListener, SocketAddr), Error> {
    let cannot_listen = |source| Error::Listen(CannotListen { setting, address: address.to_owned(), source });
    let listener = TcpListener::bind(address).await.map_err(cannot_listen)?;
    let bound = listener.local_addr().map_err(cannot_listen)?;
    Ok((listener, bound))
}

fn place(named: Option<&Listener>, given: Option<&Address>) -> Option<Place> {
    let options = named.map(Options::of).unwrap_or_default();
    let address = given.or(named.map(|named| &named.listen))?;
    let setting = Setting::key_or_flag("service.http", Flag::HTTP, given);
    let listed = named.iter().flat_map(|named| &named.hosts).map(HostGlob::as_str);
    let hosts = Hosts::new("service.http.hosts", listed, Some(address.as_str()));
    Some(Place { address: address.as_str().to_owned(), setting, options, hosts })
}

fn warn_of_what_is_not_served(file: &RuleFile) {
    for (name, listener) in [("service.grpc", &file.service.grpc), ("service.resp", &file.service.resp)] {
        if listener.is_some() {
            notice::warn(format_args!("{name} is named, but this version does not serve it yet; service.http it does"));
        }
    }
}

/// Frees memory that a burst of keys has left empty, for ever.
async fn free_memory(gate: Gate) {
    const LOOK_EVERY: Duration = Duration::from_secs(60);
    /// Most requests that use the larger table have ended by then, and it can be freed.
    const FREE_AFTER: Duration = Duration::from_secs(5);
    let mut pause = LOOK_EVERY;
    loop {
        sleep(pause).await;
        let gate = gate.clone();
        // Millions of keys take milliseconds to look through.
        let is_replaced = tokio::task::spawn_blocking(move || gate.compact()).await;
        pause = if matches!(is_replaced, Ok(true)) { FREE_AFTER } else { LOOK_EVERY };
    }
}

/// Says what listens where, and what is in force.
fn announce(told: &[String], file: &RuleFile) {
    let (version, limits) = (env!("CARGO_PKG_VERSION"), limits_told::in_force(file));
    say(format_args!("tollgate {version}: {}; {limits}", told.join(", ")));
}
