//! Every way Redis is run: alone with passwords and TLS, behind sentinels, as a cluster; and what can happen to each.

mod cluster;
mod dead_shard;
mod exactly_once;
mod hung;
mod resharding;
mod sentinel;
mod single;
mod slow;
