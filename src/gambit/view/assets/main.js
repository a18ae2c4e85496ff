// Puts the page together and answers the reader.

const byId = (id) => document.getElementById(id);
let run, axis, tree, charts; // of the data on show
const isNarrow = matchMedia("(max-width: 900px)"); // then the panel is below the tree
const now = { colours: theme(), hover: NONE, hoverGroup: null, group: null, step: null, picked: NONE, vote: NONE };

// -- drawing -------------------------------------------------------------------------------------------------------

let wanted = 0; // 1: the top layer, 2: everything
function redraw(what) {
  if (wanted === 0) requestAnimationFrame(() => {
    if (wanted === 2) { tree.draw(now.colours); charts.draw(now.colours); }
    wanted = 0;
    tree.drawTop(shownTraces(), now.step, now.hoverGroup ?? now.group);
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
  if (hadRows !== tree.height) {
    if (!tree.isTouched) tree.arrange(tree.isShown);
    tree.fitRows();
    if (now.picked !== NONE) tree.uncover(now.picked);
    showFolding();
  }
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
  Object.assign(now, { picked: trace, group: null });
  hideTip();
  byId("tree").classList.toggle("focused", trace !== NONE || now.vote !== NONE);
  byId("tab-trace").disabled = trace === NONE;
  history.replaceState(null, "", trace === NONE ? location.pathname + location.search : `#trace-${trace}`);
  if (trace === NONE) { openTab("run"); redraw(2); return; }
  if (tree.row[trace] === NONE) show("all");
  tree.uncover(trace);
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

// -- folding -------------------------------------------------------------------------------------------------------

function toggleGroup(group) {
  tree.fold(group, !group.isOpen);
  if (!group.isOpen && group.traces.includes(now.picked)) pick(NONE);
  now.hoverGroup = null;
  focusGroup(group);
}

// A group as the keyboard's place; an open one stands for its first row.
function focusGroup(group) {
  now.group = group;
  const [answer] = answersIn(run, group);
  byId("live").textContent = `${capital(group.name)}, ${group.isOpen ? "unfolded" : "folded"}, ${number(group.traces.length)} traces, ` +
    `${completedIn(run, group)} completed${answer ? `, mostly ${answer[0]}` : ""}`;
  tree.reveal(group.traces[0]);
  showFolding();
  redraw(2);
}

function foldAll(isOpen) {
  if (!isOpen) pick(NONE);
  tree.foldAll(isOpen);
  now.group = now.hoverGroup = null;
  if (now.picked !== NONE) tree.reveal(now.picked);
  byId("live").textContent = isOpen ? "All traces" : `Folded into ${number(tree.rows.length)} rows`;
  showFolding();
  redraw(2);
}

// The buttons are there where something can be folded, and the legend says how bands are read where there are any.
function showFolding() {
  const canFold = tree.isFolding || run.numIslands > 1;
  byId("folding").hidden = !canFold;
  byId("unfold").disabled = !tree.hasFolded;
  byId("fold").disabled = tree.rows.every(({ trace, groups }) => trace === NONE || !groups[0].canFold);
  byId("band-note").hidden = !tree.hasFolded;
}

// From the run's panel: an island's rows, opened.
function openIsland(island) {
  const first = run.roots.find((root) => run.traces.island[root] === island && tree.row[root] !== NONE);
  if (first === undefined) { show("all"); openIsland(island); return; }
  tree.uncover(first);
  focusGroup(tree.rows[tree.row[first]].groups.find((group) => group.kind === "island" && group.first === group.last) ?? tree.groups[0]);
  if (isNarrow.matches) byId("stage").scrollIntoView({ behavior: "smooth" });
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
  now.group = now.hoverGroup = null;
  showFolding();
  redraw(2);
}

// -- the pointer ---------------------------------------------------------------------------------------------------

function hideTip() { byId("tip").hidden = true; }

function point(x, y) {
  const group = tree.groupAt(x, y), trace = group ? NONE : tree.at(x, y), tip = byId("tip");
  now.step = x >= GUTTER && x <= GUTTER + axis.pixels ? axis.step(x) : null;
  byId("tree").classList.toggle("on-group", group !== null);
  if (group !== null && (group !== now.hoverGroup || tip.hidden)) {
    tip.replaceChildren(...groupTip(run, group));
    tip.hidden = false;
  } else if (group === null && trace === NONE) hideTip();
  else if (trace !== NONE && (trace !== now.hover || tip.hidden)) {
    const canvas = el("canvas");
    tip.replaceChildren(traceHead(run, trace), canvas, list(traceFacts(run, trace)));
    tip.hidden = false;
    drawCurve(canvas, run, trace, now.colours, 230, 84);
  }
  Object.assign(now, { hover: trace, hoverGroup: group });
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
  Object.assign(now, { hover: NONE, hoverGroup: null, step: null });
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
    if (held !== null && held.moved < 4) choose(event.offsetX, event.offsetY);
    held = null;
    box.classList.remove("dragging");
  });
  box.addEventListener("pointercancel", () => { held = null; box.classList.remove("dragging"); });
  box.addEventListener("pointerleave", leave);
  box.addEventListener("dblclick", (event) => { zoomAt(0.35, event.offsetX, event.offsetY); redraw(2); });
  box.addEventListener("wheel", turnWheel, { passive: false });
}

function choose(x, y) {
  const group = tree.groupAt(x, y);
  hideTip();
  if (group === null) pick(tree.at(x, y));
  else toggleGroup(group);
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

// The row that the keyboard is in: of the chosen trace or group.
function currentRow() {
  const trace = now.group ? now.group.traces[0] : now.picked;
  return trace === NONE ? NONE : tree.row[trace];
}

function goTo(row) {
  const found = tree.rows[Math.min(Math.max(row, 0), tree.rows.length - 1)];
  if (found === undefined) return;
  if (found.group === null) { pick(found.trace); return; }
  if (now.picked !== NONE) pick(NONE);
  focusGroup(found.group);
}

function walk(rows) {
  const row = currentRow();
  goTo(row === NONE ? 0 : row + rows);
}

// Right: into a folded group, or to the latest branch. Left: to the parent, and from a root to its group, folded.
function goIn() {
  if (now.group && !now.group.isOpen) toggleGroup(now.group);
  else if (now.group || now.picked === NONE) walk(0);
  else pick(run.children[now.picked].at(-1) ?? now.picked);
}

function goOut() {
  if (now.group) { if (now.group.isOpen) toggleGroup(now.group); return; }
  if (now.picked === NONE) { walk(0); return; }
  const parent = run.traces.parent[now.picked];
  if (parent !== NONE) pick(parent);
  else foldAround(now.picked);
}

function foldAround(trace) {
  const group = tree.rows[tree.row[trace]].groups.at(-1);
  if (!byId("folding").hidden && group.canFold) toggleGroup(group);
}

const KEYS = {
  ArrowUp: () => walk(-1), ArrowDown: () => walk(1), PageUp: () => walk(-10), PageDown: () => walk(10),
  Home: () => goTo(0), End: () => goTo(tree.rows.length - 1),
  ArrowLeft: goOut, ArrowRight: goIn,
  Enter: () => { if (now.group) toggleGroup(now.group); else if (now.picked === NONE) walk(0); else pick(now.picked); },
};

const VIEW_KEYS = {
  "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: fitAll, "?": toggleHelp,
  "[": () => { tree.zoomRows(0.7); redraw(2); }, "]": () => { tree.zoomRows(1 / 0.7); redraw(2); },
  f: () => byId("folding").hidden || foldAll(false), u: () => byId("folding").hidden || foldAll(true),
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
  else if (now.picked !== NONE || now.group) pick(NONE);
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
  tree.arrange(FILTERS[byId("show").value || "all"]());
  if (before.tree.isTouched) tree.foldAs(before.tree);
  now.hoverGroup = null;
  now.group = everyGroup(tree.groups).find((group) => group.name === now.group?.name) ?? null;
  tree.rowHeight = before.tree.rowHeight > before.tree.fittingRow + 0.01 ? before.tree.rowHeight : tree.fittingRow;
  tree.scrollTo(before.tree.top);
}

// The words around the canvases.
function describe() {
  byId("question-line").textContent = run.run.question.replace(/\s+/g, " ");
  byId("answer-line").replaceChildren("answer ", el("b", {}, run.run.answer ?? "none"));
  byId("summary").replaceChildren(...summary(run));
  byId("run").replaceChildren(...runPanel(run, { onVote: pickVote, onTrace: pick, onIsland: openIsland }));
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
  byId("fold").addEventListener("click", () => foldAll(false));
  byId("unfold").addEventListener("click", () => foldAll(true));
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
