//! `GET /openapi.json`: an OpenAPI 3.1 description of the admin listener.

use std::sync::LazyLock;

use axum::response::Response;
use schemars::JsonSchema;
use serde_json::{Value, json};
use tollgate_tools::simulate::report::Report;

use super::bans::BanList;
use super::explain::ExplainRequest;
use super::keys::{BanRequest, GrantRequest, Keys, ResetRequest, UnbanRequest};
use super::live::LiveResponse;
use super::rules::{Changed, Rollback, Rules, RulesError, Validation};
use super::simulate::SimulateRequest;
use super::status::Status;
use super::top::TopResponse;
use crate::explanation;
use crate::openapi::{self, Schemas};

pub(super) async fn openapi() -> Response {
    static DOCUMENT: LazyLock<String> = LazyLock::new(|| format!("{:#}\n", document()));
    openapi::respond(&DOCUMENT)
}

fn document() -> Value {
    let mut schemas = Schemas::new();
    let paths = paths(&mut schemas);
    let description = "State of a running server, and changes to its rules and keys. A token is needed where the listener \
        has a tokens_file.";
    openapi::document("Tollgate admin API", description, &paths, schemas)
}

fn paths(schemas: &mut Schemas) -> Value {
    let count = json!({ "type": "integer", "minimum": 1, "maximum": 1000 });
    let order = json!({ "enum": ["denied", "decisions", "name"] });
    let text = json!({ "type": "string" });
    let keys = json!({ "type": "array", "items": { "type": "string" } });
    json!({
        "/v1/status": { "get": schemas.read::<Status>("Read the state of the server", json!([])) },
        "/v1/live": { "get": schemas.read::<LiveResponse>("Read decisions per second", json!([
            parameter("count", "The most limits in the response.", &count),
            parameter("order", "The order of limits.", &order),
        ])) },
        "/v1/top": { "get": schemas.read::<TopResponse>("Read the keys that limits deny or nearly deny most", json!([
            parameter("over", "The window.", &json!({ "enum": ["1m", "1h"] })),
            parameter("kind", "The decisions to rank by.",
                &json!({ "enum": ["denied", "shadow_denied", "near_limit"] })),
            parameter("limit", "The name of a limit. All limits if left out.", &text),
            parameter("count", "The most keys in the response.", &count),
            parameter("scope", "This node, or all nodes that share a Redis.", &json!({ "enum": ["node", "fleet"] })),
        ])) },
        "/v1/rules": {
            "get": schemas.read::<Rules>("Read the rules in force", json!([])),
            "put": schemas.replace_rules(),
        },
        "/v1/rules/validate": { "post": schemas.validate_rules() },
        "/v1/rules/rollback": { "post": schemas.roll_back() },
        "/v1/keys": { "get": schemas.read::<Keys>("Read the state of a key", json!([
            parameter("key", "A part of the key, in its order.", &keys),
            parameter("limit", "The name of a limit. All limits whose key has as many parts if left out.", &text),
            parameter("plan", "The plan whose numbers apply, of that limit. If left out, that of the key's last request, if this process remembers one, or else the limit's own numbers.", &text),
        ])) },
        "/v1/keys/reset": { "post": schemas.change_key::<ResetRequest>("Give a key its whole quota back") },
        "/v1/keys/grant": { "post": schemas.change_key::<GrantRequest>("Give units back to a key") },
        "/v1/keys/ban": { "post": schemas.change_key::<BanRequest>("Ban a key") },
        "/v1/keys/unban": { "post": schemas.unban() },
        "/v1/bans": { "get": schemas.read::<BanList>("Read the keys that operators have banned", json!([
            parameter("limit", "The name of a limit. All limits if left out.", &text),
            parameter("count", "The most bans in the response.", &count),
        ])) },
        "/v1/explain": { "post":
            schemas.post::<ExplainRequest, explanation::Json<'static>>("Explain which limits apply to a request") },
        "/v1/simulate": { "post": schemas.simulate() },
    })
}

impl Schemas {
    /// Describes a path to read.
    fn read<Answer: JsonSchema>(&mut self, summary: &str, parameters: Value) -> Value {
        let mut operation = self.operation::<Answer>(summary);
        operation["parameters"] = parameters;
        operation
    }

    /// Describes a path that takes and answers JSON.
    fn post<Question: JsonSchema, Answer: JsonSchema>(&mut self, summary: &str) -> Value {
        let schema = self.requests.subschema_for::<Question>();
        let mut operation = self.operation::<Answer>(summary);
        operation["requestBody"] = json!({ "required": true, "content": { "application/json": { "schema": schema } } });
        self.with_body_errors(operation)
    }

    fn change_key<Question: JsonSchema>(&mut self, summary: &str) -> Value {
        let mut operation = self.post::<Question, Keys>(summary);
        operation["responses"]["409"] = self.error("The limit cannot ban, or too many keys are banned.");
        operation["responses"]["503"] = self.error("The store did not confirm the change.");
        operation
    }

    fn unban(&mut self) -> Value {
        let mut operation = self.change_key::<UnbanRequest>("Lift the ban of a key");
        operation["responses"]["404"] = self.error("No ban has this hash.");
        operation
    }

    fn simulate(&mut self) -> Value {
        let mut operation = self.post::<SimulateRequest, Report>("Run limits on generated traffic");
        operation["responses"]["503"] = self.error("Another simulation is running.");
        operation
    }

    fn validate_rules(&mut self) -> Value {
        let mut operation = self.operation::<Validation>("Check rules");
        operation["responses"]["503"] = self.error("Other rules are being checked, or the check takes too long.");
        self.with_rules(operation)
    }

    fn replace_rules(&mut self) -> Value {
        let mut operation = self.operation::<Changed>("Replace the rules");
        operation["parameters"] = json!([{ "name": "If-Match", "in": "header", "required": true,
            "description": "The version that has to be in force, in quotes.", "schema": { "type": "string" } }]);
        operation["responses"]["428"] = self.error("The request names no version.");
        let operation = self.with_rule_errors(operation);
        self.with_rules(operation)
    }

    fn roll_back(&mut self) -> Value {
        let mut operation = self.post::<Rollback, Changed>("Return to rules of the history");
        operation["responses"]["404"] = self.error("The history has no such version.");
        operation["responses"]["409"] = self.error("The version is in force already.");
        self.with_rule_errors(operation)
    }

    /// Adds a body of rules.
    fn with_rules(&mut self, mut operation: Value) -> Value {
        let content = json!({ "application/yaml": { "schema": { "type": "string" } } });
        operation["requestBody"] = json!({ "required": true, "content": content });
        self.with_body_errors(operation)
    }

    fn with_rule_errors(&mut self, mut operation: Value) -> Value {
        let schema = self.responses.subschema_for::<RulesError>();
        for (status, description) in [
            ("412", "Another version is in force."),
            ("422", "The rules are not valid."),
            ("503", "The change was not confirmed."),
        ] {
            let content = json!({ "application/json": { "schema": schema } });
            operation["responses"][status] = json!({ "description": description, "content": content });
        }
        operation
    }

    fn with_body_errors(&mut self, mut operation: Value) -> Value {
        for (status, description) in [
            ("408", "The body did not arrive in time."),
            ("413", "The body is too large."),
            ("415", "The media type of the body is another one."),
        ] {
            operation["responses"][status] = self.error(description);
        }
        operation
    }

    fn operation<Answer: JsonSchema>(&mut self, summary: &str) -> Value {
        let answer = self.responses.subschema_for::<Answer>();
        json!({
            "summary": summary,
            "responses": {
                "200": { "description": "The result.", "content": { "application/json": { "schema": answer } } },
                "400": self.error("A parameter or the body is invalid."),
                "401": self.error("The token is missing or invalid."),
                "403": self.error("The API is closed, or the request is from a web page."),
                "421": self.error("The host is not served."),
            },
        })
    }
}

fn parameter(name: &str, description: &str, schema: &Value) -> Value {
    json!({ "name": name, "in": "query", "description": description, "schema": schema })
}
