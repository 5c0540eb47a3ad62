"use strict";
// Keeps an open page as the server has it: swaps what has changed, and gives the charts of a report their new rows.
const main = document.querySelector("main");
const light = document.getElementById("live");
const box = document.getElementById("filter");
let have = main.dataset.version;
let timer, calls = 0;
const nameOf = (folded) => folded.firstElementChild.textContent.split(":")[0];
const isFigures = (node) => node.className === "figures";

function feed(data) {
  const shape = (some) => JSON.stringify(some.map(({ id, series }) => [id, series]));
  const open = window.openCharts;
  if (!open || shape(data.charts) !== shape(open.charts)) return location.reload();
  data.charts.forEach((chart, at) => Object.assign(open.charts[at], chart));
  for (const [key, [xs, ys]] of Object.entries(data.series)) {
    open.all.set(key, new Series());
    xs.forEach((x, i) => open.all.get(key).push(x, ys[i] ?? NaN));
  }
  open.draw();
}

// Changes `now` into `next` where they differ, so that what is read, scrolled or unfolded stays as it is.
function morph(now, next) {
  if (now.isEqualNode(next) || (window.openCharts && isFigures(now))) return;
  const [old, fresh] = [now, next].map((node) => [...node.childNodes].filter((one) => one.className !== "bar"));
  if (!old.length || !now.cloneNode(false).isEqualNode(next.cloneNode(false))) return now.replaceWith(next);
  if (old.length === fresh.length) return old.forEach((one, at) => morph(one, fresh[at]));
  const [at, to] = [old, fresh].map((nodes) => nodes.findIndex(isFigures));
  if (at < 0 || to < 0) return now.replaceChildren(...fresh);
  morph(old[at], fresh[to]);
  old.forEach((one, place) => place === at || one.remove());
  now.prepend(...fresh.slice(0, to));
  now.append(...fresh.slice(to + 1));
}

function apply({ parts, order, version }) {
  have = version;
  for (const [id, text] of Object.entries(parts)) {
    const made = document.createElement("template");
    made.innerHTML = text;
    const now = document.getElementById(id), next = made.content.firstElementChild;
    const data = next.querySelector("#series");
    if (data) feed(JSON.parse(data.textContent));
    if (!now) main.append(next);
    else {
      const before = new Map([...now.querySelectorAll("details")].map((one) => [nameOf(one), one.open]));
      for (const one of next.querySelectorAll("details")) one.open = before.get(nameOf(one)) ?? one.open;
      morph(now, next);
    }
  }
  if (!order) return;
  const kept = new Set(order);
  for (const one of [...main.children]) if (!kept.has(one.id)) one.remove();
  order.forEach((id, at) => {
    const one = document.getElementById(id);
    if (main.children[at] !== one) main.insertBefore(one, main.children[at]);
  });
}

async function ask() {
  clearTimeout(timer);
  const call = ++calls;
  if (document.hidden) return;
  let news = null, word = "● live";
  try {
    const wanted = new URLSearchParams({ page: main.dataset.page, filter: box ? box.value : "", have });
    const answer = await fetch("/news?" + wanted);
    if (!answer.ok) throw answer;
    if (answer.status === 200) news = await answer.json();
  } catch {
    word = "○ not connected";
  }
  if (call !== calls) return;
  light.value = word;
  if (news) apply(news);
  timer = setTimeout(ask, 1000);
}

if (box) box.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(() => {
    history.replaceState(null, "", box.value ? "?" + new URLSearchParams({ filter: box.value }) : "/");
    have = "";
    ask();
  }, 200);
});
document.addEventListener("visibilitychange", ask);
requestAnimationFrame(() => requestAnimationFrame(ask));
