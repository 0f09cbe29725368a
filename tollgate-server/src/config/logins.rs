//! Finds credentials of stores in the text of rule files.
//!
//! Everyone who can read published rules would see them, and no node needs them: each connects with its own.
//!
//! Deliberately not here: removing credentials from a text. The result would be other rules than those that were
//! checked.

use std::borrow::Cow;

use tollgate_config::internal::SettingError;
use tollgate_config::{Parsed, Position, Problems, RuleFile};

/// The URL schemes of stores.
const SCHEMES: [&str; 7] = [
    "redis://",
    "rediss://",
    "redis+cluster://",
    "rediss+cluster://",
    "redis+sentinel://",
    "rediss+sentinel://",
    "unix://",
];

/// Returns a problem for every line, comments included, that may contain credentials.
pub(crate) fn problems(file: &Parsed) -> Option<Problems> {
    let text = with_unix_newlines(file.source());
    let error = |where_it_is: &str| {
        let message = format!("{where_it_is}, which everyone who reads published rules would see");
        SettingError::new(
            message,
            "remove them from the file, comments included, and pass the URL with its credentials as --store or TOLLGATE_STORE",
        )
    };
    let mut errors: Vec<SettingError> = lines(&text)
        .zip(1..)
        .filter_map(|(line, number)| {
            let column = line[..login(line)?].chars().count() + 1;
            Some(
                error("an @ follows the URL of a store, so this line may contain credentials")
                    .at(Position { line: number, column: u32::try_from(column).unwrap_or(u32::MAX) }),
            )
        })
        .collect();
    // Credentials that are spread over several lines, or written with YAML escapes.
    if errors.is_empty() && file.store.url.has_login() {
        errors.push(error("the store's URL has credentials").of("store"));
    }
    if errors.is_empty()
        && let Some((name, _)) = file.stores.iter().find(|(_, store)| store.url.has_login())
    {
        errors.push(error("the store's URL has credentials").of(name.as_str()).of("stores"));
    }
    (!errors.is_empty()).then(|| file.problems(errors))
}

/// Returns the text with a comment in place of each line that may contain credentials, or a comment in place of the whole
/// text if its store still has credentials then.
pub(crate) fn redacted(text: &str) -> Cow<'_, str> {
    const HIDDEN: &str = "# hidden: the rules may contain the credentials of a store";
    // Credentials end with an @, which YAML can also write with a backslash. Most texts have neither, and need not be
    // read again.
    if !text.contains(['@', '\\']) {
        return text.into();
    }
    shown(text).unwrap_or(Cow::Borrowed(HIDDEN))
}

/// Returns the published text with a comment in place of each line that may contain credentials, or `None` if its store
/// still has credentials then. Another version may have published it.
pub(crate) fn shown(text: &str) -> Option<Cow<'_, str>> {
    let Ok(file) = RuleFile::parse("", text) else {
        // The text does not parse, so the store and its lines are unknown.
        let may_have_login = text.contains('@') || lines(text).any(|line| scheme(line).is_some());
        return (!may_have_login).then_some(text.into());
    };
    let shown = without(text, |line| login(line).is_some());
    let is_gone = || RuleFile::parse("", &*shown).is_ok_and(|file| !has_login(&file));
    (!has_login(&file) || is_gone()).then_some(shown)
}

fn has_login(file: &RuleFile) -> bool {
    file.store.url.has_login() || file.stores.values().any(|store| store.url.has_login())
}

fn without(text: &str, is_hidden: impl Fn(&str) -> bool) -> Cow<'_, str> {
    const HIDDEN: &str = "# hidden: this line may contain the credentials of a store";
    let normalised = with_unix_newlines(text);
    if !lines(&normalised).any(&is_hidden) {
        return text.into();
    }
    let kept: Vec<&str> = lines(&normalised).map(|line| if is_hidden(line) { HIDDEN } else { line }).collect();
    kept.join("\n").into()
}

fn with_unix_newlines(text: &str) -> String {
    text.replace("\r\n", "\n")
}

/// YAML ends a line at a lone carriage return too.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.split(['\n', '\r'])
}

/// Returns the position of a store's URL, in either case.
fn scheme(line: &str) -> Option<usize> {
    let line = line.to_ascii_lowercase();
    SCHEMES.iter().filter_map(|scheme| line.find(scheme)).min()
}

/// Returns the position of a store's URL that may contain credentials. The end of the URL is not considered, because a
/// password may contain any character.
fn login(line: &str) -> Option<usize> {
    scheme(line).filter(|at| line[*at..].contains('@'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HIDDEN: &str = "# hidden: this line may contain the credentials of a store\n";

    fn rendered(text: &str) -> Option<String> {
        problems(&RuleFile::parse("file", text).unwrap()).map(|problems| problems.to_string())
    }

    #[test]
    fn every_line_with_a_login_is_refused_at_its_place_and_hidden() {
        let cases = [
            ("store: redis://ann:hunter2@h:6379/1\n", "", "limits: []\n", 8),
            ("store: 'rediss+cluster://:hunter2@a:1,b:2'\n", "", "limits: []\n", 9),
            ("store: \"redis://:two hunter2@h\"\n", "", "limits: []\n", 9),
            ("# was redis://:it's-hunter2@old\n", "", "limits: []\n", 7),
            ("# was \"Redis://:two hunter2@old\"\n", "", "limits: []\n", 8),
            ("# é REDIS+SENTINEL://:hunter2@a,b/main\n", "", "limits: []\n", 5),
            (
                "    overrides: [{ key: 'redis://svc@db', limit: 5 }]\n",
                "limits:\n  - name: a\n    key: header:x\n    algorithm: fixed_window\n    limit: 1\n    window: 1s\n",
                "",
                25,
            ),
        ];
        for (line, before, after, column) in cases {
            let text = format!("{before}{line}{after}");
            let place = format!("file:{}:{column}: an @ follows", before.lines().count() + 1);
            let rendered = rendered(&text).expect("a refusal");
            assert!(
                rendered.starts_with(&place) && rendered.lines().count() == 1 && !rendered.contains("hunter2"),
                "{rendered}"
            );
            assert_eq!(shown(&text).as_deref(), Some(&*format!("{before}{HIDDEN}{after}")));
            assert_eq!(redacted(&text), format!("{before}{HIDDEN}{after}"));
        }
    }

    #[test]
    fn text_without_a_login_is_published_and_shown_unchanged() {
        for text in [
            "store: redis://h:6379/1\r\nlimits: [] # ask ann@example.com\r\n",
            "# ann@h: see https://example.com/@us\rstore: redis://h\rlimits: []\r",
        ] {
            assert_eq!(rendered(text), None);
            assert_eq!(shown(text).as_deref(), Some(text));
            assert_eq!(redacted(text), text);
        }
    }

    #[test]
    fn a_login_that_no_line_shows_is_told_at_the_store() {
        let urls =
            [r"\x72edis://:hunter2@h", r"redis:\/\/:hunter2@h", r"redis://:hunter2\x40h", "redis://:hunter2\\\n  @h"];
        for url in urls {
            let text = format!("limits: []\nstore: \"{url}\"\n");
            let rendered = rendered(&text).expect("a refusal");
            assert!(
                rendered.starts_with("file:2:8: the store's URL has credentials") && !rendered.contains("hunter2"),
                "{rendered}"
            );
            assert_eq!(shown(&text), None, "{url}");
            assert!(redacted(&text).starts_with("# hidden: the rules may contain"), "{url}");
            // Hiding another line does not make the text safe.
            assert_eq!(shown(&format!("# was redis://:old@h\n{text}")), None, "{url}");
        }
    }

    #[test]
    fn a_text_that_cannot_be_parsed_is_not_shown_if_a_login_may_be_in_it() {
        for login in ["\"redis://:two hunter2@h\"", r#""redis:\/\/:hunter2@h""#, "\"redis://:hun\\\n  ter2\\\n  @h\""] {
            assert_eq!(shown(&format!("store: {login}\nlimits: []\nof_a_newer_version: 1\n")), None);
        }
        assert_eq!(shown("no YAML: [redis://:hunter2"), None);
        let text = "limits: []\nof_a_newer_version: 1\n";
        assert_eq!(shown(text).as_deref(), Some(text));
    }
}
