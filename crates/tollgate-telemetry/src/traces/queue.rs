//! The queue between requests and the collector: bounded, never waited for, and counted where spans are lost.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use opentelemetry::Context;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter, SpanProcessor};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};

use crate::notice;

/// The most spans in the queue, unless `OTEL_BSP_MAX_QUEUE_SIZE` says otherwise. Further spans are dropped.
const MAX_QUEUED: usize = 2048;

/// The most spans in one message.
const MAX_BATCH: usize = 512;

/// How long spans are gathered, unless `OTEL_BSP_SCHEDULE_DELAY` says otherwise.
const GATHER: Duration = Duration::from_secs(5);

/// The longest wait for the last message at exit.
const END_DEADLINE: Duration = Duration::from_secs(2);

/// The time between two warnings about a collector that fails.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// Spans by what became of them.
pub(super) static EXPORTED: AtomicU64 = AtomicU64::new(0);
pub(super) static DROPPED: AtomicU64 = AtomicU64::new(0);
pub(super) static FAILED: AtomicU64 = AtomicU64::new(0);

/// Puts ended spans into the queue.
#[derive(Debug)]
pub(super) struct Queue(mpsc::Sender<SpanData>);

/// The task that exports spans.
pub struct Exporting {
    stop: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<()>,
}

impl Queue {
    /// Starts the task that sends spans with `exporter`.
    pub(super) fn start(exporter: impl SpanExporter + 'static) -> (Self, Exporting) {
        let (sender, receiver) = mpsc::channel(number("OTEL_BSP_MAX_QUEUE_SIZE").unwrap_or(MAX_QUEUED).max(1));
        let gather = number("OTEL_BSP_SCHEDULE_DELAY").map_or(GATHER, |millis| Duration::from_millis(millis as u64));
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(export(exporter, receiver, gather, stopped));
        (Self(sender), Exporting { stop, task })
    }
}

fn number(variable: &str) -> Option<usize> {
    std::env::var(variable).ok()?.parse().ok()
}

impl SpanProcessor for Queue {
    fn on_start(&self, _span: &mut Span, _context: &Context) {}

    fn on_end(&self, span: SpanData) {
        if self.0.try_send(span).is_err() {
            DROPPED.fetch_add(1, Relaxed);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _timeout: Duration) -> OTelSdkResult {
        Ok(())
    }
}

impl Exporting {
    /// Sends the last spans, and ends.
    pub async fn end(self) {
        drop(self.stop);
        _ = timeout(END_DEADLINE, self.task).await;
    }
}

async fn export(
    exporter: impl SpanExporter,
    mut spans: mpsc::Receiver<SpanData>,
    gather: Duration,
    mut stopped: oneshot::Receiver<()>,
) {
    let mut is_stopped = false;
    let mut quiet_until = None;
    loop {
        let mut batch = Vec::new();
        if is_stopped {
            spans.recv_many(&mut batch, MAX_BATCH).await;
        } else {
            tokio::select! {
                _ = gather_batch(&mut spans, &mut batch, gather) => {}
                _ = &mut stopped => {
                    is_stopped = true;
                    // Spans that end from now on are counted as dropped.
                    spans.close();
                }
            }
        }
        if batch.is_empty() {
            match is_stopped && spans.is_empty() {
                true => return,
                false => continue,
            }
        }
        let count = batch.len() as u64;
        match exporter.export(batch).await {
            Ok(()) => _ = EXPORTED.fetch_add(count, Relaxed),
            Err(error) => {
                FAILED.fetch_add(count, Relaxed);
                let now = tokio::time::Instant::now();
                if quiet_until.is_none_or(|until| until <= now) {
                    notice::warn(format_args!(
                        "{count} spans were lost, because the collector did not take them: {error}: check OTEL_EXPORTER_OTLP_ENDPOINT and the collector"
                    ));
                    quiet_until = Some(now + WARN_INTERVAL);
                }
            }
        }
    }
}

/// Waits for a span, and then for more until the batch is full or the time is over. Spans stay in the batch if the wait is
/// given up.
async fn gather_batch(spans: &mut mpsc::Receiver<SpanData>, batch: &mut Vec<SpanData>, gather: Duration) {
    spans.recv_many(batch, MAX_BATCH).await;
    let mut over = std::pin::pin!(sleep(gather));
    while batch.len() < MAX_BATCH {
        let room = MAX_BATCH - batch.len();
        tokio::select! {
            () = &mut over => return,
            count = spans.recv_many(batch, room) => if count == 0 { return },
        }
    }
}
