//! The gateway as operators see it: its metrics, its access log, its health, and the files that deploy it.

mod access_log;
mod admin;
mod admin_access;
mod admin_api;
mod admin_client;
mod admin_fleet;
mod deployment;
mod metrics;
mod monitoring;
mod reservations;
mod restart;
mod restart_load;
mod service_manager;
mod successor;
mod top;
#[cfg(feature = "otlp")]
mod traces;
