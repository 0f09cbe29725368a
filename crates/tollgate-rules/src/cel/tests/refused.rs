use super::Expression;
use crate::cel::error::TextPosition;

/// Formats an error as `line:column: message`, as for a file.
fn message_of(result: Result<Expression, super::super::ExpressionError>) -> String {
    match result {
        Ok(_) => "accepted".to_owned(),
        Err(error) => match error.position() {
            Some(TextPosition { line, column }) => format!("{line}:{column}: {error}"),
            None => error.to_string(),
        },
    }
}

fn assert_refused(table: &[(&str, &str)]) {
    for (text, expected) in table {
        assert_eq!(message_of(Expression::condition(text)), *expected, "{text}");
    }
}

#[test]
fn unknown_names() {
    assert_refused(&[
        ("reqest.path == 'a'", "1:1: there is no variable `reqest`: did you mean `request`?"),
        ("path == 'a'", "1:1: there is no variable `path`: did you mean `request.path`?"),
        ("colour == 'a'", "1:1: there is no variable `colour`: there are request, descriptors, jwt"),
        (
            "request == 'a'",
            "1:1: `request` is not a value by itself: use one of its fields: method, path, query, host, headers, ip, route, domain",
        ),
        ("request.pth == 'a'", "1:8: `request` has no field `pth`: did you mean `path`?"),
        (
            "request.colour == 'a'",
            "1:8: `request` has no field `colour`: it has method, path, query, host, headers, ip, route, domain",
        ),
        ("request.path.length == 1", "1:13: a string has no field `length`: only maps have fields"),
        ("has(request.path)", "1:4: `request.path` is always there: leave out `has`"),
        ("request.path.startWith('/')", "1:23: there is no function `startWith`: did you mean `startsWith`?"),
        (
            "now() > 1",
            "1:4: there is no function `now`: there are size, contains, startsWith, endsWith, matches, inCidr, int, uint, double, string, bytes, bool, dyn, min, max, has, all, exists, exists_one, existsOne, map, filter",
        ),
        ("jwt.roles.all(role, rol == 'a')", "1:21: there is no variable `rol`: did you mean `role`?"),
        ("Point{x: 1} == 1", "1:6: there is no type `Point` to make a value of: use lists and maps"),
    ]);
}

#[test]
fn types_that_do_not_match() {
    assert_refused(&[
        (
            "request.path + 1 == 'a'",
            "1:14: `+` does not take a string and an int: convert one side with `string(…)` or `int(…)`",
        ),
        ("request.method && true", "1:16: `&&` does not take a string: compare it with something first"),
        ("!request.method", "1:1: `!` does not take a string: compare it with something first"),
        ("-request.method == 1", "1:1: `-` does not take a string: give it a number"),
        ("-1u == 1", "1:1: `-` does not take a uint: convert it with `int(…)`"),
        (
            "request.headers['x'] == 5",
            "1:22: `==` compares a string with an int: convert the string with `int(…)`, or put the number in quotes",
        ),
        (
            "request.headers['x'] > 5.0",
            "1:22: `>` compares a string with a double: convert the string with `double(…)`, or put the number in quotes",
        ),
        ("size(request.path) > 5.0", "1:20: `>` compares an int with a double: convert one side with `double(…)`"),
        ("size(request.path) == 5u", "1:20: `==` compares an int with a uint: convert one side with `int(…)`"),
        (
            "request.headers['x'] == true",
            "1:22: `==` compares a string with a bool: convert the string with `bool(…)`, or put the bool in quotes",
        ),
        ("request.path == null", "1:14: `==` compares a string with null: only a claim of `jwt` can be null"),
        ("request.path == ['a']", "1:14: `==` compares a string with a list: compare values of one type"),
        ("request.headers == {'a': 'b'}", "1:17: `==` does not take a map: compare the values in it"),
        ("[1] < [2]", "1:5: `<` does not take a list: compare numbers or strings"),
        ("'a' in request.path", "1:5: `in` does not look into a string: write `text.contains(part)`"),
        ("'a' in 1", "1:5: `in` does not look into an int: give it a list or a map"),
        ("1 in ['a']", "1:3: `in` looks for an int in a list of string: give both one type"),
        ("1 in request.headers", "1:3: `in` looks for an int in a map of string: give both one type"),
        ("request.headers in [request.query]", "1:17: `in` does not compare maps: look for one of their values"),
        ("['a']['b'] == 'a'", "1:6: a list is indexed by an int, not by a string: write `list[0]`"),
        ("request.headers[1] == 'a'", "1:16: this map is indexed by a string, not by an int: convert it"),
        ("request.path[0] == 'a'", "1:13: a string has nothing to index by an int: give a list or a map"),
        ("1.5 % 2.0 == 1.0", "1:5: `%` does not take a double and a double: convert one side with `int(…)`"),
        ("true ? 1 : 'a'", "1:6: `?` gives an int or a string: give both sides of `:` one type"),
        ("1 ? true : false", "1:1: the value before `?` is an int, not a bool: compare it with something"),
        ("{1.5: 'a'}.size() == 1", "1:5: a map has no key that is a double: use a string"),
        ("request.path", "a condition gives a bool, but this gives a string: compare it with something"),
        ("size(request.path)", "a condition gives a bool, but this gives an int: compare it with something"),
    ]);
}

#[test]
fn functions_with_wrong_arguments() {
    assert_refused(&[
        ("size(1) == 1", "1:5: `size` does not take an int: give it a string, bytes, a list or a map"),
        ("int(true) == 1", "1:4: `int` does not take a bool: give it a number or a string"),
        ("contains(request.path, 'a')", "1:9: `contains` is not called like this: write `text.contains(part)`"),
        ("request.path.contains()", "1:22: `contains` is not called like this: write `text.contains(part)`"),
        ("request.path.contains(1)", "1:22: `contains` does not take an int: give it a string"),
        ("request.path.int() == 1", "1:17: `int` is not called like this: write `int(x)`"),
        ("max(1, 2u) == 1", "1:4: `max` takes numbers of one type, not an int and a uint: convert one of them"),
        ("jwt.roles.all(1)", "1:14: `all` is not called like this: write `list.all(x, condition)`"),
        (
            "has(request)",
            "1:5: `has` takes a field: write `has(request.headers.name)` or `\"a-name\" in request.headers`",
        ),
        (
            "has(request.headers.x-beta)",
            "1:22: `has` takes a field: write `has(request.headers.name)` or `\"a-name\" in request.headers`",
        ),
    ]);
}

#[test]
fn patterns_and_ranges() {
    let long = format!("request.path.matches('{}')", r"(\w{90}){90}".replace('\\', "\\\\"));
    assert_refused(&[
        (
            "request.path.matches('(')",
            "1:22: the pattern `(` cannot be read: unclosed group: write a regular expression",
        ),
        (&long, r"1:22: the pattern `(\w{90}){90}` is too large: repeat less in it"),
        (
            "request.path.matches(request.query.q)",
            "1:35: the pattern of `matches` is compiled with the file: write it here, in quotes",
        ),
        (
            "request.ip.inCidr('10.0.0.0/33')",
            "1:19: `10.0.0.0/33` is not a range of addresses: write one such as `10.0.0.0/8` or `2001:db8::/32`",
        ),
        (
            "request.ip.inCidr('10.1.2.3/8')",
            "1:19: the range `10.1.2.3/8` begins at 10.0.0.0: write `10.0.0.0/8`, or `10.1.2.3` for that address alone",
        ),
        (
            "request.ip.inCidr(request.query.net)",
            "1:32: the range of `inCidr` is compiled with the file: write it here, in quotes",
        ),
    ]);
}

#[test]
fn loops() {
    assert_refused(&[
        ("request.path.all(x, true)", "1:17: a loop cannot go through a string: give it a list or a map"),
        (
            "[1].all(x, x)",
            "1:12: the value in the condition of the loop is an int, not a bool: compare it with something",
        ),
        (
            "[1].filter(x, x) == [1]",
            "1:15: the value in the condition of the loop is an int, not a bool: compare it with something",
        ),
        (
            "[1].exists_one(x, 'a')",
            "1:19: the value in the condition of the loop is a string, not a bool: compare it with something",
        ),
        ("[1].all(request, true)", "1:8: `request` has a meaning already: give the variable of the loop another name"),
        ("[1].all(x, [1].all(y, [1].all(z, true)))", "1:30: more than 2 loops are nested: split the expression"),
        ("[1].map(x, x).map(x, x + x) == [2]", "accepted"),
        (
            "[1].map(x, [x, x]).map(x, [x, x]) == []",
            "1:23: there is more than 1 `map`: use `all`, `exists` or `filter`",
        ),
    ]);
}

#[test]
fn texts_that_are_not_expressions() {
    assert_refused(&[
        ("", "the expression is empty: write one, or remove it"),
        (" \n", "the expression is empty: write one, or remove it"),
        ("request.path ==", "1:16: the expression ends too early: close its brackets and complete it"),
        ("(1", "1:3: the expression ends too early: close its brackets and complete it"),
        ("\"abc", "1:1: `\"abc` cannot be read: close quotes, and escape special characters in them"),
        ("a b", "1:3: `b` is not expected here: check the operator or bracket before it"),
        ("'é' b", "1:5: `b` is not expected here: check the operator or bracket before it"),
        (
            "'é' == 1",
            "1:5: `==` compares a string with an int: convert the string with `int(…)`, or put the number in quotes",
        ),
        ("true\n && foo", "2:5: there is no variable `foo`: there are request, descriptors, jwt"),
        ("request.path = 'a'", "1:14: `=` is not an operator: write `==`"),
        ("true and false", "1:6: `and` is not an operator: write `&&`"),
        ("true | false", "1:6: `|` is not an operator: write `||`"),
        ("for", "1:1: reserved identifier: for: write it another way"),
        ("99999999999999999999 == 1", "1:1: invalid int literal: write it another way"),
        ("jwt.?sub == 1", "1:4: unsupported syntax '.?': write it another way"),
    ]);
}

#[test]
fn costs_that_are_not_numbers() {
    for (text, expected) in [
        ("true", "a cost gives an int, but this gives a bool: give a number"),
        ("1.5", "a cost gives an int, but this gives a double: convert it with `int(…)`"),
        ("request.headers.cost", "a cost gives an int, but this gives a string: convert it with `int(…)`"),
    ] {
        assert_eq!(message_of(Expression::cost(text)), expected, "{text}");
    }
}
