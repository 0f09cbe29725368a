//! Finds the master through its sentinels.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::RedisError;
use tokio::time::timeout;

use super::StoreError;
use super::dial::{Address, Dialer};
use super::node::{CONNECT_LIMIT, unavailable};

/// Timeout for other sentinels once one has named a server.
const OTHERS_WITHIN: Duration = Duration::from_millis(500);

pub(super) struct Sentinels {
    addresses: Vec<Address>,
    service: String,
    dialer: Dialer,
    /// The server that was returned last, until it is confirmed.
    tried: Mutex<Option<Address>>,
}

impl Sentinels {
    pub(super) fn new(addresses: Vec<Address>, service: String, dialer: Dialer) -> Self {
        Self { addresses, service, dialer, tried: Mutex::new(None) }
    }

    /// Returns the master's name.
    pub(super) fn service(&self) -> &str {
        &self.service
    }

    /// Returns the address of the master. Queries all sentinels at once, so that one that hangs causes no delay.
    ///
    /// The server that most of them name is the master: a sentinel that is partitioned from the others may name an
    /// earlier master. Right after a failover it is the other way round: most sentinels may not know the new master
    /// yet. So if the server that was returned last is not [confirmed](Self::confirm), another one is returned next, if
    /// a sentinel names one.
    pub(super) async fn master(&self) -> Result<Address, StoreError> {
        let mut replies: FuturesUnordered<_> = self.addresses.iter().map(|sentinel| self.query(sentinel)).collect();
        let (mut named, mut last): (Vec<(Address, usize)>, _) = (Vec::new(), None);
        let tried = self.tried();
        loop {
            let limit = if named.is_empty() { CONNECT_LIMIT } else { OTHERS_WITHIN };
            let Ok(Some(reply)) = timeout(limit, replies.next()).await else { break };
            match reply {
                Ok(Some(address)) => {
                    let votes = match named.iter_mut().find(|(other, _)| *other == address) {
                        Some((_, votes)) => {
                            *votes += 1;
                            *votes
                        }
                        None => {
                            named.push((address.clone(), 1));
                            1
                        }
                    };
                    if votes > self.addresses.len() / 2 && tried.as_ref() != Some(&address) {
                        return Ok(self.try_next(address));
                    }
                }
                Ok(None) => {
                    let service = &self.service;
                    last = Some(StoreError::unavailable(&format!("the sentinels know no master named {service}")));
                }
                Err(error) => last = Some(unavailable(&error)),
            }
        }
        let best = named.into_iter().max_by_key(|(address, votes)| (tried.as_ref() != Some(address), *votes));
        match best {
            Some((address, _)) => Ok(self.try_next(address)),
            None => Err(last.unwrap_or_else(|| StoreError::unavailable("no sentinel answers"))),
        }
    }

    /// Confirms that the server that was returned last is a master that replies.
    pub(super) fn confirm(&self) {
        *self.tried.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn tried(&self) -> Option<Address> {
        self.tried.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn try_next(&self, address: Address) -> Address {
        *self.tried.lock().unwrap_or_else(PoisonError::into_inner) = Some(address.clone());
        address
    }

    async fn query(&self, sentinel: &Address) -> Result<Option<Address>, RedisError> {
        let connection = self.dialer.connect(sentinel).await?;
        let mut command = redis::cmd("SENTINEL");
        command.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.service);
        let found: Option<(String, u16)> = redis::from_redis_value(connection.run(&command).await?)?;
        Ok(found.map(|(host, port)| Address::tcp(host, port)))
    }
}
