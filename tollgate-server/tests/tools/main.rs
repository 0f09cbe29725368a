//! `tollgate simulate`, `replay` and the other tools, as their users run them.

mod output;
mod replay;
mod suggesting;
