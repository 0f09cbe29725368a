// The key inspector: the state of a key in each limit, changes to it, and the bans of operators.

const keys = {
  interval: 2000,
  query: null,

  start() {
    byId("keys-form").addEventListener("submit", (event) => { event.preventDefault(); this.lookUp(); });
    byId("keys-key").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); byId("keys-form").requestSubmit(); }
    });
    byId("reset-all").addEventListener("click", () => this.change("reset", {
      title: "Reset this key in every limit?", text: "It gets its whole quota back.", yes: "Reset" }));
  },

  // `#keys?key=alice&limit=per-user` looks that key up.
  enter(parameters) {
    if (!parameters.has("key") && !parameters.has("limit")) return;
    byId("keys-key").value = parameters.getAll("key").join("\n");
    byId("keys-form").elements.limit.value = parameters.get("limit") ?? "";
    this.query = this.parameters();
    result("keys-result");
  },

  parameters() {
    const form = byId("keys-form").elements;
    const query = new URLSearchParams();
    // A limit with one count for all requests has a key without parts.
    for (const part of form.key.value ? form.key.value.split("\n") : []) query.append("key", part);
    if (form.limit.value) query.set("limit", form.limit.value);
    return query;
  },

  lookUp() {
    this.query = this.parameters();
    result("keys-result");
    history.replaceState(null, "", `#keys?${this.query}`);
    refresh();
  },

  async poll(signal) {
    this.showBans(await api("/v1/bans", { signal }));
    if (this.query !== null) this.show(await api(`/v1/keys?${this.query}`, { signal }));
  },

  showBans(answer) {
    const bans = answer.bans ?? [];
    byId("bans-empty").hidden = bans.length > 0;
    write(byId("bans-note"), answer.total > bans.length ? `the newest ${count(bans.length)} of ${count(answer.total)}` : "");
    const now = Date.now() / 1000;
    table("bans", [
      { heads: true, fill: (cell, ban) => { writeKey(cell, ban.key ?? ban.key_hash); write(inner(cell, "small", "narrow"), visible(ban.limit)); } },
      { css: "wide", fill: (cell, ban) => write(cell, `${visible(ban.limit)}${ban.in_force ? "" : ", which refuses nothing now"}`) },
      { css: "number", fill: (cell, ban) => write(cell, span(Math.max(0, Math.round(ban.until - now)))) },
      { css: "wide", fill: (cell, ban) => write(cell, date(ban.since)) },
      { css: "wide", fill: (cell, ban) => write(cell, visible(ban.by)) },
      { css: "number", fill: (cell, ban) => {
        const button = inner(cell, "button", "small");
        button.type = "button";
        write(button, "Unban…");
        button.setAttribute("aria-label", `Unban ${keyText(ban.key ?? ban.key_hash).slice(0, MAX_SHOWN)} in ${visible(ban.limit)}`);
        button.onclick = () => this.unban(ban);
      } },
    ], bans);
  },

  unban({ limit, key, key_hash }) {
    confirm({
      title: `End the ban in ${visible(limit)}?`, text: `The key is limited by its quota again. Key: ${keyText(key ?? key_hash)}`, yes: "Unban",
      action: async () => {
        await api("/v1/keys/unban", { method: "POST", json: { limit, key_hash } });
        result("keys-result", "ok", "The ban has ended.");
        refresh();
      },
    });
  },

  show(answer) {
    const limits = answer.limits ?? [];
    byId("keys-empty").hidden = limits.length > 0;
    write(byId("keys-empty"), "No limit counts by a key with this number of parts. Use one line for each part of the limit's key.");
    const more = answer.left_out ? `, ${count(answer.left_out)} left out: name one` : "";
    const number = limits.length ? `${count(limits.length)} ${limits.length === 1 ? "limit" : "limits"}${more}` : "";
    writeMessage(byId("keys-note"), [number, answer.note && visible(answer.note)].filter(Boolean).join(". "));
    byId("reset-all").hidden = limits.length < 2;
    table("states", [
      { heads: true, fill: (cell, state) => {
        writeLimit(cell, state);
        write(inner(cell, "small", "key"), state.key === undefined ? state.key_hash ?? "" : keyText(state.key));
      } },
      { css: "number", fill: (cell, state) => {
        const text = inner(cell, "span");
        write(text, state.quota === undefined ? words(state.state) : `${count(state.remaining)} of ${count(state.quota)}`);
        let meter = cell.querySelector(".meter");
        if (!meter) meter = cell.appendChild(make("span", { className: "meter", ariaHidden: "true" }, make("span")));
        meter.firstChild.style.width = `${state.quota ? Math.min(100, (100 * state.remaining) / state.quota) : 0}%`;
      } },
      { css: "number wide", fill: (cell, state) => write(cell, span(state.reset_after) || "–") },
      { css: "number", fill: (cell, state) => {
        const wait = state.banned_for || state.retry_after;
        cell.classList.toggle("tone-denied", Boolean(wait));
        write(cell, wait ? span(wait) : state.quota === undefined ? "–" : "now");
      } },
      { css: "wide", fill: (cell, state) => {
        cell.classList.toggle("tone-denied", Boolean(state.banned_for));
        write(cell, state.banned_for ? `banned for ${span(state.banned_for)}` : state.in_flight === undefined || state.in_flight === null ? "–" : `${count(state.in_flight)} in flight`);
      } },
      { fill: (cell, state) => this.buttons(cell, state) },
    ], limits);
  },

  buttons(cell, state) {
    const group = inner(cell, "div", "actions");
    const { limit } = state;
    const actions = [
      ["Reset…", () => this.change("reset", { limit, title: `Reset this key in ${visible(limit)}?`, text: "It gets its whole quota back.", yes: "Reset" })],
      ["Grant…", () => this.change("grant", { limit, title: `Grant units in ${visible(limit)}`, text: "The units are given back to the key, up to its whole quota.", yes: "Grant",
        field: { label: "Units", value: "10", name: "units", parse: (text) => { if (!/^\d+$/.test(text)) throw new Error(`${text || "an empty field"} is not a number of units: use a whole number such as 10`); return Number(text); } } })],
      state.banned_for
        ? ["Unban…", () => this.change("unban", { limit, title: `End the ban in ${visible(limit)}?`, text: "The key is limited by its quota again.", yes: "Unban" })]
        : ["Ban…", () => this.change("ban", { limit, title: `Ban this key in ${visible(limit)}`, text: "All its requests that this limit applies to are refused.", yes: "Ban",
          field: { label: "For how long", value: "1h", name: "for", parse: (text) => text } })],
    ];
    list(group, actions, () => make("button", { type: "button", className: "small" }), (button, [text, run]) => {
      write(button, text);
      button.setAttribute("aria-label", `${text.replace("…", "")} in ${visible(limit)}`);
      button.onclick = run;
    });
  },

  change(operation, { limit, title, text, yes, field }) {
    const key = this.query.getAll("key");
    confirm({
      title, text: `${text} Key: ${keyText(key)}`, yes, field,
      action: async (value) => {
        const json = key.length ? { key } : {};
        if (limit !== undefined) json.limit = limit;
        if (field) json[field.name] = field.parse(value);
        const { changed } = await api(`/v1/keys/${operation}`, { method: "POST", json });
        const done = { reset: "The key was reset.", grant: "The units were granted.", ban: "The key is banned.", unban: "The ban has ended." };
        const nothing = { reset: "Nothing changed: the key had its whole quota.", grant: "Nothing changed: there is nothing to give back.", unban: "Nothing changed: the key was not banned." };
        result("keys-result", "ok", (changed === false ? nothing : done)[operation]);
        refresh();
      },
    });
  },
};
