//! Notifications to a service manager that waits for them, such as systemd with `Type=notify`. Without `NOTIFY_SOCKET` in
//! the environment they do nothing.

use std::time::Duration;

use sd_notify::NotifyState;
use tollgate_telemetry::notice;

/// The time that a stop may take beyond the drain: closing listeners, returning leases, writing the state file.
const STOP_MARGIN: Duration = Duration::from_secs(15);

/// Reports that the server is ready for requests.
pub(crate) fn notify_ready() {
    send(&[NotifyState::Ready]);
}

/// Reports that the rule file is being read again. [`notify_ready`] ends it.
pub(crate) fn notify_reloading() {
    if let Ok(now) = NotifyState::monotonic_usec_now() {
        send(&[NotifyState::Reloading, now]);
    }
}

/// Reports that the server stops, and asks for the time that its requests may take.
pub(crate) fn notify_stopping(drain: Duration) {
    let needed = u32::try_from((drain + STOP_MARGIN).as_micros()).unwrap_or(u32::MAX);
    send(&[NotifyState::Stopping, NotifyState::ExtendTimeoutUsec(needed)]);
}

/// Reports the process that has taken over.
pub(crate) fn notify_successor(process: u32) {
    send(&[NotifyState::MainPid(process)]);
}

fn send(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        notice::warn(format_args!(
            "cannot notify the service manager at NOTIFY_SOCKET: {error}: check NotifyAccess= and the sandbox of the unit"
        ));
    }
}
