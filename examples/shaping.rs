//! Shaping instead of refusing: each job waits until it may run, up to a maximum wait.

use std::time::Duration;

use tokio::time::Instant;
use tollgate::{InvalidLimit, Limit, Limiter, Rate, TokenBucket};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), InvalidLimit> {
    let limiter = Limiter::new(Limit::new("mail", TokenBucket::new(1, Rate::per_second(10)))?);
    let start = Instant::now();

    for job in 1..=5 {
        match limiter.until_ready("smtp", Duration::from_secs(10)).await {
            Ok(_) => println!("job {job} left after {} ms", start.elapsed().as_millis()),
            Err(_) => println!("job {job} gave up"),
        }
    }
    // The next slot is 100 ms away, so this call fails at once instead of waiting in vain.
    match limiter.until_ready("smtp", Duration::from_millis(1)).await {
        Ok(_) => println!("the impatient job left"),
        Err(_) => println!("the impatient job gave up"),
    }
    Ok(())
}
