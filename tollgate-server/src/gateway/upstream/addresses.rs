//! The addresses of an upstream's host name.
//!
//! The system's resolver does not report how long an answer is valid, so an answer is used for a few seconds and then
//! refreshed in the background: no request waits for the resolver once there is an answer. If resolving fails, the last
//! answer stays in use. An address that is missing from the answers for a while is gone, and connections to it are not
//! used again.
//!
//! Deliberately not here: connecting, which [`connect`](super::connect) does.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tollgate_net::deadline::{Tick, Wait};

/// How long an answer is used before the name is resolved again. Short, since a deployment changes addresses in
/// seconds; a resolver on the machine or in the cluster takes this easily.
const FRESH_FOR: Duration = Duration::from_secs(5);

/// How old an answer may be and still be used while the name is being resolved again. An older one is used if there is
/// no new one after [`MAX_WAIT`].
const STALE_FOR: Duration = Duration::from_secs(30);

/// How long a connection waits for a new answer where there is an old one.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// How long an address that answers no longer name stays in use. Some servers answer with a part of their addresses at
/// a time, so an address is gone only when several answers in a row lack it.
const GONE_AFTER: Duration = Duration::from_secs(15);

/// How long an address that failed is tried after the others.
const AVOIDED_FOR: Duration = Duration::from_secs(30);

/// Addresses of one name that are remembered. More are of no use to one gateway.
const MAX_ADDRESSES: usize = 64;

/// The host of an upstream and its known addresses.
pub(in crate::gateway) struct HostAddresses {
    host: String,
    port: u16,
    /// The host itself, if it is an IP address.
    literal: Option<IpAddr>,
    resolved: watch::Sender<ResolvedHost>,
    is_resolving: AtomicBool,
    /// Incremented whenever an address is removed.
    generation: AtomicU64,
    /// The index of the address that the next connection tries first.
    turn: AtomicUsize,
}

#[derive(Debug, Default)]
struct ResolvedHost {
    addresses: Vec<KnownAddress>,
    /// The start of the last successful query.
    answered_at: Option<Tick>,
    /// The start of the last query, successful or not.
    queried_at: Option<Tick>,
    /// The error of the last query, if it failed.
    error: Option<io::Error>,
    attempts: u64,
}

#[derive(Debug)]
struct KnownAddress {
    ip: IpAddr,
    /// The last answer that listed this address.
    named_at: Tick,
    /// Until then the address is tried last, because a connection to it failed.
    avoided_until: Tick,
}

/// What to do before a connection is opened.
#[derive(Debug, PartialEq, Eq)]
enum Refresh {
    Unneeded,
    InBackground,
    /// Wait, but only briefly: there is an old answer.
    Soon,
    /// Wait: there is no answer.
    First,
}

impl HostAddresses {
    /// `host` is a name, an IPv4 address, or an IPv6 address with or without brackets.
    pub(in crate::gateway) fn new(host: &str, port: u16) -> Self {
        let host = host.trim_matches(['[', ']']);
        Self {
            host: host.to_owned(),
            port,
            literal: host.parse().ok(),
            resolved: watch::Sender::default(),
            is_resolving: AtomicBool::new(false),
            generation: AtomicU64::new(0),
            turn: AtomicUsize::new(0),
        }
    }

    /// Returns the addresses to connect to, in the order in which to try them; at least one.
    pub(super) async fn to_try(self: &Arc<Self>, now: Tick) -> io::Result<Vec<SocketAddr>> {
        if let Some(literal) = self.literal {
            return Ok(vec![SocketAddr::new(literal, self.port)]);
        }
        let refresh = self.resolved.borrow().refresh(now);
        let mut updates = self.resolved.subscribe();
        let attempts = updates.borrow_and_update().attempts;
        if refresh != Refresh::Unneeded {
            self.resolve(now);
        }
        let finished = updates.wait_for(|resolved| resolved.attempts > attempts);
        match refresh {
            Refresh::Unneeded | Refresh::InBackground => {}
            Refresh::Soon => _ = timeout(MAX_WAIT, finished).await,
            Refresh::First => _ = finished.await,
        }
        let resolved = self.resolved.borrow();
        let ordered = resolved.ordered(self.turn.fetch_add(1, Relaxed), now);
        if ordered.is_empty() {
            return Err(resolved.error());
        }
        Ok(ordered.into_iter().map(|ip| SocketAddr::new(ip, self.port)).collect())
    }

    /// Resolves the name again in the background if that is due.
    pub(super) fn refresh(self: &Arc<Self>, now: Tick) {
        if self.literal.is_none() && self.resolved.borrow().refresh(now) != Refresh::Unneeded {
            self.resolve(now);
        }
    }

    /// Returns whether an address still belongs to the host. `seen` is the generation of the caller's last check, so
    /// that this costs one load while no address is removed.
    pub(in crate::gateway) fn has(&self, ip: IpAddr, seen: &mut u64) -> bool {
        let generation = self.generation();
        let has = *seen == generation || self.resolved.borrow().addresses.iter().any(|address| address.ip == ip);
        if has {
            *seen = generation;
        }
        has
    }

    /// Returns a number that changes whenever an address is removed.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Relaxed)
    }

    /// Moves an address to the end of the order for a while.
    pub(super) fn avoid(&self, ip: IpAddr, now: Tick) {
        self.resolved.send_if_modified(|resolved| {
            if let Some(address) = resolved.addresses.iter_mut().find(|address| address.ip == ip) {
                address.avoided_until = Wait::at_least(AVOIDED_FOR).from(now);
            }
            // No task waits for this change.
            false
        });
    }

    /// Starts a query, unless one is running. The query continues when the caller is dropped, so there is at most one
    /// query per name, however many requests wait.
    fn resolve(self: &Arc<Self>, now: Tick) {
        if self.is_resolving.swap(true, Relaxed) {
            return;
        }
        let mut attempt = Attempt { host: Arc::clone(self), queried_at: now, answer: None };
        tokio::spawn(async move {
            let answer = tokio::net::lookup_host((attempt.host.host.as_str(), attempt.host.port)).await;
            attempt.note(answer.map(|found| found.map(|address| address.ip()).collect()));
        });
    }

    fn note_attempt(&self, answer: io::Result<Vec<IpAddr>>, queried_at: Tick) {
        let answer = answer.and_then(|ips| match ips.is_empty() {
            true => Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address")),
            false => Ok(ips),
        });
        self.resolved.send_modify(|resolved| {
            resolved.attempts += 1;
            resolved.queried_at = Some(queried_at);
            match answer {
                Ok(ips) => {
                    if resolved.note_answer(ips, queried_at) {
                        self.generation.fetch_add(1, Relaxed);
                    }
                }
                Err(error) => resolved.error = Some(error),
            }
        });
    }
}

/// A query for the addresses of a name. Its result is stored on drop, so that no task waits for a cancelled query.
struct Attempt {
    host: Arc<HostAddresses>,
    queried_at: Tick,
    answer: Option<io::Result<Vec<IpAddr>>>,
}

impl Attempt {
    fn note(&mut self, answer: io::Result<Vec<IpAddr>>) {
        self.answer = Some(answer);
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let cancelled = || Err(io::Error::new(io::ErrorKind::Interrupted, "resolving the name was cancelled"));
        self.host.is_resolving.store(false, Relaxed);
        self.host.note_attempt(self.answer.take().unwrap_or_else(cancelled), self.queried_at);
    }
}

impl ResolvedHost {
    fn refresh(&self, now: Tick) -> Refresh {
        let is_within = |at: Option<Tick>, span| at.is_some_and(|at| Wait::at_most(span).from(at) > now);
        match self.answered_at {
            // A name that cannot be resolved is not queried again by every request.
            _ if is_within(self.queried_at, FRESH_FOR) => Refresh::Unneeded,
            None => Refresh::First,
            Some(_) if is_within(self.answered_at, STALE_FOR) => Refresh::InBackground,
            // The resolver fails, and waiting for it would delay every connection.
            Some(_) if self.error.is_some() => Refresh::InBackground,
            Some(_) => Refresh::Soon,
        }
    }

    /// Stores an answer. Returns whether an address was removed.
    fn note_answer(&mut self, ips: Vec<IpAddr>, now: Tick) -> bool {
        for ip in ips {
            match self.addresses.iter().position(|address| address.ip == ip) {
                Some(number) => self.addresses[number].named_at = now,
                None if self.addresses.len() < MAX_ADDRESSES => {
                    self.addresses.push(KnownAddress { ip, named_at: now, avoided_until: 0 });
                }
                None => {}
            }
        }
        (self.answered_at, self.error) = (Some(now), None);
        let before = self.addresses.len();
        self.addresses.retain(|address| Wait::at_most(GONE_AFTER).from(address.named_at) > now);
        self.addresses.len() < before
    }

    /// Returns the addresses of the last answer: starting at `turn`, recently failed ones last, IPv4 and IPv6
    /// alternating (RFC 8305, section 4).
    fn ordered(&self, turn: usize, now: Tick) -> Vec<IpAddr> {
        let named: Vec<&KnownAddress> =
            self.addresses.iter().filter(|address| Some(address.named_at) == self.answered_at).collect();
        let from_turn = (0..named.len()).map(|step| named[(turn + step) % named.len()]);
        let (avoided, good): (Vec<_>, Vec<_>) = from_turn.partition(|address| address.avoided_until > now);
        [good, avoided].into_iter().flat_map(alternating).collect()
    }

    fn error(&self) -> io::Error {
        match &self.error {
            Some(error) => match error.raw_os_error() {
                Some(code) => io::Error::from_raw_os_error(code),
                None => io::Error::new(error.kind(), error.to_string()),
            },
            None => io::Error::new(io::ErrorKind::NotFound, "the name has no address"),
        }
    }
}

fn alternating(addresses: Vec<&KnownAddress>) -> Vec<IpAddr> {
    let is_ipv4 = addresses.first().is_some_and(|first| first.ip.is_ipv4());
    let (first, second): (Vec<IpAddr>, Vec<IpAddr>) =
        addresses.into_iter().map(|address| address.ip).partition(|ip| ip.is_ipv4() == is_ipv4);
    let (mut first, mut second) = (first.into_iter(), second.into_iter());
    let mut all = Vec::new();
    loop {
        let before = all.len();
        all.extend(first.next().into_iter().chain(second.next()));
        if all.len() == before {
            return all;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Tick = 10;

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().expect("an address")).collect()
    }

    fn resolved(texts: &[&str]) -> ResolvedHost {
        let mut resolved = ResolvedHost::default();
        resolved.note_answer(ips(texts), 0);
        resolved.queried_at = Some(0);
        resolved
    }

    #[test]
    fn connections_begin_with_each_address_in_turn_and_alternate_between_families() {
        let resolved = resolved(&["::1", "::2", "10.0.0.1", "10.0.0.2"]);
        assert_eq!(resolved.ordered(0, 0), ips(&["::1", "10.0.0.1", "::2", "10.0.0.2"]));
        assert_eq!(resolved.ordered(1, 0), ips(&["::2", "10.0.0.1", "::1", "10.0.0.2"]));
        assert_eq!(resolved.ordered(2, 0), ips(&["10.0.0.1", "::1", "10.0.0.2", "::2"]));
        assert_eq!(resolved.ordered(7, 0), ips(&["10.0.0.2", "::1", "10.0.0.1", "::2"]));
    }

    #[test]
    fn address_that_failed_is_tried_last_for_a_while() {
        let host = HostAddresses::new("h", 80);
        host.note_attempt(Ok(ips(&["10.0.0.1", "10.0.0.2"])), 0);
        host.avoid(ips(&["10.0.0.1"])[0], 0);
        for turn in 0..4 {
            assert_eq!(host.resolved.borrow().ordered(turn, SECOND)[0], ips(&["10.0.0.2"])[0]);
        }
        assert_eq!(host.resolved.borrow().ordered(0, 31 * SECOND)[0], ips(&["10.0.0.1"])[0]);
    }

    #[test]
    fn answer_is_refreshed_in_the_background_and_waited_for_only_when_it_is_old() {
        assert_eq!(ResolvedHost::default().refresh(0), Refresh::First);
        let mut resolved = resolved(&["10.0.0.1"]);
        assert_eq!(resolved.refresh(5 * SECOND - 1), Refresh::Unneeded);
        assert_eq!(resolved.refresh(5 * SECOND), Refresh::InBackground);
        assert_eq!(resolved.refresh(30 * SECOND), Refresh::Soon);
        resolved.error = Some(io::ErrorKind::TimedOut.into());
        assert_eq!(resolved.refresh(30 * SECOND), Refresh::InBackground);
    }

    #[test]
    fn last_answer_stays_in_use_while_resolving_fails() {
        let host = HostAddresses::new("h", 80);
        host.note_attempt(Ok(ips(&["10.0.0.1"])), 0);
        for failed_at in [10, 1_000, 100_000] {
            host.note_attempt(Err(io::ErrorKind::TimedOut.into()), failed_at * SECOND);
            assert_eq!(host.resolved.borrow().ordered(0, failed_at * SECOND), ips(&["10.0.0.1"]));
        }
        host.note_attempt(Ok(Vec::new()), 200_000 * SECOND);
        assert_eq!(host.resolved.borrow().ordered(0, 200_000 * SECOND), ips(&["10.0.0.1"]));
    }

    #[test]
    fn address_is_gone_when_answers_lack_it_for_a_while() {
        let host = HostAddresses::new("h", 80);
        let (old, new) = (ips(&["10.0.0.1"]), ips(&["10.0.0.2"]));
        host.note_attempt(Ok(old.clone()), 0);
        let mut seen = host.generation();
        assert!(host.has(old[0], &mut seen));
        host.note_attempt(Ok(new.clone()), 5 * SECOND);
        assert_eq!(host.resolved.borrow().ordered(0, 5 * SECOND), new, "new connections use the new answer at once");
        assert!(host.has(old[0], &mut seen), "a partial answer ends no connection");
        host.note_attempt(Ok(new.clone()), 15 * SECOND);
        assert!(!host.has(old[0], &mut seen));
        assert!(host.has(new[0], &mut seen));
    }

    #[test]
    fn number_of_addresses_is_bounded() {
        let host = HostAddresses::new("h", 80);
        let many = (0..1000u32).map(|number| IpAddr::from(number.to_be_bytes())).collect();
        host.note_attempt(Ok(many), 0);
        assert_eq!(host.resolved.borrow().ordered(0, 0).len(), MAX_ADDRESSES);
    }

    #[tokio::test]
    async fn names_are_resolved_by_the_system_and_literals_are_not_resolved() {
        let host = Arc::new(HostAddresses::new("localhost", 81));
        let found = host.to_try(0).await.expect("localhost has addresses");
        assert!(found.iter().all(|address| address.ip().is_loopback() && address.port() == 81), "{found:?}");
        let literal = Arc::new(HostAddresses::new("[::1]", 81));
        assert_eq!(literal.to_try(0).await.expect("it is one"), ["[::1]:81".parse().expect("an address")]);
        let none = Arc::new(HostAddresses::new("no-such-host.invalid", 81));
        assert!(none.to_try(0).await.is_err());
    }
}
