// The page's half of Live: the charts of chart.js, whose text precedes this one, and the text panes of one run.
//
// The kernel replies to `ready` with the whole run, thinned, and then sends what is added: rows of each series
// as one buffer of float32, first all x, then all y, and text that changed. Nothing is kept in the state
// of the widget. A drag over a chart selects a window of it, which is shaded and goes to the kernel as `window`.

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
  root.append(status, charts, panes);
  el.append(root);

  // The still is for pages without a kernel; it is hidden while the live widget is shown.
  const hidden = document.createElement("style");
  const key = model.get("key");
  let waiting = 0;
  let chosen = null;
  function draw() {
    waiting = 0;
    const spans = spansOf(all);
    canvases.forEach((canvas, i) => drawChart(canvas, CHARTS[i], all, spans[CHARTS[i].x], chosen));
    root.dataset.rows = String([...all.values()].reduce((sum, s) => sum + s.length, 0));
  }
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
  function place(event) {
    const range = event.target.range;
    if (!range) return null;
    const share = (event.offsetX - range.left) / (range.right - range.left);
    return { canvas: event.target, x: range.x0 + Math.min(1, Math.max(0, share)) * (range.x1 - range.x0) };
  }
  charts.addEventListener("pointerdown", (event) => {
    begun = place(event);
    if (begun) event.target.setPointerCapture(event.pointerId);
  });
  charts.addEventListener("pointermove", (event) => {
    const now = begun && place(event);
    if (!now || now.x === begun.x) return;
    const { x } = CHARTS[canvases.indexOf(begun.canvas)];
    chosen = { x, from: Math.min(begun.x, now.x), to: Math.max(begun.x, now.x) };
    begun.moved = true;
    soon();
  });
  charts.addEventListener("pointerup", () => {
    if (begun && begun.moved) model.send({ kind: "window", ...chosen });
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
