//! Content negotiation: chooses one of a few media types by the request's `Accept` header (RFC 9110, section 12.5.1).
//!
//! Parameters of a media range other than `q` are ignored: `application/json; charset=utf-8` means JSON.

use ::http::header::ACCEPT;

use super::headers::Headers;

/// The number of media ranges that are read. Browsers send about eight.
const MAX_RANGES: usize = 32;

/// A media range and its quality, in thousandths.
#[derive(Clone, Copy)]
struct Range<'a> {
    kind: &'a str,
    subtype: &'a str,
    quality: u16,
}

/// Returns the index of the offer with the highest quality, the first one of equals, and 0 if no offer is acceptable.
pub(super) fn choose<const N: usize>(request: Headers<'_>, offers: [&str; N]) -> usize {
    let mut best = (0, 0);
    if request.get_named(&ACCEPT).is_some() {
        for (index, offer) in offers.into_iter().enumerate() {
            let quality = quality(request, offer);
            if quality > best.1 {
                best = (index, quality);
            }
        }
    }
    best.0
}

/// Returns the quality of a media type, as given by the most specific range that contains it, or 0 if no range does.
fn quality(request: Headers<'_>, offer: &str) -> u16 {
    let Some((kind, subtype)) = offer.split_once('/') else { return 0 };
    let lines = request.get_all(&ACCEPT).filter_map(|line| std::str::from_utf8(line).ok());
    let ranges = lines.flat_map(|line| line.split(',')).take(MAX_RANGES).filter_map(range);
    let fitting = ranges.filter_map(|range| {
        let specific = match (range.kind, range.subtype) {
            ("*", "*") => 0,
            (of, "*") if of.eq_ignore_ascii_case(kind) => 1,
            (of, sub) if of.eq_ignore_ascii_case(kind) && sub.eq_ignore_ascii_case(subtype) => 2,
            _ => return None,
        };
        Some((specific, range.quality))
    });
    fitting.max().map_or(0, |(_, quality)| quality)
}

/// Parses a media range such as `text/html;level=1;q=0.5`. An invalid range or quality is ignored.
fn range(text: &str) -> Option<Range<'_>> {
    let mut parts = text.split(';').map(str::trim);
    let (kind, subtype) = parts.next()?.split_once('/')?;
    let mut quality = 1000;
    for parameter in parts {
        let Some((name, value)) = parameter.split_once('=') else { continue };
        if name.trim_end().eq_ignore_ascii_case("q") {
            quality = thousandths(value.trim_start())?;
            break;
        }
    }
    Some(Range { kind, subtype, quality })
}

/// Parses `0.5` as 500: one digit, and at most three after the point.
fn thousandths(text: &str) -> Option<u16> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if fraction.len() > 3 || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let fraction = fraction.bytes().zip([100, 10, 1]).map(|(digit, weight)| u16::from(digit - b'0') * weight).sum();
    match whole {
        "0" => Some(fraction),
        "1" if fraction == 0 => Some(1000),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use ::http::{HeaderMap, HeaderValue};

    use super::*;

    #[test]
    fn the_most_specific_range_sets_the_quality() {
        // (Accept, index of the offer below)
        let table: &[(&[&str], usize)] = &[
            (&[], 0),
            (&[""], 0),
            (&["*/*"], 0),
            (&["application/*"], 1),
            (&["application/json"], 1),
            (&["APPLICATION/JSON"], 1),
            (&["application/problem+json"], 2),
            (&["application/json, application/problem+json"], 1),
            (&["application/json;q=0.5, application/problem+json;q=0.6"], 2),
            (&["application/json;q=0.5", "application/problem+json;q=0.6"], 2),
            (&["*/*;q=0.1, application/problem+json"], 2),
            (&["text/html;q=0, */*"], 1),
            (&["text/*;q=0.2, application/*;q=0.3"], 1),
            (&["text/html, application/xhtml+xml, application/xml;q=0.9, */*;q=0.8"], 0),
            (&["application/json; charset=utf-8"], 1),
            (&["application/json ; Q=0.4 , application/problem+json ; q=0.41"], 2),
            // Nothing is acceptable, so the configured body is sent.
            (&["image/png"], 0),
            (&["*/*;q=0"], 0),
            (&["application/json;q=0"], 0),
            // Invalid ranges are ignored.
            (&["json"], 0),
            (&["application/json;q=2, application/problem+json;q=0.1"], 2),
            (&["application/json;q=0.1234, application/problem+json;q=0.1"], 2),
            (&["application/json;q=, application/problem+json;q=0.1"], 2),
            (&["*/json"], 0),
            (&[",,;;/,=,"], 0),
        ];
        for (lines, best) in table {
            let mut request = HeaderMap::new();
            for line in *lines {
                request.append(ACCEPT, HeaderValue::from_static(line));
            }
            let chosen = choose((&request).into(), ["text/html", "application/json", "application/problem+json"]);
            assert_eq!(chosen, *best, "{lines:?}");
        }
    }

    #[test]
    fn an_accept_header_that_is_not_text_is_ignored() {
        let mut request = HeaderMap::new();
        request.append(ACCEPT, HeaderValue::from_bytes(b"application/json, \xff").unwrap());
        assert_eq!(choose((&request).into(), ["text/html", "application/json"]), 0);
    }
}
