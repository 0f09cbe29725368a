//! The text of a starter file.
//!
//! The text has one source for each answer, and is checked like any other rule file before it is written. So the rules about
//! answers are those of the rule file and are not repeated here.

use std::fmt::Write;
use std::path::Path;

use tollgate_config::{Parsed, Problems};
use tollgate_tools::suggest::{Suggestion, scalar};

use crate::config;

/// The upstream of a file without a gateway: decisions over HTTP only.
pub(super) const NO_UPSTREAM: &str = "none";

/// The answers that a starter file is made of.
#[derive(Clone)]
pub(super) struct Starter {
    /// A URL, `echo`, or [`NO_UPSTREAM`].
    pub(super) upstream: String,
    pub(super) key: String,
    /// The file with the keys of tokens, if `key` reads a token.
    pub(super) jwks: Option<String>,
    pub(super) store: String,
    pub(super) numbers: Numbers,
}

/// The numbers of the limit.
#[derive(Clone)]
pub(super) enum Numbers {
    Window {
        limit: String,
        window: String,
    },
    /// Numbers from a log, as lines of the file.
    Suggested {
        comment: String,
        settings: String,
    },
}

impl Default for Starter {
    fn default() -> Self {
        Self {
            upstream: "http://127.0.0.1:3000".to_owned(),
            key: "ip".to_owned(),
            jwks: None,
            store: "memory".to_owned(),
            numbers: Numbers::default(),
        }
    }
}

impl Default for Numbers {
    fn default() -> Self {
        Self::Window { limit: "100".to_owned(), window: "1m".to_owned() }
    }
}

impl Numbers {
    pub(super) fn set_limit(&mut self, value: &str) {
        if let Self::Window { limit, .. } = self {
            value.clone_into(limit);
        }
    }

    pub(super) fn set_window(&mut self, value: &str) {
        if let Self::Window { window, .. } = self {
            value.clone_into(window);
        }
    }

    /// Returns the window, unless the numbers are from a log.
    pub(super) fn window(&self) -> Option<&str> {
        match self {
            Self::Window { window, .. } => Some(window),
            Self::Suggested { .. } => None,
        }
    }
}

impl From<&Suggestion> for Numbers {
    fn from(suggestion: &Suggestion) -> Self {
        Self::Suggested { comment: suggestion.bucket_effect(), settings: suggestion.bucket_settings() }
    }
}

impl Starter {
    /// Returns the file.
    pub(super) fn text(&self) -> String {
        let sections = [HEAD.to_owned(), self.entry_points(), self.store(), self.tokens(), self.limits()];
        sections.into_iter().filter(|section| !section.is_empty()).collect::<Vec<_>>().join("\n")
    }

    /// Returns whether the key reads a token, so that a file with keys is needed.
    pub(super) fn reads_token(&self) -> bool {
        self.key.starts_with("jwt:")
    }

    /// Parses the file, as if it were at `path`. Warnings are errors.
    pub(super) fn check(&self, path: &Path) -> Result<Parsed, String> {
        if self.answers().any(|answer| answer.contains(char::is_control)) {
            return Err("the value has a control character: remove it".to_owned());
        }
        let parsed = config::understand(path, self.text().as_bytes()).map_err(|problems| first(&problems))?;
        if parsed.warnings().iter().next().is_some() {
            return Err(first(parsed.warnings()));
        }
        config::compile(&parsed, None).map_err(|problems| first(&problems))?;
        parsed.redis_settings().map_err(|problems| first(&problems))?;
        Ok(parsed)
    }

    fn answers(&self) -> impl Iterator<Item = &String> {
        let numbers = match &self.numbers {
            Numbers::Window { limit, window } => [limit, window].into(),
            Numbers::Suggested { .. } => Vec::new(),
        };
        [&self.upstream, &self.key, &self.store].into_iter().chain(numbers).chain(&self.jwks)
    }

    fn entry_points(&self) -> String {
        let served = match &*self.upstream {
            NO_UPSTREAM => SERVICE.to_owned(),
            upstream => GATEWAY.replace("UPSTREAM", &scalar(upstream)),
        };
        format!("{served}\n{ADMIN}")
    }

    fn store(&self) -> String {
        let comment = match &*self.store {
            "memory" => {
                "# Counts are kept in this process. `redis://127.0.0.1:6379` shares them between servers: docs/redis.md"
            }
            _ => "# `password_file` keeps a password out of this file: docs/redis.md",
        };
        format!("{comment}\nstore: {}\n", scalar(&self.store))
    }

    fn tokens(&self) -> String {
        let Some(jwks) = &self.jwks else { return String::new() };
        format!(
            "# The keys that verify tokens. `issuer` and `audience` accept only tokens that are meant for you.\njwt:\n  \
             jwks_file: {}\n",
            scalar(jwks)
        )
    }

    fn limits(&self) -> String {
        let mut text = "limits:\n".to_owned();
        let key = scalar(&self.key);
        let of_key = match self.key.split(':').next().unwrap_or_default() {
            "ip" => "each client address has its own count",
            "jwt" => "each value of this claim has its own count; all requests without a token share one",
            "header" => "set by your own proxy: a client that can choose it gets as many counts as it likes",
            _ => "each value has its own count",
        };
        if let Numbers::Suggested { comment, .. } = &self.numbers {
            _ = writeln!(text, "  # Chosen from a log (docs/choosing-numbers.md). {comment}");
        }
        _ = writeln!(text, "  - name: per-client\n    key: {key}   # {of_key}");
        match &self.numbers {
            Numbers::Window { limit, window } => {
                _ = writeln!(text, "    limit: {}\n    window: {}", scalar(limit), scalar(window));
            }
            Numbers::Suggested { settings, .. } => text.push_str(settings),
        }
        text.push_str(ALGORITHMS);
        text
    }
}

/// Returns the first problem and its fix, without the position: the file does not exist yet.
fn first(problems: &Problems) -> String {
    problems.iter().next().map(|problem| format!("{}: {}", problem.message(), problem.fix())).unwrap_or_default()
}

const HEAD: &str = "\
# Rules for `tollgate serve`. After a change, run `tollgate validate`. A running server applies a valid file when it is
# saved. All settings: docs/rules.md. Editors check this file with the output of `tollgate schema`.
";

const GATEWAY: &str = "\
gateway:
  listen: 127.0.0.1:8080   # 0.0.0.0:8080 accepts clients from other machines
  # Behind another proxy, list its addresses. X-Forwarded-For is ignored from all others.
  # trusted_proxies: [192.0.2.10]
  routes:
    - path: /**
      upstream: UPSTREAM   # a list of URLs is balanced: docs/gateway.md
";

const SERVICE: &str = "\
service:
  http: 127.0.0.1:8090   # decisions at POST /v1/check; also over gRPC and the Redis protocol: docs/service.md
";

const ADMIN: &str = "\
admin:
  listen: 127.0.0.1:8099   # health checks and metrics: docs/operating.md
";

const ALGORITHMS: &str = "    # shadow: true   # counts and reports, and denies nothing: a way to try a limit

  # A limit has one of five algorithms, described in docs/algorithms.md:
  #   sliding_window_counter  `limit` in each `window`, evenly: the default
  #   sliding_window_log      never more than `limit` in any window; remembers each request
  #   fixed_window            `limit` from each full minute, hour or day to the next
  #   token_bucket            bursts up to `capacity`, then `refill`
  #   leaky_bucket            the same; with `overflow: queue`, requests wait and leave one by one
  #
  # A request must pass every limit that it matches. For example, five attempts to log in, then one a minute:
  # - name: logins
  #   match: { path: /login, methods: [POST] }
  #   key: ip
  #   algorithm: token_bucket
  #   capacity: 5
  #   refill: 1/m
";
