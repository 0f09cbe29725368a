//! `POST /v1/explain`: which limits apply to a request, and what they would decide. Nothing is counted.

use std::collections::BTreeMap;
use std::net::IpAddr;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Deserialize;

use super::AdminState;
use crate::explanation::{self, Counts, RequestDescription};
use crate::service::error_body::{ErrorBody, quoted};
use crate::service::http::{Object, OneOrMany, StringOrStrings, parse_json, read_json};

/// The most headers of a request to explain.
const MAX_HEADERS: usize = 100;

/// A request to explain.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ExplainRequest {
    /// GET by default.
    method: Option<String>,
    /// The path with its query.
    path: String,
    /// The host, as in the header `Host`.
    host: Option<String>,
    /// The address of the client.
    ip: Option<IpAddr>,
    /// Headers by name: a string, or a list of strings.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, StringOrStrings>")]
    headers: BTreeMap<String, OneOrMany>,
}

impl ExplainRequest {
    fn described(self) -> Result<RequestDescription, ErrorBody> {
        let mut headers = HeaderMap::new();
        if self.headers.len() > MAX_HEADERS {
            return Err(ErrorBody::invalid(format!("`headers` has more than {MAX_HEADERS} names: send fewer")));
        }
        let lines =
            self.headers.iter().flat_map(|(name, values)| values.as_slice().iter().map(move |value| (name, value)));
        for (name, value) in lines {
            let invalid = |what: &str| {
                ErrorBody::invalid(format!(
                    "`headers`: {} has an invalid {what}: use letters, digits and printable characters",
                    quoted(name)
                ))
            };
            let value = HeaderValue::from_str(value).map_err(|_| invalid("value"))?;
            headers.append(HeaderName::try_from(name).map_err(|_| invalid("name"))?, value);
        }
        if let Some(host) = self.host {
            let invalid =
                |_| ErrorBody::invalid(format!("`host` {} is not a host: use one such as example.com", quoted(&host)));
            headers.insert(header::HOST, HeaderValue::from_str(&host).map_err(invalid)?);
        }
        let method = self.method.unwrap_or_else(|| "GET".to_owned());
        let request = RequestDescription { method, path: self.path, headers, ip: self.ip, ..Default::default() };
        request.check().map_err(ErrorBody::invalid)?;
        Ok(request)
    }
}

pub(super) async fn explain(State(state): State<AdminState>, request: Request) -> Result<Response, ErrorBody> {
    let Object(request) = parse_json::<Object<ExplainRequest>>(&read_json(request).await?)?;
    let request = request.described()?;
    let in_force = state.server.reloads.in_force();
    let explained = request.explain(&in_force.file, (&state.server.gate, Counts::Live), &state.server.learners).await;
    // The rules in force compile.
    let explained = explained.map_err(|_| ErrorBody::failed())?;
    Ok(Json(explanation::Json::of(&explained)).into_response())
}
