use std::time::Duration;

use super::*;
use crate::clock::fake::{FREQUENCY, FakeMachine};

const STEP: Duration = Duration::from_millis(7);
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

/// A clock on a machine, and how much time has passed on each since they were made.
struct Model {
    machine: FakeMachine,
    clock: SystemClock<FakeMachine>,
    start: (u64, u64),
    latest: u64,
}

impl Model {
    fn new() -> Self {
        let machine = FakeMachine::new();
        let clock = machine.clock();
        let latest = clock.now().as_micros();
        Self { start: (machine.monotonic_nanos() / 1000, latest), machine, clock, latest }
    }

    /// Lets time pass in small steps, and checks that the clock never goes back.
    fn run(&mut self, span: Duration, ticks_per_micro: u64) {
        for _ in 0..span.as_micros() / STEP.as_micros() {
            self.machine.run_counting(STEP, ticks_per_micro);
            let now = self.clock.now().as_micros();
            assert!(now >= self.latest, "{} µs back", self.latest - now);
            self.latest = now;
        }
    }

    /// Returns how far the clock is ahead of the monotonic clock, in microseconds.
    fn lead(&self) -> i64 {
        let (monotonic, clock) = self.start;
        let real = self.machine.monotonic_nanos() / 1000 - monotonic;
        (self.clock.now().as_micros() - clock) as i64 - real as i64
    }

    fn trusts_counter(&self) -> bool {
        self.clock.shared.line.until.load(Ordering::Relaxed) > 0
    }

    fn wall_offset_secs(&self) -> f64 {
        self.clock.wall_offset().get() as f64 / 1e6
    }
}

#[test]
fn follows_the_monotonic_clock_to_the_microsecond() {
    let mut model = Model::new();
    model.run(MINUTE, FREQUENCY);
    assert!(model.lead().abs() <= 1 && model.trusts_counter());
}

#[test]
fn counter_that_restarts_low_does_not_stop_time() {
    for low in [0, 1_000, 3_000_000_000 * FREQUENCY] {
        let mut model = Model::new();
        model.run(MINUTE, FREQUENCY);
        model.machine.set_ticks(low);
        model.run(10 * MINUTE, FREQUENCY);
        assert!(model.lead().abs() <= 1, "{} µs after a restart at {low}", model.lead());
        assert!(model.trusts_counter());
    }
}

#[test]
fn counter_that_restarts_again_and_again_does_not_stop_time() {
    let mut model = Model::new();
    for _ in 0..600 {
        model.run(SECOND / 3, FREQUENCY);
        model.machine.set_ticks(0);
    }
    assert!(model.lead().abs() <= 1, "{} µs", model.lead());
}

#[test]
fn time_asleep_counts_where_the_monotonic_clock_counts_it() {
    // The counter continues, stands still, or restarts.
    let sleeps: [fn(&FakeMachine); 3] =
        [|machine| machine.add_ticks(8 * 3_600_000_000 * FREQUENCY), |_| {}, |machine| machine.set_ticks(0)];
    for sleep in sleeps {
        let mut model = Model::new();
        model.run(MINUTE, FREQUENCY);
        model.machine.skip_monotonic(8 * HOUR);
        model.machine.step_wall(8.0 * 3600.0);
        sleep(&model.machine);
        model.run(SECOND, FREQUENCY);
        assert!(model.lead().abs() <= 1, "{} µs a second after waking", model.lead());
        model.run(MINUTE, FREQUENCY);
        assert!(model.lead().abs() <= 1 && model.trusts_counter());
        assert_eq!(model.clock.wall_offset().get(), 0);
    }
}

#[test]
fn time_asleep_is_a_step_of_the_wall_clock_where_the_monotonic_clock_stands_still() {
    let mut model = Model::new();
    model.run(MINUTE, FREQUENCY);
    model.machine.step_wall(8.0 * 3600.0);
    model.machine.set_ticks(0);
    model.run(SECOND, FREQUENCY);
    assert!(model.lead().abs() <= 1, "{} µs", model.lead());
    assert_eq!(model.wall_offset_secs(), 8.0 * 3600.0);
    let gaps = model.clock.now_with_gaps().as_micros() - model.clock.now().as_micros();
    assert_eq!(gaps, 8 * 3_600_000_000);
}

#[test]
fn pause_of_ten_minutes_passes_at_once_or_not_at_all() {
    // The guest's monotonic clock continues after the pause, or jumps over it. The counter is restored or continues.
    for (jumps, counts) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut model = Model::new();
        model.run(MINUTE, FREQUENCY);
        if jumps {
            model.machine.skip_monotonic(10 * MINUTE);
        }
        if counts {
            model.machine.add_ticks(600_000_000 * FREQUENCY);
        }
        model.run(2 * SECOND, FREQUENCY);
        assert!(model.lead().abs() <= 1, "{} µs ({jumps}, {counts})", model.lead());
        assert!(model.trusts_counter());
    }
}

#[test]
fn counter_that_jumps_moves_time_by_half_a_second_at_most() {
    let mut model = Model::new();
    for jump_ms in [1, 100, 400, 499, 501, 60_000] {
        model.run(MINUTE, FREQUENCY);
        model.machine.add_ticks(jump_ms * 1000 * FREQUENCY);
        let lead = model.lead();
        assert!((-1..=500_000).contains(&lead), "{lead} µs ahead after {jump_ms} ms");
        model.latest = model.latest.max(model.clock.now().as_micros());
        model.run(2 * SECOND, FREQUENCY);
        assert!(model.lead().abs() <= 1, "{} µs", model.lead());
    }
}

#[test]
fn counter_of_another_frequency_is_followed_within_two_seconds() {
    // After a migration: 10 % and 1 % faster, almost 10 % slower, four times as fast, and a quarter as fast.
    for frequency in [2_310, 2_121, 1_900, 8_400, 525] {
        let mut model = Model::new();
        model.run(MINUTE, FREQUENCY);
        model.run(4 * SECOND, frequency);
        assert!(model.trusts_counter(), "{frequency}");
        model.run(MINUTE, frequency);
        assert!(model.lead().abs() <= 1, "{} µs at {frequency}", model.lead());
    }
}

#[test]
fn fast_counter_is_ahead_by_its_share_of_half_a_second() {
    let mut model = Model::new();
    model.run(MINUTE, FREQUENCY);
    for _ in 0..200 {
        model.run(STEP, FREQUENCY * 11 / 10);
        assert!((-1..=50_000).contains(&model.lead()), "{} µs", model.lead());
    }
}

#[test]
fn unsteady_counter_is_not_used() {
    let mut model = Model::new();
    for round in 0..60 {
        model.run(SECOND, FREQUENCY + 100 * (round % 7));
    }
    assert!(!model.trusts_counter());
    assert!(model.lead().abs() <= 1, "{} µs", model.lead());
    model.run(2 * SECOND, FREQUENCY);
    assert!(model.trusts_counter());
}

#[test]
fn counter_that_stands_still_is_not_trusted_again() {
    let mut model = Model::new();
    model.machine.set_ticks(0);
    model.run(MINUTE, 0);
    assert!(!model.trusts_counter());
    assert!(model.lead().abs() <= 1, "{} µs", model.lead());
}

#[test]
fn counter_of_another_core_that_is_a_little_behind_changes_nothing() {
    let mut model = Model::new();
    model.run(Duration::from_millis(504), FREQUENCY);
    let (line, version) = (&model.clock.shared.line, model.clock.shared.line.version.load(Ordering::Relaxed));
    let began = line.micros.load(Ordering::Relaxed);
    model.machine.set_ticks(line.ticks.load(Ordering::Relaxed) - 200);
    assert_eq!(model.clock.now().as_micros(), began);
    assert_eq!(line.version.load(Ordering::Relaxed), version);
}

#[test]
fn steps_of_the_wall_clock_move_the_offset_and_nothing_else() {
    let mut model = Model::new();
    model.run(MINUTE, FREQUENCY);
    for (step, offset) in [(3600.0, 3600.0), (-3600.0, 0.0), (-3600.0, -3600.0), (3600.0, 0.0)] {
        model.machine.step_wall(step);
        model.run(SECOND, FREQUENCY);
        assert!(model.lead().abs() <= 1, "{} µs after a step of {step} s", model.lead());
        assert_eq!(model.wall_offset_secs(), offset);
    }
    let gaps = model.clock.now_with_gaps().as_micros() - model.clock.now().as_micros();
    assert_eq!(gaps, 7200 * 1_000_000);
}

#[test]
fn steps_of_the_wall_clock_by_less_than_a_second_are_not_followed_until_they_add_up() {
    let mut model = Model::new();
    for (step, offset) in [(0.5, 0.0), (-0.5, 0.0), (-0.5, 0.0), (-0.6, -1.1), (0.5, -1.1), (0.6, 0.0)] {
        model.machine.step_wall(step);
        model.run(SECOND, FREQUENCY);
        let found = model.wall_offset_secs();
        assert!((found - offset).abs() < 1e-3, "{found} s after {step} s");
    }
}

#[test]
fn wall_clock_that_was_never_set_is_followed_to_today() {
    let machine = FakeMachine::new();
    machine.step_wall(-1_700_000_000.0);
    let clock = machine.clock();
    assert_eq!(clock.now(), Timestamp::EPOCH);
    machine.step_wall(1_800_000_000.0);
    machine.run(SECOND);
    assert_eq!(clock.now(), Timestamp::from_secs(1));
    assert_eq!(clock.wall_offset().get(), 1_800_000_000 * 1_000_000);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "compares this clock with the one that it follows")]
fn clock_of_this_machine_follows_it_and_never_goes_back() {
    let clock = SystemClock::new(Machine::new().expect("this machine has clocks"));
    // The thread may be preempted between two readings, so each of ours is between two of the system's.
    let (earliest, first, started) = (std::time::Instant::now(), clock.now(), std::time::Instant::now());
    let mut last = first;
    while started.elapsed() < Duration::from_millis(1200) {
        let now = clock.now();
        assert!(now >= last, "{last:?} then {now:?}");
        last = now;
    }
    let (at_least, last, at_most) = (started.elapsed(), clock.now(), earliest.elapsed());
    let passed = Duration::from_micros(last.as_micros() - first.as_micros());
    assert!(passed >= at_least * 99 / 100 && passed <= at_most * 101 / 100, "{at_least:?} {passed:?} {at_most:?}");
}

#[test]
fn slope_is_exact_to_a_nanosecond_in_a_line() {
    let (ticks, nanos) = (2_099_997_123_u64, 1_000_000_000_u64);
    let slope = slope_of(nanos.into(), ticks.into()).unwrap();
    let half = ticks_in(COMPARE_AFTER, slope);
    assert!(half.abs_diff(ticks / 2) <= 4, "{half}");
    assert_eq!((half * slope) >> PART_BITS, 499_999);
    assert_eq!(split(1_234_567), (1234, (567 << PART_BITS) / 1000));
}

#[test]
fn counter_that_no_processor_has_is_not_measured() {
    assert_eq!(slope_of(1_000_000, 0), None);
    assert_eq!(slope_of(u128::from(u64::MAX), 1), None);
    assert_eq!(slope_of(1, u128::from(u64::MAX)), None);
}
