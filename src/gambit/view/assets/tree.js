// The tree: one row per trace over decode steps. The base canvas is drawn when the view moves, the top one on hover.

const ROW_MAX = 18, NEAR = 7, LABELLED = 8, READABLE = 12; // pixels

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
    Object.assign(this, { run, axis, box, top: 0, rowHeight: 10 });
    [this.base, this.over] = box.querySelectorAll("canvas");
    this.range = run.scoreRange();
    this.arrange(() => true);
  }

  // Families stay together: children right below their parent, the latest nearest, so that branches do not cross.
  arrange(isShown) {
    const { parent } = this.run.traces;
    this.order = [];
    const stack = [...parent.keys()].filter((trace) => parent[trace] === NONE).reverse();
    while (stack.length > 0) {
      const trace = stack.pop();
      if (isShown(trace)) this.order.push(trace);
      stack.push(...this.run.children[trace]);
    }
    this.row = new Int32Array(this.run.size).fill(NONE);
    this.order.forEach((trace, row) => { this.row[trace] = row; });
  }

  resize() {
    const { width, height } = this.box.getBoundingClientRect();
    this.height = height;
    this.axis.width = width;
    this.ink = fitCanvas(this.base, width, height);
    this.overInk = fitCanvas(this.over, width, height);
  }

  get fittingRow() { return Math.min((this.height - 12) / Math.max(this.order.length, 1), ROW_MAX); }
  get canGrow() { return this.fittingRow < READABLE; }
  fitRows() { this.rowHeight = this.fittingRow; this.top = 0; }

  zoomRows(factor, y = this.height / 2) {
    const fixed = (y + this.top) / this.rowHeight;
    this.rowHeight = Math.min(Math.max(this.rowHeight * factor, this.fittingRow), ROW_MAX);
    this.scrollTo(fixed * this.rowHeight - y);
  }

  get canScroll() { return this.order.length * this.rowHeight + 12 > this.height + 1; }
  scrollTo(top) {
    this.top = Math.min(Math.max(top, 0), Math.max(this.order.length * this.rowHeight + 12 - this.height, 0));
  }

  y(trace) { return 6 + (this.row[trace] + 0.5) * this.rowHeight - this.top; }

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
    const middle = Math.floor((y - 6 + this.top) / this.rowHeight);
    for (let away = 0; away * this.rowHeight <= NEAR; away++) {
      for (const row of away ? [middle - away, middle + away] : [middle]) {
        const trace = this.order[row];
        if (trace === undefined) continue;
        const end = Math.max(this.run.end(trace), this.run.traces.left[trace]);
        const reach = this.run.stateName(trace) === "finished" && this.rowHeight >= LABELLED ? 5 * slack : slack;
        if (step >= this.run.traces.created[trace] - slack && step <= end + reach) return trace;
      }
    }
    return NONE;
  }

  draw(colours) {
    const { ink } = this;
    this.colours = colours;
    ink.clearRect(0, 0, this.axis.width, this.height);
    this.grid(ink);
    const first = Math.max(Math.floor((this.top - 6) / this.rowHeight) - 1, 0);
    const last = Math.min(Math.ceil((this.top + this.height) / this.rowHeight) + 1, this.order.length);
    this.connectors(ink, this.order); // of all: a branch may cross the window from outside
    this.paint(ink, this.order.slice(first, last).map((trace) => [trace, Infinity]), 1);
    if (this.rowHeight >= 10) this.names(ink, this.order.slice(first, last));
    this.scrollbar(ink);
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
    for (const [trace, until] of parts) if (until === Infinity) this.ends(ink, trace, boldness);
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
    if (r < 0.9) { // from afar only those that answered
      if (state === "finished") ink.fillRect(axis.x(run.end(trace)), y - 0.5, 3, 1);
      return;
    }
    ink.lineWidth = r > 2 ? 1.3 : 0.8;
    MARKS[run.traces.parent[trace] === NONE ? "root" : "branch"](ink, axis.x(run.traces.created[trace]), y, r);
    const x = axis.x(run.end(trace)) + r + 1;
    if (run.wasGhost(trace)) {
      MARKS.ghost(ink, x - r - 1, y, r);
      if (state === "pruned") MARKS.pruned(ink, axis.x(run.traces.left[trace]) + r + 1, y, r);
    } else if (MARKS[state]) MARKS[state](ink, x, y, r);
    if ((state === "finished" || run.traces.answer[trace] !== null) && (this.rowHeight >= LABELLED || boldness > 1)) this.answer(ink, trace, x + r + 5, y);
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
    ink.fillStyle = isWinner ? this.colours.ink : this.colours.soft;
    ink.fillText(short, x, y);
  }

  names(ink, traces) {
    ink.font = "10px system-ui, sans-serif";
    ink.textAlign = "right";
    ink.textBaseline = "middle";
    ink.fillStyle = this.colours.soft;
    for (const trace of traces) ink.fillText(trace, GUTTER - 14, this.y(trace));
    ink.textAlign = "left";
  }

  scrollbar(ink) {
    if (!this.canScroll) return;
    const all = this.order.length * this.rowHeight + 12;
    ink.fillStyle = this.colours.faint;
    ink.fillRect(this.axis.width - 5, (this.top / all) * this.height, 4, Math.max((this.height / all) * this.height, 16));
  }

  // What is pointed at: traces with all they inherited, and the crosshair.
  drawTop(traces, step) {
    const ink = this.overInk;
    ink.clearRect(0, 0, this.axis.width, this.height);
    if (step !== null) {
      ink.strokeStyle = this.colours.faint;
      ink.lineWidth = 1;
      const x = Math.round(this.axis.x(step)) + 0.5;
      line(ink, x, 0, x, this.height);
    }
    const until = new Map();
    for (const trace of traces) {
      let end = Infinity;
      for (let at = trace; at !== NONE; at = this.run.traces.parent[at]) {
        if ((until.get(at) ?? NONE) >= end) break;
        until.set(at, end);
        end = this.run.traces.created[at];
      }
    }
    const parts = [...until].filter(([trace]) => this.row[trace] !== NONE);
    const boldness = Math.max(1.3, 2.2 / Math.max(this.rowHeight * 0.55, 0.6));
    this.connectors(ink, parts.map(([trace]) => trace));
    this.paint(ink, parts, boldness);
  }
}
