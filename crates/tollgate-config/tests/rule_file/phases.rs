//! Rules that read tokens are checked in two phases. The same rules on headers, checked in one phase, decide the same.

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName, HeaderValue};
use jsonwebtoken::{EncodingKey, Header};
use proptest::prelude::*;
use serde_json::{Map, Value};
use tollgate::{Limiter, ManualClock};
use tollgate_config::RuleFile;
use tollgate_rules::{Facts, Gate, Outcome};

const SECRET: &[u8] = b"a secret of at least thirty-two bytes";

/// Limits, some of which read `SUB` and `PLAN`.
const LIMITS: [&str; 6] = [
    "name: per-ip, key: ip, algorithm: fixed_window, limit: 6, window: 1h",
    "name: per-path, key: path, algorithm: token_bucket, capacity: 5, refill: 1/m",
    "name: per-user, key: 'SUB', algorithm: fixed_window, limit: 3, window: 1h",
    "name: users-only, key: 'SUB', missing: deny, algorithm: sliding_window_log, limit: 4, window: 1h",
    "name: everybody, key: ['SUB', ip], missing: anonymous, plan: 'PLAN', limit: 2, overrides: [{ plan: gold, limit: 5 }]",
    "name: blocked, key: 'SUB', limit: 100, blocked: { keys: [eve] }, exempt: { ips: [192.0.2.2] }",
];

#[derive(Clone, Debug)]
struct Asked {
    path: &'static str,
    peer: u8,
    sub: Option<&'static str>,
    plan: Option<&'static str>,
    /// Seconds since the previous request.
    after: u64,
}

fn asked() -> impl Strategy<Value = Asked> {
    let sub = prop::option::weighted(0.8, prop::sample::select(vec!["ann", "bob", "eve"]));
    let plan = prop::option::of(Just("gold"));
    let after = prop_oneof![3 => Just(0), 1 => 1..4_000_u64];
    (prop::sample::select(vec!["/", "/x"]), 1..3_u8, sub, plan, after)
        .prop_map(|(path, peer, sub, plan, after)| Asked { path, peer, sub, plan, after })
}

/// Returns a gate with some of the limits, whose keys and plans come from these sources.
fn gate(chosen: &[&str], [sub, plan]: [&str; 2], clock: &ManualClock) -> Gate {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("secret"), SECRET).unwrap();
    let limits: String = chosen.iter().map(|limit| format!("  - {{ {limit} }}\n")).collect();
    let limits = limits.replace("SUB", sub).replace("PLAN", plan);
    let path = folder.path().join("tollgate.yaml");
    std::fs::write(&path, format!("jwt: {{ key_file: secret, algorithms: [HS256] }}\nlimits:\n{limits}")).unwrap();
    let parsed = RuleFile::load(&path).unwrap_or_else(|problems| panic!("{problems}"));
    let rules = parsed.compile().unwrap_or_else(|problems| panic!("{problems}"));
    Gate::with_limiter(rules, Limiter::builder().clock(clock.clone())).unwrap()
}

fn ask(gate: &Gate, request: &Asked) -> Outcome {
    let named = [("sub", request.sub), ("plan", request.plan)];
    let named: Vec<(&str, &str)> = named.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    let claims: Map<String, Value> = named.iter().map(|(name, value)| ((*name).to_owned(), (*value).into())).collect();
    let token = jsonwebtoken::encode(&Header::default(), &claims, &EncodingKey::from_secret(SECRET)).unwrap();
    let mut headers = HeaderMap::new();
    headers.insert(AUTHORIZATION, HeaderValue::from_str(&format!("Bearer {token}")).unwrap());
    for (name, value) in named {
        headers.insert(format!("x-{name}").parse::<HeaderName>().unwrap(), HeaderValue::from_static(value));
    }
    gate.decide_now(&Facts::new("GET", request.path).headers(&headers).peer([192, 0, 2, request.peer].into())).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn rules_on_tokens_decide_as_the_same_rules_on_headers(
        chosen in prop::sample::subsequence(LIMITS.to_vec(), 1..=LIMITS.len()).prop_shuffle(),
        requests in prop::collection::vec(asked(), 1..40),
    ) {
        let clock = ManualClock::at(tollgate::Timestamp::from_secs(1_700_000_000));
        let on_tokens = gate(&chosen, ["jwt:sub", "jwt:plan"], &clock);
        let on_headers = gate(&chosen, ["header:x-sub", "header:x-plan"], &clock);
        for request in &requests {
            clock.advance(std::time::Duration::from_secs(request.after));
            let (two, one) = (ask(&on_tokens, request), ask(&on_headers, request));
            prop_assert_eq!(two.is_allowed(), one.is_allowed(), "{:?} {:?} {:?}", request, two, one);
            // If several limits deny, only those that read no token are reported. Later requests show that nothing was
            // taken.
            if two.is_allowed() {
                prop_assert_eq!(two.limit(), one.limit(), "{:?}", request);
                prop_assert_eq!(format!("{:?}", two.decision()), format!("{:?}", one.decision()), "{:?}", request);
            }
        }
    }
}
