//! One suite for every store: the guarantees of the specification, tested in memory and on Redis.
//! Seconds count from a whole hour of the epoch, and the test moves the time of both.

mod bans;
mod debts;
mod generic;
mod operations;
mod waits;

use crate::rig;
