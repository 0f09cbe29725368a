// Pictures: the live plot and the timelines of the playground. Each is made once and changes its paths afterwards.

const CHART = { height: 190, left: 46, right: 8, top: 8, bottom: 22 };

// Returns the next round number whose half is round too.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((round) => round >= value) ?? value;
}

// Makes the plot of decisions per second. The returned function draws points, oldest first.
function liveChart(parent) {
  const svg = draw("svg", { role: "img" });
  const grid = draw("path", { class: "grid" });
  const other = draw("path", { class: "other" });
  const denied = draw("path", { class: "denied" });
  const allowed = draw("path", { class: "allowed" });
  const edge = draw("path", { class: "allowed-line" });
  const shadow = draw("path", { class: "shadow-line" });
  const labels = [0, 1, 2].map(() => draw("text", { "text-anchor": "end" }));
  const oldest = draw("text", {}, "60 s ago"), newest = draw("text", { "text-anchor": "end" }, "now");
  svg.append(grid, allowed, denied, other, edge, shadow, ...labels, oldest, newest);
  parent.append(svg);
  let points = [];
  const redraw = () => {
    const width = Math.max(parent.clientWidth, 200), { height, left, right, top, bottom } = CHART;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const base = height - bottom, plot = width - left - right;
    const total = (point) => point.allowed + point.denied + point.other;
    const most = roundUp(Math.max(1, ...points.map((point) => Math.max(total(point), point.shadow))));
    const x = (index) => left + (plot * (60 - points.length + index + 1)) / 60;
    const y = (value) => base - ((base - top) * value) / most;
    const line = (value) => points.map((point, index) => `${index ? "L" : "M"}${x(index).toFixed(1)} ${y(value(point)).toFixed(1)}`).join("");
    const back = (value) => points.map((_, at) => points.length - 1 - at)
      .map((index) => `L${x(index).toFixed(1)} ${y(value(points[index])).toFixed(1)}`).join("");
    const area = (low, high) => (points.length > 1 ? `${line(high)}${back(low)}z` : "");
    allowed.setAttribute("d", area(() => 0, (point) => point.allowed));
    edge.setAttribute("d", line((point) => point.allowed));
    denied.setAttribute("d", area((point) => point.allowed, (point) => point.allowed + point.denied));
    other.setAttribute("d", area((point) => point.allowed + point.denied, total));
    shadow.setAttribute("d", points.some((point) => point.shadow) ? line((point) => point.shadow) : "");
    grid.setAttribute("d", [0, 0.5, 1].map((part) => `M${left} ${Math.round(y(most * part)) + 0.5}H${width - right}`).join(""));
    labels.forEach((label, index) => {
      label.setAttribute("x", left - 8);
      label.setAttribute("y", y((most * index) / 2) + 4);
      write(label, rate((most * index) / 2));
    });
    oldest.setAttribute("x", left);
    newest.setAttribute("x", width - right);
    for (const label of [oldest, newest]) label.setAttribute("y", height - 5);
  };
  new ResizeObserver(redraw).observe(parent);
  return (history) => {
    points = history.slice(-60);
    const last = points.at(-1);
    const peak = (field) => rate(Math.max(0, ...points.map((point) => point[field])));
    svg.setAttribute("aria-label", last
      ? `Last second: ${rate(last.allowed)} allowed, ${rate(last.denied)} denied. Highest in 60 seconds: ${peak("allowed")} allowed, ${peak("denied")} denied.`
      : "No decisions yet");
    redraw();
  };
}

const BARS = 120;

// Makes a timeline of one algorithm: bars of admitted and denied requests, and below them the quota that is left.
function timeline(parent) {
  const height = 96, bars = 62, gap = 4;
  const svg = draw("svg", { role: "img", preserveAspectRatio: "none", viewBox: `0 0 ${BARS * 6} ${height}` });
  const grid = draw("path", { class: "grid", d: `M0 ${bars}.5H${BARS * 6}M0 ${height - 0.5}H${BARS * 6}` });
  const admitted = draw("path", { class: "bars-admitted" });
  const denied = draw("path", { class: "bars-denied" });
  const area = draw("path", { class: "level-area" });
  const level = draw("path", { class: "level", "vector-effect": "non-scaling-stroke" });
  svg.append(grid, admitted, denied, area, level);
  parent.append(svg);
  return (limit, most, label) => {
    const [low, high] = [merged(limit.admitted_by_column), merged(limit.denied_by_column)];
    const size = (value) => (value ? Math.max(1, (value / most) * (bars - 2)) : 0);
    const bar = (index, from, tall) => (tall ? `M${index * 6} ${(bars - from).toFixed(1)}v${(-tall).toFixed(1)}h5v${tall.toFixed(1)}z` : "");
    admitted.setAttribute("d", low.map((value, index) => bar(index, 0, size(value))).join(""));
    denied.setAttribute("d", high.map((value, index) => bar(index, size(low[index]), size(value))).join(""));
    const left = limit.remaining ?? [], top = bars + gap, depth = height - top - 1;
    const at = (value) => (top + depth - (Math.min(value, limit.quota) / Math.max(limit.quota, 1)) * (depth - 1)).toFixed(1);
    const step = (BARS * 6) / Math.max(left.length, 1);
    const path = left.length ? `M0 ${at(limit.quota)}${left.map((value, index) => `L${((index + 1) * step).toFixed(1)} ${at(value)}`).join("")}` : "";
    level.setAttribute("d", path);
    area.setAttribute("d", path && `${path}V${height}H0z`);
    svg.setAttribute("aria-label", label);
  };
}

// Adds up neighbouring columns, so that one bar is left for each group.
function merged(columns) {
  const group = Math.max(1, Math.floor(columns.length / BARS));
  return Array.from({ length: Math.ceil(columns.length / group) }, (_, index) =>
    columns.slice(index * group, (index + 1) * group).reduce((sum, value) => sum + value, 0));
}
