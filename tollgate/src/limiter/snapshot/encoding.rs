//! The encoding of a snapshot: variable-length integers in groups of seven bits, and a checksum at the end.

use std::io::{self, BufReader, BufWriter, Read, Write};

use super::RestoreError;

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
    pub(super) fn word(&mut self, word: u64) -> io::Result<()> {
        self.bytes(&word.to_le_bytes())
    }

    /// Writes a number in 1 to 10 bytes: small numbers take fewer.
    pub(super) fn number(&mut self, mut number: u64) -> io::Result<()> {
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

    pub(super) fn word(&mut self) -> Result<u64, RestoreError> {
        self.bytes().map(u64::from_le_bytes)
    }

    pub(super) fn number(&mut self) -> Result<u64, RestoreError> {
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
    pub(super) fn text(&mut self, max: usize) -> Result<String, RestoreError> {
        let len = usize::try_from(self.number()?).ok().filter(|len| *len <= max).ok_or_else(RestoreError::corrupt)?;
        let mut bytes = vec![0; len];
        self.input.read_exact(&mut bytes).map_err(RestoreError::of_read)?;
        self.checksum.add(&bytes);
        String::from_utf8(bytes).map_err(|_| RestoreError::corrupt())
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
