//! The `tollgate` command as its users see it: a separate process, used over real sockets.

#[path = "../../src/service/proto.rs"]
mod proto;

mod answers;
mod authorize;
mod configuration;
mod connections;
mod explaining;
mod files;
mod fleet;
mod grpc;
mod init;
mod learning;
mod listeners;
mod logs;
mod openapi;
mod operations;
mod refusals;
mod reloading;
mod resp;
mod rule_file;
mod simulating;
mod start_and_stop;
mod state;
mod tls;
mod topologies;
mod validating;
