//! The view in a terminal: keys of the keyboard, updates, and drawing.

use std::io::{self, Write as _, stdout};
use std::time::Duration;

use crossterm::event::{Event, KeyCode, KeyEventKind, KeyModifiers, poll, read};
use crossterm::style::{Attribute, Color, Print, ResetColor, SetAttribute, SetForegroundColor};
use crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode, size,
};
use crossterm::{cursor, execute, queue};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, sleep};

use super::client::{Client, ClientError};
use super::view::{self, Line, Style};
use super::{Over, Query, Scope, Snapshot};
use crate::cli::Error;

/// How long the keyboard is waited for at once. The thread ends this long after the view at most.
const KEYBOARD_WAIT: Duration = Duration::from_millis(200);
/// How often the age of an answer is drawn again.
const REDRAW_INTERVAL: Duration = Duration::from_secs(1);
/// Updates and keys that wait to be drawn.
const WAITING: usize = 16;

const HELP: &str = "q quit  ←→ kind  m/h minute/hour  f node/fleet";

/// The terminal in its raw mode, with another screen. Dropping it restores the terminal.
struct Terminal;

impl Terminal {
    fn enter() -> io::Result<Self> {
        enable_raw_mode()?;
        let terminal = Self;
        execute!(stdout(), EnterAlternateScreen, cursor::Hide)?;
        Ok(terminal)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing.
        _ = execute!(stdout(), cursor::Show, LeaveAlternateScreen);
        _ = disable_raw_mode();
    }
}

/// What the view shows.
struct State {
    url: String,
    query: Query,
    latest: Option<Snapshot>,
    answered: Option<Instant>,
    problem: Option<ClientError>,
}

pub(super) async fn run(client: Client, query: Query, interval: Duration) -> Result<(), Error> {
    let url = client.url().to_owned();
    let (queries, wanted) = watch::channel(query.clone());
    let (answers, mut answered) = mpsc::channel(WAITING);
    let updates = tokio::spawn(update(client, wanted, interval, answers));
    let (events, mut pressed) = mpsc::channel(WAITING);
    let terminal = Terminal::enter().map_err(Error::Output)?;
    std::thread::spawn(move || read_events(&events));
    let mut state = State { url, query, latest: None, answered: None, problem: None };
    let mut redraw = tokio::time::interval(REDRAW_INTERVAL);
    redraw.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        draw(&state).map_err(Error::Output)?;
        tokio::select! {
            Some(answer) = answered.recv() => state.add(answer),
            event = pressed.recv() => match event {
                Some(event) if !quits(&event) => {
                    state.apply(&event);
                    queries.send_if_modified(|query| {
                        let is_new = *query != state.query;
                        query.clone_from(&state.query);
                        is_new
                    });
                }
                _ => break,
            },
            _ = redraw.tick() => {}
        }
    }
    updates.abort();
    drop(terminal);
    Ok(())
}

/// Reads the server at each interval, and at once when the query changes.
async fn update(
    client: Client,
    mut wanted: watch::Receiver<Query>,
    interval: Duration,
    answers: mpsc::Sender<Result<Snapshot, ClientError>>,
) {
    loop {
        let query = wanted.borrow_and_update().clone();
        if answers.send(client.snapshot(&query).await).await.is_err() {
            return;
        }
        tokio::select! {
            () = sleep(interval) => {}
            changed = wanted.changed() => if changed.is_err() { return },
        }
    }
}

/// Reads the keyboard and changes of the size, until the view ends.
fn read_events(events: &mpsc::Sender<Event>) {
    while !events.is_closed() {
        let event = match poll(KEYBOARD_WAIT) {
            Ok(false) => continue,
            Ok(true) => read(),
            Err(error) => Err(error),
        };
        // Without a keyboard, the view ends.
        let Ok(event) = event else { return };
        if events.blocking_send(event).is_err() {
            return;
        }
    }
}

fn quits(event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    let is_control_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind != KeyEventKind::Release && (is_control_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc))
}

impl State {
    fn add(&mut self, answer: Result<Snapshot, ClientError>) {
        match answer {
            Ok(snapshot) => {
                (self.latest, self.answered, self.problem) = (Some(snapshot), Some(Instant::now()), None);
            }
            Err(problem) => self.problem = Some(problem),
        }
    }

    /// Applies a key of the keyboard.
    fn apply(&mut self, event: &Event) {
        let Event::Key(key) = event else { return };
        if key.kind == KeyEventKind::Release {
            return;
        }
        let query = &mut self.query;
        match key.code {
            KeyCode::Right | KeyCode::Down | KeyCode::Tab => query.kind = query.kind.later_by(1),
            KeyCode::Left | KeyCode::Up | KeyCode::BackTab => query.kind = query.kind.later_by(2),
            KeyCode::Char('m') => query.over = Over::Minute,
            KeyCode::Char('h') => query.over = Over::Hour,
            KeyCode::Char('f') => {
                query.scope = if query.scope == Scope::Node { Scope::Fleet } else { Scope::Node };
            }
            _ => {}
        }
    }

    fn lines(&self, height: usize) -> Vec<Line> {
        let mut lines = Vec::new();
        if let Some(problem) = &self.problem {
            let since = self.answered.map(|answered| view::duration(answered.elapsed().as_secs_f64()));
            let since = since.map_or(String::new(), |since| format!("no answer since {since}: "));
            lines.push(Line::new(Style::Warning, format!("{since}{problem}")));
        }
        match &self.latest {
            Some(latest) => lines.extend(view::screen(latest, &self.url, height.saturating_sub(lines.len() + 1))),
            None if self.problem.is_none() => {
                lines.push(Line::new(Style::Plain, format!("waiting for {}", self.url)));
            }
            None => {}
        }
        lines.truncate(height.saturating_sub(1));
        lines
    }
}

fn draw(state: &State) -> io::Result<()> {
    let (width, height) = match size() {
        Ok((width @ 1.., height @ 1..)) => (usize::from(width), usize::from(height)),
        // Some terminals do not report a size.
        _ => (80, 24),
    };
    let has_colors = std::env::var_os("NO_COLOR").is_none();
    let mut out = io::BufWriter::new(stdout().lock());
    queue!(out, cursor::MoveTo(0, 0))?;
    for line in state.lines(height) {
        match line.style {
            Style::Heading => queue!(out, SetAttribute(Attribute::Bold))?,
            Style::Warning if has_colors => queue!(out, SetForegroundColor(Color::Red))?,
            Style::Warning | Style::Plain => {}
        }
        let text = view::shorten(&line.text, width);
        queue!(out, Print(text), SetAttribute(Attribute::Reset), ResetColor, Clear(ClearType::UntilNewLine))?;
        queue!(out, cursor::MoveToNextLine(1))?;
    }
    queue!(out, Clear(ClearType::FromCursorDown))?;
    if height > 1 {
        let last = u16::try_from(height - 1).unwrap_or(u16::MAX);
        queue!(out, cursor::MoveTo(0, last), SetAttribute(Attribute::Dim))?;
        queue!(out, Print(view::shorten(HELP, width)), SetAttribute(Attribute::Reset))?;
    }
    out.flush()
}
