//! Spellings that an upstream takes for one value are one key, and values that upstreams read differently are refused.

use http::{HeaderMap, HeaderName, HeaderValue};
use tollgate::{FixedWindow, Limit, MINUTE};
use tollgate_http::Refusal;
use tollgate_rules::{
    Certificate, CertificateField, Cost, EncodedSlash, Facts, Gate, KeyPart, Listing, Match, Outcome, PathCase,
    PathReading, Rule, RuleSet,
};

use super::{check, gate, gate_of, remaining};

fn limited(limit: u64) -> Rule {
    Rule::new(Limit::new("limit", FixedWindow::new(limit, MINUTE)).unwrap())
}

fn once() -> Rule {
    limited(1)
}

fn reason(outcome: &Outcome) -> Option<&str> {
    match outcome.refusal() {
        Some(Refusal::Unreadable(request)) => Some(request.reason),
        _ => None,
    }
}

/// Sends a request with these header values, which may be any bytes.
fn send(gate: &Gate, target: &str, pairs: &[(&'static str, &[u8])]) -> Outcome {
    let header = |(name, value): &(&'static str, &[u8])| {
        (HeaderName::from_static(name), HeaderValue::from_bytes(value).unwrap())
    };
    let headers: HeaderMap = pairs.iter().map(header).collect();
    gate.decide_now(&Facts::new("GET", target).headers(&headers)).unwrap()
}

/// `{"alg":"ES256"}`, a payload, and 64 bytes of a signature.
const JWT: &str = "eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJhbm4ifQ.\
                   q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJCrze8SNFZ4kA";

#[test]
fn spellings_of_credentials_are_one_key() {
    let (signed, signature) = JWT.rsplit_once('.').unwrap();
    let spare_bits = format!("Bearer {}B", &JWT[..JWT.len() - 1]);
    let padded = format!("Bearer {JWT}==");
    // The second half of an ECDSA signature can be replaced by anyone.
    let negated = format!("Bearer {signed}.{}{}", &signature[..43], "D".repeat(43));
    let blanks = format!("Bearer{}T", " ".repeat(200));
    let groups: [&[&[u8]]; 4] = [
        &[
            b"Bearer T",
            b"Bearer  T",
            blanks.as_bytes(),
            b"bearer T",
            b"BEARER T",
            b"Bearer\tT",
            b"Bearer \t T",
            b"Bearer\xA0T",
            b"Bearer \xC2\xA0T",
            "Bearer\u{3000}T".as_bytes(),
            // Many handlers take the second word, whatever the first one is.
            b"x T",
            b"T",
            // Rails.
            b"Token token=\"T\"",
            b"Token token=T",
        ],
        // `ann:pa?>`, so that every alphabet and every length differs.
        &[
            b"Basic YW5uOnBhPz4=",
            b"basic YW5uOnBhPz4=",
            b"Basic   YW5uOnBhPz4=",
            b"Basic YW5uOnBhPz4",
            b"Basic YW5uOnBhPz5=",
            b"Basic YW5uOnBhPz7",
            b"Basic YW5uOnBhPz4==",
            b"x YW5uOnBhPz5=",
            b"Bearer YW5uOnBhPz4=",
        ],
        &[b"Basic YW5uOj8/Pz8=", b"Basic YW5uOj8/Pz8", b"x YW5uOj8/Pz9="],
        &[
            &[b"Bearer ", JWT.as_bytes()].concat(),
            &[b"bearer ", JWT.as_bytes()].concat(),
            spare_bits.as_bytes(),
            padded.as_bytes(),
            negated.as_bytes(),
        ],
    ];
    for header in ["authorization", "proxy-authorization"] {
        let (gate, _) = gate([once().key(KeyPart::header(header))]);
        for group in groups {
            let passed: Vec<_> = group.iter().filter(|one| send(&gate, "/", &[(header, one)]).is_allowed()).collect();
            let text = |value: &&&[u8]| String::from_utf8_lossy(value).into_owned();
            assert_eq!(passed.len(), 1, "{header}: {:?}", passed.iter().map(text).collect::<Vec<_>>());
        }
    }
}

#[test]
fn different_credentials_are_different_keys() {
    let other_payload = JWT.replace("eyJzdWIiOiJhbm4ifQ", "eyJzdWIiOiJib2IifQ");
    let other_signature = JWT.replace(".q83v", ".r83v");
    let all = [
        "Bearer user-1",
        "Bearer user-2",
        "Bearer user-10",
        "Bearer Key",
        "Bearer key",
        "Bearer 1|abc",
        "Bearer 2|abc",
        "Basic YW5uOnBh",
        "Basic YW5uOnBi",
        "Basic Ym9iOnBh",
        JWT,
        &other_payload,
        &other_signature,
    ];
    let (gate, _) = gate([once().key(KeyPart::header("authorization"))]);
    for value in all {
        assert!(check(&gate, "GET", "/", &[("authorization", value)]).is_allowed(), "{value}");
        assert!(!check(&gate, "GET", "/", &[("authorization", value)]).is_allowed(), "{value}");
    }
}

#[test]
fn credentials_that_upstreams_read_differently_are_refused() {
    let (gate, _) = gate([limited(100).key(KeyPart::header("authorization"))]);
    for value in [
        "Bearer T x",
        "Bearer T\tx",
        "Bearer T, Bearer U",
        "Bearer T,x=1",
        "Bearer T;x=1",
        "Token token=\"T\", nonce=\"1\"",
        "Basic dT==cA==",
        "Basic YW5=uOnBh",
        "Bearer YW5uOnBhPz4=x",
        // Apache stops at a character that is not base64, and Python and Node skip it.
        "Basic YW5u!OnBhPz4=",
        "Basic YW5uOnBh.Pz4=",
        "Basic YW5uOnBhPz4=!",
        "Bearer YW5u!OnBhPz4=",
        // Python and PHP skip `-` and `_`, and Node reads them as `+` and `/`.
        "Basic YW5uOj8_Pz8=",
        "Basic YW-5uOnBh",
        "x YW5uOj8_Pz8=",
        "x YW-5uOnBh",
        // Rails removes quotes.
        "Bearer \"T\"",
        "Bearer \"T",
        "Token \"T\"",
        "Token T\"",
        "Token token=\"\"T\"\"",
        // The usual expression for `Bearer` ends a token here.
        "Bearer T!x",
        "Bearer T:x",
        "Bearer T|x",
        "Bearer T=x",
        "Bearer T\u{e9}",
    ] {
        let outcome = check(&gate, "GET", "/", &[("authorization", value)]);
        assert_eq!(reason(&outcome), Some("invalid_credentials"), "{value}");
    }
    assert_eq!(
        remaining(&check(&gate, "GET", "/", &[("authorization", "Bearer T")])),
        99,
        "refused requests spend nothing"
    );
    let two = [("authorization", "Bearer T"), ("authorization", "bearer  T")];
    assert_eq!(remaining(&check(&gate, "GET", "/", &two)), 98);
    let two = [("authorization", "Bearer T"), ("authorization", "Bearer U")];
    assert_eq!(reason(&check(&gate, "GET", "/", &two)), Some("duplicate_header"));
}

/// A limit for one login must not be left with a spelling that only its service decodes to that login.
#[test]
fn a_condition_on_a_login_that_upstreams_read_differently_refuses_the_request() {
    let login = "Basic YW5uOnBhPz4=";
    let matching = Match::everything().header("authorization", login);
    let by_closure = Match::everything().when(|request| {
        request.header(&http::header::AUTHORIZATION).is_some_and(|value| *value == *b"Basic YW5uOnBhPz4=")
    });
    for matching in [matching, by_closure] {
        let (gate, _) = gate([limited(9).matching(matching)]);
        for spelling in [login, "basic YW5uOnBhPz7"] {
            assert!(check(&gate, "GET", "/", &[("authorization", spelling)]).limit().is_some(), "{spelling}");
        }
        for spelling in ["Basic YW5-uOnBhPz4=", "Basic YW5uOnBhPz4=x", "Basic YW5u!OnBhPz4="] {
            let outcome = check(&gate, "GET", "/", &[("authorization", spelling)]);
            assert_eq!(reason(&outcome), Some("invalid_credentials"), "{spelling}");
        }
        for other in ["Basic Ym9iOnBh", "Bearer a!b", "Digest username=\"a\", nonce=\"b\""] {
            assert!(check(&gate, "GET", "/", &[("authorization", other)]).limit().is_none(), "{other}");
        }
    }
}

#[test]
fn listed_credentials_are_found_in_every_spelling() {
    let by_token = || limited(5).key(KeyPart::header("authorization"));
    for listed in ["Bearer T", "bearer   T", "T"] {
        for sent in ["Bearer T", "BEARER \t T", "T"] {
            let sent = [("authorization", sent)];
            let (blocking, _) = gate([by_token().blocked(Listing::none().key(&[listed]))]);
            assert!(!check(&blocking, "GET", "/", &sent).is_allowed(), "{listed}");
            let (exempting, _) = gate([by_token().exempt(Listing::none().key(&[listed]))]);
            assert_eq!(check(&exempting, "GET", "/", &sent).limit(), None, "{listed}");
            let (overriding, _) = gate([by_token().key_limit(&[listed], FixedWindow::new(9, MINUTE))]);
            assert_eq!(remaining(&check(&overriding, "GET", "/", &sent)), 8, "{listed}");
        }
    }
}

/// The smaller and the larger fingerprint of one certificate.
const FINGERPRINTS: [&str; 2] = [
    "0aa1b2c3d4e5f60718293a4b5c6d7e8f0aa1b2c3d4e5f60718293a4b5c6d7e8f",
    "fbb1b2c3d4e5f60718293a4b5c6d7e8f0aa1b2c3d4e5f60718293a4b5c6d7e8f",
];

/// The owner of a certificate that was signed with ECDSA can present two encodings of it.
fn both_encodings() -> [Certificate; 2] {
    let [smaller, larger] = FINGERPRINTS;
    [(smaller, larger), (larger, smaller)].map(|(sent, other)| {
        let mut certificate = Certificate::new(sent);
        certificate.other_fingerprint = Some(other.to_owned());
        certificate
    })
}

fn by_fingerprint() -> Rule {
    limited(2).key(KeyPart::certificate(CertificateField::Fingerprint))
}

fn outcomes_of_both(rule: Rule) -> [Outcome; 2] {
    let (gate, _) = gate([rule]);
    both_encodings().map(|one| gate.decide_now(&Facts::new("GET", "/").certificate(&one)).unwrap())
}

/// As OpenSSL prints it.
fn with_colons(fingerprint: &str) -> String {
    let bytes: Vec<_> = fingerprint.as_bytes().chunks(2).map(|byte| String::from_utf8_lossy(byte)).collect();
    bytes.join(":").to_uppercase()
}

#[test]
fn both_fingerprints_of_a_certificate_are_one_key() {
    assert_eq!(outcomes_of_both(by_fingerprint()).map(|outcome| remaining(&outcome)), [1, 0]);
    let [smaller, larger] = FINGERPRINTS;
    // Whichever of the two the authority has issued, as OpenSSL prints it or not.
    for listed in [smaller, larger, &with_colons(smaller), &with_colons(larger)] {
        let listing = || Listing::none().key(&[listed]);
        let blocked = outcomes_of_both(by_fingerprint().blocked(listing()));
        assert!(blocked.iter().all(|outcome| outcome.refusal() == Some(&Refusal::Blocked)), "{listed}");
        let exempt = outcomes_of_both(by_fingerprint().exempt(listing()));
        assert!(exempt.iter().all(|outcome| outcome.limit().is_none()), "{listed}");
        let overridden = outcomes_of_both(by_fingerprint().key_limit(&[listed], FixedWindow::new(9, MINUTE)));
        assert_eq!(overridden.map(|outcome| remaining(&outcome)), [8, 7], "{listed}");
    }
    let other = outcomes_of_both(by_fingerprint().blocked(Listing::none().key(&[&"c".repeat(64)])));
    assert!(other.iter().all(Outcome::is_allowed));
}

#[test]
fn lists_and_overrides_may_name_both_fingerprints_of_a_certificate() {
    for [one, other] in [FINGERPRINTS, [FINGERPRINTS[1], FINGERPRINTS[0]]] {
        let overridden = || by_fingerprint().key_limit(&[one], FixedWindow::new(9, MINUTE));
        let blocked = outcomes_of_both(overridden().blocked(Listing::none().key(&[other])));
        assert!(blocked.iter().all(|outcome| outcome.refusal() == Some(&Refusal::Blocked)), "{one}");
        let exempt = outcomes_of_both(overridden().exempt(Listing::none().key(&[other])));
        assert!(exempt.iter().all(|outcome| outcome.limit().is_none()), "{one}");
        let stricter = outcomes_of_both(overridden().key_limit(&[other], FixedWindow::new(5, MINUTE)));
        assert_eq!(stricter.map(|outcome| remaining(&outcome)), [4, 3], "{one}");
    }
    // One has the smaller capacity, and the other the slower refill.
    let neither = by_fingerprint()
        .key_limit(&[FINGERPRINTS[0]], FixedWindow::new(3, MINUTE))
        .key_limit(&[FINGERPRINTS[1]], FixedWindow::new(9, 60 * MINUTE));
    assert_eq!(outcomes_of_both(neither).map(|outcome| remaining(&outcome)), [1, 0], "the strictest of the rule");
}

#[test]
fn fingerprint_that_no_certificate_has_is_refused() {
    let rules = RuleSet::builder().rule(by_fingerprint()).build().unwrap();
    for fingerprint in ["zz", "", "aa", &"g".repeat(64), &"a".repeat(63), &"a".repeat(65), "sha256 Fingerprint=AA"] {
        let error = rules.check_key("limit", &[fingerprint.as_bytes()]).unwrap_err();
        assert_eq!(error.problem(), format!("`{}` is not a SHA-256 fingerprint", &shortened(fingerprint)));
        assert_eq!(error.fix(), "write its 64 hexadecimal digits, with or without colons");
        let listing = by_fingerprint().blocked(Listing::none().key(&[fingerprint]));
        assert!(RuleSet::builder().rule(listing).build().is_err(), "{fingerprint}");
    }
    for fingerprint in FINGERPRINTS {
        assert!(rules.check_key("limit", &[with_colons(fingerprint).as_bytes()]).is_ok());
    }
}

/// As errors show a value.
fn shortened(value: &str) -> String {
    if value.len() > 60 { format!("{}…", &value[..60]) } else { value.to_owned() }
}

/// Decoders of base64 ignore padding and spare bits, so a signature has several spellings. Flask's sessions have the same
/// form.
#[test]
fn spellings_of_a_signed_token_are_one_key() {
    let flask = "eyJ1c2VyIjoxfQ.aLRxYg.Wk6WmrPSQIOp3UdSaFZ9GZnzkVc";
    for token in [JWT, flask] {
        let spare = format!("{}{}", &token[..token.len() - 1], if token == JWT { 'B' } else { 'd' });
        for other in [format!("{token}="), format!("{token}=="), spare] {
            let (by_header, _) = gate([once().key(KeyPart::header("x-token"))]);
            assert!(check(&by_header, "GET", "/", &[("x-token", token)]).is_allowed());
            assert!(!check(&by_header, "GET", "/", &[("x-token", &other)]).is_allowed(), "{other}");
            let (by_cookie, _) = gate([once().key(KeyPart::cookie("session"))]);
            assert!(check(&by_cookie, "GET", "/", &[("cookie", &format!("session={token}"))]).is_allowed());
            assert!(!check(&by_cookie, "GET", "/", &[("cookie", &format!("session={other}"))]).is_allowed(), "{other}");
            let (by_query, _) = gate([once().key(KeyPart::query("t"))]);
            assert!(check(&by_query, "GET", &format!("/?t={token}"), &[]).is_allowed());
            assert!(!check(&by_query, "GET", &format!("/?t={other}"), &[]).is_allowed(), "{other}");
        }
    }
}

/// Python ignores everything behind the padding of base64 and skips characters of no alphabet. Others do not.
#[test]
fn a_signature_that_upstreams_read_differently_is_refused() {
    let flask = "eyJ1c2VyIjoxfQ.aLRxYg.Wk6WmrPSQIOp3UdSaFZ9GZnzkVc";
    for token in [JWT, flask] {
        let (start, end) = token.split_at(token.len() - 3);
        for other in [format!("{token}=AAAA"), format!("{token}!"), format!("{start}!{end}"), format!("{start}={end}")]
        {
            let refused = |part: KeyPart, target: &str, headers: &[(&'static str, &str)]| {
                let (gate, _) = gate([once().key(part)]);
                assert_eq!(reason(&check(&gate, "GET", target, headers)), Some("invalid_credentials"), "{other}");
            };
            refused(KeyPart::header("x-token"), "/", &[("x-token", &other)]);
            refused(KeyPart::header("authorization"), "/", &[("authorization", &format!("Bearer {other}"))]);
            refused(KeyPart::cookie("session"), "/", &[("cookie", &format!("session={other}"))]);
            refused(KeyPart::query("t"), &format!("/?t={other}"), &[]);
        }
    }
}

/// Makes the name and the value of a header with a value of a key part.
type MakeHeader = fn(&str) -> (&'static str, String);

/// Identifiers of tenants that begin like base64 of JSON, and tokens that differ in the end of their signature.
#[test]
fn values_that_resemble_signed_tokens_stay_apart() {
    let signature = |end: &str| format!("{}{end}", "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQ".repeat(2));
    let hmac = |end| format!("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbm4ifQ.{}", &signature(end)[22..]);
    let rsa = |end| format!("eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhbm4ifQ.{}", signature(end).repeat(5));
    let session = |end| format!("eyJ1c2VyIjoxfQ.aLRxYg.Wk6WmrPSQIOp3UdSaFZ9GZ{end}");
    let groups = [
        ["eyewear.eu.customer-production-0001", "eyewear.eu.customer-production-0002"].map(String::from),
        ["eyewear.eu.a.b.customer-0001", "eyewear.eu.a.b.customer-0002"].map(String::from),
        ["ewok.eu.customer-production-0001", "ewok.eu.customer-production-0002"].map(String::from),
        [".eJewels.eu.customer-production-0001", ".eJewels.eu.customer-production-0002"].map(String::from),
        // `{"a":1}`, and something that is not a signature.
        ["eyJhIjoxfQ.eu.customer-production-0001", "eyJhIjoxfQ.eu.customer-production-0002"].map(String::from),
        ["eyJhIjoxfQ.eu.a.b.customer-0001", "eyJhIjoxfQ.eu.a.b.customer-0002"].map(String::from),
        [hmac("A"), hmac("E")],
        [rsa("kKvA"), rsa("kKvB")],
        [session("nzkVc"), session("nzkWc")],
    ];
    for [one, other] in groups {
        assert_ne!(one, other);
        let headers: [(KeyPart, MakeHeader); 4] = [
            (KeyPart::header("x-tenant"), |value| ("x-tenant", value.to_owned())),
            (KeyPart::header("authorization"), |value| ("authorization", format!("Bearer {value}"))),
            (KeyPart::cookie("t"), |value| ("cookie", format!("t={value}"))),
            (KeyPart::query("t"), |value| ("query", value.to_owned())),
        ];
        for (part, header) in headers {
            let (gate, _) = gate([once().key(part)]);
            let passes = |value: &str| match header(value) {
                ("query", value) => check(&gate, "GET", &format!("/?t={value}"), &[]).is_allowed(),
                (name, value) => check(&gate, "GET", "/", &[(name, &value)]).is_allowed(),
            };
            assert!(passes(&one) && passes(&other), "{one} {other} {header:?}", header = header("").0);
            assert!(!passes(&one) && !passes(&other), "{one} {other}");
        }
    }
}

#[test]
fn a_cost_that_is_no_whole_number_is_refused() {
    let rule = || limited(5000).cost(Cost::header("x-cost"));
    let (enforcing, _) = gate([rule()]);
    let unreadable = [
        "1e3",
        "1_000",
        "0x3e8",
        "1000.0",
        "1,000",
        "１０００",
        "",
        "-1",
        "+1",
        "1 000",
        "1000 ;x",
        "many",
        "18446744073709551616",
    ];
    for cost in unreadable {
        let outcome = send(&enforcing, "/", &[("x-cost", cost.as_bytes())]);
        assert_eq!(reason(&outcome), Some("invalid_cost"), "{cost}");
    }
    assert_eq!(reason(&check(&enforcing, "GET", "/", &[("x-cost", "1"), ("x-cost", "2")])), Some("duplicate_header"));
    assert_eq!(remaining(&check(&enforcing, "GET", "/", &[])), 4999, "a missing header costs 1");
    assert_eq!(remaining(&check(&enforcing, "GET", "/", &[("x-cost", " 1000\t")])), 3999);
    assert_eq!(remaining(&check(&enforcing, "GET", "/", &[("x-cost", "007")])), 3992);
    assert_eq!(remaining(&check(&enforcing, "GET", "/", &[("x-cost", "0")])), 3991, "no request is free");
    assert!(!check(&enforcing, "GET", "/", &[("x-cost", "18446744073709551615")]).is_allowed());
    let (shadow, _) = gate([rule().mode(tollgate_rules::Mode::Shadow)]);
    assert!(send(&shadow, "/", &[("x-cost", b"1e3")]).is_allowed(), "a shadow rule refuses nothing");
}

#[test]
fn headers_are_matched_without_regard_to_case() {
    let matching = |name, value| gate([once().matching(Match::everything().header(name, value))]).0;
    for (name, glob, sent) in [
        ("content-type", "application/json*", "Application/JSON"),
        ("content-type", "Application/JSON*", "application/json; charset=utf-8"),
        ("x-tier", "gold", "GOLD"),
        ("authorization", "Bearer *", "bearer   T"),
        ("authorization", "bearer\tT", "Bearer T"),
        ("authorization", "Basic YW5uOnBhPz4=", "Basic YW5uOnBhPz7"),
        ("host", "api.example.com", "API.example.com.:8080"),
    ] {
        let gate = matching(name, glob);
        assert!(check(&gate, "GET", "/", &[(name, sent)]).limit().is_some(), "{name}: {glob} {sent}");
        assert!(check(&gate, "GET", "/", &[(name, "other")]).limit().is_none(), "{name}: {glob}");
    }
}

#[test]
fn the_host_header_is_read_as_the_host() {
    let (gate, _) = gate([once().key(KeyPart::header("Host"))]);
    assert!(check(&gate, "GET", "/", &[("host", "api.example.com")]).is_allowed());
    for same in ["API.example.com", "api.example.com.", "api.example.com:80", "api.example.com.:80"] {
        assert!(!check(&gate, "GET", "/", &[("host", same)]).is_allowed(), "{same}");
    }
}

#[test]
fn names_of_parameters_that_frameworks_fold_are_one() {
    for (name, spellings) in [
        (
            "user_id",
            &[
                "USER_ID",
                "user.id",
                "user%20id",
                "user+id",
                "user[id",
                "user%5Bid",
                "User_Id",
                "user_id%00x",
                "+user.id",
            ][..],
        ),
        ("key", &["KEY", "Key", "k%45y", "key[]", "KEY[0]", "%6bEy"]),
        ("user.id", &["user_id", "USER.ID"]),
    ] {
        for spelling in spellings {
            let (gate, _) = gate([once().key(KeyPart::query(name))]);
            assert!(check(&gate, "GET", &format!("/?{name}=REAL"), &[]).is_allowed());
            assert!(!check(&gate, "GET", &format!("/?{spelling}=REAL"), &[]).is_allowed(), "{spelling}");
            let both = check(&gate, "GET", &format!("/?{name}=a&{spelling}=REAL"), &[]);
            assert_eq!(reason(&both), Some("duplicate_parameter"), "{spelling}");
        }
    }
    let (gate, _) = gate([once().key(KeyPart::query("user_id"))]);
    for other in ["userid", "user-id", "users_id", "user_id2", "xuser_id"] {
        assert!(check(&gate, "GET", &format!("/?user_id={other}&{other}=REAL"), &[]).is_allowed(), "{other}");
    }
}

#[test]
fn names_of_cookies_that_frameworks_fold_are_one() {
    for (name, spellings) in [
        ("user_id", &["USER_ID", "user.id", "user[id", "user%5fid", "User_Id"][..]),
        ("sid", &["SID", "Sid", "s%69d", "sid[]", "sid[a]"]),
    ] {
        for spelling in spellings {
            let (gate, _) = gate([once().key(KeyPart::cookie(name))]);
            assert!(check(&gate, "GET", "/", &[("cookie", &format!("{name}=REAL"))]).is_allowed());
            assert!(!check(&gate, "GET", "/", &[("cookie", &format!("{spelling}=REAL"))]).is_allowed(), "{spelling}");
            let both = check(&gate, "GET", "/", &[("cookie", &format!("{name}=a; {spelling}=REAL"))]);
            assert_eq!(reason(&both), Some("duplicate_cookie"), "{spelling}");
        }
    }
}

/// Parsers of cookies differ in quotes that are not closed, and some split at commas.
#[test]
fn a_cookie_that_upstreams_read_differently_is_refused() {
    let (gate, _) = gate([limited(9).key(KeyPart::cookie("sid"))]);
    for (cookie, expected) in [
        ("sid=\"REAL", "invalid_cookie"),
        ("sid=\"REALx; a=1", "invalid_cookie"),
        ("sid=REAL\"", "invalid_cookie"),
        ("a=\"x; sid=REAL", "invalid_cookie"),
        ("a=\"x; sid=REAL; b=\"", "invalid_cookie"),
        ("sid=REAL,x", "duplicate_cookie"),
        ("sid=REAL x", "duplicate_cookie"),
        ("a=\", sid=REAL ,\"; sid=x", "duplicate_cookie"),
    ] {
        assert_eq!(reason(&check(&gate, "GET", "/", &[("cookie", cookie)])), Some(expected), "{cookie}");
    }
    for (nth, same) in ["sid=REAL", "a=\"x;y\"; sid=REAL", "a=1, sid=REAL", "a=\" , sid=REAL , b=\""].iter().enumerate()
    {
        assert_eq!(remaining(&check(&gate, "GET", "/", &[("cookie", same)])), 8 - nth as u64, "{same}");
    }
}

#[test]
fn letters_beyond_ascii_have_no_case_either() {
    let reading =
        PathReading { case: PathCase::Insensitive, encoded_slash: EncodedSlash::Any, ..PathReading::default() };
    for (glob, paths) in [
        ("/café/**", &["/CAFÉ", "/caf%C3%89/x", "/caf%c3%a9", "/Caf\u{e9}"][..]),
        ("/CAF%C3%89", &["/café", "/CAFÉ", "/%43af%c3%a9"]),
        ("/straße*", &["/STRAßE1", "/stra%E1%BA%9Ee"]),
        ("/ΣΊΣΥΦΟΣ", &["/σίσυφος", "/σίσυφοσ"]),
        // The Kelvin sign and the long s.
        ("/kiss", &["/\u{212a}iſs", "/KISS", "/%E2%84%AAI%C5%BFS"]),
        ("/я/*/ж", &["/Я/b/Ж"]),
    ] {
        for path in paths {
            let rule = once().matching(Match::everything().path(glob)).key(KeyPart::path());
            let (gate, _) = gate_of(RuleSet::builder().rule(rule).path_reading(reading).build().unwrap());
            assert!(check(&gate, "GET", path, &[]).limit().is_some(), "{glob} {path}");
        }
    }
    let (gate, _) =
        gate_of(RuleSet::builder().rule(once().key(KeyPart::path())).path_reading(reading).build().unwrap());
    assert!(check(&gate, "GET", "/café/Ж%FF", &[]).is_allowed());
    assert!(!check(&gate, "GET", "/CAFÉ/ж%ff", &[]).is_allowed());
    assert!(check(&gate, "GET", "/cafe/ж%ff", &[]).is_allowed());
    // With other rules, a path in another case stays another path.
    let (sensitive, _) = super::gate([once().matching(Match::everything().path("/kiss"))]);
    assert!(check(&sensitive, "GET", "/\u{212a}iss", &[]).limit().is_none());
    let (ignoring, _) = super::gate([once().matching(Match::everything().path("/café").ignoring_path_case())]);
    assert!(check(&ignoring, "GET", "/CAFÉ", &[]).limit().is_some());
}
