//! Sentinels, which know where the master is.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::RedisError;
use tokio::time::timeout;

use super::StoreError;
use super::dial::{Address, Dialer};
use super::node::{CONNECT_LIMIT, unavailable};

/// How long to wait for other sentinels once one has named the server that has failed.
const OTHERS_WITHIN: Duration = Duration::from_millis(100);

pub(super) struct Sentinels {
    addresses: Vec<Address>,
    service: String,
    dialer: Dialer,
}

impl Sentinels {
    pub(super) fn new(addresses: Vec<Address>, service: String, dialer: Dialer) -> Self {
        Self { addresses, service, dialer }
    }

    /// The master's name.
    pub(super) fn service(&self) -> &str {
        &self.service
    }

    /// Returns where the master is. All sentinels are asked at once, so that none that hangs is waited for.
    ///
    /// `before` is where it was: that has failed, or this would not be asked. So a sentinel that names another server is
    /// believed first: the others may not have heard of a failover yet.
    pub(super) async fn master(&self, before: Option<&Address>) -> Result<Address, StoreError> {
        let mut answers: FuturesUnordered<_> = self.addresses.iter().map(|sentinel| self.ask(sentinel)).collect();
        let (mut same, mut last) = (None, None);
        loop {
            let patience = if same.is_some() { OTHERS_WITHIN } else { CONNECT_LIMIT };
            let Ok(Some(answer)) = timeout(patience, answers.next()).await else { break };
            match answer {
                Ok(Some(address)) if before.is_some_and(|before| *before == address) => same = Some(address),
                Ok(Some(address)) => return Ok(address),
                Ok(None) => {
                    let service = &self.service;
                    last = Some(StoreError::unavailable(&format!("the sentinels know no master named {service}")));
                }
                Err(error) => last = Some(unavailable(&error)),
            }
        }
        same.ok_or_else(|| last.unwrap_or_else(|| StoreError::unavailable("no sentinel answers")))
    }

    async fn ask(&self, sentinel: &Address) -> Result<Option<Address>, RedisError> {
        let connection = self.dialer.connect(sentinel).await?;
        let mut command = redis::cmd("SENTINEL");
        command.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.service);
        let found: Option<(String, u16)> = redis::from_redis_value(connection.run(&command).await?)?;
        Ok(found.map(|(host, port)| Address::tcp(host, port)))
    }
}
