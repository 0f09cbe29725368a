//! The store as a map, and stores by name: their settings and their problems.

use tollgate_config::internal::{LayoutName, StoreUrl};
use tollgate_config::{Parsed, Problems, RuleFile};

fn parse(store: &str) -> Result<Parsed, Problems> {
    RuleFile::parse("tollgate.yaml", format!("store: {store}\nlimits: []\n"))
}

fn problem(store: &str) -> String {
    parse(store).expect_err("a mistake").to_string()
}

#[test]
fn a_map_has_the_url_and_other_settings() {
    let file = parse(
        "{ url: 'rediss+sentinel://a,b/main', prefix: 'shop:eu', ca: ca.pem, client_cert: c.pem, client_key: k.pem, \
         username: ann, password_file: p, sentinel_username: bob, sentinel_password_file: s }",
    )
    .unwrap();
    let store = &file.store;
    assert!(matches!(&store.url, StoreUrl::Redis(url) if url == "rediss+sentinel://a,b/main"));
    assert_eq!(store.prefix.as_ref().map(|prefix| prefix.as_str()), Some("shop:eu"));
    let files = [&store.ca, &store.client_cert, &store.client_key, &store.password_file, &store.sentinel_password_file];
    assert_eq!(files.map(|file| file.as_deref()), ["ca.pem", "c.pem", "k.pem", "p", "s"].map(Some));
    assert_eq!((store.username.as_deref(), store.sentinel_username.as_deref()), (Some("ann"), Some("bob")));
    let compact = parse("{ url: 'redis://h', layout: compact, expected_keys: 5000000 }").unwrap();
    assert_eq!((compact.store.layout, compact.store.expected_keys), (LayoutName::Compact, Some(5_000_000)));
    assert!(!compact.store.has_counts_of(&parse("redis://h").unwrap().store));
    let other = parse("{ url: 'redis://h', layout: compact, expected_keys: 5000001 }").unwrap();
    assert!(!compact.store.has_counts_of(&other.store));
    assert_eq!(compact.with_store("redis://other").unwrap().store.layout, LayoutName::Compact);
    assert!(parse("{ url: memory }").unwrap().store.is_memory());
    assert!(parse("unix:///run/redis.sock?db=1").is_ok());
}

#[test]
fn contradictory_settings_are_reported_at_their_positions() {
    insta::assert_snapshot!(
        [
            "{ prefix: a }",
            "{ url: 'http://h' }",
            "{ url: 'redis://h', prefix: 'a{b}' }",
            "{ url: 'redis://h', prefx: a }",
            "{ url: memory, prefix: a }",
            "{ url: 'redis://h', ca: ca.pem }",
            "{ url: 'rediss://h', client_cert: c.pem }",
            "{ url: 'rediss://h', client_key: k.pem }",
            "{ url: 'redis://h', sentinel_username: bob, sentinel_password_file: s }",
            "{ url: 'redis+sentinel://h/m', sentinel_username: bob }",
            "{ url: 'redis://h', username: ann }",
            "{ url: 'redis://ann:hunter2@h', username: bob }",
            "{ url: 'redis://:hunter2@h', password_file: p }",
            "{ url: 'redis://h', password: hunter2 }",
            "{ url: memory, layout: compact }",
            "{ url: 'redis://h', layout: packed }",
            "{ url: 'redis://h', expected_keys: 1000 }",
            "{ url: 'redis://h', layout: plain, expected_keys: 1000 }",
            "{ url: 'redis://h', layout: compact, expected_keys: 0 }",
            "'unix://run/redis.sock'",
            "'unix:///run/redis.sock?db=one'",
        ]
        .map(|store| format!("{store}\n  {}", problem(store)))
        .join("\n")
    );
}

#[test]
fn another_url_keeps_the_settings_that_apply_to_it() {
    let text = "{ url: 'rediss+sentinel://a/m', prefix: shop, ca: ca.pem, username: ann, password_file: p, \
                sentinel_username: bob, sentinel_password_file: s }";
    let at = |url: &str| parse(text).unwrap().with_store(url).unwrap().into_rules().store;
    let same = at("rediss+sentinel://b/m");
    assert_eq!((same.ca.as_deref(), same.sentinel_username.as_deref()), (Some("ca.pem"), Some("bob")));
    let plain = at("redis://h");
    assert_eq!((plain.ca, plain.sentinel_username, plain.sentinel_password_file), (None, None, None));
    assert_eq!((plain.username.as_deref(), plain.password_file.as_deref()), (Some("ann"), Some("p")));
    let with_login = at("redis://:hunter2@h");
    assert_eq!((with_login.username, with_login.password_file), (None, None));
    assert_eq!(with_login.prefix.as_ref().map(|prefix| prefix.as_str()), Some("shop"));
    assert_eq!(at("memory"), parse("memory").unwrap().into_rules().store);
}

#[cfg(feature = "redis")]
#[test]
fn files_of_the_store_are_relative_to_the_rule_file() {
    let folder = tempfile::tempdir().unwrap();
    let settings = |store: &str| parse(store).unwrap().in_folder(folder.path()).redis_settings();
    let message = |store: &str| {
        let problems = settings(store).expect_err("a mistake").to_string();
        problems.replace(&folder.path().display().to_string(), "FOLDER")
    };
    std::fs::write(folder.path().join("p"), "hunter2\n").unwrap();
    std::fs::write(folder.path().join("empty"), "\n").unwrap();
    let store = "{ url: 'redis://h', username: ann, password_file: p, prefix: shop }";
    let shown = format!("{:?} {:?}", settings(store).unwrap().expect("on Redis"), parse(store).unwrap());
    assert!(!shown.contains("hunter2"), "{shown}");
    assert!(settings("memory").unwrap().is_none());
    insta::assert_snapshot!(
        [
            "{ url: 'rediss://h', ca: none.pem }",
            "{ url: 'rediss://h', ca: p }",
            "{ url: 'rediss://h', client_cert: none.pem, client_key: none-key.pem }",
            "{ url: 'rediss://h', client_cert: p, client_key: p }",
            "{ url: 'redis://h', password_file: none }",
            "{ url: 'redis://h', password_file: empty }",
        ]
        .map(|store| format!("{store}\n  {}", message(store)))
        .join("\n")
    );
}

/// A file with a default store on Redis, those stores, and one limit with that addition.
fn parse_named(stores: &str, addition: &str) -> Result<Parsed, Problems> {
    let limit = format!("{{ name: per-user, limit: 10, window: 1m{addition} }}");
    RuleFile::parse("tollgate.yaml", format!("store: redis://h\nstores: {stores}\nlimits:\n  - {limit}\n"))
}

#[test]
fn limits_choose_a_store_by_its_name() {
    let file = parse_named("{ sessions: { url: 'rediss://s', prefix: shop }, audit: redis://a }", ", store: sessions");
    let file = file.unwrap();
    assert_eq!(file.stores.keys().collect::<Vec<_>>(), ["audit", "sessions"]);
    assert_eq!(file.stores["sessions"].prefix.as_ref().map(|prefix| prefix.as_str()), Some("shop"));
    assert_eq!(file.limits[0].limit().unwrap().store(), Some("sessions"));
    let warnings = file.warnings().to_string();
    let warning =
        "tollgate.yaml:2:58: warning: no limit is on store `audit`: write `store: audit` in a limit, or remove it";
    assert_eq!(warnings, warning);
    let file = parse_named("{ sessions: redis://s }", ", store: default").unwrap();
    assert_eq!(file.limits[0].limit().unwrap().store(), Some("default"));
}

#[test]
fn stores_that_cannot_be_chosen_are_refused_where_they_stand() {
    let cases = [
        ("{ sessions: redis://s }", ", store: sesions"),
        ("{ sessions: redis://s }", ", store: audit"),
        ("{ sessions: redis://s }", ", store: memory"),
        ("{ sessions: redis://s }", ", store: 'redis://:hunter2@h'"),
        ("{ sessions: redis://s }", ", store: 'my store'"),
        ("{ sessions: redis://s }", ", store: [sessions]"),
        ("{}", ", store: sessions"),
        ("{ memory: redis://s }", ""),
        ("{ default: redis://s }", ""),
        ("{ 'my store': redis://s }", ""),
        ("{ sessions: memory }", ", store: sessions"),
        ("{ sessions: http://s }", ", store: sessions"),
        ("{ sessions: { prefix: a } }", ", store: sessions"),
        ("{ sessions: { url: 'redis://s', ca: ca.pem } }", ", store: sessions"),
        ("{ sessions: redis://s, sessions: redis://t }", ", store: sessions"),
        ("[redis://s]", ", store: sessions"),
    ];
    let problems = cases.map(|(stores, addition)| {
        let problems = parse_named(stores, addition).expect_err(stores).to_string();
        format!("stores: {stores}{addition}\n  {}", problems.replace('\n', "\n  "))
    });
    insta::assert_snapshot!(problems.join("\n"));
}

#[test]
fn more_stores_than_a_limiter_takes_are_refused() {
    let stores = |count: usize| (0..count).map(|nth| format!("s{nth}: redis://s{nth}")).collect::<Vec<_>>().join(", ");
    assert!(parse_named(&format!("{{ {} }}", stores(15)), "").is_ok());
    let problem = parse_named(&format!("{{ {} }}", stores(16)), "").unwrap_err().to_string();
    assert_eq!(problem, "tollgate.yaml:2:9: `stores` has 16 entries, more than 15: use 15 or fewer");
}

#[test]
fn stores_beside_a_store_in_memory_are_refused() {
    let text = "stores: { sessions: redis://s }\nlimits: [{ name: a, limit: 1, window: 1m, store: sessions }]\n";
    let problem = RuleFile::parse("tollgate.yaml", format!("store: memory\n{text}")).unwrap_err().to_string();
    let expected = "`stores` are on Redis and `store` is memory, and a file cannot mix both: write the URL of a Redis in \
                    `store`, or remove `stores`";
    assert_eq!(problem, format!("tollgate.yaml:2:1: {expected}"));
    // The default store may be given on the command line.
    let file = RuleFile::parse("tollgate.yaml", text).unwrap();
    let everything_in_memory = file.clone().with_store("memory").unwrap();
    assert!(everything_in_memory.stores.is_empty() && everything_in_memory.limits[0].store.is_none());
    let on_redis = file.clone().with_store("redis://h").unwrap();
    assert_eq!(on_redis.limits[0].limit().unwrap().store(), Some("sessions"));
    #[cfg(feature = "redis")]
    {
        assert_eq!(on_redis.named_redis_settings().unwrap().len(), 1);
        assert!(everything_in_memory.named_redis_settings().unwrap().is_empty());
        let problem = file.named_redis_settings().unwrap_err().to_string();
        assert_eq!(problem, format!("tollgate.yaml:1:9: {expected}"));
    }
}

#[cfg(feature = "redis")]
#[test]
fn files_of_stores_by_name_are_read_beside_the_rule_file() {
    let folder = tempfile::tempdir().unwrap();
    let stores = "{ sessions: { url: 'rediss://s', ca: none.pem }, audit: { url: 'redis://a', password_file: none } }";
    let file = parse_named(stores, ", store: sessions").unwrap().in_folder(folder.path());
    let problems = file.named_redis_settings().unwrap_err().to_string();
    insta::assert_snapshot!(problems.replace(&folder.path().display().to_string(), "FOLDER"));
    assert!(file.redis_settings().is_ok());
}

#[test]
fn logs_that_are_too_long_for_redis_are_refused_where_they_stand() {
    let file = |store: &str| {
        let text = format!(
            "store: {store}\nlimits:\n  - name: log\n    key: header:x-user\n    algorithm: sliding_window_log\n    \
             limit: 100000\n    overrides: [{{ key: ann, limit: 200000 }}]\n  \
             - {{ name: long, algorithm: sliding_window_log, limit: 200000 }}\n"
        );
        RuleFile::parse("tollgate.yaml", text)
    };
    assert!(file("memory").is_ok());
    insta::assert_snapshot!(file("redis://h").expect_err("they are too long").to_string());
}

#[cfg(feature = "redis")]
#[test]
fn redis_accepts_the_same_urls() {
    use tollgate::redis::RedisSettings;

    let good = [
        "redis://h",
        "redis://h:6379",
        "redis://h:6379/1/",
        "redis://h:/1",
        "redis://:pa%2Fss:w%23rd@h:6379/15?protocol=resp3",
        "rediss://ann:hunter2@[::1]:6379/0",
        "redis://[::1]",
        "redis+cluster://a:7001,b,[::1]:7002",
        "rediss+cluster://u:p@a:7001/0",
        "redis+sentinel://a,b:26380/mymaster",
        "redis+sentinel://u:p@a,b:26380/mymaster/2/",
        "unix:///run/redis@1.sock",
        "unix://ann:hunter2@/run/redis.sock?db=3",
    ];
    let bad = [
        "redis://h:99999",
        "redis://h/x",
        "redis+cluster://a/1",
        "redis+sentinel://a/m/x",
        "redis://h:6379?protocol=resp3",
        "unix://run/redis.sock",
        "unix:///",
        "unix:///run/redis.sock?db=x",
        "unix:///run/redis.sock?password=hunter2",
    ];
    for (url, is_good) in good.map(|url| (url, true)).into_iter().chain(bad.map(|url| (url, false))) {
        let file = RuleFile::parse("tollgate.yaml", format!("store: '{url}'\nlimits: []\n"));
        assert_eq!((RedisSettings::new(url).check().is_ok(), file.is_ok()), (is_good, is_good), "{url}");
    }
}
