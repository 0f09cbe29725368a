//! File descriptors: how many the process may open, and how they are divided.
//!
//! A process without a free descriptor accepts no connection, not even for health checks. So each listener has a share,
//! and upstreams, the store, logs and the runtime get theirs before clients do.

use std::fmt;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tollgate_telemetry::notice;

/// Reserved for standard streams, the rule file and its watcher, certificates, logs, the store and the runtime.
const RESERVED: u64 = 64;

/// Reserved for each worker: its poll, its wake-up, its pipe, its listeners, and connections for health checks.
const PER_WORKER: u64 = 10;

/// Descriptors of 8 clients: each has its own connection and one to an upstream, and one more client in 8 may be
/// receiving a refusal.
const PER_EIGHT_CLIENTS: u64 = 17;

/// Each listener of the decision service, and the admin listener, gets one in this many descriptors.
const LISTENER_PART: u64 = 10;

/// The most connections of such a listener, unless it has `max_connections`. Idle HTTP connections take about 10 KiB each.
pub const MAX_LISTENER_CONNECTIONS: u32 = 4_096;

/// With `max_connections`, a listener may get up to one in this many descriptors.
const MAX_LISTENER_PART: u64 = 6;

/// The fewest connections of a listener.
const MIN_CONNECTIONS: u64 = 8;

/// The most descriptors, if the system sets no limit: memory is the bound then.
const MAX_DESCRIPTORS: u64 = 1 << 20;

/// The listeners to divide descriptors between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Surfaces {
    /// Workers of the gateway; 0 without a gateway.
    pub workers: usize,
    /// `gateway.max_connections`.
    pub max_connections: Option<u32>,
    /// The decision service over HTTP.
    pub service: Share,
    /// The decision service over gRPC.
    pub grpc: Share,
    /// The decision service over the Redis protocol.
    pub resp: Share,
    /// The admin listener.
    pub admin: Share,
}

/// A listener of the decision service, or the admin listener.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Whether there is such a listener.
    pub is_there: bool,
    /// Its `max_connections`.
    pub wanted: Option<u32>,
}

/// The most connections of each listener, and of the gateway to upstreams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// From clients to the gateway, over all workers.
    pub gateway: i64,
    /// From the gateway to upstreams, over all workers.
    pub upstreams: usize,
    /// To the decision service over HTTP.
    pub service: u32,
    /// To the decision service over gRPC.
    pub grpc: u32,
    /// To the decision service over the Redis protocol.
    pub resp: u32,
    /// To the admin listener.
    pub admin: u32,
}

/// The process may not open enough files to serve a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooFewDescriptors {
    allowed: u64,
    needed: u64,
}

impl fmt::Display for TooFewDescriptors {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { allowed, needed } = self;
        write!(
            out,
            "the process may open {allowed} files, and at least {needed} are needed: raise the limit (`ulimit -n` in a \
             shell, LimitNOFILE= under systemd, --ulimit nofile= with Docker), or set fewer gateway.workers"
        )
    }
}

/// Raises the soft limit on open files to the hard limit, and divides the descriptors. Lowers a `max_connections` that
/// does not fit, with a warning.
pub fn plan(surfaces: Surfaces) -> Result<Plan, TooFewDescriptors> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: maximum, maximum };
    let allowed = if setrlimit(Resource::Nofile, wanted).is_ok() { maximum } else { current };
    let allowed = allowed.unwrap_or(MAX_DESCRIPTORS).min(MAX_DESCRIPTORS);
    let plan = share(allowed, surfaces)?;
    warn_of_lowered(&plan, allowed, surfaces);
    Ok(plan)
}

/// Warns about each `max_connections` that does not fit.
fn warn_of_lowered(plan: &Plan, allowed: u64, surfaces: Surfaces) {
    if let Some(wanted) = surfaces.max_connections.map(i64::from).filter(|wanted| *wanted > plan.gateway) {
        let (fits, needed) = (plan.gateway, needed(surfaces, wanted.unsigned_abs()));
        notice::warn(format_args!(
            "gateway.max_connections {wanted} is lowered to {fits}: the process may open {allowed} files, and {needed} \
             are needed: raise the limit (`ulimit -n` in a shell, LimitNOFILE= under systemd, --ulimit nofile= with \
             Docker), or set max_connections to {fits}"
        ));
    }
    let Surfaces { service, grpc, resp, .. } = surfaces;
    let listeners = [("http", service, plan.service), ("grpc", grpc, plan.grpc), ("resp", resp, plan.resp)];
    for (key, share, fits) in listeners {
        if let Some(wanted) = share.wanted.filter(|wanted| *wanted > fits) {
            notice::warn(format_args!(
                "service.{key}.max_connections {wanted} is lowered to {fits}: the process may open {allowed} files: \
                 raise the limit (`ulimit -n` in a shell, LimitNOFILE= under systemd, --ulimit nofile= with Docker), \
                 or set max_connections to {fits}"
            ));
        }
    }
}

fn share(allowed: u64, surfaces: Surfaces) -> Result<Plan, TooFewDescriptors> {
    let shares = listener_shares(allowed, surfaces);
    let listeners = shares.iter().copied().map(client_descriptors).sum::<u64>();
    let [service, grpc, resp, admin] = shares;
    let left = allowed.saturating_sub(reserved(surfaces) + listeners);
    let fits = left * 8 / PER_EIGHT_CLIENTS;
    let least = if surfaces.workers > 0 { MIN_CONNECTIONS } else { 0 };
    if fits < least || allowed < reserved(surfaces) + listeners {
        return Err(TooFewDescriptors { allowed, needed: needed(surfaces, least) });
    }
    let gateway = surfaces.max_connections.map_or(fits, |wanted| fits.min(u64::from(wanted)));
    let number = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
    // A lower max_connections leaves descriptors to upstreams.
    let upstreams = usize::try_from(left.saturating_sub(client_descriptors(gateway))).unwrap_or(usize::MAX);
    let [service, grpc, resp, admin] = [service, grpc, resp, admin].map(number);
    Ok(Plan { gateway: i64::from(number(gateway)), upstreams, service, grpc, resp, admin })
}

/// Returns the descriptors that are not for clients.
fn reserved(surfaces: Surfaces) -> u64 {
    RESERVED + PER_WORKER * u64::try_from(surfaces.workers).unwrap_or(MAX_DESCRIPTORS)
}

/// Returns the descriptors of clients, including those that receive a refusal, without upstreams.
fn client_descriptors(clients: u64) -> u64 {
    clients + clients.div_ceil(8)
}

/// Returns the connections of the decision service or the admin listener.
fn listener_share(allowed: u64, share: Share) -> u64 {
    match share {
        Share { is_there: false, .. } => 0,
        Share { wanted: None, .. } => (allowed / LISTENER_PART).clamp(MIN_CONNECTIONS, MAX_LISTENER_CONNECTIONS.into()),
        Share { wanted: Some(wanted), .. } => u64::from(wanted).min((allowed / MAX_LISTENER_PART).max(MIN_CONNECTIONS)),
    }
}

/// Returns the shares of HTTP, gRPC, the Redis protocol and the admin listener.
fn listener_shares(allowed: u64, surfaces: Surfaces) -> [u64; 4] {
    let Surfaces { service, grpc, resp, admin, .. } = surfaces;
    [service, grpc, resp, admin].map(|share| listener_share(allowed, share))
}

/// Returns the descriptors that are needed for this many connections of the gateway, and for everything else.
fn needed(surfaces: Surfaces, clients: u64) -> u64 {
    let own = reserved(surfaces) + (clients * PER_EIGHT_CLIENTS).div_ceil(8);
    let mut needed = own;
    // The shares of the listeners are at most three quarters of the whole, so this ends.
    loop {
        match own + listener_shares(needed, surfaces).into_iter().map(client_descriptors).sum::<u64>() {
            enough if enough <= needed => return needed,
            more => needed = more,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_telemetry::notice::captured::lines_of;

    const THERE: Share = Share { is_there: true, wanted: None };
    const ABSENT: Share = Share { is_there: false, wanted: None };
    const ALL: Surfaces =
        Surfaces { workers: 2, max_connections: None, service: THERE, grpc: ABSENT, resp: ABSENT, admin: THERE };

    #[test]
    fn too_few_descriptors_are_reported_with_the_fix() {
        let wanted = |wanted| Share { is_there: true, wanted: Some(wanted) };
        let surfaces = Surfaces {
            max_connections: Some(5_000),
            service: wanted(900),
            grpc: wanted(800),
            resp: wanted(700),
            ..ALL
        };
        let plan = share(1024, surfaces).expect("a few clients fit");
        let lines = lines_of(|| warn_of_lowered(&plan, 1024, surfaces));
        let error = share(64, ALL).expect_err("no client fits");
        insta::assert_snapshot!(format!("{lines}\n{error}"));
    }

    #[test]
    fn shares_never_exceed_the_limit() {
        for allowed in (0..5000).chain([20_000, 1 << 20]) {
            for workers in [0, 1, 2, 64] {
                for resp in [ABSENT, THERE, Share { is_there: true, wanted: Some(2_000) }] {
                    let surfaces = Surfaces { workers, resp, grpc: resp, ..ALL };
                    let Ok(plan) = share(allowed, surfaces) else { continue };
                    let taken = reserved(surfaces)
                        + client_descriptors(plan.gateway.unsigned_abs())
                        + u64::try_from(plan.upstreams).unwrap()
                        + u64::from(plan.service + plan.grpc + plan.resp + plan.admin);
                    assert!(taken <= allowed, "{allowed} {surfaces:?} {plan:?}");
                    assert!(workers == 0 || plan.gateway >= MIN_CONNECTIONS as i64, "{allowed} {surfaces:?} {plan:?}");
                    // A client that is refused takes an eighth of a descriptor, so one may be missing.
                    assert!(plan.upstreams as i64 >= plan.gateway - 1, "{allowed} {surfaces:?} {plan:?}");
                }
            }
        }
    }

    #[test]
    fn few_descriptors_serve_few_clients_and_too_few_are_refused() {
        let plan = |gateway, upstreams, each| {
            let (service, grpc, resp, admin) = (each, 0, 0, each);
            Ok(Plan { gateway, upstreams, service, grpc, resp, admin })
        };
        assert_eq!(share(256, ALL), plan(53, 54, 25));
        assert_eq!(share(1024, ALL), plan(334, 334, 102));
        let ten = Surfaces { max_connections: Some(10), ..ALL };
        assert_eq!(share(1024, ten), plan(10, 698, 102));
        let wanted = Surfaces { service: Share { is_there: true, wanted: Some(1_000) }, ..ALL };
        assert_eq!(share(1024, wanted).unwrap().service, 170);
        assert!(share(100, ALL).is_err());
    }

    #[test]
    fn needed_descriptors_are_enough() {
        for clients in [8, 100, 240, 1000, 4095, 4096, 5000, 100_000] {
            for admin in [ABSENT, THERE] {
                let surfaces = Surfaces { admin, ..ALL };
                let needed = needed(surfaces, clients);
                let plan = share(needed, surfaces).unwrap();
                assert!(plan.gateway.unsigned_abs() >= clients, "{clients} need {needed}, which gives {plan:?}");
            }
        }
    }
}
