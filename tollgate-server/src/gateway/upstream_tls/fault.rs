//! Why TLS with an upstream does not come about, and what to do: the library's words are for those who know it.

use std::error::Error;
use std::{fmt, io};

use rustls::pki_types::{ServerName, UnixTime};
use rustls::{AlertDescription, CertificateError, Error as TlsError, InvalidMessage};
use time::OffsetDateTime;

use super::super::log::rfc3339;
use super::super::tls::MAX_NAMES;
use crate::notice::join_up_to;

/// What upstreams say where a certificate of the client is missing. They can mean no other: the gateway has none.
const WANTS_CERTIFICATE: [AlertDescription; 2] =
    [AlertDescription::CertificateRequired, AlertDescription::BadCertificate];

/// The longest name that DNS has is shorter.
const MAX_CHARS: usize = 300;

#[derive(Debug)]
pub(in super::super) enum TlsFault {
    /// Its certificate is of nobody who is believed.
    UnknownAuthority,
    /// Its certificate is of one who has the name of somebody who is: most often the same, before its key was made anew. Or
    /// it has not the key of its certificate; the library does not tell which.
    OtherSignature,
    /// Its certificate is one that others are signed with.
    CaCertificate,
    Expired(UnixTime),
    NotYet(UnixTime),
    /// Its certificate is for others than who was asked for.
    OtherName {
        expected: ServerName<'static>,
        /// As the library writes them, such as `DnsName("api.internal")`.
        presented: Vec<String>,
    },
    /// Its certificate is not good for another reason.
    BadCertificate(CertificateError),
    NoTls,
    HungUp,
    WantsCertificate,
    /// What upstreams say where a certificate is missing, and also where there is nothing that both sides speak.
    NothingInCommon,
    Other(TlsError),
}

impl TlsFault {
    /// What a handshake failed at, if that is a matter of TLS.
    pub(in super::super) fn of_handshake(error: &io::Error) -> Option<Self> {
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => Some(Self::HungUp),
            _ => error.get_ref()?.downcast_ref().map(Self::of),
        }
    }

    /// What an upstream says after the handshake of what was missing in it: by TLS 1.3 it cannot say so before.
    pub(in super::super) fn of_connection(error: &hyper::Error) -> Option<Self> {
        let mut next = error.source();
        while let Some(error) = next {
            if let Some(inner) = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
                // HTTP/2 keeps nothing but the words.
                let (words, alerts) = (inner.to_string(), WANTS_CERTIFICATE.map(TlsError::AlertReceived));
                return alerts.iter().any(|alert| alert.to_string() == words).then_some(Self::WantsCertificate);
            }
            next = error.source();
        }
        None
    }

    fn of(error: &TlsError) -> Self {
        match error {
            TlsError::InvalidCertificate(error) => Self::of_certificate(error),
            TlsError::InvalidMessage(InvalidMessage::InvalidContentType) => Self::NoTls,
            TlsError::AlertReceived(alert) if WANTS_CERTIFICATE.contains(alert) => Self::WantsCertificate,
            TlsError::AlertReceived(AlertDescription::HandshakeFailure) => Self::NothingInCommon,
            error => Self::Other(error.clone()),
        }
    }

    fn of_certificate(error: &CertificateError) -> Self {
        match error {
            CertificateError::UnknownIssuer => Self::UnknownAuthority,
            CertificateError::BadSignature => Self::OtherSignature,
            CertificateError::ExpiredContext { not_after, .. } => Self::Expired(*not_after),
            CertificateError::NotValidYetContext { not_before, .. } => Self::NotYet(*not_before),
            CertificateError::NotValidForNameContext { expected, presented } => {
                Self::OtherName { expected: expected.clone(), presented: presented.clone() }
            }
            CertificateError::Other(other)
                if matches!(other.0.downcast_ref(), Some(webpki::Error::CaUsedAsEndEntity)) =>
            {
                Self::CaCertificate
            }
            error => Self::BadCertificate(error.clone()),
        }
    }

    /// Whether the upstream was reached and its certificate is not believed.
    pub(in super::super) fn is_certificates(&self) -> bool {
        matches!(
            self,
            Self::UnknownAuthority
                | Self::OtherSignature
                | Self::CaCertificate
                | Self::Expired(_)
                | Self::NotYet(_)
                | Self::OtherName { .. }
                | Self::BadCertificate(_)
        )
    }
}

impl fmt::Display for TlsFault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownAuthority => out.write_str(
                "its certificate is of an authority that is not known; name it in upstream_tls.ca",
            ),
            Self::OtherSignature => out.write_str(
                "a signature in its certificate or handshake does not verify: it has not the key of that certificate, or the \
                 certificate is of another authority than the known one of that name; see that it has its own key, and that \
                 upstream_tls.ca has its authority",
            ),
            Self::CaCertificate => out.write_str(
                "its certificate is marked as an authority's (CA:TRUE); make it with CA:FALSE (openssl req -x509 -addext \
                 basicConstraints=CA:FALSE), or have that authority issue one for it",
            ),
            Self::Expired(at) => write!(out, "its certificate has expired on {}; put a new one there", date(*at)),
            Self::NotYet(at) => write!(
                out,
                "its certificate is not valid before {}; put one there that is valid now, or set the clock of this machine",
                date(*at)
            ),
            Self::OtherName { expected, presented } if presented.is_empty() => {
                let expected = expected.to_str();
                write!(
                    out,
                    "its certificate is for no name, and {expected} was asked for; make one with subjectAltName for {expected}"
                )
            }
            Self::OtherName { expected, presented } => {
                let names: Vec<String> = presented.iter().map(|name| bare(name)).collect();
                let (expected, names) = (expected.to_str(), join_up_to(&names, MAX_NAMES));
                write!(
                    out,
                    "its certificate is for {names}, and {expected} was asked for; name one that it is for in \
                     upstream_tls.server_name, or make one for {expected}"
                )
            }
            Self::BadCertificate(error) => {
                write!(out, "its certificate is not good: {}; put another one there", cut(error.to_string()))
            }
            Self::NoTls => out.write_str("it does not speak TLS; write http://, or h2c:// for HTTP/2"),
            Self::HungUp => {
                out.write_str("it hung up before TLS was agreed on; if it does not speak TLS, write http://")
            }
            Self::WantsCertificate => out.write_str(
                "it wants a client certificate, and the gateway has none to show; let it take connections without",
            ),
            Self::NothingInCommon => out.write_str(
                "it agrees to no TLS that the gateway speaks (1.2 and 1.3), or wants a client certificate, and the \
                 gateway has none to show; allow it one of these",
            ),
            Self::Other(error) => write!(out, "TLS with it fails: {}", cut(error.to_string())),
        }
    }
}

/// A name without the kind that the library writes around it. It comes from elsewhere, and must not move a terminal.
fn bare(name: &str) -> String {
    let name = name.split_once('(').map_or(name, |(_kind, name)| name);
    cut(name.trim_end_matches(')').trim_matches('"').escape_debug().to_string())
}

/// What is made of what an upstream sent, before it is believed: not more of it than people want to read.
fn cut(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().nth(MAX_CHARS) {
        text.truncate(end);
        text.push('…');
    }
    text
}

/// As the gateway's own certificates are told.
fn date(time: UnixTime) -> String {
    let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    match OffsetDateTime::from_unix_timestamp(seconds) {
        Ok(date) => format!("{}Z", rfc3339(&date)),
        // No certificate has such a date.
        Err(_) => format!("{seconds} s of the Unix epoch"),
    }
}
