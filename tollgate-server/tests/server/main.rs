//! The `tollgate` command as its users meet it: a process of its own, asked over real sockets.

mod client;
mod process;

mod answers;
mod connections;
mod refusals;
mod start_and_stop;
