//! Several limits on one request, all or nothing: a request that one limit denies takes nothing from the others.

use tollgate::{Decision, FixedWindow, Hit, InvalidLimit, Key, Limit, Limiter, MINUTE, SlidingWindowLog};

fn main() -> Result<(), InvalidLimit> {
    let limiter = Limiter::builder()
        .limit(Limit::new("global", FixedWindow::new(10_000, MINUTE).from_first_request())?)
        .limit(Limit::new("user", SlidingWindowLog::new(100, MINUTE))?)
        .limit(Limit::new("endpoint", SlidingWindowLog::new(10, MINUTE))?)
        .build()?;
    let id = |name| limiter.id(name).expect("the limit is added above");
    let (global, user, endpoint) = (id("global"), id("user"), id("endpoint"));

    let decided_by =
        |decision: &Decision| decision.limit().and_then(|id| limiter.limit(id)).map_or("no limit", Limit::name);

    // Each limit has its own key: everybody, one user, one user at one endpoint.
    for call in 1..=11 {
        let decision = limiter.decide_now(&[
            Hit::new(global, "everybody"),
            Hit::new(user, "ann"),
            Hit::new(endpoint, Key::parts(&["ann", "/search"])),
        ]);
        let verdict = if decision.is_allowed() { "passes" } else { "is denied" };
        println!("call {call} {verdict}; {} has {} left", decided_by(&decision), decision.remaining());
    }

    // A cost of zero reads the state without taking anything.
    for hit in [Hit::new(global, "everybody"), Hit::new(user, "ann")] {
        let decision = limiter.decide_now(&[hit.cost(0)]);
        println!("{} has {} left", decided_by(&decision), decision.remaining());
    }
    Ok(())
}
