//! The formats of the page: OpenMetrics if the client prefers it, and the classic text format otherwise.
//!
//! `prometheus-client` writes OpenMetrics only. The classic format of the same page differs in the names of counters in
//! `HELP` and `TYPE`, which have the suffix of their samples there, and in the end of the page.

use axum::http::{HeaderMap, header};

/// The format of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// OpenMetrics 1.0.0
    OpenMetrics,
    /// The text format 0.0.4 of Prometheus.
    Classic,
}

/// The preference of a client for a media type: by how exact a range names it, and its quality in thousandths.
type Preference = Option<(Exactness, u16)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Exactness {
    Any,
    Kind,
    Named,
}

impl Format {
    /// Returns the format for a request, by its `Accept` header.
    ///
    /// OpenMetrics has to be preferred or named: a client that accepts anything, such as curl, gets the classic format.
    /// So does a client that accepts neither.
    pub(crate) fn accepted(headers: &HeaderMap) -> Self {
        let (mut open_metrics, mut classic): (Preference, Preference) = (None, None);
        let values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
        for range in values.flat_map(|value| value.split(',')).filter_map(Range::parse) {
            let prefer = |known: &mut Preference, exactness: Option<Exactness>| {
                if let Some(exactness) = exactness {
                    // The most exact range counts, and of several the one that is preferred.
                    *known = (*known).max(Some((exactness, range.quality)));
                }
            };
            prefer(
                &mut open_metrics,
                range.exactness("application", "openmetrics-text").filter(|_| range.has_version_1),
            );
            prefer(&mut classic, range.exactness("text", "plain"));
        }
        let quality = |preference: Preference| preference.map_or(0, |(_, quality)| quality);
        let is_named = open_metrics.is_some_and(|(exactness, _)| exactness == Exactness::Named);
        let (wanted, other) = (quality(open_metrics), quality(classic));
        if wanted > other || (wanted == other && wanted > 0 && is_named) { Self::OpenMetrics } else { Self::Classic }
    }

    pub(crate) const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Classic => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// A media range of an `Accept` header.
struct Range<'a> {
    kind: &'a str,
    subtype: &'a str,
    /// Whether OpenMetrics 1.0.0 is meant: it has that version, or none.
    has_version_1: bool,
    /// In thousandths.
    quality: u16,
}

impl<'a> Range<'a> {
    /// Returns `None` if it is invalid: it is ignored.
    fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.split(';').map(str::trim);
        let (kind, subtype) = parts.next()?.split_once('/')?;
        let mut range = Self { kind, subtype, has_version_1: true, quality: 1000 };
        for (name, value) in parts.filter_map(|parameter| parameter.split_once('=')) {
            let value = value.trim();
            if name.trim().eq_ignore_ascii_case("q") {
                range.quality = thousandths(value)?;
            } else if name.trim().eq_ignore_ascii_case("version") {
                range.has_version_1 = value.trim_matches('"') == "1.0.0";
            }
        }
        Some(range)
    }

    /// Returns how exactly the range names a media type, or `None` if it does not include it.
    fn exactness(&self, kind: &str, subtype: &str) -> Option<Exactness> {
        match (self.kind, self.subtype) {
            ("*", "*") => Some(Exactness::Any),
            (own, "*") if own.eq_ignore_ascii_case(kind) => Some(Exactness::Kind),
            (own, sub) if own.eq_ignore_ascii_case(kind) && sub.eq_ignore_ascii_case(subtype) => Some(Exactness::Named),
            _ => None,
        }
    }
}

/// Parses a quality: `1`, or a fraction with up to three digits.
fn thousandths(text: &str) -> Option<u16> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if fraction.len() > 3 || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let fraction: u16 = format!("{fraction:0<3}").parse().ok()?;
    match (whole, fraction) {
        ("0", _) => Some(fraction),
        ("1", 0) => Some(1000),
        _ => None,
    }
}

/// Converts a page in the OpenMetrics format to the classic one. Samples are the same in both, and the page has no
/// types other than counters, gauges and histograms.
pub(super) fn to_classic(page: &str) -> String {
    let mut classic = String::with_capacity(page.len() + page.len() / 16);
    let mut help = None;
    for line in page.lines() {
        if let Some(text) = line.strip_prefix("# HELP ") {
            // The type, which decides about the name, follows.
            help = text.split_once(' ').map(|(_, help)| help);
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|text| text.split_once(' ')) {
            let suffix = if kind == "counter" { "_total" } else { "" };
            if let Some(help) = help.take() {
                push(&mut classic, &["# HELP ", name, suffix, " ", help]);
            }
            push(&mut classic, &["# TYPE ", name, suffix, " ", kind]);
        } else if !line.starts_with('#') {
            push(&mut classic, &[line]);
        }
    }
    classic
}

fn push(page: &mut String, parts: &[&str]) {
    parts.iter().for_each(|part| page.push_str(part));
    page.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted(accept: &[&str]) -> Format {
        let mut headers = HeaderMap::new();
        for value in accept {
            headers.append(header::ACCEPT, value.parse().unwrap());
        }
        Format::accepted(&headers)
    }

    #[test]
    fn open_metrics_is_for_clients_that_ask_for_it() {
        for accept in [
            // Prometheus 2.42, 3.0 and 3.5.
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
            // Grafana Agent, VictoriaMetrics and the collector of OpenTelemetry send one of those, or the shorter ones.
            "application/openmetrics-text",
            "Application/OpenMetrics-Text; version=\"1.0.0\"; charset=utf-8",
            "application/openmetrics-text; q=0.5, text/plain; q=0.5",
            "text/plain;q=0.2, application/openmetrics-text;q=0.201",
            "text/html, application/openmetrics-text;q=0.001",
            "application/*",
            "*/*;q=0.9, text/plain;q=0.1",
        ] {
            assert_eq!(accepted(&[accept]), Format::OpenMetrics, "{accept}");
        }
        assert_eq!(accepted(&["text/plain;q=0.5", "application/openmetrics-text"]), Format::OpenMetrics);
    }

    #[test]
    fn everybody_else_gets_the_classic_format() {
        assert_eq!(accepted(&[]), Format::Classic);
        for accept in [
            "",
            "*/*",
            "text/plain",
            "text/plain;version=0.0.4;q=1,*/*;q=0.1",
            "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8",
            // Prometheus with scrape_protocols: [PrometheusText0.0.4, OpenMetricsText1.0.0].
            "text/plain;version=0.0.4;q=0.3,application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.2,*/*;q=0.1",
            "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited,text/plain;version=0.0.4;q=0.2",
            "application/openmetrics-text;q=0",
            "application/openmetrics-text;q=0, */*",
            "application/openmetrics-text;version=0.0.1",
            "application/openmetrics-text;q=2",
            "application/openmetrics-text;q=0.5555, text/plain;q=0.1",
            "application/openmetrics-textual",
            "application/json",
            "openmetrics-text",
            ";;;,,,/",
        ] {
            assert_eq!(accepted(&[accept]), Format::Classic, "{accept}");
        }
    }

    #[test]
    fn counters_have_the_name_of_their_samples_in_the_classic_format() {
        let page = "# HELP hits Hits, by key\n# TYPE hits counter\nhits_total{key=\"a\\\"\\\\b\\n# TYPE c\"} 1\n\
                    # HELP load Load\n# TYPE load gauge\nload 0.5\n# EOF\n";
        assert_eq!(
            to_classic(page),
            "# HELP hits_total Hits, by key\n# TYPE hits_total counter\nhits_total{key=\"a\\\"\\\\b\\n# TYPE c\"} 1\n\
             # HELP load Load\n# TYPE load gauge\nload 0.5\n"
        );
    }
}
