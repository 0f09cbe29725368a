//! One limiter shared by threads: each user has a quota, and all threads together admit exactly that.

use std::thread;

use tollgate::{InvalidLimit, Limit, Limiter, MINUTE, SlidingWindowLog};

const USERS: [&str; 3] = ["ann", "bob", "eve"];
const THREADS: usize = 4;
const CALLS_PER_THREAD: usize = 50;

fn main() -> Result<(), InvalidLimit> {
    let limiter = Limiter::new(Limit::new("per-user", SlidingWindowLog::new(20, MINUTE))?);

    let workers = (0..THREADS).map(|_| {
        // Clones share the limiter and all its counts.
        let limiter = limiter.clone();
        thread::spawn(move || {
            USERS.map(|user| (0..CALLS_PER_THREAD).filter(|_| limiter.check(user).is_allowed()).count())
        })
    });

    let mut passed = [0; USERS.len()];
    for worker in workers.collect::<Vec<_>>() {
        let counts = worker.join().expect("the worker does not panic");
        passed.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    for (user, passed) in USERS.iter().zip(passed) {
        println!("{user}: {passed} of {} calls passed", THREADS * CALLS_PER_THREAD);
    }
    Ok(())
}
