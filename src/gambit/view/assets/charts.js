// Pool and cache over the tree's own axis, and the score curve of one trace.

const CHART_TOP = 20, CHART_HEIGHT = 52, CHART_GAP = 26;

class Charts {
  constructor(run, axis, box) {
    Object.assign(this, { run, axis, box });
    [this.base, this.over] = box.querySelectorAll("canvas");
    this.poolMax = run.pool.completed.reduce((most, count) => Math.max(most, count), run.run.capacity);
    const used = run.kv.used.reduce((most, tokens) => Math.max(most, tokens), 1);
    this.kvMax = run.run.kv_capacity && used > run.run.kv_capacity / 8 ? run.run.kv_capacity : used * 1.1;
  }

  resize() {
    const { width, height } = this.box.getBoundingClientRect();
    this.height = height;
    this.ink = fitCanvas(this.base, width, height);
    this.overInk = fitCanvas(this.over, width, height);
  }

  draw(colours) {
    const { ink } = this, { pool, kv } = this.run;
    this.colours = colours;
    ink.clearRect(0, 0, this.axis.width, this.height);
    const poolChart = { top: CHART_TOP, max: this.poolMax };
    const kvChart = { top: CHART_TOP + CHART_HEIGHT + CHART_GAP, max: this.kvMax };
    this.frame(poolChart, number(poolChart.max));
    this.frame(kvChart, compact(kvChart.max));
    ink.save();
    ink.beginPath();
    ink.rect(GUTTER, 0, this.axis.pixels + 1, this.height);
    ink.clip();
    const withWaiting = pool.running.map((count, i) => count + pool.waiting[i]);
    const withGhosts = withWaiting.map((count, i) => count + pool.ghosts[i]);
    this.area(poolChart, stairs(pool.step, withGhosts, this.run.last), colours.ghost);
    this.area(poolChart, stairs(pool.step, withWaiting, this.run.last), colours.wait);
    this.area(poolChart, stairs(pool.step, pool.running, this.run.last), colours.run);
    this.stroke(poolChart, stairs(pool.step, pool.completed, this.run.last), colours.done);
    this.area(kvChart, kv.step.map((step, i) => [step, kv.used[i]]), colours.run);
    ink.restore();
    this.legend(poolChart.top, "Pool", [["running", colours.run, 1], ["waiting", colours.wait, 1], ["ghosts", colours.ghost, 1],
      ["completed", colours.done, 0]]);
    const size = this.run.run.kv_capacity;
    this.legend(kvChart.top, size ? `KV cache, tokens (of ${number(size)})` : "KV cache, tokens", []);
    this.scale(kvChart.top + CHART_HEIGHT);
  }

  y(chart, value) { return chart.top + CHART_HEIGHT * (1 - Math.min(value / chart.max, 1)); }

  frame(chart, high) {
    const { ink, colours } = this;
    ink.strokeStyle = colours.line;
    ink.lineWidth = 1;
    for (const step of ticks(this.axis.from, this.axis.to, this.axis.pixels, 90)) {
      const x = Math.round(this.axis.x(step)) + 0.5;
      line(ink, x, chart.top, x, chart.top + CHART_HEIGHT);
    }
    ink.strokeStyle = colours.faint;
    line(ink, GUTTER, chart.top + CHART_HEIGHT + 0.5, GUTTER + this.axis.pixels, chart.top + CHART_HEIGHT + 0.5);
    ink.fillStyle = colours.soft;
    ink.font = "10.5px system-ui, sans-serif";
    ink.textAlign = "right";
    ink.textBaseline = "middle";
    ink.fillText(high, GUTTER - 6, chart.top + 4);
    ink.fillText("0", GUTTER - 6, chart.top + CHART_HEIGHT - 3);
    ink.textAlign = "left";
  }

  outline(chart, points) {
    for (const [step, value] of points) this.ink.lineTo(this.axis.x(step), this.y(chart, value));
  }

  area(chart, points, colour) {
    const { ink, axis } = this, bottom = chart.top + CHART_HEIGHT;
    if (points.length === 0) return;
    ink.beginPath();
    ink.moveTo(axis.x(points[0][0]), bottom);
    this.outline(chart, points);
    ink.lineTo(axis.x(points.at(-1)[0]), bottom);
    ink.fillStyle = colour;
    ink.fill();
  }

  stroke(chart, points, colour) {
    this.ink.beginPath();
    this.outline(chart, points);
    this.ink.strokeStyle = colour;
    this.ink.lineWidth = 1.6;
    this.ink.stroke();
  }

  legend(top, title, entries) {
    const { ink, colours } = this;
    ink.font = "600 11px system-ui, sans-serif";
    ink.textBaseline = "middle";
    ink.fillStyle = colours.soft;
    ink.fillText(title, GUTTER, top - 10);
    let x = GUTTER + ink.measureText(title).width + 12;
    ink.font = "11px system-ui, sans-serif";
    for (const [name, colour, isArea] of entries) {
      ink.fillStyle = colour;
      ink.fillRect(x, isArea ? top - 14 : top - 11, 10, isArea ? 8 : 2);
      ink.fillStyle = colours.soft;
      ink.fillText(name, x + 14, top - 10);
      x += 26 + ink.measureText(name).width;
    }
  }

  scale(bottom) {
    const { ink, axis } = this;
    ink.font = "10.5px system-ui, sans-serif";
    ink.fillStyle = this.colours.soft;
    ink.textBaseline = "top";
    ink.textAlign = "center";
    for (const step of ticks(axis.from, axis.to, axis.pixels, 90)) ink.fillText(number(step), axis.x(step), bottom + 5);
    ink.textAlign = "right";
    ink.fillText("decode steps", axis.width - 8, bottom + 5 + 13);
    ink.textAlign = "left";
  }

  // The values at a step, beside the crosshair.
  drawTop(step) {
    const { overInk: ink, axis, colours } = this, { pool, kv } = this.run;
    ink.clearRect(0, 0, axis.width, this.height);
    if (step === null || step < axis.from || step > axis.to) return;
    const x = Math.round(axis.x(step)) + 0.5;
    ink.strokeStyle = colours.faint;
    line(ink, x, 0, x, CHART_TOP + 2 * CHART_HEIGHT + CHART_GAP);
    const at = pool.step.findLastIndex((changed) => changed <= step);
    const sample = nearest(kv.step, step);
    if (at < 0 || sample < 0) return;
    const sizes = ["running", "waiting", "ghosts", "completed"].map((name) => `${pool[name][at]} ${name}`);
    const size = this.run.run.kv_capacity, share = size ? ` · ${Math.round((100 * kv.used[sample]) / size)} %` : "";
    this.note(`step ${number(Math.round(step))} · ${sizes.join(" · ")}`, x, CHART_TOP + 10);
    this.note(`${number(kv.used[sample])} tokens at step ${number(kv.step[sample])}${share}`, x,
      CHART_TOP + CHART_HEIGHT + CHART_GAP + 10);
  }

  note(text, x, y) {
    const ink = this.overInk;
    ink.font = "11px system-ui, sans-serif";
    ink.textBaseline = "middle";
    const width = ink.measureText(text).width;
    const left = x + 8 + width > this.axis.width - 8 ? x - 8 - width : x + 8;
    ink.fillStyle = this.colours.paper;
    ink.globalAlpha = 0.88;
    ink.fillRect(left - 4, y - 8, width + 8, 16);
    ink.globalAlpha = 1;
    ink.fillStyle = this.colours.ink;
    ink.fillText(text, left, y);
  }
}

// Counts hold until they change.
function stairs(steps, values, last) {
  return values.flatMap((value, i) => [[steps[i], value], [steps[i + 1] ?? last, value]]);
}

function nearest(steps, wanted) {
  return steps.reduce((best, step, i) => best < 0 || Math.abs(step - wanted) < Math.abs(steps[best] - wanted) ? i : best, NONE);
}

function compact(value) {
  return value >= 1e6 ? `${(value / 1e6).toFixed(1)} M` : value >= 1e4 ? `${Math.round(value / 1e3)} k` : number(Math.round(value));
}

// Dots: single thoughts; line: the trace's score; shaded: inherited.
function drawCurve(canvas, run, trace, colours, width, height) {
  const ink = fitCanvas(canvas, width, height);
  const left = 28, right = width - 6, top = 6, bottom = height - 16;
  const { thoughts, traces } = run, all = run.thoughtsOf(trace);
  const tokens = Math.max(traces.inherited[trace] + traces.own[trace], ...all.slice(-1).map(([i]) => thoughts.tokens[i]), 1);
  const [low, high] = run.thoughtRange ??= thoughtRange(thoughts.score);
  const x = (token) => left + ((right - left) * token) / tokens;
  const y = (score) => bottom - ((bottom - top) * (score - low)) / (high - low);
  ink.fillStyle = colours.line;
  ink.fillRect(left, top, x(traces.inherited[trace]) - left, bottom - top);
  ink.strokeStyle = colours.faint;
  line(ink, left, bottom + 0.5, right, bottom + 0.5);
  ink.fillStyle = colours.soft;
  ink.font = "10px system-ui, sans-serif";
  ink.textBaseline = "middle";
  ink.textAlign = "right";
  ink.fillText(decimal(high), left - 4, top + 3);
  ink.fillText(decimal(low), left - 4, bottom - 2);
  ink.fillText(`${number(tokens)} tokens`, right, bottom + 9);
  ink.textAlign = "left";
  if (traces.inherited[trace] > 0) ink.fillText("inherited", left + 3, bottom + 9);
  const radius = all.length > 150 ? 1 : 2;
  for (const [i] of all) {
    ink.fillStyle = colours.shades[shadeOf(thoughts.score[i], [low, high])];
    ink.beginPath();
    ink.arc(x(thoughts.tokens[i]), y(thoughts.score[i]), radius, 0, 7);
    ink.fill();
  }
  ink.beginPath();
  all.forEach(([i]) => ink.lineTo(x(thoughts.tokens[i]), y(thoughts.value[i])));
  ink.strokeStyle = colours.ink;
  ink.lineWidth = 1.5;
  ink.stroke();
}

function thoughtRange(scores) {
  let low = 0, high = 1;
  for (const score of scores) { low = Math.min(low, score); high = Math.max(high, score); }
  return [low, high];
}
