// The rules in force: their limits, their text, their history, and changes to them.

// Rows that are shown at first, and more on request: a table of 10,000 rows is slow and useful to nobody.
const ROWS = 200;

const rules = {
  interval: 5000,
  version: null,
  limits: [],
  found: [],
  shown: ROWS,
  original: "",

  start() {
    byId("limits-search").addEventListener("input", () => { this.shown = ROWS; this.showLimits(); });
    byId("limits-more").addEventListener("click", () => {
      const first = this.shown;
      this.shown += ROWS;
      this.showLimits();
      const row = byId("limits").tBodies[0].rows[first];
      row.tabIndex = -1;
      row.focus();
    });
    byId("rules-text").addEventListener("input", () => this.showEdit());
    byId("rules-check").addEventListener("click", () => this.check());
    byId("rules-apply").addEventListener("click", () => this.apply());
    byId("rules-revert").addEventListener("click", () => { byId("rules-text").value = this.original; result("rules-result"); this.showEdit(); });
  },

  // The whole file can be large, so it is read when the view opens and when the version has changed.
  async poll(signal) {
    const status = await api("/v1/status", { signal });
    about(status);
    if (this.version === null || String(status.rules?.version) !== this.version) await this.read(signal);
  },

  async read(signal) {
    const answer = await api("/v1/rules", { signal });
    const isEdited = this.isEdited();
    this.version = String(answer.version);
    this.original = (answer.text ?? "").replaceAll("\r\n", "\n");
    this.limits = (answer.limits ?? []).map((limit) => ({
      ...limit, search: [limit.limit, words(limit.algorithm), limit.numbers, brief(limit.key, ""), brief(limit.match, ""), limit.description ?? ""].join(" ").toLowerCase() }));
    if (!isEdited) byId("rules-text").value = this.original;
    facts("rules-head", [["Version", answer.version], ["Source", words(answer.source)], ["Loaded", answer.loaded_at && date(answer.loaded_at)]]);
    this.showLimits();
    this.showHistory(answer.history ?? []);
    this.showEdit();
  },

  isEdited() {
    return this.version !== null && byId("rules-text").value !== this.original;
  },

  showLimits() {
    const terms = byId("limits-search").value.toLowerCase().split(/\s+/).filter(Boolean);
    this.found = this.limits.filter((limit) => terms.every((term) => limit.search.includes(term)));
    const shown = this.found.slice(0, this.shown);
    write(byId("limits-count"), terms.length ? `${count(this.found.length)} of ${count(this.limits.length)}` : count(this.limits.length));
    byId("limits-empty").hidden = shown.length > 0;
    write(byId("limits-empty"), this.limits.length
      ? "No limit matches. Search for a part of its name, key or algorithm."
      : "There are no limits. Add one under limits in the rule file below.");
    byId("limits-more").hidden = this.found.length <= this.shown;
    write(byId("limits-more"), `Show ${count(Math.min(ROWS, this.found.length - this.shown))} more of ${count(this.found.length - this.shown)}`);
    table("limits", [
      { heads: true, fill: (cell, limit) => { writeLimit(cell, limit); write(inner(cell, "small"), visible(limit.description ?? "")); } },
      { fill: (cell, limit) => write(cell, visible(limit.numbers ?? "").replace(` (${limit.algorithm})`, "")) },
      { css: "wide", fill: (cell, limit) => write(cell, words(limit.algorithm)) },
      { css: "wide key", fill: (cell, limit) => write(cell, brief(limit.key, "one for all")) },
      { css: "wide key", fill: (cell, limit) => write(cell, brief(limit.match, "all requests")) },
    ], shown);
  },

  showHistory(history) {
    byId("history-empty").hidden = history.length > 0;
    table("history", [
      { heads: true, css: "key", fill: (cell, entry) => write(cell, entry.version) },
      { css: "wide", fill: (cell, entry) => write(cell, words(entry.source)) },
      { fill: (cell, entry) => write(cell, entry.loaded_at ? date(entry.loaded_at) : "") },
      { css: "wide", fill: (cell, entry) => {
        const changes = entry.changes ?? [];
        const lines = changes.slice(0, 5).map(visible);
        if (changes.length > 5) lines.push(`and ${changes.length - 5} more`);
        list(cell, lines, () => make("div"), (line, text) => write(line, text));
      } },
      { css: "number", fill: (cell, entry) => {
        const button = inner(cell, "button", "small");
        const isCurrent = String(entry.version) === this.version;
        button.type = "button";
        button.disabled = isCurrent;
        write(button, isCurrent ? "In force" : "Roll back…");
        button.onclick = () => this.rollBack(entry.version);
      } },
    ], history);
  },

  showEdit() {
    const isEdited = this.isEdited();
    const isHidden = this.original.startsWith("# hidden:");
    write(byId("text-note"), isEdited ? "edited, not applied" : isHidden ? "paste the whole file to replace it" : "edit it here, check it, then apply it");
    byId("rules-apply").disabled = !isEdited;
    byId("rules-revert").disabled = !isEdited;
  },

  // Has the server check the text. Returns its answer.
  async check() {
    const text = byId("rules-text").value;
    try {
      const answer = await api("/v1/rules/validate", { method: "POST", yaml: text });
      const problems = answer.problems ?? [], changes = answer.changes ?? [];
      if (answer.valid && changes.length === 0 && problems.length === 0) result("rules-result", "ok", "Valid. Nothing would change.");
      else if (answer.valid) result("rules-result", "ok", "Valid. Applying it would change:", [...changes.map(visible), ...problems.map((problem) => this.line(problem))]);
      else result("rules-result", "error", "Not valid:", problems.map((problem) => this.line(problem)));
      return answer;
    } catch (error) {
      result("rules-result", "error", error.message);
      return { valid: false };
    }
  },

  // Returns a line of the list for a problem, with a button that goes to its place.
  line({ line, column, severity, message, fix }) {
    const text = visible([severity === "warning" ? "warning" : "", message, fix].filter(Boolean).join(": "));
    if (!line) return make("li", { textContent: text });
    const button = make("button", { type: "button", className: "small", textContent: `line ${line}` });
    button.addEventListener("click", () => {
      const area = byId("rules-text"), lines = area.value.split("\n");
      const start = lines.slice(0, line - 1).reduce((length, each) => length + each.length + 1, 0);
      area.focus();
      area.setSelectionRange(start + (column ?? 1) - 1, start + (lines[line - 1] ?? "").length);
      area.scrollTop = (area.scrollHeight / lines.length) * Math.max(0, line - 4);
    });
    return make("li", {}, button, ` ${text}`);
  },

  async apply() {
    const answer = await this.check();
    if (!answer.valid) return;
    const text = byId("rules-text").value, version = this.version;
    confirm({
      title: "Apply these rules?",
      text: (answer.changes ?? []).length ? "This changes:" : "Nothing changes but the text.",
      lines: (answer.changes ?? []).map(visible),
      yes: "Apply",
      action: async () => {
        try {
          const done = await api("/v1/rules", { method: "PUT", yaml: text, headers: { "if-match": `"${version}"` } });
          this.original = text;
          result("rules-result", "ok", `Applied as version ${done.version}. ${done.lasts ? `It lasts ${done.lasts.startsWith("until") ? "" : "as "}${done.lasts}.` : ""}`, (done.changes ?? []).map(visible));
        } catch (error) {
          if (error.body?.problems) result("rules-result", "error", "Not applied:", error.body.problems.map((problem) => this.line(problem)));
          if (error.status !== 412) throw error;
          await this.read();
          throw new Error("Somebody else has changed the rules in the meantime. Your text is kept: compare it with the history, and apply it again to replace theirs.");
        }
        await this.read();
      },
    });
  },

  rollBack(version) {
    confirm({
      title: `Roll back to version ${version}?`,
      text: "The rules of that version replace the rules in force. Counts are kept.",
      yes: "Roll back",
      action: async () => {
        const done = await api("/v1/rules/rollback", { method: "POST", json: { version, expected: this.version } });
        result("rules-result", "ok", `Rolled back: version ${done.version ?? version} is in force.`, (done.changes ?? []).map(visible));
        await this.read();
      },
    });
  },
};

// Returns a key or a match in short.
function brief(value, none) {
  if (value === undefined || value === null || value.length === 0) return none;
  if (Array.isArray(value)) return value.map((part) => brief(part, "")).join(", ");
  if (typeof value !== "object") return visible(value);
  return Object.entries(value).map(([name, part]) => `${visible(name)}: ${brief(part, "")}`).join(", ");
}

// The names of limits that fields offer.
const names = {
  version: null,

  // Reads the names if the rules have changed.
  async follow({ version }) {
    if (version === undefined || String(version) === this.version) return;
    this.version = String(version);
    try {
      const answer = await api("/v1/live?count=500&order=name");
      byId("limit-names").replaceChildren(...(answer.limits ?? []).map(({ limit }) => make("option", { value: limit })));
    } catch { /* The next poll reports it. */ }
  },
};
