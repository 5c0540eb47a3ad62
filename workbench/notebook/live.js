// The page's half of Live: the charts of chart.js, whose text precedes this one, and the text panes of one run.
//
// The kernel replies to `ready` with the whole run, downsampled, and then sends what is added: which charts there
// are, rows of each series as one buffer of float32, first all x, then all y, and text that changed. Nothing is
// kept in the state of the widget. A pointer on a chart shows the values there in all of them; a drag selects a
// window, which is shaded and goes to the kernel as `window`.

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
  const over = document.createElement("button");
  over.className = "apr-over";
  const under = document.createElement("span");
  under.className = "apr-under";
  const head = document.createElement("div");
  head.append(over, under);
  const charts = document.createElement("div");
  charts.className = "apr-charts";
  let shown = [];
  const canvases = new Map();
  const panes = document.createElement("div");
  panes.className = "apr-panes";
  root.append(status, head, charts, panes);
  el.append(root);

  // The still is for pages without a kernel; it is hidden while the live widget is shown.
  const hidden = document.createElement("style");
  const key = model.get("key");
  let waiting = 0;
  let chosen = null;
  let pointed = null;
  let byStep = true;
  let axis = axisOf(all, byStep);
  function draw() {
    waiting = 0;
    axis = axisOf(all, byStep);
    over.textContent = axis.x === "step" ? "over steps" : "over time";
    over.title = "the axis of all charts";
    for (const chart of shown) drawChart(canvases.get(chart.id), chart, all, axis, chosen, pointed);
    under.textContent = pointed === null ? "" : underPointer();
    root.dataset.rows = String([...all.values()].reduce((sum, s) => sum + s.length, 0));
  }
  // The step and time under the pointer, and what happened there.
  function underPointer() {
    const steps = all.get("step");
    const step = steps && steps.length ? `step ${Math.round(steps.at(pointed) ?? 0)}, ` : "";
    const near = (axis.x1 - axis.x0) / 100;
    const marks = shown.length ? shown.flatMap((chart) => chart.marks) : [];
    const here = marks.filter(([x]) => Math.abs(axis.of(x) - axis.of(pointed)) <= near).map(([, , text]) => text);
    return [`${step}${clock(pointed)} after the start`, ...new Set(here)].join("; ");
  }
  // A chart keeps its canvas for as long as there is one of that id.
  function place(list) {
    shown = list;
    for (const [id, canvas] of canvases) {
      if (!list.some((chart) => chart.id === id)) {
        canvas.remove();
        canvases.delete(id);
      }
    }
    for (const chart of list) {
      if (!canvases.has(chart.id)) canvases.set(chart.id, document.createElement("canvas"));
      canvases.get(chart.id).dataset.chart = chart.title;
      charts.append(canvases.get(chart.id));
    }
  }
  over.addEventListener("click", () => {
    byStep = !byStep;
    soon();
  });
  function soon() {
    if (!waiting) waiting = requestAnimationFrame(draw);
  }
  // The kernel's table determines the panes and their order: a pane is created when its first text arrives.
  function paneOf(name) {
    const find = () => root.querySelector(`[data-pane="${CSS.escape(name)}"]`);
    if (!find()) panes.append(makePane(name));
    return find();
  }
  function take(message, buffers) {
    if (message.kind === "clear") {
      for (const name of message.series || [...all.keys()]) all.delete(name);
    } else if (message.kind === "charts") {
      place(message.charts);
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
        else paneOf(name).textContent = text;
      }
    }
    soon();
  }
  function lost() {
    status.textContent = "no kernel behind this view: the run continues in the background; run the cell again to attach to it";
    root.classList.add("apr-lost");
  }
  model.on("msg:custom", take);
  model.on("comm_live_update", lost);
  document.head.append(hidden);
  const size = new ResizeObserver(soon);
  size.observe(charts);

  let begun = null;
  function placed(event) {
    const range = event.target.range;
    if (!range) return null;
    const share = (event.offsetX - range.left) / (range.right - range.left);
    return { canvas: event.target, x: range.x0 + Math.min(1, Math.max(0, share)) * (range.x1 - range.x0) };
  }
  charts.addEventListener("pointerdown", (event) => {
    begun = placed(event);
    if (begun) event.target.setPointerCapture(event.pointerId);
  });
  charts.addEventListener("pointermove", (event) => {
    const now = placed(event);
    pointed = now && axis.back(now.x);
    if (begun && now && now.x !== begun.x) {
      chosen = { x: axis.x, from: Math.min(begun.x, now.x), to: Math.max(begun.x, now.x) };
      begun.moved = true;
    }
    soon();
  });
  charts.addEventListener("pointerleave", () => {
    pointed = null;
    soon();
  });
  charts.addEventListener("pointerup", () => {
    begun = null;
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
