//! Cheap rules first: a request that a rule without a token refuses never has its signature verified.
//!
//! To verify a signature takes far longer than all the rest of a decision. A set with rules of both kinds is therefore
//! asked in two phases: first the rules that read no token, and the block lists that need none; then, unless one of them
//! refuses, the rules that read claims.

use smallvec::SmallVec;

use super::{Compiled, Finding, MAX_KEY_PARTS, Met, Mode, Pieces, Refused, RuleSet, Shortcut};
use crate::key::Key;
use crate::rules::Request;
use crate::rules::key_part::Piece;
use crate::rules::rule::TokenUse;

/// The rules that are asked together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Those that read no token.
    WithoutToken,
    /// Those that read claims.
    WithToken,
}

/// What a rule contributes to the first phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Early {
    /// All of it: the rule reads no token.
    Everything,
    /// Its block list alone: addresses and conditions that read no token.
    BlockList,
    Nothing,
}

/// When each rule of a set is asked.
pub(super) struct Phases {
    /// By the number of the rule; empty if no rule reads claims.
    early: Box<[Early]>,
    /// Whether any rule can refuse a request without its token.
    have_early: bool,
}

impl Phases {
    pub(super) fn of(rules: &[Compiled]) -> Self {
        let early: Box<[Early]> = rules.iter().map(Early::of).collect();
        let read_token = early.iter().any(|one| *one != Early::Everything);
        let have_early = early.iter().any(|one| *one != Early::Nothing);
        Self { early: if read_token { early } else { Box::default() }, have_early }
    }
}

impl Early {
    fn of(compiled: &Compiled) -> Self {
        let rule = &compiled.rule;
        match rule.token_use() {
            TokenUse::Never => Self::Everything,
            TokenUse::Counting if rule.mode == Mode::Enforced && rule.blocked.has_more_than_keys() => Self::BlockList,
            TokenUse::Counting | TokenUse::Matching => Self::Nothing,
        }
    }
}

impl RuleSet {
    /// Whether any rule reads the claims of a token.
    #[must_use]
    #[inline]
    pub fn read_tokens(&self) -> bool {
        !self.0.phases.early.is_empty()
    }

    /// Whether any rule can refuse a request without its token.
    pub(crate) fn refuse_early(&self) -> bool {
        self.0.phases.have_early
    }

    /// Whether a rule can refuse this request before its token is verified.
    pub(crate) fn is_early(&self, rule: u32, request: &Request<'_>) -> bool {
        match self.0.phases.early.get(rule as usize) {
            Some(Early::Everything) => true,
            Some(Early::BlockList) => self.blocks(rule, request, Shortcut::NONE),
            Some(Early::Nothing) | None => false,
        }
    }

    /// As [`find`](Self::find), for the rules of one phase.
    pub(crate) fn find_in(
        &self,
        phase: Phase,
        request: &Request<'_>,
        found: &mut dyn FnMut(&Finding, Key<'_>),
    ) -> Result<(), (Option<u32>, Refused)> {
        let (candidates, case) = self.candidates(request)?;
        for number in candidates {
            let shortcut = self.shortcut(number, case);
            match (self.0.phases.early[number as usize], phase) {
                (Early::Everything, Phase::WithoutToken) | (Early::BlockList | Early::Nothing, Phase::WithToken) => {
                    self.find_one(number, request, shortcut, found)?;
                }
                (Early::BlockList, Phase::WithoutToken) => {
                    let is_blocked = self.blocks(number, request, shortcut);
                    self.0.rules[number as usize].check_read(number, request)?;
                    if is_blocked {
                        return Err((Some(number), Refused::Blocked));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn find_one(
        &self,
        number: u32,
        request: &Request<'_>,
        shortcut: Shortcut,
        found: &mut dyn FnMut(&Finding, Key<'_>),
    ) -> Result<(), (Option<u32>, Refused)> {
        let mut pieces = Pieces::new();
        let met = self.meet_by(number, request, &mut pieces, shortcut);
        self.0.rules[number as usize].check_read(number, request)?;
        match met {
            Met::Hit(finding) => match &pieces[..] {
                [one] => found(&finding, Key::from(one.as_bytes())),
                several => {
                    let parts: SmallVec<[&[u8]; MAX_KEY_PARTS]> = several.iter().map(Piece::as_bytes).collect();
                    found(&finding, Key::byte_parts(&parts));
                }
            },
            Met::Refused(number, refused) => return Err((Some(number), refused)),
            Met::Not(_) | Met::Disabled | Met::Lacks(_) | Met::Exempt => {}
        }
        Ok(())
    }

    /// Whether the block list of a rule names the request by anything but its key.
    fn blocks(&self, number: u32, request: &Request<'_>, Shortcut { known, .. }: Shortcut) -> bool {
        let rule = &self.0.rules[number as usize].rule;
        rule.matching.first_miss(request, known).is_none()
            && !rule.exempt.lists_every_reading(request)
            && rule.blocked.lists(request)
    }
}
