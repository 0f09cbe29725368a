//! Accepts connections and sees to their end.
//!
//! No client can hold a connection for ever, whatever it sends or leaves unsent, nor take more of them than the
//! process can bear. The body of a request is read, and timed, by its handler.

use std::io::ErrorKind;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{sleep, timeout};

/// Well below the 1,024 descriptors that a process may usually open. Further clients wait in the kernel's queue.
const MAX_CONNECTIONS: u32 = 512;

/// From the first moment of a connection, or the end of the last answer, to the end of the next head. So it
/// bounds idle connections too.
const HEAD_DEADLINE: Duration = Duration::from_secs(10);

/// A head of 100 headers fits; 512 connections cannot take more than 32 MiB of buffers.
const MAX_HEAD_BYTES: usize = 64 * 1024;

/// The only bound on a client that sends well but does not read its answers, so it must not be hours. A client
/// that behaves reconnects once in this time and does not notice.
const MAX_CONNECTION_AGE: Duration = Duration::from_secs(600);

/// For what is under way when the server or the connection has to end. Container managers kill after 10 s.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);

/// A process out of descriptors gets one back soon; until then, trying again at once would only burn the CPU.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until `shutdown` ends, then lets what is under way finish, for at most [`DRAIN_DEADLINE`].
pub(crate) async fn serve(listener: TcpListener, router: Router, shutdown: impl Future<Output = ()>) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS as usize));
    let (serving, stopped) = watch::channel(());
    let mut shutdown = pin!(shutdown);
    loop {
        let (stream, slot) = tokio::select! {
            accepted = accept(&listener, &slots) => accepted,
            () = shutdown.as_mut() => break,
        };
        let (router, mut stopped) = (router.clone(), stopped.clone());
        tokio::spawn(async move {
            hold(stream, router, async move { _ = stopped.changed().await }).await;
            drop(slot);
        });
    }
    drop(serving);
    drop(listener);
    // Every connection gives its slot back when it ends, so all slots together are the end of the last one.
    _ = slots.acquire_many(MAX_CONNECTIONS).await;
}

/// The next connection, and the slot that it takes up.
async fn accept(listener: &TcpListener, slots: &Arc<Semaphore>) -> (TcpStream, OwnedSemaphorePermit) {
    let slot = Arc::clone(slots).acquire_owned().await.expect("the slots are never closed");
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // An answer is one small write; waiting to fill a packet would only delay it.
                _ = stream.set_nodelay(true);
                return (stream, slot);
            }
            // Only this client is gone; the next may be waiting.
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
            Err(_) => sleep(ACCEPT_PAUSE).await,
        }
    }
}

/// Serves one connection until the client or a deadline ends it, or `stop` asks for its end.
async fn hold<Io>(io: Io, router: Router, stop: impl Future<Output = ()>)
where
    Io: AsyncRead + AsyncWrite + Unpin,
{
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_DEADLINE)
            .max_buf_size(MAX_HEAD_BYTES)
            .serve_connection(TokioIo::new(io), TowerToHyperService::new(router))
    );
    // Errors of a connection are the client's: it went away, or did not speak HTTP. Nobody is left to tell.
    tokio::select! {
        // A stop is seen first, so that no answer after it promises to keep the connection.
        biased;
        () = stop => {}
        () = sleep(MAX_CONNECTION_AGE) => {}
        _ = connection.as_mut() => return,
    }
    connection.as_mut().graceful_shutdown();
    _ = timeout(DRAIN_DEADLINE, connection).await;
}

/// The time of these tests is tokio's own, paused: it passes at once whenever everybody waits.
#[cfg(test)]
mod tests {
    use std::future::pending;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::time::Instant;

    use super::*;

    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: tollgate\r\n\r\n";

    fn connect(stop: impl Future<Output = ()> + Send + 'static, buffer_bytes: usize) -> DuplexStream {
        let (client, server) = duplex(buffer_bytes);
        let router = Router::new().route("/", get(|| async { "x".repeat(1024) }));
        tokio::spawn(hold(server, router, stop));
        client
    }

    async fn read_answer(client: &mut DuplexStream) -> String {
        let mut answer = vec![0; 4096];
        let length = client.read(&mut answer).await.unwrap();
        String::from_utf8(answer[..length].to_vec()).unwrap()
    }

    /// How long until the server ends the connection, whatever it still sends.
    async fn until_closed(mut client: DuplexStream) -> Duration {
        let start = Instant::now();
        _ = client.read_to_end(&mut Vec::new()).await;
        start.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn silent_client_is_cut_off_at_the_head_deadline() {
        assert_eq!(until_closed(connect(pending(), 8192)).await, HEAD_DEADLINE);
    }

    #[tokio::test(start_paused = true)]
    async fn trickled_head_is_cut_off_at_the_head_deadline() {
        let mut client = connect(pending(), 8192);
        let start = Instant::now();
        while client.write_all(b"G").await.is_ok() {
            sleep(Duration::from_millis(700)).await;
        }
        assert!((HEAD_DEADLINE..HEAD_DEADLINE + Duration::from_millis(700)).contains(&start.elapsed()));
    }

    #[tokio::test(start_paused = true)]
    async fn idle_client_is_cut_off_at_the_head_deadline_after_its_last_answer() {
        let mut client = connect(pending(), 8192);
        sleep(Duration::from_secs(5)).await;
        client.write_all(REQUEST).await.unwrap();
        assert!(read_answer(&mut client).await.starts_with("HTTP/1.1 200 OK"));
        assert_eq!(until_closed(client).await, HEAD_DEADLINE);
    }

    #[tokio::test(start_paused = true)]
    async fn client_that_never_reads_is_cut_off_at_the_greatest_age() {
        // Smaller than one answer, so the server can never finish to write it.
        let mut client = connect(pending(), 256);
        let start = Instant::now();
        while client.write_all(REQUEST).await.is_ok() {}
        assert_eq!(start.elapsed(), MAX_CONNECTION_AGE + DRAIN_DEADLINE);
    }

    #[tokio::test(start_paused = true)]
    async fn busy_client_is_asked_to_reconnect_at_the_greatest_age() {
        let mut client = connect(pending(), 8192);
        let start = Instant::now();
        loop {
            if client.write_all(REQUEST).await.is_err() {
                break;
            }
            let answer = read_answer(&mut client).await;
            if answer.is_empty() {
                break;
            }
            assert!(answer.starts_with("HTTP/1.1 200 OK"));
            sleep(Duration::from_secs(7)).await;
        }
        assert!((MAX_CONNECTION_AGE..MAX_CONNECTION_AGE + Duration::from_secs(8)).contains(&start.elapsed()));
    }

    #[tokio::test(start_paused = true)]
    async fn idle_client_does_not_hold_up_a_stop() {
        let mut client = connect(sleep(Duration::from_secs(3)), 8192);
        client.write_all(REQUEST).await.unwrap();
        read_answer(&mut client).await;
        assert_eq!(until_closed(client).await, Duration::from_secs(3));
    }

    #[tokio::test(start_paused = true)]
    async fn client_that_sent_nothing_does_not_hold_up_a_stop() {
        assert_eq!(until_closed(connect(sleep(Duration::from_secs(3)), 8192)).await, Duration::from_secs(3));
    }
}
