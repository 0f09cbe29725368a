//! One normal form: a key that a caller names and a key that a request sends meet exactly when they mean the same.

use std::net::IpAddr;

use http::{HeaderMap, HeaderName, HeaderValue};
use proptest::prelude::*;
use tollgate::{Ban, FixedWindow, HOUR, Limit, MINUTE};
use tollgate_http::Refusal;
use tollgate_rules::internal::limited::{KeyTexts, LimitedKeys};
use tollgate_rules::{
    Check, Checks, EncodedSlash, Facts, Gate, JointCheck, KeyBan, KeyError, KeyPart, Listing, Missing, Outcome,
    PathCase, PathParameters, PathReading, Rule, RuleSet, RuleState,
};

use super::by_name::ready;
use super::{gate_of, remaining};

/// One reading of every path, so that exemptions and blocks meet the same requests.
const READING: PathReading =
    PathReading { encoded_slash: EncodedSlash::Decode, parameters: PathParameters::Strip, case: PathCase::Insensitive };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Ip,
    WideIp,
    WholeIp,
    Header,
    Cookie,
    Query,
    Path,
    Method,
    Host,
    Route,
    Descriptor,
}

const KINDS: [Kind; 11] = [
    Kind::Ip,
    Kind::WideIp,
    Kind::WholeIp,
    Kind::Header,
    Kind::Cookie,
    Kind::Query,
    Kind::Path,
    Kind::Method,
    Kind::Host,
    Kind::Route,
    Kind::Descriptor,
];

/// Picks among spellings.
struct Choices(u64);

impl Choices {
    fn pick<'t>(&mut self, from: &[&'t str]) -> &'t str {
        from[self.below(from.len())]
    }

    fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % count
    }

    fn any_case(&mut self, text: &str) -> String {
        let pick =
            |letter: char| if self.below(2) == 0 { letter.to_ascii_uppercase() } else { letter.to_ascii_lowercase() };
        text.chars().map(pick).collect()
    }

    fn padded(&mut self, text: &str) -> String {
        let blanks = ["", " ", "\t", "\u{a0}", "\u{3000}"];
        format!("{}{text}{}", self.pick(&blanks), self.pick(&blanks))
    }

    /// Escapes letters, and every other character that is not a letter or a digit.
    fn percent(&mut self, text: &str, is_kept: impl Fn(u8) -> bool) -> String {
        let mut out = String::new();
        for byte in text.bytes() {
            if is_kept(byte) && (!byte.is_ascii_alphanumeric() || self.below(4) > 0) {
                out.push(char::from(byte));
            } else {
                out += &if self.below(2) == 0 { format!("%{byte:02X}") } else { format!("%{byte:02x}") };
            }
        }
        out
    }
}

/// The values that a part of a kind can have. Their places are their identities.
fn values(kind: Kind) -> &'static [&'static str] {
    match kind {
        Kind::Ip => &["192.0.2.1", "192.0.2.2", "2001:db8:1:2::", "2001:db8:1:3::"],
        Kind::WideIp => &["192.0.2.1", "192.0.2.2", "2001:db8:1:100::", "2001:db8:1:200::"],
        Kind::WholeIp => &["192.0.2.1", "192.0.2.2", "2001:db8:1:2::7", "2001:db8:1:2::8"],
        Kind::Header => &["ann", "Ann", "bob", "a b"],
        Kind::Cookie => &["ann", "Ann", "bob", "a:b"],
        Kind::Query => &["ann", "Ann", "a+b", "a%41b", "a b"],
        Kind::Path => &["/", "/a/b", "/a/c", "/a", "/caf\u{e9}"],
        Kind::Method => &["GET", "POST", "PURGE"],
        Kind::Host => &["api.example.com", "www.example.com", "[2001:db8::7]", "[::1]", "192.0.2.9"],
        Kind::Route | Kind::Descriptor => &["a", "A", "b"],
    }
}

fn part(kind: Kind) -> KeyPart {
    match kind {
        Kind::Ip => KeyPart::ip(),
        Kind::WideIp => KeyPart::ip_network(56).unwrap(),
        Kind::WholeIp => KeyPart::ip_network(128).unwrap(),
        Kind::Header => KeyPart::header("x-user"),
        Kind::Cookie => KeyPart::cookie("sid"),
        Kind::Query => KeyPart::query("q"),
        Kind::Path => KeyPart::path(),
        Kind::Method => KeyPart::method(),
        Kind::Host => KeyPart::host(),
        Kind::Route => KeyPart::route(),
        Kind::Descriptor => KeyPart::descriptor("user"),
    }
}

/// Returns an address of the group, in the notation of a request's connection.
fn address(kind: Kind, value: &str, choices: &mut Choices) -> IpAddr {
    let below = choices.below(1000) as u128;
    match (value.parse().unwrap(), kind) {
        (IpAddr::V4(whole), _) if choices.below(2) == 0 => whole.to_ipv6_mapped().into(),
        (IpAddr::V6(network), Kind::Ip) => std::net::Ipv6Addr::from_bits(network.to_bits() | below).into(),
        (IpAddr::V6(network), Kind::WideIp) => std::net::Ipv6Addr::from_bits(network.to_bits() | below << 60).into(),
        (whole, _) => whole,
    }
}

fn spelled_address(address: IpAddr, choices: &mut Choices) -> String {
    let text = match address {
        IpAddr::V6(address) if choices.below(3) == 0 => {
            address.segments().map(|segment| format!("{segment:04x}")).join(":")
        }
        other => other.to_string(),
    };
    choices.any_case(&text)
}

fn spelled_host(value: &str, choices: &mut Choices) -> String {
    let host = match value {
        "[2001:db8::7]" => choices.pick(&["[2001:db8::7]", "[2001:0db8:0::7]", "[2001:db8:0:0:0:0:0:0007]"]),
        "[::1]" => choices.pick(&["[::1]", "[0::1]", "[0:0:0:0:0:0:0:1]", "[::0.0.0.1]"]),
        "192.0.2.9" => choices.pick(&["192.0.2.9", "[::ffff:192.0.2.9]", "[::ffff:c000:209]"]),
        name => choices.pick(&[name, &format!("{name}.")]).to_owned().leak(),
    };
    format!("{}{}", choices.any_case(host), choices.pick(&["", ":80", ":"]))
}

fn spelled_path(value: &str, choices: &mut Choices) -> String {
    let mut out = String::new();
    for (index, segment) in value.split('/').skip(1).enumerate() {
        // An encoded slash after a `;` belongs to the parameter.
        let slash = if index == 0 || out.contains(';') { ["/", "//", "///"] } else { ["/", "//", "%2F"] };
        out += choices.pick(&slash);
        let cased = segment.chars().map(|letter| match letter.is_ascii() {
            true => choices.any_case(&letter.to_string()),
            false => letter.to_string(),
        });
        let cased: String = cased.collect();
        out += &choices.percent(&cased, |byte| byte.is_ascii_alphanumeric());
        if !segment.is_empty() {
            out += choices.pick(&["", "", ";x", ";x=1"]);
        }
    }
    out + if value == "/" { "" } else { choices.pick(&["", "/"]) }
}

fn spelled_cookie(value: &str, choices: &mut Choices) -> String {
    let octal = |text: &str| text.bytes().map(|byte| format!("\\{byte:03o}")).collect::<String>();
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric();
    match choices.below(5) {
        0 => format!("\"{}\"", octal(value)),
        1 => format!("\"{value}\""),
        2 => {
            let once = choices.percent(value, is_plain);
            choices.percent(&once, is_plain)
        }
        _ => choices.percent(value, |byte| byte.is_ascii_alphanumeric() || byte == b':'),
    }
}

/// Returns a spelling of a value that a caller may name.
fn named(kind: Kind, value: &str, choices: &mut Choices) -> String {
    match kind {
        Kind::Ip | Kind::WideIp | Kind::WholeIp => {
            let bits = match kind {
                Kind::Ip => 64,
                Kind::WideIp => 56,
                _ => 128,
            };
            match (value.parse().unwrap(), choices.below(3)) {
                (IpAddr::V4(whole), 0) => format!("{whole}/32"),
                (IpAddr::V6(network), 0) => format!("{}/{bits}", spelled_address(network.into(), choices)),
                _ => {
                    let address = address(kind, value, choices);
                    spelled_address(address, choices)
                }
            }
        }
        Kind::Header => choices.padded(value),
        Kind::Query => choices.padded(value),
        Kind::Cookie => spelled_cookie(value, choices),
        Kind::Path => spelled_path(value, choices),
        Kind::Method => choices.any_case(value),
        Kind::Host => spelled_host(value, choices),
        Kind::Route | Kind::Descriptor => value.to_owned(),
    }
}

/// What a request sends.
struct Sent {
    method: String,
    target: String,
    host: Option<String>,
    peer: Option<IpAddr>,
    headers: HeaderMap,
    route: Option<String>,
    descriptors: Vec<(&'static str, String)>,
}

impl Sent {
    fn of(parts: &[(Kind, usize)], choices: &mut Choices) -> Self {
        let (mut path, mut query) = ("/".to_owned(), String::new());
        let mut sent = Self {
            method: "GET".into(),
            target: String::new(),
            host: None,
            peer: None,
            headers: HeaderMap::new(),
            route: None,
            descriptors: Vec::new(),
        };
        let header = |value: &str| HeaderValue::from_bytes(value.as_bytes()).unwrap();
        for (kind, index) in parts {
            let value = values(*kind)[*index];
            match kind {
                Kind::Ip | Kind::WideIp | Kind::WholeIp => sent.peer = Some(address(*kind, value, choices)),
                Kind::Header => {
                    _ = sent.headers.insert(HeaderName::from_static("x-user"), header(&choices.padded(value)));
                }
                Kind::Cookie => {
                    let cookie = format!("a=1; sid={}; b=2", spelled_cookie(value, choices));
                    sent.headers.insert("cookie", header(&cookie));
                }
                Kind::Query => {
                    let value = choices.percent(value, |byte| byte.is_ascii_alphanumeric());
                    let value = if choices.below(2) == 0 { value.replace("%20", "+") } else { value };
                    query = format!(
                        "?{}{value}{}",
                        choices.pick(&["q=", "x=1&q=", "q[]=", "%71="]),
                        choices.pick(&["", "+"])
                    );
                }
                Kind::Path => path = spelled_path(value, choices),
                Kind::Method => sent.method = choices.any_case(value),
                Kind::Host => sent.host = Some(spelled_host(value, choices)),
                Kind::Route => sent.route = Some(value.into()),
                Kind::Descriptor => sent.descriptors.push(("user", value.into())),
            }
        }
        sent.target = path + &query;
        sent
    }

    fn with_facts<T>(&self, with: impl FnOnce(Facts<'_>) -> T) -> T {
        let descriptors: Vec<(&str, &str)> = self.descriptors.iter().map(|(name, value)| (*name, &**value)).collect();
        let mut facts = Facts::new(&self.method, &self.target).headers(&self.headers).descriptors(&descriptors);
        facts = self.host.iter().fold(facts, |facts, host| facts.host(host));
        facts = self.peer.iter().fold(facts, |facts, peer| facts.peer(*peer));
        facts = self.route.iter().fold(facts, |facts, route| facts.route(route));
        with(facts)
    }
}

/// A key that a caller names, and a request.
struct Case {
    kinds: Vec<Kind>,
    named: Vec<String>,
    sent: Sent,
}

impl Case {
    fn parts(&self) -> Vec<&str> {
        self.named.iter().map(String::as_str).collect()
    }

    fn bytes(&self) -> Vec<&[u8]> {
        self.named.iter().map(String::as_bytes).collect()
    }

    fn keyed(&self, rule: Rule) -> Rule {
        self.kinds.iter().fold(rule, |rule, kind| rule.key(part(*kind)))
    }

    fn rule(&self) -> Rule {
        self.keyed(Rule::new(Limit::new("limit", FixedWindow::new(10, MINUTE)).unwrap()))
    }

    fn request(&self, gate: &Gate, cost: u64) -> Outcome {
        self.sent.with_facts(|facts| gate.decide_now(&facts.cost(cost)).expect("the store is in memory"))
    }
}

fn gate(rule: Rule) -> Gate {
    gate_of(RuleSet::builder().path_reading(READING).rule(rule).build().unwrap()).0
}

fn at_once(check: Check) -> Outcome {
    match check {
        Check::Ready(outcome) => outcome,
        Check::Pending(_) => panic!("the store is in memory"),
    }
}

fn quota(outcome: &Outcome) -> u64 {
    outcome.decision().unwrap().quota()
}

/// Returns whether the key that a caller names is that of the request.
type Meets = fn(&Case) -> bool;

/// Everything that takes a key from somebody other than a request.
const CALLERS: [(&str, Meets); 14] = [
    ("overrides", |case| {
        let gate = gate(case.rule().key_limit(&case.parts(), FixedWindow::new(3, MINUTE)));
        quota(&case.request(&gate, 1)) == 3
    }),
    ("overrides of requests in flight", |case| {
        let gate = gate(case.keyed(Rule::in_flight("limit", 10).unwrap()).key_in_flight(&case.parts(), 1));
        let first = case.request(&gate, 1);
        let is_allowed = case.request(&gate, 1).is_allowed();
        drop(first);
        !is_allowed
    }),
    ("blocked", |case| {
        let gate = gate(case.rule().blocked(Listing::none().key(&case.parts())));
        case.request(&gate, 1).refusal() == Some(&Refusal::Blocked)
    }),
    ("exempt", |case| {
        let gate = gate(case.rule().exempt(Listing::none().key(&case.parts())));
        case.request(&gate, 1).decision().is_none()
    }),
    ("a ban by an operator", |case| {
        let gate = gate(case.rule());
        let (since, by) = (gate.wall_time(), "an operator".to_owned());
        let (limit, until) = ("limit".to_owned(), since.saturating_add(HOUR));
        gate.set_key_bans(vec![KeyBan { limit, key: case.named.clone(), since, until, by }]);
        matches!(case.request(&gate, 1).refusal(), Some(Refusal::Banned { .. }))
    }),
    ("a check by name", |case| {
        let gate = gate(case.rule());
        assert_eq!(remaining(&at_once(gate.check_by_name("limit", &case.bytes(), 4).unwrap())), 6);
        remaining(&case.request(&gate, 1)) == 5
    }),
    ("a joint check", |case| {
        let gate = gate(case.rule());
        let key = case.bytes();
        let check = JointCheck::Named { rule: "limit", key: &key, cost: 4 };
        let Checks::Ready(outcomes) = gate.check_together(&[check]).unwrap() else { panic!("in memory") };
        assert!(outcomes[0].is_allowed());
        remaining(&case.request(&gate, 1)) == 5
    }),
    ("a refund by name", |case| {
        let gate = gate(case.rule());
        drop(case.request(&gate, 5));
        drop(ready(gate.refund_by_name("limit", &case.bytes(), 3).unwrap()));
        remaining(&case.request(&gate, 0)) == 8
    }),
    ("a reset by name", |case| {
        let gate = gate(case.rule().ban(Ban { after: 1, within: MINUTE, for_: HOUR }));
        assert!(case.request(&gate, 10).is_allowed() && !case.request(&gate, 1).is_allowed());
        drop(ready(gate.reset_by_name("limit", &case.bytes()).unwrap()));
        case.request(&gate, 1).is_allowed()
    }),
    ("a lifted ban", |case| {
        let gate = gate(case.rule().ban(Ban { after: 1, within: MINUTE, for_: HOUR }));
        assert!(case.request(&gate, 9).is_allowed() && !case.request(&gate, 2).is_allowed());
        drop(ready(gate.lift_ban_by_name("limit", &case.bytes()).unwrap()));
        case.request(&gate, 1).is_allowed()
    }),
    ("a reservation", |case| {
        let gate = gate(case.rule());
        let reserved = ready(gate.reserve_by_name("limit", &case.bytes(), 4, MINUTE).unwrap()).unwrap();
        assert!(reserved.token.is_some());
        remaining(&case.request(&gate, 1)) == 5
    }),
    ("the view of a key", |case| {
        let gate = gate(case.rule());
        drop(case.request(&gate, 4));
        match ready(gate.explain_key("limit", &case.bytes()).unwrap()).state {
            RuleState::Counted { decision: Some(decision), .. } => decision.remaining() == 6,
            other => panic!("{other:?}"),
        }
    }),
    ("an explanation", |case| {
        let gate = gate(case.rule());
        drop(at_once(gate.check_by_name("limit", &case.bytes(), 4).unwrap()));
        let mut explained = case.sent.with_facts(|facts| ready(gate.explain(&facts)));
        match explained.rules.remove(0).state {
            RuleState::Counted { decision: Some(decision), .. } => decision.remaining() == 5,
            other => panic!("{other:?}"),
        }
    }),
    ("the most limited keys", |case| {
        let gate = gate(case.rule());
        let keys = std::sync::Arc::new(LimitedKeys::new(KeyTexts::Hashed));
        gate.count_limited(Some(keys.clone()));
        assert!(!at_once(gate.check_by_name("limit", &case.bytes(), 11).unwrap()).is_allowed());
        assert!(!case.request(&gate, 11).is_allowed());
        keys.take().limits[0].keys.len() == 1
    }),
];

fn case() -> impl Strategy<Value = (Vec<(Kind, usize, usize)>, u64)> {
    let part = (0..KINDS.len(), 0..5_usize, 0..5_usize, any::<bool>()).prop_map(|(kind, one, other, is_same)| {
        let count = values(KINDS[kind]).len();
        (KINDS[kind], one % count, if is_same { one % count } else { other % count })
    });
    let is_ip = |kind: Kind| matches!(kind, Kind::Ip | Kind::WideIp | Kind::WholeIp);
    let parts = prop::collection::vec(part, 1..3).prop_map(move |mut parts| {
        let (first, is_twice) = (parts[0].0, |kind: Kind, first: Kind| kind == first || is_ip(kind) && is_ip(first));
        parts.truncate(if parts.len() == 2 && is_twice(parts[1].0, first) { 1 } else { 2 });
        parts
    });
    (parts, any::<u64>())
}

proptest! {
    #[test]
    fn a_named_key_meets_a_request_exactly_when_they_mean_the_same((parts, seed) in case()) {
        let mut choices = Choices(seed);
        let named = parts.iter().map(|(kind, one, _)| named(*kind, values(*kind)[*one], &mut choices)).collect();
        let sent: Vec<(Kind, usize)> = parts.iter().map(|(kind, _, other)| (*kind, *other)).collect();
        let sent = Sent::of(&sent, &mut choices);
        let case = Case { kinds: parts.iter().map(|(kind, ..)| *kind).collect(), named, sent };
        let is_same = parts.iter().all(|(_, one, other)| one == other);
        for (caller, meets) in CALLERS {
            let Sent { target, host, peer, headers, .. } = &case.sent;
            prop_assert_eq!(
                meets(&case), is_same,
                "{}: {:?} of {:?} and {} {:?} {:?} {:?}", caller, case.named, case.kinds, target, host, peer, headers
            );
        }
    }
}

/// Values that no request can have, with the beginning of the fix.
const IMPOSSIBLE: [(Kind, &str, &str); 16] = [
    (Kind::Ip, "not-an-ip", "write one such as 192.0.2.7"),
    (Kind::Ip, "", "write one such as 192.0.2.7"),
    (Kind::Ip, "[::1]", "write one such as 192.0.2.7"),
    (Kind::Ip, "192.0.2.0/24", "write 192.0.2.0; `exempt` and `blocked` take networks in `ips`"),
    (Kind::Ip, "2001:db8::/56", "write 2001:db8::/64"),
    (Kind::WideIp, "2001:db8::/64", "write 2001:db8::/56"),
    (Kind::Ip, "2001:db8::7/64", "write 2001:db8::/64"),
    (Kind::Host, "a b", "write a name such as api.example.com"),
    (Kind::Host, "::1", "write [::1]"),
    (Kind::Host, "api.example.com/", "write a name such as api.example.com"),
    (Kind::Method, "GE T", "write one such as GET"),
    (Kind::Method, "", "write one such as GET"),
    (Kind::Path, "/a/../b", "send the path it resolves to"),
    (Kind::Path, "/a%00", "remove it"),
    (Kind::Path, "/a\\b", "use a slash, or encode it as %5C"),
    (Kind::Path, "/a?b=1", "write the path alone"),
];

#[test]
fn a_value_that_no_request_can_have_is_an_error_with_the_fix_and_changes_nothing() {
    for (kind, text, fix) in IMPOSSIBLE {
        let rule = || Rule::new(Limit::new("limit", FixedWindow::new(10, MINUTE)).unwrap()).key(part(kind));
        let build = |rule| RuleSet::builder().path_reading(READING).rule(rule).build();
        let gate = gate_of(build(rule()).unwrap()).0;
        let key: &[&[u8]] = &[text.as_bytes()];
        let errors = [
            gate.check_by_name("limit", key, 1).err(),
            gate.check_together(&[JointCheck::Named { rule: "limit", key, cost: 1 }]).err(),
            gate.refund_check(&JointCheck::Named { rule: "limit", key, cost: 1 }).err(),
            gate.refund_by_name("limit", key, 1).err(),
            gate.reset_by_name("limit", key).err(),
            gate.lift_ban_by_name("limit", key).err(),
            gate.reserve_by_name("limit", key, 1, MINUTE).err(),
            gate.explain_key("limit", key).err(),
            gate.normal_key("limit", &[text.to_owned()]).err(),
            gate.rules().check_key("limit", key).err(),
        ];
        for error in errors {
            let error = error.unwrap_or_else(|| panic!("{text} is accepted for {kind:?}"));
            assert!(
                matches!(&error, KeyError::InvalidValue { part: 0, fix: given, .. } if given.starts_with(fix)),
                "{error}"
            );
        }
        let limiter = gate.memory().unwrap();
        assert_eq!(limiter.live_keys(limiter.id("limit").unwrap()), 0, "{text}");
        let listed = || Listing::none().key(&[text]);
        for (field, rule) in [
            ("overrides", rule().key_limit(&[text], FixedWindow::new(3, MINUTE))),
            ("exempt", rule().exempt(listed())),
            ("blocked", rule().blocked(listed())),
        ] {
            let error = build(rule).unwrap_err();
            assert_eq!((error.field(), error.limit()), (field, Some("limit")));
            assert!(error.fix().starts_with(fix), "{error}");
        }
    }
}

#[test]
fn a_key_with_other_parts_is_an_error_that_names_them() {
    let rule = Rule::new(Limit::new("limit", FixedWindow::new(10, MINUTE)).unwrap());
    let rule = rule.key(KeyPart::header("x-user")).key(KeyPart::constant("eu"));
    let gate = gate_of(RuleSet::builder().rule(rule.clone()).build().unwrap()).0;
    let error = |key: &[&[u8]]| gate.check_by_name("limit", key, 1).err().unwrap().to_string();
    assert_eq!(error(&[b"ann"]), "the key has 1 part, but that of `limit` has 2 parts: give header:x-user, const:eu");
    assert_eq!(error(&[b"ann", b"us"]), "`us` is not the constant of this part: write eu");
    assert!(gate.check_by_name("limit", &[b"ann", b"eu"], 1).is_ok());
    let unknown = gate.check_by_name("other", &[b"ann"], 1).err().unwrap();
    assert_eq!(unknown, KeyError::UnknownRule { rule: "other".into() });
    let listed = rule.blocked(Listing::none().key(&["ann"]));
    let error = RuleSet::builder().rule(listed).build().unwrap_err();
    assert!(error.to_string().contains("the key has 1 part"), "{error}");
}

#[test]
fn two_overrides_of_one_key_are_an_error() {
    let rule = Rule::new(Limit::new("limit", FixedWindow::new(10, MINUTE)).unwrap()).key(KeyPart::ip());
    let rule = ["2001:db8::7", "2001:db8::/64"]
        .into_iter()
        .zip([3, 4])
        .fold(rule, |rule, (key, limit)| rule.key_limit(&[key], FixedWindow::new(limit, MINUTE)));
    let error = RuleSet::builder().rule(rule).build().unwrap_err();
    assert_eq!(error.problem(), "two overrides are for the key `2001:db8::/64`");
}

#[test]
fn requests_without_a_part_are_named_anonymous_for_every_kind() {
    for kind in KINDS.into_iter().filter(|kind| !matches!(kind, Kind::Path | Kind::Method | Kind::Descriptor)) {
        let gate = gate(Rule::new(Limit::new("limit", FixedWindow::new(10, MINUTE)).unwrap()).key(part(kind)));
        assert!(at_once(gate.check_by_name("limit", &[b"anonymous"], 4).unwrap()).is_allowed());
        let outcome = gate.decide_now(&Facts::new("GET", "/")).unwrap();
        assert_eq!(remaining(&outcome), 5, "{kind:?}");
        let skipping = Rule::new(Limit::new("limit", FixedWindow::new(10, MINUTE)).unwrap()).key(KeyPart::ip());
        let gate = gate_of(RuleSet::builder().rule(skipping.missing(Missing::Skip)).build().unwrap()).0;
        assert!(gate.check_by_name("limit", &[b"anonymous"], 1).is_err());
    }
}

proptest! {
    /// The keys that reports show can be given back to Tollgate.
    #[test]
    fn the_normal_form_of_a_key_is_its_own((parts, seed) in case()) {
        let mut choices = Choices(seed);
        for (kind, value, _) in parts {
            let gate = gate(Rule::new(Limit::new("limit", FixedWindow::new(10, MINUTE)).unwrap()).key(part(kind)));
            let text = named(kind, values(kind)[value], &mut choices);
            let once = gate.normal_key("limit", &[text]).unwrap();
            prop_assert_eq!(gate.normal_key("limit", &once).unwrap(), once);
        }
    }
}
