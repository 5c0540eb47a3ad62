// Charts of one run: the rows they hold, and how they are drawn. Python says which charts there are.
//
// Each series is a bounded buffer of buckets, the lowest and highest of `stride` rows: when it is full, neighbours
// are merged, so a spike of one step in a million stays and memory does not grow. A value that is not finite
// breaks the line and is marked with a cross. Rows stand at their seconds; over steps, each is placed by the
// series `step`, so that all charts have one axis. Lines are solid and have their names at their ends; dashes are
// levels. This text is followed by that of page.js in a report, and by that of live.js in a notebook.

const CAPACITY = 2048;
// Of Okabe and Ito, made to stand out on light and on dark ground.
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#C46A9C", "#B58900", "#3D97CC"];
const BOX = { left: 70, top: 22, right: 128, bottom: 20 };
const NO_NAMES = 14;
const ROW = 13;

class Series {
  constructor() {
    this.x = new Float64Array(CAPACITY);
    this.low = new Float64Array(CAPACITY);
    this.high = new Float64Array(CAPACITY);
    this.odd = new Uint8Array(CAPACITY);
    this.length = 0;
    this.stride = 1;
    this.open = 0;
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

  // The last bucket that begins at or before x seconds; -1 when there is none.
  find(x) {
    let low = -1;
    let high = this.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.x[middle] <= x) low = middle;
      else high = middle;
    }
    return low;
  }

  // The finite value at or before x seconds; null when there is none.
  at(x) {
    for (let i = this.find(x); i >= 0; i -= 1) if (this.low[i] <= this.high[i]) return (this.low[i] + this.high[i]) / 2;
    return null;
  }
}

// The axis that all charts share: steps, or seconds; `of` places the seconds of a row on it.
function axisOf(all, byStep) {
  const steps = all.get("step");
  if (byStep && steps && steps.length > 1) {
    const last = steps.length - 1;
    const of = (x) => {
      const i = Math.min(Math.max(steps.find(x), 0), last - 1);
      const share = (x - steps.x[i]) / (steps.x[i + 1] - steps.x[i] || 1);
      return steps.low[i] + Math.min(Math.max(share, 0), 1) * (steps.low[i + 1] - steps.low[i]);
    };
    const back = (at) => {
      let i = 0;
      while (i < last - 1 && steps.low[i + 1] <= at) i += 1;
      const share = (at - steps.low[i]) / (steps.low[i + 1] - steps.low[i] || 1);
      return steps.x[i] + Math.min(Math.max(share, 0), 1) * (steps.x[i + 1] - steps.x[i]);
    };
    return { x: "step", of, back, x0: steps.low[0], x1: Math.max(steps.high[last], steps.low[0] + 1) };
  }
  let x0 = Infinity;
  let x1 = -Infinity;
  for (const s of all.values()) {
    if (!s.length) continue;
    x0 = Math.min(x0, s.x[0]);
    x1 = Math.max(x1, s.x[s.length - 1]);
  }
  if (!(x0 <= x1)) [x0, x1] = [0, 1];
  return { x: "seconds", of: (x) => x, back: (x) => x, x0, x1: x1 > x0 ? x1 : x0 + 1 };
}

// About `count` multiples of 1, 2 or 5 times a power of ten in a range.
function ticksOf(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((digit) => digit * power >= rough * 0.999);
  if (!Number.isFinite(step) || step <= 0) return [];
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) found.push(n * step);
  return found;
}

function short(value, unit) {
  if (value === null) return "";
  if (unit === "s" && value !== 0 && Math.abs(value) < 1) return `${Number((1000 * value).toPrecision(3))} ms`;
  if (unit === "bytes") {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    const power = Math.max(0, Math.min(4, Math.floor(Math.log(Math.abs(value) || 1) / Math.log(1024))));
    return `${Number((value / 1024 ** power).toPrecision(3))} ${units[power]}`;
  }
  const text = Math.abs(value) >= 1000 ? String(Math.round(value)) : String(Number(value.toPrecision(4)));
  return unit ? `${text} ${unit}` : text;
}

function clock(seconds) {
  const whole = Math.round(seconds);
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return h ? `${h}h${String(m).padStart(2, "0")}m` : m ? `${m}m${String(s).padStart(2, "0")}s` : `${s} s`;
}

// The lowest and highest y of the part of a chart that its axis shows.
function spanOf(chart, drawn, all, axis) {
  if (chart.unit === "%") return [0, 100];
  let [low, high] = [Infinity, -Infinity];
  for (const [key] of drawn) {
    const s = all.get(key);
    for (let i = 0; i < s.length; i += 1) {
      const at = axis.of(s.x[i]);
      if (s.low[i] <= s.high[i] && at >= axis.x0 && at <= axis.x1) {
        low = Math.min(low, s.low[i]);
        high = Math.max(high, s.high[i]);
      }
    }
  }
  for (const [, y] of chart.levels) [low, high] = [Math.min(low, y), Math.max(high, y)];
  if (!(low <= high)) return [0, 1];
  return low === high ? [Math.min(0, low), high > 0 ? high : low + 1] : [low, high];
}

// `chosen` is a shaded window, `pointed` the seconds under the pointer, or null. A chart with `hidden` keys leaves these
// series out; it has a legend of its own, so no names are written beside the lines.
function drawChart(canvas, chart, all, axis, chosen, pointed) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const ink = getComputedStyle(canvas).color;
  const right = chart.hidden ? NO_NAMES : BOX.right;
  const box = { left: BOX.left, top: BOX.top, right: width - right, bottom: height - BOX.bottom };
  pen.font = "11px monospace";
  pen.fillStyle = ink;
  pen.strokeStyle = ink;
  pen.fillText(chart.title, box.left, 12);
  const faint = (draw) => {
    pen.globalAlpha = 0.4;
    draw();
    pen.globalAlpha = 1;
  };
  const rule = (x0, y0, x1, y1) => {
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
  };
  faint(() => pen.strokeRect(box.left, box.top, box.right - box.left, box.bottom - box.top));
  canvas.range = null;
  const drawn = chart.series.filter(([key]) => all.get(key) && all.get(key).length && !chart.hidden?.has(key));
  if (!drawn.length) {
    pen.fillText("nothing was measured", box.left + 8, box.top + 18);
    return;
  }
  const [y0, y1] = spanOf(chart, drawn, all, axis);
  canvas.range = { x0: axis.x0, x1: axis.x1, left: box.left, right: box.right };
  const px = (seconds) => box.left + ((box.right - box.left) * (axis.of(seconds) - axis.x0)) / (axis.x1 - axis.x0);
  const py = (y) => box.bottom - ((box.bottom - box.top) * (y - y0)) / (y1 - y0);
  if (chosen && chosen.x === axis.x) {
    const place = (x) => box.left + ((box.right - box.left) * (x - axis.x0)) / (axis.x1 - axis.x0);
    pen.globalAlpha = 0.15;
    pen.fillRect(place(chosen.from), box.top, Math.max(1, place(chosen.to) - place(chosen.from)), box.bottom - box.top);
    pen.globalAlpha = 1;
  }
  // Round numbers of bytes are round in their own unit.
  const scale = chart.unit === "bytes" ? 1024 ** Math.floor(Math.log(Math.max(y1, 1)) / Math.log(1024)) : 1;
  pen.textAlign = "right";
  for (const tick of ticksOf(y0 / scale, y1 / scale, 4)) {
    const y = py(tick * scale);
    faint(() => rule(box.left - 4, y, box.left, y));
    pen.fillText(short(tick * scale, chart.unit), box.left - 7, y + 4);
  }
  pen.textAlign = "center";
  for (const tick of ticksOf(axis.x0, axis.x1, 5)) {
    const x = box.left + ((box.right - box.left) * (tick - axis.x0)) / (axis.x1 - axis.x0);
    faint(() => rule(x, box.bottom, x, box.bottom + 4));
    pen.fillText(axis.x === "step" ? short(tick, "") : clock(tick), x, height - 5);
  }
  pen.textAlign = "left";
  pen.fillText(axis.x === "step" ? "step" : "time", 4, height - 5);
  const names = chart.levels.map(([name, y]) => ({ y: py(y), text: `${name} ${short(y, chart.unit)}`, colour: ink }));
  pen.setLineDash([6, 4]);
  for (const { y } of names) faint(() => rule(box.left, y, box.right, y));
  pen.setLineDash([]);
  pen.save();
  pen.beginPath();
  pen.rect(box.left, box.top, box.right - box.left, box.bottom - box.top);
  pen.clip();
  for (const [key, name] of drawn) {
    const s = all.get(key);
    const colour = colourOf(chart, key);
    pen.strokeStyle = colour;
    pen.fillStyle = colour;
    pen.lineWidth = 1.4;
    pen.beginPath();
    let down = false;
    for (let i = 0; i < s.length; i += 1) {
      if (s.odd[i] || !(s.low[i] <= s.high[i])) down = false;
      if (s.low[i] <= s.high[i]) {
        const x = px(s.x[i]);
        if (down) pen.lineTo(x, py(s.low[i]));
        else pen.moveTo(x, py(s.low[i]));
        if (s.high[i] !== s.low[i]) pen.lineTo(x, py(s.high[i]));
        // A value without a neighbour (the first step, one between two NaN) would be a line of no length.
        const joined = i + 1 < s.length && !s.odd[i] && !s.odd[i + 1] && s.low[i + 1] <= s.high[i + 1];
        if (chart.points || (!down && !joined)) pen.fillRect(x - 2, py(s.low[i]) - 2, 4, 4);
        down = !s.odd[i];
      }
    }
    pen.stroke();
    pen.fillStyle = "#d00000";
    for (let i = 0; i < s.length; i += 1) {
      if (s.odd[i]) pen.fillText("×", px(s.x[i]) - 3, box.top + 10);
    }
    const value = s.at(pointed === null ? Infinity : pointed);
    const y = value === null ? box.bottom : py(Math.min(Math.max(value, y0), y1));
    names.push({ y, text: `${name} ${short(value, chart.unit)}`, colour });
  }
  pen.fillStyle = ink;
  pen.strokeStyle = ink;
  pen.lineWidth = 1;
  let last = -Infinity;
  for (const [seconds, sign] of chart.marks) {
    const x = px(seconds);
    if (x - last < 8 || x < box.left) continue;
    last = x;
    pen.fillText(sign, x - 3, box.top + 10);
  }
  pen.restore();
  if (pointed !== null) {
    pen.setLineDash([2, 2]);
    faint(() => rule(px(pointed), box.top, px(pointed), box.bottom));
    pen.setLineDash([]);
  }
  if (!chart.hidden) drawNames(pen, names, box);
  else {
    pen.textAlign = "right";
    for (const { y, text } of names.slice(0, chart.levels.length)) {
      pen.fillText(text, box.right - 4, y < box.top + 14 ? y + 12 : y - 4);
    }
  }
}

function colourOf(chart, key) {
  return COLOURS[chart.series.findIndex(([one]) => one === key) % COLOURS.length];
}

// Write each name right of the end of its line, moved where another one is; those without room are counted.
function drawNames(pen, names, box) {
  const most = Math.floor((box.bottom - box.top) / ROW);
  let shown = [...names].sort((a, b) => a.y - b.y);
  if (shown.length > most) {
    const more = { y: box.bottom, text: `+${shown.length - most + 1}`, colour: pen.fillStyle };
    shown = [...shown.slice(0, most - 1), more];
  }
  let taken = -Infinity;
  for (const name of shown) {
    taken = Math.max(name.y + 4, taken + ROW);
    name.at = taken;
  }
  let free = Infinity;
  for (const name of shown.reverse()) {
    free = Math.min(name.at, free - ROW, box.bottom);
    name.at = free;
  }
  for (const { at, text, colour } of shown) {
    pen.fillStyle = colour;
    pen.fillText(text, box.right + 6, at);
  }
}
