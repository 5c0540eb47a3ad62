// Four small charts of one run: what they show, the rows they hold, and how they are drawn.
//
// Each series is a bounded buffer of buckets, the lowest and highest of `stride` rows: when it is full, neighbours
// are merged, so a spike of one step in a million stays and memory does not grow. A value that is not finite
// breaks the line and is marked with a cross. Charts with the same x share its range.
// In the page this text is followed by that of live.js, as one module.

const CAPACITY = 2048;
const CHARTS = [
  { title: "losses, nats", x: "step", unit: "", of: ["loss", "ce", "kd", "held-out"] },
  { title: "step time", x: "step", unit: "s", of: ["step_s"] },
  { title: "GPU, compiles", x: "seconds", unit: "%", of: [/^gpu\d+\.(gpu|tensor|sm)_util_pct$/, "compile"] },
  { title: "memory", x: "seconds", unit: "B", of: [/_bytes$/] },
];
const DASHES = [[], [7, 3], [2, 3], [8, 3, 2, 3], [4, 4], [1, 4]];
const COLOURS = ["#1f77b4", "#d2691e", "#2e9e4f", "#9467bd", "#b8860b", "#888888"];
const POINTS = new Set(["held-out", "compile"]);

class Series {
  constructor() {
    this.x = new Float64Array(CAPACITY);
    this.low = new Float64Array(CAPACITY);
    this.high = new Float64Array(CAPACITY);
    this.odd = new Uint8Array(CAPACITY);
    this.length = 0;
    this.stride = 1;
    this.open = 0;
    this.last = NaN;
  }

  push(x, y) {
    if (this.open === 0) {
      if (this.length === CAPACITY) this.halve();
      this.x[this.length] = x;
      this.low[this.length] = Infinity;
      this.high[this.length] = -Infinity;
      this.odd[this.length] = 0;
      this.length += 1;
    }
    const at = this.length - 1;
    if (Number.isFinite(y)) {
      this.low[at] = Math.min(this.low[at], y);
      this.high[at] = Math.max(this.high[at], y);
    } else {
      this.odd[at] = 1;
    }
    this.open = (this.open + 1) % this.stride;
    this.last = y;
  }

  halve() {
    for (let i = 0; i < CAPACITY / 2; i += 1) {
      this.x[i] = this.x[2 * i];
      this.low[i] = Math.min(this.low[2 * i], this.low[2 * i + 1]);
      this.high[i] = Math.max(this.high[2 * i], this.high[2 * i + 1]);
      this.odd[i] = this.odd[2 * i] | this.odd[2 * i + 1];
    }
    this.length = CAPACITY / 2;
    this.stride *= 2;
  }
}

// Names for a legend, the same as in the stills.
function called(name) {
  const words = { host_available_bytes: "available", trainer_rss_bytes: "trainer", gpu_util_pct: "utilisation" };
  const [, gpu, of] = /^(gpu\d+)\.(.*)$/.exec(name) || [null, "", name];
  return `${gpu} ${words[of] || of.replace(/^gpu_mem_used_bytes$|_util_pct$/, "")}`.trim();
}

function short(value, unit) {
  if (unit === "s" && value !== 0 && Math.abs(value) < 1) return `${(1000 * value).toPrecision(3)} ms`;
  if (unit === "B") {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = 0;
    let size = value;
    while (Math.abs(size) >= 1024 && power < units.length - 1) {
      size /= 1024;
      power += 1;
    }
    return `${size.toPrecision(3)} ${units[power]}`;
  }
  const text = Math.abs(value) >= 10000 || Number.isInteger(value) ? String(Math.round(value)) : value.toPrecision(3);
  return unit ? `${text} ${unit}` : text;
}

function namesOf(chart, all) {
  const drawn = (name) => chart.of.some((p) => (p.test ? p.test(name) : p === name));
  return [...all.keys()].filter((name) => all.get(name).length && drawn(name));
}

// The first and last x of each kind of x: charts that share it can be read one above the other.
function spansOf(all) {
  const spans = {};
  for (const chart of CHARTS) {
    const span = (spans[chart.x] ??= { x0: Infinity, x1: -Infinity });
    for (const name of namesOf(chart, all)) {
      const s = all.get(name);
      span.x0 = Math.min(span.x0, s.x[0]);
      span.x1 = Math.max(span.x1, s.x[s.length - 1]);
    }
  }
  return spans;
}

function drawChart(canvas, chart, all, span, chosen) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const ink = getComputedStyle(canvas).color;
  const box = { left: 64, top: 34, right: width - 8, bottom: height - 18 };
  pen.font = "11px monospace";
  pen.fillStyle = ink;
  pen.fillText(chart.title, box.left, 12);
  const names = namesOf(chart, all);
  const range = { ...span, y0: Infinity, y1: -Infinity };
  for (const name of names) {
    const s = all.get(name);
    for (let i = 0; i < s.length; i += 1) {
      if (s.low[i] <= s.high[i]) {
        range.y0 = Math.min(range.y0, s.low[i]);
        range.y1 = Math.max(range.y1, s.high[i]);
      }
    }
  }
  pen.strokeStyle = ink;
  pen.globalAlpha = 0.35;
  pen.strokeRect(box.left, box.top, box.right - box.left, box.bottom - box.top);
  pen.globalAlpha = 1;
  canvas.range = null;
  if (!names.length) {
    pen.fillText("nothing was measured", box.left + 8, box.top + 18);
    return;
  }
  if (chart.unit === "%") Object.assign(range, { y0: 0, y1: 100 });
  if (range.y0 > range.y1) Object.assign(range, { y0: 0, y1: 1 });
  if (range.y0 === range.y1) {
    range.y0 = Math.min(0, range.y0);
    range.y1 = range.y1 > 0 ? range.y1 : range.y0 + 1;
  }
  if (range.x0 === range.x1) range.x1 = range.x0 + 1;
  canvas.range = { ...range, left: box.left, right: box.right };
  const px = (x) => box.left + ((box.right - box.left) * (x - range.x0)) / (range.x1 - range.x0);
  const py = (y) => box.bottom - ((box.bottom - box.top) * (y - range.y0)) / (range.y1 - range.y0);
  if (chosen && chosen.x === chart.x) {
    pen.globalAlpha = 0.15;
    pen.fillRect(px(chosen.from), box.top, Math.max(1, px(chosen.to) - px(chosen.from)), box.bottom - box.top);
    pen.globalAlpha = 1;
  }
  pen.textAlign = "right";
  pen.fillText(short(range.y1, chart.unit), box.left - 4, box.top + 9);
  pen.fillText(short(range.y0, chart.unit), box.left - 4, box.bottom);
  pen.fillText(short(range.x1, ""), box.right, height - 5);
  pen.textAlign = "left";
  pen.fillText(`${chart.x} ${short(range.x0, "")}`, box.left, height - 5);
  let legend = box.left;
  names.forEach((name, number) => {
    const s = all.get(name);
    pen.strokeStyle = COLOURS[number % COLOURS.length];
    pen.fillStyle = pen.strokeStyle;
    pen.lineWidth = 1.4;
    const marks = POINTS.has(name);
    // The seventh has the colour of the first and another dash.
    pen.setLineDash(marks ? [] : DASHES[(number + Math.floor(number / COLOURS.length)) % DASHES.length]);
    if (marks) {
      for (let i = 0; i < s.length; i += 1) {
        if (s.low[i] <= s.high[i]) pen.fillText(name === "compile" ? "▴" : "◆", px(s.x[i]) - 3, py(s.high[i]) + 4);
      }
    } else {
      pen.beginPath();
      let down = false;
      for (let i = 0; i < s.length; i += 1) {
        if (s.odd[i] || !(s.low[i] <= s.high[i])) {
          down = false;
        }
        if (s.low[i] <= s.high[i]) {
          if (down) pen.lineTo(px(s.x[i]), py(s.low[i]));
          else pen.moveTo(px(s.x[i]), py(s.low[i]));
          if (s.high[i] !== s.low[i]) pen.lineTo(px(s.x[i]), py(s.high[i]));
          // A value without a neighbour (the first step, one between two NaN) would be a line of no length.
          const joined = i + 1 < s.length && !s.odd[i] && !s.odd[i + 1] && s.low[i + 1] <= s.high[i + 1];
          if (!down && !joined) pen.fillRect(px(s.x[i]) - 2, py(s.low[i]) - 2, 4, 4);
          down = !s.odd[i];
        }
      }
      pen.stroke();
    }
    pen.setLineDash([]);
    const label = `${marks ? (name === "compile" ? "▴" : "◆") : "–"} ${called(name)}`;
    const after = legend + pen.measureText(label).width + 14;
    // Names that do not fit are counted: with many GPUs they would run out of the chart.
    if (legend < box.right) {
      const room = number + 1 === names.length ? box.right + 14 : box.right - 24;
      pen.fillText(after <= room ? label : `+${names.length - number}`, legend, 26);
      legend = after <= room ? after : Infinity;
    }
    pen.fillStyle = "#d00000";
    for (let i = 0; i < s.length; i += 1) {
      if (s.odd[i]) pen.fillText("×", px(s.x[i]) - 3, box.top + 10);
    }
  });
}
