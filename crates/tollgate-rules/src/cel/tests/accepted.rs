use super::Request;

#[test]
fn conditions_that_hold() {
    let request = Request::typical();
    for text in [
        "true",
        r#"request.method == "POST""#,
        r#"request.path == "/api/search""#,
        r#"request.host == "api.example.com""#,
        r#"request.ip == "10.1.2.3""#,
        r#"request.route == "search" && request.domain == "edge""#,
        r#"request.query.q == "a b" && request.query["page"] == "2""#,
        r#"request.headers["x-beta"] == "1""#,
        r#"request.headers["X-Beta"] == "1""#,
        r#"request.headers.accept == "text/html""#,
        r#"request.headers["x-latin"].startsWith("caf")"#,
        r#""x-beta" in request.headers && !("x-none" in request.headers)"#,
        "has(request.headers.accept) && !has(request.headers.none)",
        r#"descriptors.tier == "free" && descriptors["tenant"] == "acme""#,
        "has(descriptors.tier) && !has(descriptors.colour)",
        r#"jwt.plan in ["gold", "silver"]"#,
        "jwt.level >= 3 && jwt.level + 1 == 4",
        "jwt.big > 5 && jwt.ratio < 1.0",
        "jwt.admin",
        "jwt.none == null",
        r#""dev" in jwt.roles && jwt.roles.size() == 2"#,
        r#"jwt.realm.access.roles[0] == "root" && has(jwt.realm.access) && !has(jwt.realm.none)"#,
        r#""access" in jwt.realm"#,
        r#"request.path.startsWith("/api/") && request.path.endsWith("search") && request.path.contains("i/s")"#,
        r#"request.path.matches("^/api/[a-z]+$") && matches(request.path, "sea")"#,
        r#"request.ip.inCidr("10.0.0.0/8") && inCidr(request.ip, "10.1.2.3") && !request.ip.inCidr("::/0")"#,
        "size(request.path) == 11 && size(request.query) == 2 && request.headers.size() == 5",
        r#"int(request.headers["x-cost"]) > 5 && double(request.query.page) == 2.0"#,
        r#"request.headers.exists(name, name.startsWith("x-"))"#,
        r#"request.query.all(name, request.query[name] != "")"#,
        r#"jwt.roles.exists_one(role, role == "ops") && jwt.roles.existsOne(role, role == "ops")"#,
        r#"jwt.roles.filter(role, role.startsWith("d")) == ["dev"]"#,
        r#"jwt.roles.map(role, role + "!")[1] == "ops!""#,
        r#"["a", "b"].map(x, x == "a", x + x) == ["aa"]"#,
        r#"["a"].exists(x, ["b"].exists(y, x != y))"#,
        r#"{"gold": 5, "free": 1}[descriptors.tier] == 1"#,
        r#"request.method == "GET" ? false : true"#,
        "min(1, 2) == 1 && max(1u, 2u) == 2u && max(0.5, 0.25) == 0.5",
        r#"string(1) == "1" && bytes("a") == b"a" && bool("true") && uint(3) == 3u && -1 < 0 && 7 % 4 == 3"#,
        r#"dyn(1) == "1" || true"#,
    ] {
        assert!(request.is_true(text), "{text}");
    }
}

#[test]
fn conditions_that_fail_are_errors() {
    let mut request = Request::typical();
    request.target += "&digits=99999999999999999999&nan=NaN&inf=inf&word=ten";
    for (text, expected) in [
        (r#"request.headers["x-none"] == """#, "there is no entry `x-none`"),
        (r#"request.query["dry_run"] != "1""#, "there is no entry `dry_run`"),
        (r#"!(request.headers["x-none"] == "1")"#, "there is no entry `x-none`"),
        ("jwt.missing == 1", "there is no entry `missing`"),
        ("has(jwt.missing.deeper)", "there is no entry `missing`"),
        ("1 / (size(request.path) - 11) == 1", "division by zero"),
        ("1 % (size(request.path) - 11) == 1", "division by zero"),
        ("9223372036854775807 + size(request.path) > 0", "a number is too large or too small"),
        ("-9223372036854775807 - size(request.path) < 0", "a number is too large or too small"),
        ("[1, 2][size(request.path)] == 1", "an index is outside its list"),
        ("jwt.level", "the result is of type int, not a bool"),
        ("jwt.none", "the result is of type null, not a bool"),
    ] {
        assert_eq!(request.holds(text), Err(expected.to_owned()), "{text}");
    }
    for text in [
        "int(request.query.digits) > 100",
        "int(request.query.word) > 100",
        "int(double(request.query.nan)) > 100",
        "int(double(request.query.inf)) > 100",
        "double(request.query.nan) > 100.0",
        "double(request.query.nan) <= 100.0",
        "uint(-1) == 0u",
        "bool(request.query.word)",
        r#"jwt.level.startsWith("3")"#,
        "jwt.sub > 1",
        "jwt.sub && true",
        r#"request.path.inCidr("10.0.0.0/8")"#,
    ] {
        assert!(request.holds(text).is_err(), "{text}: {:?}", request.holds(text));
    }
}

#[test]
fn an_error_repeats_little_of_what_a_client_sent() {
    let mut request = Request::typical();
    request.target = format!("/?n=%1B%5B2J{}", "9".repeat(5000));
    let error = request.holds("int(request.query.n) > 1").unwrap_err();
    assert!(error.len() < 400 && !error.contains(char::is_control), "{error}");
}

#[test]
fn an_error_does_not_hide_the_deciding_side() {
    let request = Request::typical();
    assert!(request.is_true(r#"request.headers["x-none"] == "1" || request.method == "POST""#));
    assert!(request.is_true(r#"!(request.headers["x-none"] == "1" && request.method == "GET")"#));
}

#[test]
fn costs_are_whole_numbers_from_zero() {
    let request = Request::typical();
    for (text, expected) in [
        ("5", Ok(5)),
        ("0", Ok(0)),
        ("3u", Ok(3)),
        ("18446744073709551615u", Ok(u64::MAX)),
        ("jwt.big", Ok(u64::MAX)),
        (r#"request.method == "POST" ? 10 : 1"#, Ok(10)),
        (r#"int(request.headers["x-cost"]) * 2"#, Ok(14)),
        (r#"min(int(request.headers["x-cost"]), 5)"#, Ok(5)),
        ("max(jwt.level, 1)", Ok(3)),
        ("size(request.query)", Ok(2)),
        (r#"int(request.headers["x-minus"])"#, Err("the cost -7 is below 0")),
        (r#"int(request.headers["x-none"])"#, Err("there is no entry `x-none`")),
        ("jwt.plan", Err("the result is of type string, not an int")),
        ("jwt.ratio", Err("the result is of type double, not an int")),
        ("9223372036854775807 * 2", Err("a number is too large or too small")),
    ] {
        assert_eq!(request.units(text), expected.map_err(str::to_owned), "{text}");
    }
}

#[test]
fn missing_facts_are_empty() {
    let mut request = Request::typical();
    request.target = "/".to_owned();
    request.headers.clear();
    (request.claims, request.client) = (None, None);
    assert!(request.is_true(r#"request.ip == "" && size(request.query) == 0 && size(jwt) == 0"#));
    assert!(request.is_true("!has(jwt.sub) && request.headers.all(name, false)"));
    // An unknown address is neither inside nor outside a range: the expression fails.
    assert!(request.holds(r#"request.ip.inCidr("0.0.0.0/0")"#).is_err());
    assert!(request.holds(r#"!request.ip.inCidr("10.0.0.0/8")"#).is_err());
}

#[test]
fn an_ipv4_client_of_an_ipv6_socket_is_an_ipv4_client() {
    let mut request = Request::typical();
    request.client = "::ffff:10.1.2.3".parse().ok();
    assert!(request.is_true(r#"request.ip == "10.1.2.3" && request.ip.inCidr("10.0.0.0/8")"#));
}
