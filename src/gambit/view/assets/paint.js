// Colours, marks and axes shared by the canvases. Blue is good and orange bad: told apart by nearly all eyes.

const GUTTER = 46; // room left of step 0
const MARGIN = 58; // room right of the last step, for answers
const NUM_SHADES = 24;
const NUM_ISLAND_COLOURS = 4; // neighbours differ

function theme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  const stops = ["--score-0", "--score-1", "--score-2", "--score-3", "--score-4"].map((name) => rgb(read(name)));
  return {
    ink: read("--ink"), soft: read("--soft"), faint: read("--faint"), paper: read("--paper"), line: read("--line"),
    mark: read("--mark"), accent: read("--accent"), ghost: read("--ghost"), wait: read("--wait"), run: read("--run"),
    done: read("--done"), win: read("--win"), lose: read("--lose"),
    islands: Array.from({ length: NUM_ISLAND_COLOURS }, (_, i) => read(`--island-${i}`)),
    shades: Array.from({ length: NUM_SHADES }, (_, i) => blend(stops, i / (NUM_SHADES - 1))),
  };
}

function rgb(hex) { return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)); }

function blend(stops, share) {
  const place = share * (stops.length - 1);
  const index = Math.min(Math.floor(place), stops.length - 2);
  const part = place - index;
  return `rgb(${stops[index].map((low, i) => Math.round(low + (stops[index + 1][i] - low) * part)).join(" ")})`;
}

function shadeOf(value, [low, high]) {
  const share = Math.min(Math.max((value - low) / (high - low), 0), 1);
  return Math.round(share * (NUM_SHADES - 1));
}

// Sharp on every screen; the context counts in CSS pixels.
function fitCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.font = "11px system-ui, sans-serif";
  return context;
}

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

// Round numbers about `room` pixels apart.
function ticks(low, high, pixels, room) {
  const wish = ((high - low) * room) / Math.max(pixels, 1);
  const power = 10 ** Math.floor(Math.log10(Math.max(wish, 1e-9)));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= wish);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(at);
  return found;
}

// One mark per way to end, each a shape of its own.
const MARKS = {
  root(context, x, y, r) { context.beginPath(); context.arc(x, y, r * 0.75, 0, 7); context.fill(); },
  branch(context, x, y, r) { context.fillRect(x - r * 0.55, y - r * 0.55, r * 1.1, r * 1.1); },
  pruned(context, x, y, r) {
    line(context, x - r, y - r, x + r, y + r);
    line(context, x - r, y + r, x + r, y - r);
  },
  ghost(context, x, y, r) {
    context.beginPath();
    context.arc(x, y, r, 0, 7);
    context.stroke();
  },
  finished(context, x, y, r) {
    context.beginPath();
    context.moveTo(x - r * 0.8, y - r * 1.1);
    context.lineTo(x + r * 1.2, y);
    context.lineTo(x - r * 0.8, y + r * 1.1);
    context.fill();
  },
  cancelled(context, x, y, r) { line(context, x, y - r * 1.2, x, y + r * 1.2); },
};

const WORDS = {
  root: "root", branch: "branch", finished: "completed", pruned: "pruned", ghost: "ghost", cancelled: "cut off",
  running: "running at the end of the log", waiting: "waiting at the end of the log",
};

function number(value) { return value.toLocaleString("en"); }
function decimal(value) {
  if (value === null) return "–";
  return Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2);
}
