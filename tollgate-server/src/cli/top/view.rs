//! The lines of the view. Everything that the server sends is made printable.

use std::fmt::Write as _;

use serde_json::Value;
use tollgate_telemetry::limited::printable;
use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use super::Snapshot;

/// The most limits in a view that has room for all.
const MAX_LIMITS: usize = 20;

/// A line, and how to show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) text: String,
    pub(super) style: Style,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    Plain,
    Heading,
    Warning,
}

impl Line {
    pub(super) fn new(style: Style, text: impl Into<String>) -> Self {
        Self { text: text.into(), style }
    }
}

/// Returns the whole view as text, for stdout.
pub(super) fn whole(snapshot: &Snapshot, url: &str) -> String {
    let mut lines = state(&snapshot.status, url);
    lines.push(Line::new(Style::Plain, ""));
    lines.extend(limits(&snapshot.live, MAX_LIMITS));
    lines.push(Line::new(Style::Plain, ""));
    lines.extend(keys(&snapshot.top, time(&snapshot.status), usize::MAX));
    lines.iter().fold(String::new(), |text, line| text + line.text.trim_end() + "\n")
}

/// Returns the lines of a screen with this many lines: the state, limits in at most a third, and keys in the rest.
pub(super) fn screen(snapshot: &Snapshot, url: &str, height: usize) -> Vec<Line> {
    let mut lines = state(&snapshot.status, url);
    let rest = height.saturating_sub(lines.len() + 2);
    let limits = limits(&snapshot.live, (rest / 3).clamp(1, MAX_LIMITS));
    let rest = rest.saturating_sub(limits.len());
    // The title, a note, the header and the line about hashes come on top.
    let keys = keys(&snapshot.top, time(&snapshot.status), rest.saturating_sub(4));
    lines.push(Line::new(Style::Plain, ""));
    lines.extend(limits);
    lines.push(Line::new(Style::Plain, ""));
    lines.extend(keys);
    lines
}

fn time(status: &Value) -> f64 {
    status["now"].as_f64().unwrap_or(0.0)
}

/// Returns the server, its store and its upstreams.
fn state(status: &Value, url: &str) -> Vec<Line> {
    let mut lines = Vec::new();
    let up = duration(time(status) - status["started_at"].as_f64().unwrap_or(0.0));
    let rules = &status["rules"];
    let (version, limits) = (text(&rules["version"]), rules["limits"].as_u64().unwrap_or(0));
    lines.push(Line::new(
        Style::Heading,
        format!("tollgate {} at {}, up {up}", text(&status["version"]), printable(url)),
    ));
    lines.push(Line::new(
        Style::Plain,
        format!(
            "rules {} from {}: {}",
            shorten(&version, 12),
            text(&rules["source"]).replace('_', " "),
            some(limits, "limit")
        ),
    ));
    if status["ready"] == Value::Bool(false) {
        lines.push(Line::new(Style::Warning, format!("not ready: {}", text(&status["problem"]))));
    }
    lines.extend(store(&status["store"]));
    let all: &[Value] = status["upstreams"].as_array().map_or(&[], Vec::as_slice);
    if !all.is_empty() {
        let unhealthy: Vec<String> =
            all.iter().filter(|one| one["healthy"] == Value::Bool(false)).map(|one| text(&one["upstream"])).collect();
        lines.push(match unhealthy.as_slice() {
            [] => Line::new(Style::Plain, format!("upstreams: {} healthy", all.len())),
            names => {
                let healthy = all.len() - names.len();
                Line::new(Style::Warning, format!("upstreams: {healthy} healthy, unhealthy: {}", names.join(", ")))
            }
        });
    }
    lines
}

fn store(store: &Value) -> Vec<Line> {
    let mut description = format!("store {}", text(&store["kind"]));
    if let (Some(keys), Some(bytes)) = (store["keys"].as_u64(), store["memory"].as_u64()) {
        _ = write!(description, ": {}, {:.1} MiB", some(keys, "key"), bytes as f64 / 1_048_576.0);
    }
    let servers: &[Value] = store["servers"].as_array().map_or(&[], Vec::as_slice);
    let servers = servers.iter().map(|one| format!("{} breaker {}", text(&one["address"]), text(&one["breaker"])));
    let servers: Vec<String> = servers.collect();
    if !servers.is_empty() {
        _ = write!(description, ": {}", servers.join(", "));
    }
    let mut lines = vec![Line::new(Style::Plain, description)];
    if store["available"] == Value::Bool(false) {
        let problem = store["problem"].as_str().map_or_else(|| "unavailable".to_owned(), printable);
        lines.push(Line::new(Style::Warning, format!("store: {problem}")));
    }
    lines
}

/// Returns the decisions per second, of all limits and of the busiest.
fn limits(live: &Value, most: usize) -> Vec<Line> {
    let all: &[Value] = live["limits"].as_array().map_or(&[], Vec::as_slice);
    let rate = |rates: &Value, outcomes: &[&str]| -> f64 {
        // A sum of nothing is -0.0.
        outcomes.iter().filter_map(|outcome| rates[outcome].as_f64()).fold(0.0, |sum, rate| sum + rate)
    };
    let row = |name: String, rates: &Value| {
        let allowed = rate(rates, &["allowed", "shadow_allowed"]);
        let denied = rate(rates, &["denied", "banned"]);
        let shadow = rate(rates, &["shadow_denied"]);
        let other = rate(rates, &["blocked", "key_missing", "bad_request", "store_unavailable"]);
        let mut row = vec![name];
        row.extend([allowed, denied, shadow, other].map(|rate| format!("{rate:.1}")));
        row
    };
    let mut rows = vec![row("all limits".to_owned(), &live["totals"])];
    rows.extend(all.iter().take(most).map(|limit| row(text(&limit["limit"]), &limit["per_second"])));
    let header = ["LIMIT", "ALLOWED/s", "DENIED/s", "SHADOW DENIED/s", "OTHER/s"];
    let mut lines = table(&header, &rows, 1);
    let total = live["limits_total"].as_u64().unwrap_or(0);
    let hidden = total.saturating_sub(all.len().min(most) as u64);
    if hidden > 0 {
        lines.push(Line::new(Style::Plain, format!("… and {}", some(hidden, "more limit"))));
    }
    lines
}

/// Returns the most limited keys.
fn keys(top: &Value, now: f64, most: usize) -> Vec<Line> {
    let all: &[Value] = top["keys"].as_array().map_or(&[], Vec::as_slice);
    let (kind, over) = (text(&top["kind"]).replace('_', " "), text(&top["over"]));
    let (total, nodes) = (top["total"].as_u64().unwrap_or(0), top["nodes"].as_u64().unwrap_or(1));
    let of_nodes = if text(&top["scope"]) == "fleet" { format!(" on {}", some(nodes, "node")) } else { String::new() };
    let title =
        format!("{} requests: {total} in the last {}{of_nodes}", kind, if over == "1h" { "hour" } else { "minute" });
    let mut lines = vec![Line::new(Style::Heading, title)];
    if let Some(note) = top["note"].as_str() {
        lines.push(Line::new(Style::Warning, printable(note)));
    }
    if all.is_empty() {
        lines.push(Line::new(Style::Plain, "no keys"));
        return lines;
    }
    let row = |key: &Value| {
        let hidden = if is_hashed(key) { "#" } else { "" };
        let error = key["error"].as_u64().unwrap_or(0);
        let error = if error == 0 { String::new() } else { format!("-{error}") };
        let ago = duration(now - key["last_seen"].as_f64().unwrap_or(now));
        let count = key["count"].as_u64().unwrap_or(0).to_string();
        vec![text(&key["limit"]), format!("{hidden}{}", text(&key["key"])), count, error, format!("{ago} ago")]
    };
    let rows: Vec<Vec<String>> = all.iter().take(most).map(row).collect();
    lines.extend(table(&["LIMIT", "KEY", "COUNT", "ERROR", "LAST SEEN"], &rows, 2));
    if all.iter().any(is_hashed) {
        let fix = "# is the hash of a key: set `admin: { show_keys: true }` in the rule file to see keys";
        lines.push(Line::new(Style::Plain, fix));
    }
    lines
}

fn is_hashed(key: &Value) -> bool {
    key["is_hashed"] == Value::Bool(true)
}

/// Returns a table. The first columns are texts and get at most 40 columns of the screen each; the others are numbers.
fn table(header: &[&str], rows: &[Vec<String>], texts: usize) -> Vec<Line> {
    const WIDEST: usize = 40;
    let cell = |text: &str| shorten(text, WIDEST);
    let width = |column: usize| {
        let cells = rows.iter().map(|row| cell(&row[column]).width());
        cells.chain([header[column].width()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut line = String::new();
        for (column, (text, width)) in cells.zip(&widths).enumerate() {
            let text = cell(text);
            let space = " ".repeat(width.saturating_sub(text.width()));
            let gap = if column == 0 { "" } else { "  " };
            line += &if column < texts { format!("{gap}{text}{space}") } else { format!("{gap}{space}{text}") };
        }
        line
    };
    let mut lines = vec![Line::new(Style::Heading, line(&mut header.iter().copied()))];
    lines.extend(rows.iter().map(|row| Line::new(Style::Plain, line(&mut row.iter().map(String::as_str)))));
    lines
}

/// Cuts a printable text to this many columns of a terminal.
pub(super) fn shorten(text: &str, columns: usize) -> String {
    if text.width() <= columns {
        return text.to_owned();
    }
    let (mut shortened, mut used) = (String::new(), 1);
    for char in text.chars() {
        used += char.width().unwrap_or(0);
        if used > columns {
            break;
        }
        shortened.push(char);
    }
    if columns > 0 {
        shortened.push('…');
    }
    shortened
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| "?".to_owned(), printable)
}

fn some(count: u64, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

/// Returns a time as people read it.
pub(super) fn duration(seconds: f64) -> String {
    let seconds = seconds.max(0.0) as u64;
    match seconds {
        0..=99 => format!("{seconds} s"),
        100..=5999 => format!("{} min", seconds / 60),
        6000..=359_999 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn snapshot() -> Snapshot {
        let status = json!({
            "version": "0.1.0", "started_at": 1000.0, "now": 4700.0, "ready": true,
            "store": { "kind": "redis", "available": false, "problem": "default at 10.0.0.5:6379: refused: start it",
                "servers": [{ "address": "10.0.0.5:6379", "breaker": "open" }] },
            "rules": { "version": "0123456789abcdef", "source": "built_in", "limits": 3 },
            "upstreams": [{ "upstream": "10.0.0.7:80", "healthy": true }, { "upstream": "10.0.0.8:80", "healthy": false }],
        });
        let live = json!({ "interval": 1.0, "totals": { "allowed": 12.25, "denied": 3.0 }, "limits_total": 3, "limits": [
            { "limit": "per-user", "per_second": { "allowed": 12.25, "denied": 3.0 } },
            { "limit": "watch", "per_second": { "shadow_denied": 1.0 } },
        ] });
        let key = |key: &str, error: u64| json!({ "limit": "per-user", "key": key, "is_hashed": error > 0, "count": 90, "error": error, "last_seen": 4690.0 });
        let top = json!({ "over": "1m", "kind": "near_limit", "scope": "fleet", "nodes": 2, "total": 180,
            "keys": [key("\u{1b}[2Jann\r\n\u{202e}", 0), key(&"한국어".repeat(30), 7)] });
        Snapshot { status, live, top }
    }

    #[test]
    fn the_view_shows_the_server_its_limits_and_its_keys() {
        insta::assert_snapshot!(whole(&snapshot(), "http://127.0.0.1:8099"));
    }

    #[test]
    fn no_answer_breaks_the_view_or_controls_the_terminal() {
        for value in [json!(null), json!([]), json!("\u{1b}[2J"), json!({ "keys": [null], "limits": [3] })] {
            let broken = Snapshot { status: value.clone(), live: value.clone(), top: value };
            let text = whole(&broken, "http://a");
            assert!(text.chars().all(|char| char == '\n' || !char.is_control()), "{text:?}");
            for height in [0, 1, 5, 24] {
                _ = screen(&broken, "http://a", height);
            }
        }
    }

    #[test]
    fn a_screen_has_no_more_lines_than_fit() {
        for height in 16..60 {
            let lines = screen(&snapshot(), "http://a", height);
            assert!(lines.len() <= height, "{height}: {lines:?}");
        }
    }

    #[test]
    fn wide_characters_count_twice() {
        assert_eq!(shorten("한국어", 6), "한국어");
        assert_eq!(shorten("한국어", 5), "한국…");
        assert_eq!(shorten("abc", 2), "a…");
        assert_eq!(shorten("abc", 0), "");
    }
}
