//! `tollgate init`: every file that it writes is valid and can be served.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use testkit::folder::{folder, folder_with};
use testkit::skip::skipped;
use testkit::tollgate::{Process, RULES, run_in, transcript};

const KEYS: &str = r#"{"keys":[{"kty":"oct","alg":"HS256","k":"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"}]}"#;
const UPSTREAMS: [&str; 4] = ["http://127.0.0.1:3000", "https://[::1]:8443", "echo", "none"];
const KEY_PARTS: [&str; 5] = ["ip", "ip/56", "header:x-user-id", "jwt:sub", "query:api key"];
const NUMBERS: [(&str, &str); 3] = [("1", "1s"), ("100", "1m"), ("50000", "1h30m")];
const STORES: [&str; 2] = ["memory", "redis://:it's secret@127.0.0.1:1/0"];

/// Runs `init` and returns its output.
fn init(folder: &Path, arguments: &[&str]) -> String {
    transcript(&run_in(folder, &[&["init"], arguments].concat()))
}

fn written(folder: &Path, name: &str) -> String {
    fs::read_to_string(folder.join(name)).expect("the file is written")
}

/// Calls `visit` with the options of every kind of file.
fn for_every_kind(mut visit: impl FnMut(&[&str])) {
    for upstream in UPSTREAMS {
        for key in KEY_PARTS {
            for ((limit, window), store) in NUMBERS.into_iter().zip(STORES.into_iter().cycle()) {
                let mut options = vec!["--upstream", upstream, "--key", key, "--limit", limit, "--window", window];
                options.extend(["--store", store, "--yes"]);
                if key.starts_with("jwt:") {
                    options.extend(["--jwks", "keys.json"]);
                }
                visit(&options);
            }
        }
    }
}

#[test]
fn every_file_is_valid_without_a_warning() {
    let folder = folder_with(&[("keys.json", KEYS)]);
    let mut names = vec!["validate".to_owned(), "--strict".to_owned()];
    for_every_kind(|options| {
        let name = format!("{}.yaml", names.len());
        let output = init(folder.path(), &[options, &[&*name]].concat());
        assert!(output.ends_with("exit code 0"), "{options:?}: {output}");
        names.push(name);
    });
    let output = transcript(&run_in(folder.path(), &names.iter().map(String::as_str).collect::<Vec<_>>()));
    assert_eq!(output.matches(": valid, 1 limit\n").count(), names.len() - 2, "{output}");
    assert!(output.ends_with("exit code 0"), "{output}");
}

#[test]
fn the_server_starts_with_each_kind_of_file() {
    for upstream in UPSTREAMS {
        for (key, store) in KEY_PARTS.into_iter().zip(STORES.into_iter().cycle()) {
            let folder = folder_with(&[("keys.json", KEYS)]);
            let options = ["--upstream", upstream, "--key", key, "--jwks", "keys.json", "--store", store];
            let output = init(folder.path(), &options);
            assert!(output.ends_with("exit code 0"), "{output}");
            let listen = if upstream == "none" { "--http" } else { "--listen" };
            let free = "127.0.0.1:0";
            Process::start(folder, &["serve", "--config", RULES, listen, free, "--admin", free]);
        }
    }
}

#[test]
fn the_example_in_the_comments_is_valid_too() {
    let folder = folder();
    init(folder.path(), &["--yes"]);
    let text = written(folder.path(), RULES).replace("  # - name: logins", "  - name: logins");
    let (before, example) = text.split_once("  - name: logins").expect("the example");
    let text = format!("{before}  - name: logins{}", example.replace("  #   ", "    "));
    fs::write(folder.path().join(RULES), text.replace("# shadow:", "shadow:").replace("# trusted", "trusted")).unwrap();
    let output = transcript(&run_in(folder.path(), &["validate", "--strict", RULES]));
    assert_eq!(output, "tollgate.yaml: valid, 2 limits\nexit code 0");
}

#[test]
fn without_a_terminal_the_defaults_are_used_and_reported() {
    let folder = folder();
    insta::assert_snapshot!(init(folder.path(), &["-"]));
    let output = init(folder.path(), &[]);
    let expected = "tollgate.yaml is written. Start it with: tollgate serve --config tollgate.yaml\non stderr:\n\
                    tollgate: no terminal for questions, using defaults: change the file, or set options (tollgate init \
                    --help)\nexit code 0";
    assert_eq!(output, expected);
}

#[test]
fn an_existing_file_is_replaced_only_with_force() {
    let folder = folder_with(&[(RULES, "limits: []\n")]);
    let output = init(folder.path(), &["--yes"]);
    assert_eq!(
        output,
        "on stderr:\ntollgate: tollgate.yaml exists: name another file, `-` to print, or add --force to replace it\n\
         exit code 2"
    );
    assert_eq!(written(folder.path(), RULES), "limits: []\n");
    assert!(init(folder.path(), &["--yes", "--force"]).ends_with("exit code 0"));
    assert!(written(folder.path(), RULES).contains("limit: 100\n"));
}

#[cfg(unix)]
#[test]
fn a_file_with_a_password_is_readable_by_its_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folder_with(&[("old.yaml", "limits: []\n")]);
    let mode = |name: &str| fs::metadata(folder.path().join(name)).unwrap().permissions().mode() & 0o777;
    fs::set_permissions(folder.path().join("old.yaml"), PermissionsExt::from_mode(0o644)).unwrap();
    for name in ["new.yaml", "old.yaml"] {
        let output = init(folder.path(), &["--yes", "--force", "--store", "redis://:secret@127.0.0.1:1", name]);
        assert!(output.contains(" is written, readable by its owner only, because it has the password"), "{output}");
        assert_eq!(mode(name), 0o600, "{name}");
    }
    init(folder.path(), &["--yes", "--store", "redis://127.0.0.1:1", "open.yaml"]);
    assert_eq!(mode("open.yaml") & 0o600, 0o600);
    assert_ne!(mode("open.yaml"), 0o600, "other users may read it, as far as the umask allows");
}

#[test]
fn a_bad_option_is_named_with_its_fix_and_nothing_is_written() {
    let folder = folder();
    let mut outputs = String::new();
    for (option, value) in [
        ("--upstream", "localhost:3000"),
        ("--key", "user"),
        ("--key", "jwt:sub"),
        ("--key", "header:a\nb"),
        ("--jwks", "absent.json"),
        ("--limit", "0"),
        ("--limit", "5, ban: 1"),
        ("--window", "soon"),
        ("--store", "mysql://here"),
    ] {
        let output = init(folder.path(), &["--yes", option, value]);
        assert!(output.ends_with("exit code 2"), "{option} {value}: {output}");
        outputs.push_str(&format!("{option} {value:?}\n{output}\n\n"));
    }
    insta::assert_snapshot!(outputs);
    assert!(!folder.path().join(RULES).exists());
    let output = init(folder.path(), &["--yes", "absent/tollgate.yaml"]);
    assert!(output.contains("name a file in an existing, writable directory\nexit code 2"), "{output}");
}

#[test]
fn key_sets_are_found_from_another_folder() {
    let folder = folder_with(&[("keys.json", KEYS)]);
    fs::create_dir(folder.path().join("rules")).unwrap();
    let options = ["--key", "jwt:sub", "--jwks", "keys.json", "rules/tollgate.yaml"];
    assert!(init(folder.path(), &options).ends_with("exit code 0"));
    let output = transcript(&run_in(folder.path(), &["validate", "--strict", "rules/tollgate.yaml"]));
    assert!(output.ends_with("exit code 0"), "{output}");
}

/// Runs `init` on a terminal, which `script` provides, with these lines as input. Returns what the terminal shows.
fn on_terminal(folder: &Path, arguments: &str, input: &str) -> Option<String> {
    let command = format!("{} init {arguments}", env!("CARGO_BIN_EXE_tollgate"));
    let mut script = Command::new("script");
    script.args(["-qec", &command, "/dev/null"]).current_dir(folder).stdin(Stdio::piped()).stdout(Stdio::piped());
    let Ok(mut script) = script.spawn() else {
        skipped("`script` is not installed (Debian: bsdutils)");
        return None;
    };
    script.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("it reads");
    let output = script.wait_with_output().expect("it ends");
    Some(String::from_utf8(output.stdout).expect("UTF-8").replace("\r\n", "\n"))
}

#[test]
fn questions_on_a_terminal_make_the_file() {
    let folder = folder_with(&[("keys.json", KEYS)]);
    let answers = "localhost:3000\nhttp://localhost:3000\njwt:sub\nabsent.json\nkeys.json\nmany\n250\n\n";
    let Some(shown) = on_terminal(folder.path(), "", answers) else { return };
    for part in
        ["the upstream has no http://", "absent.json", "`limit` must be a whole number", "tollgate.yaml is written"]
    {
        assert!(shown.contains(part), "no {part:?} in {shown}");
    }
    let text = written(folder.path(), RULES);
    for part in
        ["upstream: http://localhost:3000 ", "key: jwt:sub ", "jwks_file: keys.json\n", "limit: 250\n", "store: memory"]
    {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}

#[test]
fn options_answer_their_questions_on_a_terminal() {
    let folder = folder();
    let options = "--upstream none --key ip --store memory";
    let Some(shown) = on_terminal(folder.path(), options, "7\n") else { return };
    assert!(shown.contains("Requests that each client may send per 1m [100]: "), "{shown}");
    assert!(!shown.contains("URL of your service"), "{shown}");
    assert!(written(folder.path(), RULES).contains("limit: 7\n"));
}
