//! Properties of every simulation, whatever the limits and the traffic.

use std::time::Duration;

use proptest::prelude::*;
use tollgate::{MINUTE, Rate, SECOND};

use super::limits::{Overflow, Quota, SimulatedLimit};
use super::report::{COLUMNS, Report};
use super::traffic::{Pattern, Traffic};
use super::{SimulationError, html, simulate, svg};

fn pattern() -> impl Strategy<Value = Pattern> {
    let rate = || (1..200_u64).prop_map(Rate::per_second);
    let every = || (1..40_u64).prop_map(Duration::from_secs);
    prop_oneof![
        rate().prop_map(|rate| Pattern::Steady { rate }),
        (1..300_u64, every()).prop_map(|(size, every)| Pattern::Burst { size, every }),
        (1..300_u64, every()).prop_map(|(size, window)| Pattern::Boundary { size, window }),
        rate().prop_map(|rate| Pattern::Ramp { rate }),
        (rate(), every()).prop_map(|(rate, every)| Pattern::OnOff { rate, every }),
        (rate(), any::<u64>()).prop_map(|(rate, seed)| Pattern::Poisson { rate, seed }),
        (1..20_u64).prop_map(|count| Pattern::Attack { rate: Rate::per_second(count) }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_request_is_admitted_or_denied_and_no_limit_exceeds_its_bound(
        pattern in pattern(),
        limit in 1..150_u64,
        window in 1..30_u64,
        segments in 1..7_u32,
        queues in any::<bool>(),
    ) {
        let overflow = if queues { Overflow::Queue } else { Overflow::Reject };
        let quota = Quota { segments, overflow, ..Quota::new(limit, Duration::from_secs(window)) };
        let report = simulate(&quota.all().unwrap(), &Traffic::generated(pattern, MINUTE, 1)).unwrap();
        for one in &report.limits {
            let name = &one.name;
            prop_assert_eq!(one.admitted + one.denied, report.offered, "{}", name);
            prop_assert_eq!(one.admitted_by_column.iter().sum::<u64>() + one.queued_at_end, one.admitted, "{}", name);
            prop_assert!(one.queued_at_end == 0 || (queues && one.algorithm == "leaky_bucket"), "{}", name);
            prop_assert_eq!(one.denied_by_column.iter().sum::<u64>(), one.denied, "{}", name);
            prop_assert_eq!(one.remaining.len(), COLUMNS, "{}", name);
            prop_assert!(one.remaining.iter().all(|left| *left <= one.quota), "{}", name);
            // docs/algorithms.md: buckets admit their capacity and a window's refill, windows twice the limit, logs the
            // limit. A queue releases one per `1/leak`.
            let bound = match one.algorithm {
                "sliding_window_log" => limit,
                "leaky_bucket" if queues => limit + 1,
                _ => 2 * limit,
            };
            prop_assert!(one.worst_window <= bound, "{} admitted {} in a window", name, one.worst_window);
            prop_assert!(one.largest_burst <= one.worst_window, "{}", name);
            prop_assert!(one.wait_p50 <= one.wait_p99, "{}", name);
        }
        prop_assert_eq!(report.offered_by_column.iter().sum::<u64>(), report.offered);
    }
}

fn steady(count: u64, span: Duration) -> Traffic {
    Traffic::generated(Pattern::Steady { rate: Rate::per_second(count) }, span, 1)
}

fn five() -> Vec<SimulatedLimit> {
    Quota::new(100, MINUTE).all().unwrap()
}

fn with_named_limit(name: &str) -> Report {
    let limit =
        SimulatedLimit::new((name, "fixed_window"), "5 per 60 s", tollgate::FixedWindow::new(5, MINUTE), MINUTE);
    simulate(&[limit.unwrap()], &steady(1, MINUTE)).unwrap()
}

#[test]
fn waits_are_those_of_retry_after_and_of_the_queue() {
    let report = simulate(&five(), &steady(10, MINUTE)).unwrap();
    let of = |name: &str| report.limits.iter().find(|limit| limit.name == name).unwrap();
    // A token returns every 0.6 s, so nobody waits longer.
    assert!(of("token_bucket").wait_p99.unwrap() <= Duration::from_millis(600));
    // The last request of the first minute was denied at 59.9 s, and the first one at 10 s.
    assert_eq!(of("fixed_window").wait_p99.unwrap(), Duration::from_millis(49_500));
    assert!(of("leaky_bucket").wait_p99.unwrap() > Duration::from_secs(30), "the queue fills");
    assert!(of("leaky_bucket").largest_burst == 1, "a queue has no bursts");
}

#[test]
fn too_much_is_refused_with_the_way_out() {
    let error = simulate(&five(), &steady(1_000_000, MINUTE)).unwrap_err();
    assert!(matches!(error, SimulationError::TooManyRequests(_)));
    assert_eq!(error.to_string(), "the traffic has more than 5000000 requests: make it shorter or slower");
    let many: Vec<SimulatedLimit> = (0..5).flat_map(|_| five()).collect();
    assert!(matches!(simulate(&many, &steady(1, SECOND)), Err(SimulationError::TooManyLimits(25))));
}

#[test]
fn a_cost_above_the_quota_never_fits() {
    let report = simulate(&five(), &Traffic::generated(Pattern::Steady { rate: Rate::per_second(1) }, SECOND * 3, 101));
    for limit in report.unwrap().limits {
        assert_eq!((limit.denied, limit.never_fits, limit.wait_p50), (3, 3, None), "{}", limit.name);
    }
}

#[test]
fn pictures_and_pages_repeat_and_escape_names() {
    let name = "<script>alert(\"1\") & co</script>";
    let (svg, page) = (svg::draw(&with_named_limit(name)), html::page(&with_named_limit(name)));
    assert_eq!(svg, svg::draw(&with_named_limit(name)));
    for text in [&svg, &page] {
        assert!(!text.contains("<script"), "{text}");
        assert!(text.contains("&lt;script&gt;alert(&quot;1&quot;) &amp; co&lt;/script&gt;"), "{text}");
    }
    assert!(!page.contains("http://") || page.matches("http://").count() == 1, "only the name of the SVG format");
    assert!(!page.contains("https://") && !page.contains("url(") && !page.contains("src="), "{page}");
}
