//! Reads YAML into nodes, within bounds.
//!
//! Aliases and merge keys (`<<: *defaults`) are expanded here, and count against the same bounds as other values, so
//! that no file expands beyond them. Tags are rejected: they have no meaning in a rule file. Deliberately not here:
//! anything about rules.

use std::collections::HashMap;

use granit_parser::{ErrorKind, Event, Marker, Parser, ScalarStyle, ScanError, Span};

use super::node::{Entry, Map, Node, NodeKind, Scalar, ScalarValue};
use super::problem::{Findings, Position, shown};

/// Ten thousand limits of twenty lines fit.
pub(super) const MAX_FILE: usize = 4 << 20;
/// A rule file has at most eight levels. The rest is for anchors that contain parts of it.
const MAX_DEPTH: usize = 32;
/// Ten thousand limits of fifty values each, with aliases expanded.
const MAX_NODES: usize = 500_000;

/// Reads a file, or returns `None` after reporting that it is not YAML, empty or too large.
pub(super) fn read(source: &str, fix_if_empty: &str, findings: &mut Findings) -> Option<Node> {
    if source.len() > MAX_FILE {
        let message = format!("the file has {} bytes, more than 4 MiB", source.len());
        findings.error(Position { line: 1, column: 1 }, message, "remove some limits");
        return None;
    }
    let options = granit_parser::options! { flow_nesting_limit: MAX_DEPTH, block_nesting_limit: MAX_DEPTH };
    let mut builder = Builder { source, findings, open: Vec::new(), anchors: HashMap::new(), nodes: 0, root: None };
    for event in Parser::new_from_str_with_options(source, options) {
        let taken = match event {
            Ok((event, span)) => builder.take(event, span),
            Err(error) => Err(of_scan_error(&error)),
        };
        if let Err(YamlError { at, message, fix }) = taken {
            builder.findings.error(at, message, fix);
            return None;
        }
    }
    match builder.root {
        Some(Node { kind: NodeKind::Scalar(Scalar { value: ScalarValue::Null, .. }), .. }) | None => {
            findings.error(Position { line: 1, column: 1 }, "the file is empty", fix_if_empty);
            None
        }
        root => root,
    }
}

/// An error after which reading cannot continue.
struct YamlError {
    at: Position,
    message: String,
    fix: String,
}

struct Builder<'s, 'f> {
    source: &'s str,
    findings: &'f mut Findings,
    open: Vec<Open>,
    anchors: HashMap<usize, Node>,
    nodes: usize,
    root: Option<Node>,
}

/// A list or map that is not complete yet.
struct Open {
    at: Position,
    anchor: usize,
    inside: Inside,
}

enum Inside {
    List(Vec<Node>),
    Map { entries: Vec<Entry>, merged: Vec<Node>, key: Option<Key> },
}

struct Key {
    text: String,
    at: Position,
    merges: bool,
}

impl Builder<'_, '_> {
    fn take(&mut self, event: Event<'_>, span: Span) -> Result<(), YamlError> {
        let at = position(span.start);
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                self.refuse_tag(tag.is_some(), span);
                let value = if style == ScalarStyle::Plain { ScalarValue::of_plain(&text) } else { ScalarValue::Text };
                let verbatim = self.verbatim(&text, style, span);
                let scalar = Scalar { text: text.into_owned(), value, verbatim };
                let merges = style == ScalarStyle::Plain && scalar.text == "<<";
                self.value(Node { at, kind: NodeKind::Scalar(scalar) }, anchor, merges)
            }
            Event::SequenceStart(_, anchor, tag) => {
                self.refuse_tag(tag.is_some(), span);
                self.start(Open { at, anchor, inside: Inside::List(Vec::new()) })
            }
            Event::MappingStart(_, anchor, tag) => {
                self.refuse_tag(tag.is_some(), span);
                let inside = Inside::Map { entries: Vec::new(), merged: Vec::new(), key: None };
                self.start(Open { at, anchor, inside })
            }
            Event::SequenceEnd | Event::MappingEnd => self.end(),
            Event::Alias(anchor) => self.alias(anchor, at),
            Event::DocumentStart(..) if self.root.is_some() => Err(YamlError {
                at,
                message: "a second document starts here".into(),
                fix: "remove the `---`, or the text after it".into(),
            }),
            _ => Ok(()),
        }
    }

    fn refuse_tag(&mut self, tagged: bool, span: Span) {
        if tagged {
            let at = position(span.tag_start().unwrap_or(span.start));
            self.findings.error(at, "a tag (`!…`) is not allowed in a rule file", "remove the tag");
        }
    }

    /// Returns the offset of the text in its span, if it is written without escapes.
    fn verbatim(&self, text: &str, style: ScalarStyle, span: Span) -> Option<u32> {
        let written = span.slice(self.source)?;
        match style {
            ScalarStyle::Plain => (written == text).then_some(0),
            ScalarStyle::SingleQuoted | ScalarStyle::DoubleQuoted => {
                (written.get(1..written.len().checked_sub(1)?)? == text).then_some(1)
            }
            _ => None,
        }
    }

    fn start(&mut self, open: Open) -> Result<(), YamlError> {
        self.check_depth(open.at, self.open.len() + 1)?;
        if let Some(Open { inside: Inside::Map { key: None, .. }, .. }) = self.open.last() {
            return Err(no_key(open.at));
        }
        self.open.push(open);
        Ok(())
    }

    fn end(&mut self) -> Result<(), YamlError> {
        let Some(Open { at, anchor, inside }) = self.open.pop() else { return Ok(()) };
        let kind = match inside {
            Inside::List(items) => NodeKind::List(items),
            Inside::Map { entries, merged, .. } => NodeKind::Map(self.map(entries, merged)),
        };
        self.value(Node { at, kind }, anchor, false)
    }

    /// Returns the map with each key once. Its own entries override merged ones.
    fn map(&mut self, entries: Vec<Entry>, merged: Vec<Node>) -> Map {
        let mut first: HashMap<String, Position> = HashMap::with_capacity(entries.len());
        let mut kept = Vec::with_capacity(entries.len());
        for entry in entries {
            if let Some(Position { line, column }) = first.get(&entry.key) {
                let message = format!("duplicate key `{}`, first at {line}:{column}", shown(&entry.key));
                self.findings.error(entry.key_at, message, "remove one of them");
            } else {
                first.insert(entry.key.clone(), entry.key_at);
                kept.push(entry);
            }
        }
        for node in merged {
            let nodes = match node.kind {
                NodeKind::List(nodes) => nodes,
                _ => vec![node],
            };
            for node in nodes {
                let NodeKind::Map(map) = node.kind else {
                    self.findings.error(
                        node.at,
                        "`<<` merges maps, but this is not a map",
                        "write `<<: *name` with the anchor of a map",
                    );
                    continue;
                };
                for entry in map.entries {
                    if first.insert(entry.key.clone(), entry.key_at).is_none() {
                        kept.push(entry);
                    }
                }
            }
        }
        Map { entries: kept, lost: Vec::new() }
    }

    fn alias(&mut self, anchor: usize, at: Position) -> Result<(), YamlError> {
        let Some((size, depth)) = self.anchors.get(&anchor).map(Node::extent) else {
            return Err(YamlError {
                at,
                message: "this alias is inside the value that it refers to".into(),
                fix: "write out the value".into(),
            });
        };
        // Checked before the copy, so that memory stays bounded.
        self.count(at, size)?;
        self.check_depth(at, self.open.len() + depth)?;
        match self.anchors.get(&anchor).cloned() {
            Some(node) => self.place(node, false),
            None => Ok(()),
        }
    }

    /// Takes a complete value.
    fn value(&mut self, node: Node, anchor: usize, merges: bool) -> Result<(), YamlError> {
        self.count(node.at, 1)?;
        if anchor != 0 {
            // The copy for the anchor counts too.
            self.count(node.at, node.extent().0)?;
            self.anchors.insert(anchor, node.clone());
        }
        self.place(node, merges)
    }

    fn place(&mut self, node: Node, merges: bool) -> Result<(), YamlError> {
        match self.open.last_mut().map(|open| &mut open.inside) {
            None => self.root = Some(node),
            Some(Inside::List(items)) => items.push(node),
            Some(Inside::Map { entries, merged, key }) => match key.take() {
                None => {
                    let NodeKind::Scalar(scalar) = node.kind else { return Err(no_key(node.at)) };
                    *key = Some(Key { text: scalar.text, at: node.at, merges });
                }
                Some(key) if key.merges => merged.push(node),
                Some(key) => entries.push(Entry { key: key.text, key_at: key.at, value: node }),
            },
        }
        Ok(())
    }

    fn count(&mut self, at: Position, nodes: usize) -> Result<(), YamlError> {
        self.nodes = self.nodes.saturating_add(nodes);
        if self.nodes <= MAX_NODES {
            return Ok(());
        }
        Err(YamlError {
            at,
            message: format!("the file has more than {MAX_NODES} values, with aliases expanded"),
            fix: "use fewer limits, or fewer aliases".into(),
        })
    }

    fn check_depth(&self, at: Position, depth: usize) -> Result<(), YamlError> {
        if depth > MAX_DEPTH { Err(too_deep(at)) } else { Ok(()) }
    }
}

fn position(mark: Marker) -> Position {
    let whole = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    Position { line: whole(mark.line()).max(1), column: whole(mark.col()).saturating_add(1) }
}

fn too_deep(at: Position) -> YamlError {
    YamlError {
        at,
        message: format!("more than {MAX_DEPTH} nested levels"),
        fix: "close the brackets, or indent less (a rule file needs eight levels at most)".into(),
    }
}

fn no_key(at: Position) -> YamlError {
    YamlError {
        at,
        message: "a list or map cannot be a key".into(),
        fix: "write `key:` before it, or put text with brackets or braces in quotes".into(),
    }
}

fn of_scan_error(error: &ScanError) -> YamlError {
    let at = position(*error.marker());
    let yaml_error = |message: &str, fix: &str| YamlError { at, message: message.into(), fix: fix.into() };
    match error.kind() {
        ErrorKind::RecursionLimitExceeded => too_deep(at),
        ErrorKind::TabNotAllowed
        | ErrorKind::TabInBlockIndentation
        | ErrorKind::TabInIndentation
        | ErrorKind::TabInPlainScalar
        | ErrorKind::TabAtBlockScalarStart => yaml_error("YAML does not allow a tab here", "use spaces"),
        ErrorKind::UnknownAnchor => {
            yaml_error("there is no anchor for this alias before it", "put text that starts with `*` in quotes")
        }
        ErrorKind::MissingAnchorOrAliasName => {
            yaml_error("`*` or `&` starts an alias or anchor here", "put text that starts with `*` or `&` in quotes")
        }
        ErrorKind::UnclosedQuotedScalar | ErrorKind::InvalidQuotedScalarIndent => {
            yaml_error("a quote before this is not closed", "close it with the same quote, or indent the text further")
        }
        ErrorKind::ExpectedBlockMappingKey => {
            yaml_error("the indentation of this line matches no line above", "align it with its neighbours")
        }
        ErrorKind::UnexpectedCharacter { character } if character.is_control() => yaml_error(
            &format!("a control character ({}) is not allowed here", character.escape_default()),
            "remove it",
        ),
        ErrorKind::UnexpectedCharacter { character } => {
            let message = format!("a text cannot start with `{}`", character.escape_default());
            yaml_error(&message, "put the text in quotes")
        }
        ErrorKind::UnclosedFlowCollection { open } => {
            yaml_error(&format!("`{open}` is not closed"), "close it, or put text with a bracket in quotes")
        }
        ErrorKind::MappingValueNotAllowed | ErrorKind::MappingKeyNotAllowed => yaml_error(
            "a `key: value` is not allowed here",
            "align it with its neighbours, or put text with `: ` in quotes",
        ),
        kind => {
            yaml_error(&format!("invalid YAML ({kind})"), "check the indentation, the brackets and the quotes here")
        }
    }
}
