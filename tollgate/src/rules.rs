//! Rules: which limits a request meets, by which keys, at what cost.

mod client;
#[cfg_attr(not(test), expect(dead_code, reason = "key parts, which ask for it, are still to come"))]
mod cookies;
mod facts;
#[cfg(feature = "file")]
pub mod file;
#[cfg_attr(not(test), expect(dead_code, reason = "key parts, which ask for it, are still to come"))]
mod ip_group;
mod networks;
#[cfg_attr(not(test), expect(dead_code, reason = "key parts, which ask for it, are still to come"))]
mod query;

pub use self::client::{ForwardingHeader, TrustedProxies};
pub use self::facts::Facts;
pub use self::networks::{InvalidNetwork, Networks};
