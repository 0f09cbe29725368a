//! Writes metric families to the page.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, NoLabelSet};
use prometheus_client::metrics::MetricType;

/// The page under construction. The encoder appends `_total` to the names of counters.
pub struct Page<'a>(DescriptorEncoder<'a>);

impl<'a> Page<'a> {
    /// Starts a page.
    pub fn new(encoder: DescriptorEncoder<'a>) -> Self {
        Self(encoder)
    }

    /// Writes a counter without labels.
    pub fn counter(&mut self, name: &str, help: &str, count: u64) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        family.encode_counter::<NoLabelSet, _, u64>(&count, None)
    }

    /// Writes a counter of seconds without labels.
    pub fn seconds_counter(&mut self, name: &str, help: &str, seconds: f64) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        family.encode_counter::<NoLabelSet, _, u64>(&seconds, None)
    }

    /// Writes a counter with labels. A row has the labels and the count.
    pub fn counters<Labels: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl Iterator<Item = (Labels, u64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, count) in rows {
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&count, None)?;
        }
        Ok(())
    }

    /// Writes a gauge without labels.
    pub fn gauge(&mut self, name: &str, help: &str, value: i64) -> fmt::Result {
        self.0.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)
    }

    /// Writes a gauge with labels. A row has the labels and the value.
    pub fn gauges<Labels: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl Iterator<Item = (Labels, i64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in rows {
            family.encode_family(&labels)?.encode_gauge(&value)?;
        }
        Ok(())
    }

    /// Writes a histogram without labels: the sum, and the number of values in each bucket.
    pub fn histogram(&mut self, name: &str, help: &str, sum: f64, buckets: &[(f64, u64)]) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        let count = buckets.iter().map(|(_, count)| count).sum();
        family.encode_histogram::<NoLabelSet>(sum, count, buckets, None)
    }

    /// Writes a histogram with labels. A row has the labels, the sum, and the number of values in each bucket.
    pub fn histograms<Labels: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl Iterator<Item = (Labels, f64, Vec<(f64, u64)>)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (labels, sum, buckets) in rows {
            let count = buckets.iter().map(|(_, count)| count).sum();
            family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        }
        Ok(())
    }
}
