//! The result of a replay, for people.

use std::fmt::{self, Display, Write as _};

use super::report::{AgainstReport, FileReport, KeyReport, LimitReport, Report, RulesReport};
use super::threshold::Share;

impl Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for warning in &self.warnings {
            writeln!(out, "WARNING: {warning}.\n")?;
        }
        for file in &self.files {
            write!(out, "{file}")?;
        }
        writeln!(out, "From {} to {}.", plain(&self.from), plain(&self.to))?;
        write!(out, "\n{}", self.rules)?;
        if let Some(against) = &self.against {
            write!(out, "\n{against}")?;
        }
        self.write_shares(out)?;
        if !self.rules.most_limited.is_empty() {
            write!(out, "\nMost limited, since their first denial:\n{}", keys(&self.rules.most_limited))?;
        }
        for note in &self.notes {
            write!(out, "\nNote: {note}.")?;
        }
        if !self.notes.is_empty() {
            writeln!(out)?;
        }
        let crossed = self.thresholds.iter().filter(|threshold| threshold.crossed == Some(true));
        for threshold in crossed {
            write!(out, "\nCrossed: {}, with {} ({:.3} %).", threshold.threshold, threshold.value, threshold.percent)?;
        }
        Ok(())
    }
}

impl Report {
    fn write_shares(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RulesReport { denied, refused, delayed, .. } = &self.rules;
        let share = |part, whole| format!("{part} of {whole} ({:.3} %)", Share { part, whole }.percent());
        writeln!(out, "\nRequests denied: {}.", share(*denied, self.requests))?;
        if *refused > 0 {
            writeln!(
                out,
                "Requests refused as blocked, without a key or ambiguous: {}.",
                share(*refused, self.requests)
            )?;
        }
        if *delayed > 0 {
            writeln!(out, "Requests delayed by a queue: {}.", share(*delayed, self.requests))?;
        }
        if self.logged_denials > 0 {
            writeln!(
                out,
                "Requests that were answered with 429 when logged: {}.",
                share(self.logged_denials, self.requests)
            )?;
        }
        let about = if self.clients.exact { "" } else { "about " };
        let clients = share(self.clients.denied, self.clients.seen);
        writeln!(out, "Clients that would notice, by address: {about}{clients}.")
    }
}

impl Display for FileReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let formats: Vec<&str> = self.formats.keys().copied().collect();
        write!(out, "{}: {}", self.path, counted(self.requests, "request", "requests"))?;
        match &formats[..] {
            [] => {}
            formats => write!(out, " ({})", formats.join(", "))?,
        }
        let mut parts = Vec::new();
        let mut add = |number: u64, text: &str| {
            if number > 0 {
                parts.push(format!("{number} {text}"));
            }
        };
        add(self.without_request, "without an HTTP request");
        add(self.unreadable, "unreadable");
        add(self.too_long, "too long");
        if !parts.is_empty() {
            write!(out, "; lines that were skipped: {}", parts.join(", "))?;
        }
        writeln!(out)?;
        for line in &self.unreadable_lines {
            writeln!(out, "  line {}: {}", line.line, line.text)?;
        }
        let back = self.largest_step_back.0.as_secs_f64();
        if self.out_of_order > 0 {
            let lines = counted(self.out_of_order, "line", "lines");
            writeln!(
                out,
                "  {lines} out of order, by up to {:.1} s: counted at the newest time before",
                back.min(60.0)
            )?;
        }
        if self.misdated > 0 {
            let lines = counted(self.misdated, "line", "lines");
            let jumps = counted(self.time_jumps, "jump", "jumps");
            writeln!(out, "  {lines} far from the time of their neighbours, and {jumps} of the time")?;
        }
        if let Some(problem) = &self.problem {
            writeln!(out, "  could not be read to its end ({problem})")?;
        }
        Ok(())
    }
}

impl Display for RulesReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{}:", self.file)?;
        if self.limits.is_empty() {
            return writeln!(out, "  there are no limits");
        }
        let header =
            ["limit", "offered", "admitted", "denied", "share", "keys", "denied keys", "first denial", "peak minute"];
        let rows: Vec<Vec<String>> =
            std::iter::once(header.map(str::to_owned).to_vec()).chain(self.limits.iter().map(row)).collect();
        out.write_str(&table(&rows))
    }
}

impl Display for AgainstReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.rules)?;
        let comparison = &self.comparison;
        writeln!(out, "\nAgainst {}:", self.rules.file)?;
        writeln!(out, "  requests denied now and admitted before: {}", comparison.newly_denied)?;
        writeln!(out, "  requests admitted now and denied before: {}", comparison.newly_admitted)?;
        writeln!(out, "  clients denied before: {}", self.clients_denied)?;
        writeln!(out, "  clients denied only now: {}", self.clients_newly_denied)
    }
}

fn row(limit: &LimitReport) -> Vec<String> {
    let name = if limit.shadow { format!("{} (shadow)", limit.limit) } else { limit.limit.clone() };
    let denied = limit.denied + limit.refused;
    let share = Share { part: denied, whole: limit.offered }.percent();
    let about = if limit.keys_exact { "" } else { "~" };
    vec![
        name,
        limit.offered.to_string(),
        limit.admitted.to_string(),
        denied.to_string(),
        format!("{share:.3} %"),
        format!("{about}{}", limit.keys),
        format!("{about}{}", limit.denied_keys),
        limit.first_denial.as_deref().map_or("-".to_owned(), plain),
        limit.peak_minute.as_ref().map_or("-".to_owned(), |peak| format!("{} ({})", plain(&peak.from), peak.denied)),
    ]
}

fn keys(keys: &[KeyReport]) -> String {
    let header = ["limit", "key", "offered", "denied", "first denial", "last denial"].map(str::to_owned).to_vec();
    let row = |key: &KeyReport| {
        let denied = match key.denied_error {
            0 => key.denied.to_string(),
            error => format!("{} to {}", key.denied - error, key.denied),
        };
        let times = [plain(&key.first_denial), plain(&key.last_denial)];
        let [first, last] = times;
        vec![key.limit.clone(), key.key.clone(), key.offered.to_string(), denied, first, last]
    };
    let rows: Vec<Vec<String>> = std::iter::once(header).chain(keys.iter().map(row)).collect();
    table(&rows)
}

/// Aligns columns: texts to the left, numbers to the right.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let is_number = |column: usize| {
        rows.iter()
            .skip(1)
            .all(|row| row[column].trim_start_matches('~').starts_with(|char: char| char.is_ascii_digit()))
            && !rows[0][column].ends_with("denial")
            && !matches!(&*rows[0][column], "key" | "limit" | "peak minute")
    };
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            // Writing to memory does not fail.
            _ = match is_number(column) {
                true => write!(line, "  {cell:>width$}"),
                false => write!(line, "  {cell:<width$}"),
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Returns a time as people read it.
fn plain(time: &str) -> String {
    let seconds = time.split(['.', 'Z']).next().unwrap_or_default();
    seconds.replace('T', " ")
}

fn counted(number: u64, one: &str, several: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { several })
}
