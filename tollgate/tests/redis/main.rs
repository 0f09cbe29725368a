//! The store on Redis, against real servers that these tests start and stop.

mod acl;
mod batching;
mod changing_limits;
mod compact;
mod conformance;
mod exactness;
mod failures;
mod fleet;
mod hostile;
mod leases;
mod load;
mod long_logs;
#[path = "../common/rig.rs"]
mod rig;
mod rule_sets;
mod stores;
mod topologies;
mod traces;
mod variants;
mod waiting;
