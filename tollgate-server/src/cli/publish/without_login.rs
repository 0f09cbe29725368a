//! Rule files without the user and password of their store: whoever may look at what is published would see them, and no
//! node needs them, for it has read what is published with its own.

use tollgate::rules::file::{RuleFile, StoreUrl};

/// How the schemes of stores end.
const SCHEMES: [&str; 4] = ["redis://", "rediss://", "+cluster://", "+sentinel://"];

/// The file without users and passwords in URLs of stores, in comments as well. `None` if it is written so that its store
/// has one all the same, as by an escape in the midst of it.
pub(super) fn without_login(text: &str) -> Option<String> {
    let cut = without_logins(text);
    let left = RuleFile::parse("", &cut).is_ok_and(|file| has_login(&file.store));
    (!left).then_some(cut)
}

fn has_login(store: &StoreUrl) -> bool {
    // What is shown of a store is its URL without them.
    matches!(store, StoreUrl::Redis(url) if *url != store.to_string())
}

fn without_logins(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + "://".len());
        kept.push_str(before);
        rest = after;
        if SCHEMES.iter().any(|scheme| before.ends_with(scheme)) {
            let url = after.split(|letter: char| letter.is_whitespace() || matches!(letter, '"' | '\'')).next();
            rest = url.and_then(|url| url.rfind('@')).map_or(after, |at| &after[at + 1..]);
        }
    }
    kept + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_is_cut_out_of_every_url_of_a_store_and_nothing_else_is() {
        let cases = [
            ("store: redis://ann:hunter2@h:6379/1 # or ann@h\n", "store: redis://h:6379/1 # or ann@h\n"),
            ("store: 'rediss://:p@ss:/word@h'\n# was redis://:old@h\n", "store: 'rediss://h'\n# was redis://h\n"),
            ("store: \"redis+cluster://ann:hunter2@a:1,b:2\"\n", "store: \"redis+cluster://a:1,b:2\"\n"),
            ("{store: redis+sentinel://:hunter2@a,b/main}", "{store: redis+sentinel://a,b/main}"),
            ("store: redis://h\n# see https://example.com/@us\n", "store: redis://h\n# see https://example.com/@us\n"),
            ("no YAML: [redis://:hunter2@h", "no YAML: [redis://h"),
        ];
        for (text, cut) in cases {
            assert_eq!(without_login(text).as_deref(), Some(cut));
        }
    }

    #[test]
    fn a_login_that_cannot_be_found_is_told() {
        for url in [r"\x72edis://:hunter2@h", r"redis:\/\/:hunter2@h", r"redis://:hunter2\x40h", "redis://:two words@h"]
        {
            assert_eq!(without_login(&format!("store: \"{url}\"\nlimits: []\n")), None, "{url}");
        }
    }
}
