//! The commands of one connection.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use tollgate::Decision;
use tollgate_rules::{Check, NamedRule, Outcome, RuleSet, StoreUnavailable};

use super::Engine;
use super::catalogue;
use super::reply::{Replies, Version};
use super::transaction::{Queued, Transaction};
use crate::service::throttle::{CannotThrottle, Numbers, Throttled};
use crate::service::tokens::Credential;

/// The longest client name that `CLIENT SETNAME` and `HELLO` accept. Names are kept in memory.
const MAX_CLIENT_NAME: usize = 128;

/// The result of executing a command.
pub(super) enum Step {
    /// The reply is written.
    Replied,
    /// The reply is not ready. It is sent before the replies to later commands.
    Pending(BoxFuture<'static, Vec<u8>>),
    /// The command is queued, and the reply says so.
    Queued,
    /// The header of an array is written. The replies to these commands follow.
    Execute(Queued),
    /// The reply is written, and the connection has to be closed.
    Close,
}

/// The state of one connection.
pub(super) struct Session {
    engine: Arc<Engine>,
    pub(super) replies: Replies,
    id: u64,
    name: Vec<u8>,
    /// The token that the client has sent.
    credential: Option<Credential>,
    /// The commands that wait for `EXEC`.
    transaction: Option<Transaction>,
}

/// The arguments of a command, without its name.
type Words<'a, 'b> = &'a [Cow<'b, [u8]>];

/// The format of a reply with a decision.
#[derive(Clone, Copy)]
enum Form {
    /// The format of redis-cell's reply to `CL.THROTTLE`.
    Cell,
    /// The format of throttlecrab's reply to `THROTTLE`.
    Throttlecrab,
}

impl Session {
    pub(super) fn new(engine: Arc<Engine>, id: u64) -> Self {
        Self { engine, replies: Replies::new(), id, name: Vec::new(), credential: None, transaction: None }
    }

    /// Returns whether the client needs no token, or has sent one that is still valid.
    fn is_authenticated(&mut self) -> bool {
        match (&self.engine.tokens, &mut self.credential) {
            (None, _) => true,
            (Some(tokens), Some(credential)) => tokens.is_valid(credential),
            (Some(_), None) => false,
        }
    }

    /// Reads the tokens again if their file has changed.
    pub(super) fn refresh_tokens(&self) {
        if let Some(tokens) = &self.engine.tokens {
            tokens.refresh();
        }
    }

    /// Executes one request, or queues it. `bytes` is the request as the client sent it.
    pub(super) fn execute(&mut self, request: &[Cow<'_, [u8]>], bytes: &[u8]) -> Step {
        let Some((name, words)) = request.split_first() else { return Step::Replied };
        let mut lower = [0; 16];
        let name_known = match lower.get_mut(..name.len()) {
            Some(lower) => {
                lower.copy_from_slice(name);
                lower.make_ascii_lowercase();
                &*lower
            }
            None => &[],
        };
        let needs_no_token = matches!(name_known, b"auth" | b"hello" | b"quit" | b"reset" | b"post" | b"host:");
        if !needs_no_token && !self.is_authenticated() {
            self.replies.refusal("NOAUTH Authentication required.");
            self.abort();
            return Step::Replied;
        }
        if self.transaction.is_some() && !runs_in_transaction(name_known) {
            return self.queue(request, bytes);
        }
        match name_known {
            b"cl.throttle" => return self.throttle(Form::Cell, words),
            b"throttle" => return self.throttle(Form::Throttlecrab, words),
            b"tollgate.check" => return self.check("tollgate.check", words, Taking::Cost),
            b"tollgate.peek" => return self.check("tollgate.peek", words, Taking::Nothing),
            b"tollgate.refund" => return self.change("tollgate.refund", words, Change::Refund),
            b"tollgate.reset" => return self.change("tollgate.reset", words, Change::Reset),
            b"ping" => match words {
                [] => self.replies.status("PONG"),
                [text] => self.replies.bulk(text),
                _ => self.wrong_arguments("ping"),
            },
            b"echo" => match words {
                [text] => self.replies.bulk(text),
                _ => self.wrong_arguments("echo"),
            },
            b"quit" => {
                self.replies.status("OK");
                return Step::Close;
            }
            b"reset" => {
                self.replies.version = Version::Resp2;
                self.name.clear();
                self.credential = None;
                self.transaction = None;
                self.replies.status("RESET");
            }
            // A browser was tricked into sending an HTTP request here. The rest of it must not be executed.
            b"post" | b"host:" => return Step::Close,
            b"hello" => self.hello(words),
            b"auth" => self.auth(words),
            b"select" => self.select(words),
            b"client" => self.client(words),
            b"command" => catalogue::command(&mut self.replies, words),
            b"info" => self.info(),
            b"multi" | b"exec" | b"discard" | b"unwatch" if !words.is_empty() => {
                self.wrong_arguments(&String::from_utf8_lossy(name_known));
                self.abort();
            }
            b"multi" => match self.transaction {
                Some(_) => self.replies.error("ERR MULTI calls can not be nested"),
                None => {
                    self.transaction = Some(Transaction::default());
                    self.replies.status("OK");
                }
            },
            b"exec" => return self.exec(),
            b"discard" => match self.transaction.take() {
                Some(_) => self.replies.status("OK"),
                None => self.replies.error("ERR DISCARD without MULTI"),
            },
            b"watch" => {
                self.replies.error("ERR WATCH is not supported: leave it out, a check needs no transaction to be safe");
                self.abort();
            }
            b"unwatch" => self.replies.status("OK"),
            _ => self.unknown(name, words),
        }
        Step::Replied
    }

    /// Queues a command until `EXEC`, if it could be executed then.
    fn queue(&mut self, request: &[Cow<'_, [u8]>], bytes: &[u8]) -> Step {
        let (Some(transaction), Some((name, words))) = (&mut self.transaction, request.split_first()) else {
            return Step::Replied;
        };
        let lower = name.to_ascii_lowercase();
        match catalogue::takes(name, request.len()) {
            _ if matches!(&lower[..], b"hello" | b"auth") => {
                self.replies.error("ERR Command not allowed inside a transaction");
            }
            None => self.unknown(name, words),
            Some(false) => self.wrong_arguments(&String::from_utf8_lossy(&lower)),
            Some(true) => match transaction.push(bytes) {
                Ok(()) => {
                    self.replies.status("QUEUED");
                    return Step::Queued;
                }
                Err(problem) => self.replies.error(&format!("ERR {problem}")),
            },
        }
        self.abort();
        Step::Replied
    }

    /// Keeps the commands that are queued, if any, from being executed.
    fn abort(&mut self) {
        if let Some(transaction) = &mut self.transaction {
            transaction.abort();
        }
    }

    fn exec(&mut self) -> Step {
        let Some(transaction) = self.transaction.take() else {
            self.replies.error("ERR EXEC without MULTI");
            return Step::Replied;
        };
        match transaction.into_queued() {
            Some(queued) => {
                self.replies.array(queued.commands);
                Step::Execute(queued)
            }
            None => {
                self.replies.error("EXECABORT Transaction discarded because of previous errors.");
                Step::Replied
            }
        }
    }

    /// `CL.THROTTLE key max_burst count period [quantity]`
    fn throttle(&mut self, form: Form, words: Words<'_, '_>) -> Step {
        let name = match form {
            Form::Cell => "cl.throttle",
            Form::Throttlecrab => "throttle",
        };
        let (key, burst, count, period, quantity) = match words {
            [key, burst, count, period] => (key, burst, count, period, None),
            [key, burst, count, period, quantity] => (key, burst, count, period, Some(quantity)),
            _ => {
                let usage = format!("ERR usage: {} key max_burst count period [quantity]", name.to_uppercase());
                self.replies.error(&usage);
                return Step::Replied;
            }
        };
        let parsed = (|| {
            let capacity = form.capacity(number("max_burst", burst)?)?;
            let period = Duration::from_secs(at_least_one("period", period)?);
            let numbers = Numbers { capacity, count: at_least_one("count", count)?, period };
            let quantity = quantity.map_or(Ok(1), |text| number("quantity", text))?;
            self.engine.throttles.commands.check(numbers, key, quantity).map_err(|error| match error {
                // The limit has one name for both commands.
                CannotThrottle::Invalid(error) => {
                    format!("{}: {}: {}", name.to_uppercase(), error.problem(), error.fix())
                }
                other => other.to_string(),
            })
        })();
        match parsed {
            Ok(Throttled::Ready(decision)) => form.write(&mut self.replies, &decision),
            Ok(Throttled::Pending(decision)) => {
                let version = self.replies.version;
                return Step::Pending(Box::pin(async move {
                    let mut replies = Replies::with_version(version);
                    form.write(&mut replies, &decision.await);
                    replies.bytes
                }));
            }
            Err(problem) => self.replies.error(&format!("ERR {problem}")),
        }
        Step::Replied
    }

    /// `TOLLGATE.CHECK limit key… [cost] [PLAN name]`, with as many key parts as the limit has.
    fn check(&mut self, name: &'static str, words: Words<'_, '_>, taking: Taking) -> Step {
        let Some((limit, words)) = words.split_first() else {
            self.wrong_arguments(name);
            return Step::Replied;
        };
        match self.begin_check(limit, words, taking) {
            Ok(Check::Ready(outcome)) => {
                if taking == Taking::Cost {
                    self.engine.decisions.record([&outcome]);
                }
                write_outcome(&mut self.replies, &outcome);
                Step::Replied
            }
            Ok(pending @ Check::Pending(_)) => {
                let (engine, version) = (Arc::clone(&self.engine), self.replies.version);
                Step::Pending(Box::pin(async move {
                    let outcome = pending.outcome().await;
                    if taking == Taking::Cost {
                        engine.decisions.record([&outcome]);
                    }
                    let mut replies = Replies::with_version(version);
                    write_outcome(&mut replies, &outcome);
                    replies.bytes
                }))
            }
            Err(problem) => {
                self.replies.error(&format!("ERR {problem}"));
                Step::Replied
            }
        }
    }

    fn begin_check(&self, limit: &[u8], words: Words<'_, '_>, taking: Taking) -> Result<Check, String> {
        let gate = self.engine.gate.pinned();
        let rules = gate.rules();
        let last = if taking == Taking::Cost { Some("cost") } else { None };
        let Target { limit, key, number } = target(&rules, limit, words, last)?;
        let cost = if taking == Taking::Cost { number.unwrap_or(1) } else { 0 };
        gate.check_by_name(limit, &key, cost).map_err(|error| error.to_string())
    }

    /// `TOLLGATE.REFUND limit key… [units] [PLAN name]` and `TOLLGATE.RESET limit key… [PLAN name]`. The reply is that of a peek afterwards.
    fn change(&mut self, name: &'static str, words: Words<'_, '_>, change: Change) -> Step {
        let Some((limit, words)) = words.split_first() else {
            self.wrong_arguments(name);
            return Step::Replied;
        };
        match self.begin_change(limit, words, change) {
            Ok(mut changing) => {
                // In memory, a change is made before the next command of a pipeline. On Redis, commands are sent in
                // order once all are read.
                if self.engine.gate.redis().is_none()
                    && let Some(changed) = (&mut changing).now_or_never()
                {
                    write_change(&mut self.replies, changed);
                    return Step::Replied;
                }
                let version = self.replies.version;
                Step::Pending(Box::pin(async move {
                    let mut replies = Replies::with_version(version);
                    write_change(&mut replies, changing.await);
                    replies.bytes
                }))
            }
            Err(problem) => {
                self.replies.error(&format!("ERR {problem}"));
                Step::Replied
            }
        }
    }

    fn begin_change(&self, limit: &[u8], words: Words<'_, '_>, change: Change) -> Result<Changing, String> {
        let gate = self.engine.gate.pinned();
        let rules = gate.rules();
        let last = if change == Change::Refund { Some("units") } else { None };
        let Target { limit, key, number } = target(&rules, limit, words, last)?;
        let changing = match change {
            Change::Refund => gate.refund_by_name(limit, &key, number.unwrap_or(1)),
            Change::Reset => gate.reset_by_name(limit, &key),
        };
        changing.map_err(|error| error.to_string())
    }

    /// `HELLO [version [AUTH user password] [SETNAME name]]`
    fn hello(&mut self, words: Words<'_, '_>) {
        let mut words = words.iter();
        let version = match words.next() {
            None => self.replies.version,
            Some(text) => match &**text {
                b"2" => Version::Resp2,
                b"3" => Version::Resp3,
                text if text.iter().all(u8::is_ascii_digit) => {
                    return self.replies.error("NOPROTO unsupported protocol version");
                }
                _ => return self.replies.error("ERR Protocol version is not an integer or out of range"),
            },
        };
        while let Some(option) = words.next() {
            if option.eq_ignore_ascii_case(b"auth")
                && let (Some(_), Some(token)) = (words.next(), words.next())
            {
                if !self.authenticate(token) {
                    return;
                }
            } else if option.eq_ignore_ascii_case(b"setname")
                && let Some(name) = words.next()
            {
                if let Err(problem) = self.set_name(name) {
                    return self.replies.error(problem);
                }
            } else {
                let problem = format!("ERR Syntax error in HELLO option '{}'", shown(option));
                return self.replies.error(&problem);
            }
        }
        if !self.is_authenticated() {
            return self.replies.refusal("NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol version at the same time");
        }
        self.replies.version = version;
        let id = self.id as i64;
        let replies = &mut self.replies;
        replies.map(7);
        for (key, value) in [("server", "tollgate"), ("version", env!("CARGO_PKG_VERSION"))] {
            replies.bulk(key.as_bytes());
            replies.bulk(value.as_bytes());
        }
        replies.bulk(b"proto");
        replies.integer(if version == Version::Resp3 { 3 } else { 2 });
        replies.bulk(b"id");
        replies.integer(id);
        for (key, value) in [("mode", "standalone"), ("role", "master")] {
            replies.bulk(key.as_bytes());
            replies.bulk(value.as_bytes());
        }
        replies.bulk(b"modules");
        replies.array(0);
    }

    fn auth(&mut self, words: Words<'_, '_>) {
        match words {
            // Clients may send a user name too. Only the token is checked.
            [token] | [_, token] => {
                if self.authenticate(token) {
                    self.replies.status("OK");
                }
            }
            _ => self.wrong_arguments("auth"),
        }
    }

    /// Checks a token. If it is not valid, writes the error and returns false.
    fn authenticate(&mut self, token: &[u8]) -> bool {
        let Some(tokens) = &self.engine.tokens else {
            self.replies.error("ERR AUTH <password> called without any password configured for this listener");
            return false;
        };
        // Another token that is not valid leaves the client authenticated, as in Redis.
        match tokens.authenticate(token) {
            Some(credential) => {
                self.credential = Some(credential);
                true
            }
            None => {
                self.replies.refusal("WRONGPASS invalid username-password pair or user is disabled.");
                false
            }
        }
    }

    /// Accepts only database 0: there are no others.
    fn select(&mut self, words: Words<'_, '_>) {
        match words {
            [index] => match number("index", index) {
                Ok(0) => self.replies.status("OK"),
                Ok(_) => self.replies.error("ERR DB index is out of range: there is only database 0"),
                Err(_) => self.replies.error("ERR invalid DB index: use 0"),
            },
            _ => self.wrong_arguments("select"),
        }
    }

    fn client(&mut self, words: Words<'_, '_>) {
        let Some((subcommand, words)) = words.split_first() else { return self.wrong_arguments("client") };
        match (&subcommand.to_ascii_lowercase()[..], words) {
            (b"setname", [name]) => match self.set_name(name) {
                Ok(()) => self.replies.status("OK"),
                Err(problem) => self.replies.error(problem),
            },
            (b"getname", []) if self.name.is_empty() => self.replies.null(),
            (b"getname", []) => self.replies.bulk(&self.name),
            (b"id", []) => self.replies.integer(self.id as i64),
            (b"setinfo", [_, _]) => self.replies.status("OK"),
            (b"info", []) => {
                let line = format!("id={} name={} db=0\n", self.id, String::from_utf8_lossy(&self.name));
                self.replies.bulk(line.as_bytes());
            }
            (b"no-evict" | b"no-touch", [_]) => self.replies.status("OK"),
            _ => {
                let problem = format!("ERR unknown subcommand '{}' of CLIENT", shown(subcommand));
                self.replies.error(&problem);
            }
        }
    }

    fn set_name(&mut self, name: &[u8]) -> Result<(), &'static str> {
        if name.len() > MAX_CLIENT_NAME {
            return Err("ERR the client name is too long: use 128 bytes or less");
        }
        if name.iter().any(|byte| !(b'!'..=b'~').contains(byte)) {
            return Err("ERR Client names cannot contain spaces, newlines or special characters.");
        }
        self.name = name.to_vec();
        Ok(())
    }

    /// Clients read this to find out the version, and whether the server has loaded its data.
    fn info(&mut self) {
        let text = format!(
            "# Server\r\nredis_version:7.0.0\r\ntollgate_version:{}\r\nredis_mode:standalone\r\nos:{}\r\n\r\n\
             # Persistence\r\nloading:0\r\n\r\n# Replication\r\nrole:master\r\n",
            env!("CARGO_PKG_VERSION"),
            std::env::consts::OS,
        );
        self.replies.bulk(text.as_bytes());
    }

    fn wrong_arguments(&mut self, name: &str) {
        self.replies.error(&format!("ERR wrong number of arguments for '{name}' command"));
    }

    fn unknown(&mut self, name: &[u8], words: Words<'_, '_>) {
        let words: String = words.iter().take(3).map(|word| format!("'{}' ", shown(word))).collect();
        self.replies.error(&format!("ERR unknown command '{}', with args beginning with: {words}", shown(name)));
    }
}

/// Returns whether a command is executed at once although others wait for `EXEC`.
fn runs_in_transaction(name: &[u8]) -> bool {
    matches!(name, b"multi" | b"exec" | b"discard" | b"watch" | b"quit" | b"reset" | b"post" | b"host:")
}

/// Whether a check takes its cost.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taking {
    Cost,
    Nothing,
}

/// A change of a key's state.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    Refund,
    Reset,
}

type Changing = BoxFuture<'static, Result<Outcome, StoreUnavailable>>;

/// The limit and the key of a command, and the number after them.
struct Target<'w> {
    limit: NamedRule<'w>,
    key: Vec<&'w [u8]>,
    number: Option<u64>,
}

/// Reads the words of a command: a limit, as many key parts as it has, the optional number named `last`, and the optional
/// plan.
fn target<'w>(
    rules: &RuleSet,
    limit: &'w [u8],
    words: &'w [Cow<'_, [u8]>],
    last: Option<&str>,
) -> Result<Target<'w>, String> {
    let name = std::str::from_utf8(limit).map_err(|_| unknown_limit(limit))?;
    let parts = rules.key_parts(name).ok_or_else(|| unknown_limit(limit))?;
    let wrong = || {
        let usage = parts.iter().fold(String::new(), |usage, part| format!("{usage} {part}"));
        let last = last.map_or(String::new(), |last| format!(" [{last}]"));
        format!("wrong number of arguments: send {name}{usage}{last} [PLAN name]")
    };
    let (key, rest) = words.split_at_checked(parts.len()).ok_or_else(wrong)?;
    let (rest, plan) = match rest {
        [rest @ .., option, plan] if option.eq_ignore_ascii_case(b"plan") => (rest, Some(plan)),
        rest => (rest, None),
    };
    let number = match (rest, last) {
        ([], _) => None,
        ([text], Some(last)) => Some(number(last, text)?),
        _ => return Err(wrong()),
    };
    let plan = plan.map(|plan| std::str::from_utf8(plan).map_err(|_| format!("unknown plan '{}'", shown(plan))));
    let limit = NamedRule::new(name).plan(plan.transpose()?);
    Ok(Target { limit, key: key.iter().map(|part| &**part).collect(), number })
}

fn unknown_limit(limit: &[u8]) -> String {
    format!("unknown limit '{}': name a limit of the rule file", shown(limit))
}

impl Form {
    /// Returns the capacity of a bucket with this `max_burst`. redis-cell allows one more than the burst at once,
    /// throttlecrab the burst.
    fn capacity(self, max_burst: u64) -> Result<u64, String> {
        match self {
            Self::Cell => max_burst.checked_add(1).ok_or_else(|| format!("max_burst {max_burst} is too large")),
            Self::Throttlecrab if max_burst == 0 => Err("max_burst is 0: use 1 or more".to_owned()),
            Self::Throttlecrab => Ok(max_burst),
        }
    }

    fn write(self, replies: &mut Replies, decision: &Decision) {
        let (limit, remaining) = (decision.quota() as i64, decision.remaining() as i64);
        let reset = whole_seconds(decision.reset_after());
        let retry = decision.retry_after().filter(|_| !decision.is_allowed()).map(whole_seconds);
        replies.array(5);
        match self {
            Self::Cell => {
                replies.integer(i64::from(!decision.is_allowed()));
                replies.integer(limit);
                replies.integer(remaining);
                replies.integer(retry.unwrap_or(-1));
                replies.integer(reset);
            }
            Self::Throttlecrab => {
                replies.integer(i64::from(decision.is_allowed()));
                replies.integer(limit);
                replies.integer(remaining);
                replies.integer(reset);
                replies.integer(retry.unwrap_or(0));
            }
        }
    }
}

/// Writes an outcome as a map, with times in milliseconds, rounded up. `retry_after_ms` is -1 if the request is
/// allowed, or if waiting does not help.
fn write_outcome(replies: &mut Replies, outcome: &Outcome) {
    let decision = outcome.decision();
    let denied = decision.filter(|_| !outcome.is_allowed());
    let number = |replies: &mut Replies, name: &str, value: Option<i64>| {
        replies.bulk(name.as_bytes());
        match value {
            Some(value) => replies.integer(value),
            None => replies.null(),
        }
    };
    replies.map(6);
    number(replies, "allowed", Some(i64::from(outcome.is_allowed())));
    number(replies, "limit", decision.map(|decision| decision.quota() as i64));
    number(replies, "remaining", decision.map(|decision| decision.remaining() as i64));
    number(replies, "reset_after_ms", decision.map(|decision| whole_millis(decision.reset_after())));
    number(replies, "retry_after_ms", Some(denied.and_then(Decision::retry_after).map_or(-1, whole_millis)));
    replies.bulk(b"reason");
    match outcome.refusal() {
        Some(refusal) => replies.bulk(crate::service::http::reason(refusal).as_bytes()),
        None => replies.null(),
    }
}

fn write_change(replies: &mut Replies, changed: Result<Outcome, StoreUnavailable>) {
    match changed {
        Ok(outcome) => write_outcome(replies, &outcome),
        Err(error) => replies.error(&format!("TRYAGAIN {error}")),
    }
}

/// Returns whole seconds, rounded up, so that a client that waits this long is admitted.
fn whole_seconds(span: Duration) -> i64 {
    span.as_micros().div_ceil(1_000_000) as i64
}

fn whole_millis(span: Duration) -> i64 {
    span.as_micros().div_ceil(1_000) as i64
}

/// Parses a number of at least 0.
fn number(field: &str, text: &[u8]) -> Result<u64, String> {
    let parsed =
        std::str::from_utf8(text).ok().filter(|text| !text.starts_with('+')).and_then(|text| text.parse().ok());
    parsed.ok_or_else(|| format!("{field} '{}' is not a number: use a whole number from 0", shown(text)))
}

/// Parses a number of at least 1.
fn at_least_one(field: &str, text: &[u8]) -> Result<u64, String> {
    match number(field, text)? {
        0 => Err(format!("{field} is 0: use 1 or more")),
        number => Ok(number),
    }
}

/// Formats a word of a request for an error message: printable and short.
fn shown(word: &[u8]) -> String {
    const MAX: usize = 64;
    let text = word[..word.len().min(MAX)].escape_ascii().to_string();
    if word.len() > MAX { text + "…" } else { text }
}
