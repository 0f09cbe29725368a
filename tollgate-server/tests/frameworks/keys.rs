//! Spellings of names and credentials. Handlers that read them as leniently as services do run behind the gateway: a
//! spelling that such a handler takes for the identity of an exhausted limit does not reach it.

use testkit::folder::folder_with;
use testkit::http1::{Connection, Response};
use testkit::tollgate::{Process, RULES};

use crate::report;
use crate::upstreams::Upstream;

/// A kind of key, and spellings of one identity: the target, and a header line.
struct Kind {
    name: &'static str,
    key: &'static str,
    identity: &'static str,
    spellings: &'static [(&'static str, &'static str)],
}

/// The first spelling of each kind is the plain one.
const KINDS: [Kind; 5] = [
    Kind {
        name: "query",
        key: "query:user_id",
        identity: "REAL",
        spellings: &[
            ("/query?user_id=REAL", ""),
            ("/query?USER_ID=REAL", ""),
            ("/query?User_Id=REAL", ""),
            ("/query?user.id=REAL", ""),
            ("/query?user%20id=REAL", ""),
            ("/query?user+id=REAL", ""),
            ("/query?user[id=REAL", ""),
            ("/query?user%5Bid=REAL", ""),
            ("/query?user_id%00x=REAL", ""),
            ("/query?user_id[]=REAL", ""),
            ("/query?user_id[a][b]=REAL", ""),
            ("/query?%20user.id=REAL", ""),
            ("/query?user%5Fid=REAL", ""),
            ("/query?user_id=REAL&user.id=x", ""),
            ("/query?user_id=x&user.id=REAL", ""),
            ("/query?USER_ID=REAL&user_id=x", ""),
        ],
    },
    Kind {
        name: "cookie",
        key: "cookie:user_id",
        identity: "REAL",
        spellings: &[
            ("/cookie", "Cookie: user_id=REAL"),
            ("/cookie", "Cookie: USER_ID=REAL"),
            ("/cookie", "Cookie: user.id=REAL"),
            ("/cookie", "Cookie: user[id=REAL"),
            ("/cookie", "Cookie: user id=REAL"),
            ("/cookie", "Cookie: user_id[]=REAL"),
            ("/cookie", "Cookie: user%5Fid=REAL"),
            ("/cookie", "Cookie: user_id=REAL; user.id=x"),
            ("/cookie", "Cookie: USER_ID=REAL; user_id=x"),
            ("/cookie", "Cookie: user_id=\"REAL"),
            ("/cookie", "Cookie: user_id=\"REALx"),
            ("/cookie", "Cookie: user_id=REAL\""),
            ("/cookie", "Cookie: user_id=REAL,x"),
            ("/cookie", "Cookie: a=\"x; user_id=REAL"),
            ("/cookie", "Cookie: user_id=REAL; a=\"x; user_id=x\""),
            ("/cookie", "Cookie: a=\", user_id=REAL ,\"; user_id=x"),
        ],
    },
    Kind {
        name: "header",
        key: "header:x-api-key",
        identity: "REAL",
        spellings: &[
            ("/header", "X-Api-Key: REAL"),
            ("/header", "x-api-key: REAL"),
            ("/header", "X_Api_Key: REAL"),
            ("/header", "X.Api.Key: REAL"),
            ("/header", "X-Api.Key: REAL"),
            ("/header", "X~Api~Key: REAL"),
            ("/header", "X-Api-Key: x\r\nX.Api.Key: REAL"),
            ("/header", "X.Api.Key: REAL\r\nX-Api-Key: x"),
        ],
    },
    Kind {
        name: "token",
        key: "header:authorization",
        identity: "REAL",
        spellings: &[
            ("/token", "Authorization: Bearer REAL"),
            ("/token", "Authorization: bearer REAL"),
            ("/token", "Authorization: Bearer   REAL"),
            ("/token", "Authorization: Bearer\tREAL"),
            ("/token", "Authorization: Bearer \t REAL"),
            ("/token", "Authorization: x REAL"),
            ("/token", "Authorization: x-bearer REAL"),
            ("/token", "Authorization: Bearer REAL x"),
            ("/token", "Authorization: Bearer REAL\tx"),
            ("/token", "Authorization: Bearer \"REAL\""),
            ("/token", "Authorization: Bearer REAL!x"),
            ("/token", "Authorization: Bearer REAL|x"),
            ("/token", "Authorization: Bearer token=\"REAL\""),
        ],
    },
    Kind {
        name: "login",
        key: "header:authorization",
        identity: "ann:pa?>",
        spellings: &[
            ("/login", "Authorization: Basic YW5uOnBhPz4="),
            ("/login", "Authorization: basic YW5uOnBhPz4="),
            ("/login", "Authorization: Basic  YW5uOnBhPz4="),
            ("/login", "Authorization: Basic YW5uOnBhPz5="),
            ("/login", "Authorization: Basic YW5uOnBhPz4"),
            ("/login", "Authorization: Basic YW5uOnBhPz4=="),
            ("/login", "Authorization: Basic YW5u!OnBhPz4="),
            ("/login", "Authorization: Basic YW5u.OnBh:Pz4="),
            ("/login", "Authorization: Basic YW5uOnBhPz4=YQ"),
            ("/login", "Authorization: Basic YW5uOnBhPz4=!"),
            ("/login", "Authorization: Basic YW5uOnBhPz4!=YQ"),
            ("/login", "Authorization: Basic YW5u-OnBh_Pz4="),
            ("/login", "Authorization: Basic YW5uOnBhPz4-"),
            ("/login", "Authorization: Basic YW5u~On\u{e9}BhPz4="),
            ("/login", "Authorization: x YW5u-OnBh_Pz4="),
            ("/login", "Authorization: x YW5uOnBhPz6="),
            ("/login", "Authorization: Bearer YW5uOnBhPz4="),
        ],
    },
];

/// The fewest spellings that all handlers together take for the identity, without the gateway. With fewer, something is
/// wrong with the handlers.
const FEWEST_DIRECT: usize = 60;

#[test]
fn no_spelling_of_a_key_gets_past_an_exhausted_limit() {
    let upstreams = Upstream::start_key_readers();
    let (mut direct, mut past) = (0, Vec::new());
    for upstream in &upstreams {
        let rules = rules(&upstream.address.to_string());
        let gateway = Process::start(folder_with(&[(RULES, &rules)]), &["serve", "--config", RULES]);
        let address = gateway.address_of("gateway");
        for kind in &KINDS {
            let send = |to, (target, line): (&str, &str)| {
                let line = if line.is_empty() { String::new() } else { format!("{line}\r\n") };
                Connection::to(to).ask(format!("GET {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n{line}\r\n"))
            };
            assert!(is_read(&send(address, kind.spellings[0]), kind), "{}: {} once", upstream.name, kind.name);
            for spelling in kind.spellings {
                let is_direct = is_read(&send(upstream.address, *spelling), kind);
                direct += usize::from(is_direct);
                if is_read(&send(address, *spelling), kind) {
                    past.push(format!("{}: {} {}", upstream.name, spelling.0, spelling.1));
                }
                report(&format!("{}\t{}\t{spelling:?}\tdirect={is_direct}", upstream.name, kind.name));
            }
        }
    }
    assert!(past.is_empty(), "{} spellings got past an exhausted limit:\n{}", past.len(), past.join("\n"));
    let fewest = FEWEST_DIRECT * upstreams.len() / Upstream::KEY_READERS;
    assert!(direct >= fewest, "only {direct} spellings are the identity to a handler");
}

/// Returns whether the handler ran and took the spelling for the identity.
fn is_read(answer: &Response, kind: &Kind) -> bool {
    let body = serde_json::from_str::<serde_json::Value>(answer.text()).unwrap_or_default();
    answer.status == 200 && body[kind.name] == kind.identity
}

fn rules(upstream: &str) -> String {
    let limits: String = KINDS
        .iter()
        .map(|Kind { name, key, .. }| {
            format!(
                "  - {{ name: {name}, match: {{ path: /{name} }}, key: '{key}', algorithm: fixed_window, \
                 align: first_request, limit: 1, window: 1h }}\n"
            )
        })
        .collect();
    format!(
        "gateway:\n  listen: 127.0.0.1:0\n  workers: 1\n  routes:\n    - {{ path: /**, upstream: 'http://{upstream}', \
         retries: 0 }}\nlimits:\n{limits}"
    )
}
