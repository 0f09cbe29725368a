//! Compiles llhttp, if `tools/install-llhttp` has downloaded it.

use std::path::Path;

fn main() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/llhttp/lib");
    println!("cargo::rerun-if-changed={}", sources.display());
    println!("cargo::rerun-if-changed=src/read.c");
    if !sources.exists() {
        return;
    }
    println!("cargo::rustc-cfg=has_llhttp");
    let files = ["llhttp.c", "api.c", "http.c"].map(|file| sources.join(file));
    let mut build = cc::Build::new();
    build.files(files).file("src/read.c").include(sources).warnings(false);
    // Also in builds for tests: a fuzzer that waits for it finds less.
    build.opt_level(2).compile("llhttp");
}
