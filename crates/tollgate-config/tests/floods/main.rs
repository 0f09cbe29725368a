//! Floods of invented keys: they harm no key that was served before, and nobody for longer than the page promises.
//!
//! The campaign runs every algorithm against several kinds of floods. `make test-floods` runs it with and without bans, over
//! more sizes and windows, and prints the figures of `docs/operating.md`.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod campaign;

use std::time::Duration;

use campaign::{ALGORITHMS, Case, Flood, Site};
use tollgate::{HOUR, SECOND, Source};

/// Room for some thousand keys of a limit, and for those of its ban.
const SMALL: usize = 96 * 1024;

fn cases(sizes: &[usize], windows: &[Duration], bans: &[bool]) -> Vec<Case> {
    let mut cases = Vec::new();
    for algorithm in ALGORITHMS {
        for max_memory in sizes {
            for window in windows {
                for with_ban in bans.iter().copied() {
                    let of = |flood| Case { algorithm, max_memory: *max_memory, window: *window, with_ban, flood };
                    cases.extend([Flood::OneRequest, Flood::WholeQuota, Flood::BothInTurn].map(of));
                }
            }
        }
    }
    cases
}

#[test]
fn floods_harm_no_key_that_was_served_before() {
    for figures in campaign::run(&cases(&[SMALL], &[HOUR], &[true])) {
        let case = figures.case.unwrap();
        // While a flood runs, part of the new keys are served, in percent.
        let least = match case.flood {
            Flood::OneRequest | Flood::BothInTurn => 25,
            Flood::WholeQuota => 50,
        };
        assert!(figures.new_keys_served >= least, "{}: {} % served", case.describe(), figures.new_keys_served);
    }
}

/// The same over windows and over the sizes in `FLOODS`, in KiB: `make test-floods`.
#[test]
#[expect(clippy::print_stdout, reason = "the figures of the page")]
fn floods_of_all_sizes_harm_no_key_that_was_served_before() {
    let Ok(sizes) = std::env::var("FLOODS") else { return };
    let sizes: Vec<usize> = sizes.split(',').map(|size| size.parse::<usize>().unwrap() << 10).collect();
    let results = campaign::run(&cases(&sizes, &[10 * SECOND, 24 * HOUR], &[false, true]));
    print!("{}", campaign::table(&results));
}

/// A limit of 2 is never enough to evict a key, so all that find no slot share a quota, and nearly all are denied.
#[test]
fn flood_that_is_denied_for_lack_of_room_bans_nobody() {
    let site = Site::new("limit: 2, window: 10s, ban: { after: 2, within: 1m, for: 1h }", SMALL);
    let mut denied = 0;
    for key in 0..40_000_u64 {
        let outcome = site.check(&format!("invented-{key}"), 1);
        denied += u64::from(!outcome.is_allowed());
        site.clock.advance(Duration::from_micros(100));
    }
    assert!(denied > 20_000, "{denied}");
    for user in 0..200 {
        let outcome = site.check(&format!("user-{user}"), 1);
        assert!(!campaign::is_banned(&outcome), "user-{user}");
        let source = outcome.decision().unwrap().source();
        assert!(outcome.is_allowed() || source == Source::SharedQuota, "user-{user}: {source:?}");
        denied += u64::from(!outcome.is_allowed());
    }
    let (limit, ban) = (site.overflow(), site.ban_overflow());
    assert_eq!((limit.denied, ban.denied, ban.lost_strikes), (denied, 0, 0));
    // The state of the last invented key lasts for two windows.
    site.clock.advance(20 * SECOND);
    for user in 0..200 {
        assert!((0..2).all(|_| site.check(&format!("user-{user}"), 1).is_allowed()), "user-{user}");
    }
}

/// Invented keys that are denied often enough fill the memory for bans, which outlast their counts. Bans in force stay in
/// force.
#[test]
fn flood_of_bans_ends_no_ban_and_bans_nobody_else() {
    let site = Site::new("limit: 1, window: 10s, ban: { after: 1, within: 1m, for: 1h }", SMALL);
    let is_banned = |key: &str| campaign::is_banned(&site.check(key, 1));
    assert!(site.check("eve", 1).is_allowed());
    assert!(is_banned("eve"), "the denial that bans");
    let (mut keys, mut elapsed) = (0_u64, Duration::ZERO);
    while site.ban_overflow().lost_strikes < 1_000 {
        let key = format!("invented-{keys}");
        let _ = (site.check(&key, 1), site.check(&key, 1));
        keys += 1;
        // New keys find room again once those before are at rest.
        if keys.is_multiple_of(1_000) {
            site.clock.advance(20 * SECOND);
            elapsed += 20 * SECOND;
        }
        assert!(elapsed < HOUR / 2, "{:?}", site.ban_overflow());
    }
    assert!(is_banned("eve"));
    site.clock.advance(20 * SECOND);
    assert!((0..200).all(|user| !is_banned(&format!("user-{user}"))));
    site.clock.advance(HOUR - elapsed - 20 * SECOND - Duration::from_micros(1));
    assert!(is_banned("eve"), "a microsecond before its end");
    site.clock.advance(HOUR);
    assert!(site.check("eve", 1).is_allowed());
}
