//! Metrics of the certificates of all listeners with TLS.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use tollgate_net::tls::CertificateReloads;

use tollgate_telemetry::page::Page;

pub(super) fn write(listeners: &[(SocketAddr, Arc<CertificateReloads>)], page: &mut Page<'_>) -> fmt::Result {
    let each = || listeners.iter().map(|(address, reloads)| (("listener", address.to_string()), reloads));
    page.counters(
        "tollgate_certificate_reloads",
        "Certificate reloads after their files changed, by result",
        each().flat_map(|(listener, reloads)| {
            let results = [("applied", &reloads.applied), ("refused", &reloads.refused)];
            results.map(|(result, count)| ([listener.clone(), ("result", result.to_owned())], count.load(Relaxed)))
        }),
    )?;
    page.gauges(
        "tollgate_last_certificate_reload_successful",
        "1 if the certificates in the files are in use, 0 if they were refused and the previous ones are",
        each().map(|(listener, reloads)| ([listener], i64::from(reloads.last_was_good()))),
    )?;
    let mut ends: BTreeMap<String, i64> = BTreeMap::new();
    for (_, reloads) in listeners {
        for certificate in reloads.in_force.load().iter() {
            let new = certificate.ends.unix_timestamp();
            // A file may be named twice, and two files may have one label: report the earliest expiry.
            ends.entry(certificate.label.clone()).and_modify(|first| *first = new.min(*first)).or_insert(new);
        }
    }
    page.gauges(
        "tollgate_certificate_expiry_timestamp_seconds",
        "Expiry of the certificates in use",
        ends.into_iter().map(|(file, ends)| ([("file", file)], ends)),
    )
}
