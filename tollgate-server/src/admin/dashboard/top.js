// The keys that are limited most.

const top_limited = {
  interval: 2000,

  start() {
    byId("top-form").addEventListener("change", refresh);
    byId("top-form").addEventListener("submit", (event) => { event.preventDefault(); refresh(); });
  },

  enter(parameters) {
    if (parameters.has("limit")) byId("top-form").elements.limit.value = parameters.get("limit");
  },

  async poll(signal) {
    const form = new FormData(byId("top-form"));
    const query = new URLSearchParams({ kind: form.get("kind"), over: form.get("over"), scope: form.get("scope"), count: 50 });
    if (form.get("limit")) query.set("limit", form.get("limit"));
    this.show(await api(`/v1/top?${query}`, { signal }), form);
  },

  show(top, form) {
    const keys = top.keys ?? [];
    const total = top.total === undefined ? "" : `${count(top.total)} requests in all`;
    const nodes = top.scope === "fleet" ? `, ${count(top.nodes)} ${top.nodes === 1 ? "node" : "nodes"}` : "";
    const uncounted = top.uncounted ? `, ${count(top.uncounted)} not listed because too many limits denied at once` : "";
    write(byId("top-note"), [`${total}${nodes}${uncounted}`, top.note].filter(Boolean).map(visible).join(". "));
    byId("top-hashed").hidden = !keys.some((key) => key.is_hashed);
    byId("top-empty").hidden = keys.length > 0;
    if (keys.length === 0) write(byId("top-empty"), this.advice(form));
    const now = Date.now() / 1000;
    table("top-keys", [
      { css: "number rank", fill: (cell, _, index) => write(cell, index + 1) },
      { heads: true, fill: (cell, key) => { writeKey(cell, key.parts ?? key.key); write(inner(cell, "small", "narrow"), visible(key.limit)); } },
      { css: "wide", fill: (cell, key) => write(cell, visible(key.limit)) },
      { css: "number", fill: (cell, key) => {
        write(cell, key.error ? `${count(key.count - key.error)} to ${count(key.count)}` : count(key.count)); } },
      { css: "number wide", fill: (cell, key) => write(cell, key.last_seen ? `${span(Math.max(0, Math.round(now - key.last_seen)))} ago` : "") },
      { css: "number", fill: (cell, key) => {
        const link = inner(cell, "a", "small");
        link.hidden = !key.parts;
        write(link, "Inspect");
        link.setAttribute("aria-label", `Inspect ${keyText(key.key).slice(0, MAX_SHOWN)} in ${visible(key.limit)}`);
        link.href = keyLink(key.limit, key.parts ?? []);
      } },
    ], keys);
  },

  advice(form) {
    const over = form.get("over") === "1m" ? "minute" : "hour";
    const limit = form.get("limit") ? ` by ${form.get("limit")}` : "";
    return {
      denied: `No key was denied${limit} in the last ${over}. Keys appear here as soon as one exceeds its limit.`,
      shadow_denied: `No shadow limit would have denied a key${limit} in the last ${over}. Set shadow: true on a limit to try it without denying anybody.`,
      near_limit: `No key came close to its limit${limit} in the last ${over}: less than a tenth of its quota left.`,
    }[form.get("kind")];
  },
};

// Returns the address of a key in the key inspector.
function keyLink(limit, parts) {
  const query = new URLSearchParams({ limit });
  for (const part of parts) query.append("key", part);
  return `#keys?${query}`;
}
