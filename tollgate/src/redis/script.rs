//! The scripts that decide, and the encoding of their arguments and replies.
//!
//! Most requests take the small script, `take.lua`. Its arguments and replies are each a single string of big-endian
//! numbers: Lua tables of numbers would cost Redis more than the decisions themselves.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};

use redis::Value;
use smallvec::SmallVec;

use super::{StoreError, names};
use crate::algorithm::portable::{Before, Script, Shape};
use crate::algorithm::succession::Signature;
use crate::algorithm::{Charge, Compiled, MAX_COUNTED, MAX_QUOTA};
use crate::decision::{Admission, Verdict};
use crate::limiter::reservation::Settlement;
use crate::units::Timestamp;

/// A script. Redis identifies it by its hash.
struct Source {
    text: String,
    hash: String,
}

impl Source {
    fn new(text: &str) -> Self {
        // Both scripts compute when a state expires. A function would have to be created in every call.
        let text = text.replace("--@expiry\n", include_str!("expiry.lua"));
        let hash = redis::Script::new(&text).get_hash().to_owned();
        Self { text, hash }
    }
}

/// Decides any batch.
static DECIDE: LazyLock<Source> = LazyLock::new(|| Source::new(include_str!("decide.lua")));
/// Decides a batch in which every request takes from buckets, fixed windows, counters and logs that are not too long.
static TAKE_ONLY: LazyLock<Source> = LazyLock::new(|| Source::new(include_str!("take.lua")));

/// Returns the commands that load the scripts.
pub(super) fn load() -> [redis::Cmd; 2] {
    [&DECIDE, &TAKE_ONLY].map(|source| {
        let mut command = redis::cmd("SCRIPT");
        command.arg("LOAD").arg(&source.text);
        command
    })
}

/// Returns a command that succeeds only on a server that can be written to. With `#!lua`, Redis checks before the
/// script runs that it is not a replica, has the replicas that `min-replicas-to-write` requires, has memory, and can save
/// its data. On a cluster there is no key, because the key could be in a slot of another node.
pub(super) fn probe(key: Option<&str>) -> redis::Cmd {
    let mut command = redis::cmd("EVAL");
    match key {
        Some(key) => command.arg("#!lua\nredis.call('MGET', KEYS[1])\nreturn 1").arg(1).arg(key),
        None => command.arg("#!lua\nreturn 1").arg(0),
    };
    command
}

/// A hit as the scripts see it: one key of one limit, and a cost.
#[derive(Clone, Debug)]
pub(super) struct ScriptHit {
    pub(super) terms: Arc<Terms>,
    /// Other terms of the limit. Another process may convert the state to them before these units are given back.
    pub(super) siblings: Arc<[Arc<Terms>]>,
    pub(super) name: Arc<[u8]>,
    pub(super) cost: u64,
}

pub(super) type ScriptHits = SmallVec<[ScriptHit; 2]>;

/// A request to the store, which one script call executes atomically.
#[derive(Debug)]
pub(super) enum ScriptRequest {
    /// Takes all hits, or none.
    Take(ScriptHits),
    /// Returns what `Take` would, and takes nothing.
    Peek(ScriptHits),
    /// Gives back units that were taken at that time.
    Refund(ScriptHits, Timestamp),
    /// Gives back the units that a request took at that time, because it is denied after all, as if they had never been
    /// taken.
    Undo(ScriptHit, Timestamp, Before),
    /// Gives back the cost of each hit, from the newest charges of its key.
    Credit(ScriptHits),
    /// Counts units that were spent already, whatever is left.
    Owe(ScriptHit),
    /// Returns how many of these charges of the key, from the first, must be given back so that the hit is allowed. Changes
    /// nothing.
    Without(ScriptHit, SmallVec<[Charge; 8]>),
    /// Corrects a charge, unless the reservation is settled or has expired.
    Settle(Claim, Correction),
    /// Resets the keys. The time of the reset is written to the key beside each, if there is one, for reservations that were
    /// made before.
    Reset(ScriptHits, SmallVec<[Option<Arc<[u8]>>; 2]>),
    /// Takes the first of these costs that fits.
    Slice(ScriptHit, SmallVec<[u64; 16]>),
}

/// The keys that mark a reservation as settled and have the time of the last reset, in the slot of the hits, and the expiry of
/// the reservation.
#[derive(Clone, Debug)]
pub(super) struct Claim {
    pub(super) marker: Arc<[u8]>,
    pub(super) reset: Arc<[u8]>,
    pub(super) expires_at: Timestamp,
}

/// The correction of a charge to the actual cost.
#[derive(Debug)]
pub(super) enum Correction {
    /// Gives back units that were taken at that time.
    GiveBack(ScriptHit, Timestamp),
    /// Counts further units, whatever is left.
    Owe(ScriptHit),
}

impl Correction {
    fn hit(&self) -> &ScriptHit {
        match self {
            Self::GiveBack(hit, _) | Self::Owe(hit) => hit,
        }
    }
}

impl ScriptRequest {
    pub(super) fn hits(&self) -> &[ScriptHit] {
        match self {
            Self::Take(hits) | Self::Peek(hits) | Self::Refund(hits, _) | Self::Reset(hits, _) => hits,
            Self::Credit(hits) => hits,
            Self::Settle(_, correction) => std::slice::from_ref(correction.hit()),
            Self::Slice(hit, _) | Self::Undo(hit, ..) | Self::Owe(hit) | Self::Without(hit, _) => {
                std::slice::from_ref(hit)
            }
        }
    }

    /// Returns an estimate of the script's work. The unit is the work of a request with one token bucket.
    pub(super) fn work(&self) -> usize {
        let work = |hit: &ScriptHit| {
            let compiled = &hit.terms.compiled;
            match self {
                Self::Take(_) if compiled.is_taken_lean() => compiled.script_work(Script::Lean),
                Self::Slice(_, costs) => compiled.script_work(Script::Full) * costs.len(),
                Self::Without(_, charges) => compiled.script_work(Script::Full) * 2 * charges.len(),
                Self::Refund(..) | Self::Undo(..) => compiled.script_work(Script::Full) + hit.siblings.len(),
                _ => compiled.script_work(Script::Full),
            }
        };
        self.hits().iter().map(work).sum()
    }
}

/// The store's reply to a request.
#[derive(Clone, Debug, Default)]
pub(super) struct ScriptReply {
    pub(super) at: Timestamp,
    /// 0 if nothing was taken. For a slice, the number of the cost that was taken, from 1. For a reservation, 1 if it
    /// is settled now, 0 if it was settled before, and 2 if it has expired. For `Without`, the number of charges, or 0 if all
    /// of them are too few.
    pub(super) taken: u64,
    /// The states of the hits of a `Take`, `Peek`, `Slice` or `Owe`, in order.
    pub(super) states: SmallVec<[KeyState; 2]>,
    /// The units of an `Owe` that are counted now.
    pub(super) counted: u64,
}

impl ScriptReply {
    pub(super) fn new(at: Timestamp, taken: u64, states: SmallVec<[KeyState; 2]>) -> Self {
        Self { at, taken, states, counted: 0 }
    }

    /// Returns the result of charging this hit with units that were spent already.
    pub(super) fn settlement(&self, hit: &ScriptHit) -> Settlement {
        let remaining = self.states.first().map_or(0, |state| state.verdict(&hit.terms, self.at, 0).remaining);
        let (missing, owed) = (hit.cost.saturating_sub(self.counted), hit.cost.saturating_sub(remaining));
        match (missing, owed) {
            (1.., _) => Settlement::Short { missing },
            (0, 1..) => Settlement::Owed { units: owed },
            (0, 0) => Settlement::Settled,
        }
    }
}

/// The state of a key before the decision.
#[derive(Clone, Debug)]
pub(super) enum KeyState {
    Numbers(SmallVec<[u64; 3]>),
    /// The verdict as the script computed it at that time.
    Verdict(Verdict),
}

impl KeyState {
    pub(super) fn numbers(&self) -> &[u64] {
        match self {
            Self::Numbers(numbers) => numbers,
            Self::Verdict(_) => &[],
        }
    }

    /// Returns the verdict of the state at that time.
    pub(super) fn verdict(&self, terms: &Terms, now: Timestamp, cost: u64) -> Verdict {
        match self {
            Self::Numbers(numbers) => terms.compiled.verdict(numbers, now.as_micros(), cost),
            Self::Verdict(verdict) => *verdict,
        }
    }
}

/// Requests that are sent in one script call.
#[derive(Default)]
pub(super) struct Batch {
    keys: Vec<Arc<[u8]>>,
    /// Whether each key is a field of a hash, if any is.
    compact: Vec<bool>,
    key_index: HashMap<Arc<[u8]>, u64, ahash::RandomState>,
    terms: Vec<Arc<Terms>>,
    /// The requests as a flat list of numbers: see `decide.lua`.
    requests: Vec<u64>,
    /// How to read the reply to each request.
    expected: Vec<Expected>,
    /// The same requests for the small script, while it can decide all of them.
    lean: Lean,
    /// Whether any request needs the full script.
    mixed: bool,
}

struct Expected {
    /// The terms of each state that the script reports, from 1.
    terms: SmallVec<[u64; 2]>,
    keys: SmallVec<[u64; 2]>,
    /// Whether the number of counted units follows the states.
    has_counted: bool,
}

const TAKE: u64 = 0;
const PEEK: u64 = 1;
const REFUND: u64 = 2;
const RESET: u64 = 3;
const SLICE: u64 = 4;
const UNDO: u64 = 5;
const CREDIT: u64 = 6;
const SETTLE: u64 = 7;
const OWE: u64 = 8;
const WITHOUT: u64 = 9;

impl Batch {
    pub(super) fn add(&mut self, request: &ScriptRequest) {
        let hits = request.hits();
        let (op, count) = match request {
            ScriptRequest::Take(_) => (TAKE, hits.len()),
            ScriptRequest::Peek(_) => (PEEK, hits.len()),
            ScriptRequest::Refund(..) => (REFUND, hits.len()),
            ScriptRequest::Undo(..) => (UNDO, hits.len()),
            ScriptRequest::Credit(_) => (CREDIT, hits.len()),
            ScriptRequest::Owe(_) => (OWE, hits.len()),
            ScriptRequest::Settle(..) => (SETTLE, hits.len()),
            ScriptRequest::Reset(..) => (RESET, hits.len()),
            ScriptRequest::Without(_, charges) => (WITHOUT, charges.len()),
            ScriptRequest::Slice(_, costs) => (SLICE, costs.len()),
        };
        self.requests.extend([op, count as u64]);
        let mut expected = Expected { terms: SmallVec::new(), keys: SmallVec::new(), has_counted: false };
        if let ScriptRequest::Settle(Claim { marker, reset, expires_at }, correction) = request {
            let [marker, reset] = [marker, reset].map(|name| self.index_of_key(name, false));
            expected.keys.extend([marker, reset]);
            let op = if matches!(correction, Correction::Owe(_)) { OWE } else { REFUND };
            self.requests.extend([marker, expires_at.as_micros(), reset, op]);
        }
        let takes = matches!(request, ScriptRequest::Take(_));
        self.mixed |= !takes || hits.is_empty() || hits.iter().any(|hit| hit.cost == 0 || !hit.terms.is_taken_lean());
        for (position, hit) in hits.iter().enumerate() {
            let (limit, key) = (self.index_of_terms(&hit.terms), self.index_of_key(&hit.name, hit.terms.is_compact));
            expected.keys.push(key);
            self.requests.extend([limit, key]);
            let cost = |units: u64| {
                let cost = hit.terms.compiled.portable_cost(units);
                [cost.0, cost.1]
            };
            match request {
                ScriptRequest::Take(_) | ScriptRequest::Peek(_) => {
                    expected.terms.push(limit);
                    let cost = cost(hit.cost);
                    self.requests.extend(cost);
                    self.mixed = self.mixed || !self.lean.add(limit, key, (cost[0], cost[1]));
                }
                ScriptRequest::Refund(_, at) => self.add_refund(hit, *at, None),
                ScriptRequest::Undo(_, at, before) => self.add_refund(hit, *at, Some(before)),
                ScriptRequest::Owe(_) => self.add_owed(hit, limit, &mut expected),
                ScriptRequest::Settle(_, Correction::GiveBack(_, at)) => self.add_refund(hit, *at, None),
                ScriptRequest::Settle(_, Correction::Owe(_)) => self.add_owed(hit, limit, &mut expected),
                ScriptRequest::Credit(_) => self.requests.push(hit.cost.min(MAX_QUOTA)),
                ScriptRequest::Slice(_, costs) => {
                    expected.terms.push(limit);
                    self.requests.extend(costs.iter().flat_map(|units| cost(*units)));
                }
                ScriptRequest::Reset(_, beside) => {
                    let marker = beside.get(position).and_then(Option::as_ref);
                    let marker = marker.map_or(0, |name| self.index_of_key(name, false));
                    self.requests.push(marker);
                }
                ScriptRequest::Without(_, charges) => {
                    self.requests.extend(cost(hit.cost));
                    let charges = charges.iter().flat_map(|charge| [charge.cost.min(MAX_QUOTA), charge.at]);
                    self.requests.extend(charges);
                    self.add_siblings(hit);
                }
            }
        }
        self.lean.end_request();
        self.expected.push(expected);
    }

    fn add_refund(&mut self, hit: &ScriptHit, at: Timestamp, before: Option<&Before>) {
        self.requests.extend([hit.cost.min(MAX_QUOTA), at.as_micros()]);
        if let Some(Before(units, parts)) = before {
            self.requests.extend([*units, *parts]);
        }
        self.add_siblings(hit);
    }

    fn add_siblings(&mut self, hit: &ScriptHit) {
        let siblings: SmallVec<[u64; 8]> = hit.siblings.iter().map(|terms| self.index_of_terms(terms)).collect();
        self.requests.push(siblings.len() as u64);
        self.requests.extend(siblings);
    }

    fn add_owed(&mut self, hit: &ScriptHit, limit: u64, expected: &mut Expected) {
        expected.terms.push(limit);
        expected.has_counted = true;
        self.requests.push(hit.cost.min(MAX_COUNTED));
    }

    fn index_of_key(&mut self, name: &Arc<[u8]>, is_compact: bool) -> u64 {
        let next = self.keys.len() as u64 + 1;
        let index = *self.key_index.entry(name.clone()).or_insert(next);
        if index == next {
            self.keys.push(name.clone());
            if is_compact {
                self.compact.resize(self.keys.len(), false);
                self.compact[self.keys.len() - 1] = true;
            }
        }
        index
    }

    fn index_of_terms(&mut self, terms: &Arc<Terms>) -> u64 {
        // There are few limits: a linear search is faster than hashing.
        let known = self.terms.iter().position(|known| Arc::ptr_eq(known, terms));
        let index = known.unwrap_or_else(|| {
            self.terms.push(terms.clone());
            self.terms.len() - 1
        });
        index as u64 + 1
    }

    /// Returns whether the reply means that the small script cannot decide this batch, for example because a state was
    /// written under other terms. From then on, the command is that of the full script.
    pub(super) fn needs_full_script(&mut self, reply: &Value) -> bool {
        let needs_full_script = !self.mixed && matches!(reply, Value::Int(_));
        self.mixed |= needs_full_script;
        if needs_full_script {
            self.terms.iter().for_each(|terms| terms.expect_long_log());
        }
        needs_full_script
    }

    /// Returns the command. `now` replaces Redis's clock in tests.
    pub(super) fn command(&self, now: Option<Timestamp>) -> redis::Cmd {
        self.calling("EVALSHA", if self.mixed { &DECIDE.hash } else { &TAKE_ONLY.hash }, now)
    }

    /// Returns the command for a server without the script. The server caches the script.
    pub(super) fn command_in_full(&self, now: Option<Timestamp>) -> redis::Cmd {
        self.calling("EVAL", if self.mixed { &DECIDE.text } else { &TAKE_ONLY.text }, now)
    }

    fn calling(&self, verb: &str, script: &str, now: Option<Timestamp>) -> redis::Cmd {
        let mut command = redis::cmd(verb);
        command.arg(script).arg(self.keys.len());
        let is_compact = |index: usize| self.compact.get(index).copied().unwrap_or(false);
        for (index, key) in self.keys.iter().enumerate() {
            command.arg(if is_compact(index) { names::split(key).0 } else { key });
        }
        command.arg(if self.mixed {
            self.encoded(now)
        } else {
            self.lean.encoded(now, self.terms.iter().map(|terms| &**terms))
        });
        if !self.compact.is_empty() {
            for (index, key) in self.keys.iter().enumerate() {
                command.arg(if is_compact(index) { names::split(key).1 } else { &[] });
            }
        }
        command
    }

    fn encoded(&self, now: Option<Timestamp>) -> Vec<u8> {
        // Writing to a vector cannot fail.
        let mut blob = Vec::with_capacity(64 + self.requests.len() * 4);
        let array = |blob: &mut Vec<u8>, len: usize| {
            let _ = rmp::encode::write_array_len(blob, u32::try_from(len).unwrap_or(u32::MAX));
        };
        // Redis's decoder reads text as bytes, and has no other type for them.
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
        array(&mut blob, self.requests.len());
        for number in &self.requests {
            let _ = rmp::encode::write_uint(&mut blob, *number);
        }
        blob
    }

    /// Returns the reply to each request, in order. An error of a key fails only the requests on that key.
    pub(super) fn replies(&self, reply: Value) -> Result<Vec<Result<ScriptReply, StoreError>>, StoreError> {
        if !self.mixed {
            return self.lean_replies(reply);
        }
        let Value::Array(items) = reply else { return Err(unreadable()) };
        let mut items = items.into_iter();
        let at = Timestamp::from_micros(number(items.next())?);
        let failures = failures(items.next())?;
        let mut replies = Vec::with_capacity(self.expected.len());
        for expected in &self.expected {
            let taken = number(items.next())?;
            let mut states = SmallVec::new();
            for terms in self.terms_of(expected) {
                let Some(Value::BulkString(bytes)) = items.next() else { return Err(unreadable()) };
                states.push(read_state(terms, &bytes)?);
            }
            let counted = if expected.has_counted { number(items.next())? } else { 0 };
            let reply = ScriptReply { counted, ..ScriptReply::new(at, taken, states) };
            replies.push(self.unless_failed(expected, &failures, reply));
        }
        Ok(replies)
    }

    fn lean_replies(&self, reply: Value) -> Result<Vec<Result<ScriptReply, StoreError>>, StoreError> {
        let mut batch = BatchReply::new(reply)?;
        let mut replies = Vec::with_capacity(self.expected.len());
        for expected in &self.expected {
            let reply = batch.next_reply(self.terms_of(expected))?;
            replies.push(self.unless_failed(expected, &batch.failures, reply));
        }
        Ok(replies)
    }

    /// Returns the reply, or the error of one of its keys.
    fn unless_failed(
        &self,
        expected: &Expected,
        failures: &[(u64, String)],
        reply: ScriptReply,
    ) -> Result<ScriptReply, StoreError> {
        match failures.iter().find(|(key, _)| expected.keys.contains(key)) {
            Some((key, why)) => {
                let index = key.checked_sub(1).and_then(|index| usize::try_from(index).ok());
                let name = index.and_then(|index| self.keys.get(index));
                Err(StoreError::of_key(why, name.and_then(|name| names::limit_in(name))))
            }
            None => Ok(reply),
        }
    }

    fn terms_of<'a>(&'a self, expected: &'a Expected) -> impl Iterator<Item = &'a Terms> {
        expected.terms.iter().map(|index| &*self.terms[*index as usize - 1])
    }
}

/// Reads a state from the reply of a script.
fn read_state(terms: &Terms, bytes: &[u8]) -> Result<KeyState, StoreError> {
    if terms.shape == Shape::Verdict {
        return Ok(KeyState::Verdict(verdict(bytes)?));
    }
    if bytes.is_empty() {
        return Ok(KeyState::Numbers(SmallVec::new()));
    }
    let state = bytes.strip_prefix(&*terms.signature).and_then(|state| terms.compiled.read(state));
    state.map(KeyState::Numbers).ok_or_else(unreadable)
}

pub(super) fn failures(value: Option<Value>) -> Result<Vec<(u64, String)>, StoreError> {
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

fn big_endian(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Reads a verdict that the script computed: admission (1 byte), remaining (5), retry_after (7), reset_after (7).
fn verdict(bytes: &[u8]) -> Result<Verdict, StoreError> {
    let (Some((admission, rest)), 20) = (bytes.split_first(), bytes.len()) else { return Err(unreadable()) };
    let (remaining, times) = rest.split_at(5);
    let (retry_after, reset_after) = times.split_at(7);
    let [remaining, retry_after, reset_after] = [remaining, retry_after, reset_after].map(big_endian);
    let admission = match admission {
        0 => Admission::Denied { retry_after },
        1 => Admission::Allowed { delay: 0 },
        _ => Admission::NeverFits,
    };
    Ok(Verdict { admission, remaining, reset_after })
}

pub(super) fn unreadable() -> StoreError {
    StoreError::unavailable("the reply of the script is not in the expected format")
}

/// A limit in the form that the scripts take.
#[derive(Debug)]
pub(super) struct Terms {
    /// The store that has the keys.
    pub(super) store: StoreIndex,
    /// Whether the keys are fields of hashes.
    pub(super) is_compact: bool,
    pub(super) compiled: Compiled,
    pub(super) parameters: SmallVec<[i64; 9]>,
    /// The parameters in the form of the small script.
    lean: SmallVec<[u8; 48]>,
    /// The prefix of every state written under these terms.
    pub(super) signature: Signature,
    /// The signatures of the limit's variants; empty if all have the same. The terms of all variants share the list.
    pub(super) variants: Arc<[Signature]>,
    shape: Shape,
    /// The number of further requests that go directly to the full script, because a log was too long for the small
    /// one.
    long: AtomicU32,
    with_one_more: OnceLock<Arc<Self>>,
}

/// Requests after which the small script is tried again on a limit whose log was too long for it.
const LONG_FOR: u32 = 4096;

impl Terms {
    /// Creates the terms of a limit whose keys may have spent up to `ceiling` units, under other configurations.
    pub(super) fn new(compiled: &Compiled, ceiling: u64, variants: impl Into<Arc<[Signature]>>) -> Self {
        let parameters = compiled.with_ceiling(ceiling).parameters(ceiling);
        let signature = compiled.meaning().signature();
        // The script has already reduced debts that a clock stepping back has left. Other nodes may have raised the
        // quota since, so the reported state must not be reduced again.
        let compiled = compiled.with_ceiling(MAX_QUOTA).with_room();
        let lean = lean_parameters(&compiled, &parameters);
        let (store, shape, long) = (StoreIndex::default(), compiled.shape(), AtomicU32::new(0));
        let variants = variants.into();
        Self {
            store,
            is_compact: false,
            parameters,
            lean,
            signature,
            variants,
            shape,
            compiled,
            long,
            with_one_more: OnceLock::new(),
        }
    }

    /// Sets the store that has the keys, and whether they are fields of hashes there.
    pub(super) fn on(self, store: StoreIndex, is_compact: bool) -> Self {
        Self { store, is_compact, ..self }
    }

    pub(super) fn signature(&self) -> &Signature {
        &self.signature
    }

    /// Returns whether the limit's variants have these signatures.
    pub(super) fn has_variants(&self, signatures: &Arc<[Signature]>) -> bool {
        Arc::ptr_eq(&self.variants, signatures) || self.variants == *signatures
    }

    /// Encodes the limit for the small script.
    fn encode_lean(&self, bytes: &mut Vec<u8>) {
        let kind = self.parameters.first().copied().unwrap_or(0);
        bytes.extend([kind as u8, self.signature.len() as u8]);
        bytes.extend_from_slice(&self.signature);
        bytes.extend_from_slice(&self.lean);
    }

    /// Returns whether the small script is likely to decide a request under these terms.
    fn is_taken_lean(&self) -> bool {
        let long = self.long.load(Ordering::Relaxed);
        if long > 0 {
            // A race between two requests counts one of them only: harmless.
            self.long.store(long - 1, Ordering::Relaxed);
        }
        long == 0 && self.compiled.is_taken_lean()
    }

    /// Records that the small script could not decide a request, perhaps because a log is too long for it.
    fn expect_long_log(&self) {
        if self.compiled.may_be_long_log() {
            self.long.store(LONG_FOR, Ordering::Relaxed);
        }
    }

    /// Returns terms under which one unit is denied exactly while a key counts more than the quota.
    pub(super) fn with_one_more(&self) -> &Arc<Self> {
        self.with_one_more.get_or_init(|| {
            let ceiling = self.parameters.last().map_or(0, |ceiling| *ceiling as u64);
            Arc::new(Self::new(&self.compiled.with_one_more(), ceiling, Vec::new()).on(self.store, self.is_compact))
        })
    }

    /// Returns whether this is a ban, which counts strikes instead of units.
    pub(super) fn counts_strikes(&self) -> bool {
        matches!(self.compiled, Compiled::Strikes(_))
    }

    /// Returns whether a denial leaves the state unchanged, so that it can be cached.
    pub(super) fn keeps_denials(&self) -> bool {
        !self.compiled.counts_denied()
    }
}

/// Maximum number of distinct limits and costs in one call. Each has an index of one byte.
const MAX_LIMITS: usize = 127;
pub(super) const MAX_COSTS: usize = 255;

/// The flag on the limit index of a request's last hit.
const LAST_HIT: u8 = 128;

/// Encodes the parameters of a limit, which follow its kind and signature.
fn lean_parameters(compiled: &Compiled, numbers: &[i64]) -> SmallVec<[u8; 48]> {
    let mut bytes = SmallVec::new();
    let mut push = |number: i64, width: usize| bytes.extend_from_slice(&number.to_be_bytes()[8 - width..]);
    match (compiled, numbers) {
        (
            Compiled::Meter(_) | Compiled::WideMeter(_),
            [_, units, full, full_parts, wait, _, most, most_parts, ceiling],
        ) => {
            // The longest wait of a queue plus one; 0 for a bucket without a queue.
            let widths = [5, 7, 5, 7, 7, 5, 5];
            let numbers = [*units, *full, *full_parts, *wait + 1, *most, *most_parts, *ceiling];
            numbers.into_iter().zip(widths).for_each(|(number, width)| push(number, width));
        }
        (Compiled::Counter(_), [_, limit, window, segments, ..]) => {
            push(*limit, 5);
            push(*window, 7);
            push(*segments, 2);
        }
        (_, [_, limit, window, ..]) => {
            push(*limit, 5);
            push(*window, 7);
        }
        _ => {}
    }
    bytes
}

/// A batch in which every request is a `Take`.
#[derive(Default)]
pub(super) struct Lean {
    /// Distinct costs.
    costs: Vec<(u64, u64)>,
    hits: Vec<u8>,
}

impl Lean {
    /// Adds a hit. Returns false if there is no room for it. Limits and keys count from 1.
    pub(super) fn add(&mut self, limit: u64, key: u64, cost: (u64, u64)) -> bool {
        let known = self.costs.iter().position(|known| *known == cost);
        let index = known.unwrap_or_else(|| {
            self.costs.push(cost);
            self.costs.len() - 1
        });
        if limit > MAX_LIMITS as u64 || index >= MAX_COSTS {
            return false;
        }
        let [high, low] = (key as u16).to_be_bytes();
        self.hits.extend([limit as u8, (index + 1) as u8, high, low]);
        key <= u64::from(u16::MAX)
    }

    /// Ends a request.
    fn end_request(&mut self) {
        if let Some(at) = self.hits.len().checked_sub(4) {
            self.hits[at] |= LAST_HIT;
        }
    }

    fn encoded<'t>(&self, now: Option<Timestamp>, terms: impl ExactSizeIterator<Item = &'t Terms>) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(64 + 64 * terms.len() + 12 * self.costs.len() + self.hits.len());
        push(&mut bytes, now.map_or(0, |now| now.as_micros().max(1)), 7);
        bytes.extend([terms.len() as u8, self.costs.len() as u8]);
        for (cost, parts) in &self.costs {
            push(&mut bytes, *cost, 7);
            push(&mut bytes, *parts, 5);
        }
        terms.for_each(|terms| terms.encode_lean(&mut bytes));
        bytes.extend_from_slice(&self.hits);
        bytes
    }
}

fn push(bytes: &mut Vec<u8>, number: u64, width: usize) {
    bytes.extend_from_slice(&number.to_be_bytes()[8 - width..]);
}

/// The reply of the small script to a batch: the states, and the errors of keys.
pub(super) struct BatchReply {
    bytes: Vec<u8>,
    read: usize,
    pub(super) at: Timestamp,
    pub(super) failures: Vec<(u64, String)>,
}

impl BatchReply {
    pub(super) fn new(reply: Value) -> Result<Self, StoreError> {
        let (bytes, failures) = match reply {
            Value::BulkString(bytes) => (bytes, Vec::new()),
            Value::Array(items) => {
                let mut items = items.into_iter();
                let Some(Value::BulkString(bytes)) = items.next() else { return Err(unreadable()) };
                (bytes, failures(items.next())?)
            }
            _ => return Err(unreadable()),
        };
        let mut reply = Self { bytes, read: 0, at: Timestamp::from_micros(0), failures };
        reply.at = Timestamp::from_micros(reply.number(7)?);
        Ok(reply)
    }

    /// Reads the reply to the next request, whose hits have these terms.
    fn next_reply<'t>(&mut self, terms: impl Iterator<Item = &'t Terms>) -> Result<ScriptReply, StoreError> {
        let taken = self.number(1)?;
        let mut states = SmallVec::<[KeyState; 2]>::new();
        for terms in terms {
            let length = self.number(3)? as usize;
            states.push(read_state(terms, self.take(length)?)?);
        }
        Ok(ScriptReply::new(self.at, taken, states))
    }

    fn take(&mut self, length: usize) -> Result<&[u8], StoreError> {
        let bytes = self.bytes.get(self.read..self.read + length).ok_or_else(unreadable)?;
        self.read += length;
        Ok(bytes)
    }

    fn number(&mut self, width: usize) -> Result<u64, StoreError> {
        Ok(big_endian(self.take(width)?))
    }
}

/// The position of a store in its limiter. The default store is the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StoreIndex(pub(super) u8);

impl StoreIndex {
    pub(super) fn position(self) -> usize {
        usize::from(self.0)
    }
}
