// Everything beside the canvases. All words of the run enter as text nodes, never as markup.

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function list(pairs) {
  return el("dl", {}, ...pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function traceFacts(run, trace) {
  const { traces } = run, parent = traces.parent[trace], end = traces.ended[trace];
  const facts = [
    ...(run.numIslands > 1 ? [["island", `${traces.island[trace]} of ${number(run.numIslands)}`]] : []),
    [parent === NONE ? "root" : "branched from", parent === NONE ? `since step ${number(traces.created[trace])}`
      : `${parent} at step ${number(traces.created[trace])}`],
    ["end", `${endWords(run, trace)}${end === NONE ? "" : ` at step ${number(Math.max(end, traces.left[trace]))}`}`],
    ["tokens", `${number(traces.own[trace])} own` + (parent === NONE ? "" : ` + ${number(traces.inherited[trace])} inherited`)],
    ["thoughts", `${number(traces.thoughts[trace])} own` + (parent === NONE ? "" : ` + ${number(traces.seen[trace])} inherited`)],
  ];
  const answer = traces.answer[trace];
  if (run.stateName(trace) === "finished" || answer !== null) facts.push(["answer", answer ?? "none"]);
  if (run.voteOf[trace] !== NONE) facts.push(["weight of its vote", decimal(traces.weight[trace])]);
  else if (answer !== null) facts.push(["weight of its vote", "none"]);
  return facts;
}

function endWords(run, trace) {
  const state = run.stateName(trace), reason = run.traces.reason[trace];
  const why = reason && reason !== "stop" ? ` (${reason})` : "";
  if (state === "pruned" && run.wasGhost(trace)) return `ghost since step ${number(run.traces.ended[trace])}, pruned${why}`;
  return `${WORDS[state]}${why}`;
}

function traceHead(run, trace) {
  return el("div", { class: "trace-head" }, el("strong", {}, `Trace ${trace}`),
    el("span", { class: "quiet" }, WORDS[run.stateName(trace)]),
    el("span", { class: "score" }, `score ${decimal(run.score(trace))}`));
}

function capital(text) { return text.charAt(0).toUpperCase() + text.slice(1); }

function groupTip(run, group) {
  const scores = group.traces.map((trace) => run.score(trace)).filter((score) => score !== null);
  const mean = scores.length > 0 ? scores.reduce((sum, score) => sum + score, 0) / scores.length : null;
  const answers = answersIn(run, group), best = answers.slice(0, 3).map(([answer, count]) => `${answer} × ${count}`);
  return [
    el("div", { class: "trace-head" }, el("strong", {}, capital(group.name)), el("span", { class: "score" }, `mean score ${decimal(mean)}`)),
    list([["traces", number(group.traces.length)], ["completed", number(completedIn(run, group))],
      ["answers", best.length > 0 ? best.join(", ") + (answers.length > 3 ? " …" : "") : "none"]]),
    el("p", { class: "quiet" }, group.isOpen ? "click to fold" : "click to unfold"),
  ];
}

// What happened, in a sentence.
function summary(run) {
  const all = run.traces.parent.map((_, trace) => trace), count = (state) => all.filter((trace) => run.stateName(trace) === state).length;
  const [pruned, done, branched] = [count("pruned"), count("finished"), run.size - run.roots.length];
  const changes = pruned + branched === 0 ? "" : `; ${number(pruned)} weak ones were pruned, ${number(branched)} branched from strong ones`;
  const words = `${number(run.roots.length)} traces began${changes}. `;
  if (run.votes.length === 0) return [words, `${number(done)} are complete.`];
  const [row] = run.votes, most = run.votes.reduce((a, b) => (b.traces.length > a.traces.length ? b : a));
  const total = run.votes.reduce((sum, each) => sum + each.weight, 0) || 1;
  const weighs = (each) => `${Math.round((100 * each.weight) / total)} % of the weight`;
  const origin = branched ? `, from ${number(row.roots.length)} ${row.roots.length === 1 ? "root" : "roots"}` : "";
  const counted = `${number(row.traces.length)} of ${number(done)} complete ones say `;
  return [words, counted, el("b", {}, row.answer), ` (${weighs(row)}${origin}).`, ...(most === row ? [] :
    [` ${number(most.traces.length)} say ${most.answer} (${weighs(most)}): votes are weighed, not counted.`])];
}

// -- the run -------------------------------------------------------------------------------------------------------

function runPanel(run, { onVote, onTrace, onIsland }) {
  const { run: facts } = run;
  const parts = facts.notices.map((notice) => el("p", { class: "notice" }, notice));
  parts.push(el("h2", {}, "Question"), el("div", { class: "question" }, facts.question));
  parts.push(el("h2", {}, "Answer"), el("div", { class: "answer" }, facts.answer ?? "none"));
  parts.push(el("p", {}, facts.answer === null ? "No completed trace gave one."
    : `Ahead by ${Math.round(facts.margin * 100)} % of all weight.`));
  parts.push(el("h2", {}, "Vote"), voteTable(run, onVote, onTrace, onIsland));
  if (run.numIslands > 1) parts.push(islandBox(run, onIsland));
  parts.push(el("h2", {}, "Search"), list(facts.facts));
  parts.push(el("details", {}, el("summary", {}, "Prompt"), el("pre", {}, facts.prompt)));
  return parts;
}

function voteTable(run, onVote, onTrace, onIsland) {
  const total = run.votes.reduce((sum, row) => sum + row.weight, 0) || 1;
  const hasIslands = run.numIslands > 1;
  const columns = ["answer", "weight", "traces", "roots", ...(hasIslands ? ["islands"] : [])];
  const head = el("tr", {}, ...columns.map((name) => el("th", { scope: "col" }, name)));
  const body = run.votes.flatMap((row, index) => {
    const bar = el("span", { class: "share" });
    bar.style.width = `${(100 * row.weight) / total}%`;
    const pick = (event) => { if (event.type === "click" || event.key === "Enter" || event.key === " ") { event.preventDefault(); onVote(index); } };
    const line = el("tr", { class: index === 0 ? "pick first" : "pick", tabindex: 0, role: "button", "data-vote": index,
      "aria-pressed": "false", title: "Show its traces in the tree", onclick: pick, onkeydown: pick },
    el("td", {}, row.answer, bar), el("td", {}, decimal(row.weight)), el("td", {}, number(row.traces.length)),
    el("td", {}, number(row.roots.length)), hasIslands ? el("td", {}, number(row.islands.length)) : null);
    const roots = el("td", { colspan: columns.length, class: "roots" }, "from roots ", links(row.roots, onTrace));
    if (hasIslands) roots.append("on islands ", links(row.islands, onIsland));
    return [line, el("tr", { hidden: true, "data-roots": index }, roots)];
  });
  if (run.run.abstained) {
    body.push(el("tr", {}, el("td", {}, "no answer"), el("td", {}, ""), el("td", {}, number(run.run.abstained)),
      ...columns.slice(3).map(() => el("td", {}, ""))));
  }
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
}

function links(numbers, onPick) {
  return el("span", { class: "chips" }, ...numbers.map((each) => el("button", { onclick: () => onPick(each) }, String(each))));
}

// Every island with what it found; made when it is opened, for there may be hundreds.
function islandBox(run, onIsland) {
  const box = el("details", { id: "islands" }, el("summary", {}, `${number(run.numIslands)} islands`));
  box.addEventListener("toggle", () => box.open && box.children.length === 1 && box.append(islandTable(run, onIsland)));
  return box;
}

function islandTable(run, onIsland) {
  const all = run.traces.parent.map((_, trace) => trace);
  const groups = islandsOf(run, run.roots.map((root) => new Group("root", root, root, familyOf(run, root))), all.length);
  const head = el("tr", {}, ...["island", "traces", "completed", "mostly"].map((name) => el("th", { scope: "col" }, name)));
  const body = groups.map((group) => {
    const [answer] = answersIn(run, group), swatch = el("i", { class: `swatch island-${group.first % NUM_ISLAND_COLOURS}` });
    return el("tr", {}, el("td", {}, swatch, el("button", { onclick: () => onIsland(group.first) }, String(group.first))),
      el("td", {}, number(group.traces.length)), el("td", {}, number(completedIn(run, group))),
      el("td", {}, answer ? `${answer[0]} × ${answer[1]}` : "–"));
  });
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
}

// -- one trace -----------------------------------------------------------------------------------------------------

async function tracePanel(run, trace, colours, onTrace) {
  const { traces } = run;
  const canvas = el("canvas", { role: "img", "aria-label": `Scores of the thoughts of trace ${trace}` });
  const path = run.lineage(trace), children = run.children[trace];
  const chip = (id) => el("button", { onclick: () => onTrace(id), "aria-current": id === trace ? "true" : null }, String(id));
  const parts = [traceHead(run, trace), canvas, list(traceFacts(run, trace))];
  if (path.length > 1) parts.push(el("h2", {}, "Lineage"), el("div", { class: "chips" }, ...path.map(chip)));
  if (children.length > 0) parts.push(el("h2", {}, "Branches from it"), el("div", { class: "chips" }, ...children.map(chip)));
  parts.push(el("h2", {}, run.run.is_decoded ? "Text" : "Token numbers"));
  const bytes = await run.bytes(trace).catch((error) => error);
  if (bytes instanceof Error) {
    parts.push(el("p", { class: "notice" }, `This browser cannot unpack the text: ${bytes.message}`));
    return { parts, canvas };
  }
  const cut = wholeCharacter(bytes, traces.cut[trace]);
  const pieces = thoughtPieces(run, trace, bytes, cut);
  if (traces.parent[trace] !== NONE) parts.push(inheritedPart(run, trace, pieces.inherited, colours));
  parts.push(el("div", { class: "part-title" }, `Its own, ${number(traces.own[trace])} tokens`));
  parts.push(textPart("own", pieces.own, run, colours));
  return { parts, canvas };
}

// The text cut at its thoughts, and at the branch: [text, score of the thought that ends here or null].
function thoughtPieces(run, trace, bytes, cut) {
  const decoder = new TextDecoder();
  const found = { inherited: [], own: [] };
  let from = 0;
  const add = (to, score) => {
    if (from < cut && to > cut) add(cut, null);
    if (to > from) found[to <= cut ? "inherited" : "own"].push([decoder.decode(bytes.subarray(from, to)), score]);
    from = Math.max(to, from);
  };
  for (const [i] of run.thoughtsOf(trace)) add(wholeCharacter(bytes, run.thoughts.bytes[i]), run.thoughts.score[i]);
  add(bytes.length, null);
  return found;
}

function inheritedPart(run, trace, pieces, colours) {
  const title = `Inherited from ${run.traces.parent[trace]}, ${number(run.traces.inherited[trace])} tokens`;
  const box = el("details", { class: "inherited-box" }, el("summary", { class: "part-title" }, title));
  const fill = () => box.open && box.children.length === 1 && box.append(textPart("inherited", pieces, run, colours));
  box.addEventListener("toggle", fill);
  box.open = pieces.length <= 12;
  fill();
  return box;
}

function textPart(kind, pieces, run, colours) {
  const range = run.thoughtRange ??= thoughtRange(run.thoughts.score);
  const blocks = pieces.map(([text, score]) => {
    const badge = score === null ? el("b") : el("b", { title: "score of this thought" }, decimal(score), bar(score, range, colours));
    return el("div", { class: "thought" }, el("span", {}, text.replace(/\n+$/, "")), badge);
  });
  return el("div", { class: `text part ${kind}` }, ...(blocks.length ? blocks : [el("span", { class: "quiet" }, "nothing")]));
}

function bar(score, range, colours) {
  const node = el("i"), shade = shadeOf(score, range);
  node.style.background = colours.shades[shade];
  node.style.width = `${Math.max((100 * shade) / (NUM_SHADES - 1), 6)}%`;
  return node;
}

// -- small things --------------------------------------------------------------------------------------------------

function legend(colours) {
  const entry = (name, colour, words = WORDS[name]) => {
    const canvas = el("canvas", { "aria-hidden": "true" });
    const ink = fitCanvas(canvas, name === "finished" ? 22 : 12, 12);
    ink.fillStyle = ink.strokeStyle = colour;
    ink.lineWidth = 1.4;
    MARKS[name](ink, 6, 6, 3.6);
    if (name === "finished") ink.fillRect(13, 2, END, 8); // where rows are too thin for a mark
    return el("li", {}, canvas, words);
  };
  return [entry("root", colours.mark), entry("branch", colours.mark), entry("finished", colours.win, "completed: winner"),
    entry("finished", colours.lose, "completed: other"),
    ...["pruned", "ghost", "cancelled"].map((name) => entry(name, colours.mark))];
}

const HELP = [
  ["point", "score curve and facts of a trace"], ["click, Enter", "its text"], ["drag", "move"],
  ["Ctrl + wheel, + −", "zoom; a double click zooms in"], ["Alt + wheel, [ ]", "zoom the rows only"], ["wheel", "scroll the rows"],
  ["↑ ↓, Home End", "trace or folded group above, below; the first, the last"],
  ["← →", "parent, latest branch; fold, unfold a group"], ["f, u", "fold, unfold everything"], ["Shift + ← →", "move along the steps"],
  ["0", "everything"], ["Escape", "close"],
];

const READING = "Blue and thick: a high score; orange and thin: a low one; thin grey: no scored thought yet; " +
  "dotted: silent, waiting for KV cache or a ghost. Bold answers won the vote. Bars at the left edge are islands: a click " +
  "folds one. A folded row is as high as traces run in it, has the colour of their mean score, a tick for each answer, and " +
  "the answer that most of them gave.";

function helpBox() {
  return [list(HELP.map(([keys, does]) => [el("kbd", {}, keys), does])), el("p", { class: "quiet" }, READING)];
}
