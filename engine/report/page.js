// The charts of a report: values under the pointer, zoom by a drag or the keys + and -, series on and off.
//
// Without this script, and in print, the page shows the same charts as SVG.

function begin() {
  // Runs that are compared have no time in common: their rows stand at their steps.
  const { charts, series, axis: only } = JSON.parse(document.getElementById("series").textContent);
  const all = new Map();
  for (const [key, [xs, ys]] of Object.entries(series)) {
    const rows = new Series();
    xs.forEach((x, i) => rows.push(x, ys[i] === null ? NaN : ys[i]));
    all.set(key, rows);
  }
  let byStep = true;
  let shown = null;
  let dragged = null;
  let pointed = null;
  let waiting = 0;
  const make = (tag, name, text = "") => Object.assign(document.createElement(tag), { className: name, textContent: text });
  const bar = make("div", "bar");
  const over = make("button", "");
  const whole = make("button", "", "whole run");
  const reading = make("span", "reading");
  bar.append(...(only ? [] : [over]), whole, reading);
  const panels = charts.map((chart) => {
    const figure = document.querySelector(`figure[data-chart="${CSS.escape(chart.id)}"]`);
    const canvas = document.createElement("canvas");
    const legend = make("div", "legend");
    chart.hidden = new Set();
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${chart.title}. Arrow keys read values, + and - zoom, Escape shows the whole run.`);
    const buttons = chart.series.map(([key, name]) => {
      const button = make("button", "");
      const value = make("span", "");
      const swatch = make("i", "");
      swatch.style.background = colourOf(chart, key);
      button.append(swatch, `${name} `, value);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        if (!chart.hidden.delete(key)) chart.hidden.add(key);
        button.setAttribute("aria-pressed", String(!chart.hidden.has(key)));
        soon();
      });
      legend.append(button);
      return [key, value];
    });
    figure.append(canvas, legend);
    return { chart, canvas, buttons };
  });
  document.querySelector(".figures").before(bar);
  document.documentElement.classList.add("interactive");

  function axisNow() {
    const axis = axisOf(all, byStep);
    return shown && shown.x === axis.x ? { ...axis, x0: shown.from, x1: shown.to } : axis;
  }
  function draw() {
    waiting = 0;
    const axis = axisNow();
    over.textContent = axis.x === "step" ? "over steps" : "over time";
    over.title = "the x axis of all charts";
    whole.disabled = !shown;
    for (const { chart, canvas, buttons } of panels) {
      drawChart(canvas, chart, all, axis, dragged && dragged.moved ? dragged : null, pointed);
      for (const [key, value] of buttons) value.textContent = short(all.get(key).at(pointed ?? Infinity), chart.unit);
    }
    const steps = all.get("step");
    const step = pointed !== null && steps.length ? `step ${Math.round(axis.x === "step" ? axis.of(pointed) : steps.at(pointed) ?? 0)}` : "";
    const near = (axis.x1 - axis.x0) / 100;
    const here = pointed === null ? [] : charts.flatMap((chart) => chart.marks)
      .filter(([x]) => Math.abs(axis.of(x) - axis.of(pointed)) <= near).map(([, , text]) => text);
    reading.textContent = pointed === null ? "newest values; point at a chart to read it, drag to zoom"
      : only ? step : [`${step && `${step}, `}${clock(pointed)} after the start`, ...new Set(here)].join("; ");
  }
  function soon() {
    if (!waiting) waiting = requestAnimationFrame(draw);
  }
  function zoom(from, to) {
    const axis = axisOf(all, byStep);
    const low = Math.max(axis.x0, from);
    const high = Math.min(axis.x1, to);
    shown = high - low >= axis.x1 - axis.x0 ? null : high > low ? { x: axis.x, from: low, to: high } : shown;
  }
  function placed(event) {
    const { range } = event.target;
    if (!range) return null;
    const share = (event.offsetX - range.left) / (range.right - range.left);
    return range.x0 + Math.min(1, Math.max(0, share)) * (range.x1 - range.x0);
  }
  for (const { canvas } of panels) {
    canvas.addEventListener("pointerdown", (event) => {
      const at = placed(event);
      if (at === null || event.pointerType === "touch") return;
      dragged = { x: axisNow().x, begun: at, from: at, to: at, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const at = placed(event);
      pointed = at === null ? null : axisNow().back(at);
      if (dragged && at !== dragged.begun) {
        Object.assign(dragged, { from: Math.min(dragged.begun, at), to: Math.max(dragged.begun, at), moved: true });
      }
      soon();
    });
    canvas.addEventListener("pointerup", () => {
      if (dragged && dragged.moved) zoom(dragged.from, dragged.to);
      dragged = null;
      soon();
    });
    canvas.addEventListener("pointerleave", () => {
      pointed = null;
      soon();
    });
    canvas.addEventListener("dblclick", () => {
      shown = null;
      soon();
    });
    canvas.addEventListener("keydown", (event) => {
      const axis = axisNow();
      const width = axis.x1 - axis.x0;
      const at = pointed === null ? (axis.x0 + axis.x1) / 2 : axis.of(pointed);
      if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
        const moved = at + ((event.key === "ArrowLeft" ? -1 : 1) * width) / 100;
        pointed = axis.back(Math.min(axis.x1, Math.max(axis.x0, moved)));
      } else if (event.key === "+" || event.key === "-") {
        const half = event.key === "+" ? width / 4 : width;
        zoom(at - half, at + half);
      } else if (event.key === "Escape") {
        [shown, pointed] = [null, null];
      } else return;
      event.preventDefault();
      soon();
    });
  }
  over.addEventListener("click", () => {
    byStep = !byStep;
    shown = null;
    soon();
  });
  whole.addEventListener("click", () => {
    shown = null;
    soon();
  });
  new ResizeObserver(soon).observe(document.querySelector(".figures"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", soon);
  // For a page that gets new rows while it is open.
  window.openCharts = { all, charts, draw: soon };
  soon();
}

if (document.getElementById("series")) begin();
