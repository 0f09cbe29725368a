//! The report as one page without scripts and without other files.

use std::fmt::Write as _;
use std::time::Duration;

use tollgate_telemetry::words::human;

use super::report::Report;
use super::svg::{self, escaped};

const STYLE: &str = "
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 54rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.3rem }
div { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: .87rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .45rem; text-align: right; border-bottom: 1px solid #8885; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
small { opacity: .7; display: block }
svg { max-width: 100%; height: auto; margin-top: 1.5rem }
";

/// Returns the page.
pub fn page(report: &Report) -> String {
    let title = escaped(&report.title());
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
    );
    if let Some(scenario) = &report.scenario {
        _ = writeln!(page, "<p>{}</p>\n<p>Traffic: {}.</p>", escaped(scenario.explanation), escaped(&report.traffic));
    }
    page.push_str(&table(report));
    page.push_str(&svg::draw(report));
    _ = writeln!(
        page,
        "<p><small>Worst window: the most units that one client got in any time as long as the window. Burst: the most \
         within {}. Wait: the <code>retry_after</code> of denied requests, or the delay in a queue.</small></p>\n\
         </body>\n</html>",
        human(report.burst_within)
    );
    page
}

fn table(report: &Report) -> String {
    let mut table = "<div><table>\n<tr><th>limit</th><th>offered</th><th>admitted</th><th>denied</th>\
                     <th>worst window</th><th>burst</th><th>wait p50</th><th>p99</th></tr>\n"
        .to_owned();
    let wait = |wait: Option<Duration>| wait.map_or_else(|| "–".to_owned(), human);
    for limit in &report.limits {
        _ = writeln!(
            table,
            "<tr><td>{}<small>{}</small></td><td>{}</td><td>{}</td><td>{}</td><td>{} in {}</td><td>{}</td><td>{}</td>\
             <td>{}</td></tr>",
            escaped(&limit.name),
            escaped(&limit.description),
            report.offered,
            limit.admitted,
            limit.denied,
            limit.worst_window,
            human(limit.window),
            limit.largest_burst,
            wait(limit.wait_p50),
            wait(limit.wait_p99),
        );
    }
    table.push_str("</table></div>\n");
    table
}
