//! Memory that all connections of a worker use by turns: what is in it is read and written between two waits.
//!
//! So a connection that waits holds no buffers, and what a request is worked on with is in the cache already.

use std::time::SystemTime;

use super::super::ticks::Tick;

/// As much is read at once. A longer head is not read in the lane.
pub(super) const INPUT_BYTES: usize = 64 << 10;

/// A buffer that one message has made longer than this is not kept.
const KEPT_BYTES: usize = 128 << 10;

/// What a worker reads into, and what it works on.
pub(in super::super) struct Scratch {
    pub(super) input: Box<[u8]>,
    pub(super) desk: Desk,
}

/// What a message is worked on with.
pub(super) struct Desk {
    /// What is about to be written.
    pub(super) out: Vec<u8>,
    pub(super) date: Date,
}

/// The date of answers, as a line of their heads.
#[derive(Default)]
pub(super) struct Date {
    line: String,
    of: Option<Tick>,
}

impl Scratch {
    pub(in super::super) fn new() -> Self {
        let desk = Desk { out: Vec::new(), date: Date::default() };
        Self { input: vec![0; INPUT_BYTES].into(), desk }
    }
}

impl Desk {
    /// Nothing of the message before stays, but for the memory.
    pub(super) fn clean(&mut self) {
        self.out.clear();
        self.out.shrink_to(KEPT_BYTES);
    }
}

impl Date {
    pub(super) fn line(&mut self, now: Tick) -> &[u8] {
        if self.of != Some(now) {
            self.line = format!("date: {}\r\n", httpdate::fmt_http_date(wall_clock()));
            self.of = Some(now);
        }
        self.line.as_bytes()
    }
}

#[expect(clippy::disallowed_methods, reason = "the date of an answer is the wall clock's, and decides nothing")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}
