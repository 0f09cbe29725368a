//! `tollgate init`: writes a commented rule file to start from.
//!
//! The answers come from options, from questions on a terminal, or are the defaults. Each answer is checked by the parser of
//! rule files, and so is the whole file before it is written: a file that `validate --strict` refuses is never written.

mod questions;
mod starter;

use std::fs::OpenOptions;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use tollgate_telemetry::notice;

use self::questions::Questions;
use self::starter::{NO_UPSTREAM, Numbers, Starter};
use super::replay::suggest;
use super::{Completion, Error, print, print_bytes, validate};

pub(super) const EXAMPLES: &str = "\
Examples:
  tollgate init
  tollgate init --upstream http://127.0.0.1:3000 --key ip --limit 100 --window 1m --yes
  tollgate init --from-log /var/log/nginx/access.log
  tollgate init --upstream none --store redis://10.0.0.5:6379 rules/tollgate.yaml
  tollgate init --yes - | less";

/// The `FILE` that is stdout.
const STDOUT: &str = "-";

#[derive(clap::Args)]
pub(super) struct Arguments {
    /// File to write; `-` prints it
    #[arg(value_name = "FILE", default_value = "tollgate.yaml")]
    file: PathBuf,
    /// Service behind the gateway: a URL, `echo` for a built-in test server, or `none` for decisions over HTTP only
    #[arg(long, value_name = "URL")]
    upstream: Option<String>,
    /// Part of a request that has its own count: ip, header:NAME, jwt:CLAIM, …
    #[arg(long, value_name = "PART")]
    key: Option<String>,
    /// JSON Web Key Set that verifies tokens, for `--key jwt:CLAIM`
    #[arg(long, value_name = "FILE")]
    jwks: Option<PathBuf>,
    /// Requests that each client may send in a window
    #[arg(long, value_name = "REQUESTS")]
    limit: Option<String>,
    /// Length of the window: 30s, 1m, 1h, …
    #[arg(long, value_name = "TIME")]
    window: Option<String>,
    /// Choose the numbers from this access log in place of --limit; repeatable
    #[arg(long, value_name = "LOG", conflicts_with = "limit")]
    from_log: Vec<PathBuf>,
    /// Where counts are kept: memory, redis://host:6379, …
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// Ask nothing: use the defaults for what no option sets
    #[arg(long, short)]
    yes: bool,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
}

pub(super) async fn run(arguments: &Arguments) -> Result<Completion, Error> {
    let is_printed = arguments.file == Path::new(STDOUT);
    // Before any question: the answers would be lost.
    if !is_printed && !arguments.force && arguments.file.exists() {
        return Err(exists(&arguments.file));
    }
    let starter = arguments.starter(is_printed)?;
    let mut starter = match AnswerSource::of(arguments) {
        AnswerSource::Terminal => arguments.ask(starter, Questions::new(io::stdin().lock(), io::stderr()))?,
        AnswerSource::Options => starter,
        AnswerSource::NoTerminal => {
            notice::log(
                "no terminal for questions, using defaults: change the file, or set options (tollgate init --help)",
            );
            starter
        }
    };
    if starter.reads_token() && starter.jwks.is_none() {
        let key = &starter.key;
        return Err(Error::Usage(format!("--key {key} needs the keys that verify tokens: add --jwks FILE")));
    }
    if let (false, Some(window)) = (arguments.from_log.is_empty(), starter.numbers.window()) {
        let suggested = suggest::from_logs(&arguments.from_log, &starter.key, window);
        match suggested {
            Ok(suggestion) => {
                suggestion.notes().iter().for_each(notice::log);
                starter.numbers = Numbers::from(&suggestion);
            }
            Err(error) => return suggest::failed(&error),
        }
    }
    let path = if is_printed { Path::new("tollgate.yaml") } else { &arguments.file };
    let parsed =
        starter.check(path).map_err(|problem| Error::Usage(format!("the file would not be valid: {problem}")))?;
    validate::usable(&parsed).await.map_err(Error::Open)?;
    if is_printed {
        print_bytes(starter.text().as_bytes())?;
        return Ok(Completion::Positive);
    }
    let readable_by = if parsed.store.url.has_login() { ReadableBy::Owner } else { ReadableBy::Default };
    arguments.write(&starter.text(), readable_by)?;
    let file = arguments.file.display();
    let only = match readable_by {
        ReadableBy::Owner => ", readable by its owner only, because it has the password of the store",
        ReadableBy::Default => "",
    };
    print(format_args!("{file} is written{only}. Start it with: tollgate serve --config {file}"))?;
    Ok(Completion::Positive)
}

/// The users that may read the file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReadableBy {
    Owner,
    /// As the umask of the user says.
    Default,
}

/// The source of the answers.
enum AnswerSource {
    Terminal,
    Options,
    NoTerminal,
}

impl AnswerSource {
    fn of(arguments: &Arguments) -> Self {
        let Arguments { upstream, key, jwks: _, limit, window, store, from_log, yes, file: _, force: _ } = arguments;
        let options = [upstream, key, limit, window, store];
        if *yes {
            Self::Options
        } else if io::stdin().is_terminal() && io::stderr().is_terminal() {
            Self::Terminal
        } else if options.iter().any(|option| option.is_some()) || !from_log.is_empty() {
            Self::Options
        } else {
            Self::NoTerminal
        }
    }
}

impl Arguments {
    /// Returns the answers of the options, each checked by itself so that an error names its option.
    fn starter(&self, is_printed: bool) -> Result<Starter, Error> {
        let mut starter = Starter::default();
        if let Some(jwks) = &self.jwks {
            starter.jwks = Some(self.jwks_path(jwks, is_printed)?);
            self.check(&starter).map_err(|problem| Error::Usage(format!("--jwks: {problem}")))?;
        }
        let mut set = |option: &str, value: &Option<String>, assign: fn(&mut Starter, &str)| {
            let Some(value) = value else { return Ok(()) };
            assign(&mut starter, value);
            self.check(&starter).map_err(|problem| Error::Usage(format!("--{option}: {problem}")))
        };
        set("upstream", &self.upstream, |starter, value| value.clone_into(&mut starter.upstream))?;
        set("key", &self.key, |starter, value| value.clone_into(&mut starter.key))?;
        set("limit", &self.limit, |starter, value| starter.numbers.set_limit(value))?;
        set("window", &self.window, |starter, value| starter.numbers.set_window(value))?;
        set("store", &self.store, |starter, value| value.clone_into(&mut starter.store))?;
        Ok(starter)
    }

    /// Asks the questions that no option answers.
    fn ask<R: io::BufRead, W: Write>(
        &self,
        mut starter: Starter,
        mut questions: Questions<R, W>,
    ) -> Result<Starter, Error> {
        let mut ask = |starter: &mut Starter, question: &str, default: &str, assign: fn(&mut Starter, &str)| {
            *starter = questions.ask(question, default, |answer| {
                let mut answered = starter.clone();
                assign(&mut answered, answer);
                self.check(&answered).map(|()| answered)
            })?;
            Ok::<(), Error>(())
        };
        if self.upstream.is_none() {
            let question =
                format!("URL of your service (`echo` for a test server, `{NO_UPSTREAM}` for decisions only)");
            let default = starter.upstream.clone();
            ask(&mut starter, &question, &default, |starter, answer| answer.clone_into(&mut starter.upstream))?;
        }
        if self.key.is_none() {
            let question = "What tells clients apart (ip, header:NAME, jwt:CLAIM)";
            let default = starter.key.clone();
            ask(&mut starter, question, &default, |starter, answer| answer.clone_into(&mut starter.key))?;
        }
        if starter.reads_token() && starter.jwks.is_none() {
            let question = "File with the keys of your tokens (JSON Web Key Set)";
            ask(&mut starter, question, "", |starter, answer| starter.jwks = Some(answer.to_owned()))?;
        }
        if let (None, [], Numbers::Window { limit, window }) = (&self.limit, &*self.from_log, starter.numbers.clone()) {
            let question = format!("Requests that each client may send per {window}");
            ask(&mut starter, &question, &limit, |starter, answer| starter.numbers.set_limit(answer))?;
        }
        if self.store.is_none() {
            let question = "Where counts are kept (memory, or the URL of a Redis that servers share)";
            let default = starter.store.clone();
            ask(&mut starter, question, &default, |starter, answer| answer.clone_into(&mut starter.store))?;
        }
        Ok(starter)
    }

    /// Checks the answers so far. A missing key file is not a problem yet: it is the next question.
    fn check(&self, starter: &Starter) -> Result<(), String> {
        if starter.reads_token() && starter.jwks.is_none() {
            return Ok(());
        }
        starter.check(&self.file).map(drop)
    }

    /// Returns the path of the key set as the rule file names it: paths in a rule file start from its folder.
    fn jwks_path(&self, jwks: &Path, is_printed: bool) -> Result<String, Error> {
        let folder = self.file.parent().filter(|folder| !is_printed && !folder.as_os_str().is_empty());
        let path = match folder {
            Some(_) => std::path::absolute(jwks).map_err(|error| Error::Usage(format!("--jwks: {error}")))?,
            None => jwks.to_owned(),
        };
        path.into_os_string()
            .into_string()
            .map_err(|path| Error::Usage(format!("--jwks: {} is not UTF-8: rename the file", path.display())))
    }

    fn write(&self, text: &str, readable_by: ReadableBy) -> Result<(), Error> {
        let mut options = OpenOptions::new();
        #[cfg(unix)]
        if readable_by == ReadableBy::Owner {
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        }
        match self.force {
            true => options.write(true).create(true).truncate(true),
            false => options.write(true).create_new(true),
        };
        let written = options.open(&self.file).and_then(|mut file| {
            // The file that is replaced may be readable by all.
            #[cfg(unix)]
            if readable_by == ReadableBy::Owner {
                file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
            }
            file.write_all(text.as_bytes())
        });
        written.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => exists(&self.file),
            _ => {
                let file = self.file.display();
                Error::Usage(format!("cannot write {file}: {error}: name a file in an existing, writable directory"))
            }
        })
    }
}

fn exists(file: &Path) -> Error {
    let file = file.display();
    Error::Usage(format!("{file} exists: name another file, `-` to print, or add --force to replace it"))
}
