//! Malicious files and requests.

use std::fmt::Write as _;
use std::thread;

use http::{HeaderName, HeaderValue};

use super::{Expression, Request};
use crate::cel::tree;
use crate::cel::tree::{MAX_DEPTH, MAX_TEXT_BYTES, PARSER_STACK_BYTES};

/// Texts that, repeated, produce a deep tree, or one that the parser invents.
const DEEP: [&str; 17] = [
    "(",
    "[",
    "{1:",
    "f(",
    "a[",
    "!",
    "-",
    "1+",
    "1==",
    "a.",
    ".f()",
    "[0]",
    "a?b:",
    "true||",
    "[1].all(x,",
    "'\\q1+",
    "a ",
];

#[test]
fn long_texts_are_refused() {
    for text in ["(".repeat(100_000), "!".repeat(10_000)] {
        let error = Expression::condition(&text).unwrap_err().to_string();
        let expected = format!("the expression has {} bytes, more than 4096: split it over several limits", text.len());
        assert_eq!(error, expected);
    }
}

#[test]
fn the_deepest_texts_are_refused_with_stack_to_spare() {
    for repeated in DEEP {
        for text in [repeated.repeat(MAX_TEXT_BYTES / repeated.len()), {
            let whole = repeated.repeat(MAX_TEXT_BYTES / repeated.len() - 1);
            format!("a{whole}1")
        }] {
            let read = thread::Builder::new()
                .stack_size(PARSER_STACK_BYTES / 4)
                .spawn(move || tree::read(&text).map(|_| ()).map_err(|error| error.to_string()));
            let outcome = read.unwrap().join().unwrap();
            // `||` in a row is a balanced tree, and `!` in a row is removed.
            assert!(outcome.is_err() || ["true||", "!", "-"].contains(&repeated), "{repeated}");
        }
    }
}

#[test]
fn brackets_that_are_too_deep_are_refused() {
    for text in [format!("{}1{}", "(".repeat(1000), ")".repeat(1000)), format!("1{} == 1", "+1".repeat(1000))] {
        let error = Expression::condition(&text).unwrap_err().to_string();
        assert_eq!(error, "the expression nests too deeply: split it over several limits");
    }
}

#[test]
fn the_deepest_tree_is_evaluated_on_a_small_stack() {
    // Besides the sum: `>`, and the number at the bottom.
    let sum = format!("0 < 1{}", "+1".repeat(MAX_DEPTH - 2));
    let condition = Expression::condition(&sum).unwrap();
    assert!(Expression::condition(&format!("{sum}+1")).is_err());
    let nested = format!("size({}0{}) == 1", "[".repeat(20), "]".repeat(20));
    let lists = Expression::condition(&nested).unwrap();
    let evaluate = move || {
        Request::typical().input(|input| [condition, lists].map(|one| one.holds(input).unwrap()) == [true, true])
    };
    // Three quarters of the default stack of a thread.
    let judged = thread::Builder::new().stack_size(1536 << 10).spawn(evaluate);
    assert!(judged.unwrap().join().unwrap());
}

#[test]
fn a_long_list_of_alternatives_is_not_deep() {
    let mut text = "false".to_owned();
    while text.len() < MAX_TEXT_BYTES - 40 {
        write!(text, " || request.path == \"/{}\"", text.len()).unwrap();
    }
    assert!(!Request::typical().is_true(&text));
}

#[test]
fn a_loop_over_more_names_than_its_condition_has_steps_for_is_an_error() {
    let mut request = Request::typical();
    for number in 0..195 {
        let name = HeaderName::try_from(format!("h{number}")).unwrap();
        request.headers.insert(name, HeaderValue::from_static("1"));
    }
    let long = vec!["n != 'x'"; 14].join(" && ");
    let error = Err("a loop has more than 169 entries to go through".to_owned());
    assert_eq!(request.holds(&format!("request.headers.all(n, {long})")), error);
    let units = request.units(&format!("size(request.headers.filter(n, {long}))"));
    assert!(units.unwrap_err().starts_with("a loop has more than 16"));
    assert!(request.is_true("request.headers.all(n, n != 'x')"));
    assert!(request.is_true("size(request.headers) == 200 && request.headers.h194 == '1'"));
}

/// A list in a token is as long as its issuer likes.
#[test]
fn a_loop_over_a_list_of_a_token_goes_through_as_many_entries_as_it_has_steps_for() {
    let mut request = Request::typical();
    let mut hold = |count: usize, text: &str| {
        let claims = serde_json::json!({ "groups": vec!["g"; count], "more": vec!["g"; count] });
        request.claims = claims.as_object().cloned();
        request.holds(text)
    };
    let error = |most: usize| Err(format!("a loop has more than {most} entries to go through"));
    assert_eq!(hold(150, "jwt.groups.exists(g, g == 'banned')"), Ok(false));
    let long = format!("jwt.groups.all(g, {})", vec!["g != 'x'"; 18].join(" && "));
    for (text, most) in [
        ("jwt.groups.all(g, true)", 1999),
        ("!jwt.groups.exists(g, g == 'x')", 1249),
        ("jwt.groups.filter(g, true).all(g, true)", 768),
        ("size(jwt.groups.map(g, g + '!')) > 0", 1427),
        ("jwt.groups.all(g, true) && jwt.more.all(g, true)", 998),
        ("['x', 'y', 'z'].all(x, jwt.groups.all(g, g != x))", 474),
        (&*long, 133),
    ] {
        assert_eq!((hold(most, text), hold(most + 1, text)), (Ok(true), error(most)), "{text}");
    }
    assert_eq!(hold(1_000, "(jwt.groups + jwt.more).all(g, true)"), error(1998));
    assert_eq!(hold(5_000, "'g' in jwt.groups"), Ok(true), "only loops are bounded");
}

/// Nested loops over what a client sends would take milliseconds of processor time for each request.
#[test]
fn expressions_that_may_take_too_many_steps_are_refused() {
    let long_list = format!("[{}]", vec!["'a'"; 400].join(","));
    let long_condition = vec!["n == 'a'"; 40].join(" || ");
    for text in [
        "request.headers.exists(a, request.headers.exists(b, request.headers[a] == request.headers[b] && a != b))",
        "request.query.all(a, request.headers.all(b, a != b))",
        "jwt.roles.exists(a, jwt.roles.exists(b, a != b))",
        "descriptors.filter(a, descriptors.exists(b, a != b)) == []",
        "request.headers.exists(a, request.headers.filter(b, a != b).exists(c, c == a))",
        &format!("{long_list}.exists(a, request.headers.exists(b, a == b))"),
        &format!("request.headers.exists(n, {long_condition})"),
    ] {
        let error = Expression::condition(text).map(drop).unwrap_err().to_string();
        assert!(
            error.starts_with("the expression may take ") && error.contains(", more than 10000: "),
            "{text}: {error}"
        );
    }
    for text in [
        "request.headers.exists(n, n.startsWith('x-') && request.headers[n] == 'a' && size(n) < 10)",
        "request.headers.exists(n, n == 'a') || request.query.exists(n, n == 'a') || jwt.roles.exists(n, n == 'a')",
        "['a', 'b', 'c'].exists(a, request.headers.exists(b, b.startsWith(a)))",
        "request.headers.exists(a, ['a', 'b', 'c'].exists(b, a.startsWith(b)))",
        &format!("{long_list}.exists(a, a == request.path)"),
    ] {
        assert_eq!(Expression::condition(text).map(drop), Ok(()), "{text}");
    }
}
