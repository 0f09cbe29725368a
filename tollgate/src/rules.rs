//! Rules: which limits a request meets, by which keys, at what cost.

mod facts;
#[cfg(feature = "file")]
pub mod file;

pub use self::facts::Facts;
