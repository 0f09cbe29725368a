//! The settings of a listener with TLS, and the problems with its files.

use std::fmt;
use std::path::PathBuf;

/// The files of a listener with TLS.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Certificates. A client gets the first one that is valid for the requested name, else the first.
    pub certificates: Vec<CertificateFiles>,
    /// A PEM file with the authorities of client certificates.
    pub client_ca: Option<PathBuf>,
    /// Whether a client must have a certificate.
    pub client_certificates: ClientCertificates,
    /// The setting that messages name, such as `gateway.tls`.
    pub setting: &'static str,
}

/// The files of a certificate.
#[derive(Clone, Debug)]
pub struct CertificateFiles {
    /// The certificate and its intermediate certificates.
    pub cert: PathBuf,
    /// The private key.
    pub key: PathBuf,
    /// The certificate's path as the operator has written it, for metrics.
    pub configured: String,
}

/// Whether a client must have a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCertificates {
    /// Connections without a certificate are refused.
    Required,
    /// Connections without a certificate are accepted.
    Optional,
}

/// A problem with a file, and its fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsProblem {
    /// The problem.
    pub message: String,
    /// The fix.
    pub fix: String,
    /// The path of the setting within [`Settings`], from the inside outwards.
    pub path: Vec<Step>,
}

/// A step of the path of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A key of a map.
    Key(&'static str),
    /// An index of a list, from 0.
    Index(usize),
}

impl TlsProblem {
    pub(super) fn new(message: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { message: message.into(), fix: fix.into(), path: Vec::new() }
    }

    /// Adds the key or index that contains the setting.
    pub(super) fn of(mut self, step: impl Into<Step>) -> Self {
        self.path.push(step.into());
        self
    }
}

impl fmt::Display for TlsProblem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.message, self.fix)
    }
}

impl From<&'static str> for Step {
    fn from(key: &'static str) -> Self {
        Self::Key(key)
    }
}

impl From<usize> for Step {
    fn from(index: usize) -> Self {
        Self::Index(index)
    }
}
