//! Names of query parameters and cookies, as frameworks read them.
//!
//! PHP writes dots, spaces and an opening bracket as underscores, and ends a name at a null byte; ASP.NET ignores case;
//! PHP, Rails and Express read `name[]`, `name[0]` and `[name]` as `name`. A name that any of them takes for the one of
//! a limit is that one.

/// Returns `true` if a framework may take the decoded name `given` for `name`.
pub(super) fn reads_as(given: &[u8], name: &[u8]) -> bool {
    let given = given.split(|byte| *byte == 0).next().unwrap_or_default();
    is_folded_alike(given, name) || is_folded_alike(base(given), name)
}

/// Returns `true` if two names are equal after folding.
fn is_folded_alike(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| folded(*one) == folded(*other))
}

fn folded(byte: u8) -> u8 {
    match byte {
        b'.' | b' ' | b'[' => b'_',
        _ => byte.to_ascii_lowercase(),
    }
}

/// Returns a name without the array syntax of PHP, Rails and Express.
fn base(name: &[u8]) -> &[u8] {
    match name.strip_prefix(b"[") {
        Some(inner) => inner.split(|byte| *byte == b']').next().unwrap_or_default(),
        None => name.split(|byte| *byte == b'[').next().unwrap_or_default().trim_ascii_end(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_a_name_are_one() {
        for given in [
            "user_id",
            "user.id",
            "user id",
            "user[id",
            "USER_ID",
            "user_id[]",
            "User.Id[0]",
            "[user_id]",
            "user_id\0x",
        ] {
            assert!(reads_as(given.as_bytes(), b"user_id"), "{given}");
        }
        for given in ["", "user", "userid", "user-id", "user_id2", "[user][id]", "\0user_id", "user]id"] {
            assert!(!reads_as(given.as_bytes(), b"user_id"), "{given}");
        }
        assert!(reads_as(b"user_id", b"user.id") && reads_as(b"user.id", b"USER.ID"));
        assert!(!reads_as("é".as_bytes(), "É".as_bytes()), "only ASCII letters are folded");
    }
}
