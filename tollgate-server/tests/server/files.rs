//! `tollgate schema`, `completions` and `man`.

use std::fs;
use std::path::Path;
use std::process::Command;

use testkit::folder::folder;
use testkit::tollgate::{run, run_in, transcript};

fn printed(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn the_schema_is_the_one_in_the_documentation() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/tollgate.schema.json");
    assert_eq!(printed(&["schema"]), fs::read_to_string(path).unwrap());
}

#[test]
fn completions_name_every_command() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = printed(&["completions", shell]);
        for command in ["serve", "validate", "explain", "publish", "init", "schema", "completions", "man"] {
            assert!(script.contains(command), "{shell}: {command}");
        }
    }
    let output = transcript(&run(&["completions", "tcsh"]));
    assert!(output.contains("possible values: bash, elvish, fish, powershell, zsh"), "{output}");
    assert!(output.ends_with("exit code 2"), "{output}");
}

#[test]
fn bash_completes_options() {
    let folder = folder();
    fs::write(folder.path().join("completions"), printed(&["completions", "bash"])).unwrap();
    let script = "source ./completions; COMP_WORDS=(tollgate validate --str); COMP_CWORD=2; _tollgate tollgate --str validate; \
                  echo \"${COMPREPLY[@]}\"";
    let output =
        Command::new("bash").args(["-c", script]).current_dir(folder.path()).output().expect("bash is installed");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "--strict\n", "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn manual_pages_show_the_options_and_examples_of_every_command() {
    let folder = folder();
    assert_eq!(transcript(&run_in(folder.path(), &["man", "."])), "exit code 0");
    let page = |name: &str| fs::read_to_string(folder.path().join(name)).expect(name);
    assert_eq!(printed(&["man"]), page("tollgate.1"));
    let validate = page("tollgate-validate.1");
    assert!(validate.contains(".SH EXAMPLES\n.nf\n  tollgate validate tollgate.yaml\n"), "{validate}");
    assert!(validate.contains("\\-\\-strict"), "{validate}");
    for command in ["serve", "explain", "publish", "init", "schema", "completions", "man"] {
        assert!(page("tollgate.1").contains(&format!("tollgate\\-{command}(1)")), "{command}");
        page(&format!("tollgate-{command}.1"));
    }
    let output = transcript(&run_in(folder.path(), &["man", "absent"]));
    assert!(output.contains("name an existing, writable directory\nexit code 2"), "{output}");
}
