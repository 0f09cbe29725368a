// Requests to the admin API, and what is known about the connection to it.

// The longest wait for an answer. The server answers within milliseconds, or a simulation within a second.
const ANSWER_DEADLINE_MS = 10_000;
// The longest wait for rules: a file of megabytes is read and checked.
const RULES_DEADLINE_MS = 60_000;
const TOKEN = "tollgate-token";

// An answer of the server that is an error.
class Refused extends Error {
  constructor(status, body) {
    super(body?.message ?? `the server answered with status ${status}`);
    this.status = status;
    this.body = body;
  }
}

// No answer of the server.
class Unreachable extends Error {}

// Sends a request, and returns the JSON of the answer.
async function api(path, { method = "GET", json, yaml, headers = {}, signal } = {}) {
  const deadline = AbortSignal.timeout(path.startsWith("/v1/rules") ? RULES_DEADLINE_MS : ANSWER_DEADLINE_MS);
  const request = { method, cache: "no-store", credentials: "omit", redirect: "error", headers: { accept: "application/json", ...headers } };
  request.signal = signal ? AbortSignal.any([signal, deadline]) : deadline;
  const token = sessionStorage.getItem(TOKEN);
  if (token) request.headers.authorization = `Bearer ${token}`;
  if (json !== undefined) { request.body = JSON.stringify(json); request.headers["content-type"] = "application/json"; }
  if (yaml !== undefined) { request.body = yaml; request.headers["content-type"] = "application/yaml"; }
  let response, body;
  try {
    response = await fetch(path, request);
    body = await response.json().catch((error) => { if (response.ok) throw error; });
  } catch (error) {
    if (signal?.aborted) throw error;
    connection.lost();
    throw new Unreachable("the server does not answer");
  }
  if (response.status === 401 || (response.status === 403 && token)) login.ask(body?.message);
  if (!response.ok) {
    connection.answered(response.status === 401 || response.status === 403 ? "refused" : "live");
    throw new Refused(response.status, body);
  }
  connection.answered("live");
  return body;
}

// The state of the connection: in the header, and announced when it changes.
const connection = {
  state: "waiting",
  lastAnswer: performance.now(),
  ticker: 0,

  answered(state) {
    this.lastAnswer = performance.now();
    this.change(state);
  },

  lost() {
    this.change("gone");
  },

  change(state) {
    const before = this.state;
    if (before !== state) {
      this.state = state;
      byId("connection").dataset.state = state;
      byId("enter-token").hidden = state !== "refused";
      if (state === "gone") write(byId("announce"), "The server does not answer. Trying again.");
      if (state === "live" && before === "gone") {
        write(byId("announce"), "The server answers again.");
        recovered();
      }
      clearInterval(this.ticker);
      this.ticker = state === "gone" ? setInterval(() => this.show(), 1000) : 0;
    }
    this.show();
  },

  show() {
    const texts = { waiting: "Connecting", live: "Live", refused: "No access" };
    const since = Math.round((performance.now() - this.lastAnswer) / 1000);
    write(byId("connection-text"), texts[this.state] ?? `No answer since ${span(since)}`);
  },
};

// Shows what every view shows of the server.
function about(status) {
  write(byId("version"), status.version ?? "");
  names.follow(status.rules ?? {});
}

// The dialog for the token.
const login = {
  isDismissed: false,

  start() {
    byId("enter-token").addEventListener("click", () => { this.isDismissed = false; this.ask(); });
    byId("login").addEventListener("close", () => {
      const token = byId("login-token").value.trim();
      byId("login-token").value = "";
      this.isDismissed = !token;
      if (!token) return;
      sessionStorage.setItem(TOKEN, token);
      route();
    });
  },

  ask(message) {
    const dialog = byId("login");
    if (dialog.open || this.isDismissed) return;
    byId("confirm").close();
    writeMessage(byId("login-text"), message ?? "Ask its operator for one.");
    dialog.showModal();
  },
};

// Shows an error above the view, or none.
function banner(error) {
  const element = byId("banner");
  element.hidden = !error;
  writeMessage(element, error?.message ?? "");
}

// Shows the result of an action: a text, and a list of lines.
function result(id, kind, text, lines = []) {
  const items = lines.slice(0, 200).map((line) => (line instanceof Node ? line : make("li", { textContent: line })));
  if (lines.length > items.length) items.push(make("li", { textContent: `and ${lines.length - items.length} more` }));
  byId(id).replaceChildren(
    ...(text ? [make("p", { className: kind === "error" ? "error" : "", textContent: text })] : []),
    ...(items.length ? [make("ul", {}, ...items)] : []));
}

// Asks for a confirmation, runs the action with the text of its field, and closes when it has succeeded.
function confirm({ title, text, yes, field, lines = [], action }) {
  const dialog = byId("confirm"), error = byId("confirm-error"), input = byId("confirm-input");
  write(byId("confirm-title"), title);
  write(byId("confirm-text"), text);
  write(byId("confirm-yes"), yes);
  byId("confirm-field").hidden = !field;
  write(byId("confirm-label"), field?.label ?? "");
  input.value = field?.value ?? "";
  input.required = Boolean(field);
  byId("confirm-list").hidden = lines.length === 0;
  byId("confirm-list").replaceChildren(...lines.slice(0, 200).map((line) => make("li", { textContent: line })));
  error.hidden = true;
  // One handler at a time, not one more for each dialog.
  dialog.querySelector("form").onsubmit = async (event) => {
    event.preventDefault();
    byId("confirm-yes").disabled = true;
    try {
      await action(input.value.trim());
      dialog.close();
    } catch (problem) {
      error.hidden = false;
      writeMessage(error, problem.message);
    }
    byId("confirm-yes").disabled = false;
  };
  dialog.showModal();
}
