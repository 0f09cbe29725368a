//! `GET /openapi.json`: an OpenAPI 3.1 description of the HTTP service.

use std::sync::LazyLock;

use axum::response::Response;
use schemars::{JsonSchema, Schema};
use serde_json::{Value, json};

use super::batch::MAX_BATCH;
use super::changes::{RefundRequest, ResetRequest};
use super::check_request::CheckRequest;
use super::check_response::CheckResponse;
use super::reservations::{ReserveRequest, ReserveResponse, SettleRequest, SettleResponse};
use crate::openapi::{self, Schemas};
use crate::service::error_body::ErrorBody;

/// The methods that an OpenAPI document can describe.
const METHODS: [&str; 8] = ["get", "put", "post", "delete", "options", "head", "patch", "trace"];

pub(super) async fn openapi() -> Response {
    static DOCUMENT: LazyLock<String> = LazyLock::new(|| format!("{:#}\n", document()));
    openapi::respond(&DOCUMENT)
}

fn document() -> Value {
    let mut schemas = Schemas::new();
    let paths = json!({
        "/v1/check": schemas.questions::<CheckRequest>("Take units from limits", "Checks a key of a limit, or all \
            limits that match a described request. The status is 200 whether the check is allowed or denied."),
        "/v1/peek": schemas.questions::<CheckRequest>("Read the state of limits", "As a check with cost 0: takes nothing."),
        "/v1/refund": schemas.changes::<RefundRequest>("Return units to a key", "Returns units as far as they still \
            count against the key."),
        "/v1/reset": schemas.changes::<ResetRequest>("Reset a key", "Returns the whole quota of a key."),
        "/v1/reserve": schemas.single::<ReserveRequest, ReserveResponse<'static>>("Reserve units", "Takes an estimated \
            cost, to be corrected later.", &[("503", "The store did not reply, or too many reservations are open.")]),
        "/v1/settle": schemas.single::<SettleRequest, SettleResponse>("Settle a reservation", "Corrects the cost of a \
            reservation, once.", &[("404", "The reservation was made elsewhere."), ("409", "It was settled before."),
            ("410", "It has expired."), ("503", "The store did not reply.")]),
        "/v1/authorize": schemas.authorize(),
        "/healthz": { "get": {
            "summary": "Check that the server runs",
            "security": [],
            "responses": { "200": text("The server runs."), "403": schemas.error("The request is from a web page."),
                "421": schemas.error("The host is not served.") },
        } },
        "/openapi.json": { "get": {
            "summary": "Get this document",
            "security": [],
            "responses": { "200": { "description": "This document.",
                    "content": { "application/json": { "schema": { "type": "object" } } } },
                "403": schemas.error("The request is from a web page."),
                "421": schemas.error("The host is not served.") },
        } },
    });
    let description = "Decisions of a rate limiter. A token is needed only where the listener has a tokens_file.";
    let mut document = openapi::document("Tollgate decision service", description, &paths, schemas);
    document["components"]["securitySchemes"]["proxy"] =
        json!({ "type": "apiKey", "in": "header", "name": "X-Tollgate-Token" });
    document
}

impl Schemas {
    /// Describes a path that answers one question, or an array of them.
    fn questions<Question: JsonSchema>(&mut self, summary: &str, description: &str) -> Value {
        let response = self.responses.subschema_for::<CheckResponse<'static>>();
        let answer = one_or_many(&response, &response);
        self.post_one_or_many::<Question>(summary, description, &answer)
    }

    /// Describes a path that changes keys. The store may fail for single changes of an array.
    fn changes<Change: JsonSchema>(&mut self, summary: &str, description: &str) -> Value {
        let response = self.responses.subschema_for::<CheckResponse<'static>>();
        let error = self.responses.subschema_for::<ErrorBody>();
        let answer = one_or_many(&response, &json!({ "anyOf": [response, error] }));
        let mut path = self.post_one_or_many::<Change>(summary, description, &answer);
        path["post"]["responses"]["503"] = self.error("The store did not confirm the change.");
        path
    }

    /// Describes a path that answers one question only.
    fn single<Question: JsonSchema, Answer: JsonSchema>(
        &mut self,
        summary: &str,
        description: &str,
        errors: &[(&str, &str)],
    ) -> Value {
        let answer = json!(self.responses.subschema_for::<Answer>());
        let mut path = self.post_one_or_many::<Question>(summary, description, &answer);
        let question = json!(self.requests.subschema_for::<Question>());
        path["post"]["requestBody"]["content"]["application/json"]["schema"] = question;
        for (status, description) in errors {
            path["post"]["responses"][*status] = self.error(description);
        }
        path
    }

    fn post_one_or_many<Question: JsonSchema>(&mut self, summary: &str, description: &str, answer: &Value) -> Value {
        let question = self.requests.subschema_for::<Question>();
        let body = one_or_many(&question, &question);
        json!({ "post": {
            "summary": summary,
            "description": description,
            "requestBody": { "required": true, "content": { "application/json": { "schema": body } } },
            "responses": {
                "200": { "description": "The decision, or an array of them in the order of the request.",
                    "content": { "application/json": { "schema": answer } } },
                "400": self.error("The body is invalid."),
                "401": self.error("The token is missing or invalid."),
                "403": self.error("The request is from a web page."),
                "408": self.error("The body did not arrive in time."),
                "413": self.error("The body is too large."),
                "415": self.error("The body is not application/json."),
                "421": self.error("The host is not served."),
            },
        } })
    }

    /// Describes the path for reverse proxies, which accepts every method.
    fn authorize(&mut self) -> Value {
        let mut refused = self.error(
            "The response for the client, such as 429 with Retry-After, or the status in deny_status. Its body and its \
             media type depend on the rules.",
        );
        refused["content"]["application/problem+json"] = json!({ "schema": { "type": "object" } });
        let operation = json!({
            "summary": "Answer a reverse proxy",
            "description": "200 if the original request may pass. The proxy describes that request, by the headers of one \
                kind, or as Envoy does: by the method and the path after /v1/authorize.",
            "security": [{}, { "bearer": [] }, { "proxy": [] }],
            "responses": {
                "200": { "description": "The request may pass.", "headers": {
                    "X-RateLimit-Limit": { "schema": { "type": "integer" } },
                    "X-RateLimit-Remaining": { "schema": { "type": "integer" } },
                    "X-RateLimit-Reset": { "schema": { "type": "integer" } },
                } },
                "4XX": refused,
                "5XX": refused,
            },
        });
        let text = |name: &str, description: &str| json!({ "name": name, "in": "header", "description": description, "schema": { "type": "string" } });
        let mut path = json!({ "parameters": [
            { "name": "deny_status", "in": "query", "description": "The status of refusals, for nginx.",
                "schema": { "type": "integer", "minimum": 400, "maximum": 599 } },
            text("X-Forwarded-Uri", "The original path and query, from Traefik and Caddy."),
            text("X-Forwarded-Method", "The original method, from Traefik and Caddy."),
            text("X-Forwarded-Host", "The original host, from Traefik and Caddy."),
            text("X-Original-URI", "The original path and query, from nginx and HAProxy."),
            text("X-Original-URL", "The original URL, from ingress-nginx."),
            text("X-Original-Method", "The original method, from nginx and HAProxy."),
            text("X-Original-Host", "The original host, from nginx and HAProxy."),
            text("X-Forwarded-For", "Addresses; the last one is that of the client."),
        ] });
        for method in METHODS {
            path[method] = operation.clone();
        }
        path
    }
}

/// Returns the schema of one value, or an array of others.
fn one_or_many(one: &Schema, item: &impl serde::Serialize) -> Value {
    json!({ "anyOf": [one, { "type": "array", "items": item, "maxItems": MAX_BATCH }] })
}

fn text(description: &str) -> Value {
    json!({ "description": description, "content": { "text/plain": { "schema": { "type": "string" } } } })
}
