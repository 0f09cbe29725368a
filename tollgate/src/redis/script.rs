//! The script that decides, what it is told and what it tells.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use redis::Value;
use smallvec::SmallVec;

use super::StoreError;
use crate::algorithm::portable::{Before, Shape};
use crate::algorithm::{Compiled, MAX_QUOTA};
use crate::decision::{Outcome, Verdict};
use crate::units::Timestamp;

/// Decides any batch.
const DECIDE: &str = include_str!("decide.lua");
/// Decides a batch in which every request takes from one bucket.
const BUCKETS: &str = include_str!("buckets.lua");

/// Redis keeps scripts by their hash.
static DECIDE_HASH: LazyLock<String> = LazyLock::new(|| redis::Script::new(DECIDE).get_hash().to_owned());
static BUCKETS_HASH: LazyLock<String> = LazyLock::new(|| redis::Script::new(BUCKETS).get_hash().to_owned());

/// Gives Redis the scripts.
pub(super) fn load() -> [redis::Cmd; 2] {
    [DECIDE, BUCKETS].map(|source| {
        let mut command = redis::cmd("SCRIPT");
        command.arg("LOAD").arg(source);
        command
    })
}

/// Asks whether Redis is there and can be written to: a replica refuses even to delete what is not there.
pub(super) fn probe() -> redis::Cmd {
    let mut command = redis::cmd("DEL");
    command.arg("rate_limit:{probe}");
    command
}

/// A limit as the script knows it.
#[derive(Debug)]
pub(super) struct Terms {
    pub(super) compiled: Compiled,
    parameters: SmallVec<[i64; 9]>,
    /// The signatures of the limit's variants, with spaces around each; empty if there are none of another meaning.
    variants: String,
    shape: Shape,
}

impl Terms {
    /// A limit whose keys may have spent up to `ceiling` units, under other numbers.
    pub(super) fn new(compiled: &Compiled, ceiling: u64, variants: &str) -> Self {
        let parameters = compiled.with_ceiling(ceiling).parameters(ceiling);
        // The script has cut what a clock that stepped back has left. Other nodes may have raised the quota since, so
        // that what it reports is never cut again.
        let compiled = compiled.with_ceiling(MAX_QUOTA).with_room();
        Self { parameters, variants: variants.to_owned(), shape: compiled.shape(), compiled }
    }

    pub(super) fn signature(&self) -> String {
        self.compiled.meaning().signature()
    }

    /// Whether the terms tell the script the same, for variants of these signatures.
    pub(super) fn has_variants(&self, signatures: &str) -> bool {
        self.variants == signatures
    }

    /// Whether a denial changes nothing, so that it stays true for a while.
    pub(super) fn keeps_denials(&self) -> bool {
        !self.compiled.counts_denied()
    }
}

/// One key of one limit, and a cost.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub(super) terms: Arc<Terms>,
    /// Other terms of the limit, under which what is charged now may be counted before it is given back.
    pub(super) siblings: Arc<[Arc<Terms>]>,
    pub(super) name: Arc<[u8]>,
    pub(super) cost: u64,
}

pub(super) type Asks = SmallVec<[Ask; 2]>;

/// What is asked of the store in one piece.
#[derive(Debug)]
pub(super) enum Question {
    /// Take all, or nothing.
    Take(Asks),
    /// What taking would answer.
    Look(Asks),
    /// Give back what was taken at that time.
    Refund(Asks, Timestamp),
    /// Give back what a request took at that time that is denied after all, as if it had never been taken.
    Undo(Ask, Timestamp, Before),
    /// Put the keys to rest.
    Reset(Asks),
    /// Take the first of these costs that fits.
    Slice(Ask, SmallVec<[u64; 8]>),
}

impl Question {
    pub(super) fn asks(&self) -> &[Ask] {
        match self {
            Self::Take(asks) | Self::Look(asks) | Self::Refund(asks, _) | Self::Reset(asks) => asks,
            Self::Slice(ask, _) | Self::Undo(ask, ..) => std::slice::from_ref(ask),
        }
    }
}

/// What the store saw, and what it did.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) at: Timestamp,
    /// 0: nothing was taken. Else it was; of a slice, which of the costs, from 1.
    pub(super) taken: u64,
    /// For each ask of a take or a look, in order.
    pub(super) seen: SmallVec<[Seen; 2]>,
}

/// A state as it was before the decision.
#[derive(Clone, Debug)]
pub(super) enum Seen {
    Numbers(SmallVec<[u64; 3]>),
    /// The script's own answer, as of its time.
    Verdict(Verdict),
}

impl Seen {
    pub(super) fn numbers(&self) -> &[u64] {
        match self {
            Self::Numbers(numbers) => numbers,
            Self::Verdict(_) => &[],
        }
    }

    /// What the state answers at that time.
    pub(super) fn verdict(&self, terms: &Terms, now: Timestamp, cost: u64) -> Verdict {
        match self {
            Self::Numbers(numbers) => terms.compiled.verdict(numbers, now.as_micros(), cost),
            Self::Verdict(verdict) => *verdict,
        }
    }
}

/// Questions that travel together.
#[derive(Default)]
pub(super) struct Batch {
    keys: Vec<Arc<[u8]>>,
    key_index: HashMap<Arc<[u8]>, u64, ahash::RandomState>,
    terms: Vec<Arc<Terms>>,
    /// What is asked, flat: see `decide.lua`.
    asked: Vec<u64>,
    /// How to read the answers.
    expected: Vec<Expected>,
    /// Whether there is anything but requests that take from one bucket each.
    mixed: bool,
}

struct Expected {
    shapes: SmallVec<[Shape; 2]>,
    keys: SmallVec<[u64; 2]>,
    /// Of a bucket, whether its rate needs the second number.
    parts: bool,
}

const TAKE: u64 = 0;
const LOOK: u64 = 1;
const REFUND: u64 = 2;
const RESET: u64 = 3;
const SLICE: u64 = 4;
const UNDO: u64 = 5;

impl Batch {
    pub(super) fn add(&mut self, question: &Question) {
        let asks = question.asks();
        let (op, count) = match question {
            Question::Take(_) => (TAKE, asks.len()),
            Question::Look(_) => (LOOK, asks.len()),
            Question::Refund(..) => (REFUND, asks.len()),
            Question::Undo(..) => (UNDO, asks.len()),
            Question::Reset(_) => (RESET, asks.len()),
            Question::Slice(_, costs) => (SLICE, costs.len()),
        };
        self.asked.extend([op, count as u64]);
        let mut expected = Expected { shapes: SmallVec::new(), keys: SmallVec::new(), parts: false };
        match question {
            Question::Take(asks) if asks.len() == 1 && asks[0].cost > 0 => {
                match asks[0].terms.compiled.bucket_units() {
                    Some(units) => expected.parts = units > 1,
                    None => self.mixed = true,
                }
            }
            _ => self.mixed = true,
        }
        for ask in asks {
            let (limit, key) = (self.index_of_terms(&ask.terms), self.index_of_key(&ask.name));
            expected.keys.push(key);
            self.asked.extend([limit, key]);
            let cost = |units: u64| {
                let cost = ask.terms.compiled.portable_cost(units);
                [cost.0, cost.1]
            };
            match question {
                Question::Take(_) | Question::Look(_) => {
                    expected.shapes.push(ask.terms.shape);
                    self.asked.extend(cost(ask.cost));
                }
                Question::Refund(_, at) | Question::Undo(_, at, _) => {
                    self.asked.extend([ask.cost.min(MAX_QUOTA), at.as_micros()]);
                    if let Question::Undo(_, _, Before(units, parts)) = question {
                        self.asked.extend([*units, *parts]);
                    }
                    let siblings = ask.siblings.iter().map(|terms| self.index_of_terms(terms));
                    let siblings: SmallVec<[u64; 8]> = siblings.collect();
                    self.asked.push(siblings.len() as u64);
                    self.asked.extend(siblings);
                }
                Question::Slice(_, costs) => {
                    expected.shapes.push(ask.terms.shape);
                    self.asked.extend(costs.iter().flat_map(|units| cost(*units)));
                }
                Question::Reset(_) => {}
            }
        }
        self.expected.push(expected);
    }

    fn index_of_key(&mut self, name: &Arc<[u8]>) -> u64 {
        let next = self.keys.len() as u64 + 1;
        let index = *self.key_index.entry(name.clone()).or_insert(next);
        if index == next {
            self.keys.push(name.clone());
        }
        index
    }

    fn index_of_terms(&mut self, terms: &Arc<Terms>) -> u64 {
        // There are as many limits as a person writes: looking through them is quicker than hashing.
        let known = self.terms.iter().position(|known| Arc::ptr_eq(known, terms));
        let index = known.unwrap_or_else(|| {
            self.terms.push(terms.clone());
            self.terms.len() - 1
        });
        index as u64 + 1
    }

    /// Whether the reply says that the script for buckets cannot decide this, because a state was written under other
    /// terms. From then on the command is that of the script that can.
    pub(super) fn is_for_the_other(&mut self, reply: &Value) -> bool {
        let is_for_the_other = !self.mixed && matches!(reply, Value::Int(_));
        self.mixed |= is_for_the_other;
        is_for_the_other
    }

    /// The command. `now` stands in for Redis's own time, for tests.
    pub(super) fn command(&self, now: Option<Timestamp>) -> redis::Cmd {
        self.calling("EVALSHA", if self.mixed { &DECIDE_HASH } else { &BUCKETS_HASH }, now)
    }

    /// The same for a server that does not have the script: it keeps it from then on.
    pub(super) fn command_in_full(&self, now: Option<Timestamp>) -> redis::Cmd {
        self.calling("EVAL", if self.mixed { DECIDE } else { BUCKETS }, now)
    }

    fn calling(&self, verb: &str, script: &str, now: Option<Timestamp>) -> redis::Cmd {
        let mut command = redis::cmd(verb);
        command.arg(script).arg(self.keys.len());
        for key in &self.keys {
            command.arg(&**key);
        }
        command.arg(self.encoded(now));
        command
    }

    fn encoded(&self, now: Option<Timestamp>) -> Vec<u8> {
        // Writing to a vector cannot fail.
        let mut blob = Vec::with_capacity(64 + self.asked.len() * 4);
        let array = |blob: &mut Vec<u8>, len: usize| {
            let _ = rmp::encode::write_array_len(blob, u32::try_from(len).unwrap_or(u32::MAX));
        };
        array(&mut blob, 3);
        let _ = rmp::encode::write_uint(&mut blob, now.map_or(0, |now| now.as_micros().max(1)));
        array(&mut blob, self.terms.len());
        for terms in &self.terms {
            array(&mut blob, terms.parameters.len() + usize::from(!terms.variants.is_empty()));
            for number in &terms.parameters {
                let _ = rmp::encode::write_sint(&mut blob, *number);
            }
            if !terms.variants.is_empty() {
                let _ = rmp::encode::write_str(&mut blob, &terms.variants);
            }
        }
        array(&mut blob, self.asked.len());
        for number in &self.asked {
            let _ = rmp::encode::write_uint(&mut blob, *number);
        }
        blob
    }

    /// One answer per question, in order. A key that failed fails the questions that named it, and no others.
    pub(super) fn answers(&self, reply: Value) -> Result<Vec<Result<Answer, StoreError>>, StoreError> {
        let Value::Array(items) = reply else { return Err(unreadable()) };
        let mut items = items.into_iter();
        let at = Timestamp::from_micros(number(items.next())?);
        let failures = failures(items.next())?;
        let mut answers = Vec::with_capacity(self.expected.len());
        for expected in &self.expected {
            let (taken, seen) =
                if self.mixed { told(expected, &mut items)? } else { told_of_bucket(expected, &mut items)? };
            let failure = failures.iter().find(|(key, _)| expected.keys.contains(key));
            answers.push(match failure {
                Some((_, why)) => Err(StoreError::of_key(why)),
                None => Ok(Answer { at, taken, seen }),
            });
        }
        Ok(answers)
    }
}

fn told(
    expected: &Expected,
    items: &mut impl Iterator<Item = Value>,
) -> Result<(u64, SmallVec<[Seen; 2]>), StoreError> {
    let taken = number(items.next())?;
    let mut seen = SmallVec::new();
    for shape in &expected.shapes {
        seen.push(match shape {
            Shape::Pair => Seen::Numbers(SmallVec::from_slice(&[number(items.next())?, number(items.next())?])),
            Shape::Counts => Seen::Numbers(numbers(items.next())?),
            Shape::Answer => Seen::Verdict(verdict(&numbers(items.next())?)?),
        });
    }
    Ok((taken, seen))
}

fn told_of_bucket(
    expected: &Expected,
    items: &mut impl Iterator<Item = Value>,
) -> Result<(u64, SmallVec<[Seen; 2]>), StoreError> {
    let Some(Value::Int(told)) = items.next() else { return Err(unreadable()) };
    // Less than zero if it was denied.
    let (taken, first) = if told < 0 { (0, !told) } else { (1, told) };
    let second = if expected.parts { number(items.next())? } else { 0 };
    let seen = Seen::Numbers(SmallVec::from_slice(&[first.unsigned_abs(), second]));
    Ok((taken, SmallVec::from_iter([seen])))
}

fn failures(value: Option<Value>) -> Result<Vec<(u64, String)>, StoreError> {
    let Some(Value::Array(items)) = value else { return Ok(Vec::new()) };
    let mut failures = Vec::new();
    let mut items = items.into_iter();
    while let Some(key) = items.next() {
        let why = match items.next() {
            Some(Value::BulkString(bytes)) => String::from_utf8_lossy(&bytes).into_owned(),
            _ => String::new(),
        };
        failures.push((number(Some(key))?, why));
    }
    Ok(failures)
}

fn number(value: Option<Value>) -> Result<u64, StoreError> {
    match value {
        Some(Value::Int(number)) => u64::try_from(number).map_err(|_| unreadable()),
        _ => Err(unreadable()),
    }
}

fn numbers(value: Option<Value>) -> Result<SmallVec<[u64; 3]>, StoreError> {
    let Some(Value::BulkString(bytes)) = value else { return Err(unreadable()) };
    let text = std::str::from_utf8(&bytes).map_err(|_| unreadable())?;
    text.split_ascii_whitespace().map(|word| word.parse().map_err(|_| unreadable())).collect()
}

/// The script's own words: outcome, remaining, retry_after, reset_after.
fn verdict(numbers: &[u64]) -> Result<Verdict, StoreError> {
    let [outcome, remaining, retry_after, reset_after] = *numbers else { return Err(unreadable()) };
    let outcome = match outcome {
        0 => Outcome::Denied { retry_after },
        1 => Outcome::Allowed { delay: 0 },
        _ => Outcome::NeverFits,
    };
    Ok(Verdict { outcome, remaining, reset_after })
}

fn unreadable() -> StoreError {
    StoreError::unavailable("the script's reply is not what was expected")
}
