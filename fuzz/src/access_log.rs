//! Access logs: no line ends the process, and every request that is read has a method and a target.

/// Reads each line in every format.
pub fn access_log(input: &[u8]) {
    input.split(|byte| *byte == b'\n').for_each(tollgate_server::fuzzing::read_log_line);
}
