//! `tollgate replay --suggest`: prints numbers from logs as rules. Exits with 1 if the logs have too little for that.

use std::path::PathBuf;

use indicatif::ProgressBar;
use tollgate_rules::internal::demand::Cover;
use tollgate_telemetry::notice;
use tollgate_tools::access_log::{AccessLog, Format, Mappings};
use tollgate_tools::suggest::{Command, Settings, SuggestError, Suggestion, Window};

use super::super::{Completion, Error, print};
use super::{UPDATE_EVERY, progress};

/// The share of clients that suggested limits leave untouched, unless `--cover` says otherwise.
const DEFAULT_COVER: &str = "99.9%";

#[derive(clap::Args)]
pub(super) struct Options {
    /// Choose numbers for a limit from the logs, and print them as rules, in place of replaying --config
    #[arg(long, conflicts_with_all = ["config", "against", "fail_if", "top"])]
    pub(super) suggest: bool,
    /// With --suggest: share of clients that are never denied
    #[arg(long, value_name = "SHARE", default_value = DEFAULT_COVER, requires = "suggest", value_parser = cover)]
    cover: Cover,
    /// With --suggest: part of a request that tells clients apart: ip, header:NAME, …; repeatable
    #[arg(long, value_name = "PART", default_value = "ip", requires = "suggest")]
    key: Vec<String>,
    /// With --suggest: window of the limit, and the time in which the most that a bucket admits is least
    #[arg(long, value_name = "TIME", default_value = "1m", requires = "suggest")]
    window: String,
}

/// Reads a share such as `99.9%` or `0.999`.
fn cover(text: &str) -> Result<Cover, String> {
    let (number, scale) = match text.trim().strip_suffix('%') {
        Some(percent) => (percent.trim(), 100.0),
        None => (text.trim(), 1.0),
    };
    let share = number.parse::<f64>().ok().and_then(|number| Cover::new(number / scale));
    share.ok_or_else(|| {
        "it is not a share of clients from 0.000001 to 0.999999: write one such as 99.9% or 0.999".to_owned()
    })
}

pub(super) fn run(
    options: &Options,
    logs: &[PathBuf],
    format: Option<Format>,
    mappings: Mappings,
    json: bool,
) -> Result<Completion, Error> {
    let window = Window::new(&options.window);
    let settings = |window| Settings {
        logs: logs.to_vec(),
        format,
        mappings,
        key: options.key.clone(),
        window,
        cover: options.cover,
        command: Command::Replay,
    };
    match window.map(settings).and_then(suggest) {
        Ok(suggestion) => {
            match json {
                true => print(format_args!("{:#}", suggestion.json()))?,
                false => print(suggestion.to_string().trim_end())?,
            }
            Ok(Completion::Positive)
        }
        Err(error) => failed(&error),
    }
}

/// Chooses numbers for a starter file.
pub(crate) fn from_logs(logs: &[PathBuf], key: &str, window: &str) -> Result<Suggestion, SuggestError> {
    let window = Window::new(window)?;
    let cover = cover(DEFAULT_COVER).expect("the default is a share");
    let (format, mappings) = (None, Mappings::default());
    let (key, command) = (vec![key.to_owned()], Command::Init);
    suggest(Settings { logs: logs.to_vec(), format, mappings, key, window, cover, command })
}

/// Returns the answer of a command that has no suggestion. Too little data is a negative answer, not an error.
pub(crate) fn failed(error: &SuggestError) -> Result<Completion, Error> {
    if error.is_lack_of_data() {
        notice::log(error);
        return Ok(Completion::Negative);
    }
    Err(Error::Usage(error.to_string()))
}

fn suggest(settings: Settings) -> Result<Suggestion, SuggestError> {
    let mut bar: Option<ProgressBar> = None;
    let mut requests = 0;
    let suggestion = Suggestion::from_log(settings, |log: &AccessLog| {
        requests += 1;
        if requests % UPDATE_EVERY == 1 {
            bar.get_or_insert_with(|| progress(log)).set_position(log.read_bytes());
        }
    });
    bar.iter().for_each(ProgressBar::finish_and_clear);
    suggestion
}
