//! Properties of every text and every request.

use http::{HeaderMap, HeaderValue};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{Expression, Request};
use crate::cel::types::Type;
use crate::pattern::PatternBudget;

/// Fragments that form an expression more often than single letters do.
const PIECES: [&str; 46] = [
    "request",
    ".path",
    ".headers",
    ".query",
    ".method",
    ".ip",
    "jwt",
    ".level",
    ".roles",
    "descriptors",
    ".tier",
    "[\"x\"]",
    "[0]",
    " == ",
    " != ",
    " < ",
    " && ",
    " || ",
    "!",
    "-",
    " + ",
    " % ",
    " / ",
    " * ",
    " in ",
    " ? ",
    " : ",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    ",",
    "1",
    "2u",
    "0.5",
    "\"x\"",
    "null",
    "true",
    "x",
    "size(",
    "int(",
    ".contains(",
    ".all(x, ",
    ".map(x, ",
];

fn request() -> impl Strategy<Value = Request> {
    let claim = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z0-9]{0,3}".prop_map(Value::from),
        Just(json!(["x", 1, {"x": true}])),
        Just(json!({"x": {"level": 2}})),
    ];
    let header = proptest::option::of(prop_oneof![Just(b"1".to_vec()), proptest::collection::vec(32_u8..=126, 0..6)]);
    (claim, header, "/[ -~]{0,8}", any::<Option<std::net::IpAddr>>()).prop_map(|(claim, header, target, client)| {
        let mut headers = HeaderMap::new();
        if let Some(value) = header {
            headers.insert("x", HeaderValue::from_bytes(&value).unwrap());
        }
        let claims = json!({ "level": claim, "roles": ["x", claim] }).as_object().cloned();
        Request { target, headers, claims, client }
    })
}

/// Generates expressions of each type, by the typing rules of CEL.
fn of_type(depth: u32) -> (BoxedStrategy<String>, BoxedStrategy<String>, BoxedStrategy<String>) {
    let text = prop_oneof![
        Just("request.path"),
        Just("request.headers.x"),
        Just("request.query[\"q\"]"),
        Just("request.ip"),
        Just("descriptors.tier"),
        Just("\"x\""),
        Just("dyn(jwt.level)"),
    ]
    .prop_map(str::to_owned);
    let number = prop_oneof![
        Just("1"),
        Just("0"),
        Just("9223372036854775807"),
        Just("size(jwt)"),
        Just("int(request.headers.x)"),
        Just("jwt.level"),
    ]
    .prop_map(str::to_owned);
    let truth = prop_oneof![Just("true"), Just("has(jwt.x)"), Just("(\"x\" in request.headers)"), Just("jwt.level")]
        .prop_map(str::to_owned);
    if depth == 0 {
        return (truth.boxed(), number.boxed(), text.boxed());
    }
    let (truths, numbers, texts) = of_type(depth - 1);
    let pairs = |one: &BoxedStrategy<String>, two: &BoxedStrategy<String>| (one.clone(), two.clone());
    let deeper_truth = prop_oneof![
        truth,
        pairs(&truths, &truths).prop_map(|(a, b)| format!("({a} && {b})")),
        pairs(&truths, &truths).prop_map(|(a, b)| format!("(!{a} || {b})")),
        pairs(&numbers, &numbers).prop_map(|(a, b)| format!("({a} < {b})")),
        pairs(&texts, &texts).prop_map(|(a, b)| format!("({a} == {b})")),
        pairs(&texts, &texts).prop_map(|(a, b)| format!("({a}).startsWith({b})")),
        texts.clone().prop_map(|a| format!("({a}).matches(\"^[/x]\")")),
        texts.clone().prop_map(|a| format!("[{a}, \"y\"].exists(v, v == {a})")),
    ];
    let deeper_number = prop_oneof![
        number,
        (numbers.clone(), "[-+*/%]", numbers.clone()).prop_map(|(a, sign, b)| format!("({a} {sign} {b})")),
        (truths, numbers.clone(), numbers.clone()).prop_map(|(a, b, c)| format!("({a} ? {b} : {c})")),
        pairs(&numbers, &numbers).prop_map(|(a, b)| format!("max({a}, {b})")),
        texts.clone().prop_map(|a| format!("size({a})")),
        numbers.clone().prop_map(|a| format!("[{a}].map(v, v)[0]")),
    ];
    let deeper_text = prop_oneof![
        text,
        pairs(&texts, &texts).prop_map(|(a, b)| format!("({a} + {b})")),
        numbers.prop_map(|a| format!("string({a})")),
    ];
    (deeper_truth.boxed(), deeper_number.boxed(), deeper_text.boxed())
}

/// Returns the checked type, and the type of the value if there is one.
fn check_and_run(text: &str, request: &Request) -> Option<(Type, Option<String>)> {
    let (expression, gives) = Expression::read(text, &mut PatternBudget::default()).ok()?;
    let found = request.input(|input| expression.evaluate(input, |value| Ok(value.get_type().name().to_owned())));
    Some((gives, found.ok()))
}

fn assert_sound(text: &str, request: &Request) -> Result<bool, TestCaseError> {
    let Some((gives, found)) = check_and_run(text, request) else { return Ok(false) };
    if let (false, Some(found)) = (gives == Type::Dyn, found) {
        let expected = if gives == Type::Null { "null_type".to_owned() } else { gives.to_string() };
        prop_assert_eq!(found, expected, "{}", text);
    }
    Ok(true)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn no_text_makes_it_panic(text in "\\PC{0,60}", request in request()) {
        assert_sound(&text, &request)?;
    }

    #[test]
    fn no_order_of_known_pieces_makes_it_panic_or_changes_a_type(
        pieces in proptest::collection::vec(proptest::sample::select(&PIECES[..]), 1..14),
        request in request(),
    ) {
        assert_sound(&pieces.concat(), &request)?;
    }

    #[test]
    fn typed_expressions_are_accepted_and_keep_their_type(
        (truth, number) in { let (truth, number, _) = of_type(3); (truth, number) },
        request in request(),
    ) {
        for text in [truth, number] {
            match Expression::read(&text, &mut PatternBudget::default()) {
                Ok(_) => prop_assert!(assert_sound(&text, &request)?),
                // The only bounds that the grammar can reach.
                Err(error) => {
                    let message = error.to_string();
                    let bound = ["more than 1 `map`", "nests too deeply", "more than 4096", "loops are nested", "more than 10000"];
                    prop_assert!(bound.iter().any(|bound| message.contains(bound)), "{}: {}", text, message);
                }
            }
        }
    }

    #[test]
    fn an_expression_whose_reads_are_guarded_misses_no_entry(
        (truth, number) in { let (truth, number, _) = of_type(3); (truth, number) },
        request in request(),
    ) {
        for text in [truth, number] {
            let Ok((expression, _)) = Expression::read(&text, &mut PatternBudget::default()) else { continue };
            let outcome = request.input(|input| expression.evaluate(input, |_| Ok(())));
            if expression.unguarded_reads().is_empty() && let Err(error) = outcome {
                prop_assert!(!error.to_string().contains("there is no entry"), "{}: {}", text, error);
            }
        }
    }

    #[test]
    fn a_cost_is_never_above_its_bound(number in of_type(3).1, request in request()) {
        let Ok(cost) = Expression::cost(&number) else { return Ok(()) };
        if let (Some(most), Ok(units)) = (cost.max_units(), request.input(|input| cost.units(input))) {
            prop_assert!(units <= most, "{}: {} > {}", number, units, most);
        }
    }
}
