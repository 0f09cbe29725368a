//! One suite, every store: what the specification promises of any store, asked of memory and of Redis alike.
//! Seconds count from a whole hour of the epoch, and the test moves the time of both.

mod bans;
mod generic;
mod operations;
mod rig;
mod vectors;
mod waits;
