//! Characters that mislead the reader of a log or a terminal.

/// Returns whether a character is a control character, a format character (the category Cf of Unicode), or a separator of
/// lines or paragraphs. They control a terminal, end a line, and hide or reorder the text around them.
pub fn is_control_or_format(letter: char) -> bool {
    letter.is_control()
        || matches!(letter,
            '\u{ad}'
            | '\u{600}'..='\u{605}'
            | '\u{61c}'
            | '\u{6dd}'
            | '\u{70f}'
            | '\u{890}'..='\u{891}'
            | '\u{8e2}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{110bd}'
            | '\u{110cd}'
            | '\u{13430}'..='\u{1343f}'
            | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0001}'
            | '\u{e0020}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invisible_characters_are_found_and_texts_are_not() {
        let invisible = "\0\t\n\r\u{1b}\u{7f}\u{85}\u{9b}\u{ad}\u{61c}\u{200b}\u{200d}\u{200e}\u{2028}\u{2029}\u{202a}\u{202e}\
                         \u{2060}\u{2066}\u{2069}\u{feff}\u{fffb}\u{e0041}";
        assert!(invisible.chars().all(is_control_or_format));
        // Combining characters and spaces of other scripts are text.
        assert!(!"größe 한국어 हिन्दी ไทย עברית\u{3000}\u{a0}e\u{301}🦀".chars().any(is_control_or_format));
    }
}
