//! The listeners that a rule file and the command line want.

use std::path::Path;
use std::sync::Arc;

use tollgate_config::internal::{Address, Listener, ServiceRule, SettingError};
use tollgate_config::{Parsed, Problems, RuleFile};
use tollgate_net::descriptors::{self, Plan, Share};
use tollgate_net::listening::{Flag, Setting};
use tollgate_net::tls::Tls;

use super::Refusal;
use crate::net_settings;
use crate::reload::changes::CliOverrides;
use crate::service::surfaces::Surface;
use crate::service::tokens::Tokens;

/// A listener that is wanted.
#[derive(Clone)]
pub(super) struct Wanted {
    pub(super) surface: Surface,
    /// The source of the address.
    pub(super) setting: Setting,
    /// The settings, with the address of the command line.
    pub(super) listener: Listener,
}

/// Returns the listeners of a file. Addresses of the command line override those in the file.
pub(super) fn wanted(file: &RuleFile, overrides: &CliOverrides) -> Vec<Wanted> {
    let ServiceRule { http, grpc, resp, .. } = &file.service;
    let admin = file.admin.as_ref().map(|admin| {
        let mut listener = Listener::new(admin.listen.clone());
        listener.hosts.clone_from(&admin.hosts);
        listener.tokens_file.clone_from(&admin.tokens_file);
        listener.tls.clone_from(&admin.tls);
        listener
    });
    let (http_flag, admin_flag) = (overrides.http.as_ref(), overrides.admin.as_ref());
    let http =
        (Surface::Http, Setting::key_or_flag("service.http", Flag::HTTP, http_flag), at(http.clone(), http_flag));
    let resp = (Surface::Resp, Setting::Key("service.resp", None), resp.clone());
    let grpc = (Surface::Grpc, Setting::Key("service.grpc", None), grpc.clone());
    let admin = (Surface::Admin, Setting::key_or_flag("admin.listen", Flag::ADMIN, admin_flag), at(admin, admin_flag));
    let all = [http, resp, grpc, admin].into_iter();
    all.filter_map(|(surface, setting, listener)| Some(Wanted { surface, setting, listener: listener? })).collect()
}

/// Returns a listener at the address of the command line, if there is one.
fn at(listener: Option<Listener>, address: Option<&Address>) -> Option<Listener> {
    let Some(address) = address else { return listener };
    let mut listener = listener.unwrap_or_else(|| Listener::new(address.clone()));
    listener.listen = address.clone();
    Some(listener)
}

/// Returns whether the decision service is wanted.
pub(crate) fn wants_service(file: &RuleFile, overrides: &CliOverrides) -> bool {
    wanted(file, overrides).iter().any(|one| one.surface != Surface::Admin)
}

/// Returns why a listener of the decision service is refused, if other machines reach it without authentication.
pub(super) fn unprotected_listener(file: &RuleFile, overrides: &CliOverrides) -> Option<SettingError> {
    let service = wanted(file, overrides).into_iter().filter(|one| one.surface != Surface::Admin);
    service.into_iter().find_map(|Wanted { surface, listener, .. }| {
        let address = listener.listen.as_str();
        let is_protected = listener.open || listener.tokens_file.is_some() || listener.requires_certificates();
        (!is_protected && !listener.listen.is_loopback()).then(|| {
            let problem =
                format!("{surface} listens on {address}, where other machines reach it, without authentication");
            let fix = format!(
                "set `{surface}.tokens_file`, set `{surface}.tls.client_ca`, listen on 127.0.0.1, or set \
                 `{surface}.open: true`"
            );
            SettingError::new(problem, fix).of(surface.as_str()).of("service")
        })
    })
}

/// Returns the listeners to divide descriptors between, with the gateway of `base`.
pub(super) fn shares(all: &[Wanted], base: descriptors::Surfaces) -> descriptors::Surfaces {
    let share = |surface| {
        let one = all.iter().find(|one| one.surface == surface);
        Share { is_there: one.is_some(), wanted: one.and_then(|one| one.listener.max_connections) }
    };
    let (service, grpc) = (share(Surface::Http), share(Surface::Grpc));
    descriptors::Surfaces { service, grpc, resp: share(Surface::Resp), admin: share(Surface::Admin), ..base }
}

/// Returns the problems of the listeners in a file that can be found without binding them.
pub(crate) fn problems(file: &Parsed) -> Option<Problems> {
    let none = CliOverrides::default();
    let of_tokens = wanted(file, &none).into_iter().filter_map(|Wanted { surface, listener, .. }| {
        let path = listener.tokens_file.as_ref().map(|path| file.folder().join(path))?;
        let error = Tokens::open(&path).err()?;
        let error = SettingError::new(error.problem(), error.fix()).of("tokens_file").of(surface.as_str());
        Some(if surface == Surface::Admin { error } else { error.of("service") })
    });
    let errors: Vec<SettingError> = unprotected_listener(file, &none).into_iter().chain(of_tokens).collect();
    (!errors.is_empty()).then(|| file.problems(errors))
}

impl Wanted {
    /// Reads its tokens, if it has any.
    pub(super) fn tokens(&self, folder: &Path) -> Result<Option<Arc<Tokens>>, Refusal> {
        let path = self.listener.tokens_file.as_ref().map(|path| folder.join(path));
        let tokens = path.map(|path| Tokens::open(&path).map(Arc::new)).transpose();
        tokens.map_err(|error| Refusal::Unusable(format!("{}: {error}", self.surface)))
    }

    /// Reads its certificates, if it has TLS.
    pub(super) fn tls(&self, folder: &Path) -> Result<Option<Tls>, Refusal> {
        let setting = match self.surface {
            Surface::Grpc => "service.grpc.tls",
            Surface::Resp => "service.resp.tls",
            Surface::Http | Surface::Authorize => "service.http.tls",
            Surface::Admin => "admin.tls",
        };
        let tls = self.listener.tls.as_ref().map(|rule| net_settings::tls(rule, folder, setting)).transpose();
        // They have been read once already, with better messages.
        let unusable = |errors: Vec<SettingError>| errors.first().map(ToString::to_string).unwrap_or_default();
        tls.map_err(|errors| Refusal::Unusable(unusable(errors)))
    }

    /// Returns its share of the connections.
    pub(super) const fn max_connections(&self, plan: &Plan) -> u32 {
        match self.surface {
            Surface::Http | Surface::Authorize => plan.service,
            Surface::Grpc => plan.grpc,
            Surface::Resp => plan.resp,
            Surface::Admin => plan.admin,
        }
    }
}
