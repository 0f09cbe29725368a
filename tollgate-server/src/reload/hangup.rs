//! SIGHUP, which asks the server to read its rule file again.

use std::io;

#[cfg(unix)]
pub(crate) struct Hangup(tokio::signal::unix::Signal);

#[cfg(unix)]
impl Hangup {
    /// Installs the signal handler.
    pub(crate) fn listen() -> io::Result<Self> {
        tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup()).map(Self)
    }

    pub(super) async fn received(&mut self) {
        if self.0.recv().await.is_none() {
            std::future::pending().await
        }
    }
}

/// Without Unix signals, SIGHUP is never received.
#[cfg(not(unix))]
pub(crate) struct Hangup;

#[cfg(not(unix))]
impl Hangup {
    pub(crate) fn listen() -> io::Result<Self> {
        Ok(Self)
    }

    pub(super) async fn received(&mut self) {
        std::future::pending().await
    }
}
