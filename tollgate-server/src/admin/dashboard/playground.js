// The playground: the five algorithms on the same traffic, by the server's own code.

const ALGORITHMS = {
  token_bucket: ["Token bucket", "Saves up unused quota, and lets that much through at once."],
  leaky_bucket: ["Leaky bucket", "Passes requests on at an even pace, and queues or rejects the rest."],
  fixed_window: ["Fixed window", "Counts from zero in each window of the clock: twice the limit can pass around a boundary."],
  sliding_window_log: ["Sliding window log", "Remembers each request: never more than the limit in any window. Costs the most memory."],
  sliding_window_counter: ["Sliding window counter", "Estimates the log from two counters: nearly as exact, in a few bytes."],
};
// Long enough that dragging a slider does not send a request for every pixel.
const PAUSE_MS = 120;
const WINDOWS = 4;
const USES_RATE = ["poisson", "steady", "ramp", "on_off", "attack"];

const playground = {
  timer: 0,
  running: null,
  panels: new Map(),

  start() {
    for (const [name, [title, meaning]] of Object.entries(ALGORITHMS)) {
      const plot = make("div", { className: "plot" });
      const line = make("p", { className: "result-line" });
      byId("play-panels").append(make("section", { className: "panel algorithm" },
        make("div", {}, make("h2", { textContent: title }), make("p", { className: "muted", textContent: meaning }), line), plot));
      this.panels.set(name, { line, draw: timeline(plot) });
    }
    const form = byId("play-form");
    form.addEventListener("submit", (event) => event.preventDefault());
    form.elements.limit.addEventListener("input", () => {
      form.elements.capacity.value = form.elements.refill.value = form.elements.limit.value;
    });
    form.addEventListener("input", () => {
      this.label();
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.run(), PAUSE_MS);
    });
    this.label();
  },

  enter() {
    this.run();
  },

  label() {
    const form = byId("play-form").elements;
    for (const name of ["limit", "capacity", "refill", "rate", "burst"]) write(byId(`play-${name}-out`), count(form[name].value));
    const usesRate = USES_RATE.includes(form.kind.value);
    form.rate.disabled = !usesRate;
    form.burst.disabled = usesRate;
  },

  // Simulates. A new run ends the one before.
  async run() {
    this.running?.abort();
    const running = this.running = new AbortController();
    const form = byId("play-form").elements;
    const seconds = Number(form.window.value);
    const each = (value) => `${value}/${seconds}s`;
    const usesRate = USES_RATE.includes(form.kind.value);
    const json = {
      limits: { limit: Number(form.limit.value), window: `${seconds}s`, capacity: Number(form.capacity.value), refill: each(form.refill.value), overflow: form.overflow.value },
      traffic: { kind: form.kind.value, for: `${seconds * WINDOWS}s`, ...(usesRate ? { rate: each(form.rate.value) } : { burst: Number(form.burst.value) }) },
      seed: 1,
    };
    try {
      this.show(await api("/v1/simulate", { method: "POST", json, signal: running.signal }));
      banner();
    } catch (error) {
      if (!running.signal.aborted) banner(error);
    }
  },

  show(report) {
    write(byId("play-traffic"), `${count(report.offered)} requests: ${report.traffic}.`);
    const totals = (limit) => merged(limit.admitted_by_column).map((value, index) => value + merged(limit.denied_by_column)[index]);
    const most = Math.max(1, ...report.limits.flatMap(totals));
    for (const limit of report.limits) {
      const panel = this.panels.get(limit.algorithm);
      if (!panel) continue;
      const text = `${count(limit.admitted)} admitted, ${count(limit.denied)} denied`;
      write(panel.line, text);
      panel.draw(limit, most, `${ALGORITHMS[limit.algorithm][0]}: ${text} of ${count(report.offered)}`);
    }
    table("compared", [
      { heads: true, fill: (cell, limit) => { write(inner(cell, "span"), ALGORITHMS[limit.algorithm]?.[0] ?? words(limit.algorithm)); write(inner(cell, "small"), limit.description); } },
      { css: "number", fill: (cell, limit) => write(cell, count(limit.admitted)) },
      { css: "number", fill: (cell, limit) => write(cell, count(limit.denied)) },
      { css: "number", fill: (cell, limit) => { cell.classList.toggle("tone-denied", limit.worst_window > limit.quota); write(cell, count(limit.worst_window)); } },
      { css: "number wide", fill: (cell, limit) => write(cell, count(limit.largest_burst)) },
      { css: "number wide", fill: (cell, limit) => write(cell, span(limit.wait_p50) || "–") },
      { css: "number wide", fill: (cell, limit) => write(cell, span(limit.wait_p99) || "–") },
    ], report.limits);
  },
};
