//! The options of benchmarks that start servers: which parts to measure, for how long, and which tollgate.

use std::path::PathBuf;

use clap::ValueEnum;

/// Options on the command line. `P` are the parts of the benchmark.
#[derive(clap::Args)]
pub(crate) struct Options<P: ValueEnum + Clone + Send + Sync + 'static> {
    /// End in a few minutes: fewer and shorter rounds
    #[arg(long)]
    pub(crate) quick: bool,

    /// Measure only these
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<P>,

    /// A built tollgate, instead of the one of this workspace
    #[arg(long, value_name = "PATH")]
    pub(crate) tollgate: Option<PathBuf>,
}

impl<P: ValueEnum + Clone + PartialEq + Send + Sync + 'static> Options<P> {
    /// Returns whether to measure a part.
    pub(crate) fn wants(&self, part: P) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }
}

/// The extent of the measurements. Seconds are whole, because the load generators accept no others.
#[derive(Clone, Copy)]
pub(crate) struct Scale {
    pub(crate) rounds: usize,
    pub(crate) warm_up_s: u64,
    pub(crate) slice_s: u64,
}

impl Scale {
    pub(crate) const FULL: Self = Self { rounds: 5, warm_up_s: 1, slice_s: 3 };
}
