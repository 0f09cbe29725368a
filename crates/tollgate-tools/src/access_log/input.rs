//! Files and stdin, decompressed.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

const BUFFER_BYTES: usize = 64 << 10;
/// The mark that some Windows programs write before the first line.
const BYTE_ORDER_MARK: &[u8] = &[0xef, 0xbb, 0xbf];
const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
/// Compressed files that are not supported, with the program that decompresses them.
const UNSUPPORTED: [(&[u8], &str); 3] = [(b"\xfd7zXZ\0", "xz -dc"), (b"BZh", "bzip2 -dc"), (b"PK\x03\x04", "unzip -p")];

/// An open log.
pub(super) struct Input {
    pub(super) reader: Box<dyn Read + Send>,
    pub(super) read_bytes: Arc<AtomicU64>,
    /// The size, if it is a regular file. Such a file can be opened again.
    pub(super) total_bytes: Option<u64>,
}

/// The reason that a log cannot be opened.
#[derive(Debug)]
pub struct OpenError {
    path: PathBuf,
    problem: OpenProblem,
}

#[derive(Debug)]
enum OpenProblem {
    Io(io::Error),
    Directory,
    Unsupported { program: &'static str },
}

impl fmt::Display for OpenError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match &self.problem {
            OpenProblem::Io(error) => write!(out, "cannot read {path} ({error}): check the path and its permissions"),
            OpenProblem::Directory => {
                write!(out, "{path} is a directory: name the log files in it, such as {path}/*.log")
            }
            OpenProblem::Unsupported { program } => write!(
                out,
                "{path} is compressed in a format other than gzip and zstd: decompress it first, with `{program} {path} > access.log`"
            ),
        }
    }
}

impl Input {
    /// Opens a file, or stdin for `-`.
    pub(super) fn open(path: &Path) -> Result<Self, OpenError> {
        let failed = |problem| OpenError { path: path.to_owned(), problem };
        let read_bytes = Arc::<AtomicU64>::default();
        if path == Path::new("-") {
            let reader = decompressed(Counted { reader: io::stdin(), read_bytes: Arc::clone(&read_bytes) });
            return Ok(Self { reader: reader.map_err(failed)?, read_bytes, total_bytes: None });
        }
        let file = File::open(path).map_err(|error| failed(OpenProblem::Io(error)))?;
        let metadata = file.metadata().map_err(|error| failed(OpenProblem::Io(error)))?;
        if metadata.is_dir() {
            return Err(failed(OpenProblem::Directory));
        }
        let reader = decompressed(Counted { reader: file, read_bytes: Arc::clone(&read_bytes) });
        let total_bytes = metadata.is_file().then_some(metadata.len());
        Ok(Self { reader: reader.map_err(failed)?, read_bytes, total_bytes })
    }
}

/// Counts the bytes that are read.
struct Counted<R> {
    reader: R,
    read_bytes: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        self.read_bytes.fetch_add(read as u64, Relaxed);
        Ok(read)
    }
}

/// Recognizes compressed data by its first bytes.
fn decompressed(reader: impl Read + Send + 'static) -> Result<Box<dyn Read + Send>, OpenProblem> {
    let mut reader = BufReader::with_capacity(BUFFER_BYTES, reader);
    let start = reader.fill_buf().map_err(OpenProblem::Io)?;
    if let Some((_, program)) = UNSUPPORTED.iter().find(|(magic, _)| start.starts_with(magic)) {
        return Err(OpenProblem::Unsupported { program });
    }
    Ok(if start.starts_with(GZIP) {
        Box::new(Unmarked::new(MultiGzDecoder::new(reader)))
    } else if start.starts_with(ZSTD) || is_skippable_frame(start) {
        Box::new(Unmarked::new(ZstdFrames { decoder: FrameDecoder::new(), reader, is_started: false }))
    } else {
        Box::new(Unmarked::new(reader))
    })
}

/// Text without a byte order mark, which would be a part of the first client's address.
struct Unmarked<R> {
    reader: R,
    is_at_start: bool,
}

impl<R: Read> Unmarked<R> {
    fn new(reader: R) -> Self {
        Self { reader, is_at_start: true }
    }
}

impl<R: Read> Read for Unmarked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut read = self.reader.read(buffer)?;
        if !self.is_at_start || buffer.is_empty() {
            return Ok(read);
        }
        self.is_at_start = false;
        // A pipe may deliver the mark in pieces. An error is reported by the next read.
        while read < BYTE_ORDER_MARK.len() && read < buffer.len() && BYTE_ORDER_MARK.starts_with(&buffer[..read]) {
            match self.reader.read(&mut buffer[read..]) {
                Ok(0) | Err(_) => break,
                Ok(more) => read += more,
            }
        }
        if !buffer[..read].starts_with(BYTE_ORDER_MARK) {
            return Ok(read);
        }
        buffer.copy_within(BYTE_ORDER_MARK.len()..read, 0);
        match read - BYTE_ORDER_MARK.len() {
            // Nothing would mean the end.
            0 => self.reader.read(buffer),
            rest => Ok(rest),
        }
    }
}

/// Returns whether data starts with a frame of zstd that has no content, as `pzstd` writes it.
fn is_skippable_frame(start: &[u8]) -> bool {
    matches!(start, [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..])
}

/// Decompresses all frames of zstd data.
struct ZstdFrames<R> {
    decoder: FrameDecoder,
    reader: R,
    is_started: bool,
}

impl<R: BufRead> Read for ZstdFrames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if self.is_started {
                while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                    let some = BlockDecodingStrategy::UptoBytes(buffer.len());
                    self.decoder.decode_blocks(&mut self.reader, some).map_err(io::Error::other)?;
                }
                let read = self.decoder.read(buffer)?;
                if read > 0 || buffer.is_empty() {
                    return Ok(read);
                }
            }
            if self.reader.fill_buf()?.is_empty() {
                return Ok(0);
            }
            match self.decoder.init(&mut self.reader) {
                Ok(()) => self.is_started = true,
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                    self.is_started = false;
                    io::copy(&mut (&mut self.reader).take(length.into()), &mut io::sink())?;
                }
                Err(error) => return Err(io::Error::other(error)),
            }
        }
    }
}
