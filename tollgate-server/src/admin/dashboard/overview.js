// The first view: what the server does now.

// Refused with 429, as the denied keys of the next view.
const OUTCOMES_DENIED = ["denied", "banned"];
const sum = (counts, names) => names.reduce((total, name) => total + (counts?.[name] ?? 0), 0);
const isOther = (name) => !["allowed", "shadow_allowed", "shadow_denied", ...OUTCOMES_DENIED].includes(name);
const sumOther = (counts) => sum(counts, Object.keys(counts ?? {}).filter(isOther));

const overview = {
  interval: 1000,

  start() {
    this.draw = liveChart(byId("live-chart"));
    byId("busiest-order").addEventListener("change", refresh);
  },

  async poll(signal) {
    const order = byId("busiest-order").value;
    const [status, live] = await Promise.all([
      api("/v1/status", { signal }), api(`/v1/live?count=20&order=${order}`, { signal })]);
    this.showLive(live, status);
    this.showStatus(status);
  },

  showLive(live, status) {
    const totals = live.totals ?? {};
    const [allowed, denied, other] = [totals.allowed ?? 0, sum(totals, OUTCOMES_DENIED), sumOther(totals)];
    const all = allowed + denied + other;
    write(byId("rate-all"), rate(all));
    write(byId("rate-allowed"), rate(allowed));
    write(byId("rate-denied"), rate(denied));
    byId("rate-denied").classList.toggle("some", denied > 0);
    write(byId("share-denied"), all > 0 && denied > 0 ? `${SMALL.format((100 * denied) / all)} %` : "");
    write(byId("rate-shadow"), rate(totals.shadow_denied));
    byId("rate-shadow").classList.toggle("some", totals.shadow_denied > 0);
    const history = (live.history ?? []).map((point) => ({
      allowed: point.allowed ?? 0, denied: point.denied ?? 0, other: point.other ?? 0, shadow: point.shadow_denied ?? 0 }));
    this.draw(history);
    const isQuiet = history.every((point) => point.allowed + point.denied + point.other + point.shadow === 0);
    byId("live-empty").hidden = !isQuiet;
    if (isQuiet) write(byId("live-empty"), this.advice(status));
    const limits = (live.limits ?? []).filter((limit) => limit.since_start);
    write(byId("busiest-count"), live.limits_total > limits.length ? `${count(limits.length)} of ${count(live.limits_total)}` : "");
    byId("busiest-empty").hidden = limits.length > 0;
    table("busiest", [
      { heads: true, fill: (cell, limit) => { writeLimit(cell, limit); } },
      { css: "number", fill: (cell, limit) => write(cell, rate(sum(limit.per_second, ["allowed", "shadow_allowed"]))) },
      { css: "number", fill: (cell, limit) => {
        const value = sum(limit.per_second, [...OUTCOMES_DENIED, "shadow_denied"]);
        cell.classList.toggle("tone-denied", value > 0 && !limit.shadow);
        cell.classList.toggle("tone-shadow", value > 0 && limit.shadow);
        write(cell, rate(value));
      } },
      { css: "number wide", fill: (cell, limit) => write(cell, rate(sumOther(limit.per_second))) },
      { css: "number wide", fill: (cell, limit) => write(cell, count(sum(limit.since_start, [...OUTCOMES_DENIED, "shadow_denied"]))) },
    ], limits);
  },

  advice(status) {
    const address = (status.listeners ?? []).find((listener) => listener.surface === "gateway")?.url;
    return address
      ? `No decisions in the last minute. Send a request to the gateway at ${address} to see it here.`
      : "No decisions in the last minute. Requests to the gateway and checks of the decision service appear here within a second.";
  },

  showStatus(status) {
    about(status);
    const { store = {}, rules = {} } = status;
    tone("tile-ready", status.ready ? "ready" : words(status.problem ?? "not ready"), status.ready);
    const storeText = store.available === false ? `${store.kind}: not available` : store.kind === "memory" ? "memory" : `${store.kind}: available`;
    tone("tile-store", storeText, store.available !== false);
    facts("store-facts", [
      ["Kind", store.kind],
      ["State", store.available === false ? store.problem ?? "not available" : "available"],
      ["Keys", store.keys === undefined || store.keys === null ? undefined : count(store.keys)],
      ["Memory", bytes(store.memory)],
    ]);
    table("servers", [
      { heads: true, fill: (cell, server) => write(cell, visible(server.address)) },
      { fill: (cell, server) => { cell.className = server.breaker === "closed" ? "tone-ok" : "tone-denied"; write(cell, words(server.breaker)); } },
    ], store.servers ?? []);
    facts("rules-facts", [
      ["Version", rules.version],
      ["Source", words(rules.source)],
      ["Loaded", rules.loaded_at ? `${span(Math.max(0, Math.round(status.now - rules.loaded_at)))} ago` : undefined],
      ["Limits", count(rules.limits)],
      ["Server up", status.started_at ? span(Math.max(0, Math.round(status.now - status.started_at))) : undefined],
    ]);
    const upstreams = status.upstreams ?? [];
    const unhealthy = upstreams.filter((upstream) => !upstream.healthy).length;
    write(byId("upstreams-count"), upstreams.length ? `${upstreams.length - unhealthy} of ${upstreams.length} healthy` : "");
    byId("upstreams-empty").hidden = upstreams.length > 0;
    // The unhealthy ones first: these need somebody.
    table("upstreams", [
      { heads: true, fill: (cell, upstream) => write(cell, visible(upstream.upstream)) },
      { fill: (cell, upstream) => { cell.className = upstream.healthy ? "tone-ok" : "tone-denied"; write(cell, upstream.healthy ? "healthy" : "unhealthy"); } },
      { css: "wide", fill: (cell, upstream) => write(cell, (upstream.routes ?? []).map(visible).join(", ")) },
    ], upstreams.toSorted((a, b) => Number(a.healthy) - Number(b.healthy)).slice(0, 50));
  },
};

function tone(id, text, isGood) {
  const element = byId(id);
  element.classList.toggle("tone-denied", !isGood);
  write(element, text);
}

// Shows the name of a limit, with a mark if it only observes.
function writeLimit(cell, limit) {
  write(inner(cell, "bdi"), visible(limit.limit));
  const tags = [limit.shadow && "shadow", limit.enabled === false && "disabled", limit.learned && "learns"].filter(Boolean);
  let tag = cell.querySelector(".tag");
  if (tags.length && !tag) cell.querySelector("bdi").after(tag = make("span", { className: "tag" }));
  if (!tags.length) tag?.remove();
  else write(tag, tags.join(", "));
}
