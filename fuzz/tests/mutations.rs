//! A short run of the targets of HTTP/1, replies of Redis and normal forms without the fuzzer: changed seeds, the same
//! ones in every run.
//!
//! `FUZZ_EXECUTIONS` sets the number of inputs for each target, and `FUZZ_SEED` other changes.

use std::path::Path;

/// Takes a few seconds without optimization.
const EXECUTIONS: u64 = 2_000;

const TARGETS: [&str; 7] =
    ["request_head", "request_body", "response_head", "response_body", "connection", "redis_replies", "normal_forms"];

/// Parts of messages that decide where they end.
const WORDS: [&[u8]; 30] = [
    b"\r\n",
    b"\r\n\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b"\t",
    b":",
    b",",
    b";",
    b"0",
    b"GET / HTTP/1.1\r\nHost: h\r\n",
    b"POST / HTTP/1.1\r\nHost: h\r\n",
    b"HTTP/1.0",
    b"Content-Length: 5\r\n",
    b"Content-Length: 0\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"Connection: keep-alive\r\n",
    b"Expect: 100-continue\r\n",
    b"5\r\nhello\r\n",
    b"0\r\n\r\n",
    b"X: y\r\n",
    b"*2\r\n",
    b"$5\r\n",
    b"$-1\r\n",
    b":1\r\n",
    b"+OK\r\n",
    b"$9000000000\r\n",
    b"\xff",
];

#[test]
fn changed_seeds_keep_the_properties_of_their_targets() {
    let variable = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let executions = variable("FUZZ_EXECUTIONS").unwrap_or(EXECUTIONS);
    let mut random = Random(variable("FUZZ_SEED").unwrap_or(1) | 1);
    for (name, target) in tollgate_fuzz::TARGETS.iter().filter(|(name, _)| TARGETS.contains(name)) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds").join(name);
        let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        let seeds: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
        for _ in 0..executions {
            let mut input = random.one(&seeds).clone();
            for _ in 0..=random.below(4) {
                random.change(&mut input, &seeds);
            }
            if std::panic::catch_unwind(|| target(&input)).is_err() {
                panic!("{name} fails with {}", input.escape_ascii());
            }
        }
    }
}

/// A xorshift generator.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end.max(1) as u64) as usize
    }

    fn one<'t, T>(&mut self, all: &'t [T]) -> &'t T {
        &all[self.below(all.len())]
    }

    /// Returns a range of at most 32 bytes.
    fn range(&mut self, length: usize) -> std::ops::Range<usize> {
        let start = self.below(length + 1);
        start..(start + self.below(33)).min(length)
    }

    fn change(&mut self, input: &mut Vec<u8>, seeds: &[Vec<u8>]) {
        let at = self.below(input.len() + 1);
        match self.below(7) {
            0 => drop(input.splice(at..at, self.one(&WORDS).iter().copied())),
            1 => {
                let range = self.range(input.len());
                input.splice(range, self.one(&WORDS).iter().copied());
            }
            2 => drop(input.drain(self.range(input.len()))),
            3 => {
                let copy = input[self.range(input.len())].to_vec();
                input.splice(at..at, copy);
            }
            4 => {
                let other = self.one(seeds);
                let part = other[self.range(other.len())].to_vec();
                input.splice(at..at, part);
            }
            5 => {
                let other = self.one(seeds);
                input.truncate(at);
                input.extend(&other[self.below(other.len() + 1)..]);
            }
            _ => {
                if let Some(byte) = input.get_mut(at) {
                    *byte ^= 1 << self.below(8);
                }
            }
        }
    }
}
