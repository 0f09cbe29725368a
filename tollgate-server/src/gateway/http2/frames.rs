//! Counts the HTTP/2 frames of a client connection, of the gateway or the decision service.
//!
//! Some frames cost a client nothing and the server a little: `WINDOW_UPDATE`, `PRIORITY`, `SETTINGS`, `PING`, empty
//! `DATA`, requests that are reset at once. A client that does useful work sends a few of them for each request and
//! each piece of a response. A connection that carries nothing else is closed with `GOAWAY` (`ENHANCE_YOUR_CALM`).
//! Until then it takes turns with the others of its worker.
//!
//! Only the nine-byte header of each frame is read. Deliberately not here: the meaning of frames, which is up to h2.

use tollgate_net::deadline::Tick;

/// Cheap frames that a client may send in advance. Browsers send about ten at the start of a connection; 2,000 are
/// about 26 KB, and a millisecond of work.
const MAX_CREDIT: u32 = 2_000;

/// The credit for every `DATA` or `HEADERS` frame sent to the client. A client that reads a response sends at most two
/// `WINDOW_UPDATE`s per frame. Envoy also allows ten.
const CREDIT_PER_ANSWER_FRAME: u32 = 10;

/// The credit per tick, so that a quiet connection may send `PING`s for days: ten per second.
const CREDIT_PER_TICK: u32 = 1;

/// Frames that are read before other connections get their turn.
const FRAMES_PER_TURN: u32 = 256;

/// The length of the client's connection preface.
const PREFACE_BYTES: usize = 24;

const HEAD_BYTES: usize = 9;

const DATA: u8 = 0;
const HEADERS: u8 = 1;

/// The position in the frames of one direction.
#[derive(Debug, Default)]
struct FrameParser {
    /// The bytes of the next frame header received so far.
    head: [u8; HEAD_BYTES],
    in_head: usize,
    /// The remaining bytes of the payload or the preface.
    skipped: usize,
}

/// A frame header.
#[derive(Clone, Copy)]
struct FrameHead {
    kind: u8,
    length: usize,
}

impl FrameParser {
    fn is_between_frames(&self) -> bool {
        self.in_head == 0 && self.skipped == 0
    }

    /// Consumes bytes up to the end of a frame header or payload. Returns their number, and the header if it is
    /// complete.
    fn step(&mut self, bytes: &[u8]) -> (usize, Option<FrameHead>) {
        if self.skipped > 0 {
            let taken = self.skipped.min(bytes.len());
            self.skipped -= taken;
            return (taken, None);
        }
        let taken = (HEAD_BYTES - self.in_head).min(bytes.len());
        self.head[self.in_head..][..taken].copy_from_slice(&bytes[..taken]);
        self.in_head += taken;
        if self.in_head < HEAD_BYTES {
            return (taken, None);
        }
        self.in_head = 0;
        let [high, middle, low, kind, ..] = self.head;
        let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        self.skipped = length;
        (taken, Some(FrameHead { kind, length }))
    }
}

/// The frame counts of one connection.
#[derive(Debug)]
pub(crate) struct Frames {
    from_client: FrameParser,
    to_client: FrameParser,
    credit: u32,
    paid_until: Tick,
    in_turn: u32,
}

impl Frames {
    pub(crate) fn new(now: Tick) -> Self {
        let from_client = FrameParser { skipped: PREFACE_BYTES, ..FrameParser::default() };
        Self { from_client, to_client: FrameParser::default(), credit: MAX_CREDIT, paid_until: now, in_turn: 0 }
    }

    /// Counts frames received from the client. If there are too many cheap ones, returns the number of bytes up to the
    /// frame that ends the connection.
    pub(crate) fn received(&mut self, bytes: &[u8], now: Tick) -> Result<(), usize> {
        let ticks = u32::try_from(now.saturating_sub(self.paid_until)).unwrap_or(u32::MAX);
        self.paid_until = now;
        self.earn(ticks.saturating_mul(CREDIT_PER_TICK));
        let mut at = 0;
        while at < bytes.len() {
            let (taken, head) = self.from_client.step(&bytes[at..]);
            at += taken;
            if let Some(head) = head {
                self.in_turn += 1;
                let is_cheap = head.kind != DATA || head.length == 0;
                self.credit = self.credit.saturating_sub(is_cheap.into());
            }
            if self.credit == 0 && self.from_client.is_between_frames() {
                return Err(at);
            }
        }
        Ok(())
    }

    /// Counts frames sent to the client.
    pub(crate) fn sent(&mut self, bytes: &[u8]) {
        let mut at = 0;
        while at < bytes.len() {
            let (taken, head) = self.to_client.step(&bytes[at..]);
            at += taken;
            if let Some(FrameHead { kind: DATA | HEADERS, .. }) = head {
                self.earn(CREDIT_PER_ANSWER_FRAME);
            }
        }
    }

    fn earn(&mut self, credit: u32) {
        self.credit = self.credit.saturating_add(credit).min(MAX_CREDIT);
    }

    /// Returns whether other connections should get their turn before more is read. The next call starts a new turn.
    pub(crate) fn ends_turn(&mut self) -> bool {
        let is_over = self.in_turn >= FRAMES_PER_TURN;
        if is_over {
            self.in_turn = 0;
        }
        is_over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

    fn frame(kind: u8, length: u8) -> Vec<u8> {
        [&[0, 0, length, kind, 0, 0, 0, 0, 1][..], &vec![0; usize::from(length)]].concat()
    }

    #[test]
    fn control_frames_are_counted_however_the_bytes_are_cut() {
        let flood = [PREFACE, &frame(8, 4).repeat(MAX_CREDIT as usize + 10)].concat();
        let wanted = PREFACE.len() + 13 * MAX_CREDIT as usize;
        for piece in [1, 7, 13, 64, 4096, flood.len()] {
            let mut frames = Frames::new(0);
            let mut before = 0;
            let ended = flood.chunks(piece).find_map(|bytes| {
                let good = frames.received(bytes, 0).err();
                before += bytes.len();
                good.map(|good| before - bytes.len() + good)
            });
            assert_eq!(ended, Some(wanted), "in pieces of {piece}");
            assert!(frames.from_client.is_between_frames());
        }
    }

    #[test]
    fn data_costs_nothing_and_answers_pay_for_window_updates() {
        let mut frames = Frames::new(0);
        frames.received(PREFACE, 0).unwrap();
        for _ in 0..10 * MAX_CREDIT {
            frames.received(&frame(DATA, 1), 0).unwrap();
            for byte in frame(DATA, 200) {
                frames.sent(&[byte]);
            }
            frames.received(&[frame(8, 4), frame(8, 4), frame(6, 8)].concat(), 0).unwrap();
        }
        let flood = frame(DATA, 0).repeat(MAX_CREDIT as usize);
        assert!(frames.received(&flood, 0).is_err(), "empty data is cheap");
    }

    #[test]
    fn a_quiet_connection_may_ping_for_ever() {
        let mut frames = Frames::new(0);
        frames.received(PREFACE, 0).unwrap();
        for tick in 0..100_000 {
            frames.received(&frame(6, 8), tick).unwrap();
        }
    }
}
