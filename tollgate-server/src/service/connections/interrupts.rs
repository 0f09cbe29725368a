//! Events that a connection notices between its requests: the next stage of its listener, and the ticks of its watchdog.

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep};

use super::Stage;
use super::activity::TICK;

type Changed = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Wakes the task of a connection. Both sources are registered once with the task, and polled again only after they
/// have fired. So requests pay for neither.
pub(crate) struct Interrupts {
    stage: watch::Receiver<Stage>,
    changed: Changed,
    tick: Pin<Box<Sleep>>,
    is_registered: bool,
}

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interrupt {
    Stage(Stage),
    Tick,
}

impl Interrupts {
    pub(crate) fn new(mut stage: watch::Receiver<Stage>) -> Self {
        // The listener may have begun to stop before the first byte arrived.
        stage.mark_changed();
        Self { changed: changed(&stage), stage, tick: Box::pin(sleep(TICK)), is_registered: false }
    }

    /// Returns the next event. Must always be polled by the same task.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Interrupt> {
        let is_first = !std::mem::replace(&mut self.is_registered, true);
        let is_changed = is_first || self.stage.has_changed().unwrap_or(true);
        if is_changed && self.changed.as_mut().poll(context).is_ready() {
            self.is_registered = false;
            // Without a listener, nothing else would end the connection.
            let is_orphaned = self.stage.has_changed().is_err();
            let stage = if is_orphaned { Stage::Cut } else { *self.stage.borrow_and_update() };
            self.changed = changed(&self.stage);
            return Poll::Ready(Interrupt::Stage(stage));
        }
        if (is_first || self.tick.is_elapsed()) && self.tick.as_mut().poll(context).is_ready() {
            self.is_registered = false;
            self.tick.as_mut().reset(Instant::now() + TICK);
            return Poll::Ready(Interrupt::Tick);
        }
        Poll::Pending
    }
}

fn changed(stage: &watch::Receiver<Stage>) -> Changed {
    let mut stage = stage.clone();
    Box::pin(async move { _ = stage.changed().await })
}
