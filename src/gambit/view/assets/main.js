// Puts the page together and answers the reader.

const byId = (id) => document.getElementById(id);
let run, axis, tree, charts; // of the data on show
const isNarrow = matchMedia("(max-width: 900px)"); // then the panel is below the tree
const now = { colours: theme(), hover: NONE, step: null, picked: NONE, vote: NONE };

// -- drawing -------------------------------------------------------------------------------------------------------

let wanted = 0; // 1: the top layer, 2: everything
function redraw(what) {
  if (wanted === 0) requestAnimationFrame(() => {
    if (wanted === 2) { tree.draw(now.colours); charts.draw(now.colours); }
    wanted = 0;
    tree.drawTop(shownTraces(), now.step);
    charts.drawTop(now.step);
  });
  wanted = Math.max(wanted, what);
}

function shownTraces() {
  const traces = now.vote !== NONE ? [...run.votes[now.vote].traces] : [];
  for (const trace of [now.picked, now.hover]) if (trace !== NONE) traces.push(trace);
  return traces;
}

function resize() {
  const hadRows = tree.height;
  tree.resize();
  charts.resize();
  if (hadRows !== tree.height) tree.fitRows();
  tree.scrollTo(tree.top);
  redraw(2);
}

function dress() {
  now.colours = theme();
  byId("legend").replaceChildren(...legend(now.colours));
  byId("scale-low").textContent = `score ${decimal(tree.range[0])}`;
  byId("scale-high").textContent = decimal(tree.range[1]);
  const ink = fitCanvas(byId("scale-bar"), 96, 10);
  now.colours.shades.forEach((shade, i) => {
    const height = 10 * (0.4 + (0.6 * i) / (NUM_SHADES - 1)); // as thick as the lines
    ink.fillStyle = shade;
    ink.fillRect((i * 96) / NUM_SHADES, (10 - height) / 2, 96 / NUM_SHADES + 0.5, height);
  });
  if (now.picked !== NONE) pick(now.picked);
  redraw(2);
}

// -- choosing ------------------------------------------------------------------------------------------------------

function openTab(name) {
  for (const each of ["run", "trace"]) {
    byId(each).hidden = each !== name;
    byId(`tab-${each}`).setAttribute("aria-selected", String(each === name));
  }
}

async function pick(trace) {
  now.picked = trace;
  hideTip();
  byId("tree").classList.toggle("focused", trace !== NONE || now.vote !== NONE);
  byId("tab-trace").disabled = trace === NONE;
  history.replaceState(null, "", trace === NONE ? location.pathname + location.search : `#trace-${trace}`);
  if (trace === NONE) { openTab("run"); redraw(2); return; }
  if (tree.row[trace] === NONE) show("all");
  tree.reveal(trace);
  redraw(2);
  byId("live").textContent = `Trace ${trace}, score ${decimal(run.score(trace))}, ${endWords(run, trace)}`;
  byId("tab-trace").textContent = `Trace ${trace}`;
  const { parts, canvas } = await tracePanel(run, trace, now.colours, pick);
  if (now.picked !== trace) return; // another one was chosen while this one was unpacked
  byId("trace").replaceChildren(...parts);
  openTab("trace");
  byId("trace").scrollTop = 0;
  if (isNarrow.matches) byId("panel").scrollIntoView({ behavior: "smooth" });
  drawCurve(canvas, run, trace, now.colours, byId("trace").clientWidth - 32, 120);
}

function pickVote(index) {
  now.vote = now.vote === index ? NONE : index;
  for (const row of document.querySelectorAll("[data-vote]")) row.setAttribute("aria-pressed", String(Number(row.dataset.vote) === now.vote));
  for (const row of document.querySelectorAll("[data-roots]")) row.hidden = Number(row.dataset.roots) !== now.vote;
  byId("tree").classList.toggle("focused", now.picked !== NONE || now.vote !== NONE);
  redraw(1);
}

const FILTERS = {
  all: () => () => true,
  completed: () => {
    const kept = new Set(run.votes.flatMap((row) => row.traces).flatMap((trace) => run.lineage(trace)));
    return (trace) => kept.has(trace) || run.stateName(trace) === "finished";
  },
};

function show(name) {
  byId("show").value = name;
  tree.arrange(FILTERS[name]());
  tree.fitRows();
  redraw(2);
}

// -- the pointer ---------------------------------------------------------------------------------------------------

function hideTip() { byId("tip").hidden = true; }

function point(x, y) {
  const trace = tree.at(x, y), tip = byId("tip");
  now.step = x >= GUTTER && x <= GUTTER + axis.pixels ? axis.step(x) : null;
  if (trace === NONE) hideTip();
  else if (trace !== now.hover || tip.hidden) {
    const canvas = el("canvas");
    tip.replaceChildren(traceHead(run, trace), canvas, list(traceFacts(run, trace)));
    tip.hidden = false;
    drawCurve(canvas, run, trace, now.colours, 230, 84);
  }
  now.hover = trace;
  if (!tip.hidden) placeTip(x, y);
  redraw(1);
}

function placeTip(x, y) {
  const tip = byId("tip"), box = byId("tree").getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const left = box.left + x + 16 + width > innerWidth ? box.left + x - 16 - width : box.left + x + 16;
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${Math.min(Math.max(box.top + y + 14, 4), innerHeight - height - 6)}px`;
}

function leave() {
  Object.assign(now, { hover: NONE, step: null });
  hideTip();
  redraw(1);
}

function listenToPointer(box) {
  let held = null;
  box.addEventListener("pointerdown", (event) => {
    held = { x: event.offsetX, y: event.offsetY, moved: 0 };
    box.setPointerCapture(event.pointerId);
  });
  box.addEventListener("pointermove", (event) => {
    if (held === null) { point(event.offsetX, event.offsetY); return; }
    const [dx, dy] = [event.offsetX - held.x, event.offsetY - held.y];
    held = { x: event.offsetX, y: event.offsetY, moved: held.moved + Math.abs(dx) + Math.abs(dy) };
    if (held.moved < 4) return;
    box.classList.add("dragging");
    hideTip();
    axis.pan(-dx);
    tree.scrollTo(tree.top - dy);
    redraw(2);
  });
  box.addEventListener("pointerup", (event) => {
    if (held !== null && held.moved < 4) pick(tree.at(event.offsetX, event.offsetY));
    held = null;
    box.classList.remove("dragging");
  });
  box.addEventListener("pointercancel", () => { held = null; box.classList.remove("dragging"); });
  box.addEventListener("pointerleave", leave);
  box.addEventListener("dblclick", (event) => { zoomAt(0.35, event.offsetX, event.offsetY); redraw(2); });
  box.addEventListener("wheel", turnWheel, { passive: false });
}

function turnWheel(event) {
  const size = event.deltaMode === 1 ? 16 : 1, [dx, dy] = [event.deltaX * size, event.deltaY * size];
  if (event.ctrlKey || event.metaKey) zoomAt(Math.exp(dy / 240), event.offsetX, event.offsetY);
  else if (event.altKey) tree.zoomRows(Math.exp(-dy / 240), event.offsetY);
  else if (event.shiftKey || Math.abs(dx) > Math.abs(dy)) axis.pan(event.shiftKey ? dx || dy : dx);
  else if (tree.canScroll) tree.scrollTo(tree.top + dy);
  else return;
  event.preventDefault();
  hideTip();
  redraw(2);
}

// -- the keyboard --------------------------------------------------------------------------------------------------

function neighbour(rows) {
  if (now.picked === NONE || tree.row[now.picked] === NONE) return tree.order[0] ?? NONE;
  return tree.order[Math.min(Math.max(tree.row[now.picked] + rows, 0), tree.order.length - 1)];
}

function relative(direction) {
  if (now.picked === NONE) return tree.order[0] ?? NONE;
  const next = direction < 0 ? run.traces.parent[now.picked] : run.children[now.picked].at(-1) ?? NONE;
  return next === NONE ? now.picked : next;
}

const KEYS = {
  ArrowUp: () => pick(neighbour(-1)), ArrowDown: () => pick(neighbour(1)),
  PageUp: () => pick(neighbour(-10)), PageDown: () => pick(neighbour(10)),
  ArrowLeft: () => pick(relative(-1)), ArrowRight: () => pick(relative(1)),
  Enter: () => pick(now.picked === NONE ? neighbour(0) : now.picked),
};

const VIEW_KEYS = {
  "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: fitAll, "?": toggleHelp,
  "[": () => { tree.zoomRows(0.7); redraw(2); }, "]": () => { tree.zoomRows(1 / 0.7); redraw(2); },
  Escape: close,
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select, textarea, input")) return;
  const isTree = event.target === byId("tree") || event.target === document.body;
  const isPan = event.shiftKey && (event.key === "ArrowLeft" || event.key === "ArrowRight");
  const action = isPan ? () => { axis.pan(event.key === "ArrowLeft" ? -120 : 120); redraw(2); }
    : VIEW_KEYS[event.key] ?? (isTree ? KEYS[event.key] : undefined);
  if (action === undefined) return;
  event.preventDefault();
  action();
}

// Rows grow first, until they can be read; what is pointed at stays where it is.
function zoomAt(factor, x, y) {
  const trace = x === undefined || y === undefined ? NONE : tree.at(x, y);
  const areThin = tree.rowHeight < (factor < 1 ? READABLE : ROW_MAX) && tree.canGrow;
  axis.zoom(areThin ? factor ** 0.35 : factor, x);
  tree.zoomRows(1 / factor, y);
  if (trace !== NONE) tree.scrollTo(tree.top + tree.y(trace) - y);
}

// Around the chosen trace, else around the middle.
function zoom(factor) {
  const y = now.picked === NONE || tree.row[now.picked] === NONE ? undefined : tree.y(now.picked);
  zoomAt(factor, now.step === null ? undefined : axis.x(now.step), y);
  redraw(2);
}

function fitAll() { axis.fit(); tree.fitRows(); redraw(2); }

function close() {
  if (!byId("help").hidden) toggleHelp();
  else if (now.picked !== NONE) pick(NONE);
  else if (now.vote !== NONE) pickVote(now.vote);
  byId("tree").focus({ preventScroll: true });
}

function toggleHelp() {
  byId("help").hidden = !byId("help").hidden;
  byId("help-button").setAttribute("aria-expanded", String(!byId("help").hidden));
}

// -- the beginning -------------------------------------------------------------------------------------------------

// What is on show, from a page's data; where the reader had zoomed in on data of the same run, the view stays.
function take(data, store) {
  const before = { axis, tree };
  run = new Run(data, store);
  axis = new Axis(run.last);
  tree = new Tree(run, axis, byId("tree"));
  charts = new Charts(run, axis, byId("charts"));
  if (before.axis === undefined) return;
  if (before.axis.to - before.axis.from < before.axis.last) axis.place(before.axis.from, before.axis.to - before.axis.from);
  tree.resize();
  if (byId("show").value === "completed") tree.arrange(FILTERS.completed());
  tree.rowHeight = before.tree.rowHeight > before.tree.fittingRow + 0.01 ? before.tree.rowHeight : tree.fittingRow;
  tree.scrollTo(before.tree.top);
}

// The words around the canvases.
function describe() {
  byId("question-line").textContent = run.run.question.replace(/\s+/g, " ");
  byId("answer-line").replaceChildren("answer ", el("b", {}, run.run.answer ?? "none"));
  byId("run").replaceChildren(...runPanel(run, { onVote: pickVote, onTrace: pick }));
  const kept = run.traces.parent.map((_, trace) => trace).filter(FILTERS.completed()).length;
  const chosen = byId("show").value || "all";
  byId("show").replaceChildren(el("option", { value: "all" }, `all traces (${number(run.size)})`),
    el("option", { value: "completed" }, `to an answer (${number(kept)})`));
  byId("show").value = chosen;
}

function begin(data, store) {
  take(data, store);
  describe();
  byId("help").replaceChildren(...helpBox());
  byId("show").addEventListener("change", (event) => show(event.target.value));
  byId("zoom-in").addEventListener("click", () => zoom(0.6));
  byId("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
  byId("fit").addEventListener("click", fitAll);
  byId("help-button").addEventListener("click", toggleHelp);
  byId("tab-run").addEventListener("click", () => openTab("run"));
  byId("tab-trace").addEventListener("click", () => openTab("trace"));
  listenToPointer(byId("tree"));
  document.addEventListener("keydown", onKey);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", dress);
  new ResizeObserver(resize).observe(byId("stage"));
  resize();
  dress();
  openTab("run");
  window.addEventListener("hashchange", followLink);
  followLink();
}

// page.html#trace-12 opens a trace.
function followLink() {
  const asked = /^#trace-(\d+)$/.exec(location.hash);
  if (asked && Number(asked[1]) < run.size) pick(Number(asked[1]));
}

if (byId("data") !== null) begin(JSON.parse(byId("data").textContent), byId("texts"));
