//! The parts of a key, and the normal form of their values.
//!
//! A request has a value ([`KeyPart::of`]), and a caller names one ([`KeyPart::named`]): in a list or an override, or to
//! check, refund, reset, ban or view a key. Both get the same form from the functions in `normal`, chosen by the kind of
//! the part.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use http::HeaderName;
use http::header::HOST;
use smallvec::{SmallVec, smallvec};
use tollgate::InvalidLimit;

use super::certificate::{CertificateField, named_fingerprint};
use super::named_key::{InvalidPart, shown};
use super::normal::address::{GroupText, IpGroup};
use super::normal::base64::Ambiguous;
use super::normal::{Unreadable, cookies, header, host, method, path, query, signed_token};
use super::rule::Missing;
use super::{PathReading, Request};

/// One part of the key of a rule.
#[derive(Clone)]
pub struct KeyPart(pub(super) Source);

/// Parses the header name in a field of a rule.
pub(super) fn header_name(field: &'static str, name: &str) -> Result<HeaderName, InvalidLimit> {
    HeaderName::from_bytes(name.as_bytes()).map_err(|_| {
        let shown: String = name.chars().take(80).collect();
        let problem = format!("`{}` is not the name of a header", shown.escape_debug());
        InvalidLimit::new(field, problem, "use letters, digits and hyphens, as in x-api-key")
    })
}

/// Derives a key part from a request.
type Custom = Arc<dyn Fn(&Request<'_>) -> Option<String> + Send + Sync>;

#[derive(Clone)]
pub(super) enum Source {
    Ip(IpGroup),
    Header(HeaderName),
    /// An invalid header name. Building the rule set reports it.
    Invalid(InvalidLimit),
    Cookie(Box<str>),
    Query(Box<str>),
    Path,
    Method,
    Host,
    Route,
    Jwt(Box<str>),
    Certificate(CertificateField),
    /// The fingerprint of the certificate, with the fingerprints that the lists and overrides of the rule name.
    Fingerprint(Arc<[Box<[u8]>]>),
    Descriptor(Box<str>),
    Constant(Box<str>),
    Custom(Custom),
}

impl KeyPart {
    /// Uses the client's address. IPv6 addresses are grouped by /64, which is what one customer gets.
    #[must_use]
    pub fn ip() -> Self {
        Self(Source::Ip(IpGroup::DEFAULT))
    }

    /// Uses the client's address, with IPv6 addresses grouped by their first `bits`. Returns `None` if `bits` is not
    /// between 1 and 128.
    #[must_use]
    pub fn ip_network(bits: u8) -> Option<Self> {
        IpGroup::of_prefix(bits).map(|group| Self(Source::Ip(group)))
    }

    /// Uses the value of a header. An empty value counts as missing. `Host` is the [`host`](Self::host), and credentials
    /// (`Authorization`) are used without their scheme.
    /// [`RuleSetBuilder::build`](super::RuleSetBuilder::build) reports an invalid name.
    ///
    /// ```
    /// use tollgate_rules::{KeyPart, Rule, RuleSet};
    /// use tollgate::{FixedWindow, Limit, MINUTE};
    ///
    /// let limit = || Limit::new("per-key", FixedWindow::new(10, MINUTE));
    /// assert!(RuleSet::builder().rule(Rule::new(limit()?).key(KeyPart::header("x-api-key"))).build().is_ok());
    /// let error = RuleSet::builder().rule(Rule::new(limit()?).key(KeyPart::header("x api key"))).build().unwrap_err();
    /// assert_eq!(error.problem(), "`x api key` is not the name of a header");
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    #[must_use]
    pub fn header(name: impl AsRef<str>) -> Self {
        Self(match header_name("key", name.as_ref()) {
            Ok(HOST) => Source::Host,
            Ok(name) => Source::Header(name),
            Err(problem) => Source::Invalid(problem),
        })
    }

    /// Returns the error of an invalid part.
    pub(super) fn problem(&self) -> Option<&InvalidLimit> {
        match &self.0 {
            Source::Invalid(problem) => Some(problem),
            _ => None,
        }
    }

    /// Uses the value of a cookie.
    #[must_use]
    pub fn cookie(name: &str) -> Self {
        Self(Source::Cookie(name.into()))
    }

    /// Uses the value of a query parameter.
    #[must_use]
    pub fn query(name: &str) -> Self {
        Self(Source::Query(name.into()))
    }

    /// Uses the path, in the form in which it is matched.
    #[must_use]
    pub fn path() -> Self {
        Self(Source::Path)
    }

    /// Uses the method.
    #[must_use]
    pub fn method() -> Self {
        Self(Source::Method)
    }

    /// Uses the host, in lower case and without its port.
    #[must_use]
    pub fn host() -> Self {
        Self(Source::Host)
    }

    /// Uses the name of the route that serves the request.
    #[must_use]
    pub fn route() -> Self {
        Self(Source::Route)
    }

    /// Uses a claim of a verified token.
    #[must_use]
    pub fn jwt(claim: &str) -> Self {
        Self(Source::Jwt(claim.into()))
    }

    /// Uses a field of the client certificate.
    #[must_use]
    pub fn certificate(field: CertificateField) -> Self {
        Self(match field {
            CertificateField::Fingerprint => Source::Fingerprint(Arc::default()),
            field => Source::Certificate(field),
        })
    }

    /// Sets the fingerprints that the lists and overrides of the rule name for this part.
    pub(super) fn with_listed_fingerprints<'v>(&mut self, values: impl Iterator<Item = &'v [u8]>) {
        if let Source::Fingerprint(listed) = &mut self.0 {
            // Building the rule set reports those that are invalid.
            *listed = values.filter_map(|value| Some(named_fingerprint(value).ok()?.into())).collect();
        }
    }

    /// Uses a descriptor that a client of the decision service sent.
    #[must_use]
    pub fn descriptor(name: &str) -> Self {
        Self(Source::Descriptor(name.into()))
    }

    /// Uses a constant text.
    #[must_use]
    pub fn constant(text: &str) -> Self {
        Self(Source::Constant(text.into()))
    }

    /// Uses the result of a closure. `None` counts as missing.
    pub fn custom(make: impl Fn(&Request<'_>) -> Option<String> + Send + Sync + 'static) -> Self {
        Self(Source::Custom(Arc::new(make)))
    }

    /// Returns `true` if this is known to be the same part as `other`. Closures are never known to be the same.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Source::Ip(one), Source::Ip(other)) => one == other,
            (Source::Header(one), Source::Header(other)) => one == other,
            (Source::Cookie(one), Source::Cookie(other))
            | (Source::Query(one), Source::Query(other))
            | (Source::Jwt(one), Source::Jwt(other))
            | (Source::Descriptor(one), Source::Descriptor(other))
            | (Source::Constant(one), Source::Constant(other)) => one == other,
            (Source::Certificate(one), Source::Certificate(other)) => one == other,
            (Source::Fingerprint(one), Source::Fingerprint(other)) => one == other,
            (Source::Path, Source::Path)
            | (Source::Method, Source::Method)
            | (Source::Host, Source::Host)
            | (Source::Route, Source::Route) => true,
            _ => false,
        }
    }

    /// Returns `true` for a claim of a token.
    pub(super) fn reads_token(&self) -> bool {
        matches!(self.0, Source::Jwt(_))
    }

    /// Returns `true` for a descriptor entry that was not sent, and for any other part that is missing because the
    /// facts are those of a descriptor. The rule then does not apply.
    pub(super) fn is_absent_descriptor(&self, request: &Request<'_>) -> bool {
        let facts = request.facts();
        match &self.0 {
            Source::Descriptor(name) => facts.descriptor(name).is_none(),
            _ => facts.is_descriptor(),
        }
    }

    /// Returns `true` for a descriptor.
    pub(super) fn is_descriptor(&self) -> bool {
        matches!(self.0, Source::Descriptor(_))
    }

    /// Returns `true` if the part depends on the connection only, and not on the request.
    pub(super) fn is_of_connection(&self) -> bool {
        matches!(self.0, Source::Ip(_) | Source::Certificate(_) | Source::Fingerprint(_))
    }

    /// Returns `true` if the part may depend on the reading of the path.
    pub(super) fn may_read_path(&self) -> bool {
        matches!(self.0, Source::Path | Source::Custom(_))
    }

    /// Returns `true` if a client may have two values, which are the same key. See [`other_of`](Self::other_of).
    pub(super) fn may_have_two_names(&self) -> bool {
        matches!(self.0, Source::Fingerprint(_))
    }

    /// Returns the value that a caller may name in place of [`of`](Self::of): the other fingerprint of the certificate.
    pub(super) fn other_of<'r>(&self, request: &'r Request<'_>) -> Option<Piece<'r>> {
        let Source::Fingerprint(listed) = &self.0 else { return None };
        let (_, other) = request.facts().client_certificate()?.key_fingerprints(listed);
        other.map(|other| Piece::borrowed(other.as_bytes()))
    }

    /// Returns the normal form of a value that a caller names: one for each reading of a path, the one that is counted
    /// first, and one of any other value.
    ///
    /// # Errors
    ///
    /// If no request can have the value.
    #[doc(hidden)]
    pub fn named<'v>(
        &self,
        value: &'v [u8],
        missing: Missing,
        path_reading: PathReading,
    ) -> Result<NamedPart<'v>, InvalidPart> {
        if missing == Missing::Anonymous && value == ANONYMOUS {
            return Ok(smallvec![Piece::ANONYMOUS]);
        }
        let piece = match &self.0 {
            Source::Ip(group) => Piece(Form::Short(group.named(value)?)),
            Source::Header(name) => Piece::of_bytes(header::key_text(name, value).map_err(|_| ambiguous(value))?),
            Source::Cookie(_) => {
                Piece::of_bytes(signed_token::normal_of(cookies::plain(value)).map_err(|_| ambiguous(value))?)
            }
            Source::Fingerprint(_) => Piece(Form::Owned(named_fingerprint(value)?)),
            Source::Query(_) => match std::str::from_utf8(value) {
                Ok(text) => {
                    let text = bytes_of(query::trimmed(Cow::Borrowed(text)));
                    Piece::of_bytes(signed_token::normal_of(text).map_err(|_| ambiguous(value))?)
                }
                Err(_) => Piece::borrowed(value),
            },
            Source::Path => return Ok(path::named(value, path_reading)?.into_iter().map(Piece::of).collect()),
            Source::Method => Piece::of(method::named(value)?),
            Source::Host => Piece::of(host::named(value)?),
            Source::Constant(text) if text.as_bytes() == value => Piece::borrowed(value),
            Source::Constant(text) => {
                let problem = format!("`{}` is not the constant of this part", shown(value));
                return Err(InvalidPart::new(problem, format!("write {text}")));
            }
            Source::Invalid(_)
            | Source::Route
            | Source::Jwt(_)
            | Source::Certificate(_)
            | Source::Descriptor(_)
            | Source::Custom(_) => Piece::borrowed(value),
        };
        Ok(smallvec![piece])
    }

    /// Returns `true` if a text names one member of a group of addresses that count as one client.
    #[doc(hidden)]
    pub fn is_wider_than(&self, text: &str) -> bool {
        matches!(self.0, Source::Ip(group) if group.is_wider_than(text))
    }

    /// Returns the fingerprint of the certificate as the client sent it, if the part is one.
    pub(super) fn sent_fingerprint<'r>(&self, request: &'r Request<'_>) -> Option<&'r str> {
        match &self.0 {
            Source::Fingerprint(_) => Some(&request.facts().client_certificate()?.fingerprint),
            _ => None,
        }
    }

    /// Returns the part of a request's key, or `None` if it is missing or empty.
    pub(super) fn of<'r>(&'r self, request: &'r Request<'_>) -> Option<Piece<'r>> {
        let facts = request.facts();
        let bytes = match &self.0 {
            // An address is never empty, and its text is long enough to be built in place.
            Source::Ip(group) => return request.client().map(|client| Piece(Form::Short(group.text(client)))),
            Source::Header(name) => return Piece::of_bytes(request.key_header(name)?).unless_empty(),
            Source::Invalid(_) => return None,
            Source::Cookie(name) => {
                return Self::of_token(request.cookie(name)?, request, || format!("cookie {name}"));
            }
            Source::Query(name) => {
                return Self::of_token(bytes_of(request.query(name)?), request, || format!("query parameter {name}"));
            }
            Source::Path => request.path().as_bytes(),
            Source::Method => return Piece::of(method::form(facts.method())).unless_empty(),
            Source::Host => return Piece::of(request.host()?).unless_empty(),
            Source::Route => facts.route_name()?.as_bytes(),
            Source::Jwt(claim) => return Piece::of(request.claim(claim)?).unless_empty(),
            Source::Certificate(field) => field.of(facts.client_certificate()?)?.as_bytes(),
            Source::Fingerprint(listed) => facts.client_certificate()?.key_fingerprint(listed).as_bytes(),
            Source::Descriptor(name) => request.descriptor(name)?.as_bytes(),
            Source::Constant(text) => text.as_bytes(),
            Source::Custom(make) => return Piece(Form::Owned(make(request)?.into_bytes())).unless_empty(),
        };
        (!bytes.is_empty()).then_some(Piece::borrowed(bytes))
    }

    /// Returns the part with a value that may be a signed token. One that upstreams read differently is recorded as an
    /// error.
    fn of_token<'r>(value: Cow<'r, [u8]>, request: &Request<'_>, place: impl Fn() -> String) -> Option<Piece<'r>> {
        match signed_token::normal_of(value) {
            Ok(value) => Piece::of_bytes(value).unless_empty(),
            Err(Ambiguous) => {
                request.refuse(Unreadable::InvalidCredentials(place().into()));
                None
            }
        }
    }
}

/// Returns the error of a named value that upstreams read differently.
fn ambiguous(value: &[u8]) -> InvalidPart {
    let problem = format!("`{}` is not one token that all servers read alike", shown(value));
    InvalidPart::new(problem, "write the token alone, or a scheme, a space and the token, without special characters")
}

fn bytes_of(text: Cow<'_, str>) -> Cow<'_, [u8]> {
    match text {
        Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
        Cow::Owned(text) => Cow::Owned(text.into_bytes()),
    }
}

/// Formats the part as in the rule file.
impl fmt::Display for KeyPart {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Source::Ip(group) if *group == IpGroup::DEFAULT => out.write_str("ip"),
            Source::Ip(group) => write!(out, "ip/{}", group.bits()),
            Source::Header(name) => write!(out, "header:{name}"),
            Source::Invalid(problem) => write!(out, "{problem}"),
            Source::Cookie(name) => write!(out, "cookie:{name}"),
            Source::Query(name) => write!(out, "query:{name}"),
            Source::Path => out.write_str("path"),
            Source::Method => out.write_str("method"),
            Source::Host => out.write_str("host"),
            Source::Route => out.write_str("route"),
            Source::Jwt(claim) => write!(out, "jwt:{claim}"),
            Source::Certificate(field) => write!(out, "cert:{}", field.as_str()),
            Source::Fingerprint(_) => write!(out, "cert:{}", CertificateField::Fingerprint.as_str()),
            Source::Descriptor(name) => write!(out, "descriptor:{name}"),
            Source::Constant(text) => write!(out, "const:{text}"),
            Source::Custom(_) => out.write_str("custom"),
        }
    }
}

impl fmt::Debug for KeyPart {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "KeyPart({self})")
    }
}

/// The value shared by requests that lack a part of the key.
const ANONYMOUS: &[u8] = b"anonymous";

/// The normal forms of a named value. Only a path has several.
pub(super) type NamedPart<'v> = SmallVec<[Piece<'v>; 1]>;

/// The normal form of a part of a key, borrowed if possible. Only [`KeyPart`] makes one, so a key of pieces is always
/// one by which requests are counted.
#[derive(Clone, Debug)]
pub struct Piece<'r>(Form<'r>);

#[derive(Clone, Debug)]
enum Form<'r> {
    Borrowed(&'r [u8]),
    Short(GroupText),
    Owned(Vec<u8>),
}

impl<'r> Piece<'r> {
    /// The part of a request that lacks it.
    pub(super) const ANONYMOUS: Self = Self::borrowed(ANONYMOUS);

    const fn borrowed(bytes: &'r [u8]) -> Self {
        Self(Form::Borrowed(bytes))
    }

    fn of(text: Cow<'r, str>) -> Self {
        match text {
            Cow::Borrowed(text) => Self::borrowed(text.as_bytes()),
            Cow::Owned(text) => Self(Form::Owned(text.into_bytes())),
        }
    }

    fn of_bytes(bytes: Cow<'r, [u8]>) -> Self {
        match bytes {
            Cow::Borrowed(bytes) => Self::borrowed(bytes),
            Cow::Owned(bytes) => Self(Form::Owned(bytes)),
        }
    }

    fn unless_empty(self) -> Option<Self> {
        (!self.as_bytes().is_empty()).then_some(self)
    }

    pub(super) fn into_owned(self) -> Piece<'static> {
        Piece(match self.0 {
            Form::Borrowed(bytes) => Form::Owned(bytes.to_vec()),
            Form::Short(text) => Form::Short(text),
            Form::Owned(bytes) => Form::Owned(bytes),
        })
    }

    #[inline]
    #[doc(hidden)]
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Form::Borrowed(bytes) => bytes,
            Form::Short(text) => text.as_bytes(),
            Form::Owned(bytes) => bytes,
        }
    }
}

impl PartialEq for Piece<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}
