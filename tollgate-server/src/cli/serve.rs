//! `tollgate serve`: starts the gateway, the decision service and the admin listener, and stops them in order.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tollgate::Gate;
use tollgate::rules::file::internal::{Address, HostGlob, Listener, SettingError};
use tollgate::rules::file::{Parsed, RuleFile};

use super::{Error, StoreArgument, load, print};
use crate::decisions::Decisions;
use crate::gateway::Gateway;
use crate::gateway::tls::Tls;
use crate::listening::{Flag, ListenError, Setting};
use crate::metrics::Metrics;
use crate::readiness::Readiness;
use crate::reload::{CliOverrides, Hangup, Reload, Reloads, Started};
use crate::service::grpc::GrpcState;
use crate::service::http::ServiceState;
use crate::service::resp;
use crate::service::surfaces::{Surface, Surfaces};
use crate::service::throttle::Throttles;
use crate::service::tokens::Tokens;
use crate::service::{Hosts, Options};
use crate::state::{StateFile, StateWriter};
use crate::{admin, builtin, config, descriptors, limit_summary, notice, service, shutdown, threads};

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

/// Address and options of the decision service.
struct ServiceListener {
    address: String,
    setting: Setting,
    options: Options,
    hosts: Hosts,
}

pub(super) async fn run(arguments: Arguments) -> Result<(), Error> {
    let file = rules(&arguments)?;
    let Arguments { config: path, listen, http, admin, store, state, state_interval } = arguments;
    if listen.is_some() && file.gateway.is_none() {
        let fix = "add `gateway: { routes: [...] }` to it, or use --http for the decision service";
        return Err(Error::Usage(format!("{} needs a gateway, and the rule file has none; {fix}", Flag::LISTEN)));
    }
    let overrides = CliOverrides { http, admin, store: store.store };
    let http = service_listener(file.service.http.as_ref(), overrides.http.as_ref());
    if file.gateway.is_none() && http.is_none() && file.service.resp.is_none() && file.service.grpc.is_none() {
        return Err(Error::NothingToServe { config: path.unwrap_or_default() });
    }
    if state.is_some() && !file.store.is_memory() {
        let fix = "remove it, or use `store: memory`";
        return Err(Error::Usage(format!(
            "--state is only for the in-memory store, because Redis keeps its own keys: {fix}"
        )));
    }
    if let Some(problem) = unprotected_listener(&file, http.as_ref().map(|http| &*http.address)) {
        return Err(Error::Usage(problem));
    }
    let http_tokens = tokens("service.http", file.service.http.as_ref(), &file)?;
    let resp_tokens = tokens("service.resp", file.service.resp.as_ref(), &file)?;
    let grpc_tokens = tokens("service.grpc", file.service.grpc.as_ref(), &file)?;
    let plan = plan(&file, http.is_some(), overrides.admin.is_some() || file.admin.is_some())?;
    config::compile(&file, listen.as_ref()).map_err(|problems| Error::Open(problems.into()))?;
    let state = state.map(StateFile::new);
    let gate = match &state {
        Some(state) => state.open(&file).await.map_err(Error::from_state)?,
        None => Gate::open(&file).await.map_err(Error::Open)?,
    };
    notice::warn_if_store_unavailable(&gate);
    let (readiness, reloads) = (Arc::new(Readiness::default()), Arc::new(Reloads::new()));
    let decisions = Arc::new(Decisions::default());
    let counts = Arc::new(Surfaces::default());
    let admin_setting = Setting::key_or_flag("admin.listen", Flag::ADMIN, overrides.admin.as_ref());
    let admin = overrides.admin.clone().or_else(|| file.admin.as_ref().map(|admin| admin.listen.clone()));
    let admin = match admin {
        Some(address) => {
            let (readiness, reloads) = (Arc::clone(&readiness), Arc::clone(&reloads));
            let decisions = Arc::clone(&decisions);
            let listener = bind(address.as_str(), admin_setting).await?;
            let hosts = file.admin.iter().flat_map(|admin| &admin.hosts).map(HostGlob::as_str);
            let hosts = Hosts::new("admin.hosts", hosts, Some(address.as_str()));
            let options = Options { max_connections: plan.admin, ..Options::default() };
            let options = options.with_surface(Surface::Admin, &counts);
            let surfaces = Arc::clone(&counts);
            let metrics = Metrics { gate: gate.clone(), readiness, reloads, decisions, surfaces };
            Some(Admin::start(listener, metrics, (options, hosts)))
        }
        None => None,
    };
    let (running, stopping) = watch::channel(());
    let mut surfaces = Running { addresses: Vec::new(), tasks: Vec::new(), stopping };
    let gateway = match &file.gateway {
        Some(_) => Some(surfaces.gateway(&file, &gate, listen, plan).await?),
        None => None,
    };
    if let Some(mut listener) = http {
        listener.options.max_connections = plan.service;
        listener.options.tls = tls("http", &file)?;
        listener.options = listener.options.with_surface(Surface::Http, &counts);
        let decisions = Arc::clone(&decisions);
        surfaces
            .service(listener, ServiceState { gate: gate.clone(), decisions, tokens: http_tokens.map(Arc::new) })
            .await?;
    }
    let throttles = Arc::new(Throttles::new(&gate));
    if let Some(listener) = &file.service.resp {
        let throttles = Arc::clone(&throttles);
        let decisions = Arc::clone(&decisions);
        let engine = resp::Engine { gate: gate.clone(), throttles, decisions, tokens: resp_tokens };
        let options = Options { max_connections: plan.resp, tls: tls("resp", &file)?, ..Options::of(listener) };
        surfaces.resp(listener.listen.as_str(), engine, options.with_surface(Surface::Resp, &counts)).await?;
    }
    if let Some(listener) = &file.service.grpc {
        let (throttles, tokens) = (Arc::clone(&throttles), grpc_tokens.map(Arc::new));
        let state = GrpcState { gate: gate.clone(), decisions: Arc::clone(&decisions), throttles, tokens };
        let options = Options { max_connections: plan.grpc, tls: tls("grpc", &file)?, ..Options::of(listener) };
        surfaces.grpc(listener.listen.as_str(), state, options.with_surface(Surface::Grpc, &counts)).await?;
    }
    surfaces.addresses.extend(admin.as_ref().map(|admin| format!("admin http://{}/", admin.bound)));
    let pause = Duration::from_secs(state_interval);
    let state = state.map(|state| StateWriter::start(state, gate.clone(), pause)).transpose().map_err(Error::State)?;
    readiness.set_started(gateway.clone());
    // Installed before the line below is printed, so that its reader can already signal the server.
    let shutdown = shutdown::signal().map_err(Error::Runtime)?;
    // Without a rule file there is nothing to reload, but SIGHUP must not end the server.
    let hangup = Hangup::listen().map_err(Error::Runtime)?;
    announce(&surfaces.addresses, &file);
    tokio::spawn(notice::monitor_store(gate.clone()));
    tokio::spawn(notice::monitor_memory(gate.clone()));
    tokio::spawn(free_memory(gate.clone()));
    let reloading = path.map(|path| {
        let (gate, gateway) = (gate.clone(), gateway.clone());
        let started = Started { gate, throttles, path, file, hangup, gateway, overrides, reloads };
        Reload::new(started).spawn()
    });
    shutdown.await;
    readiness.set_stopping();
    if let Some(reloading) = reloading {
        reloading.end().await;
    }
    drop(running);
    if let Some(gateway) = &gateway {
        gateway.stop().await;
    }
    for task in surfaces.tasks {
        // A panic has already been reported.
        _ = task.await;
    }
    if let Some(state) = state {
        state.end().await;
    }
    if let Some(store) = gate.redis() {
        _ = timeout(RETURN_TIMEOUT, store.return_leases()).await;
    }
    if let Some(admin) = admin {
        admin.end().await;
    }
    Ok(())
}

/// Divides the file descriptors between the listeners, and checks that enough threads can start.
fn plan(file: &RuleFile, has_service: bool, has_admin: bool) -> Result<descriptors::Plan, Error> {
    let workers = file.gateway.as_ref().map_or(0, Gateway::workers);
    // One each for the access log, the watcher of the rule file, and the state file.
    threads::check(workers + 3).map_err(Error::Threads)?;
    let max_connections = file.gateway.as_ref().and_then(|gateway| gateway.max_connections);
    let wanted = |listener: &Option<Listener>| listener.as_ref().and_then(|listener| listener.max_connections);
    let share = |is_there, wanted| descriptors::Share { is_there, wanted };
    let service = share(has_service, wanted(&file.service.http));
    let resp = share(file.service.resp.is_some(), wanted(&file.service.resp));
    let grpc = share(file.service.grpc.is_some(), wanted(&file.service.grpc));
    let admin = share(has_admin, None);
    descriptors::plan(descriptors::Surfaces { workers, max_connections, service, grpc, resp, admin })
        .map_err(Error::Descriptors)
}

/// Returns the rule file, or the built-in one, with the store of the command line.
fn rules(arguments: &Arguments) -> Result<Parsed, Error> {
    let file = match &arguments.config {
        Some(path) => load(path)?,
        None => builtin::rules().map_err(|problems| Error::Open(problems.into()))?,
    };
    arguments.store.apply_to(file)
}

/// The listeners that run.
struct Running {
    /// A description of each, for the line that announces the start.
    addresses: Vec<String>,
    tasks: Vec<JoinHandle<()>>,
    /// Resolves when the server stops.
    stopping: watch::Receiver<()>,
}

impl Running {
    async fn gateway(
        &mut self,
        file: &Parsed,
        gate: &Gate,
        listen: Option<Address>,
        plan: descriptors::Plan,
    ) -> Result<Arc<Gateway>, Error> {
        let gateway = Gateway::start(file, gate, listen, plan).await.map_err(Error::Gateway)?;
        self.addresses
            .extend(gateway.addresses().into_iter().map(|(scheme, address)| format!("gateway {scheme}://{address}")));
        Ok(Arc::new(gateway))
    }

    async fn service(&mut self, service: ServiceListener, state: ServiceState) -> Result<(), Error> {
        let (listener, bound) = bind(&service.address, service.setting).await?;
        let scheme = if service.options.tls.is_some() { "https" } else { "http" };
        self.addresses.push(format!("decisions POST {scheme}://{bound}/v1/check"));
        let stop = self.stop();
        self.tasks.push(tokio::spawn(service::http::run(listener, state, (service.options, service.hosts), stop)));
        Ok(())
    }

    async fn resp(&mut self, address: &str, engine: resp::Engine, options: Options) -> Result<(), Error> {
        let (listener, bound) = bind(address, Setting::Key("service.resp", None)).await?;
        let scheme = if options.tls.is_some() { "rediss" } else { "redis" };
        self.addresses.push(format!("decisions {scheme}://{bound}"));
        let stop = self.stop();
        self.tasks.push(tokio::spawn(resp::run(listener, engine, options, stop)));
        Ok(())
    }

    async fn grpc(&mut self, address: &str, state: GrpcState, options: Options) -> Result<(), Error> {
        let (listener, bound) = bind(address, Setting::Key("service.grpc", None)).await?;
        let scheme = if options.tls.is_some() { "grpcs" } else { "grpc" };
        self.addresses.push(format!("decisions {scheme}://{bound}"));
        let stop = self.stop();
        self.tasks.push(tokio::spawn(service::grpc::run(listener, state, options, stop)));
        Ok(())
    }

    fn stop(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut stopping = self.stopping.clone();
        async move { _ = stopping.changed().await }
    }
}

/// The admin listener. It starts first and ends last, so that `/readyz` can report both.
struct Admin {
    bound: SocketAddr,
    running: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Admin {
    fn start((listener, bound): (TcpListener, SocketAddr), metrics: Metrics, access: (Options, Hosts)) -> Self {
        let (running, stop) = oneshot::channel();
        let task = tokio::spawn(admin::run(listener, metrics, access, async { _ = stop.await }));
        Self { bound, running, task }
    }

    async fn end(self) {
        drop(self.running);
        // A panic has already been reported.
        _ = self.task.await;
    }
}

async fn bind(address: &str, setting: Setting) -> Result<(TcpListener, SocketAddr), Error> {
    let cannot_listen = |source| Error::Listen(ListenError { setting, address: address.to_owned(), source });
    let listener = service::bind(address).await.map_err(cannot_listen)?;
    let bound = listener.local_addr().map_err(cannot_listen)?;
    Ok((listener, bound))
}

fn service_listener(named: Option<&Listener>, overrides: Option<&Address>) -> Option<ServiceListener> {
    let options = named.map(Options::of).unwrap_or_default();
    let address = overrides.or(named.map(|named| &named.listen))?;
    let setting = Setting::key_or_flag("service.http", Flag::HTTP, overrides);
    let listed = named.iter().flat_map(|named| &named.hosts).map(HostGlob::as_str);
    let hosts = Hosts::new("service.http.hosts", listed, Some(address.as_str()));
    Some(ServiceListener { address: address.as_str().to_owned(), setting, options, hosts })
}

/// Returns why a listener is refused, if other machines reach it without authentication.
fn unprotected(setting: &str, address: &str, listener: Option<&Listener>) -> Option<String> {
    let is_protected =
        |listener: &Listener| listener.open || listener.tokens_file.is_some() || listener.requires_certificates();
    (!listener.is_some_and(is_protected) && !is_loopback(address)).then(|| {
        format!(
            "{setting} listens on {address}, where other machines reach it, without authentication: set \
             `{setting}.tokens_file`, set `{setting}.tls.client_ca`, listen on 127.0.0.1, or set `{setting}.open: true`"
        )
    })
}

/// Returns why a listener of the file is refused, if other machines reach it without authentication. `http` is the
/// address of HTTP, if it is not the one in the file.
pub(super) fn unprotected_listener(file: &RuleFile, http: Option<&str>) -> Option<String> {
    let given = http.and_then(|address| unprotected("service.http", address, file.service.http.as_ref()));
    let mut others = config::service_listeners(file).filter(|(key, ..)| *key != "http" || http.is_none());
    given.or_else(|| {
        others.find_map(|(key, _, listener)| {
            unprotected(&format!("service.{key}"), listener.listen.as_str(), Some(listener))
        })
    })
}

/// Reads the tokens of a listener, if it has any.
fn tokens(setting: &str, listener: Option<&Listener>, file: &Parsed) -> Result<Option<Tokens>, Error> {
    let path = listener.and_then(|listener| listener.tokens_file.as_ref());
    let tokens = path.map(|path| Tokens::open(&file.folder().join(path))).transpose();
    tokens.map_err(|error| Error::Usage(format!("{setting}: {error}")))
}

/// Reads the certificates of a listener, and again when they change.
fn tls(key: &str, file: &Parsed) -> Result<Option<Arc<ArcSwap<TlsAcceptor>>>, Error> {
    let named = config::service_listeners(file).find(|(named, ..)| *named == key);
    let Some((rule, setting)) = named.and_then(|(_, setting, listener)| Some((listener.tls.as_ref()?, setting))) else {
        return Ok(None);
    };
    // They have been read once already, with better messages.
    let unusable =
        |errors: Vec<SettingError>| Error::Usage(errors.first().map(ToString::to_string).unwrap_or_default());
    let tls = Tls::new(rule, file.folder(), setting).map_err(unusable)?;
    let acceptor = Arc::new(ArcSwap::from_pointee(tls.acceptor.clone()));
    let in_use = Arc::clone(&acceptor);
    tokio::spawn(tls.watch_files(move |next| in_use.store(Arc::new(next)), Arc::default()));
    Ok(Some(acceptor))
}

fn is_loopback(address: &str) -> bool {
    match address.parse::<SocketAddr>() {
        Ok(address) => address.ip().to_canonical().is_loopback(),
        Err(_) => address.rsplit_once(':').is_some_and(|(host, _)| host.eq_ignore_ascii_case("localhost")),
    }
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
fn announce(addresses: &[String], file: &Parsed) {
    let (version, limits) = (env!("CARGO_PKG_VERSION"), limit_summary::summary(file));
    print(format_args!("tollgate {version}: {}; {limits}", addresses.join(", ")));
}
