//! Keys as text for people.

use std::fmt::Write as _;

use tollgate_rules::internal::limited::LimitedKey;

/// Returns a key as text: its parts, separated by commas, or its hash if they are not kept.
pub fn key_text(key: &LimitedKey) -> String {
    let Some(parts) = &key.parts else { return format!("{:016x}", key.hash) };
    let mut text = printable(&parts.join(", "));
    if key.is_truncated {
        text.push('…');
    }
    text
}

/// Escapes control characters and invisible ones, which could control a terminal or reorder text.
pub fn printable(text: &str) -> String {
    let mut printable = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '\'' | '"' | '\\' => printable.push(char),
            // Combining characters are escaped too. Those without anything to combine with would join what is before.
            _ => _ = write!(printable, "{}", char.escape_debug()),
        }
    }
    printable
}

#[cfg(test)]
mod tests {
    use tollgate_rules::internal::limited::KeyTexts;

    use super::*;

    #[test]
    fn keys_cannot_control_a_terminal() {
        assert_eq!(printable("a\u{1b}[31m\u{7}\r\n\u{9b}"), "a\\u{1b}[31m\\u{7}\\r\\n\\u{9b}");
        assert_eq!(printable("\u{202e}evil\u{2066}\u{200b}"), "\\u{202e}evil\\u{2066}\\u{200b}");
        assert_eq!(printable("größe ’한국어’ \"x\" C:\\"), "größe ’한국어’ \"x\" C:\\");
    }

    #[test]
    fn truncated_keys_end_in_an_ellipsis() {
        let key = LimitedKey::new("l", &["ann", &"x".repeat(500)], KeyTexts::Kept);
        let text = key_text(&key);
        assert!(text.starts_with("ann, xxx") && text.ends_with('…'), "{text}");
        let key = LimitedKey::new("l", &["ann"], KeyTexts::Hashed);
        assert_eq!(key_text(&key).len(), 16);
    }
}
