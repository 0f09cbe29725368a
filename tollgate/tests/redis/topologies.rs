//! Every way Redis is run: alone with passwords and TLS, behind sentinels, as a cluster; and Valkey.

mod cluster;
mod exactly_once;
mod hung;
mod resharding;
mod sentinel;
mod single;
