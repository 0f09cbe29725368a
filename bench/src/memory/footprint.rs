//! Bytes per key and per log entry, each measured in a separate process.

use anyhow::Context as _;

use super::{Coverage, KEYS, Scale, child};
use crate::contender::tollgate::{ALGORITHMS, LOG_OF_10, LOG_OF_100};
use crate::contender::{GCRA, GOVERNOR, LIMITADOR, THROTTLECRAB, TOLLGATE};
use crate::report::{Results, Table, parse_figure};

const MANY_KEYS: usize = 10_000_000;

/// A store to fill, and the divisor of its bytes.
struct Filling {
    name: &'static str,
    keys: usize,
    requests: usize,
}

struct Bytes {
    resident: f64,
    peak: f64,
    claimed: Option<f64>,
}

pub(super) fn run(scale: &Scale, results: &mut Results) -> anyhow::Result<()> {
    keys(scale, results)?;
    algorithms(scale)?;
    logs(scale, results)
}

fn keys(scale: &Scale, results: &mut Results) -> anyhow::Result<()> {
    let fillings: &[(&str, usize)] = match scale.coverage {
        Coverage::Full => &[
            (TOLLGATE, KEYS),
            (GOVERNOR, KEYS),
            (GCRA, KEYS),
            (THROTTLECRAB, KEYS),
            // A kilobyte per key: ten million do not fit.
            (LIMITADOR, KEYS),
            (TOLLGATE, MANY_KEYS),
            (GOVERNOR, MANY_KEYS),
            (GCRA, MANY_KEYS),
            (THROTTLECRAB, MANY_KEYS),
        ],
        Coverage::Quick => &[(TOLLGATE, KEYS), (GOVERNOR, KEYS), (TOLLGATE, MANY_KEYS)],
    };
    let mut table = table("Bytes per key, live keys of 11 or 12 bytes", "keys");
    for &(name, keys) in fillings {
        let bytes = measure(&Filling { name, keys, requests: 1 })?;
        row(&mut table, name, keys, &bytes);
        match (name, keys) {
            (TOLLGATE, KEYS) => results.quantity("bytes_per_key_1m", bytes.resident),
            (TOLLGATE, MANY_KEYS) => results.quantity("bytes_per_key_10m", bytes.resident),
            _ => {}
        }
    }
    table.print();
    Ok(())
}

fn algorithms(scale: &Scale) -> anyhow::Result<()> {
    if scale.coverage == Coverage::Quick {
        return Ok(());
    }
    let mut table = table("Bytes per key of tollgate's algorithms, one request per key", "keys");
    for entrant in ALGORITHMS {
        let bytes = measure(&Filling { name: entrant.name, keys: KEYS, requests: 1 })?;
        row(&mut table, entrant.name, KEYS, &bytes);
    }
    table.print();
    Ok(())
}

/// All memory of the logs, keys included, per entry.
fn logs(scale: &Scale, results: &mut Results) -> anyhow::Result<()> {
    let entries = match scale.coverage {
        Coverage::Full => MANY_KEYS,
        Coverage::Quick => KEYS,
    };
    let mut table = table("Bytes per log entry of tollgate, the key's own included", "entries");
    for (name, requests) in [(LOG_OF_10, 10), (LOG_OF_100, 100)] {
        let filling = Filling { name, keys: KEYS / requests, requests };
        let bytes = measure(&filling)?;
        row(&mut table, name, entries, &bytes);
        if name == LOG_OF_100 {
            results.quantity("log_bytes_per_entry", bytes.resident);
        }
    }
    table.print();
    Ok(())
}

fn measure(filling: &Filling) -> anyhow::Result<Bytes> {
    let output = child::start("footprint", filling.name, &[filling.keys, filling.requests])?;
    let entries = (filling.keys * filling.requests) as f64;
    let share = |name: &str| parse_figure(&output, name).map(|bytes| bytes as f64 / entries);
    let needed = |name: &str| share(name).with_context(|| format!("{} printed no {name}", filling.name));
    Ok(Bytes { resident: needed("resident")?, peak: needed("peak")?, claimed: share("claimed") })
}

fn table(title: &str, counted: &str) -> Table {
    Table::new(title, ["", counted, "resident", "at the peak", "claimed"])
}

fn row(table: &mut Table, name: &str, count: usize, bytes: &Bytes) {
    let show = |bytes: f64| format!("{bytes:.1}");
    let claimed = bytes.claimed.map_or("-".to_string(), show);
    table.row([name.to_string(), count.to_string(), show(bytes.resident), show(bytes.peak), claimed]);
}
