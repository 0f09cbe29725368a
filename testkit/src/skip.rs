//! Tests that cannot run on this machine.

use std::io::Write as _;
use std::net::TcpListener;

/// Reports that the running test cannot run on this machine. Written to the standard error itself, because libtest
/// captures `eprintln!` of tests that pass.
pub fn skipped(reason: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    _ = writeln!(std::io::stderr(), "SKIPPED {test}: {reason}");
}

/// Returns whether this machine has an IPv6 loopback address. If it has one, listening on it must work.
pub fn has_ipv6() -> bool {
    let interfaces = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    let has_loopback = interfaces.lines().any(|line| line.ends_with(" lo"));
    if !has_loopback {
        skipped("this machine has no IPv6 loopback address");
        return false;
    }
    TcpListener::bind("[::1]:0").expect("the IPv6 loopback address accepts listeners");
    true
}
