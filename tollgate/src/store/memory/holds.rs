//! Several buckets held at once, by one thread, without ever waiting in a circle.

use smallvec::SmallVec;

use super::bucket::{Bucket, Busy, Held, header_patiently, hold_unchanged};
use super::table::Table;

/// Buckets that are held. All are let go when this is dropped, the last one first.
#[derive(Default)]
pub(super) struct Holds<'a> {
    held: SmallVec<[Hold<'a>; 8]>,
    /// Slots that were given to keys which have not spent anything yet, so that they look free.
    given: SmallVec<[(Bucket<'a>, usize); 8]>,
}

struct Hold<'a> {
    bucket: Held<'a>,
    written: bool,
}

impl<'a> Holds<'a> {
    /// Holds a bucket, unless it is held already.
    pub(super) fn hold(&mut self, bucket: Bucket<'a>) -> Result<&mut Held<'a>, Busy> {
        let index = match self.position(bucket) {
            Some(index) => index,
            None => {
                let held = hold_unchanged(bucket, header_patiently(bucket)?).ok_or(Busy::Held)?;
                self.held.push(Hold { bucket: held, written: false });
                self.held.len() - 1
            }
        };
        Ok(&mut self.held[index].bucket)
    }

    /// Holds the home bucket of a key.
    pub(super) fn hold_home(&mut self, table: &'a Table, fingerprint: u64) -> Result<Bucket<'a>, Busy> {
        let mut bucket = table.probable_home(fingerprint);
        loop {
            let already = self.position(bucket).map(|index| self.held[index].bucket.header());
            let header = already.map_or_else(|| header_patiently(bucket), Ok)?;
            match table.led_on(bucket, header, fingerprint) {
                Some(next) => bucket = next,
                None if already.is_some() => return Ok(bucket),
                None => {
                    let held = hold_unchanged(bucket, header).ok_or(Busy::Held)?;
                    self.held.push(Hold { bucket: held, written: false });
                    return Ok(bucket);
                }
            }
        }
    }

    /// Keeps a slot for the key that it was given to, as long as anything is held.
    pub(super) fn give(&mut self, bucket: Bucket<'a>, slot: usize) {
        self.given.push((bucket, slot));
    }

    pub(super) fn is_given(&self, bucket: Bucket<'_>, slot: usize) -> bool {
        self.given.iter().any(|(other, taken)| other.is(bucket) && *taken == slot)
    }

    /// Readers of this bucket will have to look again.
    pub(super) fn write(&mut self, bucket: Bucket<'a>) {
        if let Some(index) = self.position(bucket) {
            self.held[index].written = true;
        }
    }

    fn position(&self, bucket: Bucket<'_>) -> Option<usize> {
        self.held.iter().position(|hold| hold.bucket.bucket.is(bucket))
    }
}

impl Drop for Holds<'_> {
    fn drop(&mut self) {
        while let Some(hold) = self.held.pop() {
            if hold.written {
                hold.bucket.release();
            } else {
                hold.bucket.release_unchanged();
            }
        }
    }
}
