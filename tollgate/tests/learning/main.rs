//! Limits that learn, in simulated time: a daily pattern, a product launch, and attacks that try to train them.

#![cfg(feature = "file")]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod simulation;

use simulation::{Event, Number, Outcome, Scenario, best_fixed, run};

const CLIENTS: u64 = 1200;
const LEARNED: Number = Number::Learned { from: 40, to: 400, over_days: 3 };

fn scenario(days: u64, event: Event) -> Scenario {
    Scenario { clients: CLIENTS, days, event }
}

/// No move within an hour is larger than 10 %, and none leaves the bounds.
fn moves_are_bounded(outcome: &Outcome) {
    for numbers in outcome.numbers.windows(12) {
        let (first, last) = (numbers[0], numbers[11]);
        assert!(last.abs_diff(first) <= first.max(last) / 10, "{numbers:?}");
    }
    assert!(outcome.numbers.iter().all(|number| (40..=400).contains(number)));
}

#[test]
fn number_settles_where_the_share_of_clients_is_untouched() {
    let calm = scenario(5, Event::None);
    let outcome = run(calm, LEARNED);
    moves_are_bounded(&outcome);
    let (last, best) = (outcome.days[4], best_fixed(calm, 2));
    assert!(last.number.abs_diff(best) * 100 <= best * 15, "{} beside {best}", last.number);
    assert!(last.touched * 250 <= last.seen, "{last:?}");
    assert!(outcome.days[0].touched > last.touched, "the smallest number touches more");
}

#[test]
fn launch_freezes_the_number_for_a_day_and_is_then_followed() {
    let outcome = run(scenario(7, Event::Launch { day: 4, percent: 500 }), LEARNED);
    moves_are_bounded(&outcome);
    let before = outcome.days[3].number;
    let first_hours = &outcome.numbers[4 * 288..4 * 288 + 200];
    assert!(outcome.days[4].frozen_ticks > 100, "{:?}", outcome.days);
    assert!(first_hours.iter().all(|number| number.abs_diff(before) <= before / 10), "{first_hours:?}");
    assert!(outcome.days[6].number > before * 3 / 2, "{:?}", outcome.days);
}

#[test]
fn attack_with_many_clients_does_not_train_the_number() {
    let event = Event::Attack { day: 4, days: 1, clients: 100, units: 2000 };
    let outcome = run(scenario(6, event), LEARNED);
    moves_are_bounded(&outcome);
    let before = outcome.days[3].number;
    assert!(outcome.days[4].frozen_ticks > 200, "{:?}", outcome.days);
    for day in &outcome.days[4..] {
        assert!(day.number.abs_diff(before) <= before / 10, "{:?}", outcome.days);
    }
}

#[test]
fn attack_with_one_client_does_not_move_the_number() {
    let event = Event::Attack { day: 3, days: 2, clients: 1, units: 100_000 };
    let attacked = run(scenario(5, event), LEARNED);
    let calm = run(scenario(5, Event::None), LEARNED);
    let (attacked, calm) = (attacked.days[4].number, calm.days[4].number);
    // One more client may shift the quantile by one client.
    assert!(attacked.abs_diff(calm) * 100 <= calm * 15, "{attacked} beside {calm}");
}
