// Views and their addresses, and the polls of the view that is shown.

const VIEWS = { overview, top: top_limited, rules, keys, explain, playground };
// While the server does not answer, it is tried less often.
const SLOWEST_MS = 5000;

let current = null;
let polling = null;
let timer = 0;
let failures = 0;

// Polls the view that is shown now, and then at its interval. There is one poll at a time, and none while the page is
// hidden.
async function refresh() {
  clearTimeout(timer);
  polling?.abort();
  if (document.hidden || !current) return;
  const mine = polling = new AbortController();
  const view = VIEWS[current];
  try {
    await view.poll?.(mine.signal);
    if (mine.signal.aborted) return;
    failures = 0;
    if (view.poll) banner();
  } catch (error) {
    if (mine.signal.aborted) return;
    failures += 1;
    // The header shows that there is no answer, and the last data stays readable.
    banner(error instanceof Unreachable ? null : error);
  }
  byId(`view-${current}`).classList.toggle("stale", connection.state === "gone");
  // A view without a poll still finds out that the server is back.
  const interval = view.interval ?? 5000;
  timer = setTimeout(view.poll ? refresh : probe, Math.min(Math.max(interval, SLOWEST_MS), interval * 2 ** Math.min(failures, 3)));
}

// Finds out whether the server answers, for views that do not poll.
async function probe() {
  await api("/v1/status").then(about, () => {});
  refresh();
}

// Repeats what failed while the server did not answer, in views that do not poll.
function recovered() {
  banner();
  if (!VIEWS[current].poll) VIEWS[current].enter?.(new URLSearchParams());
}

// Shows the view that the address names.
function route() {
  const [name, query = ""] = location.hash.slice(1).split("?");
  const next = Object.hasOwn(VIEWS, name) ? name : "overview";
  const isChange = current !== null && current !== next;
  current = next;
  for (const each of Object.keys(VIEWS)) byId(`view-${each}`).hidden = each !== next;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${next}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const title = byId(`title-${next}`);
  document.title = `${title.textContent} · Tollgate`;
  banner();
  VIEWS[next].enter?.(new URLSearchParams(query));
  if (isChange) {
    title.tabIndex = -1;
    title.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  refresh();
}

for (const view of Object.values(VIEWS)) view.start?.();
login.start();
byId("confirm-no").addEventListener("click", () => byId("confirm").close());
byId("skip").addEventListener("click", () => byId("main").focus());
addEventListener("hashchange", route);
addEventListener("online", refresh);
document.addEventListener("visibilitychange", refresh);
route();
api("/v1/status").then(about, () => {});
