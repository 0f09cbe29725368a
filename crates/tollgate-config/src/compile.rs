//! Compiles a rule file into rules that decide.
//!
//! Reports the problems that the text alone does not show: files that do not exist, and keys in them that do not fit.

use std::path::Path;
use std::sync::Arc;

use tollgate::Ban;
use tollgate_http::internal::Challenge;
use tollgate_http::{Body, Cors, HeaderFamily, TokenError};
use tollgate_rules::internal::config::cel::{Expression, ExpressionError, Input};
use tollgate_rules::internal::config::{CountWhen, ErrorCount, Token, TokenUse, Tokens, jwt};
use tollgate_rules::internal::demand::LearningLimit;
use tollgate_rules::{
    Cost, ExpressionField, InvalidNetwork, Listing, Match, Mode, Networks, PathCase, Request, Routes, Rule, RuleSet,
    StatusSet, TrustedProxies,
};

use super::forms::{Cidr, CostText, SettleSource};
use super::node::Node;
use super::problem::{Findings, InvalidValue};
use super::setting_error::SettingError;
use super::types::{
    BodyName, BodyRule, CorsRule, CostRule, CountName, CountedStatuses, GatewayRule, HeaderFamily as FamilyName,
    JwtRule, LimitRule, ListRule, MatchRule, OriginsRule, OverrideRule, RouteRule, StatusRule, UnknownPolicy,
};
use super::{Parsed, Problems};

impl Parsed {
    /// Compiles the rules. Relative paths start from [`folder`](Self::folder).
    ///
    /// # Errors
    ///
    /// Fails if a file that the rules name cannot be read, or has no suitable keys.
    pub fn compile(&self) -> Result<RuleSet, Problems> {
        let mut findings = Findings::default();
        let rules = rule_set(self, &mut findings);
        match rules {
            Some(rules) if !findings.refused() => Ok(rules),
            _ => Err(findings.into_problems(&self.name, &self.source)),
        }
    }
}

#[doc(hidden)]
impl Parsed {
    /// Returns the trusted proxies of the gateway.
    ///
    /// # Errors
    ///
    /// Fails if there are too many of them, as [`compile`](Self::compile) does.
    pub fn trusted_proxies(&self) -> Result<TrustedProxies, Problems> {
        let mut findings = Findings::default();
        let Some(gateway) = &self.rules.gateway else { return Ok(TrustedProxies::default()) };
        trusted_proxies(gateway, &self.root, &mut findings)
            .ok_or_else(|| findings.into_problems(&self.name, &self.source))
    }

    /// Compiles the routes of the gateway, in the order of the file.
    ///
    /// # Errors
    ///
    /// Fails if a condition of a route is not valid.
    pub fn routes(&self) -> Result<Routes, Problems> {
        let rules = self.rules.gateway.iter().flat_map(|gateway| &gateway.routes);
        Routes::new(rules.map(route_matching))
            .map_err(|error| self.problems([SettingError::new(error.problem(), error.fix())]))
    }
}

fn rule_set(parsed: &Parsed, findings: &mut Findings) -> Option<RuleSet> {
    let Parsed { rules: file, root, folder, envoy, learning, .. } = parsed;
    let families = file.headers.iter().map(|name| family(*name)).collect();
    let mut builder = RuleSet::builder().headers(families).body(body(&file.body, root, findings)?);
    if let Some(rule) = &file.cors {
        builder = builder.cors(cors(rule, root, findings)?);
    }
    if let Some(proxies) = file.gateway.as_ref().and_then(|gateway| trusted_proxies(gateway, root, findings)) {
        builder = builder.trusted_proxies(proxies);
    }
    builder = builder.path_reading(file.path_reading());
    builder = builder.deny_unknown(file.service.unknown == UnknownPolicy::Deny);
    if let Some(rule) = &file.jwt {
        let node = root.get("jwt").unwrap_or(root);
        builder = builder.tokens(tokens(rule, node, folder, findings)?);
        if rule.challenge {
            builder = builder.challenge(challenge(rule, node, findings)?);
        }
    }
    for (index, limit) in file.limits.iter().enumerate() {
        let compiled = match learning.get(limit.name.as_str()).filter(|_| limit.learn().is_some()) {
            Some(LearningLimit { quota, observer }) => {
                rule(&limit.with_quota(*quota)).map(|rule| rule.observed_by(observer.clone()))
            }
            None => rule(limit),
        };
        match compiled {
            Ok(rule) => builder = builder.rule(rule),
            Err(refused) => {
                let at = root.get("limits").map_or(root.at, |limits| limits.item(index).at);
                findings.error(at, refused.problem, refused.fix);
            }
        }
    }
    for rule in &envoy.rules {
        builder = builder.rule(rule.clone());
    }
    builder = builder.domains(envoy.domains.clone());
    builder.build().map_err(|error| findings.error(root.value_at("limits"), error.problem(), error.fix())).ok()
}

fn trusted_proxies(gateway: &GatewayRule, root: &Node, findings: &mut Findings) -> Option<TrustedProxies> {
    match TrustedProxies::parse(gateway.trusted_proxies.iter().map(Cidr::to_string)) {
        Ok(proxies) => Some(proxies.with_header(gateway.forwarding_header)),
        Err(error) => {
            let at = root.get("gateway").unwrap_or(root).value_at("trusted_proxies");
            findings.error(at, format!("trusted_proxies: {}", error.problem()), error.fix());
            None
        }
    }
}

impl From<ExpressionError> for InvalidValue {
    fn from(error: ExpressionError) -> Self {
        Self::new(error.problem(), error.fix())
    }
}

impl From<InvalidNetwork> for InvalidValue {
    fn from(error: InvalidNetwork) -> Self {
        Self::new(error.problem(), error.fix())
    }
}

/// The rules accept every text that the file accepts. If they ever do not, the file is still rejected.
fn unexpected(error: impl std::fmt::Display) -> InvalidValue {
    InvalidValue::new(error.to_string(), "write it another way")
}

fn rule(limit: &LimitRule) -> Result<Rule, InvalidValue> {
    let rule = match limit.in_flight {
        Some(most) => Rule::in_flight(limit.name.as_str(), most)?,
        None => Rule::new(limit.limit()?),
    };
    let mut expressions = Expressions::default();
    let mut matching = matching(&limit.matches);
    if let Some(text) = &limit.matches.when {
        let condition = condition(text.as_str(), ExpressionField::MatchWhen, &mut expressions)?;
        matching = matching.when_described(text.as_str(), condition);
    }
    let exempt = listing(&limit.exempt, ExpressionField::ExemptWhen, &mut expressions)?;
    let blocked = listing(&limit.blocked, ExpressionField::BlockedWhen, &mut expressions)?;
    let cost = cost(limit.cost.as_ref(), &mut expressions)?;
    let mut rule = rule.matching(matching).exempt(exempt).blocked(blocked).cost(cost);
    rule = rule.with_expressions(expressions.errors, expressions.token_use);
    for part in limit.key.iter().flatten() {
        rule = rule.key(part.into());
    }
    rule = rule.missing(limit.missing);
    if let Some(source) = &limit.plan {
        rule = rule.plan((&source.0).into());
    }
    for one in &limit.overrides {
        rule = overridden(rule, limit, one)?;
    }
    if !limit.enabled {
        rule = rule.mode(Mode::Disabled);
    } else if limit.shadow {
        rule = rule.mode(Mode::Shadow);
    }
    if let Some(ban) = limit.ban {
        let (within, for_) = (ban.within.duration(), ban.lasts.duration());
        rule = rule.ban(Ban { after: ban.after, within, for_ });
    }
    if let Some(count) = &limit.count {
        let answers = answers(&count.statuses)?;
        rule = match count.when {
            CountWhen::Arrival => rule.count(answers),
            CountWhen::After => rule.count_after(answers),
        };
    }
    if let Some(SettleSource(name)) = &limit.settle {
        rule = rule.settle_by(name.as_str());
    }
    Ok(rule)
}

/// What is known of the compiled expressions of a limit.
#[derive(Default)]
struct Expressions {
    errors: Vec<ErrorCount>,
    token_use: TokenUse,
}

impl Expressions {
    /// Adds an expression, and returns the count of its failures.
    fn add(&mut self, field: ExpressionField, expression: &Expression) -> ErrorCount {
        if expression.reads_token() {
            let is_cost = field == ExpressionField::Cost;
            self.token_use = self.token_use.max(if is_cost { TokenUse::Counting } else { TokenUse::Matching });
        }
        let errors = ErrorCount::new(field);
        self.errors.push(errors.clone());
        errors
    }
}

fn overridden(mut rule: Rule, limit: &LimitRule, by: &OverrideRule) -> Result<Rule, InvalidValue> {
    let key: Option<Vec<&str>> = by.key.as_ref().map(|key| key.iter().map(String::as_str).collect());
    if let Some(most) = by.in_flight {
        if let Some(plan) = &by.plan {
            rule = rule.plan_in_flight(plan, most);
        }
        return Ok(match key {
            Some(parts) => rule.key_in_flight(&parts, most),
            None => rule,
        });
    }
    let algorithm = *limit.overridden(by)?.algorithm();
    if let Some(plan) = &by.plan {
        rule = rule.plan_limit(plan, algorithm);
    }
    Ok(match key {
        Some(parts) => rule.key_limit(&parts, algorithm),
        None => rule,
    })
}

/// Compiles the conditions of a route. If its upstreams ignore the case of paths, its own path does too. The setting of
/// the gateway applies before a route is chosen.
pub(super) fn route_matching(rule: &RouteRule) -> Match {
    let matching = matching(&rule.matches());
    if rule.paths.case == Some(PathCase::Insensitive) { matching.ignoring_path_case() } else { matching }
}

/// Compiles a match without its expression, which routes do not have.
fn matching(rule: &MatchRule) -> Match {
    let mut matching = Match::everything();
    for glob in rule.path.iter().flatten() {
        matching = matching.path(glob.as_str());
    }
    for method in rule.methods.iter().flatten() {
        matching = matching.method(method.as_str());
    }
    for glob in rule.hosts.iter().flatten() {
        matching = matching.host(glob.as_str());
    }
    for (name, value) in &rule.headers {
        matching = matching.header(name, value);
    }
    if let Some(domain) = &rule.domain {
        matching = matching.domain(domain);
    }
    matching
}

fn listing(rule: &ListRule, field: ExpressionField, expressions: &mut Expressions) -> Result<Listing, InvalidValue> {
    let networks = Networks::parse(rule.ips.iter().map(Cidr::to_string))?;
    let mut listing = Listing::none().networks(networks);
    for key in &rule.keys {
        let parts: Vec<&str> = key.iter().map(String::as_str).collect();
        listing = listing.key(&parts);
    }
    if let Some(text) = &rule.when {
        listing = listing.when(condition(text.as_str(), field, expressions)?);
    }
    Ok(listing)
}

fn cost(rule: Option<&CostRule>, expressions: &mut Expressions) -> Result<Cost, InvalidValue> {
    let (text, when_error) = match rule {
        None => return Ok(Cost::constant(1)),
        Some(CostRule::Units(units)) => return Ok(Cost::constant(*units)),
        Some(CostRule::Found(CostText::Header(name))) => return Ok(Cost::header(name.as_str())),
        Some(CostRule::Found(CostText::Expression(text))) => (text, None),
        Some(CostRule::Computed(rule)) => (&rule.expression, rule.when_error),
    };
    let expression = Expression::cost(text.as_str())?;
    let errors = expressions.add(ExpressionField::Cost, &expression);
    let when_error = when_error.or_else(|| expression.max_units());
    let units = move |request: &Request<'_>| match expression.units(&input(&expression, request)) {
        Ok(units) => Some(units),
        Err(error) => {
            errors.note(request.failed_expressions(), &error);
            None
        }
    };
    Ok(Cost::expression(units, when_error))
}

fn answers(statuses: &CountedStatuses) -> Result<StatusSet, InvalidValue> {
    let listed = match statuses {
        CountedStatuses::Named(CountName::All) => return Ok(StatusSet::all()),
        CountedStatuses::Named(CountName::Failures) => return Ok(StatusSet::failures()),
        CountedStatuses::Named(CountName::Successes) => return Ok(StatusSet::successes()),
        CountedStatuses::Listed(listed) => listed,
    };
    let mut answers = StatusSet::none();
    for one in listed {
        answers = match one {
            StatusRule::Status(status) => answers.status((*status).try_into().map_err(unexpected)?),
            StatusRule::Class(class) => answers.class(class.first().try_into().map_err(unexpected)?),
        };
    }
    Ok(answers)
}

/// Compiles a condition. If it fails for a request, it decides against the client: the limit applies, the request is
/// blocked, or it is not exempt.
fn condition(
    text: &str,
    field: ExpressionField,
    expressions: &mut Expressions,
) -> Result<impl Fn(&Request<'_>) -> bool + Send + Sync + 'static, InvalidValue> {
    let expression = Expression::condition(text)?;
    let errors = expressions.add(field, &expression);
    let when_error = field != ExpressionField::ExemptWhen;
    Ok(move |request: &Request<'_>| {
        expression.holds(&input(&expression, request)).unwrap_or_else(|error| {
            errors.note(request.failed_expressions(), &error);
            when_error
        })
    })
}

/// Returns the variables of an expression. A token is verified only for an expression that reads it, and only one that
/// reads the client's address needs it.
fn input<'r>(expression: &Expression, request: &'r Request<'_>) -> Input<'r> {
    let claims = if expression.reads_token() { request.claims() } else { None };
    let client = if expression.reads_client() { request.client() } else { None };
    Input { facts: *request.facts(), path: request.path(), client, errors: request.errors(), claims }
}

fn family(name: FamilyName) -> HeaderFamily {
    match name {
        FamilyName::Legacy => HeaderFamily::Legacy,
        FamilyName::Draft6 => HeaderFamily::Draft6,
        FamilyName::Draft7 => HeaderFamily::Draft7,
        FamilyName::Ietf => HeaderFamily::Ietf,
    }
}

fn body(rule: &BodyRule, root: &Node, findings: &mut Findings) -> Option<Body> {
    match rule {
        BodyRule::Named(BodyName::Json) => Some(Body::Json),
        BodyRule::Named(BodyName::Problem) => Some(Body::Problem),
        BodyRule::Template(rule) => {
            let made = Body::template(&rule.template, rule.content_type.as_str());
            let node = root.get("body").unwrap_or(root);
            made.map_err(|error| findings.error(node.value_at(error.field()), error.problem(), error.fix())).ok()
        }
    }
}

fn cors(rule: &CorsRule, root: &Node, findings: &mut Findings) -> Option<Cors> {
    let OriginsRule::Listed(origins) = &rule.origins else { return Some(Cors::any()) };
    Cors::origins(origins).map_err(|error| findings.error(root.value_at("cors"), error.problem(), error.fix())).ok()
}

fn tokens(rule: &JwtRule, node: &Node, folder: &Path, findings: &mut Findings) -> Option<Tokens> {
    let (key, made) = match (&rule.key_file, &rule.jwks_file) {
        (Some(path), _) => ("key_file", jwt::Verifier::from_key_file(&folder.join(path), &rule.algorithms)),
        (None, Some(path)) => ("jwks_file", jwt::Verifier::from_jwks_file(&folder.join(path), &rule.algorithms)),
        (None, None) => return None,
    };
    let verifier = made.map_err(|error| findings.error(node.value_at(key), error.problem(), error.fix()));
    let verifier = verifier.ok()?.leeway(rule.leeway.duration()).issuers(rule.issuer.clone());
    let verifier = verifier.audiences(rule.audience.iter().flatten().cloned());
    let source = rule.from.0.clone();
    Some(Arc::new(move |facts, errors| match source.token(facts, errors) {
        Some(token) => {
            let jwt::Verification { claims, signatures } = verifier.verify(&token);
            Token { claims: claims.map(|claims| claims.map()), signatures }
        }
        None => Token { claims: Err(TokenError::Missing), signatures: 0 },
    }))
}

/// Reports a realm that a challenge cannot have.
pub(super) fn challenge(rule: &JwtRule, node: &Node, findings: &mut Findings) -> Option<Challenge> {
    let challenge = Challenge::new(rule.realm.as_deref());
    if challenge.is_none() {
        let message = "realm has characters that are not allowed in a quoted string";
        findings.error(node.value_at("realm"), message, "use printable ASCII without \" and \\");
    }
    challenge
}
