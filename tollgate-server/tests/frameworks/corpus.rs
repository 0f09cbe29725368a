//! The corpus: ways to spell a request so that a limit and a service may read it differently.
//!
//! Every spelling aims at one handler, in the name of one identity where the limit counts by a key. Texts stand for
//! bytes: a character up to U+00FF is the byte of that number.

use std::collections::BTreeSet;
use std::fmt::Write;

/// A field of a request: name and value.
pub(crate) type Field = (Vec<u8>, Vec<u8>);

/// The identity whose limit is exhausted.
pub(crate) const EXHAUSTED: &str = "REAL";
/// The identity that is on the block list.
pub(crate) const BLOCKED: &str = "EVE";

/// The host of requests whose host is not the point.
const HOST: &str = "app.test";
const NODE: &str = "node.test";
const BELOW_WILDCARD: &str = "www.example.com";

/// A handler that every framework has and a limit protects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Handler {
    /// `/api/login`, under a limit on `/api/**`.
    Login,
    /// A mount at `/graphql`, under a limit on `/graphql/**`.
    Graphql,
    /// `/`, under a limit on `/`.
    Root,
    /// `POST /submit`, under a limit on that method.
    Submit,
    /// Counted by the header `x-api-key`.
    Header,
    /// Counted by the cookie `s`.
    Cookie,
    /// Counted by the query parameter `key`.
    Query,
    /// The virtual host `node.test`.
    Node,
    /// The virtual host `*.example.com`.
    Wildcard,
}

impl Handler {
    /// Returns the name that upstreams report when the handler runs.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Login => "login",
            Self::Graphql => "graphql",
            Self::Root => "root",
            Self::Submit => "submit",
            Self::Header => "header",
            Self::Cookie => "cookie",
            Self::Query => "query",
            Self::Node => "node",
            Self::Wildcard => "wildcard",
        }
    }
}

/// The party that can prevent a spelling of a class from bypassing a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Cause {
    /// The gateway can refuse or canonicalise the spelling without knowing the service.
    Gateway,
    /// Only this service reads the spelling as the protected identity.
    Service,
}

/// A kind of spelling, and its cause.
pub(crate) type Class = (&'static str, Cause);

const PLAIN: Class = ("plain", Cause::Gateway);
const ENCODED_SLASH: Class = ("encoded slash", Cause::Gateway);
const DOUBLE_ENCODING: Class = ("double encoding", Cause::Service);
const BACKSLASH: Class = ("backslash", Cause::Gateway);
const REPEATED_SLASH: Class = ("repeated slash", Cause::Gateway);
const DOT_SEGMENT: Class = ("dot segment", Cause::Gateway);
const PARAMETER: Class = ("path parameter", Cause::Gateway);
const AFFIX: Class = ("path affix", Cause::Service);
const CONTROL: Class = ("control character", Cause::Gateway);
const INVALID_UTF8: Class = ("invalid UTF-8", Cause::Service);
const PATH_CASE: Class = ("path case", Cause::Service);
const ENCODED_LETTER: Class = ("encoded letter", Cause::Gateway);
const TARGET_FORM: Class = ("target form", Cause::Gateway);
const HOST_FORM: Class = ("host", Cause::Gateway);
const LONG_HOST: Class = ("long host", Cause::Gateway);
const METHOD: Class = ("method", Cause::Gateway);
const METHOD_OVERRIDE: Class = ("method override", Cause::Service);
const RELOCATION: Class = ("relocating header", Cause::Gateway);
const BLANK: Class = ("outer blank", Cause::Gateway);
const ODD_BLANK: Class = ("outer odd blank", Cause::Service);
const DUPLICATE: Class = ("duplicate", Cause::Gateway);
const FIELD_NAME: Class = ("field name", Cause::Gateway);
const LIST: Class = ("list or quotes", Cause::Service);
const FOLDED: Class = ("folded line", Cause::Gateway);
const TRAILER: Class = ("trailer", Cause::Service);
const COOKIE_SYNTAX: Class = ("cookie syntax", Cause::Service);
const COOKIE_ENCODING: Class = ("cookie encoding", Cause::Service);
const COOKIE_LINES: Class = ("cookie lines", Cause::Gateway);
const QUERY_SYNTAX: Class = ("query syntax", Cause::Service);
const QUERY_ARRAY: Class = ("query array", Cause::Service);
const QUERY_SEPARATOR: Class = ("query separator", Cause::Service);

/// One spelling of a request.
#[derive(Clone, Debug)]
pub(crate) struct Spelling {
    pub(crate) class: Class,
    pub(crate) handler: Handler,
    /// The identity that the limit counts, where it counts by a key.
    pub(crate) identity: Option<&'static str>,
    method: Vec<u8>,
    target: Vec<u8>,
    hosts: Vec<Vec<u8>>,
    fields: Vec<Field>,
    trailers: Vec<Field>,
}

impl Spelling {
    fn get(class: Class, handler: Handler, target: &str) -> Self {
        Self {
            class,
            handler,
            identity: None,
            method: b"GET".to_vec(),
            target: bytes(target),
            hosts: vec![bytes(HOST)],
            fields: Vec::new(),
            trailers: Vec::new(),
        }
    }

    fn method(mut self, method: &str) -> Self {
        self.method = bytes(method);
        self
    }

    fn hosts(mut self, hosts: &[&str]) -> Self {
        self.hosts = hosts.iter().map(|host| bytes(host)).collect();
        self
    }

    fn field(mut self, name: &str, value: &str) -> Self {
        self.fields.push((bytes(name), bytes(value)));
        self
    }

    fn trailer(mut self, name: &str, value: &str) -> Self {
        self.method = b"POST".to_vec();
        self.trailers.push((bytes(name), bytes(value)));
        self
    }

    fn identity(mut self, identity: &'static str) -> Self {
        self.identity = Some(identity);
        self
    }

    pub(crate) fn is_plain(&self) -> bool {
        self.class == PLAIN
    }

    /// Returns a unique name of the spelling, in printable ASCII without tabs.
    pub(crate) fn name(&self) -> String {
        let mut name = format!("{} {}", shown(&self.method), shown(&self.target));
        if self.hosts != [bytes(HOST)] {
            for host in &self.hosts {
                write!(name, " | Host: {}", shown(host)).expect("a string takes all");
            }
        }
        for (field, value) in &self.fields {
            write!(name, " | {}: {}", shown(field), shown(value)).expect("a string takes all");
        }
        for (field, value) in &self.trailers {
            write!(name, " | trailer {}: {}", shown(field), shown(value)).expect("a string takes all");
        }
        name
    }

    /// Returns whether every parser agrees where the request ends, so that its connection can be used again.
    pub(crate) fn is_unambiguous(&self) -> bool {
        let parts = self.fields.iter().flat_map(|(name, value)| [name, value]).chain(&self.hosts);
        let is_odd = |byte: &u8| byte.is_ascii_control();
        self.trailers.is_empty()
            && self.hosts.len() == 1
            && (self.method == b"GET" || self.method == b"POST")
            && !self.target.iter().any(|byte| is_odd(byte) || *byte == b' ')
            && !parts.flatten().any(is_odd)
    }

    /// Returns the bytes of the request over HTTP/1.
    pub(crate) fn http1(&self, extra: &[(&str, &str)]) -> Vec<u8> {
        let mut request = [&self.method[..], b" ", &self.target[..], b" HTTP/1.1\r\n"].concat();
        let mut add = |name: &[u8], value: &[u8]| {
            request.extend([name, b": ", value, b"\r\n"].concat());
        };
        self.hosts.iter().for_each(|host| add(b"Host", host));
        self.fields.iter().for_each(|(name, value)| add(name, value));
        extra.iter().for_each(|(name, value)| add(name.as_bytes(), value.as_bytes()));
        if self.trailers.is_empty() {
            if !self.method.eq_ignore_ascii_case(b"GET") {
                add(b"Content-Length", b"0");
            }
            request.extend(b"\r\n");
            return request;
        }
        add(b"Transfer-Encoding", b"chunked");
        request.extend(b"\r\n1\r\nx\r\n0\r\n");
        for (name, value) in &self.trailers {
            request.extend([name, &b": "[..], value, b"\r\n"].concat());
        }
        request.extend(b"\r\n");
        request
    }

    /// Returns the fields of the request over HTTP/2, and its trailers.
    pub(crate) fn http2(&self) -> (Vec<Field>, Vec<Field>) {
        let mut fields = vec![
            (b":method".to_vec(), self.method.clone()),
            (b":scheme".to_vec(), b"http".to_vec()),
            (b":path".to_vec(), self.target.clone()),
        ];
        let mut names = [b":authority".to_vec()].into_iter().chain(std::iter::repeat(b"host".to_vec()));
        fields.extend(self.hosts.iter().filter_map(|host| Some((names.next()?, host.clone()))));
        let lower = |fields: &[Field]| -> Vec<Field> {
            fields.iter().map(|(name, value)| (name.to_ascii_lowercase(), value.clone())).collect()
        };
        fields.extend(lower(&self.fields));
        (fields, lower(&self.trailers))
    }
}

fn bytes(text: &str) -> Vec<u8> {
    text.chars().map(|character| u8::try_from(u32::from(character)).expect("one byte a character")).collect()
}

fn shown(bytes: &[u8]) -> String {
    const LONG: usize = 80;
    let text = bytes.escape_ascii().to_string();
    if text.len() <= LONG {
        return text;
    }
    format!("{}({} bytes){}", &text[..LONG / 4], bytes.len(), &text[text.len() - LONG / 4..])
}

/// Returns all spellings, each once.
pub(crate) fn corpus() -> Vec<Spelling> {
    let mut all = plain();
    all.extend(slashes());
    all.extend(dot_segments());
    all.extend(parameters());
    all.extend(affixes());
    all.extend(letters());
    all.extend(target_forms());
    all.extend(hosts());
    all.extend(methods());
    all.extend(relocations());
    for identity in [EXHAUSTED, BLOCKED] {
        all.extend(header_keys(identity));
        all.extend(cookie_keys(identity));
        all.extend(query_keys(identity));
    }
    let mut seen = BTreeSet::new();
    all.retain(|spelling| seen.insert(spelling.http1(&[])));
    all
}

/// Returns a spelling for each limit that everybody reads alike.
pub(crate) fn plain() -> Vec<Spelling> {
    use Handler as H;
    let mut all = vec![
        Spelling::get(PLAIN, H::Login, "/api/login"),
        Spelling::get(PLAIN, H::Login, "/api/login").method("POST"),
        Spelling::get(PLAIN, H::Graphql, "/graphql/x"),
        Spelling::get(PLAIN, H::Root, "/"),
        Spelling::get(PLAIN, H::Submit, "/submit").method("POST"),
        Spelling::get(PLAIN, H::Node, "/vhost").hosts(&[NODE]),
        Spelling::get(PLAIN, H::Wildcard, "/vhost").hosts(&[BELOW_WILDCARD]),
    ];
    for identity in [EXHAUSTED, BLOCKED] {
        let keyed = |handler, target: &str| Spelling::get(PLAIN, handler, target).identity(identity);
        all.push(keyed(H::Header, "/keys/header").field("X-Api-Key", identity));
        all.push(keyed(H::Cookie, "/keys/cookie").field("Cookie", &format!("s={identity}")));
        all.push(keyed(H::Query, &format!("/keys/query?key={identity}")));
    }
    all
}

/// Returns a plain spelling with another identity, which takes nothing from the limits under test.
pub(crate) fn unlimited() -> Spelling {
    const IDENTITY: &str = "UNLIMITED";
    Spelling::get(PLAIN, Handler::Header, "/keys/header").identity(IDENTITY).field("X-Api-Key", IDENTITY)
}

fn paths(class: Class, handler: Handler, targets: &[&str]) -> Vec<Spelling> {
    targets.iter().map(|target| Spelling::get(class, handler, target)).collect()
}

/// Returns the templates with `@` replaced by each of the texts.
fn filled(class: Class, handler: Handler, templates: &[&str], texts: &[&str]) -> Vec<Spelling> {
    let targets = templates.iter().flat_map(|template| texts.iter().map(|text| template.replace('@', text)));
    targets.map(|target| Spelling::get(class, handler, &target)).collect()
}

/// The possible positions of a slash, marked by `@`.
const SLASHES_IN_LOGIN: &[&str] = &[
    "/api@login",
    "/@api/login",
    "/api/login@",
    "/api/@login",
    "/@api@login",
    "/api@login@",
    "/api@login?x=1",
    "/x@../api/login",
];
const SLASHES_IN_GRAPHQL: &[&str] = &["/graphql@x", "/@graphql/x", "/graphql@", "/graphql/x@y", "/graphql@../x"];

fn slashes() -> Vec<Spelling> {
    let kinds: [(Class, &[&str]); 5] = [
        (ENCODED_SLASH, &["%2F", "%2f", "%2F%2F", "%2F/"]),
        (DOUBLE_ENCODING, &["%252F"]),
        (INVALID_UTF8, &["%c0%af"]),
        (BACKSLASH, &["\\", "%5C", "\\/"]),
        (REPEATED_SLASH, &["//", "/./"]),
    ];
    let of_kind = |(class, texts)| {
        let mut all = filled(class, Handler::Login, SLASHES_IN_LOGIN, texts);
        all.extend(filled(class, Handler::Graphql, SLASHES_IN_GRAPHQL, texts));
        all
    };
    kinds.into_iter().flat_map(of_kind).collect()
}

#[rustfmt::skip]
const DOTS: &[&str] = &[
    "..", "%2e%2e", "%2E%2E", ".%2e", "%2e.", "..;", "..;a", "%2e%2e;", ".;", "..%20", "..%00", "..%0a", "...",
    "%252e%252e", "..%2f", "..%5c", "..\\", "%c0%ae%c0%ae",
];

fn dot_segments() -> Vec<Spelling> {
    const LOGIN: &[&str] = &["/x/@/api/login", "/@/api/login", "/api//@/login", "/api/login/x/@"];
    const GRAPHQL: &[&str] = &["/graphql/@/x", "/graphql/@", "/graphql/x/@/@/y"];
    let mut all = filled(DOT_SEGMENT, Handler::Login, LOGIN, DOTS);
    all.extend(filled(DOT_SEGMENT, Handler::Graphql, GRAPHQL, DOTS));
    all.extend(filled(DOT_SEGMENT, Handler::Login, &["/@/api/login", "/api/@/login"], &[".", "%2e", "%2E", "./."]));
    all
}

#[rustfmt::skip]
const PARAMETERS_IN_LOGIN: &[&str] = &[
    "/api;/login", "/api;a/login", "/api;a=1/login", "/api;a=1;b=2/login", "/api;a,b/login", "/api/login;",
    "/api/login;a", "/api/login;a=1", "/api/login;a=1?x=1", "/api/;/login", "/api/;a/login", "/;/api/login",
    "/;a/api/login", "/;a=1/api/login", "/api%3B/login", "/api%3Ba/login", "/api%3ba=1/login", "/api/login%3Ba",
    "/%3B/api/login", "/api;%2flogin", "/api;a%2flogin", "/;%2e%2e/api/login", "/x/;/../api/login",
];

fn parameters() -> Vec<Spelling> {
    const GRAPHQL: &[&str] =
        &["/graphql;", "/graphql;a", "/graphql;a/x", "/graphql;a=1/x", "/;/graphql/x", "/graphql%3Ba/x", "/graphql/;"];
    let mut all = paths(PARAMETER, Handler::Login, PARAMETERS_IN_LOGIN);
    all.extend(paths(PARAMETER, Handler::Graphql, GRAPHQL));
    all.extend(paths(PARAMETER, Handler::Root, &["/;", "/;a", "/%3B"]));
    all
}

/// Bytes that some parsers strip or stop at.
const STRIPPED: [(Class, &[&str]); 3] = [
    (CONTROL, &["%09", "%0a", "%0A", "%0d", "%0d%0a", "%00", "%00.html", "%0b", "%0c", "%1f", "%7f"]),
    (INVALID_UTF8, &["%85", "%a0"]),
    (AFFIX, &["%20", "%c2%a0", "%e2%80%8b", "%ef%bb%bf"]),
];
#[rustfmt::skip]
const SUFFIXES: &[&str] = &[
    "/", ".", "%2e", ".json", "~", "*", ":", "+", "&", "!", ",", "%", "%zz", "%2", "#", "#x", "%23", "%3F", "%3Fx", "?",
];

fn affixes() -> Vec<Spelling> {
    let mut all = filled(AFFIX, Handler::Login, &["/api/login@"], SUFFIXES);
    all.extend(filled(AFFIX, Handler::Graphql, &["/graphql@"], SUFFIXES));
    for (class, texts) in STRIPPED {
        all.extend(filled(class, Handler::Login, &["/api/login@", "/@api/login", "/api@/login"], texts));
        all.extend(filled(class, Handler::Graphql, &["/graphql@"], texts));
    }
    all
}

#[rustfmt::skip]
fn letters() -> Vec<Spelling> {
    let mut all = paths(PATH_CASE, Handler::Login, &[
        "/API/login", "/Api/login", "/aPI/login", "/api/LOGIN", "/api/Login", "/API/LOGIN", "/%41PI/login",
        "/api/%4Cogin",
    ]);
    all.extend(paths(PATH_CASE, Handler::Graphql, &["/GraphQL", "/GRAPHQL/x", "/Graphql/x", "/%47raphql/x"]));
    all.extend(paths(ENCODED_LETTER, Handler::Login, &[
        "/%61pi/login", "/a%70i/login", "/ap%69/login", "/api/%6cogin", "/api/%6Cogin", "/api/l%6fgin", "/api/log%69n",
        "/api/logi%6e", "/%61%70%69/login", "/%61%70%69/%6c%6f%67%69%6e",
    ]));
    all.extend(paths(DOUBLE_ENCODING, Handler::Login, &[
        "/%2561pi/login", "/api/%256cogin", "/%u0061pi/login", "/%ef%bd%81pi/login", "/ap%c4%b1/login",
    ]));
    all.extend(paths(INVALID_UTF8, Handler::Login, &["/%c1%a1pi/login"]));
    all.extend(paths(ENCODED_LETTER, Handler::Graphql, &["/%67raphql", "/graph%71l/x", "/graphq%6C/x"]));
    all
}

#[rustfmt::skip]
fn target_forms() -> Vec<Spelling> {
    let mut all = paths(TARGET_FORM, Handler::Login, &[
        "http://app.test/api/login", "HTTP://app.test/api/login", "https://app.test/api/login",
        "http://app.test:80/api/login", "http://APP.TEST/api/login", "http://user@app.test/api/login",
        "http://other.test/api/login", "http://app.test//api/login", "http://app.test/x/../api/login",
        "http:///api/login", "http:/api/login", "http:api/login", "ftp://app.test/api/login", "ws://app.test/api/login",
        "//app.test/api/login", "///app.test/api/login", "//x/api/login", "///api/login", "/http://app.test/api/login",
        "api/login", "./api/login", "/api/login#/x", "/api/login?", "/api/login??", "/api/login?/../x",
        "/x?/../api/login", "/x#/../api/login", "/public /api/login", "/api/login x",
    ]);
    all.extend(paths(TARGET_FORM, Handler::Graphql, &[
        "http://app.test/graphql", "//app.test/graphql/x", "/graphql?x", "/graphql#x", "graphql/x", "http:/graphql/x",
    ]));
    all.extend(paths(TARGET_FORM, Handler::Root, &[
        "http://app.test", "http://app.test?y=1", "http://app.test#x", "http://app.test/", "http://app.test//", "?y=1",
        "#x", "*", "/?y=1", "/#x", "//", "///", "/.", "/./", "/x/..", "/%2e", "/%2F", "/%20", "/%0a", "/%00", "",
        "//app.test", "/\\",
    ]));
    all
}

/// Spellings of the host `@`. `\u{1}` stands for an at sign.
#[rustfmt::skip]
const HOSTS: &[&str] = &[
    "@:80", "@:", "@:x", "@:80:90", "@:80x", "@:99999", "@:-1", "@:0", "@:080", "@:80 ", "@:+80", "@:%38%30", "[@]",
    "[@]:80", "[@", "@.", "@..", "@.:80", "@.:x", "@::", "user\u{1}@", "user:pass\u{1}@", "@\u{1}x",
];
/// Further spellings, for one kind of host only.
#[rustfmt::skip]
const MORE_HOSTS: &[&str] = &[
    "@:x80", "@: 80", "@]", "@:80:", " @", "@ ", "\t@", "@\t", "\u{a0}@", "@\u{a0}", "@\u{85}", "http://@", "@/", "@/x",
    "@?", "@?x", "@#x", "@\\", "@\\x", "@,other.test", "other.test,@", "@, other.test", "@;", "@%00", "@%20", "@\0",
    "@\0x", "@%2e", "@_", "@ other.test", "\"@\"", "(@)", "@:80,other.test", "@:80\u{1}other.test", "other.test\u{1}@",
];

fn hosts() -> Vec<Spelling> {
    let spelled = |form: &str, name: &str| form.replace('@', name).replace('\u{1}', "@");
    let mut all = Vec::new();
    for form in MORE_HOSTS {
        all.push(Spelling::get(HOST_FORM, Handler::Node, "/vhost").hosts(&[&spelled(form, NODE)]));
    }
    for (handler, name) in [(Handler::Node, NODE), (Handler::Wildcard, BELOW_WILDCARD)] {
        let get = || Spelling::get(HOST_FORM, handler, "/vhost");
        all.extend(HOSTS.iter().map(|form| get().hosts(&[&spelled(form, name)])));
        let upper = name.to_uppercase();
        let encoded = name.replace('.', "%2e");
        let wide_dot = name.replace('.', "\u{e3}\u{80}\u{82}");
        let hyphen = name.replacen('e', "e\u{c2}\u{ad}", 1);
        let wide = name.replacen('e', "\u{ef}\u{bd}\u{85}", 1);
        for host in [&upper, &format!("{upper}:80"), &encoded, &wide_dot, &hyphen, &wide] {
            all.push(get().hosts(&[host]));
        }
        for several in [&[name, "other.test"][..], &["other.test", name], &[name, name], &["", name], &[name, ""]] {
            all.push(get().hosts(several));
        }
        let absolute = |authority: &str| Spelling::get(HOST_FORM, handler, &format!("http://{authority}/vhost"));
        all.push(absolute(name));
        all.push(absolute(name).hosts(&[]));
        all.push(absolute(&format!("{name}:x")));
        all.push(absolute(&format!("user@{name}")));
        all.push(absolute("other.test").hosts(&[name]));
        for field in ["X-Forwarded-Host", "X_Forwarded_Host", "X-Host", "X-Original-Host", "HTTP_HOST", "SERVER_NAME"] {
            all.push(get().field(field, name));
        }
        all.push(get().field("Forwarded", &format!("for=192.0.2.1;host={name}")));
    }
    for length in [253, 254, 255, 256, 1000, 4000] {
        let labels = length - "example.com".len();
        let short_labels = "aa.".repeat(labels % 2) + &"a.".repeat((labels - 3 * (labels % 2)) / 2);
        let one_label = "a".repeat(labels - 1) + ".";
        for labels in [short_labels, one_label] {
            let get = Spelling::get(LONG_HOST, Handler::Wildcard, "/vhost");
            all.push(get.hosts(&[&format!("{labels}example.com")]));
        }
    }
    all
}

fn methods() -> Vec<Spelling> {
    let mut all = Vec::new();
    for method in ["post", "Post", "pOST", "POSt", "PosT", "POST\t", "P%4fST", "POST\u{a0}"] {
        all.push(Spelling::get(METHOD, Handler::Submit, "/submit").method(method));
    }
    for field in ["X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override", "REQUEST_METHOD"] {
        for method in ["GET", "PUT"] {
            let get = Spelling::get(METHOD_OVERRIDE, Handler::Submit, "/submit");
            all.push(get.method(method).field(field, "POST"));
        }
    }
    all.push(Spelling::get(METHOD_OVERRIDE, Handler::Submit, "/submit?_method=POST"));
    for method in ["get", "Get", "post"] {
        all.push(Spelling::get(METHOD, Handler::Login, "/api/login").method(method));
        all.push(Spelling::get(METHOD, Handler::Graphql, "/graphql/x").method(method));
    }
    all
}

/// Headers by which some servers cut a prefix from the path.
#[rustfmt::skip]
const PREFIX_HEADERS: &[&str] = &[
    "SCRIPT_NAME", "Script_Name", "Script-Name", "X-Script-Name", "X_Script_Name", "X-Forwarded-Prefix",
    "X_Forwarded_Prefix", "X-Forwarded-Path", "HTTP_SCRIPT_NAME",
];
/// Headers from which some servers take the whole path.
#[rustfmt::skip]
const PATH_HEADERS: &[&str] = &[
    "PATH_INFO", "Path_Info", "Path-Info", "X-Original-URL", "X-Original-URI", "X-Rewrite-URL", "X-Forwarded-Uri",
    "REQUEST_URI", "X-Accel-Redirect", "RAW_URI", "PATH_TRANSLATED", "X_Original_URL",
];

fn relocations() -> Vec<Spelling> {
    let mut all = Vec::new();
    for (handler, path) in [(Handler::Login, "/api/login"), (Handler::Graphql, "/graphql/x")] {
        for field in PREFIX_HEADERS {
            all.push(Spelling::get(RELOCATION, handler, &format!("/x{path}")).field(field, "/x"));
        }
        for field in PATH_HEADERS {
            all.push(Spelling::get(RELOCATION, handler, "/public").field(field, path));
        }
    }
    all
}

/// Bytes that a parser may strip from a value: blanks of HTTP, and characters that are blanks elsewhere.
#[rustfmt::skip]
const BLANKS: [(Class, &[&str]); 2] = [
    (BLANK, &[" ", "  ", "\t", " \t "]),
    (ODD_BLANK, &[
        "\u{a0}", "\u{85}", "\u{c2}\u{a0}", "\u{e2}\u{80}\u{83}", "\u{ef}\u{bb}\u{bf}", "\u{b}", "\u{c}", "\u{1c}", "\0",
    ]),
];

/// Returns the text with each of the blanks before it and after it.
fn blanks_around(text: &str) -> Vec<(Class, String)> {
    let around = |blank: &&str| [format!("{blank}{text}"), format!("{text}{blank}")];
    let of_class = |(class, blanks): (Class, &'static [&str])| {
        blanks.iter().flat_map(around).map(move |value| (class, value)).collect::<Vec<_>>()
    };
    BLANKS.into_iter().flat_map(of_class).collect()
}

#[rustfmt::skip]
const HEADER_NAMES: &[&str] = &[
    "x-api-key", "X-API-KEY", "X_Api_Key", "X-Api_Key", "HTTP_X_API_KEY", "X.Api.Key", "X-Api-Key ", "X-Api-Key\t",
    " X-Api-Key", "X-Api-Key\0", "X-Api-Key\u{a0}", "X Api Key", "x-api-key:",
];
#[rustfmt::skip]
const HEADER_LISTS: &[&str] = &[
    "junk, @", "@, junk", "junk,@", "@,junk", ",@", "@,", ", @", "@,@", "\"@\"", "'@'", "<@>", "Bearer @",
    "=?utf-8?q?@?=", "%52EAL", "utf-8''@", "@;q=1", "@; a=b", "=@",
];
const FOLDED_LINES: &[&str] = &["\r\n @", "junk\r\n @", "@\r\n ", "\r\n\t@", "@\r", "\r@", "@\n", "junk\nX-Api-Key: @"];

fn header_keys(identity: &'static str) -> Vec<Spelling> {
    let get = |class| Spelling::get(class, Handler::Header, "/keys/header").identity(identity);
    let one = |class, value: &str| get(class).field("X-Api-Key", &value.replace('@', identity));
    let mut all = Vec::new();
    for [first, second] in [["junk", "@"], ["@", "junk"], ["@", "@"], ["", "@"], ["@", ""]] {
        let [first, second] = [first, second].map(|value| value.replace('@', identity));
        all.push(one(DUPLICATE, &first).field("x-api-key", &second));
        all.push(one(FIELD_NAME, &first).field("X_Api_Key", &second));
        all.push(get(FIELD_NAME).field("X_API_KEY", &first).field("X-Api-Key", &second));
    }
    if identity == BLOCKED {
        return all;
    }
    all.extend(blanks_around(identity).iter().map(|(class, value)| one(*class, value)));
    all.extend(HEADER_NAMES.iter().map(|name| get(FIELD_NAME).field(name, identity)));
    all.extend(HEADER_LISTS.iter().map(|value| one(LIST, value)));
    all.extend(FOLDED_LINES.iter().map(|value| one(FOLDED, value)));
    all.push(get(TRAILER).trailer("X-Api-Key", identity));
    all.push(one(TRAILER, "junk").trailer("X-Api-Key", identity));
    all.push(one(TRAILER, "").trailer("X-Api-Key", identity));
    all.push(get(TRAILER).field("Trailer", "X-Api-Key").trailer("X-Api-Key", identity));
    all.push(one(FIELD_NAME, identity).field("Connection", "x-api-key"));
    all
}

#[rustfmt::skip]
const COOKIE_DUPLICATES: &[&str] = &[
    "s=junk; s=@", "s=@; s=junk", "s=junk;s=@", "s=@; s=@", "s=; s=@", "s=@; s=", "s=junk; a=1; s=@", "s; s=@",
    "s=junk; s =@", "s=junk; s= @", "S=junk; s=@", "s=\"junk\"; s=@", "s=junk; s=\"@\"",
];
#[rustfmt::skip]
const COOKIE_ENCODINGS: &[&str] = &[
    "s=\"@\"", "s='@'", "s=\"@", "s=@\"", "s=\"\\122EAL\"", "s=\"\\122\\105\\101\\114\"", "s=\\122EAL",
    "s=\"\\R\\E\\A\\L\"", "s=%52EAL", "s=%52%45%41%4C", "s=\"%52EAL\"", "s=j:\"@\"", "s=j:[\"@\"]", "s=s:@", "s=%22@%22",
    "s=j%3A%22@%22", "s=\"\"@\"\"",
];
#[rustfmt::skip]
const COOKIE_SYNTAXES: &[&str] = &[
    "a=1,s=@", "s=@,a=1", "a=1, s=@", "s=@, a=1", "a=1 s=@", "s=@ a=1", "a=1;s=@", "a=1;;s=@", ";s=@", "; s=@", "s=@;",
    "s=@;;", "a=1;\ts=@", "s = @", "s =@", "s= @", "S=@", "$Version=1; s=@", "$Version=1; s=@; $Path=/",
    "$Version=\"1\"; s=\"@\"; $Path=\"/\"", "$s=@", "s==@", "=s=@", "\"s\"=@", "%73=@", "s=@=", "s:@", "a=\"; s=@",
    "a=\"; s=@; b=\"", "s=\"x; s=@", "s=\"a;b\"; s=@", "a=\"b;c\"; s=@", "a; s=@", "a=1&s=@", "s=junk,s=@",
    "s=junk, s=@", "s=junk s=@", "s[]=@", "s[0]=@", "__Host-s=@", "s=@\u{e9}", "\u{e9}=1; s=@", "a=\u{e9}; s=@",
    "a=\"\\\"; s=@", "a={\"b\":1}; s=@", "a=[1]; s=@", "a(b)=1; s=@", "a b=1; s=@", "=; s=@", "a=1;s=@;b=2",
];

fn cookie_keys(identity: &'static str) -> Vec<Spelling> {
    let get = |class| Spelling::get(class, Handler::Cookie, "/keys/cookie").identity(identity);
    let one = |class, value: &str| get(class).field("Cookie", &value.replace('@', identity));
    let mut all = Vec::new();
    all.extend(COOKIE_DUPLICATES.iter().map(|value| one(DUPLICATE, value)));
    for lines in [["s=junk", "s=@"], ["s=@", "s=junk"], ["a=1", "s=@"], ["s=@", "a=1"], ["", "s=@"], ["s=@", "s=@"]] {
        all.push(one(COOKIE_LINES, lines[0]).field("Cookie", &lines[1].replace('@', identity)));
    }
    if identity == BLOCKED {
        return all;
    }
    for (class, value) in blanks_around(identity) {
        all.push(one(class, &format!("a=1; s={value}; b=2")));
    }
    for (class, name) in blanks_around("s") {
        all.push(one(class, &format!("a=1; {name}=@")));
    }
    all.extend(COOKIE_ENCODINGS.iter().map(|value| one(COOKIE_ENCODING, value)));
    all.extend(COOKIE_SYNTAXES.iter().map(|value| one(COOKIE_SYNTAX, value)));
    all.push(get(TRAILER).trailer("Cookie", &format!("s={identity}")));
    all.push(one(TRAILER, "s=junk").trailer("Cookie", &format!("s={identity}")));
    for name in ["Cookie2", "X-Cookie", "HTTP_COOKIE", "Cookie ", "COOKIE"] {
        all.push(get(FIELD_NAME).field(name, &format!("s={identity}")));
    }
    all
}

#[rustfmt::skip]
const QUERY_DUPLICATES: &[&str] = &[
    "key=junk&key=@", "key=@&key=junk", "key=@&key=@", "key=&key=@", "key=@&key=", "key&key=@", "key=@&key",
    "key=junk&a=1&key=@", "key=junk&%6bey=@", "%6bey=junk&key=@", "KEY=junk&key=@", "key=junk&&key=@",
];
#[rustfmt::skip]
const QUERY_ARRAYS: &[&str] = &[
    "key[]=@", "key[0]=@", "key[1]=@", "[key]=@", "key%5B%5D=@", "key%5b0%5d=@", "key[]=junk&key[]=@", "key[a]=@",
    "key[][]=@", "[]key=@", "key[=@", "key]=@", "key[]=@&key=junk", "key=junk&key[]=@", "key[]=junk&key=@", "key.0=@",
    "[key][]=@", "%5Bkey%5D=@", "key[ ]=@",
];
#[rustfmt::skip]
const QUERY_SEPARATORS: &[&str] = &[
    "a=1;key=@", "key=junk;key=@", "key=@;a=1", "key=@;key=junk", ";key=@", "key=@;", "a=1;&key=@", "a=1%26key=@",
    "a=1|key=@", "a=1,key=@", "a=1&amp;key=@",
];
#[rustfmt::skip]
const QUERY_SYNTAXES: &[&str] = &[
    "%6bey=@", "k%65y=@", "ke%79=@", "%6b%65%79=@", "KEY=@", "Key=@", "key=%52EAL", "key=%52%45%41%4c", "key=%2552EAL",
    "key%3D@", "key=@%00", "key=%00@", "key%00=@", "key=@%0a", "key=%0a@", "key=+@", "key=@+",
    "key=%20@", "key=@%20", "key=%09@", "key=@%09", "key=%a0@", "key=@%a0", "key=%c2%a0@", "key=@%c2%a0",
    "key=%e2%80%8b@", "key=%ef%bb%bf@", "+key=@", "key+=@", "%20key=@", "key%20=@", "&key=@", "&&key=@", "key=@&",
    "=&key=@", "?key=@", "??key=@", "a?key=@", "key==@", "key=@=", "key:@", "key=@#x", "#?key=@", "a&key=@", "a=&key=@",
    "key=\"@\"", "key='@'", "key=%22@%22", "key=junk%26key=@", "key.=@", "key=@/", "key=@\\",
    "%zz=1&key=@", "a=%zz&key=@", "a=%e9&key=@", "key=%c1%92EAL", "key=%u0052EAL", "key=@%", "%u006bey=@",
    "key=%ef%bc%b2EAL", "a=1\u{a0}&key=@", "__proto__[key]=@", "constructor=1&key=@", "a[b]=1&key=@",
];

fn query_keys(identity: &'static str) -> Vec<Spelling> {
    let get = |class, target: &str| Spelling::get(class, Handler::Query, target).identity(identity);
    let one = |class, query: &str| get(class, &format!("/keys/query?{}", query.replace('@', identity)));
    let mut all = Vec::new();
    all.extend(QUERY_DUPLICATES.iter().map(|query| one(DUPLICATE, query)));
    if identity == BLOCKED {
        return all;
    }
    all.extend(["key=junk&key=%52EAL", "key=junk%00&key=@"].map(|query| one(DUPLICATE, query)));
    all.extend(QUERY_ARRAYS.iter().map(|query| one(QUERY_ARRAY, query)));
    all.extend(QUERY_SEPARATORS.iter().map(|query| one(QUERY_SEPARATOR, query)));
    all.extend(QUERY_SYNTAXES.iter().map(|query| one(QUERY_SYNTAX, query)));
    // More parameters than some parsers accept.
    for count in [100, 1001] {
        all.push(one(QUERY_SYNTAX, &format!("{}key=@", "a&".repeat(count))));
        all.push(one(DUPLICATE, &format!("key=junk&{}key=@", "a&".repeat(count))));
    }
    all.push(get(TARGET_FORM, &format!("http://app.test/keys/query?key={identity}")));
    all.push(get(RELOCATION, "/keys/query").field("QUERY_STRING", &format!("key={identity}")));
    all.push(get(RELOCATION, "/keys/query").field("X-Original-URL", &format!("/keys/query?key={identity}")));
    all
}
