//! What is promised of every algorithm, whatever the numbers, the requests and the clock.

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

/// Quota that was taken, and when.
#[derive(Clone, Copy, Debug)]
struct Charge {
    at: u64,
    cost: u64,
}

/// A request as it was sent, so that it can be sent again to a fresh limiter.
#[derive(Clone, Copy, Debug)]
struct Request {
    at: u64,
    cost: u64,
}

/// A fresh limiter that has seen these requests.
fn replay(plan: &Plan, start: u64, requests: &[Request]) -> Rig {
    let limit = plan.limit().expect("a plan that was accepted before");
    let rig = Rig::new(limit, start);
    for request in requests {
        rig.ask(request.at, request.cost);
    }
    rig
}

/// A limiter for the plan, or a rejected case where the library refuses the numbers.
fn accepted(plan: &Plan, start: u64) -> Result<Rig, TestCaseError> {
    match plan.limit() {
        Ok(limit) => Ok(Rig::new(limit, start)),
        Err(error) => Err(TestCaseError::reject(error.to_string())),
    }
}
