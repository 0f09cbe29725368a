//! Samples of each format, as the servers write them.

use std::io::Write as _;

use proptest::prelude::*;

use super::*;

const COMBINED: &str = r#"192.0.2.7 - ann [10/Oct/2000:13:55:36 -0700] "GET /a?b=1 HTTP/1.1" 200 2326 "http://example.com/" "Mozilla/5.0 (X11)""#;

/// Returns what was read of one line, in one text.
fn read(line: &str) -> String {
    read_with(line, Mappings::default())
}

fn read_with(line: &str, mappings: Mappings) -> String {
    let mut record = Record::default();
    let mut reader = LineReader { mappings, ..LineReader::default() };
    let format = match reader.read(line.as_bytes(), &mut record) {
        ReadLine::Request(format) => format.name(),
        ReadLine::NoRequest(format) => return format!("{} without a request", format.name()),
        ReadLine::Unknown => return "unknown".to_owned(),
    };
    let client = record.client().map_or("-".to_owned(), |client| client.to_string());
    let headers: String =
        record.headers().map(|(name, value)| format!(" {name}={}", String::from_utf8_lossy(value))).collect();
    format!(
        "{format} {} {client} {} {} {} {} {}{headers}",
        record.micros(),
        record.method(),
        record.target(),
        record.host().unwrap_or("-"),
        record.status().map_or("-".to_owned(), |status| status.to_string()),
        record.user().unwrap_or("-"),
    )
}

#[test]
fn common_and_combined_lines_are_read() {
    assert_eq!(
        read(r#"127.0.0.1 - frank [10/Oct/2000:13:55:36 -0700] "GET /apache_pb.gif HTTP/1.0" 200 2326"#),
        "common 971211336000000 127.0.0.1 GET /apache_pb.gif - 200 frank"
    );
    assert_eq!(
        read(COMBINED),
        "combined 971211336000000 192.0.2.7 GET /a?b=1 - 200 ann referer=http://example.com/ \
         user-agent=Mozilla/5.0 (X11)"
    );
    // Apache's vhost_combined, an IPv6 client, escapes, and a user agent with quotes.
    assert_eq!(
        read(
            r#"www.example.com:443 2001:db8::1 - - [10/Oct/2000:13:55:36 +0000] "GET /\xe2\x9c\x93\"x HTTP/2.0" 304 - "-" "a \"b\" c""#
        ),
        "combined 971186136000000 2001:db8::1 GET /✓\"x www.example.com:443 304 - user-agent=a \"b\" c"
    );
    // A name instead of an address, a user with spaces and brackets.
    assert_eq!(
        read(r#"client.example.com - [the user] [10/Oct/2000:13:55:36 +0000] "HEAD / HTTP/1.1" 200 0"#),
        "common 971186136000000 - HEAD / - 200 [the user]"
    );
}

#[test]
fn lines_of_traefik_are_read() {
    assert_eq!(
        read(
            r#"10.0.0.9 - - [12/Mar/2024:08:01:02 +0000] "POST /login HTTP/1.1" 401 12 "-" "curl/8.5.0" 17 "web@docker" "http://172.17.0.3:80" 4ms"#
        ),
        "combined 1710230462000000 10.0.0.9 POST /login - 401 - user-agent=curl/8.5.0"
    );
    assert_eq!(
        read(
            r#"{"ClientAddr":"10.0.0.9:51423","ClientHost":"10.0.0.9","ClientUsername":"-","DownstreamStatus":200,"Duration":41,"RequestAddr":"a.example:8080","RequestHost":"a.example","RequestMethod":"GET","RequestPath":"/x?y=1","StartLocal":"2024-03-12T09:01:02.5+01:00","StartUTC":"2024-03-12T08:01:02.500000001Z","level":"info","msg":"","request_X-User-Id":"42","time":"2024-03-12T08:01:03Z"}"#
        ),
        "json 1710230462500000 10.0.0.9 GET /x?y=1 a.example 200 - X-User-Id=42"
    );
}

#[test]
fn json_lines_of_nginx_are_read() {
    assert_eq!(
        read(
            r#"{"time_local":"12/Mar/2024:08:01:02 +0000","msec":"1710230462.125","remote_addr":"192.0.2.7","remote_user":"","request":"GET /a%20b?c=1 HTTP/1.1","status":"200","http_user_agent":"curl \"8\"","http_x_user_id":"42","http_x_forwarded_for":"198.51.100.4"}"#
        ),
        "json 1710230462125000 192.0.2.7 GET /a%20b?c=1 - 200 - user-agent=curl \"8\" x-user-id=42 \
         x-forwarded-for=198.51.100.4"
    );
    // Its variable `uri` has no query, so the others are preferred.
    assert_eq!(
        read(
            r#"{"time_iso8601":"2024-03-12T08:01:02+00:00","uri":"/a","request_uri":"/a?b=1","request_method":"PUT","host":"a.example","remote_addr":"192.0.2.7","status":201}"#
        ),
        "json 1710230462000000 192.0.2.7 PUT /a?b=1 a.example 201 -"
    );
}

#[test]
fn json_lines_of_envoy_are_read() {
    assert_eq!(
        read(
            r#"{"start_time":"2024-03-12T08:01:02.125Z","method":"GET","path":"/x","protocol":"HTTP/2","response_code":200,"response_flags":"-","user_agent":"grpc-go","x_forwarded_for":null,"request_id":"cc21","authority":"a.example","downstream_remote_address":"192.0.2.7:4711","duration":3}"#
        ),
        "json 1710230462125000 192.0.2.7 GET /x a.example 200 - user-agent=grpc-go"
    );
}

#[test]
fn json_lines_of_caddy_are_read() {
    assert_eq!(
        read(
            r#"{"level":"info","ts":1710230462.1251,"logger":"http.log.access","msg":"handled request","request":{"remote_ip":"10.0.0.1","remote_port":"4711","client_ip":"192.0.2.7","proto":"HTTP/2.0","method":"GET","host":"a.example","uri":"/x?y=1","headers":{"User-Agent":["curl/8"],"X-User-Id":["42"]}},"user_id":"","duration":0.000929675,"size":10900,"status":200,"resp_headers":{"Server":["Caddy"]}}"#
        ),
        "json 1710230462125100 192.0.2.7 GET /x?y=1 a.example 200 - User-Agent=curl/8 X-User-Id=42"
    );
}

#[test]
fn lines_of_application_load_balancers_are_read() {
    assert_eq!(
        read(
            r#"https 2018-07-02T22:23:00.186641Z app/my-loadbalancer/50dc6c495c0c9188 192.168.131.39:2817 10.0.0.1:80 0.086 0.048 0.037 200 200 0 57 "GET https://www.example.com:443/x?y HTTP/1.1" "curl/7.46.0" ECDHE-RSA-AES128-GCM-SHA256 TLSv1.2 arn:aws:elasticloadbalancing:us-east-2:123456789012:targetgroup/my-targets/73e2d6bc24d8a067 "Root=1-58337281-1d84f3d73c47ec4e58577259" "www.example.com" "arn:aws:acm:us-east-2:123456789012:certificate/12345678" 1 2018-07-02T22:22:48.364000Z "authenticate,forward" "-" "-" "10.0.0.1:80" "200" "-" "-""#
        ),
        "alb 1530570180186641 192.168.131.39 GET /x?y www.example.com:443 200 - user-agent=curl/7.46.0"
    );
    assert_eq!(
        read(
            r#"http 2018-11-30T22:23:00.186641Z app/my-loadbalancer/50dc6c495c0c9188 192.168.131.39:2817 - -1 -1 -1 400 - 34 366 "- http://www.example.com:80- " "-" - - - "-" "-" "-" - 2018-11-30T22:22:48.364000Z "-" "-" "-" "-" "-" "-" "-""#
        ),
        "alb without a request"
    );
}

#[test]
fn lines_of_tollgate_are_read() {
    assert_eq!(
        read(
            r#"{"time":"2024-03-12T08:01:02.125Z","client":"192.0.2.7","method":"GET","target":"/x","protocol":"HTTP/1.1","host":"a.example","status":429,"sent_bytes":0,"duration_ms":0.031,"limit":"per-ip","decision":"denied","request_id":"8a1","user_agent":"curl/8"}"#
        ),
        "json 1710230462125000 192.0.2.7 GET /x a.example 429 - user-agent=curl/8"
    );
    assert_eq!(
        read(
            r#"192.0.2.7 - - [12/Mar/2024:08:01:02 +0000] "GET /x HTTP/1.1" 429 91 "-" "curl/8" per-ip denied 0.000031"#
        ),
        "combined 1710230462000000 192.0.2.7 GET /x - 429 - user-agent=curl/8"
    );
}

#[test]
fn lines_without_a_request_and_other_lines_differ() {
    let head = "192.0.2.7 - - [10/Oct/2000:13:55:36 -0700]";
    assert_eq!(read(&format!(r#"{head} "-" 408 0 "-" "-""#)), "combined without a request");
    assert_eq!(read(&format!(r#"{head} "\x16\x03\x01\x02" 400 157"#)), "common without a request");
    assert_eq!(
        read(r#"{"level":"info","ts":1710230462.1,"msg":"serving initial configuration"}"#),
        "json without a request"
    );
    for line in ["", "[", "{", "{}", "[error] something happened", head, r#"{"ts":1,"#, r#"{"time":"noon"}"#, "http x"]
    {
        assert_eq!(read(line), "unknown", "{line}");
    }
}

#[test]
fn mapped_fields_are_headers() {
    let mapped = |mapping: &str, line: &str| {
        let read = read_with(line, Mappings::new(vec![mapping.parse().unwrap()]));
        read.split(' ').rfind(|word| word.contains('=')).unwrap_or_default().to_owned()
    };
    assert_eq!(mapped("header:X-User-Id=user", &COMBINED.replace("/a?b=1", "/")), "x-user-id=ann");
    let json =
        r#"{"time":"2024-03-12T08:01:02Z","method":"GET","path":"/","auth":{"token":{"sub":"42"}},"tenant":"t"}"#;
    assert_eq!(mapped("header:x-user-id=auth.token.sub", json), "x-user-id=42");
    assert_eq!(mapped("header:x-tenant=tenant", json), "x-tenant=t");
    for wrong in ["x", "x=y", "header:=y", "header:a b=y", "header:a="] {
        assert!(wrong.parse::<HeaderField>().is_err(), "{wrong}");
    }
}

fn file(content: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(content).unwrap();
    file
}

fn line(second: u32, path: &str) -> String {
    format!("192.0.2.7 - - [10/Oct/2000:13:55:{second:02} +0000] \"GET {path} HTTP/1.1\" 200 1\n")
}

fn targets(log: &mut AccessLog) -> Vec<String> {
    let mut targets = Vec::new();
    while let Some(record) = log.next_record() {
        targets.push(record.target().to_owned());
    }
    targets
}

#[test]
fn files_are_merged_by_time() {
    let one = file([line(3, "/c"), line(5, "/e")].concat().as_bytes());
    let other = file([line(1, "/a"), line(2, "/b"), line(4, "/d")].concat().as_bytes());
    let paths = [one.path().to_owned(), other.path().to_owned()];
    let mut log = AccessLog::open(&paths, None, Mappings::default()).unwrap();
    assert_eq!(targets(&mut log), ["/a", "/b", "/c", "/d", "/e"]);
    assert_eq!(log.files().map(|file| file.requests).collect::<Vec<_>>(), [2, 3]);
    assert_eq!(Some(log.read_bytes()), log.total_bytes());
}

#[test]
fn more_files_than_are_held_open_are_merged() {
    let files: Vec<_> = (0..40).map(|number| file(line(59 - number, &format!("/{number}")).as_bytes())).collect();
    let paths: Vec<PathBuf> = files.iter().map(|file| file.path().to_owned()).collect();
    let mut log = AccessLog::open(&paths, None, Mappings::default()).unwrap();
    assert_eq!(targets(&mut log), (0..40).rev().map(|number| format!("/{number}")).collect::<Vec<_>>());
    assert!(log.files().all(|file| file.lines == 1));
}

proptest! {
    #[test]
    fn no_bytes_end_the_process(line in proptest::collection::vec(any::<u8>(), 0..300)) {
        read_in_every_format(&line);
    }

    /// Lines that are almost right reach further into the readers.
    #[test]
    fn no_damaged_line_ends_the_process(at in 0..400_usize, byte in any::<u8>(), cut in 0..400_usize) {
        let json = r#"{"ts":1710230462.1251,"request":{"client_ip":"192.0.2.7","method":"GET","uri":"/x\"\u00e9","headers":{"A":["b"]}},"status":200}"#;
        let alb = r#"http 2018-07-02T22:23:00.186641Z app/a 192.168.131.39:2817 10.0.0.1:80 0.000 0.001 0.000 200 200 34 366 "GET http://a:80/ HTTP/1.1" "curl""#;
        for line in [COMBINED, json, alb] {
            let mut line = line.as_bytes().to_vec();
            if let Some(damaged) = line.get_mut(at) {
                *damaged = byte;
            }
            line.truncate(cut.max(1));
            read_in_every_format(&line);
        }
    }
}
