//! The Redis protocol, with real clients.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use testkit::folder::folder_with;
use testkit::redis::RedisServer;
use testkit::tollgate::{Process, RULES, run_in, without_times};
use testkit::wait::wait_until;

const LIMITS: &str = "
limits:
  - { name: per-user, key: 'header:x-user-id', algorithm: token_bucket, capacity: 3, refill: 1/h }
  - { name: per-page, key: ['header:x-user-id', path], limit: 5, window: 10220d }
  - { name: global, limit: 100, window: 10220d }
  - { name: per-ip, key: ip, limit: 5, window: 10220d }
";

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

fn server(settings: &str) -> (Process, SocketAddr) {
    let folder = folder_with(&[(RULES, &format!("{settings}{LIMITS}")), ("tokens", TOKEN)]);
    let server = Process::start(folder, &["serve", "--config", RULES]);
    let address = server.address_of("decisions redis");
    (server, address)
}

fn plain() -> (Process, SocketAddr) {
    server("service: { resp: '127.0.0.1:0' }")
}

fn connect(address: SocketAddr, protocol: &str) -> redis::Connection {
    let client = redis::Client::open(format!("redis://{address}/?protocol={protocol}")).expect("the URL is valid");
    client.get_connection_with_timeout(Duration::from_secs(10)).expect("the server accepts connections")
}

fn throttle(connection: &mut redis::Connection, words: &[&str]) -> [i64; 5] {
    let reply: Vec<i64> = redis::cmd(words[0]).arg(&words[1..]).query(connection).expect("the command succeeds");
    reply.try_into().expect("five numbers")
}

/// Sends bytes and returns everything up to the end of the connection.
fn raw(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).expect("the server accepts connections");
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout can be set");
    stream.write_all(bytes).expect("sent");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).expect("the server ends the connection");
    reply
}

#[test]
fn commands_reply_as_redis_cell_and_throttlecrab_do() {
    let (_server, address) = plain();
    let mut connection = connect(address, "resp2");
    assert_eq!(throttle(&mut connection, &["CL.THROTTLE", "ann", "15", "30", "60"]), [0, 16, 15, -1, 2]);
    assert_eq!(throttle(&mut connection, &["cl.throttle", "bob", "0", "1", "3600", "1"]), [0, 1, 0, -1, 3600]);
    assert_eq!(throttle(&mut connection, &["CL.THROTTLE", "bob", "0", "1", "3600"]), [1, 1, 0, 3600, 3600]);
    assert_eq!(throttle(&mut connection, &["CL.THROTTLE", "bob", "0", "1", "3600", "2"]), [1, 1, 0, -1, 3600]);
    assert_eq!(throttle(&mut connection, &["THROTTLE", "eve", "2", "1", "3600"]), [1, 2, 1, 3600, 0]);
    assert_eq!(throttle(&mut connection, &["THROTTLE", "eve", "2", "1", "3600", "2"]), [0, 2, 1, 3600, 3600]);
}

/// The cases of throttlecrab's own tests of its Redis transport: `max_burst` is the limit.
#[test]
fn throttle_allows_as_many_as_throttlecrab() {
    let (_server, address) = plain();
    let mut connection = connect(address, "resp2");
    let mut first_three = |words: &[&str]| throttle(&mut connection, words)[..3].to_vec();
    assert_eq!(first_three(&["THROTTLE", "test_key", "10", "100", "60"]), [1, 10, 9]);
    assert_eq!(first_three(&["THROTTLE", "test_key2", "10", "100", "60", "5"]), [1, 10, 5]);
    assert_eq!(first_three(&["THROTTLE", "large_quantity_key", "10", "100", "60", "15"]), [0, 10, 10]);
    for remaining in [2, 1, 0] {
        assert_eq!(first_three(&["THROTTLE", "exhaustion_test", "3", "1", "60"]), [1, 3, remaining]);
    }
    assert_eq!(first_three(&["THROTTLE", "exhaustion_test", "3", "1", "60"]), [0, 3, 0]);
    assert_eq!(first_three(&["THROTTLE", "one", "1", "1", "60"]), [1, 1, 0]);
    assert_eq!(first_three(&["throttle", "one", "1", "1", "60"]), [0, 1, 0]);
    for key in ["user:email@example.com", "api:v2/users/{id}", "key with spaces", "UTF8:测试键"] {
        assert_eq!(first_three(&["THROTTLE", key, "5", "100", "60"]), [1, 5, 4], "{key}");
    }
}

#[test]
fn limits_of_the_rule_file_are_checked_by_name() {
    let (_server, address) = plain();
    let mut connection = connect(address, "resp3");
    let mut check = |words: &[&str]| -> redis::RedisResult<(i64, i64)> {
        let reply: std::collections::HashMap<String, redis::Value> =
            redis::cmd(words[0]).arg(&words[1..]).query(&mut connection)?;
        let number = |name: &str| redis::from_redis_value(reply[name].clone()).unwrap();
        Ok((number("allowed"), number("remaining")))
    };
    assert_eq!(check(&["TOLLGATE.CHECK", "per-user", "ann", "2"]).unwrap(), (1, 1));
    assert_eq!(check(&["TOLLGATE.CHECK", "per-user", "ann", "2"]).unwrap(), (0, 1));
    assert_eq!(check(&["TOLLGATE.PEEK", "per-user", "ann"]).unwrap(), (1, 1));
    assert_eq!(check(&["TOLLGATE.CHECK", "per-user", "ann"]).unwrap(), (1, 0));
    assert_eq!(check(&["TOLLGATE.CHECK", "per-page", "ann", "/a"]).unwrap(), (1, 4));
    assert_eq!(check(&["TOLLGATE.CHECK", "global"]).unwrap(), (1, 99));
    assert_eq!(check(&["TOLLGATE.REFUND", "per-user", "ann", "2"]).unwrap(), (1, 2));
    assert_eq!(check(&["TOLLGATE.REFUND", "per-page", "ann", "/a"]).unwrap(), (1, 5));
    assert_eq!(check(&["TOLLGATE.REFUND", "global", "7"]).unwrap(), (1, 100));
    assert_eq!(check(&["tollgate.reset", "per-user", "ann"]).unwrap(), (1, 3));
    assert_eq!(check(&["TOLLGATE.CHECK", "per-user", "ann", "3"]).unwrap(), (1, 0));
    let mut problem = |words: &[&str]| check(words).unwrap_err().to_string();
    insta::assert_snapshot!(
        [
            problem(&["TOLLGATE.CHECK", "nobody", "ann"]),
            problem(&["TOLLGATE.CHECK", "per-page", "ann"]),
            problem(&["TOLLGATE.CHECK", "per-user", "ann", "many"]),
            problem(&["TOLLGATE.CHECK"]),
            problem(&["TOLLGATE.REFUND", "per-user"]),
            problem(&["TOLLGATE.REFUND", "per-user", "ann", "-1"]),
            problem(&["TOLLGATE.RESET", "per-user", "ann", "1"]),
            problem(&["CL.THROTTLE", "ann"]),
            problem(&["CL.THROTTLE", "ann", "x", "1", "1"]),
            problem(&["CL.THROTTLE", "ann", "1", "0", "1"]),
            problem(&["CL.THROTTLE", "ann", "1", "1", "0"]),
            problem(&["CL.THROTTLE", "ann", "18446744073709551615", "1", "1"]),
            problem(&["CL.THROTTLE", "ann", "9007199254740993", "1", "1"]),
            problem(&["THROTTLE", "ann"]),
            problem(&["THROTTLE", "ann", "0", "1", "1"]),
            problem(&["THROTTLE", "ann", "9007199254740993", "1", "1"]),
            problem(&["THROTTLE", "ann", "1", "0", "1"]),
            problem(&["GET", "ann"]),
            problem(&["SELECT", "1"]),
            problem(&["AUTH", "secret"]),
        ]
        .join("\n")
    );
}

#[test]
fn a_pipeline_is_answered_in_order() {
    let (_server, address) = plain();
    let throttle = "*5\r\n$11\r\nCL.THROTTLE\r\n$3\r\nann\r\n$1\r\n1\r\n$1\r\n1\r\n$4\r\n3600\r\n";
    let pipeline = format!("PING\r\n{throttle}ECHO 'a b'\r\n{throttle}\r\n{throttle}*1\r\n$4\r\nQUIT\r\nPING\r\n");
    assert_eq!(
        raw(address, pipeline.as_bytes()),
        "+PONG\r\n*5\r\n:0\r\n:2\r\n:1\r\n:-1\r\n:3600\r\n$3\r\na b\r\n*5\r\n:0\r\n:2\r\n:0\r\n:-1\r\n:7200\r\n\
         *5\r\n:1\r\n:2\r\n:0\r\n:3600\r\n:7200\r\n+OK\r\n"
    );
}

#[test]
fn a_pipeline_of_changes_is_executed_in_order() {
    let redis = RedisServer::start();
    let store = format!("store: '{}'\nstore_timeout: 5s\n", redis.url());
    for store in ["", &store] {
        let (_server, address) = server(&format!("{store}service: {{ resp: '127.0.0.1:0' }}"));
        let mut pipeline = redis::pipe();
        for words in ["CHECK per-user ann 3", "REFUND per-user ann 2", "CHECK per-user ann 2", "CHECK per-user ann"]
            .into_iter()
            .chain(["RESET per-user ann", "CHECK per-user ann 3"])
        {
            let (name, words) = words.split_once(' ').expect("a command");
            pipeline.cmd(&format!("TOLLGATE.{name}")).arg(words.split(' ').collect::<Vec<_>>());
        }
        let replies: Vec<Vec<redis::Value>> = pipeline.query(&mut connect(address, "resp2")).unwrap();
        let number = |value: &redis::Value| redis::from_redis_value::<i64>(value.clone()).unwrap();
        let allowed: Vec<_> = replies.iter().map(|reply| number(&reply[1])).collect();
        assert_eq!(allowed, [1, 1, 1, 0, 1, 1]);
    }
}

#[test]
fn redis_cli_refunds_and_resets_a_key() {
    let (_server, address) = plain();
    let run = |words: &str| {
        let mut command = Command::new("redis-cli");
        let output = command.args(["-p", &address.port().to_string()]).args(words.split(' ')).output();
        String::from_utf8(output.expect("redis-cli is installed with the server").stdout).unwrap()
    };
    let state = |remaining: u64, reset_after: u64| {
        format!(
            "allowed\n1\nlimit\n5\nremaining\n{remaining}\nreset_after_ms\n{reset_after}\nretry_after_ms\n-1\nreason\n\n"
        )
    };
    assert!(run("TOLLGATE.CHECK per-page ann /a 5").starts_with("allowed\n1\n"));
    assert!(run("TOLLGATE.REFUND per-page ann /a 5").starts_with(&state(5, 0)));
    assert!(run("TOLLGATE.CHECK per-page ann /a 5").starts_with("allowed\n1\n"));
    assert_eq!(run("TOLLGATE.RESET per-page ann /a"), state(5, 0));
    assert_eq!(run("COMMAND INFO TOLLGATE.REFUND").lines().next(), Some("tollgate.refund"));
    let count = run("COMMAND COUNT");
    assert_eq!(run("COMMAND DOCS").lines().filter(|line| *line == "summary").count().to_string(), count.trim());
    insta::assert_snapshot!("command_docs", run("COMMAND DOCS CL.THROTTLE NO.SUCH tollgate.reset"));
}

#[test]
fn keys_are_counted_in_their_normal_form_and_impossible_ones_refused() {
    let (_server, address) = plain();
    let reply = raw(
        address,
        b"TOLLGATE.CHECK per-ip not-an-ip\r\nTOLLGATE.RESET per-ip not-an-ip\r\nTOLLGATE.CHECK per-ip 2001:db8::1 4\r\n\
          TOLLGATE.PEEK per-ip 2001:db8::/64\r\nQUIT\r\n",
    );
    let refused = "-ERR `not-an-ip` is not an IP address: write one such as 192.0.2.7 or 2001:db8::7\r\n";
    assert!(reply.starts_with(&refused.repeat(2)), "{reply}");
    assert_eq!(reply.matches("$9\r\nremaining\r\n:1\r\n").count(), 2, "{reply}");
}

#[test]
fn bytes_that_are_no_request_get_a_protocol_error_and_the_end() {
    let (_server, address) = plain();
    assert_eq!(raw(address, b"*1\r\n:1\r\n"), "-ERR Protocol error: expected '$', got ':'\r\n");
    assert_eq!(
        raw(address, b"PING\r\n*99999999999\r\n"),
        "+PONG\r\n-ERR Protocol error: too many arguments: 99999999999, at most 64\r\n"
    );
    // A browser that was tricked into sending an HTTP request.
    assert_eq!(raw(address, b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nTOLLGATE.CHECK per-user ann\r\n"), "");
    // The reply arrives even if the client sends more than the server reads.
    assert_eq!(
        raw(address, &[&b"*1\r\n:1\r\n"[..], &[b'x'; 100_000]].concat()),
        "-ERR Protocol error: expected '$', got ':'\r\n"
    );
    let mut connection = connect(address, "resp2");
    let pong: String = redis::cmd("PING").query(&mut connection).unwrap();
    assert_eq!(pong, "PONG");
}

#[test]
fn a_listener_with_tokens_serves_nobody_without_one() {
    let (_server, address) = server("service: { resp: { listen: '127.0.0.1:0', tokens_file: tokens } }");
    assert_eq!(
        raw(address, b"CL.THROTTLE ann 1 1 1\r\nAUTH wrong-wrong-wrong-wrong\r\nTOLLGATE.PEEK global\r\nQUIT\r\n"),
        "-NOAUTH Authentication required.\r\n-WRONGPASS invalid username-password pair or user is disabled.\r\n\
         -NOAUTH Authentication required.\r\n+OK\r\n"
    );
    for protocol in ["resp2", "resp3"] {
        let client = redis::Client::open(format!("redis://:{TOKEN}@{address}/?protocol={protocol}")).unwrap();
        let mut connection = client.get_connection().unwrap();
        assert_eq!(throttle(&mut connection, &["CL.THROTTLE", protocol, "1", "1", "3600"]), [0, 2, 1, -1, 3600]);
        let () = redis::cmd("RESET").query(&mut connection).unwrap();
        assert!(redis::cmd("PING").query::<String>(&mut connection).unwrap_err().to_string().contains("NOAUTH"));
    }
}

#[test]
fn a_listener_for_other_machines_needs_tokens() {
    let output = |settings: &str| {
        let folder = folder_with(&[(RULES, &format!("{settings}{LIMITS}")), ("short", "secret\n")]);
        let output = run_in(folder.path(), &["serve", "--config", RULES]);
        assert_eq!(output.status.code(), Some(2));
        without_times(&String::from_utf8(output.stderr).unwrap()).replace(&*folder.path().to_string_lossy(), "FOLDER")
    };
    let problems = [
        output("service: { resp: '0.0.0.0:0' }"),
        output("service: { resp: { listen: '0.0.0.0:0', tokens_file: short } }"),
    ];
    insta::assert_snapshot!(problems.concat());
    let (_server, address) = server("service: { resp: { listen: '0.0.0.0:0', open: true } }");
    let mut connection = connect(SocketAddr::from(([127, 0, 0, 1], address.port())), "resp2");
    assert_eq!(throttle(&mut connection, &["CL.THROTTLE", "ann", "1", "1", "3600"]), [0, 2, 1, -1, 3600]);
}

#[test]
fn nodes_on_one_redis_count_together() {
    let redis = RedisServer::start();
    let url = format!("redis://127.0.0.1:{}", redis.port());
    let settings = format!("store: {url}\nstore_timeout: 5s\nservice: {{ resp: '127.0.0.1:0' }}");
    let (_first, first) = server(&settings);
    let (_second, second) = server(&settings);
    let (mut first, mut second) = (connect(first, "resp2"), connect(second, "resp2"));
    assert_eq!(throttle(&mut first, &["CL.THROTTLE", "ann", "9", "1", "3600", "4"]), [0, 10, 6, -1, 4 * 3600]);
    let mut pipeline = redis::pipe();
    (0..7).for_each(|_| {
        pipeline.cmd("CL.THROTTLE").arg(&["ann", "9", "1", "3600"]);
    });
    let replies: Vec<[i64; 5]> = pipeline
        .query::<Vec<Vec<i64>>>(&mut second)
        .unwrap()
        .into_iter()
        .map(|reply| reply.try_into().unwrap())
        .collect();
    assert_eq!(replies.iter().map(|reply| reply[0]).collect::<Vec<_>>(), [0, 0, 0, 0, 0, 0, 1]);
    // Other numbers share the same count.
    assert_eq!(throttle(&mut first, &["CL.THROTTLE", "ann", "19", "1", "3600", "0"])[2], 10);
}

#[test]
fn the_client_of_redis_itself_connects() {
    let (_server, address) = plain();
    let output = Command::new("redis-cli")
        .args(["-p", &address.port().to_string(), "CL.THROTTLE", "ann", "1", "1", "3600"])
        .output()
        .expect("redis-cli is installed with the server");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "0\n2\n1\n-1\n3600\n");
}

#[test]
fn a_client_that_sends_no_whole_command_is_disconnected() {
    let (_server, address) = plain();
    let clients = ["", "*1\r\n$4\r\nPI"].map(|part| {
        let mut client = TcpStream::connect(address).expect("the server accepts connections");
        client.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout can be set");
        client.write_all(part.as_bytes()).expect("sent");
        client
    });
    for mut client in clients {
        assert_eq!(client.read(&mut [0; 8]).expect("the server ends the connection"), 0);
    }
}

#[test]
fn a_session_ends_with_its_token() {
    const OTHER: &str = "fedcba9876543210fedcba9876543210";
    let settings =
        "admin: { listen: '127.0.0.1:0' }\nservice: { resp: { listen: '127.0.0.1:0', tokens_file: tokens } }";
    let (server, address) = server(settings);
    let connect = |token: &str| redis::Client::open(format!("redis://:{token}@{address}")).unwrap().get_connection();
    let mut session = connect(TOKEN).unwrap();
    let mut ping = || redis::cmd("PING").query::<String>(&mut session);
    assert_eq!(ping().unwrap(), "PONG");
    // A rotation: the token from before is valid until it is removed.
    std::fs::write(server.path("tokens"), format!("{TOKEN}\n{OTHER}\n")).expect("the folder is writable");
    let mut other = wait_until(|| connect(OTHER).ok()).expect("the new token is valid");
    assert_eq!(ping().unwrap(), "PONG");
    std::fs::write(server.path("tokens"), OTHER).expect("the folder is writable");
    let error = wait_until(|| ping().err()).expect("the token is no longer valid");
    assert!(error.to_string().contains("NOAUTH"), "{error}");
    assert_eq!(redis::cmd("PING").query::<String>(&mut other).unwrap(), "PONG");
    let metrics = testkit::http1::ask(
        server.address_of("admin"),
        "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    );
    let requests = |outcome: &str| {
        let series = format!("tollgate_service_requests_total{{surface=\"resp\",outcome=\"{outcome}\"}} ");
        let line = metrics.text().lines().find_map(|line| line.strip_prefix(&series)).expect("a series");
        line.parse::<u64>().expect("a number")
    };
    assert!(requests("unauthenticated") >= 1 && requests("invalid") == 0, "{}", metrics.text());
    assert!(!metrics.text().contains("tollgate_service_connections{surface=\"authorize\"}"), "{}", metrics.text());
}

/// A client that always has sent the next commands does not keep the server from stopping, and gets all replies.
#[test]
fn a_busy_client_does_not_hold_up_a_stop() {
    let (mut server, address) = plain();
    let mut stream = TcpStream::connect(address).expect("the server accepts connections");
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout can be set");
    let mut writer = stream.try_clone().expect("a socket");
    let sending = std::thread::spawn(move || {
        let pipeline = "PING\r\n".repeat(1_000);
        while writer.write_all(pipeline.as_bytes()).is_ok() {}
    });
    let mut replies = [0; 64 * 1024];
    let read = |stream: &mut TcpStream, replies: &mut [u8]| match stream.read(replies) {
        Ok(0) | Err(_) => false,
        Ok(length) => {
            assert!(replies[..length].iter().all(|byte| b"+PONG\r\n".contains(byte)));
            true
        }
    };
    assert!(read(&mut stream, &mut replies));
    server.signal("TERM");
    while read(&mut stream, &mut replies) {}
    drop(stream);
    assert!(server.wait().success());
    assert!(!server.said().contains("cut off"), "{}", server.said());
    sending.join().expect("the client ends");
}

#[test]
fn a_transaction_is_queued_and_then_executed_in_order() {
    let redis = RedisServer::start();
    let store = format!("store: '{}'\nstore_timeout: 5s\n", redis.url());
    for store in ["", &store] {
        let (_server, address) = server(&format!("{store}service: {{ resp: '127.0.0.1:0' }}"));
        for protocol in ["resp2", "resp3"] {
            let mut connection = connect(address, protocol);
            let mut transaction = redis::pipe();
            transaction.atomic();
            for words in ["CL.THROTTLE", "PING", "CL.THROTTLE", "TOLLGATE.RESET", "CL.THROTTLE"] {
                match words {
                    "CL.THROTTLE" => transaction.cmd(words).arg(&[protocol, "1", "1", "3600"]),
                    "TOLLGATE.RESET" => transaction.cmd(words).arg("global").ignore(),
                    _ => transaction.cmd(words),
                };
            }
            type Replies = (Vec<i64>, String, Vec<i64>, Vec<i64>);
            let (first, pong, second, third): Replies = transaction.query(&mut connection).unwrap();
            assert_eq!([first[0], second[0], third[0]], [0, 0, 1]);
            assert_eq!(pong, "PONG");
            // A command that fails is reported after the others are executed.
            let mut transaction = redis::pipe();
            transaction.atomic().cmd("TOLLGATE.CHECK").arg(&["nobody", "ann"]);
            transaction.cmd("TOLLGATE.CHECK").arg(&["per-user", protocol]);
            let error = transaction.query::<redis::Value>(&mut connection).unwrap_err();
            assert!(error.to_string().contains("unknown limit 'nobody'"), "{error}");
            let peeked: redis::Value =
                redis::cmd("TOLLGATE.PEEK").arg(&["per-user", protocol]).query(&mut connection).unwrap();
            let remaining = match &peeked {
                redis::Value::Map(pairs) => &pairs[2].1,
                redis::Value::Array(words) => &words[5],
                other => panic!("{other:?}"),
            };
            assert_eq!(remaining, &redis::Value::Int(2));
        }
    }
}

#[test]
fn nothing_of_a_transaction_with_an_error_is_executed() {
    let (_server, address) = plain();
    let check = "TOLLGATE.CHECK per-user ann\r\n";
    let peeked = |conversation: &str| {
        let reply = raw(address, format!("{conversation}TOLLGATE.PEEK per-user ann\r\nQUIT\r\n").as_bytes());
        assert!(reply.contains("$9\r\nremaining\r\n:3\r\n"), "{conversation}: {reply}");
        reply.split_once("*12\r\n").map_or_else(String::new, |(before, _)| before.to_owned())
    };
    let aborted = "-EXECABORT Transaction discarded because of previous errors.\r\n";
    for (wrong, error) in [
        ("GET ann", "ERR unknown command 'GET', with args beginning with: 'ann' "),
        ("CL.THROTTLE ann", "ERR wrong number of arguments for 'cl.throttle' command"),
        ("AUTH secret", "ERR Command not allowed inside a transaction"),
        ("HELLO 3", "ERR Command not allowed inside a transaction"),
        ("WATCH ann", "ERR WATCH is not supported: leave it out, a check needs no transaction to be safe"),
        ("EXEC now", "ERR wrong number of arguments for 'exec' command"),
    ] {
        assert_eq!(
            peeked(&format!("MULTI\r\n{check}{wrong}\r\n{check}EXEC\r\n")),
            format!("+OK\r\n+QUEUED\r\n-{error}\r\n+QUEUED\r\n{aborted}"),
            "{wrong}"
        );
    }
    assert_eq!(peeked(&format!("MULTI\r\n{check}DISCARD\r\n")), "+OK\r\n+QUEUED\r\n+OK\r\n");
    assert_eq!(peeked(&format!("MULTI\r\n{check}RESET\r\n")), "+OK\r\n+QUEUED\r\n+RESET\r\n");
    assert_eq!(
        peeked("EXEC\r\nDISCARD\r\nUNWATCH\r\nMULTI\r\nMULTI\r\nUNWATCH\r\nEXEC\r\n"),
        "-ERR EXEC without MULTI\r\n-ERR DISCARD without MULTI\r\n+OK\r\n+OK\r\n\
         -ERR MULTI calls can not be nested\r\n+QUEUED\r\n*1\r\n+OK\r\n"
    );
    assert_eq!(raw(address, format!("MULTI\r\n{check}QUIT\r\n").as_bytes()), "+OK\r\n+QUEUED\r\n+OK\r\n");
    drop({
        let mut stream = TcpStream::connect(address).expect("the server accepts connections");
        stream.write_all(format!("MULTI\r\n{check}").as_bytes()).expect("sent");
        stream
    });
    assert_eq!(peeked("MULTI\r\nEXEC\r\n"), "+OK\r\n*0\r\n");
}

#[test]
fn the_queue_of_a_transaction_is_bounded() {
    let (_server, address) = plain();
    let full = "CL.THROTTLE ann 1 1 3600\r\n".repeat(1_001);
    let reply = raw(address, format!("MULTI\r\n{full}EXEC\r\nCL.THROTTLE ann 1 1 3600\r\nQUIT\r\n").as_bytes());
    let end = "-ERR the transaction has more than 1000 commands: send EXEC earlier\r\n\
               -EXECABORT Transaction discarded because of previous errors.\r\n\
               *5\r\n:0\r\n:2\r\n:1\r\n:-1\r\n:3600\r\n+OK\r\n";
    assert!(reply.ends_with(end), "{}", &reply[reply.len().saturating_sub(400)..]);
    let text = "x".repeat(60_000);
    let long = format!("ECHO {text}\r\n").repeat(5);
    let reply = raw(address, format!("MULTI\r\n{long}EXEC\r\nQUIT\r\n").as_bytes());
    assert_eq!(
        reply,
        format!(
            "+OK\r\n{}-ERR the transaction has more than 262144 bytes: send EXEC earlier\r\n\
             -EXECABORT Transaction discarded because of previous errors.\r\n+OK\r\n",
            "+QUEUED\r\n".repeat(4)
        )
    );
}

#[test]
fn a_transaction_needs_a_token_too() {
    let (_server, address) = server("service: { resp: { listen: '127.0.0.1:0', tokens_file: tokens } }");
    assert_eq!(
        raw(address, format!("MULTI\r\nAUTH {TOKEN}\r\nMULTI\r\nPING\r\nRESET\r\nEXEC\r\nQUIT\r\n").as_bytes()),
        "-NOAUTH Authentication required.\r\n+OK\r\n+OK\r\n+QUEUED\r\n+RESET\r\n-NOAUTH Authentication required.\r\n+OK\r\n"
    );
}
