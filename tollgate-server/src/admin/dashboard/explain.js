// Explains what the limits would answer to a request.

const explain = {
  start() {
    byId("explain-form").addEventListener("submit", (event) => { event.preventDefault(); this.run(); });
  },

  async run() {
    const form = new FormData(byId("explain-form"));
    const json = { method: form.get("method").trim() || "GET", path: form.get("path"), headers: {} };
    for (const field of ["host", "ip"]) if (form.get(field).trim()) json[field] = form.get(field).trim();
    try {
      for (const line of form.get("headers").split("\n").filter((line) => line.trim())) {
        const colon = line.indexOf(":");
        if (colon < 1) throw new Error(`the header line "${line}" has no colon: write NAME: VALUE`);
        json.headers[line.slice(0, colon).trim()] = line.slice(colon + 1).trim();
      }
      this.show(await api("/v1/explain", { method: "POST", json }));
      banner();
    } catch (error) {
      banner(error);
    }
  },

  show(answer) {
    byId("explain-empty").hidden = true;
    byId("explain-answer").className = `answer ${answer.allowed ? "tone-ok" : "tone-denied"}`;
    write(byId("explain-answer"), this.headline(answer));
    table("explained", [
      { heads: true, fill: (cell, limit) => writeLimit(cell, limit) },
      { fill: (cell, limit) => {
        const [text, isBad] = this.stateText(limit);
        cell.classList.toggle("tone-denied", isBad);
        write(inner(cell, "span"), text);
        const errors = (limit.expression_errors ?? []).map((each) => `${each.field}: ${each.error}`);
        write(inner(cell, "small"), [limit.why, ...errors].filter(Boolean).map(visible).join("; "));
      } },
      { css: "wide", fill: (cell, limit) => writeKey(cell, (limit.counted ?? limit.in_flight)?.key ?? "") },
      { css: "number", fill: (cell, limit) => write(cell, this.left(limit)) },
      { css: "number wide", fill: (cell, limit) => write(cell, span(limit.counted?.banned_for ?? limit.counted?.retry_after)) },
    ], answer.limits ?? []);
  },

  headline(answer) {
    const route = answer.route === null ? " No route serves it." : answer.route ? ` Route: ${visible(answer.route.name)}.` : "";
    if (answer.allowed) return `Allowed.${route}`;
    const retry = answer.retry_after ? `, retry after ${span(answer.retry_after)}` : "";
    const by = answer.limit ? ` by ${visible(answer.limit)}` : "";
    return `Refused${by}: ${words(answer.reason)}${answer.status ? `, status ${answer.status}` : ""}${retry}.${route}`;
  },

  stateText(limit) {
    const { counted, in_flight: inFlight } = limit;
    switch (limit.state) {
      case "counted":
        if (counted?.allowed === null || counted === undefined) return ["the store does not answer", true];
        if (counted.banned_for) return [`banned for ${span(counted.banned_for)}`, true];
        return counted.allowed ? [`allowed, costs ${count(counted.cost)}`, false] : [limit.shadow ? "would deny" : "denies", true];
      case "in_flight":
        return [`${count(inFlight?.in_flight)} in flight: ${inFlight?.allowed ? "allowed" : "denies"}`, !inFlight?.allowed];
      case "refused":
        return [`refuses: ${words(limit.reason)}`, true];
      case "not_matched": return ["does not apply", false];
      case "key_missing": return ["the request has no key", false];
      default: return [words(limit.state), false];
    }
  },

  left({ counted, in_flight: inFlight }) {
    if (counted?.quota) return `${count(counted.remaining)} of ${count(counted.quota)}`;
    if (inFlight) return `${count(Math.max(0, inFlight.quota - inFlight.in_flight))} of ${count(inFlight.quota)}`;
    return "–";
  },
};
