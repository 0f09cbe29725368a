//! The end of a connection whose client certificate has ended before it.

use tokio::sync::watch;
use tokio::time::sleep;
use tollgate_net::tls::{CERTIFICATE_GRACE, CertificateLease};

use super::Stage;

/// Returns the stage of a connection with a client certificate: that of its listener, or [`Stage::Ending`] once the
/// certificate has ended. The future has to be polled meanwhile. It resolves when the connection has to be cut.
pub(super) fn stage(
    lease: Box<CertificateLease>,
    mut listener: watch::Receiver<Stage>,
) -> (impl Future<Output = ()>, watch::Receiver<Stage>) {
    let (sender, stage) = watch::channel(*listener.borrow_and_update());
    let ends = async move {
        let follow = async {
            while listener.changed().await.is_ok() {
                let next = *listener.borrow_and_update();
                sender.send_if_modified(|stage| next > std::mem::replace(stage, next.max(*stage)));
            }
        };
        let end = async {
            lease.ended().await;
            sender.send_if_modified(|stage| Stage::Ending > std::mem::replace(stage, Stage::Ending.max(*stage)));
            sleep(CERTIFICATE_GRACE).await;
        };
        tokio::select! {
            // Without a listener, nothing else would end the connection.
            () = follow => {}
            () = end => {}
        }
    };
    (ends, stage)
}
