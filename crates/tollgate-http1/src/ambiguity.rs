//! The reasons for which messages are refused.

use std::fmt;

/// The reason why a request is refused whose framing has more than one interpretation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ambiguity {
    /// A line ends in LF without CR.
    BareLf,
    /// The head contains a NUL, or a CR within a line.
    Nul,
    /// A name is followed by a space.
    SpaceBeforeColon,
    /// A header continues on the next line.
    FoldedLine,
    /// `Content-Length` is not a number below 2^63.
    BadLength,
    /// There are several `Content-Length` headers.
    SeveralLengths,
    /// There are both `Content-Length` and `Transfer-Encoding`.
    BothLengths,
    /// `Transfer-Encoding` is not exactly `chunked`.
    BadTransferCoding,
    /// A chunk is malformed.
    BadChunk,
    /// The head or the trailers are too long.
    HeadTooLong,
    /// A name has a character that servers may read as a hyphen. The caller finds it, in every version of HTTP.
    UnderscoreHeader,
}

/// The reasons for refusing ambiguous requests, with their labels in metrics.
pub const AMBIGUITIES: [(Ambiguity, &str); 11] = [
    (Ambiguity::BareLf, "bare_lf"),
    (Ambiguity::Nul, "nul"),
    (Ambiguity::SpaceBeforeColon, "space_before_colon"),
    (Ambiguity::FoldedLine, "folded_line"),
    (Ambiguity::BadLength, "bad_length"),
    (Ambiguity::SeveralLengths, "several_lengths"),
    (Ambiguity::BothLengths, "both_lengths"),
    (Ambiguity::BadTransferCoding, "bad_transfer_coding"),
    (Ambiguity::BadChunk, "bad_chunk"),
    (Ambiguity::HeadTooLong, "head_too_long"),
    (Ambiguity::UnderscoreHeader, "underscore_header"),
];

impl fmt::Display for Ambiguity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::BareLf => "a line ends without a CR",
            Self::Nul => "the head contains a NUL",
            Self::SpaceBeforeColon => "a header name is followed by a space",
            Self::FoldedLine => "a header is folded over several lines",
            Self::BadLength => "Content-Length is not a number below 2^63",
            Self::SeveralLengths => "there is more than one Content-Length",
            Self::BothLengths => "there are both Content-Length and Transfer-Encoding",
            Self::BadTransferCoding => "Transfer-Encoding is not exactly chunked",
            Self::BadChunk => "the chunked body is malformed",
            Self::HeadTooLong => "the head is too long",
            Self::UnderscoreHeader => "a header name has a character other than letters, digits and hyphens",
        })
    }
}

impl Ambiguity {
    /// Returns its name, as it appears in metrics, responses and the access log.
    pub fn reason(self) -> Option<&'static str> {
        AMBIGUITIES.iter().find(|(one, _)| *one == self).map(|(_, reason)| *reason)
    }

    /// Returns what a client can do about it.
    pub const fn fix(self) -> &'static str {
        match self {
            Self::BareLf => "end every line with CR LF",
            Self::Nul => "remove it",
            Self::SpaceBeforeColon => "remove the space",
            Self::FoldedLine => "write it in one line",
            Self::BadLength => "send the length in decimal digits",
            Self::SeveralLengths => "send one",
            Self::BothLengths => "send one of them",
            Self::BadTransferCoding => "send `Transfer-Encoding: chunked`, or Content-Length",
            Self::BadChunk => "send chunks as in section 7.1 of RFC 9112",
            Self::HeadTooLong => "send fewer or shorter headers",
            Self::UnderscoreHeader => "use hyphens",
        }
    }
}
