//! Properties of every algorithm, for all numbers, requests and clocks.

#[path = "../common/mod.rs"]
mod common;

mod bounds;
mod changes;
mod clock_steps;
mod crowded;
mod drift;
mod promises;
mod refunds;

use common::Rig;
use common::plan::Plan;
use proptest::prelude::*;

/// Units that were taken, and the time.
#[derive(Clone, Copy, Debug)]
struct Charge {
    at: u64,
    cost: u64,
}

/// A request that was sent, so that it can be replayed with a new limiter.
#[derive(Clone, Copy, Debug)]
struct Request {
    at: u64,
    cost: u64,
}

/// Returns a new limiter that has decided these requests.
fn replay(plan: &Plan, start: u64, requests: &[Request]) -> Rig {
    let limit = plan.limit().expect("a plan that was accepted before");
    let rig = Rig::new(limit, start);
    for request in requests {
        rig.ask(request.at, request.cost);
    }
    rig
}

/// Returns a limiter for the plan, or a rejected case if the library rejects the numbers.
fn accepted(plan: &Plan, start: u64) -> Result<Rig, TestCaseError> {
    match plan.limit() {
        Ok(limit) => Ok(Rig::new(limit, start)),
        Err(error) => Err(TestCaseError::reject(error.to_string())),
    }
}
