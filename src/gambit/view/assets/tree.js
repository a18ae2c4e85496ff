// The tree: one row per trace, or per folded group, over decode steps. The base canvas is drawn when the view moves,
// the top one on hover.

const ROW_MAX = 18, NEAR = 7, LABELLED = 8, READABLE = 12; // pixels
const LEAST_ROW = 2.2; // of a trace that can be told from its neighbours
const END = 9; // the coloured end of a thin row
const LEAST_BAND = 10, BAND = 12, MOST_BAND = 30; // of a folded group
const BAR = 5, FOLD_ZONE = 14; // the bar beside an island, and where a click folds it
const BIN = 2; // pixels of a band's columns
const LEAST_STRIPE = 3; // of an island's colour in the bar of a bundle

// The steps on show, the same for tree and charts.
class Axis {
  constructor(last) { this.last = last; this.width = 1; this.fit(); }
  get pixels() { return Math.max(this.width - GUTTER - MARGIN, 10); }
  x(step) { return GUTTER + ((step - this.from) / (this.to - this.from)) * this.pixels; }
  step(x) { return this.from + ((x - GUTTER) / this.pixels) * (this.to - this.from); }
  fit() { this.from = 0; this.to = this.last; }

  zoom(factor, x) {
    const fixed = this.step(x ?? GUTTER + this.pixels / 2);
    const span = Math.min(Math.max((this.to - this.from) * factor, Math.min(10, this.last)), this.last);
    const share = (fixed - this.from) / (this.to - this.from);
    this.place(fixed - share * span, span);
  }

  pan(pixels) { this.place(this.from + (pixels / this.pixels) * (this.to - this.from), this.to - this.from); }

  place(from, span) {
    this.from = Math.min(Math.max(from, 0), this.last - span);
    this.to = this.from + span;
  }
}

class Tree {
  constructor(run, axis, box) {
    Object.assign(this, { run, axis, box, top: 0, rowHeight: 10, height: 0 });
    [this.base, this.over] = box.querySelectorAll("canvas");
    this.range = run.scoreRange();
    this.arrange(() => true);
  }

  // Traces too thin to be told apart are folded into groups at first.
  arrange(isShown) {
    this.isShown = isShown;
    this.isTouched = false;
    const count = this.run.traces.parent.filter((_, trace) => isShown(trace)).length;
    this.groups = groupsOf(this.run, isShown, Math.floor((this.height - 12) / BAND));
    this.isFolding = this.height > 0 && count * LEAST_ROW > this.height - 12;
    setOpen(this.groups, !this.isFolding);
    this.settle();
  }

  // After groups were opened or folded.
  settle() {
    this.rows = rowsOf(this.groups);
    this.row = new Int32Array(this.run.size).fill(NONE); // of a folded trace: its group's
    this.rows.forEach(({ trace, group }, row) => {
      for (const each of group ? group.traces : [trace]) this.row[each] = row;
    });
    this.hasFolded = this.rows.some(({ group }) => group !== null);
  }

  fold(group, isOpen) {
    group.isOpen = isOpen;
    this.isTouched = true;
    const { top } = this;
    this.settle();
    this.rowHeight = Math.max(this.fittingRow, Math.min(this.rowHeight, this.mostRow));
    this.scrollTo(top);
  }

  foldAll(isOpen) {
    setOpen(this.groups, isOpen);
    this.isTouched = this.isFolding = true;
    this.settle();
    this.fitRows();
  }

  // As the reader has folded an earlier tree of the same run.
  foldAs(other) {
    const known = new Map(everyGroup(other.groups).map((group) => [group.name, group.isOpen]));
    for (const group of everyGroup(this.groups)) group.isOpen = known.get(group.name) ?? group.isOpen;
    this.isTouched = true;
    this.isFolding ||= other.isFolding;
    this.settle();
  }

  // Whatever a trace is folded into is opened.
  uncover(trace) {
    while (this.rows[this.row[trace]].group) this.fold(this.rows[this.row[trace]].group, true);
  }

  isFoldedAway(trace) { return this.row[trace] !== NONE && this.rows[this.row[trace]].trace !== trace; }

  resize() {
    const { width, height } = this.box.getBoundingClientRect();
    this.height = height;
    this.axis.width = width;
    this.ink = fitCanvas(this.base, width, height);
    this.overInk = fitCanvas(this.over, width, height);
  }

  get fittingRow() {
    const least = this.hasFolded ? LEAST_BAND : LEAST_ROW;
    return Math.min(Math.max((this.height - 12) / Math.max(this.rows.length, 1), least), this.mostRow);
  }
  get mostRow() { return this.rows.every(({ group }) => group !== null) ? MOST_BAND : ROW_MAX; }
  get canGrow() { return this.fittingRow < READABLE; }
  fitRows() { this.rowHeight = this.fittingRow; this.top = 0; }

  zoomRows(factor, y = this.height / 2) {
    const fixed = (y + this.top) / this.rowHeight;
    this.rowHeight = Math.min(Math.max(this.rowHeight * factor, this.fittingRow), this.mostRow);
    this.scrollTo(fixed * this.rowHeight - y);
  }

  get canScroll() { return this.rows.length * this.rowHeight + 12 > this.height + 1; }
  scrollTo(top) {
    this.top = Math.min(Math.max(top, 0), Math.max(this.rows.length * this.rowHeight + 12 - this.height, 0));
  }

  rowY(row) { return 6 + (row + 0.5) * this.rowHeight - this.top; }
  y(trace) { return this.rowY(this.row[trace]); }
  rowAt(y) { return Math.floor((y - 6 + this.top) / this.rowHeight); }

  reveal(trace) {
    const y = this.y(trace);
    if (y < 20 || y > this.height - 20) this.scrollTo(this.top + y - this.height / 2);
    const { axis, run } = this;
    const [from, to] = [run.traces.created[trace], run.end(trace)];
    if (to < axis.from || from > axis.to) axis.place((from + to) / 2 - (axis.to - axis.from) / 2, axis.to - axis.from);
  }

  // The trace under a point: in its row, or the nearest row within reach where rows are thinner than a pointer.
  at(x, y) {
    const step = this.axis.step(x), slack = (NEAR / this.axis.pixels) * (this.axis.to - this.axis.from);
    const middle = this.rowAt(y);
    for (let away = 0; away * this.rowHeight <= NEAR; away++) {
      for (const row of away ? [middle - away, middle + away] : [middle]) {
        const trace = this.rows[row]?.trace ?? NONE;
        if (trace === NONE) continue;
        const end = Math.max(this.run.end(trace), this.run.traces.left[trace]);
        const reach = this.run.stateName(trace) === "finished" && this.rowHeight >= LABELLED ? 5 * slack : slack;
        if (step >= this.run.traces.created[trace] - slack && step <= end + reach) return trace;
      }
    }
    return NONE;
  }

  // The folded group under a point, or the open one whose bar it is; null elsewhere.
  groupAt(x, y) {
    const row = this.rows[this.rowAt(y)];
    if (row === undefined) return null;
    if (row.group) return row.group;
    const canFold = this.isFolding || this.run.numIslands > 1;
    return canFold && x < FOLD_ZONE && row.groups.at(-1).canFold ? row.groups.at(-1) : null;
  }

  draw(colours) {
    const { ink } = this;
    this.colours = colours;
    ink.clearRect(0, 0, this.axis.width, this.height);
    this.grid(ink);
    const first = Math.max(Math.floor((this.top - 6) / this.rowHeight) - 1, 0);
    const last = Math.min(Math.ceil((this.top + this.height) / this.rowHeight) + 1, this.rows.length);
    const shown = this.rows.slice(first, last), traces = shown.map(({ trace }) => trace).filter((trace) => trace !== NONE);
    this.connectors(ink, this.rows.map(({ trace }) => trace).filter((trace) => trace !== NONE)); // also from outside
    shown.forEach(({ group }, i) => group && this.band(ink, group, this.rowY(first + i)));
    this.paint(ink, traces.map((trace) => [trace, Infinity]), 1);
    this.winner(ink);
    this.bars(ink, first, last);
    if (this.rowHeight >= 10) this.names(ink, traces);
    this.scrollbar(ink);
  }

  // A folded group: how many of its traces run (height), how they score (colour), when they answered (ticks), and
  // what they answered most.
  band(ink, group, y) {
    const { axis, run } = this, bins = this.binsOf(group);
    const full = this.rowHeight * 0.78, base = y + full / 2;
    const most = bins.count.reduce((a, b) => Math.max(a, b), 1);
    for (let i = 0; i < bins.count.length; i++) {
      if (bins.count[i] === 0) continue;
      ink.fillStyle = bins.scored[i] === 0 ? this.colours.faint : this.colours.shades[shadeOf(bins.sum[i] / bins.scored[i], this.range)];
      const height = Math.max((full * bins.count[i]) / most, 1);
      ink.fillRect(GUTTER + i * BIN, base - height, BIN + 0.3, height);
    }
    ink.fillStyle = this.colours.mark;
    for (const trace of group.traces) {
      const x = axis.x(run.end(trace));
      if (run.stateName(trace) === "finished" && x >= GUTTER && x <= GUTTER + axis.pixels) ink.fillRect(x - 0.5, base, 1, 2);
    }
    this.bandWords(ink, group, y);
  }

  binsOf(group) {
    const { axis, run } = this, num = Math.max(Math.ceil(axis.pixels / BIN), 1), perBin = (axis.to - axis.from) / num;
    const bins = { count: new Int32Array(num), scored: new Int32Array(num), sum: new Float64Array(num) };
    const { thoughts, first } = run;
    for (const trace of group.traces) {
      let step = run.traces.created[trace], value = run.startValue(trace);
      const end = run.end(trace);
      let bin = Math.max(Math.floor((step - axis.from) / perBin), 0);
      for (let next = first[trace]; next <= first[trace + 1]; next++) {
        step = next < first[trace + 1] ? Math.min(thoughts.step[next], end) : end;
        const until = Math.min(Math.floor((step - axis.from) / perBin), num);
        for (; bin < until; bin++) {
          bins.count[bin]++;
          if (value !== null) { bins.scored[bin]++; bins.sum[bin] += value; }
        }
        if (next < first[trace + 1]) value = thoughts.value[next];
      }
    }
    return bins;
  }

  bandWords(ink, group, y) {
    const [found] = answersIn(this.run, group);
    ink.textBaseline = "middle";
    ink.font = "10px system-ui, sans-serif";
    ink.fillStyle = this.colours.soft;
    ink.fillText("▸", BAR + 3, y);
    ink.textAlign = "right";
    if (group.range.length > 5) ink.font = "9px system-ui, sans-serif";
    ink.fillText(group.range, GUTTER - 3, y, GUTTER - FOLD_ZONE - 2);
    ink.textAlign = "left";
    if (found === undefined) return;
    const [answer, count, vote] = found, completed = completedIn(this.run, group);
    const short = answer.length > 7 ? `${answer.slice(0, 6)}…` : answer;
    const size = Math.min(Math.max(this.rowHeight * 0.8, 9), 11);
    ink.font = `${vote === 0 ? "700 " : ""}${size}px system-ui, sans-serif`;
    ink.fillStyle = vote === 0 ? this.colours.ink : this.colours.soft;
    ink.fillText(`${short} ${count}/${completed}`, GUTTER + this.axis.pixels + 5, y, MARGIN - 12);
  }

  // One bar beside the rows of each island, and beside open groups that can be folded again.
  bars(ink, first, last) {
    const hasIslands = this.run.numIslands > 1;
    for (let row = first; row < last; row++) {
      const own = this.groupOf(row), islands = this.islandsBeside(row);
      if (!hasIslands && !(this.isFolding && own.canFold)) continue;
      const goesOn = row + 1 < this.rows.length
        && (hasIslands ? this.islandsBeside(row + 1)[0] === islands.at(-1) : this.groupOf(row + 1) === own);
      const top = this.rowY(row) - this.rowHeight / 2, height = this.rowHeight - (goesOn ? 0 : Math.min(1.5, this.rowHeight / 4));
      const stripes = hasIslands && (islands.length === 1 || height / islands.length >= LEAST_STRIPE) ? islands : [NONE];
      stripes.forEach((island, i) => {
        ink.fillStyle = island === NONE ? this.colours.faint : this.colours.islands[island % NUM_ISLAND_COLOURS];
        ink.fillRect(0, top + (i * height) / stripes.length, BAR, height / stripes.length + (goesOn ? 0.3 : 0));
      });
    }
  }

  // The way to the answer: the best-scored trace that gave it, with all it inherited.
  winner(ink) {
    const best = this.run.winner;
    const path = best === NONE ? [] : this.untilOf([best]).filter(([trace]) => !this.isFoldedAway(trace) && this.row[trace] !== NONE);
    ink.lineWidth = 2;
    ink.strokeStyle = this.colours.win;
    for (const [trace] of path) {
      const parent = this.run.traces.parent[trace];
      if (parent === NONE || this.row[parent] === NONE) continue;
      const x = this.axis.x(this.run.traces.created[trace]);
      line(ink, x, this.y(parent), x, this.y(trace));
    }
    this.paint(ink, path, Math.max(1.5, 3 / Math.max(this.rowHeight * 0.55, 0.6)));
  }

  // The traces and their ancestors, each with the last step that counts.
  untilOf(traces) {
    const until = new Map();
    for (const trace of traces) {
      let end = Infinity;
      for (let at = trace; at !== NONE; at = this.run.traces.parent[at]) {
        if ((until.get(at) ?? NONE) >= end) break;
        until.set(at, end);
        end = this.run.traces.created[at];
      }
    }
    return [...until];
  }

  groupOf(row) { return this.rows[row].group ?? this.rows[row].groups.at(-1); }

  islandsBeside(row) {
    const { trace, group } = this.rows[row];
    if (group === null) return [this.run.traces.island[trace]];
    if (group.kind !== "island") return [this.run.traces.island[group.traces[0]]];
    return group.parts.length > 0 && group.parts[0].kind === "island" ? group.parts.map((part) => part.first) : [group.first];
  }

  grid(ink) {
    ink.strokeStyle = this.colours.line;
    ink.lineWidth = 1;
    for (const step of ticks(this.axis.from, this.axis.to, this.axis.pixels, 90)) {
      const x = Math.round(this.axis.x(step)) + 0.5;
      line(ink, x, 0, x, this.height);
    }
  }

  connectors(ink, traces) {
    const { parent, created } = this.run.traces;
    ink.strokeStyle = this.rowHeight > 4 ? this.colours.mark : this.colours.faint;
    ink.globalAlpha = this.rowHeight > 4 ? 0.45 : 0.6;
    ink.lineWidth = this.rowHeight > 4 ? 1 : 0.5;
    ink.beginPath();
    for (const trace of traces) {
      if (parent[trace] === NONE || this.row[parent[trace]] === NONE) continue;
      const x = this.axis.x(created[trace]);
      ink.moveTo(x, this.y(parent[trace]));
      ink.lineTo(x, this.y(trace));
    }
    ink.stroke();
    ink.globalAlpha = 1;
  }

  // Lines and marks of [trace, last step to show] pairs.
  paint(ink, parts, boldness) {
    ink.save();
    ink.beginPath();
    ink.rect(GUTTER - 6, 0, this.axis.width, this.height);
    ink.clip();
    const buckets = Array.from({ length: NUM_SHADES }, () => []);
    const unscored = [], silent = [];
    for (const [trace, until] of parts) this.collect(trace, until, boldness, buckets, unscored, silent);
    buckets.forEach((rects, shade) => {
      ink.fillStyle = this.colours.shades[shade];
      for (const [x0, y, x1, height] of rects) ink.fillRect(x0, y, Math.max(x1 - x0, 0.5), height);
    });
    this.dashes(ink, unscored, this.colours.soft, [], 1);
    this.dashes(ink, silent, this.colours.soft, [2, 3], 1);
    for (const [trace, until] of parts) if (until === Infinity && !this.isFoldedAway(trace)) this.ends(ink, trace, boldness);
    ink.restore();
  }

  // A trace's line in pieces of one colour; thicker is better, for those who do not see the colours.
  collect(trace, until, boldness, buckets, unscored, silent) {
    const { run, axis } = this, { thoughts } = run;
    const y = this.y(trace), end = Math.min(run.end(trace), until);
    const full = Math.min(Math.max(this.rowHeight * 0.55, 0.6), 5.5) * boldness;
    let step = run.traces.created[trace], value = run.startValue(trace), next = run.first[trace];
    const lastThought = run.first[trace + 1], pixel = (axis.to - axis.from) / axis.pixels;
    while (step < end) {
      let stop = step, after = value;
      do { // thoughts closer than a pixel are one
        stop = next < lastThought ? Math.min(thoughts.step[next], end) : end;
        if (next < lastThought) after = thoughts.value[next++];
      } while (stop - step < pixel && stop < end);
      const x0 = axis.x(step), x1 = axis.x(stop);
      if (value === null) unscored.push([x0, x1, y]);
      else {
        const shade = shadeOf(value, this.range), height = full * (0.4 + (0.6 * shade) / (NUM_SHADES - 1));
        const before = buckets[shade].at(-1); // most neighbours have the same colour
        if (before && before[2] === x0 && before[1] === y - height / 2) before[2] = x1;
        else buckets[shade].push([x0, y - height / 2, x1, height]);
      }
      [step, value] = [stop, after];
    }
    if (run.wasGhost(trace) && until === Infinity) {
      const left = run.traces.left[trace];
      silent.push([axis.x(run.end(trace)), axis.x(left === NONE ? run.last : left), y]);
    }
    const waits = run.traces.waits[trace];
    for (let i = 0; i < waits.length; i += 2) {
      silent.push([axis.x(waits[i]), axis.x(waits[i + 1] === NONE ? run.last : waits[i + 1]), y, full]);
    }
  }

  dashes(ink, lines, colour, pattern, width) {
    for (const [x0, x1, y, cover] of lines) if (cover) ink.clearRect(x0, y - cover / 2 - 0.5, x1 - x0, cover + 1);
    ink.strokeStyle = colour;
    ink.lineWidth = Math.min(width, this.rowHeight);
    ink.setLineDash(pattern);
    ink.beginPath();
    for (const [x0, x1, y] of lines) { ink.moveTo(x0, y); ink.lineTo(x1, y); }
    ink.stroke();
    ink.setLineDash([]);
  }

  ends(ink, trace, boldness) {
    const { run, axis } = this;
    const radius = Math.min(this.rowHeight * 0.34, 3.6) * (boldness > 1 ? 1.25 : 1);
    const r = Math.max(radius, boldness > 1 ? 2.5 : 0), y = this.y(trace), state = run.stateName(trace);
    ink.fillStyle = ink.strokeStyle = this.colours.mark;
    const colour = this.endColour(trace);
    if (r < 2) { // from afar only those that answered
      ink.fillStyle = colour;
      if (state === "finished") ink.fillRect(axis.x(run.end(trace)), y - this.rowHeight / 2, END, Math.max(this.rowHeight - 0.5, 1));
      if (r < 0.9) return;
    }
    ink.fillStyle = this.colours.mark;
    ink.lineWidth = r > 2 ? 1.3 : 0.8;
    MARKS[run.traces.parent[trace] === NONE ? "root" : "branch"](ink, axis.x(run.traces.created[trace]), y, r);
    const x = axis.x(run.end(trace)) + r + 1;
    ink.fillStyle = ink.strokeStyle = colour;
    if (r < 2 && state === "finished") return;
    if (run.wasGhost(trace)) {
      MARKS.ghost(ink, x - r - 1, y, r);
      if (state === "pruned") MARKS.pruned(ink, axis.x(run.traces.left[trace]) + r + 1, y, r);
    } else if (MARKS[state]) MARKS[state](ink, x, y, r);
    if ((state === "finished" || run.traces.answer[trace] !== null) && (this.rowHeight >= LABELLED || boldness > 1)) this.answer(ink, trace, x + r + 5, y);
  }

  // Of its end: blue with the winning answer, orange with another one, grey without any.
  endColour(trace) {
    if (this.run.stateName(trace) !== "finished") return this.colours.soft;
    return this.run.voteOf[trace] === 0 ? this.colours.win : this.colours.lose;
  }

  answer(ink, trace, x, y) {
    const text = this.run.traces.answer[trace] ?? "no answer";
    const isWinner = this.run.voteOf[trace] === 0;
    const size = Math.min(Math.max(this.rowHeight * 0.95, 9), 12);
    ink.font = `${isWinner ? "700 " : ""}${size}px system-ui, sans-serif`;
    ink.textBaseline = "middle";
    ink.strokeStyle = this.colours.paper;
    ink.lineWidth = 3;
    const short = text.length > 18 ? `${text.slice(0, 17)}…` : text;
    ink.strokeText(short, x, y);
    ink.fillStyle = isWinner ? this.colours.win : this.colours.lose;
    ink.fillText(short, x, y);
  }

  names(ink, traces) {
    ink.font = "10px system-ui, sans-serif";
    ink.textAlign = "right";
    ink.textBaseline = "middle";
    ink.fillStyle = this.colours.soft;
    for (const trace of traces) ink.fillText(trace, GUTTER - 14, this.y(trace), GUTTER - BAR - 16);
    ink.textAlign = "left";
  }

  scrollbar(ink) {
    if (!this.canScroll) return;
    const all = this.rows.length * this.rowHeight + 12;
    ink.fillStyle = this.colours.faint;
    ink.fillRect(this.axis.width - 5, (this.top / all) * this.height, 4, Math.max((this.height / all) * this.height, 16));
  }

  // What is pointed at: traces with all they inherited, and the crosshair.
  drawTop(traces, step, group = null) {
    const ink = this.overInk;
    ink.clearRect(0, 0, this.axis.width, this.height);
    if (step !== null) {
      ink.strokeStyle = this.colours.faint;
      ink.lineWidth = 1;
      const x = Math.round(this.axis.x(step)) + 0.5;
      line(ink, x, 0, x, this.height);
    }
    if (group) this.outline(ink, group);
    const parts = this.untilOf(traces).filter(([trace]) => this.row[trace] !== NONE);
    const boldness = Math.max(1.3, 2.2 / Math.max(this.rowHeight * 0.55, 0.6));
    this.connectors(ink, parts.map(([trace]) => trace));
    this.paint(ink, parts, boldness);
  }

  // Around a group's row, or its rows.
  outline(ink, group) {
    const rows = group.traces.map((trace) => this.row[trace]);
    const [first, last] = [Math.min(...rows), Math.max(...rows)];
    ink.strokeStyle = this.colours.accent;
    ink.lineWidth = 1.5;
    ink.strokeRect(1, this.rowY(first) - this.rowHeight / 2, this.axis.width - 8, (last - first + 1) * this.rowHeight);
  }
}
