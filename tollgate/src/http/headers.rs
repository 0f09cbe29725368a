//! The headers of a request, wherever they are.

use ::http::header::{GetAll, ValueIter};
use ::http::{HeaderMap, HeaderName, HeaderValue};

/// The headers of a request: in a map, or as the lines that they came in.
///
/// Making a map takes longer than deciding a request. A server that has parsed a head and does not need the map
/// otherwise gives the lines.
///
/// ```
/// use tollgate::http::Headers;
/// use tollgate::internal::HeaderLine;
///
/// let lines = [HeaderLine { name: "X-User-Id", value: b"user123" }];
/// let headers = Headers::from(&lines[..]);
/// assert_eq!(headers.get("x-user-id"), Some(&b"user123"[..]));
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Headers<'a> {
    /// In a map.
    Map(&'a HeaderMap),
    /// As they came. There may be several of one name.
    Lines(&'a [HeaderLine<'a>]),
}

/// A line of a head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeaderLine<'a> {
    /// In any case.
    pub name: &'a str,
    /// Without the space around it.
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
    /// The first value of that name, which is in lower case.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&'a [u8]> {
        match self {
            Self::Map(map) => map.get(name).map(HeaderValue::as_bytes),
            Self::Lines(lines) => lines.iter().find(|line| line.is(name)).map(|line| line.value),
        }
    }

    /// The first value of that name. Where there is a map, it is found by the name's hash, which is ready.
    #[must_use]
    #[inline]
    pub fn get_named(&self, name: &HeaderName) -> Option<&'a [u8]> {
        match self {
            Self::Map(map) => map.get(name).map(HeaderValue::as_bytes),
            Self::Lines(_) => self.get(name.as_str()),
        }
    }

    /// Returns whether it is known that no name has several values. Lines would have to be searched for that.
    #[cfg_attr(not(feature = "rules"), expect(dead_code, reason = "rules ask for it"))]
    #[inline]
    pub(crate) fn has_no_repeats(&self) -> bool {
        match self {
            Self::Map(map) => map.len() == map.keys_len(),
            Self::Lines(_) => false,
        }
    }

    /// All values of that name, in their order.
    pub fn get_all<'n>(&self, name: &'n HeaderName) -> HeaderValues<'a, 'n> {
        HeaderValues(match self {
            Self::Map(map) => Kind::Map(GetAll::into_iter(map.get_all(name))),
            Self::Lines(lines) => Kind::Lines(lines.iter(), name.as_str()),
        })
    }

    /// All names, as they are written.
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
    /// Whether it is of that name, which is in lower case.
    #[must_use]
    pub fn is(&self, name: &str) -> bool {
        // Many clients write them in lower case, which is compared for less.
        self.name.len() == name.len() && (self.name == name || self.name.eq_ignore_ascii_case(name))
    }
}

/// The values of a name.
#[derive(Debug)]
pub struct HeaderValues<'a, 'n>(Kind<'a, 'n>);

#[derive(Debug)]
enum Kind<'a, 'n> {
    Map(ValueIter<'a, HeaderValue>),
    Lines(std::slice::Iter<'a, HeaderLine<'a>>, &'n str),
}

impl<'a> Iterator for HeaderValues<'a, '_> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        match &mut self.0 {
            Kind::Map(values) => values.next().map(HeaderValue::as_bytes),
            Kind::Lines(lines, name) => lines.find(|line| line.is(name)).map(|line| line.value),
        }
    }
}

impl DoubleEndedIterator for HeaderValues<'_, '_> {
    fn next_back(&mut self) -> Option<Self::Item> {
        match &mut self.0 {
            Kind::Map(values) => values.next_back().map(HeaderValue::as_bytes),
            Kind::Lines(lines, name) => lines.rfind(|line| line.is(name)).map(|line| line.value),
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
