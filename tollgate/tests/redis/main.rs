//! The store on Redis, against real servers that these tests start and stop.

mod servers;
mod traces;
