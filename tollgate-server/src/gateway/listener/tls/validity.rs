//! The validity periods of the gateway's certificates. A certificate outside its period is still served: a client that
//! does not check it is better off, and others report the problem.

use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use time::OffsetDateTime;
use x509_parser::prelude::{ASN1Time, FromDer, GeneralName, X509Certificate};

use crate::gateway::upstream::tls::MAX_NAMES;
use crate::notice;
use crate::notice::join_up_to;
use crate::seconds::rfc3339;

/// How long before the end a warning is logged. Automatic renewal happens a month before the end, so this means that it
/// failed.
const SOON_SECONDS: i64 = 14 * DAY_SECONDS;

/// Certificates with a short lifetime are renewed when less than this part of it is left.
const SOON_PART: i64 = 3;

const DAY_SECONDS: i64 = 24 * 60 * 60;

/// The validity of a certificate. Intermediate certificates are not included.
#[derive(Debug)]
pub(crate) struct Validity {
    file: String,
    /// The label in metrics.
    pub(crate) label: String,
    names: Vec<String>,
    begins: OffsetDateTime,
    pub(crate) ends: OffsetDateTime,
}

/// The state of a certificate at a given time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CertificateState {
    NotYet,
    Good,
    EndsSoon,
    Expired,
}

/// Returns the label of a certificate in metrics, which are more widely readable than the machine's files: the path as
/// written in the rule file, or its last two parts if it is absolute.
fn label(configured: &str) -> String {
    let path = Path::new(configured);
    if !path.is_absolute() {
        return configured.to_owned();
    }
    let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match path.parent().and_then(Path::file_name) {
        Some(folder) => format!("{}/{file}", folder.to_string_lossy()),
        None => file,
    }
}

impl Validity {
    /// Reads the validity of a certificate. `configured` is its path as written in the rule file.
    pub(super) fn of(file: &Path, configured: &str, certificate: &CertificateDer<'_>) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
        let validity = parsed.validity();
        let [begins, ends] = [validity.not_before, validity.not_after].map(|time| ASN1Time::to_datetime(&time));
        Some(Self { file: file.display().to_string(), label: label(configured), names: names(&parsed), begins, ends })
    }

    fn state(&self, now: i64) -> CertificateState {
        let (begins, ends) = (self.begins.unix_timestamp(), self.ends.unix_timestamp());
        match now {
            _ if ends < now => CertificateState::Expired,
            _ if now < begins => CertificateState::NotYet,
            _ if ends - now < SOON_SECONDS.min((ends - begins) / SOON_PART) => CertificateState::EndsSoon,
            _ => CertificateState::Good,
        }
    }

    /// Describes the state and the fix.
    fn message(&self, state: CertificateState, now: i64) -> Option<String> {
        match state {
            CertificateState::Good => None,
            CertificateState::NotYet => Some(format!(
                "{self} is not valid before {}Z, so clients reject it: install one that is valid now, or set the clock of this machine",
                rfc3339(&self.begins)
            )),
            CertificateState::EndsSoon => {
                let left = match (self.ends.unix_timestamp() - now) / DAY_SECONDS {
                    0 => "less than a day".to_owned(),
                    1 => "1 day".to_owned(),
                    days => format!("{days} days"),
                };
                Some(format!("{self} expires on {}Z, in {left}: install a new one", rfc3339(&self.ends)))
            }
            CertificateState::Expired => {
                Some(format!("{self} expired on {}Z, so clients reject it: install a new one", rfc3339(&self.ends)))
            }
        }
    }
}

impl fmt::Display for Validity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "gateway.tls.certificates {}", self.file)?;
        if self.names.is_empty() { Ok(()) } else { write!(out, " for {}", join_up_to(&self.names, MAX_NAMES)) }
    }
}

/// Returns the host names of a certificate, or its common name if it has none.
fn names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let found = certificate.subject_alternative_name().ok().flatten();
    let found = found.iter().flat_map(|names| &names.value.general_names).filter_map(|name| match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => address(bytes).map(|address| address.to_string()),
        _ => None,
    });
    let hosts: Vec<String> = found.collect();
    if hosts.is_empty() {
        let subject = certificate.subject().iter_common_name();
        return subject.filter_map(|name| name.as_str().ok()).map(str::to_owned).collect();
    }
    hosts
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let of_four = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    of_four.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

/// Logs certificates that are not valid or expire soon: once when they come into use, and whenever their state changes.
pub(super) struct ExpiryWarnings {
    certificates: Arc<Vec<Validity>>,
    logged: Vec<CertificateState>,
}

impl ExpiryWarnings {
    pub(super) fn new(certificates: &Arc<Vec<Validity>>) -> Self {
        Self { certificates: Arc::clone(certificates), logged: vec![CertificateState::Good; certificates.len()] }
    }

    /// Logs what has changed, at a time in seconds since the Unix epoch.
    pub(super) fn log(&mut self, now: i64) {
        self.changes(now).iter().for_each(notice::warn);
    }

    fn changes(&mut self, now: i64) -> Vec<String> {
        let each = self.certificates.iter().zip(&mut self.logged);
        let changes = each.filter_map(|(certificate, logged)| {
            let state = certificate.state(now);
            if state == std::mem::replace(logged, state) { None } else { certificate.message(state, now) }
        });
        changes.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warnings(begins: i64, ends: i64) -> ExpiryWarnings {
        let time = |seconds| OffsetDateTime::from_unix_timestamp(seconds).unwrap();
        let names = vec!["a.example".to_owned(), "b.example".to_owned()];
        let validity = Validity {
            file: "cert.pem".to_owned(),
            label: String::new(),
            names,
            begins: time(begins),
            ends: time(ends),
        };
        ExpiryWarnings::new(&Arc::new(vec![validity]))
    }

    #[test]
    fn metrics_do_not_show_where_files_are_on_the_machine() {
        for (configured, shown) in [
            ("cert.pem", "cert.pem"),
            ("tls/cert.pem", "tls/cert.pem"),
            ("/etc/letsencrypt/live/example.com/fullchain.pem", "example.com/fullchain.pem"),
            ("/cert.pem", "cert.pem"),
        ] {
            assert_eq!(label(configured), shown);
        }
    }

    #[test]
    fn certificate_is_logged_whenever_its_state_changes() {
        let day = |day: i64| day * DAY_SECONDS;
        let mut certificate = warnings(day(10), day(100));
        let begins_with = "gateway.tls.certificates cert.pem for a.example, b.example ";
        let mut lines = Vec::new();
        for now in [day(9), day(9) + 1, day(10), day(86), day(86) + 1, day(98), day(100), day(100) + 1, day(200)] {
            let changes = certificate.changes(now);
            lines.extend(changes.into_iter().map(|line| format!("{now}: {}", line.replace(begins_with, "it "))));
        }
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn short_lifetime_is_logged_in_its_last_third() {
        let mut of_six_days = warnings(0, 6 * DAY_SECONDS);
        assert_eq!(of_six_days.changes(4 * DAY_SECONDS), Vec::<String>::new());
        assert_eq!(of_six_days.changes(4 * DAY_SECONDS + 1).len(), 1);
    }

    #[test]
    fn days_left_are_rounded_down() {
        for (left, words) in [(0, "less than a day"), (DAY_SECONDS, "1 day"), (2 * DAY_SECONDS + 1, "2 days")] {
            let lines = warnings(0, 100 * DAY_SECONDS).changes(100 * DAY_SECONDS - left);
            assert!(lines[0].contains(&format!(", in {words}: ")), "{lines:?}");
        }
    }
}
