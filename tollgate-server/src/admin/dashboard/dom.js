// Elements and texts. Text from the server reaches the page through `textContent` only.

const byId = (id) => document.getElementById(id);

// Makes an element. Children are elements, or texts.
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// Makes an element of a picture.
function draw(tag, attributes = {}, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// Sets a text, and leaves the element alone if it has it already.
function write(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

// Shows a message of the server. Its quotes in backticks become code.
function writeMessage(element, message) {
  const parts = String(message).split("`");
  // An odd number of backticks quotes nothing.
  const quotes = parts.length % 2 === 1;
  if (element.textContent === (quotes ? parts.join("") : message)) return;
  element.replaceChildren(...(quotes ? parts.map((part, at) => (at % 2 ? make("code", { textContent: part }) : part)) : [message]));
}

// Shows rows in the body of a table, or other children. Children are reused, so that a refresh makes no garbage, keeps the
// focus and moves nothing.
function list(parent, items, create, fill) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(create());
  items.forEach((item, index) => fill(parent.children[index], item, index));
}

// Shows items as rows. A column has a class, and a function that fills its cell. The first column is the row's header.
function table(id, columns, items) {
  const create = () => {
    const row = make("tr");
    columns.forEach(({ css = "", heads }) =>
      row.append(heads ? make("th", { scope: "row", className: css }) : make("td", { className: css })));
    return row;
  };
  list(byId(id).tBodies[0], items, create, (row, item, index) =>
    columns.forEach((column, at) => column.fill(row.cells[at], item, index)));
}

// Shows terms and their values.
function facts(id, pairs) {
  const flat = pairs.filter(([, value]) => value !== undefined && value !== null && value !== "").flat();
  const parent = byId(id);
  const fits = parent.children.length === flat.length;
  if (!fits) parent.replaceChildren(...flat.map((_, index) => make(index % 2 ? "dd" : "dt")));
  flat.forEach((text, index) => write(parent.children[index], text));
}

// Returns an element inside a cell that is made once.
function inner(cell, tag, className = "") {
  return cell.querySelector(tag) ?? cell.appendChild(make(tag, { className }));
}

// Invisible and bidirectional characters, which could make one key look like another.
const INVISIBLE = /[\u0000-\u001f\u007f-\u00a0\u00ad\u061c\u115f\u1160\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\u3164\ufe00-\ufe0f\ufeff\ufff0-\ufffb]/g;
const MAX_SHOWN = 96;

// Returns a text with its invisible characters as escapes.
function visible(text) {
  return String(text).replace(INVISIBLE, (char) => `\\u{${char.codePointAt(0).toString(16)}}`);
}

// Returns the parts of a key as one text.
function keyText(key) {
  return (Array.isArray(key) ? key : [key]).map(visible).join(" · ");
}

// Shows a key that anybody may have chosen.
function writeKey(cell, key) {
  const whole = keyText(key);
  const element = inner(cell, "bdi", "key");
  const chars = Array.from(whole.slice(0, 2 * MAX_SHOWN + 2));
  const isCut = chars.length > MAX_SHOWN;
  write(element, isCut ? `${chars.slice(0, MAX_SHOWN).join("")}…` : whole);
  element.title = isCut ? whole : "";
}

const COUNT = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SMALL = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const DATE = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

const count = (value) => COUNT.format(value ?? 0);
const rate = (value) => ((value ?? 0) < 100 ? SMALL : COUNT).format(value ?? 0);
const date = (seconds) => DATE.format(seconds * 1000);

// Returns a duration for people: `250 ms`, `12.5 s`, `3m 20s`, `2h 05m`, `4 d 3 h`.
function span(seconds) {
  if (seconds === undefined || seconds === null) return "";
  if (seconds === 0) return "0 s";
  if (seconds < 0.9995) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  if (seconds < 99.95) return `${SMALL.format(seconds)} s`;
  const whole = Math.round(seconds);
  const two = (value) => String(value).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)}m ${two(whole % 60)}s`;
  if (whole < 172_800) return `${Math.floor(whole / 3600)}h ${two(Math.floor(whole / 60) % 60)}m`;
  return `${count(Math.floor(whole / 86_400))} d ${Math.floor(whole / 3600) % 24} h`;
}

function bytes(value) {
  if (value === undefined || value === null) return undefined;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value, unit = 0;
  while (size >= 1024 && unit < units.length - 1) { size /= 1024; unit += 1; }
  return `${SMALL.format(size)} ${units[unit]}`;
}

// Returns a text from the server in words: `sliding_window_log` is `sliding window log`.
const words = (text) => String(text ?? "").replaceAll("_", " ");
