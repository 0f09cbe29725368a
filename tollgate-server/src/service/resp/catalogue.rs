//! The commands, as clients learn about them: `COMMAND`, `COMMAND INFO` and `COMMAND DOCS`. `redis-cli` shows the
//! arguments of a command while it is typed.

use std::borrow::Cow;

use super::reply::Replies;

/// A command. Its arity is that of Redis: the number of words including the name, or the minimum if negative.
struct Command {
    name: &'static str,
    arity: i64,
    summary: &'static str,
    arguments: &'static [Argument],
}

/// The name of an argument, its type, and whether it may be left out or repeated.
type Argument = (&'static str, &'static str, &'static [&'static str]);

const OPTIONAL: &[&str] = &["optional"];

/// A limit of the rule file and its key.
const LIMIT: Argument = ("limit", "string", &[]);
const KEY: Argument = ("key", "string", &["optional", "multiple"]);
/// The plan whose numbers apply, after the word `PLAN`.
const PLAN: Argument = ("plan", "string", OPTIONAL);

/// The arguments of `CL.THROTTLE` and `THROTTLE`.
const BUCKET: &[Argument] = &[
    ("key", "key", &[]),
    ("max_burst", "integer", &[]),
    ("count", "integer", &[]),
    ("period", "integer", &[]),
    ("quantity", "integer", OPTIONAL),
];

const COMMANDS: [Command; 20] = [
    Command {
        name: "auth",
        arity: -2,
        summary: "Authenticates the connection with a token.",
        arguments: &[("username", "string", OPTIONAL), ("password", "string", &[])],
    },
    Command {
        name: "cl.throttle",
        arity: -5,
        summary: "Takes units from a token bucket, and replies as redis-cell does.",
        arguments: BUCKET,
    },
    Command {
        name: "client",
        arity: -2,
        summary: "Names and describes the connection.",
        arguments: &[("subcommand", "string", &[]), ("argument", "string", &["optional", "multiple"])],
    },
    Command {
        name: "command",
        arity: -1,
        summary: "Describes the commands.",
        arguments: &[("subcommand", "string", OPTIONAL), ("command-name", "string", &["optional", "multiple"])],
    },
    Command { name: "discard", arity: 1, summary: "Drops the commands queued since MULTI.", arguments: &[] },
    Command { name: "echo", arity: 2, summary: "Returns the given string.", arguments: &[("message", "string", &[])] },
    Command { name: "exec", arity: 1, summary: "Executes the commands queued since MULTI.", arguments: &[] },
    Command {
        name: "hello",
        arity: -1,
        summary: "Handshakes with the server: version of the protocol, token and name.",
        arguments: &[("protover", "integer", OPTIONAL), ("option", "string", &["optional", "multiple"])],
    },
    Command { name: "info", arity: -1, summary: "Returns the version of the server.", arguments: &[] },
    Command { name: "multi", arity: 1, summary: "Queues the commands that follow, until EXEC.", arguments: &[] },
    Command {
        name: "ping",
        arity: -1,
        summary: "Returns PONG, or the given string.",
        arguments: &[("message", "string", OPTIONAL)],
    },
    Command { name: "quit", arity: -1, summary: "Closes the connection.", arguments: &[] },
    Command { name: "reset", arity: 1, summary: "Resets the connection.", arguments: &[] },
    Command {
        name: "select",
        arity: 2,
        summary: "Selects database 0, the only one.",
        arguments: &[("index", "integer", &[])],
    },
    Command {
        name: "throttle",
        arity: -5,
        summary: "Takes units from a token bucket, and replies as throttlecrab does.",
        arguments: BUCKET,
    },
    Command {
        name: "tollgate.check",
        arity: -2,
        summary: "Takes units of a key from a limit of the rule file.",
        arguments: &[LIMIT, KEY, ("cost", "integer", OPTIONAL), PLAN],
    },
    Command {
        name: "tollgate.peek",
        arity: -2,
        summary: "Returns the quota that a key has left, and takes nothing.",
        arguments: &[LIMIT, KEY, PLAN],
    },
    Command {
        name: "tollgate.refund",
        arity: -2,
        summary: "Gives units of a key back.",
        arguments: &[LIMIT, KEY, ("units", "integer", OPTIONAL), PLAN],
    },
    Command {
        name: "tollgate.reset",
        arity: -2,
        summary: "Gives a key its whole quota back.",
        arguments: &[LIMIT, KEY, PLAN],
    },
    Command { name: "unwatch", arity: 1, summary: "Has no effect: nothing can be watched.", arguments: &[] },
];

/// Returns whether a command takes this number of words, including its name, or `None` if it is unknown.
pub(super) fn takes(name: &[u8], words: usize) -> Option<bool> {
    let arity = find(name)?.arity;
    let words = words as i64;
    Some(if arity < 0 { words >= -arity } else { words == arity })
}

/// Replies to `COMMAND` with these arguments.
pub(super) fn command(replies: &mut Replies, words: &[Cow<'_, [u8]>]) {
    let subcommand = words.first().map(|word| word.to_ascii_lowercase());
    let named = words.get(1..).unwrap_or_default();
    match subcommand.as_deref() {
        None => {
            replies.array(COMMANDS.len());
            COMMANDS.iter().for_each(|command| command.write_info(replies));
        }
        Some(b"count") => replies.integer(COMMANDS.len() as i64),
        Some(b"list") => {
            replies.array(COMMANDS.len());
            COMMANDS.iter().for_each(|command| replies.bulk(command.name.as_bytes()));
        }
        Some(b"info") if named.is_empty() => {
            replies.array(COMMANDS.len());
            COMMANDS.iter().for_each(|command| command.write_info(replies));
        }
        Some(b"info") => {
            replies.array(named.len());
            for name in named {
                match find(name) {
                    Some(command) => command.write_info(replies),
                    None => replies.null(),
                }
            }
        }
        Some(b"docs") => {
            // Commands that do not exist are left out, as in Redis.
            let wanted: Vec<&Command> = match named {
                [] => COMMANDS.iter().collect(),
                named => named.iter().filter_map(|name| find(name)).collect(),
            };
            replies.map(wanted.len());
            wanted.into_iter().for_each(|command| command.write_docs(replies));
        }
        Some(_) => replies.error("ERR unknown subcommand of COMMAND: use COUNT, LIST, INFO or DOCS"),
    }
}

fn find(name: &[u8]) -> Option<&'static Command> {
    COMMANDS.iter().find(|command| name.eq_ignore_ascii_case(command.name.as_bytes()))
}

impl Command {
    /// Writes name, arity, flags, and the positions of keys.
    fn write_info(&self, replies: &mut Replies) {
        replies.array(6);
        replies.bulk(self.name.as_bytes());
        replies.integer(self.arity);
        replies.array(1);
        replies.status("fast");
        // The positions of the first and the last key, and the step between keys. Cluster clients use them to find the
        // slot.
        let key = i64::from(matches!(self.name, "cl.throttle" | "throttle"));
        (0..3).for_each(|_| replies.integer(key));
    }

    /// Writes the name and the documentation, in the form that `redis-cli` reads.
    fn write_docs(&self, replies: &mut Replies) {
        replies.bulk(self.name.as_bytes());
        replies.map(if self.arguments.is_empty() { 3 } else { 4 });
        for (field, text) in [("summary", self.summary), ("since", env!("CARGO_PKG_VERSION")), ("group", "module")] {
            replies.bulk(field.as_bytes());
            replies.bulk(text.as_bytes());
        }
        if self.arguments.is_empty() {
            return;
        }
        replies.bulk(b"arguments");
        replies.array(self.arguments.len());
        for (name, kind, flags) in self.arguments {
            replies.map(if flags.is_empty() { 2 } else { 3 });
            for text in ["name", name, "type", kind] {
                replies.bulk(text.as_bytes());
            }
            if !flags.is_empty() {
                replies.bulk(b"flags");
                replies.array(flags.len());
                flags.iter().for_each(|flag| replies.status(flag));
            }
        }
    }
}
