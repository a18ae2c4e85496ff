// The live page: a list of searches, and the tree page of one of them, growing.

Object.assign(WORDS, { running: "running", waiting: "waiting" });
const watching = { id: null, source: null, hasBegun: false };

// -- the list ------------------------------------------------------------------------------------------------------

function row(search) {
  const state = [search.status];
  if (search.status === "running") state.push(el("progress", { max: search.num_traces, value: search.num_completed }));
  if (search.status === "completed") state.splice(0, 1, el("b", {}, search.answer ?? "no answer"), ` ${search.num_completed} traces`);
  return el("li", {}, el("button", { "data-search": search.id, "aria-current": String(search.id === watching.id),
    onclick: () => choose(search.id) },
  el("span", { class: "asked" }, search.question), el("span", { class: `state ${search.status}` }, ...state,
    el("span", { class: "quiet" }, search.policy))));
}

function showList(searches) {
  const focused = document.activeElement?.dataset?.search;
  byId("searches").replaceChildren(...searches.map(row));
  byId("no-searches").hidden = searches.length > 0;
  if (focused) document.querySelector(`[data-search="${focused}"]`)?.focus();
  if (byId("follow").checked && searches.length > 0) watch(searches[0].id);
}

// A search that was chosen stays until another one is.
function choose(id) {
  byId("follow").checked = false;
  watch(id);
}

function listen(source, name, take) {
  source.addEventListener(name, (event) => take(JSON.parse(event.data)));
}

// -- one search ----------------------------------------------------------------------------------------------------

function watch(id) {
  if (watching.id === id) return;
  watching.source?.close();
  Object.assign(watching, { id, isNew: true });
  history.replaceState(null, "", byId("follow").checked ? location.pathname : `#${id}`);
  for (const button of document.querySelectorAll("[data-search]")) {
    button.setAttribute("aria-current", String(button.dataset.search === id));
  }
  byId("log-link").href = `/page/searches/${id}/log`;
  watching.source = new EventSource(`/page/searches/${id}/live`);
  listen(watching.source, "snapshot", (data) => id === watching.id && showSnapshot(data));
  listen(watching.source, "end", () => watching.source.close());
  watching.source.onerror = () => {
    if (watching.source.readyState === EventSource.CLOSED) byId("state-line").textContent = "no longer here";
  };
}

function showSnapshot(snapshot) {
  byId("state-line").textContent = snapshot.status === "completed" ? "" : snapshot.error ?? snapshot.status;
  byId("cancel").hidden = !["queued", "running"].includes(snapshot.status);
  byId("nothing").hidden = true;
  byId("watch").hidden = false;
  if (snapshot.data === null) { waiting(snapshot); return; }
  const data = snapshot.data, store = { textContent: snapshot.texts };
  if (!watching.hasBegun) {
    begin(data, store);
    Object.assign(watching, { hasBegun: true, isNew: false });
    sayNoAnswerYet(snapshot);
    return;
  }
  if (watching.isNew) forgetView();
  take(data, store);
  keepVote();
  describe();
  sayNoAnswerYet(snapshot);
  resize();
  showFolding();
  if (now.picked !== NONE) refreshTrace();
  recolour();
}

function sayNoAnswerYet(snapshot) {
  if (snapshot.status !== "running" || run.run.answer !== null) return;
  byId("answer-line").replaceChildren();
  document.querySelector("#run .answer").textContent = "none yet";
}

// Another search is on show: nothing of the one before is chosen in it.
function forgetView() {
  watching.isNew = false;
  axis = undefined;
  Object.assign(now, { picked: NONE, vote: NONE, hover: NONE, group: null, hoverGroup: null });
  byId("show").value = "all";
  byId("tree").classList.remove("focused");
  byId("tab-trace").disabled = true;
  openTab("run");
}

function waiting(snapshot) {
  byId("question-line").textContent = snapshot.question;
  byId("answer-line").replaceChildren();
  byId("run").replaceChildren(el("h2", {}, "Question"), el("div", { class: "question" }, snapshot.question),
    el("p", { class: "quiet" }, snapshot.status === "queued" ? "Waits for its turn." : "It left no events."));
}

// An answer keeps its mark when the order of the vote changes.
let chosen = null;
function keepVote() {
  if (now.vote === NONE) { chosen = null; return; }
  now.vote = run.votes.findIndex((row_) => row_.answer === chosen);
}

document.addEventListener("click", () => { chosen = now.vote === NONE ? null : run?.votes[now.vote]?.answer ?? null; });

// The open trace with what it has by now; the reader's place in it stays.
async function refreshTrace() {
  const trace = now.picked, place = byId("trace").scrollTop;
  const { parts, canvas } = await tracePanel(run, trace, now.colours, pick);
  if (now.picked !== trace) return;
  byId("trace").replaceChildren(...parts);
  byId("trace").scrollTop = place;
  drawCurve(canvas, run, trace, now.colours, byId("trace").clientWidth - 32, 120);
}

// Colours and the scale of scores follow the data.
function recolour() {
  byId("scale-low").textContent = `score ${decimal(tree.range[0])}`;
  byId("scale-high").textContent = decimal(tree.range[1]);
  for (const line_ of document.querySelectorAll("[data-vote]")) line_.setAttribute("aria-pressed", String(Number(line_.dataset.vote) === now.vote));
  redraw(2);
}

// -- asking --------------------------------------------------------------------------------------------------------

async function post(path, body) {
  const headers = { "content-type": "application/json" };
  const reply = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  const found = await reply.json();
  if (!reply.ok) throw new Error(found.error?.message ?? `the server answered ${reply.status}`);
  return found;
}

async function ask(event) {
  event.preventDefault();
  byId("ask-button").disabled = true;
  byId("ask-problem").hidden = true;
  try {
    const { id } = await post("/page/ask", { question: byId("question").value, model: byId("model").value });
    watch(id);
  } catch (error) {
    byId("ask-problem").textContent = error.message;
    byId("ask-problem").hidden = false;
  } finally {
    byId("ask-button").disabled = false;
  }
}

byId("ask").addEventListener("submit", ask);
byId("cancel").addEventListener("click", () => post(`/page/searches/${watching.id}/cancel`, {}).catch(() => {}));
const searches = new EventSource("/page/events");
listen(searches, "searches", showList);
// Browsers keep a page that was left for their back button, and have six connections for one server.
window.addEventListener("pagehide", () => { searches.close(); watching.source?.close(); });
window.addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });
byId("follow").addEventListener("change", () => {
  const newest = byId("searches").querySelector("button")?.dataset.search;
  if (byId("follow").checked && newest) watch(newest);
});
if (location.hash.startsWith("#search-")) choose(location.hash.slice(1));
