//! Parts of keys that a log does not have.

use tollgate_rules::RuleSet;

use crate::access_log::Record;

/// The parts of keys that no request had so far.
pub(super) struct MissingParts(Vec<Part>);

struct Part {
    limit: String,
    /// The part, as in a rule file.
    text: String,
    source: Source,
}

/// Where a part of a key comes from.
enum Source {
    Client,
    Host,
    /// A header, in lower case.
    Header(String),
    /// Nothing that a log has.
    Never,
}

impl MissingParts {
    /// Lists the parts of all keys that may be missing.
    pub(super) fn new(rules: &RuleSet) -> Self {
        let parts_of = |limit: &str| -> Vec<Part> {
            let parts = rules.key_parts(limit).unwrap_or_default().iter().map(ToString::to_string);
            let part = |text: String| Some(Part { source: Source::of(&text)?, limit: limit.to_owned(), text });
            parts.filter_map(part).collect()
        };
        Self(rules.names().flat_map(parts_of).collect())
    }

    /// Removes the parts that a request has.
    pub(super) fn see(&mut self, record: &Record) {
        if !self.0.is_empty() {
            self.0.retain(|part| !part.source.is_in(record));
        }
    }

    /// Describes each missing part and its effect.
    pub(super) fn notes(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|Part { limit, text, source }| {
            let fix = match source {
                Source::Header(name) if !text.starts_with("header:") => {
                    format!("it needs the header {name}, which a replay cannot make up")
                }
                Source::Header(_) => format!("name the field that has it, such as --map {text}=user"),
                Source::Client => "log the address of the client".to_owned(),
                Source::Host => "log the host".to_owned(),
                Source::Never => "logs do not have it".to_owned(),
            };
            format!(
                "limit {limit} counts by {text}, which no line of the log has, so all its requests lack it \
                 (see `missing`): {fix}"
            )
        })
    }
}

impl Source {
    /// Returns where a part of a key comes from, or `None` if every request has it.
    fn of(part: &str) -> Option<Self> {
        match part.split_once(':') {
            Some(("header", name)) => Some(Self::Header(name.to_ascii_lowercase())),
            Some(("cookie", _)) => Some(Self::Header("cookie".to_owned())),
            Some(("jwt", _)) => Some(Self::Header("authorization".to_owned())),
            Some(("cert" | "descriptor", _)) => Some(Self::Never),
            Some(_) => None,
            None if part == "ip" || part.starts_with("ip/") => Some(Self::Client),
            None if part == "host" => Some(Self::Host),
            None => None,
        }
    }

    fn is_in(&self, record: &Record) -> bool {
        match self {
            Self::Client => record.client().is_some(),
            Self::Host => record.host().is_some(),
            Self::Header(name) => record.headers().any(|(header, _)| header.eq_ignore_ascii_case(name)),
            Self::Never => false,
        }
    }
}
