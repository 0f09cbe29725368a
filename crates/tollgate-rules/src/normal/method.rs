//! Methods. They are case-sensitive (RFC 9110, 9.1), but some frameworks read `post` as `POST`.

use std::borrow::Cow;

use super::Unreadable;
use crate::named_key::{InvalidPart, shown};

/// The methods of the IANA registry that services handle.
const REGISTERED: [&str; 19] = [
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "DELETE",
    "CONNECT",
    "OPTIONS",
    "TRACE",
    "PATCH",
    "PROPFIND",
    "PROPPATCH",
    "MKCOL",
    "COPY",
    "MOVE",
    "LOCK",
    "UNLOCK",
    "SEARCH",
    "REPORT",
    "QUERY",
];

/// Rejects a registered method in another case, and `*` as the target of any method but `OPTIONS`.
///
/// # Errors
///
/// If the method or the target is ambiguous.
pub fn check_method(method: &str, target: &str) -> Result<(), Unreadable> {
    if target == "*" && method != "OPTIONS" {
        return Err(Unreadable::AsteriskTarget);
    }
    let is_upper = !method.bytes().any(|byte| byte.is_ascii_lowercase());
    if !is_upper && REGISTERED.iter().any(|registered| registered.eq_ignore_ascii_case(method)) {
        return Err(Unreadable::MethodCase);
    }
    Ok(())
}

/// Returns the form in which limits see a method: in upper case, because some frameworks ignore the case.
pub(crate) fn form(method: &str) -> Cow<'_, str> {
    if method.bytes().any(|byte| byte.is_ascii_lowercase()) {
        Cow::Owned(method.to_ascii_uppercase())
    } else {
        Cow::Borrowed(method)
    }
}

/// Returns the form of a method that a caller names.
///
/// # Errors
///
/// If it is not a method.
pub(crate) fn named(value: &[u8]) -> Result<Cow<'_, str>, InvalidPart> {
    let is_method = http::Method::from_bytes(value).is_ok();
    let text = std::str::from_utf8(value).ok().filter(|_| is_method);
    text.map(form)
        .ok_or_else(|| InvalidPart::new(format!("`{}` is not a method", shown(value)), "write one such as GET"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registered_methods_in_another_case_are_refused() {
        for method in ["post", "Get", "pATCH", "propfind"] {
            assert_eq!(check_method(method, "/"), Err(Unreadable::MethodCase), "{method}");
        }
        for method in ["GET", "POST", "purge", "Custom", "M-SEARCH"] {
            assert_eq!(check_method(method, "/"), Ok(()), "{method}");
        }
        assert_eq!(check_method("GET", "*"), Err(Unreadable::AsteriskTarget));
        assert_eq!(check_method("OPTIONS", "*"), Ok(()));
    }
}
