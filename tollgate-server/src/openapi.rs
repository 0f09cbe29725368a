//! What the OpenAPI 3.1 documents of the admin listener and of the HTTP service have in common. Schemas come from the types
//! of requests and responses, so they cannot differ from what is served.

use axum::http::header;
use axum::response::{IntoResponse, Response};
use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde_json::{Map, Value, json};

use crate::service::error_body::ErrorBody;

/// Generates the schemas of requests and of responses, which differ in the fields that are required.
pub(crate) struct Schemas {
    pub(crate) requests: SchemaGenerator,
    pub(crate) responses: SchemaGenerator,
}

impl Schemas {
    pub(crate) fn new() -> Self {
        let settings =
            SchemaSettings::draft2020_12().with(|settings| settings.definitions_path = "/components/schemas".into());
        let responses = settings.clone().for_serialize().into_generator();
        Self { requests: settings.for_deserialize().into_generator(), responses }
    }

    /// Describes a response that reports an error.
    pub(crate) fn error(&mut self, description: &str) -> Value {
        let schema = self.responses.subschema_for::<ErrorBody>();
        json!({ "description": description, "content": { "application/json": { "schema": schema } } })
    }

    /// Returns all schemas that others refer to.
    fn into_definitions(mut self) -> Map<String, Value> {
        let mut definitions = self.requests.take_definitions(true);
        definitions.extend(self.responses.take_definitions(true));
        definitions
    }
}

/// Describes an API. Requests have a bearer token, or none where the listener needs none.
pub(crate) fn document(title: &str, description: &str, paths: &Value, schemas: Schemas) -> Value {
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": env!("CARGO_PKG_VERSION"),
            "description": description,
            "license": { "name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0" },
        },
        "paths": paths,
        "security": [{}, { "bearer": [] }],
        "components": {
            "schemas": schemas.into_definitions(),
            "securitySchemes": { "bearer": { "type": "http", "scheme": "bearer" } },
        },
    })
}

/// Answers with a document.
pub(crate) fn respond(document: &'static str) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], document).into_response()
}
