//! The rule file: what is read, what is refused, and in which words.

mod compiled;
mod good;
mod hostile;
mod messages;
mod schema;
