//! Thresholds that decide the exit code: `denied>1%`, `denied:per-ip>100`, `clients>0.1%`, `newly_denied>0`.

use std::fmt;
use std::str::FromStr;

const USAGE: &str =
    "write METRIC>NUMBER or METRIC>PERCENT%, with denied, denied:LIMIT, clients or newly_denied as the metric";

/// The most that a metric may be.
#[derive(Clone, Debug, PartialEq)]
pub struct Threshold {
    /// The number that is compared.
    pub metric: Metric,
    /// The bound.
    pub most: Most,
}

/// A number of a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Requests that were denied or refused.
    Denied,
    /// Requests that one limit denied.
    DeniedBy(String),
    /// Clients of which a request was denied or refused.
    Clients,
    /// Requests that were denied or refused, but admitted by the rules that these are compared with.
    NewlyDenied,
}

/// A bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Most {
    /// A number of requests or keys.
    Number(u64),
    /// A share of all.
    Percent(f64),
}

/// A number with what it is a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The number of those that count.
    pub part: u64,
    /// The number of all.
    pub whole: u64,
}

impl Share {
    /// Returns the share in percent.
    pub fn percent(self) -> f64 {
        if self.whole == 0 { 0.0 } else { self.part as f64 * 100.0 / self.whole as f64 }
    }
}

impl Threshold {
    /// Returns the limit that the threshold is about.
    pub fn limit(&self) -> Option<&str> {
        match &self.metric {
            Metric::DeniedBy(limit) => Some(limit),
            _ => None,
        }
    }

    /// Returns whether the threshold compares two rule sets.
    pub fn is_comparison(&self) -> bool {
        self.metric == Metric::NewlyDenied
    }

    /// Returns whether a share exceeds the bound.
    pub fn is_crossed_by(&self, share: Share) -> bool {
        match self.most {
            Most::Number(most) => share.part > most,
            Most::Percent(most) => share.percent() > most,
        }
    }
}

impl FromStr for Threshold {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (metric, most) = text.split_once('>').ok_or_else(|| format!("it has no `>`: {USAGE}"))?;
        let metric = match metric.trim() {
            "denied" => Metric::Denied,
            "clients" => Metric::Clients,
            "newly_denied" => Metric::NewlyDenied,
            metric => match metric.strip_prefix("denied:") {
                Some(limit) if !limit.is_empty() => Metric::DeniedBy(limit.to_owned()),
                _ => return Err(format!("`{metric}` is not a metric: {USAGE}")),
            },
        };
        let most = most.trim();
        let not_a_number = || format!("`{most}` is not a number: {USAGE}");
        let most = match most.strip_suffix('%') {
            Some(percent) => {
                let percent: f64 = percent.trim().parse().map_err(|_| not_a_number())?;
                if !(0.0..=100.0).contains(&percent) {
                    return Err(format!("`{most}` is not between 0% and 100%: {USAGE}"));
                }
                Most::Percent(percent)
            }
            None => Most::Number(most.parse().map_err(|_| not_a_number())?),
        };
        Ok(Self { metric, most })
    }
}

impl fmt::Display for Threshold {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.metric {
            Metric::Denied => out.write_str("denied")?,
            Metric::DeniedBy(limit) => write!(out, "denied:{limit}")?,
            Metric::Clients => out.write_str("clients")?,
            Metric::NewlyDenied => out.write_str("newly_denied")?,
        }
        match self.most {
            Most::Number(most) => write!(out, ">{most}"),
            Most::Percent(most) => write!(out, ">{most}%"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_crossed_above_their_number() {
        let share = Share { part: 10, whole: 1000 };
        for (text, is_crossed) in
            [("denied>1%", false), ("denied > 0.9%", true), ("clients>10", false), ("denied:per-ip>9", true)]
        {
            let threshold: Threshold = text.parse().unwrap();
            assert_eq!(threshold.is_crossed_by(share), is_crossed, "{text}");
            assert_eq!(threshold.to_string(), text.replace(' ', ""));
        }
        assert!(!"denied>0%".parse::<Threshold>().unwrap().is_crossed_by(Share { part: 0, whole: 0 }));
    }

    #[test]
    fn other_texts_are_explained() {
        for text in ["", "denied", "denied>", "denied>x", "denied>-1", "denied>101%", "denied>NaN%", "denied:>1", "x>1"]
        {
            assert!(text.parse::<Threshold>().unwrap_err().contains("METRIC>NUMBER"), "{text}");
        }
    }
}
