//! `tollgate publish`: publishes a rule file to all nodes that share its Redis, shows it, or withdraws it.

use std::borrow::Cow;
use std::path::Path;

use serde::Serialize;
use tollgate::redis::{PublishError, PublishedRules, RuleSets};
use tollgate_config::{Parsed, RuleFile};
use tollgate_telemetry::notice;

use super::{Completion, ConfigArgument, Error, StoreArgument, load_once, print};
use crate::config::logins;

pub(super) const EXAMPLES: &str = "\
Examples:
  tollgate publish --config tollgate.yaml
  tollgate publish --config tollgate.yaml --expect 7
  tollgate publish --config tollgate.yaml --show
  tollgate publish --config tollgate.yaml --withdraw";

#[derive(clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    config: ConfigArgument,
    #[command(flatten)]
    store: StoreArgument,
    /// Publish or withdraw only if this is the newest version (0 if none was ever published), otherwise exit with 1
    #[arg(long, value_name = "VERSION")]
    expect: Option<u64>,
    /// Show the published rules and publish nothing
    #[arg(long, conflicts_with_all = ["withdraw", "expect"])]
    show: bool,
    /// Withdraw the published rules: nodes return to their own files
    #[arg(long)]
    withdraw: bool,
    /// Print the published rules as JSON
    #[arg(long, requires = "show")]
    json: bool,
}

/// The output of `--show --json`.
#[derive(Serialize)]
struct PublishedJson<'a> {
    /// 0 if nothing was ever published.
    version: u64,
    /// Identifies the publication; `null` if nothing was ever published.
    id: Option<&'a str>,
    /// `null` if nothing is published.
    rules: Option<&'a str>,
}

pub(super) async fn run(arguments: &Arguments) -> Result<Completion, Error> {
    let path = &arguments.config.config;
    let file = load_once(path)?;
    let rule_sets = rule_sets(&arguments.store.apply_to(file.clone())?, path)?;
    if arguments.show {
        return show(&rule_sets, arguments.json).await;
    }
    if arguments.withdraw {
        let message = |version| match version {
            0 => "nothing is published".to_owned(),
            _ => format!("version {version} withdraws the published rules; nodes return to their own files"),
        };
        return outcome(rule_sets.withdraw(arguments.expect).await, message);
    }
    file.compile().map_err(|problems| Error::Open(problems.into()))?;
    if let Some(problems) = logins::problems(&file) {
        return Err(Error::Open(problems.into()));
    }
    let message = |version| format!("{} is published as version {version}", path.display());
    let published = outcome(rule_sets.publish(file.source().as_bytes(), arguments.expect).await, message)?;
    if published == Completion::Positive {
        log_ignored_settings(&file);
    }
    Ok(published)
}

/// Reports the parts of a published file that change nothing on nodes, such as stores, listeners and routes.
fn log_ignored_settings(file: &RuleFile) {
    let service = &file.service;
    let named = [
        ("stores", !file.stores.is_empty()),
        ("the rest of gateway", file.gateway.is_some()),
        ("service", service.http.is_some() || service.grpc.is_some() || service.resp.is_some()),
        ("admin", file.admin.is_some()),
    ];
    let named: Vec<&str> = named.iter().filter_map(|(name, is_there)| is_there.then_some(*name)).collect();
    if !named.is_empty() {
        let believed = match &file.gateway {
            Some(_) => ", and gateway.trusted_proxies and gateway.forwarding_header",
            None => "",
        };
        let kept = named.join(", ");
        notice::log(format_args!(
            "nodes apply its limits, headers, body and jwt{believed}; they keep their own {kept}"
        ));
    }
}

fn rule_sets(file: &Parsed, path: &Path) -> Result<RuleSets, Error> {
    match file.redis_settings().map_err(|problems| Error::Open(problems.into()))? {
        Some(settings) => RuleSets::connect(settings).map_err(Error::Connect),
        None => Err(Error::NoFleet { config: path.to_owned() }),
    }
}

fn outcome(changed: Result<u64, PublishError>, message: impl Fn(u64) -> String) -> Result<Completion, Error> {
    match changed {
        Ok(version) => {
            print(message(version))?;
            Ok(Completion::Positive)
        }
        Err(PublishError::Conflict { version }) => {
            let problem = format_args!("the newest version is {version}, not the expected one");
            notice::log(format_args!("{problem}: see it with `tollgate publish --show`"));
            Ok(Completion::Negative)
        }
        Err(error) => Err(Error::Publish(error)),
    }
}

/// Prints the published rules after a comment with their version, so that the output is a rule file. Lines that may
/// contain credentials are hidden: another program may have published them.
async fn show(rule_sets: &RuleSets, as_json: bool) -> Result<Completion, Error> {
    let newest = rule_sets.newest().await.map_err(|error| Error::Publish(PublishError::Store(error)))?;
    let version = newest.as_ref().map_or(0, |newest| newest.version);
    let rules = newest.as_ref().and_then(rules_text);
    if as_json {
        let id = newest.as_ref().map(|newest| &*newest.id);
        let json = PublishedJson { version, id, rules: rules.as_deref() };
        print(serde_json::to_string_pretty(&json).unwrap_or_default())?;
    } else {
        match &rules {
            Some(rules) => print(format_args!("# published version {version}\n{}", rules.trim_end())),
            None if version == 0 => print("nothing is published"),
            None => print(format_args!("nothing is published; version {version} withdrew the rules")),
        }?;
    }
    Ok(if rules.is_some() { Completion::Positive } else { Completion::Negative })
}

fn rules_text(rule_set: &PublishedRules) -> Option<String> {
    let text = String::from_utf8_lossy(rule_set.rules.as_ref()?);
    let hidden = "# hidden: the rules may contain the credentials of a store: publish them again without credentials";
    Some(logins::shown(&text).map_or_else(|| hidden.to_owned(), Cow::into_owned))
}
