//! Lines of a log, in a buffer of constant size.

use std::io::{self, Read};

use memchr::memchr;

/// The longest line. Servers bound request lines and headers to less; a longer line is not a request.
pub(super) const MAX_LINE_BYTES: usize = 64 << 10;
const BUFFER_BYTES: usize = 4 * MAX_LINE_BYTES;

/// The lines of a reader.
pub(super) struct Lines<R> {
    reader: R,
    buffer: Box<[u8]>,
    /// The part of the buffer that is not returned yet.
    start: usize,
    end: usize,
    is_at_end: bool,
    /// The end of the reader before the end of its data, such as that of a truncated archive.
    problem: Option<io::Error>,
}

/// A line, without its end.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line<'a> {
    Text(&'a [u8]),
    TooLong,
}

/// What the buffer holds next.
enum Found {
    Line { start: usize, end: usize },
    TooLong,
    End,
}

impl<R: Read> Lines<R> {
    pub(super) fn new(reader: R) -> Self {
        let buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        Self { reader, buffer, start: 0, end: 0, is_at_end: false, problem: None }
    }

    /// Returns the next line.
    pub(super) fn next(&mut self) -> Option<Line<'_>> {
        match self.find() {
            Found::Line { start, end } => {
                let line = &self.buffer[start..end];
                Some(Line::Text(line.strip_suffix(b"\r").unwrap_or(line)))
            }
            Found::TooLong => Some(Line::TooLong),
            Found::End => None,
        }
    }

    /// Returns the error that ended the lines early.
    pub(super) fn problem(&self) -> Option<&io::Error> {
        self.problem.as_ref()
    }

    fn find(&mut self) -> Found {
        let mut searched = self.start;
        loop {
            if let Some(length) = memchr(b'\n', &self.buffer[searched..self.end]) {
                let (start, end) = (self.start, searched + length);
                self.start = end + 1;
                return if end - start > MAX_LINE_BYTES { Found::TooLong } else { Found::Line { start, end } };
            }
            if self.is_at_end {
                let (start, end) = (self.start, self.end);
                self.start = end;
                return match end - start {
                    0 => Found::End,
                    1..=MAX_LINE_BYTES => Found::Line { start, end },
                    _ => Found::TooLong,
                };
            }
            if self.end - self.start > MAX_LINE_BYTES {
                self.skip_line();
                return Found::TooLong;
            }
            let kept = self.end - self.start;
            self.fill();
            searched = self.start + kept;
        }
    }

    /// Skips the rest of a line that does not fit.
    fn skip_line(&mut self) {
        loop {
            self.start = self.end;
            self.fill();
            match memchr(b'\n', &self.buffer[self.start..self.end]) {
                Some(length) => {
                    self.start += length + 1;
                    return;
                }
                None if self.is_at_end => {
                    self.start = self.end;
                    return;
                }
                None => {}
            }
        }
    }

    /// Moves the rest of the buffer to its start and reads more.
    fn fill(&mut self) {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        loop {
            match self.reader.read(&mut self.buffer[self.end..]) {
                Ok(0) => self.is_at_end = true,
                Ok(read) => self.end += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    self.problem = Some(error);
                    self.is_at_end = true;
                }
            }
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lines of a text that arrives in pieces of `piece` bytes.
    fn lines(text: &[u8], piece: usize) -> Vec<Option<Vec<u8>>> {
        struct Pieces<'t>(&'t [u8], usize);
        impl Read for Pieces<'_> {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                let length = self.1.min(buffer.len());
                (&mut self.0).take(length as u64).read(buffer)
            }
        }
        let mut lines = Lines::new(Pieces(text, piece));
        let mut all = Vec::new();
        while let Some(line) = lines.next() {
            all.push(match line {
                Line::Text(text) => Some(text.to_vec()),
                Line::TooLong => None,
            });
        }
        all
    }

    #[test]
    fn long_lines_are_skipped_and_others_are_whole() {
        for length in [MAX_LINE_BYTES + 1, BUFFER_BYTES, 3 * BUFFER_BYTES] {
            let text = [b"first\r\n", &vec![b'x'; length][..], b"\n\nlast"].concat();
            for piece in [1000, BUFFER_BYTES] {
                let expected = [Some(b"first".to_vec()), None, Some(Vec::new()), Some(b"last".to_vec())];
                assert_eq!(lines(&text, piece), expected, "{length} {piece}");
            }
        }
    }

    #[test]
    fn a_line_of_the_maximum_length_is_read() {
        let text = vec![b'x'; MAX_LINE_BYTES];
        assert_eq!(lines(&text, 777), [Some(text.clone())]);
        assert_eq!(lines(&[&text[..], b"\n"].concat(), 777), [Some(text)]);
    }

    #[test]
    fn no_bytes_have_no_lines() {
        assert_eq!(lines(b"", 10), []);
    }
}
