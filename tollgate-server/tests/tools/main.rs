//! `tollgate simulate`, `replay` and the other tools, as their users run them.

mod replay;
mod suggesting;
