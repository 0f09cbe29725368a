//! The rule file.
