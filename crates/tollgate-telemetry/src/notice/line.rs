//! The forms of a log line.

use std::fmt::{Display, Write as _};
use std::io::stderr;
use std::time::Duration;

use serde_json::Value;
use tollgate::internal::is_control_or_format;

use super::Field;
use crate::seconds::rfc3339_millis;

/// The severity of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// A failure that needs an operator: new rules are rejected, the server cannot start.
    Error,
    /// Something that works, but less well than it should, or not for long.
    Warning,
    /// An event that needs no action.
    Info,
}

/// The format of the log of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Time, level and message
    Text,
    /// One JSON object per line
    Json,
}

/// The form of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// `tollgate: warning: …`, for commands that end.
    Plain,
    /// `2026-11-15T12:25:53.218Z warning: …`.
    Text,
    /// `<4>warning: …`: the journal has its own time, and reads the level from the number (sd-daemon(3)).
    Journal,
    Json,
}

impl Level {
    fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Info => "info",
        }
    }

    /// Returns the priority of syslog.
    fn priority(self) -> u8 {
        match self {
            Self::Error => 3,
            Self::Warning => 4,
            Self::Info => 6,
        }
    }
}

impl Form {
    pub(super) fn of(format: LogFormat) -> Self {
        match format {
            LogFormat::Json => Self::Json,
            LogFormat::Text if stderr_is_journal() => Self::Journal,
            LogFormat::Text => Self::Text,
        }
    }
}

/// Returns whether stderr is the stream to the journal that systemd names in `JOURNAL_STREAM`. The variable alone is not
/// enough: it is inherited by processes whose stderr is something else.
#[cfg(unix)]
fn stderr_is_journal() -> bool {
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(descriptor) = stderr().as_fd().try_clone_to_owned() else { return false };
    let metadata = std::fs::File::from(descriptor).metadata();
    metadata.is_ok_and(|of| stream == format!("{}:{}", of.dev(), of.ino()))
}

#[cfg(not(unix))]
fn stderr_is_journal() -> bool {
    false
}

/// Returns the line, with its line feed.
pub(super) fn render(
    form: Form,
    level: Level,
    since_epoch: Duration,
    message: &dyn Display,
    fields: &[Field],
) -> String {
    let mut line = match form {
        Form::Plain if level == Level::Warning => "tollgate: warning: ".to_owned(),
        Form::Plain => "tollgate: ".to_owned(),
        Form::Text => format!("{} {}: ", rfc3339_millis(since_epoch), level.as_str()),
        Form::Journal => format!("<{}>{}: ", level.priority(), level.as_str()),
        Form::Json => return json(level, since_epoch, message, fields),
    };
    // Messages of commands may have several lines.
    let line_feed = if form == Form::Plain { '\n' } else { ' ' };
    // Writing to memory does not fail.
    _ = write!(Printable { line: &mut line, line_feed }, "{message}");
    line.push('\n');
    line
}

fn json(level: Level, since_epoch: Duration, message: &dyn Display, fields: &[Field]) -> String {
    let (time, level) = (rfc3339_millis(since_epoch), level.as_str());
    let mut line = format!(r#"{{"time":"{time}","level":"{level}","message":{}"#, Value::from(message.to_string()));
    for (name, value) in fields {
        _ = write!(line, r#","{name}":{value}"#);
    }
    // Only texts in quotes have such characters.
    if line.contains(is_control_or_format) {
        line = line.chars().fold(String::with_capacity(line.len()), |mut line, char| {
            if is_control_or_format(char) {
                for unit in char.encode_utf16(&mut [0; 2]) {
                    _ = write!(line, "\\u{unit:04x}");
                }
            } else {
                line.push(char);
            }
            line
        });
    }
    line.push_str("}\n");
    line
}

/// Keeps a message away from the terminal's controls, whatever a client, an upstream or a file put into it.
struct Printable<'a> {
    line: &'a mut String,
    /// Replaces line feeds.
    line_feed: char,
}

impl std::fmt::Write for Printable<'_> {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        for char in text.chars() {
            match char {
                '\n' => self.line.push(self.line_feed),
                _ if is_control_or_format(char) => self.line.extend(char.escape_default()),
                _ => self.line.push(char),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: Duration = Duration::from_millis(1_709_210_096_789);

    #[test]
    fn a_line_has_four_forms() {
        let line = |form, level| render(form, level, AT, &"the \"store\" is\nslow", &[("limit", "per-user".into())]);
        assert_eq!(line(Form::Plain, Level::Error), "tollgate: the \"store\" is\nslow\n");
        assert_eq!(line(Form::Plain, Level::Warning), "tollgate: warning: the \"store\" is\nslow\n");
        assert_eq!(line(Form::Text, Level::Info), "2024-02-29T12:34:56.789Z info: the \"store\" is slow\n");
        assert_eq!(line(Form::Journal, Level::Warning), "<4>warning: the \"store\" is slow\n");
        assert_eq!(
            line(Form::Json, Level::Error),
            "{\"time\":\"2024-02-29T12:34:56.789Z\",\"level\":\"error\",\"message\":\"the \\\"store\\\" \
             is\\nslow\",\"limit\":\"per-user\"}\n"
        );
    }

    #[test]
    fn a_message_cannot_leave_its_line_or_control_a_terminal() {
        let message = "a\r\n\u{1b}[31mb\u{85}\u{202e}c\u{2028}\u{e0041}";
        let line = |form| render(form, Level::Info, AT, &message, &[("key", message.into())]);
        let printed = "[31mb\\u{85}\\u{202e}c\\u{2028}\\u{e0041}\n";
        assert_eq!(line(Form::Text), format!("2024-02-29T12:34:56.789Z info: a\\r \\u{{1b}}{printed}"));
        assert_eq!(line(Form::Plain), format!("tollgate: a\\r\n\\u{{1b}}{printed}"));
        let json = line(Form::Json);
        assert!(!json.trim_end().contains(is_control_or_format), "{json}");
        let object: Value = serde_json::from_str(&json).expect("valid JSON");
        assert_eq!((&object["message"], &object["key"]), (&message.into(), &message.into()));
    }
}
