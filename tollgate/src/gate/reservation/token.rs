//! Reservation tokens: bytes with a signature, in base64url.
//!
//! | bytes | |
//! |---|---|
//! | 1 | version: 1 |
//! | 8 | id of the signing secret |
//! | 16 | random id of the reservation |
//! | 8 | expiry in microseconds, by the clock of the store |
//! | 8 | offset of the wall clock, in memory |
//! | 1 | whether a charge follows |
//! | | charge: name of the limit, name of the variant or nothing, key (each after its length in 2 bytes), units, time |
//! | 32 | HMAC-SHA256 of everything before |
//!
//! Numbers are big-endian. The content is signed, not encrypted: a holder of the token can read it.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

use super::ReservationError;

/// The longest token that is read. Longer than any token that is issued: names of limits are short, and keys are
/// fingerprints in memory and bounded on Redis.
const MAX_TOKEN_CHARS: usize = 4096;
const VERSION: u8 = 1;
const TAG_BYTES: usize = 32;

pub(super) type Secret = [u8; 32];
pub(super) type ReservationId = [u8; 16];

/// The content of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) id: ReservationId,
    pub(super) expires_at: u64,
    pub(super) wall_offset: i64,
    /// The units that were taken, if any.
    pub(super) charge: Option<ReservedCharge>,
}

/// Units that a reservation has taken from a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReservedCharge {
    pub(crate) limit: String,
    pub(crate) variant: Option<String>,
    /// The key as its store identifies it.
    pub(crate) key: Vec<u8>,
    pub(crate) units: u64,
    pub(crate) at: u64,
}

/// Signs and verifies tokens.
pub(super) struct Signer {
    key: hmac::Key,
    id: [u8; 8],
}

impl Signer {
    pub(super) fn new(secret: &Secret) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
        let mut id = [0; 8];
        id.copy_from_slice(&hmac::sign(&key, b"id").as_ref()[..8]);
        Self { key, id }
    }

    /// Returns 8 bytes that hide the fingerprint of a key: a holder of the token must not learn it.
    pub(super) fn mask(&self, id: ReservationId) -> u64 {
        let tag = hmac::sign(&self.key, &[b"mask", &id[..]].concat());
        let mut mask = [0; 8];
        mask.copy_from_slice(&tag.as_ref()[..8]);
        u64::from_be_bytes(mask)
    }

    /// Returns the token as text, or an error if it would be too long.
    pub(super) fn sign(&self, token: &Token) -> Result<String, ReservationError> {
        let mut bytes = vec![VERSION];
        bytes.extend(self.id);
        bytes.extend(token.id);
        bytes.extend(token.expires_at.to_be_bytes());
        bytes.extend(token.wall_offset.to_be_bytes());
        bytes.push(u8::from(token.charge.is_some()));
        if let Some(charge) = &token.charge {
            let variant = charge.variant.as_deref().unwrap_or_default();
            for text in [charge.limit.as_bytes(), variant.as_bytes(), &charge.key] {
                let length = u16::try_from(text.len()).map_err(|_| ReservationError::TooLong)?;
                bytes.extend(length.to_be_bytes());
                bytes.extend_from_slice(text);
            }
            bytes.extend(charge.units.to_be_bytes());
            bytes.extend(charge.at.to_be_bytes());
        }
        let tag = hmac::sign(&self.key, &bytes);
        bytes.extend_from_slice(tag.as_ref());
        let text = URL_SAFE_NO_PAD.encode(bytes);
        if text.len() > MAX_TOKEN_CHARS { Err(ReservationError::TooLong) } else { Ok(text) }
    }

    pub(super) fn verify(&self, text: &str) -> Result<Token, ReservationError> {
        if text.len() > MAX_TOKEN_CHARS {
            return Err(ReservationError::Invalid);
        }
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| ReservationError::Invalid)?;
        let signed = bytes.len().checked_sub(TAG_BYTES).ok_or(ReservationError::Invalid)?;
        let (signed, tag) = bytes.split_at(signed);
        let mut reader = Reader(signed);
        if reader.array::<1>()? != [VERSION] {
            return Err(ReservationError::Invalid);
        }
        if reader.array::<8>()? != self.id {
            return Err(ReservationError::Foreign);
        }
        hmac::verify(&self.key, signed, tag).map_err(|_| ReservationError::Invalid)?;
        let id = reader.array()?;
        let expires_at = u64::from_be_bytes(reader.array()?);
        let wall_offset = i64::from_be_bytes(reader.array()?);
        let charge = match reader.array()? {
            [0] => None,
            _ => Some(reader.charge()?),
        };
        if reader.0.is_empty() {
            Ok(Token { id, expires_at, wall_offset, charge })
        } else {
            Err(ReservationError::Invalid)
        }
    }
}

/// Returns random bytes. Without them, no token is safe.
pub(super) fn random<const N: usize>() -> Result<[u8; N], ReservationError> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| ReservationError::NoRandomness)?;
    Ok(bytes)
}

/// The bytes that are not read yet.
struct Reader<'t>(&'t [u8]);

impl<'t> Reader<'t> {
    fn bytes(&mut self, count: usize) -> Result<&'t [u8], ReservationError> {
        let (read, rest) = self.0.split_at_checked(count).ok_or(ReservationError::Invalid)?;
        self.0 = rest;
        Ok(read)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ReservationError> {
        self.bytes(N)?.try_into().map_err(|_| ReservationError::Invalid)
    }

    fn text(&mut self) -> Result<&'t [u8], ReservationError> {
        let length = u16::from_be_bytes(self.array()?);
        self.bytes(length.into())
    }

    fn name(&mut self) -> Result<String, ReservationError> {
        String::from_utf8(self.text()?.to_vec()).map_err(|_| ReservationError::Invalid)
    }

    fn charge(&mut self) -> Result<ReservedCharge, ReservationError> {
        let (limit, variant, key) = (self.name()?, self.name()?, self.text()?.to_vec());
        let variant = Some(variant).filter(|variant| !variant.is_empty());
        let (units, at) = (u64::from_be_bytes(self.array()?), u64::from_be_bytes(self.array()?));
        Ok(ReservedCharge { limit, variant, key, units, at })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn token() -> impl Strategy<Value = Token> {
        let charge = (".{0,20}", proptest::option::of(".{1,9}"), proptest::collection::vec(any::<u8>(), 0..200));
        let charge = (charge, any::<u64>(), any::<u64>())
            .prop_map(|((limit, variant, key), units, at)| ReservedCharge { limit, variant, key, units, at });
        (any::<ReservationId>(), any::<u64>(), any::<i64>(), proptest::option::of(charge))
            .prop_map(|(id, expires_at, wall_offset, charge)| Token { id, expires_at, wall_offset, charge })
    }

    proptest! {
        #[test]
        fn a_signed_token_is_read_as_it_was_written(token in token()) {
            let signer = Signer::new(&[7; 32]);
            prop_assert_eq!(signer.verify(&signer.sign(&token).unwrap()).unwrap(), token);
        }

        #[test]
        fn a_changed_or_foreign_token_is_refused(token in token(), position in any::<usize>(), flip in 1_u8..) {
            let signer = Signer::new(&[7; 32]);
            let text = signer.sign(&token).unwrap();
            prop_assert_eq!(Signer::new(&[8; 32]).verify(&text).unwrap_err(), ReservationError::Foreign);
            let mut bytes = URL_SAFE_NO_PAD.decode(&text).unwrap();
            let position = position % bytes.len();
            bytes[position] ^= flip;
            let changed = signer.verify(&URL_SAFE_NO_PAD.encode(&bytes)).unwrap_err();
            let expected =
                if (1..9).contains(&position) { ReservationError::Foreign } else { ReservationError::Invalid };
            prop_assert_eq!(changed, expected);
        }

        #[test]
        fn no_text_panics(text in ".{0,300}") {
            prop_assert!(Signer::new(&[7; 32]).verify(&text).is_err());
        }
    }
}
