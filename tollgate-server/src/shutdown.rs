//! The signals that end the server: SIGINT from a terminal, SIGTERM from a service manager.

use std::io;

/// Installs the signal handlers now. The future resolves at the first signal.
#[cfg(unix)]
pub(crate) fn signal() -> io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};

    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

/// Without Unix signals, only Ctrl-C ends the server.
#[cfg(not(unix))]
pub(crate) fn signal() -> io::Result<impl Future<Output = ()>> {
    Ok(async {
        // Without a handler there is no way to ask for the end, so the server keeps running.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    })
}
