//! Every topology of Redis: a single server with passwords and TLS, sentinels, a cluster; and the failures of each.

mod cluster;
mod dead_shard;
mod every;
mod exactly_once;
mod hung;
mod resharding;
mod sentinel;
mod single;
mod slow;
mod tls;
