//! `bench rules`: finding the rules that match a request among many, and the decision.
//!
//! Deliberately not here: HTTP and expressions, whose cost does not depend on the number of rules. Tokens are in
//! `tokens`.

use std::hint::black_box;
use std::time::Duration;

use axum::http::header::HOST;
use axum::http::{HeaderMap, HeaderValue};
use tollgate::{Hit, Limit, Limiter, Rate, TokenBucket};
use tollgate_rules::{Facts, Gate, KeyPart, Match, Rule, RuleSet};

use crate::clock::thread_time;
use crate::race::{self, Rounds, Times, per_decision};
use crate::report::{self, Results, Table};
use crate::tokens;

/// Requests that are checked repeatedly: enough that consecutive ones match other rules and keys.
const REQUESTS: usize = 1024;
/// How often all of them are checked before a slice counts.
const LEAD_IN_TURNS: usize = 2;
/// The largest number of rules, which the benchmark of the layer reports too.
const MANY: usize = 1000;

/// Rules: nanoseconds of processor time from the facts of a request to its outcome.
///
/// Half of the rules match a path, nearly half a host, and one matches every request. A request matches three rules:
/// the one for all, one by its path and one by its host. All limits are token buckets with a header as key, and every
/// request is allowed.
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// End in some seconds: fewer and shorter rounds
    #[arg(long)]
    quick: bool,
}

pub(crate) const FULL: Rounds = Rounds { count: 11, slice: Duration::from_millis(100) };
pub(crate) const QUICK: Rounds = Rounds { count: 5, slice: Duration::from_millis(25) };

/// A contender.
enum Contender {
    /// Rules, and the requests to check.
    Gate(Gate, Requests),
    /// The limits of three rules without the rules: the cost of deciding alone.
    Limiter(Limiter, Requests),
}

/// Which rules the requests match.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Matching {
    Rules,
    /// No rule matches the path, the host or every request.
    Nothing,
}

/// Requests in the form that middleware has them.
struct Requests(Vec<SampleRequest>);

struct SampleRequest {
    path: String,
    headers: HeaderMap,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let rounds = if args.quick { QUICK } else { FULL };
    let field = [
        ("1 rule, which matches", Contender::rules(1, Matching::Rules)?),
        ("10 rules, three match", Contender::rules(10, Matching::Rules)?),
        ("1000 rules, three match", Contender::rules(MANY, Matching::Rules)?),
        ("1000 rules, none matches", Contender::rules(MANY, Matching::Nothing)?),
        ("no rules: the three limits alone", Contender::limits()?),
    ];
    let times = race(&field, rounds);
    let mut table = Table::new("Rules: from the facts of a request to its outcome", ["", "ns"]);
    for times in &times {
        table.row([times.name.to_owned(), format!("{:.0}", times.median())]);
    }
    table.print();
    report::note("");
    let mut results = Results::default();
    let names = ["rules1_ns", "rules10_ns", "rules1000_ns", "rules1000_none_ns", "three_limits_ns"];
    for (times, name) in times.iter().zip(names) {
        results.quantity(name, times.median());
    }
    tokens::run(rounds, &mut results)?;
    report::note("");
    results.print();
    Ok(())
}

/// Nanoseconds per request under a thousand rules.
pub(crate) fn many(rounds: Rounds) -> anyhow::Result<f64> {
    let times = race(&[("1000 rules", Contender::rules(MANY, Matching::Rules)?)], rounds);
    Ok(times[0].median())
}

fn race(field: &[(&'static str, Contender)], rounds: Rounds) -> Vec<Times> {
    let mut times: Vec<Times> = field.iter().map(|(name, _)| Times::new(name)).collect();
    let turns: Vec<usize> = field.iter().map(|(_, contender)| contender.turns_in(rounds.slice)).collect();
    let Ok(()) = race::take_turns::<std::convert::Infallible>(rounds.count, field.len(), |_, turn| {
        let contender = &field[turn].1;
        (0..LEAD_IN_TURNS).for_each(|_| contender.check_all());
        let before = thread_time();
        (0..turns[turn]).for_each(|_| contender.check_all());
        times[turn].push(per_decision(thread_time() - before, turns[turn] * REQUESTS));
        Ok(())
    });
    times
}

impl Contender {
    fn rules(count: usize, meeting: Matching) -> anyhow::Result<Self> {
        let mut rules = RuleSet::builder();
        // One for every request, unless no rule is to match; of the rest, the first half by path, the others by host.
        for number in 0..count {
            let matching = match (number, meeting) {
                (0, Matching::Rules) => Match::everything(),
                _ if number <= count / 2 => Match::everything().path(format!("/api/r{number}/**")),
                _ => Match::everything().host(format!("h{}.example.com", number - count / 2)),
            };
            rules = rules.rule(Rule::new(limit(&format!("rule-{number}"))?).matching(matching).key(user()));
        }
        let (by_path, by_host) = ((count / 2).max(1), count.saturating_sub(count / 2 + 1).max(1));
        let requests = Requests::new(meeting, |request| (1 + request % by_path, 1 + request % by_host))?;
        Ok(Self::Gate(Gate::in_memory(rules.build()?)?, requests))
    }

    fn limits() -> anyhow::Result<Self> {
        let mut limiter = Limiter::builder();
        for name in ["all", "path", "host"] {
            limiter = limiter.limit(limit(name)?);
        }
        Ok(Self::Limiter(limiter.build()?, Requests::new(Matching::Rules, |_| (1, 1))?))
    }

    /// Checks every request once, and panics if one is denied.
    fn check_all(&self) {
        let allowed = match self {
            Self::Gate(gate, requests) => {
                let is_allowed_now = |request: &&SampleRequest| {
                    black_box(gate.decide_now(black_box(&request.facts()))).is_some_and(|outcome| outcome.is_allowed())
                };
                requests.0.iter().filter(is_allowed_now).count()
            }
            Self::Limiter(limiter, requests) => {
                let ids = ["all", "path", "host"].map(|name| limiter.id(name).expect("the limit is there"));
                let is_allowed_now = |request: &&SampleRequest| {
                    let user = request.headers[USER].as_bytes();
                    limiter.decide_now(&ids.map(|id| Hit::new(id, black_box(user)))).is_allowed()
                };
                requests.0.iter().filter(is_allowed_now).count()
            }
        };
        assert_eq!(allowed, REQUESTS, "every request is allowed");
    }

    fn turns_in(&self, slice: Duration) -> usize {
        let before = thread_time();
        (0..LEAD_IN_TURNS).for_each(|_| self.check_all());
        let turn = (thread_time() - before).as_secs_f64() / LEAD_IN_TURNS as f64;
        ((slice.as_secs_f64() / turn) as usize).max(1)
    }
}

impl Requests {
    /// `rule(request)` returns the number of the path and the host of a request.
    fn new(meeting: Matching, rule: impl Fn(usize) -> (usize, usize)) -> anyhow::Result<Self> {
        let request = |number: usize| {
            let (path, host) = rule(number);
            let (path, host) = match meeting {
                Matching::Rules => (format!("/api/r{path}/items"), format!("h{host}.example.com")),
                Matching::Nothing => (format!("/static/r{path}/items"), format!("h{host}.example.org")),
            };
            let mut headers = HeaderMap::new();
            headers.insert(HOST, HeaderValue::try_from(host)?);
            headers.insert("user-agent", HeaderValue::from_static("bench/1.0"));
            headers.insert("accept", HeaderValue::from_static("*/*"));
            headers.insert(USER, HeaderValue::try_from(format!("user:{number:06}"))?);
            anyhow::Ok(SampleRequest { path, headers })
        };
        Ok(Self((0..REQUESTS).map(request).collect::<Result<_, _>>()?))
    }
}

impl SampleRequest {
    fn facts(&self) -> Facts<'_> {
        Facts::new("GET", &self.path).headers(&self.headers)
    }
}

const USER: &str = "x-user-id";

fn user() -> KeyPart {
    KeyPart::header(USER)
}

/// A burst that no run exhausts, refilled by one unit per second.
fn limit(name: &str) -> anyhow::Result<Limit> {
    Ok(Limit::new(name, TokenBucket::new(1_000_000_000, Rate::per_second(1)))?)
}
