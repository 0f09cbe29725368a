//! Checks cheap rules first, so that a request which they refuse never has its signature verified.
//!
//! Verifying a signature takes far longer than the rest of a decision. A set with both kinds of rules is therefore
//! checked in two phases: first the rules that read no token, and block lists that need none; then, unless one of them
//! refuses, the rules that read claims.

use tollgate::Key;

use super::{Compiled, Mode, OtherKeys, Refused, RuleHit, RuleSet, Shortcut};
use crate::Request;
use crate::rule::TokenUse;

/// A phase of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Rules that read no token.
    WithoutToken,
    /// Rules that read claims.
    WithToken,
}

/// The part of a rule that is checked in the first phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Early {
    /// The whole rule, which reads no token.
    Everything,
    /// Only its block list: addresses and conditions that read no token.
    BlockList,
    Nothing,
}

/// The phase of each rule.
pub(super) struct Phases {
    /// By rule number; empty if no rule reads claims.
    early: Box<[Early]>,
    /// `true` if a rule can refuse a request without its token.
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
    /// Returns `true` if any rule reads the claims of a token.
    #[must_use]
    #[inline]
    pub fn read_tokens(&self) -> bool {
        !self.0.phases.early.is_empty()
    }

    /// Returns `true` if any rule can refuse a request without its token.
    pub(crate) fn refuse_early(&self) -> bool {
        self.0.phases.have_early
    }

    /// Returns `true` if a rule can refuse this request before its token is verified.
    pub(crate) fn is_early(&self, rule: u32, request: &Request<'_>) -> bool {
        match self.0.phases.early.get(rule as usize) {
            Some(Early::Everything) => true,
            Some(Early::BlockList) => self.blocks(rule, request, Shortcut::NONE),
            Some(Early::Nothing) | None => false,
        }
    }

    /// Finds the rules of one phase, like [`find`](Self::find).
    pub(crate) fn find_in(
        &self,
        phase: Phase,
        request: &Request<'_>,
        found: &mut dyn FnMut(&RuleHit, Key<'_>, OtherKeys<'_, '_>),
    ) -> Result<(), (Option<u32>, Refused)> {
        let candidates = self.candidates(request);
        let case = self.check_candidates(request)?;
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

    /// Returns `true` if a rule's block list contains the request other than by its key.
    fn blocks(&self, number: u32, request: &Request<'_>, Shortcut { known, .. }: Shortcut) -> bool {
        let rule = &self.0.rules[number as usize].rule;
        rule.matching.first_miss(request, known).is_none()
            && !rule.exempt.lists_every_reading(request)
            && rule.blocked.lists(request)
    }
}

#[cfg(feature = "file")]
#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use http::{HeaderMap, HeaderName, HeaderValue};
    use proptest::prelude::*;
    use tollgate::{FixedWindow, Limit, MINUTE};
    use tollgate_http::TokenError;

    use super::*;
    use crate::request::Token;
    use crate::set::RuleMatch;
    use crate::{Facts, KeyPart, KeyReadings, Listing, Match, Missing, Networks, Rule};

    /// The parts of a random rule. Numbers are taken modulo the number of choices.
    #[derive(Clone, Debug)]
    struct Choice {
        key: u8,
        matching: u8,
        missing: u8,
        mode: u8,
        lists: u8,
    }

    fn choice() -> impl Strategy<Value = Choice> {
        (0..5_u8, 0..5_u8, 0..3_u8, 0..6_u8, 0..5_u8).prop_map(|(key, matching, missing, mode, lists)| Choice {
            key,
            matching,
            missing,
            mode,
            lists,
        })
    }

    fn rule(number: usize, choice: &Choice) -> Rule {
        let limit = Limit::new(format!("rule-{number}"), FixedWindow::new(5, MINUTE)).unwrap();
        let (user, header) = (KeyPart::jwt("sub"), KeyPart::header(HeaderName::from_static("x-a")));
        let mut rule = Rule::new(limit);
        rule = match choice.key {
            0 => rule,
            1 => rule.key(header),
            2 => rule.key(user),
            3 => rule.key(user).key(header),
            _ => rule.key(KeyPart::ip()),
        };
        let matching = match choice.matching {
            0 | 1 => Match::everything(),
            2 => Match::everything().path("/a/**"),
            3 => Match::everything().host("h.example"),
            _ => {
                rule.expressions_read_token = TokenUse::Matching;
                Match::everything().when(|request| request.claim("sub").is_some_and(|sub| sub == "ann"))
            }
        };
        rule = rule.matching(matching);
        if choice.key > 0 {
            rule = rule.missing([Missing::Skip, Missing::Deny, Missing::Anonymous][usize::from(choice.missing)]);
        }
        rule = rule.mode([Mode::Enforced, Mode::Shadow, Mode::Disabled][usize::from(choice.mode.saturating_sub(3))]);
        let here = || Listing::none().networks(Networks::parse(["192.0.2.1"]).unwrap());
        let key: &[&str] = match choice.key {
            3 => &["ann", "1"],
            4 => &["192.0.2.1"],
            _ => &["ann"],
        };
        match choice.lists {
            0 => rule.blocked(here()),
            1 => rule.exempt(here()),
            2 if choice.key > 0 => rule.blocked(Listing::none().key(key)),
            3 if choice.key > 0 => rule.exempt(Listing::none().key(key)),
            _ => rule,
        }
    }

    type Hits = Vec<(u32, tollgate::LimitId, u64, String)>;

    fn adding(hits: &mut Hits) -> impl FnMut(&RuleHit, Key<'_>, OtherKeys<'_, '_>) {
        |rule_hit, key, _| hits.push((rule_hit.rule, rule_hit.limit, rule_hit.cost, format!("{key:?}")))
    }

    proptest! {
        #[test]
        fn two_phases_find_what_one_finds(
            choices in prop::collection::vec(choice(), 1..6),
            sub in prop::option::of("ann|bob"),
            values in prop::collection::vec("[12]", 0..3),
            (path, host, here) in ("/a/x|/b|/A/x|/a%2Fx|/a/%0a", "h\\.example|i\\.example", any::<bool>()),
        ) {
            let claims = move |_: &Facts<'_>, _: &crate::ReadErrors| Token {
                claims: sub.clone().map(|sub| Arc::new(serde_json::Map::from_iter([("sub".to_owned(), sub.into())])))
                    .ok_or(TokenError::Missing),
                signatures: 0,
            };
            let rules = choices.iter().enumerate().map(|(number, choice)| rule(number, choice));
            let builder = rules.fold(RuleSet::builder().tokens(Arc::new(claims)), crate::RuleSetBuilder::rule);
            let rules = builder.build().unwrap();
            prop_assume!(rules.read_tokens());
            let mut headers = HeaderMap::new();
            for value in &values {
                headers.append("x-a", HeaderValue::from_str(value).unwrap());
            }
            let peer = if here { [192, 0, 2, 1] } else { [192, 0, 2, 2] };
            let facts = Facts::new("GET", &path).host(&host).headers(&headers).peer(peer.into());

            let (mut at_once, mut in_two) = (Hits::new(), Hits::new());
            let one = rules.find(&rules.request(&facts), adding(&mut at_once));
            let request = rules.request(&facts);
            let phases = [Phase::WithoutToken, Phase::WithToken];
            let two = phases.iter().try_for_each(|phase| rules.find_in(*phase, &request, &mut adding(&mut in_two)));
            match (one, two) {
                (Ok(()), Ok(())) => {
                    in_two.sort_unstable_by_key(|hit| hit.0);
                    prop_assert_eq!(at_once, in_two);
                }
                // Several rules may refuse it. The one that is reported must refuse it by itself too.
                (Err(_), Err((Some(number), refused))) => {
                    let request = rules.request(&facts);
                    let result = rules.check_rule(number, &request, &mut KeyReadings::default());
                    prop_assert!(matches!(result, RuleMatch::Refused(_, alone) if alone == refused));
                }
                (Err((None, one)), Err((None, two))) => prop_assert_eq!(one, two),
                (one, two) => prop_assert!(false, "{:?} at once, {:?} in two phases", one, two),
            }
        }
    }
}
