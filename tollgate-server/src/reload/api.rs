//! Rules that the admin API replaces.
//!
//! They apply like published rules: limits, headers, body, jwt and the trusted proxies change; the store, the listeners
//! and the rest of the gateway stay this node's own. On Redis the text is published, so that all nodes get the rules and
//! show the same version. It may contain the listeners of the node that published it, which no node applies.

use std::borrow::Cow;
use std::cell::LazyCell;
use std::path::Path;

use tokio::sync::oneshot;
use tollgate_config::internal::{HeaderSource, HeaderValueRule, JwtRule, KeyPart, RouteRule, SettingError};
use tollgate_config::{Parsed, Problems, RuleFile};
use tollgate_rules::ForwardingHeader;

use super::changes;
use super::changes::WrittenRules;
use crate::config::logins;

/// The name of the rules in messages.
const NAME: &str = "rules";

/// A change of the rules, for the task that makes it.
#[derive(Debug)]
pub(super) struct RuleChange {
    pub(super) request: ChangeRequest,
    pub(super) reply: oneshot::Sender<Result<RulesChanged, ChangeRefused>>,
}

/// A change of the rules.
#[derive(Debug)]
pub(crate) struct ChangeRequest {
    pub(crate) text: String,
    /// The version that has to be in force.
    pub(crate) expected: String,
    pub(crate) kind: ChangeKind,
    /// The client, for the log.
    pub(crate) caller: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChangeKind {
    /// New rules. Settings that the API does not change are refused.
    Replace,
    /// Rules that were in force before. Settings that the API does not change stay as they are now.
    RollBack,
}

/// Rules that are in force now.
#[derive(Debug)]
pub(crate) struct RulesChanged {
    pub(crate) version: String,
    pub(crate) changes: Vec<String>,
    pub(crate) reach: Reach,
}

/// The nodes that have the new rules, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    ThisNode,
    AllNodes,
}

/// Why rules were not replaced.
#[derive(Debug)]
pub(crate) enum ChangeRefused {
    /// Another version is in force on this node.
    Conflict {
        version: String,
    },
    /// Another node has published rules that this node has not received yet.
    PublishedElsewhere,
    Invalid(Problems),
    Unavailable(String),
}

/// The rules that a change replaces.
#[derive(Clone, Copy)]
pub(crate) struct CurrentRules<'r> {
    /// The rule file of this node, or its built-in rules.
    pub(crate) own: &'r Parsed,
    /// The rules in force: those of the file, or others in its place.
    pub(crate) in_force: &'r Parsed,
}

/// Parses rules for the API, and checks that they change nothing else.
pub(crate) fn parse(text: &str, current: CurrentRules<'_>, kind: ChangeKind) -> Result<Parsed, Problems> {
    let parsed = RuleFile::parse(NAME, text)?;
    let refused = match kind {
        ChangeKind::Replace => kept_settings(&parsed, current).or_else(|| logins::problems(&parsed)),
        ChangeKind::RollBack => None,
    };
    if let Some(problems) = refused.or_else(|| problems_on_node(&parsed, current.own)) {
        return Err(problems);
    }
    let own = current.own;
    let has_gateway = parsed.gateway.is_some();
    let parsed = parsed.in_folder(own.folder());
    let parsed = if has_gateway { parsed } else { parsed.with_gateway_of(own) };
    Ok(parsed.with_domains_of(own))
}

/// Returns the text of earlier rules for Redis, without the lines that may contain credentials: each node connects with
/// its own.
///
/// # Errors
///
/// Returns the problems if such a line contains other settings too.
pub(super) fn publishable(earlier: &str) -> Result<Cow<'_, str>, Problems> {
    let whole = RuleFile::parse(NAME, earlier)?;
    let Some(problems) = logins::problems(&whole) else { return Ok(Cow::Borrowed(earlier)) };
    let text = logins::redacted(earlier);
    let is_same =
        |rest: &Parsed| changes::between(&WrittenRules::published(&whole, rest), &WrittenRules::of(rest)).is_empty();
    match RuleFile::parse(NAME, &*text) {
        Ok(rest) if is_same(&rest) => Ok(text),
        _ => Err(problems),
    }
}

/// Returns the changes to the rules in force that these rules would make.
pub(crate) fn describe_changes(next: &Parsed, CurrentRules { own, in_force }: CurrentRules<'_>) -> Vec<String> {
    changes::between(&WrittenRules::published(in_force, own), &WrittenRules::published(next, own))
}

/// Returns a problem for each setting that the API does not change and that differs from this node's. Settings that are
/// left out stay unchanged, and so do those of the rules in force: another node may have published its whole file, and
/// a client that edits it sends them back.
fn kept_settings(parsed: &Parsed, CurrentRules { own, in_force }: CurrentRules<'_>) -> Option<Problems> {
    let none = RuleFile::default();
    // A flag may have replaced the stores of the text. Reading it again takes as long as reading the new rules.
    let text = LazyCell::new(|| RuleFile::parse(NAME, own.source()).map(Parsed::into_rules).unwrap_or_default());
    let is_kept = |is_same: &dyn Fn(&RuleFile) -> bool| is_same(own) || is_same(in_force) || is_same(&none);
    let gateway = |rules: &RuleFile| {
        let mut gateway = rules.gateway.clone()?;
        gateway.trusted_proxies.clear();
        gateway.forwarding_header = ForwardingHeader::default();
        Some(gateway)
    };
    let differs = [
        ("store", !is_kept(&|one| parsed.store == one.store) && parsed.store != text.store),
        ("stores", !is_kept(&|one| parsed.stores == one.stores) && parsed.stores != text.stores),
        ("store_timeout", !is_kept(&|one| parsed.store_timeout == one.store_timeout)),
        ("expected_nodes", !is_kept(&|one| parsed.expected_nodes == one.expected_nodes)),
        ("max_memory", !is_kept(&|one| parsed.max_memory == one.max_memory)),
        ("service", !is_kept(&|one| parsed.service == one.service)),
        ("admin", !is_kept(&|one| parsed.admin == one.admin)),
        ("gateway", !is_kept(&|one| gateway(parsed) == gateway(one))),
    ];
    let problem = |(key, _): &(&str, bool)| {
        let kept = if *key == "gateway" { " except trusted_proxies and forwarding_header" } else { "" };
        let fix = format!("change it in the rule file, or leave {key} out to keep it");
        SettingError::new(format!("the admin API does not change {key}{kept}"), fix).of(*key)
    };
    let errors: Vec<SettingError> = differs.iter().filter(|(_, differs)| *differs).map(problem).collect();
    (!errors.is_empty()).then(|| parsed.problems(errors))
}

/// Returns the problems of rules in place of those of this node's file, whose gateway stays.
pub(super) fn problems_on_node(parsed: &Parsed, own: &Parsed) -> Option<Problems> {
    key_file_problems(parsed, own).or_else(|| token_header_problems(parsed, own))
}

/// Returns a problem if the gateway of this node sets a header from a token, and these rules cannot verify tokens: the
/// header would be missing from every request.
fn token_header_problems(parsed: &Parsed, own: &Parsed) -> Option<Problems> {
    if parsed.jwt.is_some() {
        return None;
    }
    let from_token = |route: &RouteRule| {
        let source = |value: &HeaderValueRule| match value {
            HeaderValueRule::From(value) if matches!(value.from, HeaderSource::Part(KeyPart::Jwt(_))) => {
                Some(value.from.to_string())
            }
            _ => None,
        };
        let (name, source) = route.request_headers.set.iter().find_map(|(name, value)| Some((name, source(value)?)))?;
        Some(format!("the route `{}` of this node sets {name} from {source}", route.name()))
    };
    let route = own.gateway.iter().flat_map(|gateway| &gateway.routes).find_map(from_token)?;
    let problem = format!("{route}, and tokens cannot be verified without a `jwt` section");
    Some(parsed.problems([SettingError::new(problem, "add the section that the rule file of this node has")]))
}

/// Returns a problem for each file of keys that the rule file of this node does not name in the same setting.
///
/// Rules that come over the network must not make the server read other files. The content of a file that everyone can
/// read would be a secret that everyone can sign tokens with, and a file on a disk that hangs would end all reloads.
fn key_file_problems(parsed: &Parsed, own: &Parsed) -> Option<Problems> {
    let files = |jwt: &JwtRule| [jwt.key_file.clone(), jwt.jwks_file.clone()];
    let named = files(parsed.jwt.as_ref()?);
    let of_node = own.jwt.as_ref().map(files).unwrap_or_default();
    let settings = ["key_file", "jwks_file"].into_iter().zip(named).zip(of_node);
    let errors = settings.filter_map(|((key, named), of_node)| {
        let named = named?;
        let (problem, fix) = match of_node {
            Some(file) if Path::new(&file) == Path::new(&named) => return None,
            Some(file) => (
                format!("the rule file of this node names another jwt.{key}"),
                format!("name `{file}`, or change the rule file of each node first"),
            ),
            None => (
                format!("the rule file of this node names no jwt.{key}, and only files that it names are read"),
                "add it to the rule file of each node first".to_owned(),
            ),
        };
        Some(SettingError::new(problem, fix).of(key).of("jwt"))
    });
    let errors: Vec<SettingError> = errors.collect();
    (!errors.is_empty()).then(|| parsed.problems(errors))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "\
store: redis://h:6379
gateway: { routes: [{ path: /**, upstream: echo }], trusted_proxies: [10.0.0.0/8] }
admin: { listen: 127.0.0.1:8099 }
limits: [{ name: a, limit: 5 }]
";

    fn own() -> Parsed {
        RuleFile::parse("tollgate.yaml", OWN).expect("valid rules")
    }

    fn current(own: &Parsed) -> CurrentRules<'_> {
        CurrentRules { own, in_force: own }
    }

    #[test]
    fn settings_of_the_node_are_kept_or_left_out() {
        let own = own();
        for text in [OWN.to_owned(), OWN.replace("10.0.0.0/8", "10.0.0.0/9"), "limits: [{ name: b }]\n".to_owned()] {
            let parsed = parse(&text, current(&own), ChangeKind::Replace).expect("these are allowed");
            assert!(parsed.gateway.is_some(), "{text}");
        }
        let changed = OWN.replace("upstream: echo", "upstream: http://h").replace("8099", "8100");
        let problems = parse(&changed, current(&own), ChangeKind::Replace).expect_err("these are refused").to_string();
        let lines: Vec<&str> = problems.lines().collect();
        assert_eq!(lines.len(), 2, "{problems}");
        assert!(lines[0].starts_with("rules:2:10: the admin API does not change gateway except trusted_proxies"));
        assert!(lines[1].starts_with("rules:3:8: the admin API does not change admin: change it in the rule file"));
        assert!(parse(&changed, current(&own), ChangeKind::RollBack).is_ok());
        // Another node has published these.
        let in_force = RuleFile::parse("published", &*changed).expect("valid rules");
        let current = CurrentRules { own: &own, in_force: &in_force };
        assert!(parse(&changed.replace("limit: 5", "limit: 6"), current, ChangeKind::Replace).is_ok());
        assert!(parse(&changed.replace("8100", "8101"), current, ChangeKind::Replace).is_err());
    }

    #[test]
    fn only_key_files_of_the_node_are_named() {
        let own = RuleFile::parse("tollgate.yaml", "jwt: { jwks_file: keys.json }\nlimits: []\n").expect("valid rules");
        let parse = |jwt: &str, own: &Parsed| {
            let text = format!("jwt: {jwt}\nlimits: []\n");
            parse(&text, current(own), ChangeKind::RollBack)
        };
        assert!(parse("{ jwks_file: keys.json, issuer: me }", &own).is_ok());
        let cases = [
            (
                "{ jwks_file: /etc/hostname }",
                "rules:1:19: the rule file of this node names another jwt.jwks_file: name `keys.json`",
            ),
            // The keys of a set are public, so its text must not become a secret.
            (
                "{ key_file: keys.json, algorithms: [HS256] }",
                "rules:1:18: the rule file of this node names no jwt.key_file",
            ),
        ];
        for (jwt, problem) in cases {
            let problems = parse(jwt, &own).expect_err("it is refused").to_string();
            assert!(problems.starts_with(problem), "{problems}");
        }
        assert!(parse("{ jwks_file: keys.json }", &self::own()).is_err(), "the node has no keys");
    }

    #[test]
    fn rules_without_keys_are_refused_if_a_route_sets_a_header_from_a_token() {
        let jwt = "jwt: { jwks_file: keys.json }\n";
        let own = |source: &str| {
            let headers = format!("request_headers: {{ set: {{ X-Tier: gold, X-User: {{ from: '{source}' }} }} }}");
            let route = format!("{{ name: api, path: /**, upstream: 'http://h', {headers} }}");
            let text = format!("{jwt}gateway: {{ routes: [{route}] }}\nlimits: []\n");
            RuleFile::parse("tollgate.yaml", text).expect("valid rules")
        };
        let parse = |text: &str, own: &Parsed, kind| parse(text, current(own), kind);
        for kind in [ChangeKind::Replace, ChangeKind::RollBack] {
            let problems = parse("limits: []\n", &own("jwt:sub"), kind).expect_err("it is refused").to_string();
            assert_eq!(
                problems,
                "rules:1:1: the route `api` of this node sets X-User from jwt:sub, and tokens cannot be verified without \
                 a `jwt` section: add the section that the rule file of this node has"
            );
            assert!(parse(&format!("{jwt}limits: []\n"), &own("jwt:sub"), kind).is_ok());
            assert!(parse("limits: []\n", &own("ip"), kind).is_ok());
        }
    }

    #[test]
    fn credentials_are_refused() {
        let text = "limits: [] # redis://:hunter2@h\n";
        let problems = parse(text, current(&own()), ChangeKind::Replace).expect_err("it is refused").to_string();
        assert!(problems.contains("may contain credentials") && !problems.contains("hunter2"), "{problems}");
    }

    #[test]
    fn earlier_rules_are_published_without_credentials() {
        let with_login = OWN.replace("redis://h", "redis://:hunter2@h");
        let text = publishable(&with_login).expect("the line has nothing else");
        assert!(text.starts_with("# hidden") && text.ends_with("limits: [{ name: a, limit: 5 }]\n"), "{text}");
        assert!(matches!(publishable(OWN), Ok(Cow::Borrowed(OWN))));
        let one_line = "{ store: 'redis://:hunter2@h', limits: [{ name: a, limit: 5 }] }\n";
        let also_a_limit = "limits: [{ name: a, limit: 5 },\n  { name: b, limit: 6 }] # was redis://:hunter2@h\n";
        for text in [one_line, also_a_limit] {
            let problems = publishable(text).expect_err("rules would be lost").to_string();
            assert!(problems.contains("may contain credentials"), "{problems}");
        }
    }
}
