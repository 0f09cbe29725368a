//! Replays what the fuzzer starts from, and what it has found.

use std::path::Path;

#[test]
fn every_seed_keeps_the_properties_of_its_target() {
    for (name, target) in tollgate_fuzz::TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds").join(name);
        let mut seeds = 0;
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let input = std::fs::read(&path).unwrap();
            // Shown only when it fails, to say which one it was.
            println!("{}", path.display());
            target(&input);
            seeds += 1;
        }
        assert!(seeds > 0, "{name} has no seeds");
    }
}
