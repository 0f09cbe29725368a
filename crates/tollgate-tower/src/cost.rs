//! The cost that a handler reports, and the error if no limit around it can use the report.

use std::cell::Cell;
use std::sync::Once;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response, StatusCode};
use tollgate_rules::internal::layer::{CostMistake, ReportedCost};

/// The actual cost of a request, for a handler that knows it only afterwards. Inserted into the response's extensions,
/// it settles every limit whose cost was an estimate, or one limit by name, in every layer around the handler.
///
/// Give the limit an estimate with [`Rule::cost`](tollgate_rules::Rule::cost): it is taken when the request arrives, and the
/// actual cost replaces it. An actual cost that belongs to no limit of any layer is a mistake. In debug builds, the
/// outermost layer answers with 500 and says what is wrong; in release builds, it writes one line to stderr.
///
/// ```
/// use tollgate_tower::ActualCost;
///
/// let mut response = http::Response::new("…");
/// response.extensions_mut().insert(ActualCost::new(300));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActualCost {
    units: u64,
    limit: Option<String>,
    /// Whether a layer that the response has passed has limits that the cost belongs to.
    is_used: bool,
    /// The mistake that says most, of the layers that the response has passed.
    mistake: Option<CostMistake>,
}

impl ActualCost {
    /// Creates a cost in units. It applies to every limit whose cost is not the constant 1.
    #[must_use]
    pub fn new(units: u64) -> Self {
        Self { units, limit: None, is_used: false, mistake: None }
    }

    /// Applies the cost to the limit named `name` alone, whatever its estimated cost was.
    #[must_use]
    pub fn of_limit(mut self, name: impl Into<String>) -> Self {
        self.limit = Some(name.into());
        self
    }

    /// Returns the cost in the form that the gate settles.
    pub(super) fn reported(&self) -> ReportedCost<'_> {
        ReportedCost { units: self.units, limit: self.limit.as_deref() }
    }

    /// Records whether a layer can use the cost. Returns the response to send instead, if no layer can.
    pub(super) fn pass(&mut self, mistake: Option<CostMistake>) -> Option<Response<Bytes>> {
        let Some(mistake) = mistake else {
            self.is_used = true;
            return None;
        };
        let mistake = self.mistake.map_or(mistake, |earlier| earlier.max(mistake));
        self.mistake = Some(mistake);
        if self.is_used || Polling::is_nested() {
            return None;
        }
        let text = self.describe(mistake);
        report(&text);
        cfg!(debug_assertions).then(|| error(text))
    }

    fn describe(&self, mistake: CostMistake) -> String {
        let (units, limit) = (self.units, self.limit.as_deref().unwrap_or_default());
        match mistake {
            CostMistake::NoEstimate => format!(
                "ActualCost::new({units}) settles nothing: no limit has an estimated cost. Give the limit that it belongs to \
                 an estimate with Rule::cost, or name the limit with ActualCost::of_limit."
            ),
            CostMistake::UnknownLimit => format!(
                "ActualCost::new({units}).of_limit({limit:?}) settles nothing: no rate limit has this name. Use \
                 the name of one that a layer around the handler has."
            ),
            CostMistake::NotMatched => format!(
                "ActualCost::new({units}).of_limit({limit:?}) settles nothing: the limit did not match the request. Let it \
                 match the requests of this handler, or name another limit."
            ),
        }
    }
}

/// Reports the first mistake of the process on stderr, as [`report_unknown_address`](super::limits) does.
fn report(text: &str) {
    static REPORT: Once = Once::new();
    #[expect(clippy::print_stderr, reason = "the mistake must not go unnoticed, whichever log the service has")]
    REPORT.call_once(|| eprintln!("tollgate: a cost is not counted: {text}"));
}

fn error(text: String) -> Response<Bytes> {
    let mut response = Response::new(Bytes::from(text + "\n"));
    *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

thread_local! {
    /// The number of layers whose futures are being polled, each within the one before.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Lives while the future of a layer is polled, so that a layer inside it knows that it is not the outermost.
pub(super) struct Polling;

impl Polling {
    #[inline]
    pub(super) fn begin() -> Self {
        DEPTH.set(DEPTH.get() + 1);
        Self
    }

    fn is_nested() -> bool {
        DEPTH.get() > 1
    }
}

impl Drop for Polling {
    #[inline]
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}
