//! `tollgate publish`: one rule file to every node that shares its Redis; what is published, and away with it.

mod logins;

use std::borrow::Cow;
use std::path::Path;

use serde::Serialize;
use tollgate::redis::{PublishError, PublishedRules, RuleSets};
use tollgate::rules::file::{Parsed, RuleFile};

use super::{Completion, ConfigArgument, Error, StoreArgument, load, print};
use crate::notice;

#[derive(clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    config: ConfigArgument,
    #[command(flatten)]
    store: StoreArgument,
    /// Publish or withdraw only if this version is the newest (0: none was published yet); else the answer is no
    #[arg(long, value_name = "VERSION")]
    expect: Option<u64>,
    /// Show what is published on that Redis; publish nothing
    #[arg(long, conflicts_with_all = ["withdraw", "expect"])]
    show: bool,
    /// Take away what is published on that Redis: nodes go back to their own files
    #[arg(long)]
    withdraw: bool,
    /// What is published as JSON, for programs
    #[arg(long, requires = "show")]
    json: bool,
}

/// What is published, as programs read it.
#[derive(Serialize)]
struct PublishedJson<'a> {
    /// 0 if nothing ever was.
    version: u64,
    /// Identifies the publication; `null` if nothing ever was published.
    id: Option<&'a str>,
    /// `null` if nothing is.
    rules: Option<&'a str>,
}

pub(super) async fn run(arguments: &Arguments) -> Result<Completion, Error> {
    let path = &arguments.config.config;
    let file = load(path)?;
    let rule_sets = rule_sets(&arguments.store.apply_to(file.clone())?, path)?;
    if arguments.show {
        return show(&rule_sets, arguments.json).await;
    }
    if arguments.withdraw {
        let message = |version| match version {
            0 => "nothing is published".to_owned(),
            _ => format!("nothing is published any more, as of version {version}; nodes go back to their files"),
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
        ("service", [&service.http, &service.grpc, &service.resp].iter().any(|listener| listener.is_some())),
        ("admin", file.admin.is_some()),
    ];
    let named: Vec<&str> = named.iter().filter_map(|(name, is_there)| is_there.then_some(*name)).collect();
    if !named.is_empty() {
        let believed = match &file.gateway {
            Some(_) => ", and trusted_proxies and forwarding_header of gateway",
            None => "",
        };
        let kept = named.join(", ");
        notice::log(format_args!(
            "nodes take limits, headers, body and jwt of it{believed}; they keep what their own files say of {kept}"
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
            print(message(version));
            Ok(Completion::Positive)
        }
        Err(PublishError::Conflict { version }) => {
            let problem = format_args!("the newest version is {version}, not the one that was expected");
            notice::log(format_args!("{problem}; look at it with `tollgate publish --show`"));
            Ok(Completion::Negative)
        }
        Err(error) => Err(Error::Publish(error)),
    }
}

/// The rules that are published, with their version in a comment before them, so that they are a rule file. If nothing
/// is, the answer is no. They may have been published by a program that takes logins with them.
async fn show(rule_sets: &RuleSets, as_json: bool) -> Result<Completion, Error> {
    let newest = rule_sets.newest().await.map_err(|error| Error::Publish(PublishError::Store(error)))?;
    let version = newest.as_ref().map_or(0, |newest| newest.version);
    let rules = newest.as_ref().and_then(rules_text);
    if as_json {
        let id = newest.as_ref().map(|newest| &*newest.id);
        let json = PublishedJson { version, id, rules: rules.as_deref() };
        print(serde_json::to_string_pretty(&json).unwrap_or_default());
    } else {
        match &rules {
            Some(rules) => print(format_args!("# published version {version}\n{}", rules.trim_end())),
            None if version == 0 => print("nothing is published"),
            None => print(format_args!("nothing is published; version {version} withdrew what was")),
        }
    }
    Ok(if rules.is_some() { Completion::Positive } else { Completion::Negative })
}

fn rules_text(rule_set: &PublishedRules) -> Option<String> {
    let text = String::from_utf8_lossy(rule_set.rules.as_ref()?);
    let hidden = "# not shown: the login of a store may be somewhere in it; publish the rules again without it";
    Some(logins::shown(&text).map_or_else(|| hidden.to_owned(), Cow::into_owned))
}
