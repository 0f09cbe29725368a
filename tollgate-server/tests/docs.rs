//! The commands in the documentation print what the pages show, and `docs/cli.md` describes every option.
//!
//! A page is run from top to bottom. A `yaml` block is saved as `tollgate.yaml`, to which a `diff` block adds lines. A
//! `log` block is saved as `access.log`. `docs/samples` are in the same folder. A command in a `console` block is run
//! if the page shows its output. Otherwise, and in a `sh` block, its options are looked up in the help text.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::panic::{catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;
use testkit::folder::{folder, folder_with};
use testkit::http1::ask;
use testkit::tollgate::{Process, RULES, run_in};
use testkit::wait::wait_until;
use testkit::window::within_one_minute;

const ANY_PORT: &str = "127.0.0.1:0";
const SUBCOMMANDS: [&str; 11] =
    ["serve", "validate", "explain", "publish", "replay", "init", "schema", "completions", "man", "simulate", "top"];
const PAGES: [&str; 13] = [
    "README.md",
    "docs/admin.md",
    "docs/algorithms.md",
    "docs/getting-started.md",
    "docs/choosing-numbers.md",
    "docs/cli.md",
    "docs/gateway.md",
    "docs/operating.md",
    "docs/redis.md",
    "docs/replay.md",
    "docs/service.md",
    "docs/migrating/envoy-ratelimit.md",
    "docs/migrating/bucket4j.md",
];

/// Files that the pages read, in `docs/samples`.
const SAMPLES: [&str; 1] = ["access.log.gz"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(page: &str) -> String {
    fs::read_to_string(root().join(page)).unwrap_or_else(|error| panic!("{page}: {error}"))
}

/// Returns the language and the text of every block of code.
fn blocks(page: &str) -> Vec<(&str, &str)> {
    let fenced = page.split("\n```").skip(1).step_by(2);
    fenced.map(|block| block.split_once('\n').expect("a block has lines")).collect()
}

/// Returns the commands of a `console` block, each with the output that is shown.
fn commands(block: &str) -> Vec<(&str, String)> {
    let mut commands: Vec<(&str, String)> = Vec::new();
    for line in block.lines() {
        match (line.strip_prefix("$ "), commands.last_mut()) {
            (Some(command), _) => commands.push((command, String::new())),
            (None, Some((_, output))) => {
                output.push_str(line);
                output.push('\n');
            }
            (None, None) => panic!("output without a command: {line}"),
        }
    }
    commands
}

/// Splits a command into its words, as a shell does. Quotes are the only special characters.
fn words(command: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
    for char in command.chars() {
        match (char, quote) {
            ('\'' | '"', None) => quote = Some(char),
            (_, Some(open)) if char == open => quote = None,
            (' ', None) => words.push(std::mem::take(&mut word)),
            _ => word.push(char),
        }
    }
    words.push(word);
    words.retain(|word| !word.is_empty());
    words
}

fn tollgate(folder: &Path, arguments: &[String]) -> String {
    let output = run_in(folder, &arguments.iter().map(String::as_str).collect::<Vec<_>>());
    String::from_utf8([output.stdout, output.stderr].concat()).expect("the output is UTF-8")
}

fn help_of(subcommand: &str) -> String {
    tollgate(Path::new("."), &[subcommand.to_owned(), "--help".to_owned()])
}

/// Returns the long options in a text.
fn options(text: &str) -> BTreeSet<String> {
    let options = text
        .split("--")
        .skip(1)
        .map(|rest| rest.chars().take_while(|char| char.is_ascii_lowercase() || *char == '-').collect::<String>());
    options.filter(|name| name.len() > 1).map(|name| format!("--{name}")).collect()
}

/// Starts a server on free ports. `rules` is its rule file, if it has one.
fn start(rules: Option<&str>) -> Process {
    let has =
        |section: &str| rules.is_none_or(|rules| rules.starts_with(section) || rules.contains(&format!("\n{section}")));
    let is_service = rules.is_some() && has("service:");
    let mut arguments = vec!["serve"];
    arguments.extend(rules.iter().flat_map(|_| ["--config", RULES]));
    for (option, is_there) in [("--listen", has("gateway:")), ("--admin", has("admin:")), ("--http", is_service)] {
        arguments.extend([option, ANY_PORT].into_iter().filter(|_| is_there));
    }
    let folder = match rules {
        Some(rules) => folder_with(&[(RULES, rules)]),
        None => folder(),
    };
    Process::start(folder, &arguments)
}

/// Starts a server, and returns the address that its first line has behind `name`.
fn start_at(rules: Option<&str>, name: &str) -> (Process, SocketAddr) {
    let server = start(rules);
    let address = server.address_of(name);
    (server, address)
}

/// Returns the first lines of a server's output.
fn lines(server: &Process, count: usize) -> String {
    let lines = wait_until(|| {
        let text = fs::read_to_string(server.stdout()).expect("stdout is a file");
        let whole: Vec<&str> = text.split_inclusive('\n').filter(|line| line.ends_with('\n')).take(count).collect();
        (whole.len() == count).then(|| whole.concat())
    });
    lines.expect("the server prints where it listens")
}

/// Replaces the ports of addresses, which the page fixes and the test does not.
fn without_ports(text: &str) -> String {
    let (first, rest) = text.split_once("127.0.0.1:").unwrap_or((text, ""));
    let mut plain = first.to_owned();
    for part in rest.split("127.0.0.1:").filter(|_| !rest.is_empty()) {
        plain.push_str("127.0.0.1:");
        plain.push_str(part.trim_start_matches(|char: char| char.is_ascii_digit()));
    }
    plain
}

/// Sends a check and returns the body of the response.
fn post(address: SocketAddr, path: &str, body: &str) -> Value {
    let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n");
    ask(address, format!("{head}content-length: {}\r\n\r\n{body}", body.len())).json()
}

/// Sends a request to a gateway and returns the response. Header names are in lower case, as on the pages.
fn get(address: SocketAddr, path: &str, headers: &[&str]) -> String {
    let mut stream = TcpStream::connect(address).expect("the gateway listens");
    let lines: String = headers.iter().flat_map(|header| [header, "\r\n"]).collect();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{lines}\r\n").expect("it is sent");
    let mut response = String::new();
    stream.read_to_string(&mut response).expect("the gateway answers");
    response.replace("\r\n", "\n")
}

/// Replaces numbers that depend on the time of day: the reset, the wait, and the rest of a window.
fn without_waits(line: &str) -> String {
    let (before, times) = match line.split_once(": ") {
        Some((name @ ("x-ratelimit-reset" | "retry-after"), value)) => (name, value),
        Some(("ratelimit", value)) => value.rsplit_once(';').unwrap_or((value, "")),
        _ if line.starts_with('{') => ("", line),
        _ => (line, ""),
    };
    format!("{before} {}", times.replace(|char: char| char.is_ascii_digit(), ""))
}

/// Removes the fields that depend on the time of day.
fn without_times(mut response: Value) -> Value {
    match &mut response {
        Value::Array(list) => list.iter_mut().for_each(|one| *one = without_times(one.take())),
        one => {
            drop(one["reset_after"].take());
            // A reservation is random.
            if let Some(reservation) = one.get_mut("reservation") {
                *reservation = reservation.is_string().into();
            }
            if let Some(limits) = one.get_mut("limits") {
                *limits = without_times(limits.take());
            }
        }
    }
    response
}

/// Returns whether a value has everything that another one has.
fn contains(given: &Value, shown: &Value) -> bool {
    match (given, shown) {
        (Value::Object(given), Value::Object(shown)) => {
            shown.iter().all(|(name, value)| given.get(name).is_some_and(|given| contains(given, value)))
        }
        (Value::Array(given), Value::Array(shown)) => {
            given.len() == shown.len() && given.iter().zip(shown).all(|(given, shown)| contains(given, shown))
        }
        _ => given == shown,
    }
}

/// Adds the lines of a diff that begin with `+` to a rule file, between the lines that begin with a space.
fn with_added_lines(rules: &str, diff: &str) -> String {
    let lines = |is_kept: fn(&&str) -> bool| -> String {
        diff.lines().filter(is_kept).flat_map(|line| [line.get(1..).unwrap_or_default(), "\n"]).collect()
    };
    rules.replacen(&lines(|line| line.starts_with(' ')), &lines(|_| true), 1)
}

/// The commands of a page, with the server that runs them.
struct Page {
    name: &'static str,
    folder: TempDir,
    rules: Option<String>,
    /// Answers the checks of the page under the current rules.
    service: Option<(Process, SocketAddr)>,
    /// Answers the other requests of the page.
    gateway: Option<(Process, SocketAddr)>,
    /// Answers the requests of the page to the admin API.
    admin: Option<(Process, SocketAddr)>,
    ran: usize,
}

impl Page {
    /// Saves a rule file. Pages that share limits on Redis are run in memory.
    fn save(&mut self, text: &str) {
        let kept = text.lines().filter(|line| !line.starts_with("store: redis"));
        let rules: String = kept.flat_map(|line| [line, "\n"]).collect();
        fs::write(self.folder.path().join(RULES), &rules).expect("the rule file is written");
        (self.rules, self.service, self.gateway, self.admin) = (Some(rules), None, None, None);
    }

    fn run(&mut self, command: &str, shown: &str) {
        let name = self.name;
        let words = words(command.split(" | ").next().unwrap_or_default());
        let arguments = match words.iter().position(|word| word == "tollgate" || word == "--") {
            Some(at) if words[0] == "tollgate" || words[0] == "cargo" => &words[at + 1..],
            _ if words[0] == "curl" && words.last().is_some_and(|url| url.contains(":8099/v1/")) => {
                return self.ask_admin(&words, shown);
            }
            _ if words[0] == "curl" && words.last().is_some_and(|url| url.ends_with(":8099/metrics")) => {
                return self.read_metrics(command, shown);
            }
            _ if words[0] == "curl" && words.iter().any(|word| word == "--json") => return self.check(&words, shown),
            _ if words[0] == "curl" && words[1] == "-i" => return self.get(&words, shown),
            _ => return,
        };
        let subcommand = arguments.first().expect("a subcommand").clone();
        let unknown: Vec<String> =
            options(&arguments.join(" ")).difference(&options(&help_of(&subcommand))).cloned().collect();
        assert!(unknown.is_empty(), "{name}: {command}: no such option: {unknown:?}");
        if shown.is_empty() {
            return;
        }
        self.ran += 1;
        let printed = if subcommand == "serve" {
            let rules = self.rules.as_deref().filter(|_| arguments.iter().any(|word| word == "--config"));
            lines(&start(rules), shown.lines().count())
        } else {
            tollgate(self.folder.path(), arguments)
        };
        assert_eq!(without_ports(&printed), without_ports(shown), "{name}: {command}");
    }

    /// Runs `curl -i`. A page shows a denial after the requests that lead to it, so the request is repeated until then.
    fn get(&mut self, words: &[String], shown: &str) {
        const MOST_REPEATED: usize = 100;
        let rules = self.rules.as_deref();
        let (_, address) = self.gateway.get_or_insert_with(|| start_at(rules, "gateway"));
        let headers: Vec<&str> = words.windows(2).filter(|pair| pair[0] == "-H").map(|pair| &*pair[1]).collect();
        let url = words.last().expect("curl has a URL").trim_start_matches("http://");
        let path = &url[url.find('/').expect("the URL has a path")..];
        let status = shown.lines().next().expect("a status line");
        let mut responses = (0..MOST_REPEATED).map(|_| get(*address, path, &headers));
        let response = responses.find(|response| response.starts_with(status));
        let response = response.unwrap_or_else(|| panic!("{}: no request gets {status}", self.name));
        let given: BTreeSet<String> = response.lines().map(without_waits).collect();
        for line in shown.lines().filter(|line| !line.is_empty() && *line != "...") {
            assert!(given.contains(&without_waits(line)), "{}: no line is like {line}\n{response}", self.name);
        }
        self.ran += 1;
    }

    /// Sends a request to the admin API. The page may leave fields out.
    fn ask_admin(&mut self, words: &[String], shown: &str) {
        if shown.is_empty() {
            return;
        }
        let rules = self.rules.as_deref();
        let (_, address) = self.admin.get_or_insert_with(|| start_at(rules, "admin"));
        let url = words.last().expect("curl has a URL").trim_start_matches("http://");
        let path = &url[url.find('/').expect("the URL has a path")..];
        let given = match words.iter().skip_while(|word| *word != "--json").nth(1) {
            Some(body) => post(*address, path, body),
            None => ask(*address, format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")).json(),
        };
        let shown: Value =
            serde_json::from_str(shown).unwrap_or_else(|error| panic!("{}: {error}: {shown}", self.name));
        assert!(contains(&given, &shown), "{}: {words:?}: {given}", self.name);
        self.ran += 1;
    }

    /// Reads metrics through `grep`. The page shows them after requests to the gateway, so requests are sent until then.
    fn read_metrics(&mut self, command: &str, shown: &str) {
        const MOST_SENT: usize = 200;
        let word = command.split_once(" | grep ").expect("the page shows some of the metrics").1;
        let rules = self.rules.as_deref();
        let (server, admin) = self.admin.get_or_insert_with(|| start_at(rules, "admin"));
        let gateway = server.address_of("gateway");
        let plain = |line: &str| {
            let (name, value) = line.rsplit_once(' ').expect("a metric has a value");
            (name.to_owned(), value != "0")
        };
        let shown: Vec<(String, bool)> = shown.lines().map(plain).collect();
        let mut given = Vec::new();
        let are_shown = (0..MOST_SENT).any(|_| {
            get(gateway, "/", &[]);
            given = get(*admin, "/metrics", &[]).lines().filter(|line| line.contains(word)).map(plain).collect();
            given == shown
        });
        assert!(are_shown, "{}: {command}: {given:?}", self.name);
        self.ran += 1;
    }

    fn check(&mut self, words: &[String], shown: &str) {
        let body = words.iter().skip_while(|word| *word != "--json").nth(1).expect("--json has a value");
        let rules = self.rules.as_deref();
        let (_, address) = self.service.get_or_insert_with(|| start_at(rules, "decisions POST"));
        let url = words.last().expect("curl has a URL").trim_start_matches("http://");
        let given = post(*address, &url[url.find('/').expect("the URL has a path")..], body);
        if !shown.is_empty() {
            self.ran += 1;
            let shown = serde_json::from_str(shown).unwrap_or_else(|error| panic!("{}: {error}: {shown}", self.name));
            assert_eq!(without_times(given), without_times(shown), "{}: {body}", self.name);
        }
    }
}

/// Runs a page, and returns the number of commands whose output it shows.
fn run_page(name: &'static str) -> usize {
    let folder = folder();
    for sample in SAMPLES {
        fs::copy(root().join("docs/samples").join(sample), folder.path().join(sample)).expect("it is copied");
    }
    let mut page = Page { name, folder, rules: None, service: None, gateway: None, admin: None, ran: 0 };
    for (language, text) in blocks(&read(name)) {
        match language {
            "yaml" => page.save(text),
            "diff" => {
                let rules = page.rules.take().expect("a rule file is above");
                let changed = with_added_lines(&rules, text);
                assert_ne!(changed, rules, "{name}: the rule file above has no such lines:\n{text}");
                page.save(&changed);
            }
            "log" => fs::write(page.folder.path().join("access.log"), text).expect("the log is written"),
            "sh" => text.lines().filter(|line| line.starts_with("tollgate ")).for_each(|line| page.run(line, "")),
            "console" => commands(text).iter().for_each(|(command, shown)| page.run(command, shown)),
            _ => {}
        }
    }
    page.ran
}

#[test]
fn commands_print_what_the_pages_show() {
    let mut ran = 0;
    for name in PAGES {
        // The limits of the pages are per minute. A page that fails at the turn of a minute is run again.
        ran += within_one_minute(|_| catch_unwind(|| run_page(name))).unwrap_or_else(|panic| resume_unwind(panic));
    }
    assert!(ran >= 13, "{ran} commands were run");
}

/// Starts a server with the first rule file of a page.
fn serve_first_sample(page: &str) -> (Process, SocketAddr) {
    let text = read(page);
    let sample = blocks(&text).into_iter().find(|(language, _)| *language == "yaml").expect("a rule file").1;
    start_at(Some(sample), "admin")
}

#[test]
fn first_sample_of_the_dashboard_serves() {
    let (_server, address) = serve_first_sample("docs/dashboard.md");
    let status = ask(address, "GET /v1/status HTTP/1.1\r\nhost: localhost\r\n\r\n").json();
    assert_eq!((&status["ready"], &status["rules"]["limits"]), (&true.into(), &1.into()), "{status}");
}

#[test]
fn audit_line_of_the_page_is_that_of_the_log() {
    let page = read("docs/admin.md");
    let shown = page.lines().find(|line| line.contains(" info: audit: ban_key ")).expect("a line of the log");
    let all = blocks(&page).into_iter().filter(|(language, _)| *language == "console");
    let commands: Vec<(&str, String)> = all.flat_map(|(_, block)| commands(block)).collect();
    let (ban, _) = commands.iter().find(|(command, _)| command.ends_with("/v1/keys/ban")).expect("a ban");
    let body = words(ban).into_iter().skip_while(|word| word != "--json").nth(1).expect("--json has a value");
    let (server, address) = serve_first_sample("docs/admin.md");
    post(address, "/v1/keys/ban", &body);
    server.await_said("audit: ban_key", 1);
    let log = server.log();
    let logged = log.lines().find(|line| line.contains("audit: ban_key")).expect("it is logged");
    let without_time = |line: &str| line.split_once(' ').expect("a time").1.to_owned();
    assert_eq!(without_time(logged), without_time(shown));
}

#[test]
fn reference_of_the_command_describes_every_option() {
    let page = read("docs/cli.md");
    let mut known = BTreeSet::from(["--version".to_owned()]);
    for subcommand in SUBCOMMANDS {
        let help = help_of(subcommand);
        let section = page.split_once(&format!("\n## `tollgate {subcommand}`\n")).expect("a section").1;
        let section = section.split("\n## ").next().unwrap_or_default();
        known.extend(options(&help));
        let undescribed: Vec<String> = options(&help).difference(&options(section)).cloned().collect();
        assert_eq!(undescribed, ["--help"], "docs/cli.md does not describe these options of {subcommand}");
        for variable in help.split("[env: ").skip(1).filter_map(|rest| rest.split(['=', ']']).next()) {
            assert!(section.contains(&format!("`{variable}`")), "docs/cli.md lacks {variable} at {subcommand}");
        }
    }
    let removed: Vec<String> = options(&page).difference(&known).cloned().collect();
    let foreign = ["--pids-limit", "--ulimit"].map(str::to_owned);
    assert!(removed.iter().all(|option| foreign.contains(option)), "docs/cli.md describes {removed:?}");
}

/// To take them again: `make screenshots`.
#[test]
fn screenshots_are_on_their_page() {
    let page = read("docs/dashboard.md");
    let files = fs::read_dir(root().join("docs/pictures")).expect("the folder is there");
    let names = files.map(|file| file.expect("a file").file_name().into_string().expect("UTF-8"));
    let taken: Vec<String> = names.filter(|name| name.ends_with(".png")).collect();
    assert!(!taken.is_empty(), "run `make screenshots`");
    for name in taken {
        assert!(page.contains(&format!("(pictures/{name})")), "{name} is on no page: remove it");
    }
}

/// To draw them again: `make pictures`.
#[test]
fn pictures_are_those_that_the_command_draws() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut script = Command::new(root.join("tools/draw-pictures"));
    let drawn = script.arg(env!("CARGO_BIN_EXE_tollgate")).arg(folder.path()).status().expect("bash runs");
    assert!(drawn.success());
    let pictures = |folder: &Path| {
        let files = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let files = files.map(|file| file.expect("a file").path());
        files
            .filter(|path| path.extension().is_some_and(|extension| extension == "svg"))
            .map(|path| (path.file_name().expect("a name").to_owned(), fs::read_to_string(path).expect("UTF-8")))
            .collect::<std::collections::BTreeMap<_, _>>()
    };
    let (drawn, kept) = (pictures(folder.path()), pictures(&root.join("docs/pictures")));
    assert_eq!(drawn.keys().collect::<Vec<_>>(), kept.keys().collect::<Vec<_>>(), "run `make pictures`");
    for (name, picture) in drawn {
        assert!(kept[&name] == picture, "docs/pictures/{} is not current: run `make pictures`", name.display());
        let page = read("docs/algorithms.md");
        assert!(page.contains(&format!("(pictures/{})", name.display())), "{} is on no page", name.display());
    }
}
