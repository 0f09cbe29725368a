//! The script that decides, what it is told and what it tells.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};

use redis::Value;
use smallvec::SmallVec;

use super::StoreError;
use crate::algorithm::portable::{Before, Shape};
use crate::algorithm::succession::Signature;
use crate::algorithm::{Compiled, MAX_QUOTA};
use crate::decision::{Outcome, Verdict};
use crate::units::Timestamp;

/// Decides any batch.
const DECIDE: &str = include_str!("decide.lua");
/// Decides a batch in which every request takes from buckets, fixed windows, counters and short logs.
const TAKE_ONLY: &str = include_str!("take.lua");

/// Redis keeps scripts by their hash.
static DECIDE_HASH: LazyLock<String> = LazyLock::new(|| redis::Script::new(DECIDE).get_hash().to_owned());
static TAKE_ONLY_HASH: LazyLock<String> = LazyLock::new(|| redis::Script::new(TAKE_ONLY).get_hash().to_owned());

/// Gives Redis the scripts.
pub(super) fn load() -> [redis::Cmd; 2] {
    [DECIDE, TAKE_ONLY].map(|source| {
        let mut command = redis::cmd("SCRIPT");
        command.arg("LOAD").arg(source);
        command
    })
}

/// Returns a command that succeeds only on a server that can be written to. With `#!lua`, Redis checks before the script
/// runs that it is no replica, has memory, and can save its data. On a cluster there is no key: it might be in a slot of
/// another node.
pub(super) fn probe(key: Option<&str>) -> redis::Cmd {
    let mut command = redis::cmd("EVAL");
    match key {
        Some(key) => command.arg("#!lua\nreturn redis.call('MGET', KEYS[1])").arg(1).arg(key),
        None => command.arg("#!lua\nreturn 1").arg(0),
    };
    command
}

/// A limit as the script knows it.
#[derive(Debug)]
pub(super) struct Terms {
    pub(super) compiled: Compiled,
    parameters: SmallVec<[i64; 9]>,
    /// The beginning of every state that these terms write.
    signature: Signature,
    /// The signatures of the limit's variants; empty if there are none of another meaning.
    variants: Vec<Signature>,
    shape: Shape,
    /// How many more requests go to the larger script at once, because a log was longer than the smaller one decides.
    long: AtomicU32,
}

/// Requests after which the smaller script is tried again on a limit whose log was too long for it.
const LONG_FOR: u32 = 4096;

impl Terms {
    /// A limit whose keys may have spent up to `ceiling` units, under other numbers.
    pub(super) fn new(compiled: &Compiled, ceiling: u64, variants: Vec<Signature>) -> Self {
        let parameters = compiled.with_ceiling(ceiling).parameters(ceiling);
        let signature = compiled.meaning().signature();
        // The script has cut what a clock that stepped back has left. Other nodes may have raised the quota since, so
        // that what it reports is never cut again.
        let compiled = compiled.with_ceiling(MAX_QUOTA).with_room();
        Self { parameters, signature, variants, shape: compiled.shape(), compiled, long: AtomicU32::new(0) }
    }

    pub(super) fn signature(&self) -> &Signature {
        &self.signature
    }

    /// Whether the limit's variants have these signatures.
    pub(super) fn has_variants(&self, signatures: &[Signature]) -> bool {
        self.variants == signatures
    }

    /// Whether the smaller script is likely to decide a request under these terms.
    fn is_taken_lean(&self) -> bool {
        let long = self.long.load(Ordering::Relaxed);
        if long > 0 {
            // Requests that are lost in a race make it a little longer.
            self.long.store(long - 1, Ordering::Relaxed);
        }
        long == 0 && self.compiled.is_taken_lean()
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
    Slice(Ask, SmallVec<[u64; 16]>),
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
    /// The time of each ask's slot, if they are in several: the slots' clocks differ.
    pub(super) by_slot: SmallVec<[Timestamp; 2]>,
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
    /// Whether there is anything that only the larger script decides.
    mixed: bool,
}

struct Expected {
    /// The terms of each state that the script reports, from 1.
    terms: SmallVec<[u64; 2]>,
    keys: SmallVec<[u64; 2]>,
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
        let mut expected = Expected { terms: SmallVec::new(), keys: SmallVec::new() };
        let takes = matches!(question, Question::Take(_));
        self.mixed |= !takes || asks.iter().any(|ask| ask.cost == 0 || !ask.terms.is_taken_lean());
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
                    expected.terms.push(limit);
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
                    expected.terms.push(limit);
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

    /// Whether the reply says that the smaller script cannot decide this, for example because a state was written under
    /// other terms. From then on the command is that of the script that can.
    pub(super) fn is_for_the_other(&mut self, reply: &Value) -> bool {
        let is_for_the_other = !self.mixed && matches!(reply, Value::Int(_));
        self.mixed |= is_for_the_other;
        if is_for_the_other {
            let long = self.terms.iter().filter(|terms| terms.compiled.may_be_long_log());
            long.for_each(|terms| terms.long.store(LONG_FOR, Ordering::Relaxed));
        }
        is_for_the_other
    }

    /// The command. `now` stands in for Redis's own time, for tests.
    pub(super) fn command(&self, now: Option<Timestamp>) -> redis::Cmd {
        self.calling("EVALSHA", if self.mixed { &DECIDE_HASH } else { &TAKE_ONLY_HASH }, now)
    }

    /// The same for a server that does not have the script: it keeps it from then on.
    pub(super) fn command_in_full(&self, now: Option<Timestamp>) -> redis::Cmd {
        self.calling("EVAL", if self.mixed { DECIDE } else { TAKE_ONLY }, now)
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
        // Redis reads text as bytes, and knows no other type for them.
        let text = |blob: &mut Vec<u8>, bytes: &[u8]| {
            let _ = rmp::encode::write_str_len(blob, bytes.len() as u32);
            blob.extend_from_slice(bytes);
        };
        array(&mut blob, 3);
        let _ = rmp::encode::write_uint(&mut blob, now.map_or(0, |now| now.as_micros().max(1)));
        array(&mut blob, self.terms.len());
        for terms in &self.terms {
            array(&mut blob, terms.parameters.len() + usize::from(!terms.variants.is_empty()) + 1);
            for number in &terms.parameters {
                let _ = rmp::encode::write_sint(&mut blob, *number);
            }
            if !terms.variants.is_empty() {
                array(&mut blob, terms.variants.len());
                terms.variants.iter().for_each(|signature| text(&mut blob, signature));
            }
            text(&mut blob, &terms.signature);
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
            let taken = number(items.next())?;
            let terms = expected.terms.iter().map(|index| &self.terms[*index as usize - 1]);
            let seen = terms.map(|terms| seen(terms, items.next())).collect::<Result<_, StoreError>>()?;
            let failure = failures.iter().find(|(key, _)| expected.keys.contains(key));
            answers.push(match failure {
                Some((_, why)) => Err(StoreError::of_key(why)),
                None => Ok(Answer { at, by_slot: SmallVec::new(), taken, seen }),
            });
        }
        Ok(answers)
    }
}

/// What the script reports of a state.
fn seen(terms: &Terms, reported: Option<Value>) -> Result<Seen, StoreError> {
    let Some(Value::BulkString(bytes)) = reported else { return Err(unreadable()) };
    if terms.shape == Shape::Answer {
        return Ok(Seen::Verdict(verdict(&numbers(&bytes)?)?));
    }
    if bytes.is_empty() {
        return Ok(Seen::Numbers(SmallVec::new()));
    }
    let state = bytes.strip_prefix(&*terms.signature).and_then(|state| terms.compiled.read(state));
    state.map(Seen::Numbers).ok_or_else(unreadable)
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

fn numbers(bytes: &[u8]) -> Result<SmallVec<[u64; 4]>, StoreError> {
    let text = std::str::from_utf8(bytes).map_err(|_| unreadable())?;
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
