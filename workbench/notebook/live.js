// The page's half of Live: four small charts and the text panes of one run.
//
// The kernel answers `ready` with the whole run, thinned, and then sends what is added: rows of each series
// as one buffer of float32, first all x, then all y, and text that changed. Nothing is kept in the state
// of the widget. Here each series is a bounded buffer of shares, lowest and highest of `stride` rows: when it
// is full, neighbours are merged, so a spike of one step in a million stays and memory does not grow.
// A value that is not finite breaks the line and is marked with a cross. A drag over a time chart selects
// a window, which goes to the kernel as `window`.

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
const PANES = ["alerts", "result", "checks", "decisions", "kernels", "device"];

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

function short(value, unit) {
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

function drawChart(canvas, chart, all) {
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
  const names = [...all.keys()].filter((name) => chart.of.some((p) => (p.test ? p.test(name) : p === name)));
  const range = { x0: Infinity, x1: -Infinity, y0: Infinity, y1: -Infinity };
  for (const name of names) {
    const s = all.get(name);
    if (!s.length) continue;
    range.x0 = Math.min(range.x0, s.x[0]);
    range.x1 = Math.max(range.x1, s.x[s.length - 1]);
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
  if (range.x0 > range.x1) {
    pen.fillText("nothing was measured yet", box.left + 8, box.top + 18);
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
  pen.textAlign = "right";
  pen.fillText(short(range.y1, chart.unit), box.left - 4, box.top + 9);
  pen.fillText(short(range.y0, chart.unit), box.left - 4, box.bottom);
  pen.fillText(short(range.x1, ""), box.right, height - 5);
  pen.textAlign = "left";
  pen.fillText(`${chart.x} ${short(range.x0, "")}`, box.left, height - 5);
  let legend = box.left;
  names.forEach((name, number) => {
    const s = all.get(name);
    if (!s.length) return;
    pen.strokeStyle = COLOURS[number % COLOURS.length];
    pen.fillStyle = pen.strokeStyle;
    pen.lineWidth = 1.4;
    const marks = POINTS.has(name);
    pen.setLineDash(marks ? [] : DASHES[number % DASHES.length]);
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
    pen.fillText(`${marks ? "◆ " : "– "}${name}`, legend, 26);
    legend += pen.measureText(`- ${name}  `).width + 6;
    pen.fillStyle = "#d00000";
    for (let i = 0; i < s.length; i += 1) {
      if (s.odd[i]) pen.fillText("×", px(s.x[i]) - 3, box.top + 10);
    }
  });
}

function makePane(name) {
  const pane = document.createElement("details");
  pane.open = name === "alerts" || name === "result";
  const title = document.createElement("summary");
  const text = document.createElement("pre");
  title.textContent = name;
  text.dataset.pane = name;
  pane.append(title, text);
  return pane;
}

function render({ model, el }) {
  const all = new Map();
  const root = document.createElement("div");
  root.className = "apr-live";
  const status = document.createElement("div");
  status.className = "apr-status";
  status.textContent = "reading the run";
  const charts = document.createElement("div");
  charts.className = "apr-charts";
  const canvases = CHARTS.map((chart) => {
    const canvas = document.createElement("canvas");
    canvas.dataset.chart = chart.title;
    charts.append(canvas);
    return canvas;
  });
  const panes = document.createElement("div");
  panes.className = "apr-panes";
  panes.append(...PANES.map(makePane));
  root.append(status, charts, panes);
  el.append(root);

  // The figure that is kept in the notebook stands below for whoever has no kernel; not beside the live one.
  const hidden = document.createElement("style");
  const key = model.get("key");
  let waiting = 0;
  function draw() {
    waiting = 0;
    canvases.forEach((canvas, i) => drawChart(canvas, CHARTS[i], all));
    root.dataset.rows = String([...all.values()].reduce((sum, s) => sum + s.length, 0));
  }
  function soon() {
    if (!waiting) waiting = requestAnimationFrame(draw);
  }
  function take(message, buffers) {
    if (message.kind === "clear") {
      for (const name of message.series || [...all.keys()]) all.delete(name);
    } else if (message.kind === "rows") {
      hidden.textContent = `[data-apr-static="${CSS.escape(key)}"] { display: none; }`;
      message.series.forEach((name, i) => {
        const view = buffers[i];
        const rows = new Float32Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
        if (!all.has(name)) all.set(name, new Series());
        for (let k = 0; k < rows.length / 2; k += 1) all.get(name).push(rows[k], rows[rows.length / 2 + k]);
      });
    } else if (message.kind === "words") {
      for (const [name, text] of Object.entries(message.panes)) {
        if (name === "status") status.textContent = text;
        else root.querySelector(`[data-pane="${CSS.escape(name)}"]`).textContent = text;
      }
    }
    soon();
  }
  function lost() {
    status.textContent = "no kernel behind this view: the run goes on by itself; run the cell again to attach to it";
    root.classList.add("apr-lost");
  }
  model.on("msg:custom", take);
  model.on("comm_live_update", lost);
  document.head.append(hidden);
  const size = new ResizeObserver(soon);
  size.observe(charts);

  let from = null;
  function seconds(event) {
    const range = event.target.range;
    if (!range || !["2", "3"].includes(String(canvases.indexOf(event.target)))) return null;
    const share = (event.offsetX - range.left) / (range.right - range.left);
    return range.x0 + Math.min(1, Math.max(0, share)) * (range.x1 - range.x0);
  }
  charts.addEventListener("pointerdown", (event) => {
    from = seconds(event);
  });
  charts.addEventListener("pointerup", (event) => {
    const to = from === null ? null : seconds(event);
    if (to !== null && to !== from) model.send({ kind: "window", from: Math.min(from, to), to: Math.max(from, to) });
    from = null;
  });

  model.send({ kind: "ready" });
  return () => {
    model.off("msg:custom", take);
    model.off("comm_live_update", lost);
    size.disconnect();
    cancelAnimationFrame(waiting);
    hidden.remove();
  };
}

export default { render };
