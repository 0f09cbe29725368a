//! Reads a file of envoyproxy/ratelimit.
//!
//! Accepts what its YAML library accepts: numbers and booleans as text, and `yes` and `on` as booleans. A key in the
//! wrong place has no effect there, which is a warning here.

use serde_json::Value;

use super::{DescriptorConfig, DomainConfig, RateLimitConfig};
use crate::node::{Entry, Node, NodeKind, Scalar, ScalarValue};
use crate::problem::{Findings, Problems, shown};
use crate::{decoded, yaml};

const OF_FILE: &[&str] = &["domain", "descriptors"];
const OF_DESCRIPTOR: &[&str] = &[
    "key",
    "value",
    "rate_limit",
    "descriptors",
    "shadow_mode",
    "quota_mode",
    "detailed_metric",
    "value_to_metric",
    "share_threshold",
    "metadata",
];
const OF_LIMIT: &[&str] = &["unit", "requests_per_unit", "unlimited", "name", "replaces"];
const OF_REPLACES: &[&str] = &["name"];

impl DomainConfig {
    /// Reads the text of a file. Returns its warnings, too.
    ///
    /// # Errors
    ///
    /// Returns every problem of the text. The meaning of the configuration is checked with that of all other domains.
    pub fn parse(file_name: &str, text: &[u8]) -> Result<(Self, Problems), Problems> {
        let mut findings = Findings::default();
        let text = decoded(text, &mut findings);
        let fix = "write `domain:` and `descriptors:`, or remove the file";
        let root = if findings.refused() { None } else { yaml::read(&text, fix, &mut findings) };
        let config = root.map(|root| {
            let mut config = Reader { findings: &mut findings, warned_of_metrics: false }.file(&root);
            (config.source, config.text) = (file_name.to_owned(), (*text).into());
            config
        });
        let refused = findings.refused();
        let problems = findings.into_problems(file_name, &text);
        match config {
            Some(config) if !refused => Ok((config, problems)),
            _ => Err(problems),
        }
    }
}

struct Reader<'f> {
    findings: &'f mut Findings,
    warned_of_metrics: bool,
}

impl Reader<'_> {
    fn file(&mut self, root: &Node) -> DomainConfig {
        let mut config = DomainConfig { at: root.at, ..DomainConfig::default() };
        for Entry { key, value, .. } in self.entries(root, "the file", OF_FILE) {
            match &**key {
                "domain" => (config.domain, config.at) = (self.text(key, value), value.at),
                "descriptors" => config.descriptors = self.descriptors(value),
                _ => {}
            }
        }
        config
    }

    fn descriptors(&mut self, list: &Node) -> Vec<DescriptorConfig> {
        self.items("descriptors", list).iter().map(|entry| self.descriptor(entry)).collect()
    }

    fn descriptor(&mut self, node: &Node) -> DescriptorConfig {
        let mut config = DescriptorConfig { at: node.at, ..DescriptorConfig::default() };
        for entry @ Entry { key, value, .. } in self.entries(node, "a descriptor", OF_DESCRIPTOR) {
            match &**key {
                "key" => config.key = self.text(key, value),
                "value" => config.value = self.text(key, value),
                "rate_limit" => config.rate_limit = self.rate_limit(value),
                "descriptors" => config.descriptors = self.descriptors(value),
                "shadow_mode" => config.shadow_mode = self.boolean(key, value),
                "quota_mode" => config.quota_mode = self.boolean(key, value),
                "share_threshold" => config.share_threshold = self.boolean(key, value),
                "metadata" => config.metadata = self.metadata(value),
                _ => self.metric_setting(entry),
            }
        }
        config
    }

    fn rate_limit(&mut self, node: &Node) -> Option<RateLimitConfig> {
        if is_null(node) {
            return None;
        }
        let mut config = RateLimitConfig { at: node.at, unit_at: node.at, ..RateLimitConfig::default() };
        let entries = self.entries(node, "rate_limit", OF_LIMIT);
        for Entry { key, value, .. } in entries {
            match &**key {
                "unit" => (config.unit, config.unit_at) = (self.text(key, value), value.at),
                "requests_per_unit" => config.requests_per_unit = self.number(key, value),
                "unlimited" => config.unlimited = self.boolean(key, value),
                "name" => config.name = self.text(key, value),
                "replaces" => config.replaces = self.replaces(value),
                _ => {}
            }
        }
        if !config.unlimited && !entries.is_empty() && entries.iter().all(|entry| entry.key != "requests_per_unit") {
            let message = "rate_limit has no requests_per_unit, so it denies every request";
            self.findings.warning(node.at, message, "write `requests_per_unit: 0` if this is intended");
        }
        Some(config)
    }

    fn replaces(&mut self, list: &Node) -> Vec<String> {
        let name = |reader: &mut Self, item| {
            let entries = reader.entries(item, "an entry of `replaces`", OF_REPLACES);
            entries.iter().find(|entry| entry.key == "name").map(|entry| reader.text("name", &entry.value))
        };
        self.items("replaces", list).iter().map(|item| name(self, item).unwrap_or_default()).collect()
    }

    /// Returns the entries of a map. Reports keys that it must not have, and skips keys that belong elsewhere.
    fn entries<'n>(&mut self, node: &'n Node, what: &str, keys: &[&str]) -> &'n [Entry] {
        let NodeKind::Map(map) = &node.kind else {
            let fix = format!("write keys and values under it: {}", keys.join(", "));
            self.findings.error(node.at, format!("{what} is not a map"), fix);
            return &[];
        };
        for entry in map.entries.iter().filter(|entry| !keys.contains(&&*entry.key)) {
            let key = shown(&entry.key);
            let is_known = [OF_FILE, OF_DESCRIPTOR, OF_LIMIT].iter().any(|keys| keys.contains(&&*entry.key));
            if is_known {
                let message = format!("`{key}` has no effect in {what}");
                self.findings.warning(entry.key_at, message, "move it to where it belongs, or remove it");
            } else {
                let fix = format!("use {}, or remove it", keys.join(", "));
                self.findings.error(entry.key_at, format!("unknown key `{key}` in {what}"), fix);
            }
        }
        &map.entries
    }

    fn items<'n>(&mut self, name: &str, node: &'n Node) -> &'n [Node] {
        match &node.kind {
            NodeKind::List(items) => items,
            _ if is_null(node) => &[],
            _ => {
                self.findings.error(node.at, format!("`{name}` is not a list"), "write each entry after `- `");
                &[]
            }
        }
    }

    fn text(&mut self, name: &str, node: &Node) -> String {
        match &node.kind {
            NodeKind::Scalar(Scalar { value: ScalarValue::Null, .. }) => String::new(),
            NodeKind::Scalar(scalar) => scalar.text.clone(),
            NodeKind::List(_) | NodeKind::Map(_) => {
                self.findings.error(node.at, format!("`{name}` is not a text"), "write a single value");
                String::new()
            }
        }
    }

    fn number(&mut self, name: &str, node: &Node) -> u32 {
        let is_whole = |value: f64| value.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&value);
        let number = match &node.kind {
            NodeKind::Scalar(scalar) => match scalar.value {
                ScalarValue::Null => Some(0),
                ScalarValue::Integer(number) => u32::try_from(number).ok(),
                ScalarValue::Float(number) => is_whole(number).then_some(number as u32),
                // YAML 1.1 allows underscores in numbers.
                ScalarValue::Text if scalar.verbatim == Some(0) => scalar.text.replace('_', "").parse().ok(),
                ScalarValue::Bool(_) | ScalarValue::Text => None,
            },
            _ => None,
        };
        number.unwrap_or_else(|| {
            let message = format!("`{name}` is not a whole number from 0 to {}", u32::MAX);
            self.findings.error(node.at, message, "write a number such as 100, without quotes");
            0
        })
    }

    /// Reads a boolean of YAML 1.1.
    fn boolean(&mut self, name: &str, node: &Node) -> bool {
        if let NodeKind::Scalar(scalar) = &node.kind {
            let is_plain = scalar.verbatim != Some(1);
            match (scalar.value, scalar.text.to_ascii_lowercase().as_str()) {
                (ScalarValue::Null, _) => return false,
                (ScalarValue::Bool(value), _) => return value,
                (ScalarValue::Text, "y" | "yes" | "on") if is_plain => return true,
                (ScalarValue::Text, "n" | "no" | "off") if is_plain => return false,
                _ => {}
            }
        }
        self.findings.error(node.at, format!("`{name}` is neither true nor false"), "write true or false");
        false
    }

    fn metadata(&mut self, node: &Node) -> Option<Value> {
        match &node.kind {
            NodeKind::Map(map) => (!map.entries.is_empty()).then(|| node.to_json()),
            _ if is_null(node) => None,
            _ => {
                self.findings.error(node.at, "`metadata` is not a map", "write keys and values under it");
                None
            }
        }
    }

    /// Warns once about settings of metrics.
    fn metric_setting(&mut self, entry: &Entry) {
        if !OF_DESCRIPTOR.contains(&&*entry.key) {
            return;
        }
        if self.boolean(&entry.key, &entry.value) && !self.warned_of_metrics {
            self.warned_of_metrics = true;
            let message =
                format!("`{}` has no effect: metrics have a label for the limit, and none for values", entry.key);
            self.findings.warning(entry.key_at, message, "remove it");
        }
    }
}

fn is_null(node: &Node) -> bool {
    matches!(&node.kind, NodeKind::Scalar(Scalar { value: ScalarValue::Null, .. }))
}
