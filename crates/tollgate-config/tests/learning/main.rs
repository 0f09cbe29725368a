//! Limits that learn, in simulated time: a daily pattern, a product launch, and attacks that try to train them.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod simulation;

use simulation::{Event, Number, Outcome, Scenario, best_fixed, run};

const CLIENTS: u64 = 1200;
const LEARNED: Number = Number::Learned { from: 40, to: 400, over_days: 1, cover: 9990 };

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
    let calm = scenario(3, Event::None);
    let outcome = run(calm, LEARNED);
    moves_are_bounded(&outcome);
    let (last, best) = (outcome.days[2], best_fixed(calm, 1));
    assert!(last.number.abs_diff(best) * 100 <= best * 20, "{} beside {best}", last.number);
    assert!(last.touched * 250 <= last.seen, "{last:?}");
    assert!(outcome.days[0].touched > last.touched, "the smallest number touches more");
}

#[test]
fn launch_freezes_the_number_for_a_day_and_is_then_followed() {
    let outcome = run(scenario(4, Event::Launch { day: 2, percent: 2000 }), LEARNED);
    moves_are_bounded(&outcome);
    let before = outcome.days[1].number;
    let first_hours = &outcome.numbers[2 * 288..2 * 288 + 200];
    assert!(outcome.days[2].frozen_ticks > 100, "{:?}", outcome.days);
    assert!(first_hours.iter().all(|number| number.abs_diff(before) <= before / 10), "{first_hours:?}");
    assert!(outcome.days[3].number > before * 3 / 2, "{:?}", outcome.days);
}

#[test]
fn attack_with_many_clients_does_not_train_the_number() {
    let event = Event::Attack { day: 2, days: 1, clients: 200, units: 2000 };
    let outcome = run(scenario(4, event), LEARNED);
    moves_are_bounded(&outcome);
    let before = outcome.days[1].number;
    assert!(outcome.days[2].frozen_ticks > 200, "{:?}", outcome.days);
    // Each attacker is admitted up to the number, as any client is, and no further.
    let (calm, attacked) = (outcome.days[1].peak_admitted, outcome.days[2].peak_admitted);
    assert!((calm + 200 * before / 2..=calm + 200 * (before + before / 10)).contains(&attacked), "{:?}", outcome.days);
    for number in &outcome.numbers[2 * 288..] {
        assert!(*number <= before + before / 10, "{:?}", outcome.days);
    }
}

#[test]
fn attack_with_one_client_does_not_move_the_number() {
    let attacked = scenario(3, Event::Attack { day: 1, days: 2, clients: 1, units: 100_000 });
    let (number, best) = (run(attacked, LEARNED).days[2].number, best_fixed(attacked, 1));
    // One more client may shift the quantile by one client.
    assert!(number.abs_diff(best) * 100 <= best * 25, "{number} beside {best}");
}

/// The keys of one slow client, which never return, are far more than the clients that do.
#[test]
fn invented_keys_that_never_return_do_not_lower_the_number() {
    let calm = run(scenario(4, Event::None), LEARNED).days;
    for per_minute in [10, 60] {
        let outcome = run(scenario(4, Event::Invented { day: 2, per_minute }), LEARNED);
        let before = outcome.days[1].number;
        assert_eq!(before, calm[1].number);
        for (ticks, number) in outcome.numbers.iter().enumerate().skip(2 * 288) {
            assert!(number * 10 >= before * 8, "{number} after {before}, {per_minute} a minute, in tick {ticks}");
        }
        let (attacked, calm) = (outcome.days[3], calm[3]);
        assert!(attacked.touched <= calm.touched + 2, "{attacked:?} and without the attack {calm:?}");
    }
}

#[test]
fn attackers_are_admitted_up_to_a_fixed_number() {
    let event = Event::Attack { day: 0, days: 1, clients: 3, units: 2000 };
    let outcome = run(Scenario { clients: 0, days: 1, event }, Number::Fixed(100));
    assert_eq!(outcome.days[0].peak_admitted, 300);
}
