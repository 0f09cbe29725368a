//! PEM files that settings name.

use std::path::Path;

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tollgate_rules::internal::read_bounded;

/// The maximum size of a file. Certificate chains have a few thousand bytes, and the public authorities of a system a
/// quarter of a million.
pub const MAX_FILE_BYTES: u64 = 1 << 20;

/// Reads the certificates of a file, at least one. Fails with a description of the problem.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let text = read_bounded(path, MAX_FILE_BYTES).map_err(|error| error.to_string())?;
    let found: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| error.to_string())?;
    if found.is_empty() { Err("it contains no certificate".to_owned()) } else { Ok(found) }
}

/// Reads the private key of a file. Fails with a description of the problem.
pub fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    let text = read_bounded(path, MAX_FILE_BYTES).map_err(|error| error.to_string())?;
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| error.to_string())
}
