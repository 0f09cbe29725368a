//! Builds rule sets. All work that can be done once is done here.

use std::collections::HashMap;
use std::sync::Arc;

use tollgate::internal::Generation;
use tollgate::{Algorithm, LimitId};
use tollgate_http::internal::Challenge;
use tollgate_http::{Body, Cors, Families, Policy};

use super::last_plans::LastPlans;
use super::{Compiled, Inner, MAX_KEY_PARTS, PerAddress, Phases, PlainRule, RuleSet};
use tollgate::{InvalidLimit, Limit};

use crate::client::TrustedProxies;
#[cfg(feature = "file")]
use crate::demand::Observer;
#[cfg(feature = "file")]
use crate::envoy::Domains;
use crate::index::{Index, Indexed};
use crate::key_map::KeyMap;
#[cfg(feature = "file")]
use crate::limited_keys::limit_hash;
use crate::named_key::KeyReadings;
use crate::request::Tokens;
use crate::rule::{Bound, Mode, Numbers, OverrideTarget, Rule, check_in_flight};
use crate::{KeyPart, PathReading, checks, head};

/// More rules than people write, and as many limits as a limiter supports.
const MAX_RULES: usize = 10_000;
/// Overrides for plans and single keys, over all rules. Each takes some hundred bytes.
const MAX_OVERRIDES: usize = 100_000;

/// Builds a [`RuleSet`].
#[derive(Clone, Default)]
#[must_use]
pub struct RuleSetBuilder {
    rules: Vec<Rule>,
    proxies: TrustedProxies,
    path_reading: PathReading,
    tokens: Option<Tokens>,
    families: Families,
    body: Body,
    cors: Option<Cors>,
    challenge: Option<Challenge>,
    deny_unknown: bool,
    #[cfg(feature = "file")]
    domains: Domains,
    /// The error of an invalid body.
    problem: Option<InvalidLimit>,
}

impl RuleSetBuilder {
    /// Adds a rule. The names of limits must be unique.
    pub fn rule(mut self, rule: Rule) -> Self {
        self.rules.push(rule);
        self
    }

    /// Sets the proxies that are trusted to name their clients. The default is none.
    pub fn trusted_proxies(mut self, proxies: TrustedProxies) -> Self {
        self.proxies = proxies;
        self
    }

    /// Sets how the service reads paths. By default, a limit applies if any plausible reading matches it.
    pub fn path_reading(mut self, reading: PathReading) -> Self {
        self.path_reading = reading;
        self
    }

    /// Sets the header families of responses.
    pub fn headers(mut self, families: Families) -> Self {
        self.families = families;
        self
    }

    /// Sets the body of refusals: a [`Body`], or a plain text with placeholders, as in
    /// [`Template`](tollgate_http::Template).
    ///
    /// ```
    /// use tollgate_rules::RuleSet;
    ///
    /// assert!(RuleSet::builder().body("Too many requests. Try again in {{retry_after}} s.").build().is_ok());
    /// assert!(RuleSet::builder().body("Try again in {{retry}} s.").build().is_err());
    /// ```
    pub fn body(mut self, body: impl TryInto<Body, Error: Into<InvalidLimit>>) -> Self {
        match body.try_into() {
            Ok(body) => self.body = body,
            Err(problem) => self.problem = Some(problem.into()),
        }
        self
    }

    /// Sets the web pages that may read refusals. The default is none.
    pub fn cors(mut self, cors: Cors) -> Self {
        self.cors = Some(cors);
        self
    }

    /// Sets the function that verifies tokens.
    #[doc(hidden)]
    pub fn tokens(mut self, tokens: Tokens) -> Self {
        self.tokens = Some(tokens);
        self
    }

    /// Sets the challenge for clients without a valid token, which then get a 401.
    #[doc(hidden)]
    pub fn challenge(mut self, challenge: Challenge) -> Self {
        self.challenge = Some(challenge);
        self
    }

    /// Sets whether the decision service denies requests that no rule applies to, and unknown plans.
    #[cfg(feature = "file")]
    #[doc(hidden)]
    pub fn deny_unknown(mut self, deny: bool) -> Self {
        self.deny_unknown = deny;
        self
    }

    /// Sets the domains of envoyproxy/ratelimit's configuration, whose rules are added like others.
    #[cfg(feature = "file")]
    #[doc(hidden)]
    pub fn domains(mut self, domains: Domains) -> Self {
        self.domains = domains;
        self
    }

    /// Compiles the rules.
    ///
    /// # Errors
    ///
    /// If a rule is invalid, in the same cases as in a rule file: a path, a method, a host, a header or a body cannot be
    /// parsed, an override has another algorithm than its limit or invalid numbers, a key in a list has another number
    /// of parts than the key of the rule, a setting has no effect, no request can pass, two limits have the same name,
    /// or there are too many rules.
    pub fn build(mut self) -> Result<RuleSet, InvalidLimit> {
        if self.rules.len() > MAX_RULES {
            let problem = format!("{} rules are more than 10000", self.rules.len());
            return Err(InvalidLimit::new("limits", problem, "count by key rather than by rule"));
        }
        check_names(&self.rules)?;
        if let Some(problem) = self.problem {
            return Err(problem);
        }
        let refused = |rule: &Rule| Some(rule.problem()?.clone().of_limit(rule.name()));
        if let Some(problem) = self.rules.iter().find_map(refused) {
            return Err(problem);
        }
        head::add_to_rules(&mut self.rules);
        let has_tokens = self.tokens.is_some();
        self.rules
            .iter()
            .try_for_each(|rule| checks::check(rule, has_tokens).map_err(|error| error.of_limit(rule.name())))?;
        let mut compiling = Compiling::new();
        // The ids of in-flight limits are known only after all limits of the store have theirs.
        let mut ids = Vec::with_capacity(self.rules.len());
        for (number, rule) in (0..).zip(&self.rules) {
            ids.push(match &rule.bound {
                Bound::Rate(limit) => compiling.add_of(number, limit.clone())?,
                Bound::InFlight { .. } => LimitId::new(u32::MAX, compiling.generation),
            });
        }
        let rates = compiling.limits.len();
        let mut compiled = Vec::with_capacity(self.rules.len());
        for (mut rule, limit) in self.rules.into_iter().zip(ids) {
            // A condition that never holds, so that the mode of enabled rules need not be checked.
            if rule.mode == Mode::Disabled {
                rule.matching.conditions.insert(0, ("the limit is enabled".into(), Arc::new(|_| false)));
            }
            rule.note_listed_fingerprints();
            let ban = compiling.ban(&rule, compiled.len() as u32)?;
            let exempt = listed(&rule, "exempt", &rule.exempt.keys, self.path_reading)?;
            let blocked = listed(&rule, "blocked", &rule.blocked.keys, self.path_reading)?;
            check_lists(&rule, &exempt, self.path_reading)?;
            compiled.push(Compiled {
                limit,
                ban,
                by_plan: HashMap::default(),
                by_key: KeyMap::default(),
                exempt,
                blocked,
                strictest: limit,
                rule,
            });
        }
        for (number, compiled) in (0..).zip(&mut compiled) {
            compiling.overrides(number, compiled, self.path_reading)?;
        }
        for (number, compiled) in (0..).zip(&mut compiled) {
            compiling.in_flight(number, compiled, self.path_reading)?;
        }
        let indexed: Vec<Indexed<'_>> = compiled
            .iter()
            .map(|Compiled { rule, .. }| Indexed {
                paths: &rule.matching.paths,
                hosts: &rule.matching.hosts,
                by_name_only: rule.by_name_only,
            })
            .collect();
        let index = Index::new(&indexed);
        let shortcuts: Box<[_]> = compiled.iter().zip(index.indexed_by()).map(|(one, by)| one.shortcut(*by)).collect();
        let in_flight = compiling.owners[compiling.limits.len()..].iter().zip(&compiling.in_flight);
        let in_flight =
            in_flight.map(|(rule, max)| Policy::in_flight(compiled[*rule as usize].rule.name(), *max, self.families));
        let policies =
            compiling.limits.iter().map(|limit| Policy::new(limit, self.families)).chain(in_flight).collect();
        #[cfg(feature = "file")]
        let observers = observers(&compiled, rates);
        let names = compiled.iter().map(|one| one.rule.name().into());
        let have_plans = compiled.iter().any(|one| !one.by_plan.is_empty());
        Ok(RuleSet(Arc::new(Inner {
            numbers: names.zip(0..).collect(),
            may_change: compiled
                .iter()
                .any(|one| one.rule.response_settlement.is_needed() || one.rule.cost.is_estimate()),
            await_responses: compiled.iter().any(|one| one.rule.response_settlement.is_needed()),
            have_deferred: compiled.iter().any(|one| one.rule.response_settlement.is_deferred()),
            per_address: PerAddress::of(&compiled, &index, &shortcuts, &self.proxies),
            have_bans: compiled.iter().any(|one| one.ban.is_some()),
            last_plans: have_plans.then(LastPlans::default),
            deny_unknown: self.deny_unknown,
            phases: Phases::of(&compiled),
            #[cfg(feature = "file")]
            name_hashes: compiled.iter().map(|one| limit_hash(one.rule.name())).collect(),
            plain: PlainRule::of_all(&compiled),
            rules: compiled.into(),
            shortcuts,
            index,
            proxies: self.proxies,
            path_reading: self.path_reading,
            tokens: self.tokens,
            generation: compiling.generation,
            limits: compiling.limits,
            rates,
            in_flight: compiling.in_flight.into(),
            owners: compiling.owners.into(),
            policies,
            body: self.body,
            cors: self.cors,
            challenge: self.challenge,
            #[cfg(feature = "file")]
            observers,
            #[cfg(feature = "file")]
            domains: self.domains,
        })))
    }
}

/// Returns the observers of limits that learn, by limit id.
#[cfg(feature = "file")]
fn observers(compiled: &[Compiled], rates: usize) -> Box<[Option<Arc<Observer>>]> {
    if compiled.iter().all(|one| one.rule.observer.is_none()) {
        return Box::default();
    }
    let mut observers = vec![None; rates];
    for one in compiled {
        if let (Some(observer), Some(place)) = (&one.rule.observer, observers.get_mut(one.limit.index())) {
            *place = Some(observer.clone());
        }
    }
    observers.into()
}

/// Returns a list of keys in normal form.
fn listed(
    rule: &Rule,
    field: &'static str,
    keys: &[Box<[Box<[u8]>]>],
    reading: PathReading,
) -> Result<KeyMap<()>, InvalidLimit> {
    let mut map = KeyMap::default();
    for key in keys {
        // A key may be listed twice.
        _ = map.insert(normal_key(rule, field, key, reading)?.counted(), ());
    }
    Ok(map)
}

/// Checks that no key is both exempt and blocked.
fn check_lists(rule: &Rule, exempt: &KeyMap<()>, reading: PathReading) -> Result<(), InvalidLimit> {
    for key in &rule.blocked.keys {
        let named = normal_key(rule, "blocked", key, reading)?;
        if exempt.get(named.counted()).is_some() {
            let problem = format!("`{}` is blocked and exempt", named.texts().join(", "));
            let fix = "remove it from one of the lists";
            return Err(InvalidLimit::new("blocked", problem, fix).of_limit(rule.name()));
        }
    }
    Ok(())
}

/// Returns the normal form of a key in a list or an override.
fn normal_key<'k>(
    rule: &Rule,
    field: &'static str,
    key: &'k [Box<[u8]>],
    reading: PathReading,
) -> Result<KeyReadings<'k>, InvalidLimit> {
    let parts: Vec<&[u8]> = key.iter().map(|part| &**part).collect();
    let named = rule.named_key(&parts, reading);
    named.map_err(|error| InvalidLimit::new(field, error.problem(), error.fix()).of_limit(rule.name()))
}

/// Adds the override of a key. The first reading of its path is meant.
fn add_override(
    by_key: &mut KeyMap<LimitId>,
    rule: &Rule,
    key: &[Box<[u8]>],
    (id, reading): (LimitId, PathReading),
) -> Result<(), InvalidLimit> {
    let named = normal_key(rule, "overrides", key, reading)?;
    if by_key.insert(named.counted(), id) {
        return Ok(());
    }
    let problem = format!("two overrides are for the key `{}`", named.texts().join(", "));
    Err(InvalidLimit::new("overrides", problem, "remove one of them").of_limit(rule.name()))
}

fn check_names(rules: &[Rule]) -> Result<(), InvalidLimit> {
    let mut names = std::collections::HashSet::new();
    for rule in rules {
        let name = rule.name();
        if !names.insert(name) {
            let problem = format!("two limits are named `{name}`");
            return Err(InvalidLimit::new("name", problem, "give each limit a name of its own"));
        }
        if rule.key.len() > MAX_KEY_PARTS {
            let problem = format!("a key of {} parts is too long", rule.key.len());
            return Err(InvalidLimit::new("key", problem, "use 8 parts or fewer").of_limit(name));
        }
    }
    Ok(())
}

/// The limits collected so far.
struct Compiling {
    generation: Generation,
    limits: Vec<Limit>,
    /// Maximum requests in flight. Their ids follow those of the limits.
    in_flight: Vec<u64>,
    owners: Vec<u32>,
    overrides: usize,
}

impl Compiling {
    fn new() -> Self {
        let generation = Generation::begin();
        Self { generation, limits: Vec::new(), in_flight: Vec::new(), owners: Vec::new(), overrides: 0 }
    }

    fn add_of(&mut self, rule: u32, limit: Limit) -> Result<LimitId, InvalidLimit> {
        if self.limits.len() == MAX_RULES {
            let problem = "limits, bans and different sets of numbers are more than 10000 together".into();
            return Err(
                InvalidLimit::new("overrides", problem, "use plans rather than single keys").of_limit(limit.name())
            );
        }
        let id = LimitId::new(self.limits.len() as u32, self.generation);
        self.owners.push(rule);
        self.limits.push(limit);
        Ok(id)
    }

    /// Adds a limit on requests in flight and returns its id. No limit of the store may be added afterwards.
    fn add_in_flight(&mut self, rule: u32, max: u64) -> LimitId {
        let id = LimitId::new(self.owners.len() as u32, self.generation);
        self.owners.push(rule);
        self.in_flight.push(max);
        id
    }

    fn ban(&mut self, rule: &Rule, number: u32) -> Result<Option<LimitId>, InvalidLimit> {
        let (Some(ban), Bound::Rate(limit)) = (rule.ban, &rule.bound) else { return Ok(None) };
        let limit = Limit::ban(limit.name(), ban)?.with_settings_of(limit);
        self.add_of(number, limit).map(Some)
    }

    fn overrides(&mut self, number: u32, compiled: &mut Compiled, reading: PathReading) -> Result<(), InvalidLimit> {
        self.overrides += compiled.rule.overrides.len();
        if self.overrides > MAX_OVERRIDES {
            let problem = format!("{} overrides are more than 100000", self.overrides);
            return Err(InvalidLimit::new("overrides", problem, "use plans rather than single keys"));
        }
        let Compiled { rule, by_plan, by_key, .. } = compiled;
        let Bound::Rate(limit) = &rule.bound else { return Ok(()) };
        let mut known: Vec<(Algorithm, LimitId)> = Vec::new();
        for (target, numbers) in &rule.overrides {
            let Numbers::Rate(algorithm) = numbers else {
                let problem = "an override limits requests in flight, but its limit does not".into();
                let fix = "use a limit of its own for that";
                return Err(InvalidLimit::new("overrides", problem, fix).of_limit(limit.name()));
            };
            let id = match known.iter().find(|(other, _)| other == algorithm) {
                Some((_, id)) => *id,
                None => {
                    let id = self.add_of(number, variant(limit, *algorithm)?)?;
                    known.push((*algorithm, id));
                    id
                }
            };
            match target {
                OverrideTarget::Plan(plan) => _ = by_plan.insert(plan.clone(), id),
                OverrideTarget::Key(parts) => add_override(by_key, rule, parts, (id, reading))?,
            }
        }
        if rule.may_read_path() || rule.key.iter().any(KeyPart::may_have_two_names) {
            let own = *limit.algorithm();
            let strictest = known.iter().fold(own, |strictest, (numbers, _)| strictest.strictest(*numbers));
            compiled.strictest = match known.iter().find(|(numbers, _)| *numbers == strictest) {
                Some((_, id)) => *id,
                None if strictest == own => compiled.limit,
                None => self.add_of(number, variant(limit, strictest)?)?,
            };
        }
        Ok(())
    }
}

impl Compiling {
    /// Compiles a rule that limits requests in flight.
    fn in_flight(&mut self, number: u32, compiled: &mut Compiled, reading: PathReading) -> Result<(), InvalidLimit> {
        let Compiled { rule, limit, by_plan, by_key, .. } = compiled;
        let Bound::InFlight { name, max } = &rule.bound else { return Ok(()) };
        let of_rates = [
            ("ban", rule.ban.is_some()),
            ("cost", rule.cost.is_estimate()),
            ("count", rule.response_settlement.count.is_some() || rule.response_settlement.is_deferred()),
            ("settle", rule.response_settlement.settle_by.is_some()),
            ("overrides", rule.overrides.iter().any(|(_, numbers)| matches!(numbers, Numbers::Rate(_)))),
        ];
        if let Some((field, _)) = of_rates.iter().find(|(_, is_there)| *is_there) {
            let problem = format!("{field} does not apply to a limit on requests in flight");
            return Err(InvalidLimit::new(field, problem, "remove it, or use a separate limit").of_limit(name));
        }
        *limit = self.add_in_flight(number, *max);
        for (target, numbers) in &rule.overrides {
            let Numbers::InFlight(max) = numbers else { continue };
            check_in_flight(*max).map_err(|error| error.of_limit(name))?;
            let id = self.add_in_flight(number, *max);
            match target {
                OverrideTarget::Plan(plan) => _ = by_plan.insert(plan.clone(), id),
                OverrideTarget::Key(parts) => add_override(by_key, rule, parts, (id, reading))?,
            }
        }
        Ok(())
    }
}

/// Returns the limit with other numbers.
fn variant(limit: &Limit, algorithm: Algorithm) -> Result<Limit, InvalidLimit> {
    if std::mem::discriminant(&algorithm) != std::mem::discriminant(limit.algorithm()) {
        let problem = "an override has another algorithm than its limit".into();
        let fix = "change numbers only, or use a limit of its own";
        return Err(InvalidLimit::new("overrides", problem, fix).of_limit(limit.name()));
    }
    Ok(Limit::new(limit.name(), algorithm)?.with_settings_of(limit))
}
