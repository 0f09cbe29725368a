//! Unguarded reads, and the maximum of costs.

use super::Expression;

fn unguarded(text: &str) -> Vec<(usize, String, String)> {
    let expression = Expression::condition(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    let reads = expression.unguarded_reads().iter();
    reads.map(|read| (read.position.unwrap().column, read.text.clone(), read.guard.clone())).collect()
}

#[test]
fn reads_without_a_guard_are_found() {
    for (text, expected) in [
        (
            r#"request.query["dry_run"] != "1""#,
            &[(1, r#"request.query["dry_run"]"#, r#""dry_run" in request.query"#)][..],
        ),
        ("true && jwt.plan == 'gold'", &[(9, "jwt.plan", r#""plan" in jwt"#)]),
        ("descriptors.tier == 'free'", &[(1, "descriptors.tier", r#""tier" in descriptors"#)]),
        ("jwt.realm.access == 1", &[(1, "jwt.realm", r#""realm" in jwt"#)]),
        ("has(jwt.realm) && jwt.realm.access == 1", &[(19, "jwt.realm.access", r#""access" in jwt.realm"#)]),
        ("has(jwt.realm.access)", &[(5, "jwt.realm", r#""realm" in jwt"#)]),
        // Each entry is reported once.
        ("jwt.a == 1 || jwt.a == 2", &[(1, "jwt.a", r#""a" in jwt"#)]),
        // The guard is for another entry, on the wrong side, or does not hold where the read is.
        (r#""a" in request.query && request.query.b == "1""#, &[(25, "request.query.b", r#""b" in request.query"#)]),
        (r#""a" in request.query || request.query.a == "1""#, &[(25, "request.query.a", r#""a" in request.query"#)]),
        (r#"!("a" in request.query) && request.query.a == "1""#, &[(28, "request.query.a", r#""a" in request.query"#)]),
        ("has(jwt.a) ? true : jwt.a == 1", &[(21, "jwt.a", r#""a" in jwt"#)]),
        ("(has(jwt.a) || has(jwt.b)) && jwt.a == 1", &[(31, "jwt.a", r#""a" in jwt"#)]),
        (r#"request.query.exists(n, request.headers[n] == "")"#, &[(25, "request.headers[n]", "n in request.headers")]),
    ] {
        let expected: Vec<(usize, String, String)> =
            expected.iter().map(|(at, text, guard)| (*at, (*text).to_owned(), (*guard).to_owned())).collect();
        assert_eq!(unguarded(text), expected, "{text}");
    }
}

#[test]
fn reads_with_a_guard_are_not() {
    for text in [
        r#""dry_run" in request.query && request.query["dry_run"] != "1""#,
        r#"request.query["dry_run"] != "1" && "dry_run" in request.query"#,
        r#"!("dry_run" in request.query) || request.query["dry_run"] != "1""#,
        r#""X-Beta" in request.headers && request.headers["x-beta"] == "1""#,
        "has(request.headers.accept) && request.headers['Accept'] == '*/*'",
        "has(jwt.plan) ? jwt.plan == 'gold' : false",
        "!has(jwt.plan) ? false : jwt.plan == 'gold'",
        "has(jwt.a) && (jwt.a == 1 || jwt.a == 2)",
        "!(has(jwt.a) && jwt.a == 1)",
        "!(!has(jwt.a) || !has(jwt.b)) && jwt.a == jwt.b",
        "((has(jwt.a) && has(jwt.b)) || (has(jwt.a) && has(jwt.c))) && jwt.a == 1",
        "has(jwt.realm) && has(jwt.realm.access) && jwt.realm.access.size() > 0",
        r#"request.query.all(name, request.query[name] != "")"#,
        r#"request.headers.exists(n, n in request.query && request.query[n] == request.headers[n])"#,
        "size(request.query) > 3",
        r#"request.path == "/" && request.ip.inCidr("10.0.0.0/8")"#,
    ] {
        assert_eq!(unguarded(text), [], "{text}");
    }
}

#[test]
fn the_maximum_of_a_cost_follows_from_its_text() {
    for (text, most) in [
        ("5", Some(5)),
        ("0", Some(1)),
        (r#"request.method == "POST" ? 10 : 1"#, Some(10)),
        (r#"min(int(request.query.n), 50)"#, Some(50)),
        (r#"max(1, min(int(request.query.n), 50))"#, Some(50)),
        (r#"2 + 3 * (request.method == "GET" ? 1 : -4) - -1"#, Some(6)),
        (r#"{"gold": 5, "free": 1}[descriptors.tier]"#, Some(5)),
        (r#"[1, 7, 3][size(request.path)]"#, Some(7)),
        ("18446744073709551615u", Some(u64::MAX)),
        // These depend on the request, whatever numbers they contain.
        ("int(request.query.n)", None),
        ("int(request.query.n) * 2", None),
        ("max(1, int(request.query.n))", None),
        ("size(request.path) / 10", None),
        (r#""n" in request.query ? int(request.query.n) : 1"#, None),
        ("jwt.level", None),
    ] {
        assert_eq!(Expression::cost(text).unwrap().max_units(), most, "{text}");
    }
}
