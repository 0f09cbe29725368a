#![no_main]

// The library reads expressions on a thread of its own, and a panic there is a refusal. The hook of the fuzzer would
// end the process for it; without the hook it still ends for a panic on its own thread.
libfuzzer_sys::fuzz_target!(
    init: drop(std::panic::take_hook()),
    |input: &[u8]| tollgate_fuzz::rule_file(input)
);
