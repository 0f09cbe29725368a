//! The store on Redis, against real servers that these tests start and stop.

mod leases;
mod rule_sets;
mod servers;
mod traces;
