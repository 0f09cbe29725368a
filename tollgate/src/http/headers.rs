//! The headers of a request, in a map or as parsed lines.

use ::http::header::{GetAll, ValueIter};
use ::http::{HeaderMap, HeaderName, HeaderValue};

/// The headers of a request.
///
/// A reference to a [`HeaderMap`] converts to it, so pass `&map` where a function takes `impl Into<Headers>`.
///
/// ```
/// use http::{HeaderMap, HeaderValue};
/// use tollgate::http::Headers;
///
/// let mut map = HeaderMap::new();
/// map.insert("x-user-id", HeaderValue::from_static("user123"));
/// let headers = Headers::from(&map);
/// assert_eq!(headers.get("x-user-id"), Some(&b"user123"[..]));
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Headers<'a> {
    /// Headers in a map.
    Map(&'a HeaderMap),
    /// Header lines in the order in which they arrived. A name can occur several times. Building a map takes longer
    /// than deciding a request, so the gateway passes the parsed lines where it needs no map.
    #[doc(hidden)]
    Lines(&'a [HeaderLine<'a>]),
}

/// A header line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeaderLine<'a> {
    /// The name, in any case.
    pub name: &'a str,
    /// The value, without surrounding white space.
    pub value: &'a [u8],
}

impl<'a> From<&'a HeaderMap> for Headers<'a> {
    fn from(map: &'a HeaderMap) -> Self {
        Self::Map(map)
    }
}

impl<'a> From<&'a [HeaderLine<'a>]> for Headers<'a> {
    fn from(lines: &'a [HeaderLine<'a>]) -> Self {
        Self::Lines(lines)
    }
}

impl<'a> Headers<'a> {
    /// Returns the first value of a header. `name` must be in lower case.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&'a [u8]> {
        match self {
            Self::Map(map) => map.get(name).map(HeaderValue::as_bytes),
            Self::Lines(lines) => lines.iter().find(|line| line.is(name)).map(|line| line.value),
        }
    }

    /// Returns the first value of a header. In a map, it is found by the precomputed hash of the name.
    #[must_use]
    #[inline]
    pub fn get_named(&self, name: &HeaderName) -> Option<&'a [u8]> {
        match self {
            Self::Map(map) => map.get(name).map(HeaderValue::as_bytes),
            Self::Lines(_) => self.get(name.as_str()),
        }
    }

    /// Returns `true` if no name is known to have several values. Lines would have to be searched, so they return
    /// `false`.
    #[cfg_attr(not(feature = "rules"), expect(dead_code, reason = "only rules need it"))]
    #[inline]
    pub(crate) fn has_no_repeats(&self) -> bool {
        match self {
            Self::Map(map) => map.len() == map.keys_len(),
            Self::Lines(_) => false,
        }
    }

    /// Returns all values of a header, in their order.
    pub fn get_all<'n>(&self, name: &'n HeaderName) -> HeaderValues<'a, 'n> {
        HeaderValues(match self {
            Self::Map(map) => ValuesIter::Map(GetAll::into_iter(map.get_all(name))),
            Self::Lines(lines) => ValuesIter::Lines(lines.iter(), name.as_str()),
        })
    }

    /// Returns all names, as written.
    pub fn names(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let (map, lines) = match self {
            Self::Map(map) => (Some(map.keys()), None),
            Self::Lines(lines) => (None, Some(lines.iter())),
        };
        let of_map = map.into_iter().flatten().map(HeaderName::as_str);
        of_map.chain(lines.into_iter().flatten().map(|line| line.name))
    }
}

impl HeaderLine<'_> {
    /// Returns `true` if the line has this name. `name` must be in lower case.
    #[must_use]
    pub fn is(&self, name: &str) -> bool {
        // Many clients send lower-case names, which are cheaper to compare.
        self.name.len() == name.len() && (self.name == name || self.name.eq_ignore_ascii_case(name))
    }
}

/// The values of a header.
#[derive(Debug)]
pub struct HeaderValues<'a, 'n>(ValuesIter<'a, 'n>);

#[derive(Debug)]
enum ValuesIter<'a, 'n> {
    Map(ValueIter<'a, HeaderValue>),
    Lines(std::slice::Iter<'a, HeaderLine<'a>>, &'n str),
}

impl<'a> Iterator for HeaderValues<'a, '_> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        match &mut self.0 {
            ValuesIter::Map(values) => values.next().map(HeaderValue::as_bytes),
            ValuesIter::Lines(lines, name) => lines.find(|line| line.is(name)).map(|line| line.value),
        }
    }
}

impl DoubleEndedIterator for HeaderValues<'_, '_> {
    fn next_back(&mut self) -> Option<Self::Item> {
        match &mut self.0 {
            ValuesIter::Map(values) => values.next_back().map(HeaderValue::as_bytes),
            ValuesIter::Lines(lines, name) => lines.rfind(|line| line.is(name)).map(|line| line.value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_and_lines_are_read_alike() {
        let lines = [("Accept", "a"), ("X-Id", "1"), ("accept", "b")]
            .map(|(name, value)| HeaderLine { name, value: value.as_bytes() });
        let mut map = HeaderMap::new();
        for line in lines {
            map.append(line.name.parse::<HeaderName>().unwrap(), HeaderValue::from_bytes(line.value).unwrap());
        }
        let (accept, absent) = (HeaderName::from_static("accept"), HeaderName::from_static("absent"));
        for headers in [Headers::from(&map), Headers::from(&lines[..])] {
            assert_eq!((headers.get("x-id"), headers.get("absent")), (Some(&b"1"[..]), None));
            assert_eq!(headers.get_named(&accept), Some(&b"a"[..]));
            assert_eq!(headers.get_all(&accept).collect::<Vec<_>>(), [b"a", b"b"]);
            assert_eq!(headers.get_all(&accept).rev().collect::<Vec<_>>(), [b"b", b"a"]);
            assert_eq!(headers.get_all(&absent).next(), None);
            let mut names: Vec<String> = headers.names().map(str::to_ascii_lowercase).collect();
            names.sort();
            names.dedup();
            assert_eq!(names, ["accept", "x-id"]);
        }
    }
}
