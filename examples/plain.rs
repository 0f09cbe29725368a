//! The smallest use: one limit, checked before the work is done.

use tollgate::{InvalidLimit, Limit, Limiter, Rate, TokenBucket};

fn main() -> Result<(), InvalidLimit> {
    let limiter = Limiter::new(Limit::new("greetings", TokenBucket::new(3, Rate::per_minute(3)))?);

    for call in 1..=5 {
        let decision = limiter.check("ann");
        if decision.is_allowed() {
            println!("call {call}: hello, ann ({} left)", decision.remaining());
        } else if let Some(wait) = decision.retry_after() {
            println!("call {call}: too many; passes in {:.0} s", wait.as_secs_f64().ceil());
        }
    }
    Ok(())
}
