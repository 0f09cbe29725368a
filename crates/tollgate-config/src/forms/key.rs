//! Key parts, and the sources of plans, tokens and costs: `kind:NAME`.

use std::fmt;

use tollgate_rules as rules;
use tollgate_rules::CertificateField;
use tollgate_rules::internal::HeaderFact;
use tollgate_rules::internal::config::{checks, jwt};

use super::super::problem::{InvalidValue, shown};
use super::{HeaderName, Syntax, form, nearest};

/// IPv6 addresses of one subscriber share this many bits.
const SUBSCRIBER_BITS: u8 = 64;
/// The prefix length of a single IPv6 address.
const WHOLE_ADDRESS: u8 = 128;

/// One part of a key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum KeyPart {
    /// `ip` or `ip/56`: the client's address, or a prefix of an IPv6 address.
    Ip {
        /// The prefix length of IPv6 addresses.
        v6_prefix: u8,
    },
    /// `header:NAME`.
    Header(HeaderName),
    /// `cookie:NAME`.
    Cookie(String),
    /// `query:NAME`.
    Query(String),
    /// `path`.
    Path,
    /// `method`.
    Method,
    /// `host`.
    Host,
    /// `route`.
    Route,
    /// `jwt:CLAIM`.
    Jwt(String),
    /// `cert:fingerprint`, `cert:cn` or `cert:san`.
    Certificate(CertificateField),
    /// `descriptor:NAME`.
    Descriptor(String),
    /// `const:TEXT`.
    Const(String),
}

impl From<&KeyPart> for rules::KeyPart {
    fn from(part: &KeyPart) -> Self {
        match part {
            KeyPart::Ip { v6_prefix } => Self::ip_network(*v6_prefix).unwrap_or_else(Self::ip),
            KeyPart::Header(name) => Self::header(name.as_str()),
            KeyPart::Cookie(name) => Self::cookie(name),
            KeyPart::Query(name) => Self::query(name),
            KeyPart::Path => Self::path(),
            KeyPart::Method => Self::method(),
            KeyPart::Host => Self::host(),
            KeyPart::Route => Self::route(),
            KeyPart::Jwt(claim) => Self::jwt(claim),
            KeyPart::Certificate(field) => Self::certificate(*field),
            KeyPart::Descriptor(name) => Self::descriptor(name),
            KeyPart::Const(text) => Self::constant(text),
        }
    }
}

/// The notation of a rule file.
impl fmt::Display for KeyPart {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        rules::KeyPart::from(self).fmt(out)
    }
}

const BARE: [&str; 5] = ["ip", "path", "method", "host", "route"];
const KINDS: [&str; 7] = ["header", "cookie", "query", "jwt", "cert", "descriptor", "const"];

form! {
    KeyPart {
        format: "key-part", noun: "a part of a key", example: "header:x-user-id",
        pattern: r"^(ip(/[0-9]+)?|path|method|host|route|(header|cookie|query|jwt|cert|descriptor|const):[\s\S]+)$"
    }
}

impl KeyPart {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        match text {
            "ip" => return Ok(Self::Ip { v6_prefix: SUBSCRIBER_BITS }),
            "path" => return Ok(Self::Path),
            "method" => return Ok(Self::Method),
            "host" => return Ok(Self::Host),
            "route" => return Ok(Self::Route),
            _ => {}
        }
        if let Some(bits) = text.strip_prefix("ip/") {
            let whole = bits.bytes().all(|byte| byte.is_ascii_digit());
            let bits = if whole { bits.parse().ok() } else { None };
            let v6_prefix = bits.filter(|bits| (1..=128).contains(bits)).ok_or_else(|| {
                InvalidValue::new(
                    format!("`{}` has an invalid prefix length", shown(text)),
                    "use 1 to 128 bits of an IPv6 address, such as ip/56",
                )
            })?;
            return Ok(Self::Ip { v6_prefix });
        }
        let Some((kind, name)) = text.split_once(':') else { return Err(not_a_part(text)) };
        Self::of_kind(kind, name)
    }

    /// Reads the name after `kind:`.
    fn of_kind(kind: &str, name: &str) -> Result<Self, InvalidValue> {
        let checked = || checked_name(kind, name);
        match kind {
            "header" => Ok(Self::Header(HeaderName::read(checked()?)?)),
            "cookie" => Ok(Self::Cookie(checked()?.to_owned())),
            "query" => Ok(Self::Query(checked()?.to_owned())),
            "jwt" => Ok(Self::Jwt(checked()?.to_owned())),
            "cert" => certificate(name),
            "descriptor" => Ok(Self::Descriptor(checked()?.to_owned())),
            "const" => Ok(Self::Const(checked()?.to_owned())),
            _ => Err(unknown_kind(kind)),
        }
    }
}

fn certificate(field: &str) -> Result<KeyPart, InvalidValue> {
    const FIELDS: [CertificateField; 3] = [CertificateField::Fingerprint, CertificateField::Cn, CertificateField::San];
    let known = FIELDS.into_iter().find(|known| known.as_str() == field);
    known.map(KeyPart::Certificate).ok_or_else(|| {
        let problem = format!("`cert:{}` is not a field of a certificate", shown(field));
        InvalidValue::new(problem, "write cert:fingerprint, cert:cn or cert:san")
    })
}

/// Returns the error for a word without a kind. As a constant, it would make all requests share one count, which is
/// rarely intended: the fix names the likely key part, and `const:` for a real constant.
fn not_a_part(word: &str) -> InvalidValue {
    let problem = format!("`{}` is not a part of a key", shown(word));
    let part = meant(word).unwrap_or_else(|| "write ip, header:NAME, cookie:NAME, query:NAME or jwt:CLAIM".to_owned());
    let fix = match word {
        "" => part,
        _ => format!("{part}, or const:{} for a constant, the same for all requests", shown(word)),
    };
    InvalidValue::new(problem, fix)
}

/// Returns the fix for a common word for a key part, many of them from nginx and other rate limiters.
fn meant(word: &str) -> Option<String> {
    let name = word.trim_start_matches('$');
    let as_header = |name: &str| name.to_ascii_lowercase().replace('_', "-");
    if word.starts_with('$') {
        let variables = [("http_", "header"), ("cookie_", "cookie"), ("arg_", "query")];
        let found = variables.iter().find_map(|(prefix, kind)| Some((*kind, name.strip_prefix(prefix)?)));
        if let Some((kind, name)) = found.filter(|(_, name)| !name.is_empty() && *name != "host") {
            let name = if kind == "header" { as_header(name) } else { name.to_owned() };
            return Some(format!("write {kind}:{}", shown(&name)));
        }
    }
    let fix = match name.to_ascii_lowercase().replace(['-', ' ', '.'], "_").as_str() {
        "remote_addr" | "binary_remote_addr" | "remote_address" | "remote_ip" | "remoteaddr" | "client_ip"
        | "clientip" | "client_address" | "source_ip" | "ip_address" | "ipaddress" | "address" | "addr" | "ips"
        | "peer" => "write ip",
        "x_forwarded_for" | "proxy_add_x_forwarded_for" | "forwarded_for" | "forwarded" | "x_real_ip" | "real_ip" => {
            "write ip, and list your proxies in `gateway.trusted_proxies`"
        }
        "user" | "users" | "user_id" | "userid" | "username" | "account" | "customer" | "tenant" | "client"
        | "client_id" | "consumer" | "sub" | "id" => {
            "write where the request has it, such as header:x-user-id, cookie:NAME or jwt:sub"
        }
        "api_key" | "apikey" => "write header:x-api-key, or query:api_key if it is in the query",
        "token" | "access_token" | "bearer" | "auth" | "authorization" | "jwt" | "claim" => {
            "write jwt:sub for a claim of a verified token, or header:authorization for the token of that header"
        }
        "session" | "session_id" | "sessionid" => "write cookie:NAME with the name of the session cookie",
        "uri" | "url" | "request_uri" | "request_path" | "endpoint" | "document_uri" => "write path",
        "hostname" | "http_host" | "server_name" | "domain" | "authority" => "write host",
        "verb" | "request_method" | "http_method" => "write method",
        "global" | "all" | "any" | "everyone" | "everybody" | "shared" | "default" | "none" | "service" | "server" => {
            "remove `key` to share one count among all requests"
        }
        _ => return near(word),
    };
    Some(fix.to_owned())
}

/// Returns the fix for a typo, and for a word that looks like a header name.
fn near(word: &str) -> Option<String> {
    // Most two-letter words are one edit from `ip`.
    if word.len() > 2
        && let Some(near) = nearest(word, BARE)
    {
        return Some(format!("write {near}"));
    }
    if let Some(kind) = nearest(word, KINDS).filter(|kind| *kind != "const") {
        return Some(format!("write {kind}:NAME"));
    }
    let is_header = word.contains('-') && HeaderName::read(word).is_ok();
    is_header.then(|| format!("write header:{}", shown(word)))
}

fn checked_name<'n>(kind: &str, name: &'n str) -> Result<&'n str, InvalidValue> {
    checks::key_name("key", kind, name)?;
    Ok(name)
}

fn unknown_kind(kind: &str) -> InvalidValue {
    let meant = match kind {
        "claim" | "token" => Some("jwt"),
        "arg" | "param" | "parameter" => Some("query"),
        _ => nearest(kind, KINDS),
    };
    let fix = match meant {
        Some(near) => format!("did you mean `{near}:`?"),
        None => format!("use one of {}", KINDS.map(|kind| format!("{kind}:")).join(", ")),
    };
    InvalidValue::new(format!("`{}:` is not a kind of key part", shown(kind)), fix)
}

/// The source of the client's plan: a header, a claim or a descriptor entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PlanSource(pub(crate) KeyPart);

form! {
    PlanSource {
        format: "plan-source", noun: "a source of the plan", example: "jwt:plan",
        pattern: r"^(header|jwt|descriptor):[\s\S]+$"
    }
}

impl PlanSource {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        match text.split_once(':').unwrap_or((text, "")) {
            (kind @ ("header" | "jwt" | "descriptor"), name) => KeyPart::of_kind(kind, name).map(Self),
            _ => Err(not_a_source(&Self::SYNTAX, text, "write header:NAME, jwt:CLAIM or descriptor:NAME")),
        }
    }
}

/// The source of a request header for upstreams: a fact that the gateway has established itself. Clients choose the other
/// facts, so a header with one of them would only look trustworthy.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HeaderSource {
    /// `ip`, the whole address of the client, `ip/56`, `route`, `jwt:CLAIM` or `cert:FIELD`.
    Part(KeyPart),
    /// `limit`: the name of the limit that decided.
    Limit,
}

form! {
    HeaderSource {
        format: "header-source", noun: "a source of a header", example: "ip",
        pattern: r"^(ip(/[0-9]+)?|route|limit|(jwt|cert):[\s\S]+)$"
    }
}

impl HeaderSource {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        const FIX: &str = "write ip, route, limit, jwt:CLAIM, cert:fingerprint, cert:cn or cert:san";
        match text.split_once(':') {
            None if text == "limit" => Ok(Self::Limit),
            // A key counts a network as one client. A header has the address.
            None if text == "ip" => Ok(Self::Part(KeyPart::Ip { v6_prefix: WHOLE_ADDRESS })),
            None if text == "route" || text.starts_with("ip/") => KeyPart::read(text).map(Self::Part),
            Some((kind @ ("jwt" | "cert"), name)) => KeyPart::of_kind(kind, name).map(Self::Part),
            Some(("const", constant)) => {
                let fix = format!("write the text itself in place of the map: `{}`", shown(constant));
                Err(not_a_source(&Self::SYNTAX, text, &fix))
            }
            _ => Err(not_a_source(&Self::SYNTAX, text, FIX)),
        }
    }

    /// Returns the fact for requests.
    pub fn compile(&self) -> HeaderFact {
        match self {
            Self::Part(part) => HeaderFact::Part(part.into()),
            Self::Limit => HeaderFact::Limit,
        }
    }

    /// Returns whether it is a field of the client's certificate.
    pub fn is_of_certificate(&self) -> bool {
        matches!(self, Self::Part(KeyPart::Certificate(_)))
    }
}

/// The notation of a rule file.
impl fmt::Display for HeaderSource {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Part(KeyPart::Ip { v6_prefix: WHOLE_ADDRESS }) => out.write_str("ip"),
            Self::Part(KeyPart::Ip { v6_prefix }) => write!(out, "ip/{v6_prefix}"),
            Self::Part(part) => part.fmt(out),
            Self::Limit => out.write_str("limit"),
        }
    }
}

/// The source of a token: a header, with or without `Bearer ` before the token, a cookie or a query parameter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenSource(pub(crate) jwt::TokenSource);

form! {
    TokenSource {
        format: "token-source", noun: "a source of the token", example: "header:authorization",
        pattern: r"^(header|cookie|query):[\s\S]+$"
    }
}

impl TokenSource {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        let (kind, name) = text.split_once(':').unwrap_or((text, ""));
        let name = || checked_name(kind, name);
        Ok(Self(match kind {
            "header" => jwt::TokenSource::Header(HeaderName::read(name()?)?.to_http()),
            "cookie" => jwt::TokenSource::Cookie(name()?.to_owned()),
            "query" => jwt::TokenSource::Query(name()?.to_owned()),
            _ => return Err(not_a_source(&Self::SYNTAX, text, "write header:NAME, cookie:NAME or query:NAME")),
        }))
    }
}

/// The source of the actual cost of a request: a response header with a whole number.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SettleSource(pub(crate) HeaderName);

form! {
    SettleSource {
        format: "settle-source", noun: "a source of the cost", example: "header:x-cost",
        pattern: r"^header:[\s\S]+$"
    }
}

impl SettleSource {
    pub(crate) fn read(text: &str) -> Result<Self, InvalidValue> {
        match text.strip_prefix("header:") {
            Some(name) => HeaderName::read(name).map(Self),
            None => {
                Err(not_a_source(&Self::SYNTAX, text, "write header:NAME with the response header that has the cost"))
            }
        }
    }
}

fn not_a_source(syntax: &Syntax, text: &str, fix: &str) -> InvalidValue {
    InvalidValue::new(format!("`{}` is not {}", shown(text), syntax.noun), fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_named_by_their_kind() {
        let read = |text: &str| KeyPart::read(text).ok();
        assert_eq!(read("ip"), Some(KeyPart::Ip { v6_prefix: 64 }));
        assert_eq!(read("ip/56"), Some(KeyPart::Ip { v6_prefix: 56 }));
        assert_eq!(read("const:eu"), Some(KeyPart::Const("eu".into())));
        assert_eq!(read("const:path"), Some(KeyPart::Const("path".into())));
        assert_eq!(read("header:X-User"), HeaderName::read("x-user").ok().map(KeyPart::Header));
        assert_eq!(read("jwt:urn:a:b"), Some(KeyPart::Jwt("urn:a:b".into())));
        for text in
            ["", "pth", "Path", "header", "header:", "heder:x", "header:a b", "ip/0", "ip/129", "ip/+8", "a/b", "eu"]
        {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn headers_have_sources_that_clients_do_not_choose() {
        for text in ["ip", "ip/64", "route", "limit", "jwt:org.id", "cert:cn"] {
            assert_eq!(HeaderSource::read(text).map(|source| source.to_string()).ok().as_deref(), Some(text));
        }
        for text in
            ["", "ip:", "ip/0", "limit:a", "route:a", "jwt:", "cert:x", "header:a", "cookie:a", "path", "const:a"]
        {
            assert_eq!(HeaderSource::read(text).ok(), None, "{text}");
        }
    }
}
