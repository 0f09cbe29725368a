#![no_main]

// The library parses expressions on a separate thread, and treats a panic there as a refusal. The fuzzer's panic hook
// would end the process; without the hook, only a panic on the fuzzer's own thread ends it.
libfuzzer_sys::fuzz_target!(
    init: drop(std::panic::take_hook()),
    |input: &[u8]| tollgate_fuzz::expressions(input)
);
