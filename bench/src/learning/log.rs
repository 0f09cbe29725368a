//! A limit that learns from the requests of an access log, beside fixed numbers.

use std::collections::HashSet;
use std::fs::File;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tollgate::Timestamp;
use tollgate_rules::internal::demand::{Cover, Demand, Measure, TICK};

use super::simulation::{Number, Site};

/// The heads of the columns.
pub(super) const COLUMNS: [&str; 6] =
    ["number", "after a day", "at the end", "clients touched", "requests denied", "peak admitted per minute"];

/// Fewer clients per day than a thousand need a smaller share than 99.9 %.
const COVER_HUNDREDTHS: u64 = 9900;
const DAY: Duration = Duration::from_secs(86_400);
const MINUTE: Duration = Duration::from_secs(60);

/// The requests of a log, in the order of their times.
pub(super) struct Log {
    requests: Vec<(Timestamp, String)>,
    start: Timestamp,
    end: Timestamp,
}

/// What a number did to the requests after the first day, from which a limit that learns has its first number.
struct Effect {
    after_a_day: u64,
    at_the_end: u64,
    touched: usize,
    denied: u64,
    peak: u64,
}

impl Log {
    /// Reads a log in the Common or Combined Log Format. Other lines are skipped.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut requests = Vec::new();
        for line in BufReader::new(file).split(b'\n') {
            let line = line?;
            requests.extend(request(&String::from_utf8_lossy(&line)));
        }
        requests.sort_by_key(|(time, _)| *time);
        let times = requests.first().zip(requests.last());
        let (start, end) = times.map(|(first, last)| (first.0, last.0)).context("the log has no requests")?;
        ensure!(start.saturating_add(DAY * 2) <= end, "the log is shorter than two days: use a longer one");
        Ok(Self { requests, start, end })
    }

    pub(super) fn title(&self) -> String {
        let clients: HashSet<&str> = self.requests.iter().map(|(_, client)| &**client).collect();
        let hours = (self.end.as_micros() - self.start.as_micros()) / 3_600_000_000;
        format!("{} requests of {} clients in {hours} h", self.requests.len(), clients.len())
    }

    /// Returns the rows: the learned number, the best fixed one, and the bounds. Returns the learned number too.
    pub(super) fn evaluate(&self) -> (Vec<[String; 6]>, u64) {
        let best = self.best_fixed();
        let (from, to) = ((best / 2).max(1), best * 4);
        let learned = self.run(Number::Learned { from, to, over_days: 1, cover: COVER_HUNDREDTHS });
        let number = learned.at_the_end;
        let fixed = [("best fixed", best), ("from", from), ("to", to)];
        let fixed = fixed.map(|(label, number)| self.row(label, &self.run(Number::Fixed(number))));
        ([self.row("learned", &learned)].into_iter().chain(fixed).collect(), number)
    }

    fn evaluated(&self) -> impl Iterator<Item = &(Timestamp, String)> {
        let from = self.start.saturating_add(DAY);
        self.requests.iter().filter(move |(time, _)| *time >= from)
    }

    /// Returns the smallest number that touches at most one client in a hundred after the first day.
    fn best_fixed(&self) -> u64 {
        let mut demand = Demand::new([Measure::sliding_window(MINUTE)], usize::MAX);
        let hasher = BuildHasherDefault::<DefaultHasher>::default();
        self.evaluated().for_each(|(time, client)| demand.observe(hasher.hash_one(client), 1, *time));
        let cover = Cover::new(COVER_HUNDREDTHS as f64 / 10_000.0);
        cover.and_then(|cover| demand.needs(0).quantile(cover)).unwrap_or(1)
    }

    fn run(&self, number: Number) -> Effect {
        let mut site = Site::new(number, self.start);
        let (first_day, mut next_tick) = (self.start.saturating_add(DAY), self.start);
        let mut effect = Effect { after_a_day: 0, at_the_end: 0, touched: 0, denied: 0, peak: 0 };
        let (mut touched, mut minute) = (HashSet::new(), (0, 0));
        for (time, client) in &self.requests {
            while next_tick <= *time {
                site.clock.set(next_tick);
                effect.at_the_end = site.tick().0;
                if next_tick <= first_day {
                    effect.after_a_day = effect.at_the_end;
                }
                next_tick = next_tick.saturating_add(TICK);
            }
            site.clock.set(*time);
            let is_allowed = site.check(client, 1).is_allowed();
            if *time < first_day {
                continue;
            }
            if !is_allowed {
                effect.denied += 1;
                touched.insert(&**client);
                continue;
            }
            let this = time.as_micros() / 60_000_000;
            minute = if minute.0 == this { (this, minute.1 + 1) } else { (this, 1) };
            effect.peak = effect.peak.max(minute.1);
        }
        effect.touched = touched.len();
        effect
    }

    fn row(&self, label: &str, effect: &Effect) -> [String; 6] {
        let clients: HashSet<&str> = self.evaluated().map(|(_, client)| &**client).collect();
        let share = |part: f64, whole: usize| format!("{:.2} %", part * 100.0 / whole.max(1) as f64);
        [
            label.to_owned(),
            effect.after_a_day.to_string(),
            effect.at_the_end.to_string(),
            share(effect.touched as f64, clients.len()),
            share(effect.denied as f64, self.evaluated().count()),
            effect.peak.to_string(),
        ]
    }
}

/// Reads the time and the client of a line. The zone is ignored, because one log has one zone.
fn request(line: &str) -> Option<(Timestamp, String)> {
    let (client, rest) = line.split_once(' ')?;
    let time = rest.split_once('[')?.1.get(..20)?;
    let mut parts = time.split(['/', ':']);
    let day: u64 = parts.next()?.parse().ok()?;
    let month = parts.next()?;
    let months = "JanFebMarAprMayJunJulAugSepOctNovDec";
    let month = months.find(month).filter(|at| month.len() == 3 && at.is_multiple_of(3))? as u64 / 3 + 1;
    let [year, hour, minute, second] = [(); 4].map(|()| parts.next().and_then(|part| part.parse::<u64>().ok()));
    // Days of years that begin in March, as in the Gregorian calendar.
    let year = year?.checked_sub(u64::from(month <= 2))?;
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day.checked_sub(1)?;
    let days = (year * 365 + year / 4 - year / 100 + year / 400 + day_of_year).checked_sub(719_468)?;
    Some((Timestamp::from_secs(days * 86_400 + hour? * 3600 + minute? * 60 + second?), client.to_owned()))
}
