//! Arguments and replies of the small script, `take.lua`.
//!
//! Both are a single string of big-endian numbers. Lua tables of numbers would cost Redis more than the decisions
//! themselves.

use redis::Value;
use smallvec::SmallVec;

use super::StoreError;
use super::script::{KeyState, ScriptReply, Terms, failures, read_state, unreadable};
use crate::algorithm::Compiled;
use crate::units::Timestamp;

/// Maximum number of distinct limits and costs in one call. Each has an index of one byte.
pub(super) const MAX_LIMITS: usize = 127;
pub(super) const MAX_COSTS: usize = 255;

/// The flag on the limit index of a request's last hit.
const LAST_HIT: u8 = 128;

/// Encodes the parameters of a limit, which follow its kind and signature.
pub(super) fn parameters(compiled: &Compiled, numbers: &[i64]) -> SmallVec<[u8; 48]> {
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
    pub(super) fn end_request(&mut self) {
        if let Some(at) = self.hits.len().checked_sub(4) {
            self.hits[at] |= LAST_HIT;
        }
    }

    pub(super) fn encoded<'t>(
        &self,
        now: Option<Timestamp>,
        terms: impl ExactSizeIterator<Item = &'t Terms>,
    ) -> Vec<u8> {
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
    pub(super) fn next_reply<'t>(&mut self, terms: impl Iterator<Item = &'t Terms>) -> Result<ScriptReply, StoreError> {
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
        Ok(self.take(width)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }
}
