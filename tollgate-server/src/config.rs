//! Reads rule files from disk, up to a size limit, and parses them together with the files that they name.

mod envoy_files;
pub(crate) mod logins;

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use tollgate_config::internal::{Address, Listener, RouteRule, ServiceRule, StoreRule, TlsRule, UpstreamTlsRule};
use tollgate_config::{LoadError, Parsed, Problems, RuleFile};
use tollgate_rules::RuleSet;
use tollgate_rules::internal::read_up_to;

use crate::gateway::Gateway;
use crate::net_settings;
use crate::service::xds::XdsSettings;

/// One byte more than the 4 MiB that a rule file may have, so that the parser reports a longer one with a position.
const MAX_FILE_BYTES: u64 = (4 << 20) + 1;

/// Reads and parses the rule file of a server.
pub(crate) fn load(path: &Path) -> Result<Parsed, LoadError> {
    understand_read(path, read(path))
}

/// Reads and parses a rule file for a command that needs it once. It may be a pipe, such as `/dev/stdin`: the command
/// waits for its writer. The files that the rules name may not.
pub(crate) fn load_once(path: &Path) -> Result<Parsed, LoadError> {
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_FILE_BYTES).read_to_end(&mut text));
    understand_read(path, read.map(|_| text))
}

fn understand_read(path: &Path, text: io::Result<Vec<u8>>) -> Result<Parsed, LoadError> {
    let text = text.map_err(|source| LoadError::Unreadable { path: path.to_owned(), source })?;
    understand(path, &text).map_err(LoadError::Refused)
}

/// Reads a regular file, up to the size limit.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_up_to(path, MAX_FILE_BYTES)
}

/// Parses the text of the rule file at `path`, with the files that it names. Relative paths in it start from its folder.
pub(crate) fn understand(path: &Path, text: &[u8]) -> Result<Parsed, Problems> {
    let parsed = envoy_files::load(parse(path, text)?)?;
    XdsSettings::of(&parsed)?;
    Ok(parsed)
}

/// Parses the text of the rule file at `path` alone.
fn parse(path: &Path, text: &[u8]) -> Result<Parsed, Problems> {
    let parsed = RuleFile::parse(&path.display().to_string(), text)?;
    Ok(parsed.in_folder(path.parent().unwrap_or(Path::new(""))))
}

/// Compiles the rules of a file and checks its gateway, which may listen on another address than the file says.
pub(crate) fn compile(file: &Parsed, listen: Option<&Address>) -> Result<RuleSet, Problems> {
    let listeners = match (Gateway::problems(file, listen), certificate_problems(file)) {
        (Some(one), Some(other)) => Some(one.and(other)),
        (one, other) => one.or(other),
    };
    match (file.compile(), listeners) {
        (Ok(rules), None) => Ok(rules),
        (Ok(_), Some(problems)) | (Err(problems), None) => Err(problems),
        (Err(one), Some(other)) => Err(one.and(other)),
    }
}

/// Returns the listeners of the decision service in a file, with their keys and the settings of their TLS.
pub(crate) fn service_listeners(file: &RuleFile) -> impl Iterator<Item = (&'static str, &'static str, &Listener)> {
    let ServiceRule { http, grpc, resp, .. } = &file.service;
    let listeners =
        [("http", "service.http.tls", http), ("grpc", "service.grpc.tls", grpc), ("resp", "service.resp.tls", resp)];
    listeners.into_iter().filter_map(|(key, setting, listener)| Some((key, setting, listener.as_ref()?)))
}

/// Returns the problems with the certificates of the decision service and the admin listener.
fn certificate_problems(file: &Parsed) -> Option<Problems> {
    let of_listener = |(key, setting, listener): (&'static str, &'static str, &Listener)| {
        let errors = listener.tls.as_ref().and_then(|tls| net_settings::tls(tls, file.folder(), setting).err());
        errors.into_iter().flatten().map(move |error| error.of("tls").of(key).of("service")).collect::<Vec<_>>()
    };
    let of_admin =
        file.admin.as_ref().and_then(|admin| net_settings::tls(admin.tls.as_ref()?, file.folder(), "admin.tls").err());
    let of_admin = of_admin.into_iter().flatten().map(|error| error.of("tls").of("admin"));
    let errors: Vec<_> = service_listeners(file).flat_map(of_listener).chain(of_admin).collect();
    (!errors.is_empty()).then(|| file.problems(errors))
}

/// Returns the files that the rules name and that are read again when they change.
pub(crate) fn named_files(rules: &Parsed) -> Vec<PathBuf> {
    let (envoy, _) = envoy_files::find(rules);
    key_file(rules).into_iter().chain(envoy).collect()
}

/// Returns the same files with their contents when the rules were loaded. The keys are read again.
pub(crate) fn loaded_files(rules: &Parsed) -> Vec<(PathBuf, Option<Vec<u8>>)> {
    let keys = key_file(rules).map(|path| {
        let text = read(&path).ok();
        (path, text)
    });
    let envoy = rules.domain_files().map(|(path, text)| (PathBuf::from(path), Some(text.into())));
    keys.into_iter().chain(envoy).collect()
}

/// Returns the paths to watch for changes of these files.
pub(crate) fn watched_paths(rules: &Parsed) -> Vec<PathBuf> {
    key_file(rules).into_iter().chain(envoy_files::watched(rules)).collect()
}

/// Returns the files without which the rules of this text are refused: certificates, their keys, passwords and tokens.
/// Returns none if the text itself is refused.
pub(crate) fn required_files(path: &Path, text: &[u8]) -> Vec<PathBuf> {
    parse(path, text).map(|rules| files_of(&rules)).unwrap_or_default()
}

fn files_of(rules: &Parsed) -> Vec<PathBuf> {
    let of_tls = |tls: &TlsRule| {
        let pairs = tls.certificates.iter().flat_map(|pair| [pair.cert.clone(), pair.key.clone()]);
        pairs.chain(tls.client_ca.clone()).collect::<Vec<_>>()
    };
    let of_listener = |listener: &Listener| {
        listener.tls.iter().flat_map(of_tls).chain(listener.tokens_file.clone()).collect::<Vec<_>>()
    };
    let of_route = |route: &RouteRule| {
        let UpstreamTlsRule { ca, client_cert, client_key, .. } = &route.upstream_tls;
        [ca, client_cert, client_key].into_iter().flatten().cloned().collect::<Vec<_>>()
    };
    let of_gateway = rules.gateway.iter().flat_map(|gateway| {
        gateway.tls.iter().flat_map(of_tls).chain(gateway.routes.iter().flat_map(of_route)).collect::<Vec<_>>()
    });
    let of_service = service_listeners(rules).flat_map(|(_, _, listener)| of_listener(listener));
    let of_admin =
        rules.admin.iter().flat_map(|admin| admin.tls.iter().flat_map(of_tls).chain(admin.tokens_file.clone()));
    let of_store = |store: &StoreRule| {
        let StoreRule { ca, client_cert, client_key, password_file, sentinel_password_file, .. } = store;
        let names = [ca, client_cert, client_key, password_file, sentinel_password_file];
        names.into_iter().flatten().cloned().collect::<Vec<_>>()
    };
    let of_stores = std::iter::once(&rules.store).chain(rules.stores.values()).flat_map(of_store);
    let of_xds = rules.service.xds.iter().flat_map(|xds| [&xds.ca, &xds.client_cert, &xds.client_key]);
    let of_xds = of_xds.flatten().cloned();
    let names = of_gateway.chain(of_service).chain(of_admin).chain(of_stores).chain(of_xds);
    names.map(|name| rules.folder().join(name)).chain(key_file(rules)).collect()
}

/// Returns the path of the file with the keys for tokens, if the rules name one.
fn key_file(rules: &Parsed) -> Option<PathBuf> {
    let jwt = rules.jwt.as_ref()?;
    jwt.key_file.as_ref().or(jwt.jwks_file.as_ref()).map(|name| rules.folder().join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_named_file_is_required() {
        let text = "
            jwt: { key_file: jwt.pem, algorithms: [RS256] }
            store: { url: 'rediss://h', ca: ca.pem, client_cert: client.pem, client_key: client.key, password_file: password }
            stores: { other: { url: 'redis+sentinel://h/main', sentinel_password_file: sentinels } }
            service:
              grpc: { listen: 127.0.0.1:0, tokens_file: tokens }
              xds: { url: 'https://h:1', ca: xds-ca.pem, client_cert: xds.pem, client_key: xds.key }
            admin: { listen: 127.0.0.1:0, tls: { certificates: { cert: admin.pem, key: admin.key } } }
            gateway:
              tls: { certificates: { cert: cert.pem, key: cert.key }, client_ca: people.pem }
              routes: [{ path: /**, upstream: 'https://h', upstream_tls: { ca: up.pem } }]
            limits: [{ name: one, store: other, limit: 1, window: 1s }]
        ";
        let mut files = required_files(Path::new("folder/tollgate.yaml"), text.as_bytes());
        files.sort();
        let names = [
            "admin.key",
            "admin.pem",
            "ca.pem",
            "cert.key",
            "cert.pem",
            "client.key",
            "client.pem",
            "jwt.pem",
            "password",
            "people.pem",
            "sentinels",
            "tokens",
            "up.pem",
            "xds-ca.pem",
            "xds.key",
            "xds.pem",
        ];
        assert_eq!(files, names.map(|name| Path::new("folder").join(name)));
        assert_eq!(required_files(Path::new("tollgate.yaml"), b"limits: ["), Vec::<PathBuf>::new());
    }
}
