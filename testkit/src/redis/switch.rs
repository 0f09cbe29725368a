//! An address that leads to one of several servers, or to none: a failover by DNS or a virtual IP address, or a
//! partition.

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// An address that leads to one of several servers, or to none.
pub struct Switch {
    port: u16,
    target: watch::Sender<Option<u16>>,
}

impl Switch {
    /// Leads to the server on that port. Ends with the runtime of the test.
    pub async fn to(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let (target, targets) = watch::channel(Some(server));
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(client, targets.clone()));
            }
        });
        Self { port, target }
    }

    /// The URL for clients.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Closes all connections. New ones lead to that server, or are closed at once.
    pub fn turn(&self, server: Option<u16>) {
        self.target.send_replace(server);
    }
}

async fn pass(mut client: TcpStream, mut targets: watch::Receiver<Option<u16>>) {
    let Some(target) = *targets.borrow_and_update() else { return };
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", target)).await else { return };
    tokio::select! {
        _ = copy_bidirectional(&mut client, &mut server) => {}
        _ = targets.changed() => {}
    }
}
