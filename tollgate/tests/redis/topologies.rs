//! Every way Redis is run: alone with passwords and TLS, behind sentinels, as a cluster; and Valkey.

mod cluster;
mod resharding;
mod sentinel;
mod single;
