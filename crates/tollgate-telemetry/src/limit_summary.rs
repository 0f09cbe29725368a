//! A one-line summary of each limit, for the start of the server.

use std::time::Duration;

use tollgate::{InvalidLimit, Rate};
use tollgate_config::internal::{AlgorithmName, LimitRule};
use tollgate_config::{Parsed, RuleFile};

use crate::words::counted;

/// The most limits that are listed: as many as fit a terminal.
const MAX_LIMITS: usize = 20;

/// Summarises the limits in force: on one line for up to one limit, otherwise one line each, up to a bound.
pub fn summary(file: &Parsed) -> String {
    let summary = of_file(file);
    match file.envoy_rules().len() {
        0 => summary,
        count => {
            let limits = counted(count as u64, "limit", "limits");
            match file.limits.is_empty() {
                true => format!("{limits} from files of envoyproxy/ratelimit"),
                false => format!("{summary}\nand {limits} from files of envoyproxy/ratelimit"),
            }
        }
    }
}

fn of_file(file: &RuleFile) -> String {
    match &*file.limits {
        [] if file.service.xds.is_some() => "no limits yet: they come from the xDS server".to_owned(),
        [] => "no limits: everything passes".to_owned(),
        [limit] => describe(limit),
        limits => {
            let mut text = format!("{} limits:", limits.len());
            for limit in &limits[..limits.len().min(MAX_LIMITS)] {
                text += &format!("\n  {}", describe(limit));
            }
            if limits.len() > MAX_LIMITS {
                text += &format!("\n  and {} more", limits.len() - MAX_LIMITS);
            }
            text
        }
    }
}

fn describe(limit: &LimitRule) -> String {
    let name = limit.name.as_str();
    let mut text = match numbers(limit) {
        Ok(numbers) => format!("limit {name}: {numbers}"),
        // A parsed file has no such limit.
        Err(_) => format!("limit {name}"),
    };
    if let Some(learn) = limit.learn() {
        text += &format!(", learns between {} and {}", learn.from, learn.to);
    }
    if let Some(key) = &limit.key {
        let parts: Vec<String> = key.iter().map(ToString::to_string).collect();
        text += &format!(", key {}", parts.join(" + "));
    }
    if limit.shadow {
        text += ", shadow: never denies";
    }
    text
}

/// Summarises the numbers of a limit, with its algorithm in parentheses.
pub fn numbers(limit: &LimitRule) -> Result<String, InvalidLimit> {
    if let Some(most) = limit.in_flight {
        return Ok(format!("{most} at the same time"));
    }
    let algorithm = limit.algorithm.as_str();
    let built = limit.limit()?;
    let (quota, numbers) = (built.quota(), &limit.numbers);
    let rate = |given: Option<_>| given.map_or_else(|| Rate::per_second(1).to_string(), |rate: Rate| rate.to_string());
    Ok(match limit.algorithm {
        AlgorithmName::TokenBucket => {
            format!("{quota}, then {} ({algorithm})", rate(numbers.refill.map(|text| text.rate())))
        }
        AlgorithmName::LeakyBucket => {
            format!("{quota}, then {} ({algorithm})", rate(numbers.leak.map(|text| text.rate())))
        }
        _ => format!("{quota} per {} ({algorithm})", span(built.window())),
    })
}

/// Formats a duration in its largest whole unit.
pub fn span(span: Duration) -> String {
    match span.subsec_micros() {
        0 => format!("{} s", span.as_secs()),
        micros if micros % 1000 == 0 => format!("{} ms", span.as_millis()),
        _ => format!("{} us", span.as_micros()),
    }
}
