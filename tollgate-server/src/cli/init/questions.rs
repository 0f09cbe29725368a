//! The questions of `tollgate init` on a terminal.

use std::io::{self, BufRead, Read, Write};

use super::super::Error;

/// The longest answer: longer than any URL that people type.
const MAX_ANSWER_BYTES: u64 = 4096;

/// Asks one question after another. An empty answer is the default.
pub(super) struct Questions<R, W> {
    input: R,
    output: W,
}

impl<R: BufRead, W: Write> Questions<R, W> {
    pub(super) fn new(input: R, output: W) -> Self {
        Self { input, output }
    }

    /// Asks until `accept` takes the answer. Its error is shown before the question is repeated.
    pub(super) fn ask<T>(
        &mut self,
        question: &str,
        default: &str,
        mut accept: impl FnMut(&str) -> Result<T, String>,
    ) -> Result<T, Error> {
        loop {
            let shown = if default.is_empty() { String::new() } else { format!(" [{default}]") };
            write!(self.output, "{question}{shown}: ").and_then(|()| self.output.flush()).map_err(unanswered)?;
            let mut line = Vec::new();
            self.input.by_ref().take(MAX_ANSWER_BYTES).read_until(b'\n', &mut line).map_err(unanswered)?;
            if !line.ends_with(b"\n") {
                return Err(unanswered(io::ErrorKind::UnexpectedEof.into()));
            }
            let line = String::from_utf8_lossy(&line);
            let answer = if line.trim().is_empty() { default } else { line.trim() };
            match accept(answer) {
                Ok(accepted) => return Ok(accepted),
                Err(problem) => writeln!(self.output, "  {problem}").map_err(unanswered)?,
            }
        }
    }
}

fn unanswered(error: io::Error) -> Error {
    Error::Usage(format!("a question has no answer ({error}): nothing was written; --yes uses the defaults"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(input: &str) -> (Result<String, String>, String) {
        let mut output = Vec::new();
        let accept = |answer: &str| match answer {
            "bad" => Err("bad is not good: write good".to_owned()),
            answer => Ok(answer.to_owned()),
        };
        let asked = Questions::new(input.as_bytes(), &mut output).ask("How", "well", accept);
        (asked.map_err(|error| error.to_string()), String::from_utf8(output).unwrap())
    }

    #[test]
    fn an_empty_answer_is_the_default() {
        assert_eq!(answer("\n"), (Ok("well".to_owned()), "How [well]: ".to_owned()));
        assert_eq!(answer("  fine \r\n").0, Ok("fine".to_owned()));
    }

    #[test]
    fn a_bad_answer_is_explained_and_the_question_repeated() {
        let (answer, output) = answer("bad\ngood\n");
        assert_eq!(answer, Ok("good".to_owned()));
        assert_eq!(output, "How [well]:   bad is not good: write good\nHow [well]: ");
    }

    #[test]
    fn input_that_ends_or_never_ends_is_an_error() {
        let long = "a".repeat(2 * usize::try_from(MAX_ANSWER_BYTES).unwrap());
        for input in ["", "unfinished", "bad\n", &long] {
            let problem = answer(input).0.unwrap_err();
            assert!(problem.contains("nothing was written"), "{problem}");
        }
    }
}
