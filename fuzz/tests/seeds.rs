//! Replays all seeds: examples for the fuzzer to start from, and inputs that once failed.

use std::path::Path;

#[test]
fn every_seed_keeps_the_properties_of_its_target() {
    for (name, target) in tollgate_fuzz::TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds").join(name);
        let mut seeds = 0;
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let input = std::fs::read(&path).unwrap();
            // Printed only if the test fails, to name the seed.
            println!("{}", path.display());
            target(&input);
            seeds += 1;
        }
        assert!(seeds > 0, "{name} has no seeds");
    }
}

#[test]
fn llhttp_is_installed_in_ci() {
    let is_installed = llhttp::read(b"", llhttp::Kind::Requests).is_some();
    let is_ci = std::env::var("CI").as_deref() == Ok("true");
    assert!(is_installed || !is_ci, "llhttp is not installed: run `tools/install-llhttp`");
}
