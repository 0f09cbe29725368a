//! Snapshots: saving the state of all keys, and restoring it in another process.
//!
//! A snapshot contains the limits with their numbers, the secret that keys were hashed with, and for each key that does
//! not have its whole quota the spent units and their times, by the wall clock. It contains no keys. Restoring first
//! builds a limiter with the limits of the snapshot, and then changes it to the current limits as
//! [`Limiter::with_limits`] does.
//!
//! The encoding: variable-length integers in groups of seven bits, and a checksum at the end.

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::sync::Arc;
use std::{error, fmt};

use super::{Inner, Limiter, LimiterBuilder};
use crate::algorithm::record::{Numbers, Record, RecordedAt};
use crate::clock::TimeSource;
use crate::decision::LimitId;
use crate::error::InvalidLimit;
use crate::limit::Limit;
use crate::limit_set::Checked;
use crate::store::memory::{MemoryStore, SectionHead};
use crate::units::Timestamp;

const MAGIC: [u8; 8] = *b"tollgate";
/// Format version. Raise it with every change of the format.
const VERSION: u8 = 2;
/// The oldest format that is read. It has no attachment.
const OLDEST_VERSION: u8 = 1;
/// Tags: the end of the snapshot, the keys of another limit, a key, or the attachment.
const END: u64 = 0;
const SECTION: u64 = 1;
const KEY: u64 = 2;
const ATTACHMENT: u64 = 3;
/// Bounds on what a file may claim: limits with their variants, the length of a name, and the entries of a key.
const MAX_SECTIONS: u64 = 1 << 20;
const MAX_NAME: usize = 1 << 16;
const MAX_ENTRIES: u64 = 1 << 24;
/// The longest attachment: as many open reservations as there may be, of limits with the longest names.
const MAX_ATTACHMENT: usize = 1 << 29;

/// The result of restoring a snapshot: see [`LimiterBuilder::restore`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Restored {
    /// Keys that were restored.
    pub keys: u64,
    /// Keys that found no memory. They start with their full quota.
    pub left_out: u64,
    /// Time at which the snapshot was written, by the wall clock of that machine. If it is in the future, the clock was
    /// set back since, and keys are restored as if no time had passed.
    pub written_at: Timestamp,
}

/// The reason why a snapshot cannot be restored.
#[derive(Debug)]
#[non_exhaustive]
pub enum RestoreError {
    /// Reading the snapshot failed.
    Read(io::Error),
    /// The input is not a snapshot, was written by another version, is damaged, or needs more memory than allowed.
    Unusable(String),
    /// The limiter cannot be built, with or without the snapshot.
    Limits(InvalidLimit),
}

impl RestoreError {
    fn of_read(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                Self::Unusable("the snapshot is truncated: restore a copy, or start without it".into())
            }
            _ => Self::Read(error),
        }
    }

    #[doc(hidden)]
    pub fn corrupt() -> Self {
        Self::Unusable("the snapshot is damaged: restore a copy, or start without it".into())
    }
}

impl fmt::Display for RestoreError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read(error) => error.fmt(out),
            Self::Unusable(problem) => out.write_str(problem),
            Self::Limits(error) => error.fmt(out),
        }
    }
}

impl error::Error for RestoreError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Read(error) => Some(error),
            Self::Unusable(_) => None,
            Self::Limits(error) => Some(error),
        }
    }
}

impl From<InvalidLimit> for RestoreError {
    fn from(error: InvalidLimit) -> Self {
        Self::Limits(error)
    }
}

impl Limiter {
    /// Writes the state of all keys for [`LimiterBuilder::restore`], and returns the number of keys.
    ///
    /// It writes about 10 to 30 bytes per key that does not have its whole quota, and needs little memory. Other
    /// threads can decide at the same time; their charges may be missing from the snapshot. Quota that keys share
    /// because the [memory](LimiterBuilder::max_memory) is full is not included, nor are requests in flight and open
    /// reservations, whose units stay taken.
    ///
    /// The snapshot does not contain keys, but it contains the secret that they are hashed with. A reader of the file
    /// can test whether a certain key is in it and can find keys that collide: protect it like a password.
    ///
    /// # Errors
    ///
    /// Returns the error of `out`.
    ///
    /// ```
    /// use tollgate::{FixedWindow, Limit, Limiter, MINUTE};
    ///
    /// let limit = Limit::new("per-user", FixedWindow::new(10, MINUTE).from_first_request())?;
    /// let limiter = Limiter::new(limit.clone());
    /// assert_eq!(limiter.check_n("ann", 6).remaining(), 4);
    /// let mut snapshot = Vec::new();
    /// limiter.snapshot(&mut snapshot)?;
    /// // … in another process …
    /// let (limiter, restored) = Limiter::builder().limit(limit).restore(&*snapshot)?;
    /// assert_eq!((restored.keys, limiter.peek("ann").remaining()), (1, 4));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn snapshot(&self, out: impl Write) -> io::Result<u64> {
        self.snapshot_with(out, |_| Vec::new())
    }

    /// Writes a snapshot with an attachment, which is made before the keys are read. `attach` gets the offset of the wall clock.
    #[doc(hidden)]
    pub fn snapshot_with(&self, out: impl Write, attach: impl FnOnce(i64) -> Vec<u8>) -> io::Result<u64> {
        let Inner { limits, store, clock, .. } = &*self.0;
        let wall_offset = clock.wall_offset_micros();
        let attachment = attach(wall_offset);
        let now = self.now();
        let written_at = now.offset_by(wall_offset);
        let sections = store.sections(limits);
        let mut out = Encoder::new(out);
        out.bytes(&MAGIC)?;
        // Without an attachment, older versions can read it.
        out.bytes(&[if attachment.is_empty() { OLDEST_VERSION } else { VERSION }])?;
        out.number(written_at.as_micros())?;
        store.seed().into_iter().try_for_each(|word| out.word(word))?;
        out.number(sections.len() as u64)?;
        for section in &sections {
            let Numbers { kind, values } = section.limit.compiled().numbers();
            out.number(section.limit.name().len() as u64)?;
            out.bytes(section.limit.name().as_bytes())?;
            out.bytes(&[kind])?;
            values.into_iter().chain([section.ceiling]).try_for_each(|number| out.number(number))?;
        }
        let mut keys = 0;
        for (index, section) in sections.iter().enumerate() {
            out.number(SECTION)?;
            out.number(index as u64)?;
            section.visit(now, wall_offset, |fingerprint, record| {
                keys += 1;
                write_key(&mut out, fingerprint, record)
            })?;
        }
        if !attachment.is_empty() {
            out.number(ATTACHMENT)?;
            out.number(attachment.len() as u64)?;
            out.bytes(&attachment)?;
        }
        out.number(END)?;
        out.finish()?;
        Ok(keys)
    }
}

fn write_key(out: &mut Encoder<impl Write>, fingerprint: u64, record: &Record) -> io::Result<()> {
    out.number(KEY)?;
    out.word(fingerprint)?;
    out.number(record.len() as u64)?;
    record.iter().try_for_each(|(first, second)| {
        out.number(*first)?;
        out.number(*second)
    })
}

impl LimiterBuilder {
    /// Builds a limiter with the state of a [snapshot](Limiter::snapshot).
    ///
    /// Spent quota stays spent, except for units that have been refilled since. Limits may differ from those of the
    /// snapshot: the state is converted as [`Limiter::with_limits`] describes. The state of limits that no longer exist
    /// is kept for a while, in case they are added again.
    ///
    /// Keys are hashed with the secret in the snapshot, and [`hash_seed`](Self::hash_seed) is ignored.
    ///
    /// # Errors
    ///
    /// The same as [`build`](Self::build), and if the snapshot cannot be read or used. To start without it, call
    /// [`build`](Self::build): every key then has its full quota.
    pub fn restore(self, snapshot: impl Read) -> Result<(Limiter, Restored), RestoreError> {
        self.restore_attached(snapshot).map(|(limiter, restored, _)| (limiter, restored))
    }

    /// Builds a limiter from a snapshot, and returns the attachment of the snapshot.
    #[doc(hidden)]
    pub fn restore_attached(self, snapshot: impl Read) -> Result<(Limiter, Restored, Attachment), RestoreError> {
        let Checked { mut limits, base_count, generation } = self.limits.checked()?;
        let wanted = limits.clone();
        let clock = self.clock.or_else(TimeSource::system).ok_or_else(super::builder::no_clock)?;
        let (now, wall_offset) = (clock.now(), clock.wall_offset());
        let mut input = Decoder::new(snapshot);
        let Head { written_at, seed, sections } = Head::read(&mut input)?;
        let mut recorded_by: Vec<Limit> = Vec::new();
        for section in &sections {
            let mut limit = section.limit().ok_or_else(RestoreError::corrupt)?;
            limit.follow_wall_clock(&wall_offset);
            recorded_by.push(limit);
        }
        let max_memory = self.max_memory;
        // The limits of the snapshot and the requested limits both need tables.
        let too_little = |_: InvalidLimit| match MemoryStore::new(&mut wanted.clone(), max_memory) {
            Ok(_) => RestoreError::Unusable(format!(
                "max_memory {max_memory} is too little for its {} limits: raise max_memory, or start without it",
                sections.len()
            )),
            Err(error) => RestoreError::Limits(error),
        };
        let store = MemoryStore::of_sections(&sections, &mut recorded_by, max_memory, seed).map_err(too_little)?;
        // If the clock was set back since, charges would be in the future: they count as made now.
        let ahead = written_at.as_micros().saturating_sub(now.offset_by(wall_offset.get()).as_micros());
        let shift = wall_offset.get().saturating_neg().saturating_sub_unsigned(ahead);
        let recorded = RecordedAt { now: written_at.offset_by(shift).as_micros(), shift };
        let mut restored = Restored { keys: 0, left_out: 0, written_at };
        let attachment = read_keys(&mut input, sections.len(), |section, fingerprint, record| {
            let limit = LimitId::new(section, generation);
            match store.restore(&recorded_by, (limit, fingerprint), record, recorded, now) {
                true => restored.keys += 1,
                false => restored.left_out += 1,
            }
        })?;
        input.finish()?;
        limits.iter_mut().for_each(|limit| limit.follow_wall_clock(&wall_offset));
        let store = store.successor(&mut limits, now).map_err(too_little)?;
        let (limits, open) = (limits.into(), Arc::default());
        let limiter = Limiter(Arc::new(Inner { limits, base_count, generation, store, clock, open }));
        Ok((limiter, restored, Attachment { bytes: attachment, from_wall: shift }))
    }
}

/// What a snapshot contains beside the keys.
pub struct Attachment {
    pub bytes: Vec<u8>,
    /// Added to a time of the wall clock in the snapshot for that of the limiter.
    pub from_wall: i64,
}

/// The header of a snapshot.
struct Head {
    written_at: Timestamp,
    seed: [u64; 4],
    sections: Vec<SectionHead>,
}

impl Head {
    fn read(input: &mut Decoder<impl Read>) -> Result<Self, RestoreError> {
        let magic: [u8; 8] = input.bytes()?;
        if magic != MAGIC {
            return Err(RestoreError::Unusable(
                "the input is not a Tollgate snapshot: use another file, or start without it".into(),
            ));
        }
        let [version] = input.bytes()?;
        if !(OLDEST_VERSION..=VERSION).contains(&version) {
            let problem = format!(
                "the snapshot has format {version}, and this version of Tollgate reads formats {OLDEST_VERSION} to {VERSION}"
            );
            return Err(RestoreError::Unusable(format!("{problem}: delete it, or use the version that wrote it")));
        }
        let written_at = Timestamp::from_micros(input.number()?);
        let seed = [input.word()?, input.word()?, input.word()?, input.word()?];
        let count = Some(input.number()?).filter(|count| *count <= MAX_SECTIONS).ok_or_else(RestoreError::corrupt)?;
        let mut sections = Vec::new();
        for _ in 0..count {
            let name = input.text(MAX_NAME)?;
            let [kind] = input.bytes()?;
            let values = [input.number()?, input.number()?, input.number()?, input.number()?];
            sections.push(SectionHead { name, numbers: Numbers { kind, values }, ceiling: input.number()? });
        }
        Ok(Self { written_at, seed, sections })
    }
}

/// Calls `see` with every key and the position of its section. Returns the attachment.
fn read_keys(
    input: &mut Decoder<impl Read>,
    sections: usize,
    mut see: impl FnMut(u32, u64, &[(u64, u64)]),
) -> Result<Vec<u8>, RestoreError> {
    let (mut section, mut attachment) = (None, Vec::new());
    let mut record = Record::new();
    loop {
        match input.number()? {
            END => return Ok(attachment),
            ATTACHMENT => attachment = input.sized(MAX_ATTACHMENT)?,
            SECTION => {
                let index = u32::try_from(input.number()?).ok().filter(|index| (*index as usize) < sections);
                section = Some(index.ok_or_else(RestoreError::corrupt)?);
            }
            KEY => {
                let fingerprint = input.word()?;
                let count = input.number()?;
                if count > MAX_ENTRIES {
                    return Err(RestoreError::corrupt());
                }
                record.clear();
                for _ in 0..count {
                    record.push((input.number()?, input.number()?));
                }
                see(section.ok_or_else(RestoreError::corrupt)?, fingerprint, &record);
            }
            _ => return Err(RestoreError::corrupt()),
        }
    }
}

/// FNV-1a. It detects damage, not forgery.
struct Checksum(u64);

impl Checksum {
    fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

pub(super) struct Encoder<W: Write> {
    out: BufWriter<W>,
    checksum: Checksum,
}

impl<W: Write> Encoder<W> {
    pub(super) fn new(out: W) -> Self {
        Self { out: BufWriter::new(out), checksum: Checksum::new() }
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.checksum.add(bytes);
        self.out.write_all(bytes)
    }

    /// Writes a number in 8 bytes.
    fn word(&mut self, word: u64) -> io::Result<()> {
        self.bytes(&word.to_le_bytes())
    }

    /// Writes a number in 1 to 10 bytes: small numbers take fewer.
    fn number(&mut self, mut number: u64) -> io::Result<()> {
        let (mut bytes, mut len) = ([0; 10], 0);
        while number >= 0x80 {
            bytes[len] = number as u8 | 0x80;
            (number, len) = (number >> 7, len + 1);
        }
        bytes[len] = number as u8;
        self.bytes(&bytes[..=len])
    }

    /// Writes the checksum and flushes the output.
    pub(super) fn finish(mut self) -> io::Result<()> {
        let checksum = self.checksum.0;
        self.word(checksum)?;
        self.out.flush()
    }
}

pub(super) struct Decoder<R> {
    input: BufReader<R>,
    checksum: Checksum,
}

impl<R: Read> Decoder<R> {
    pub(super) fn new(input: R) -> Self {
        Self { input: BufReader::new(input), checksum: Checksum::new() }
    }

    pub(super) fn bytes<const N: usize>(&mut self) -> Result<[u8; N], RestoreError> {
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes).map_err(RestoreError::of_read)?;
        self.checksum.add(&bytes);
        Ok(bytes)
    }

    fn word(&mut self) -> Result<u64, RestoreError> {
        self.bytes().map(u64::from_le_bytes)
    }

    fn number(&mut self) -> Result<u64, RestoreError> {
        let mut number = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let [byte] = self.bytes()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(RestoreError::corrupt())
    }

    /// Reads a text of at most `max` bytes.
    fn text(&mut self, max: usize) -> Result<String, RestoreError> {
        String::from_utf8(self.sized(max)?).map_err(|_| RestoreError::corrupt())
    }

    /// Reads at most `max` bytes, after their number.
    fn sized(&mut self, max: usize) -> Result<Vec<u8>, RestoreError> {
        let len = usize::try_from(self.number()?).ok().filter(|len| *len <= max).ok_or_else(RestoreError::corrupt)?;
        let mut bytes = Vec::new();
        // A damaged length takes no more memory than there is input.
        self.input.by_ref().take(len as u64).read_to_end(&mut bytes).map_err(RestoreError::of_read)?;
        if bytes.len() < len {
            return Err(RestoreError::of_read(io::ErrorKind::UnexpectedEof.into()));
        }
        self.checksum.add(&bytes);
        Ok(bytes)
    }

    /// Checks the checksum, and that nothing follows it.
    pub(super) fn finish(mut self) -> Result<(), RestoreError> {
        let checksum = self.checksum.0;
        if self.word()? != checksum {
            return Err(RestoreError::corrupt());
        }
        match self.input.read(&mut [0]) {
            Ok(0) => Ok(()),
            Ok(_) => Err(RestoreError::corrupt()),
            Err(error) => Err(RestoreError::of_read(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_they_were_written() {
        let numbers = [0, 1, 127, 128, 300, u64::from(u32::MAX), u64::MAX - 1, u64::MAX];
        let mut written = Vec::new();
        let mut encoder = Encoder::new(&mut written);
        for number in numbers {
            encoder.number(number).unwrap();
            encoder.word(number).unwrap();
        }
        encoder.finish().unwrap();
        let mut decoder = Decoder::new(&*written);
        for number in numbers {
            assert_eq!((decoder.number().unwrap(), decoder.word().unwrap()), (number, number));
        }
        decoder.finish().unwrap();
    }
}
