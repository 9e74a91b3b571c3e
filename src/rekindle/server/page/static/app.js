// The frame of the page: which view is shown, the connection to the server, theme and key.
import { live, setKey, Refused } from "/page/api.js";
import { h, show } from "/page/dom.js";
import { now } from "/page/now.js";
import { requestView } from "/page/request.js";
import { cacheView } from "/page/cache.js";
import { timeView } from "/page/time.js";
import { tryView } from "/page/try.js";

const VIEWS = [
  ["now", "Now", now], ["request", "A request", requestView], ["cache", "The cache", cacheView],
  ["time", "Over time", timeView], ["try", "Try it", tryView],
];
const main = document.getElementById("view"), connection = document.getElementById("connection");
const rows = new Map();  // of requests, by id
export const state = { rows, server: null };
let shown = null;

function route() {
  const [, name = "now", argument] = location.hash.match(/^#\/(\w+)(?:\/(\w+))?/) ?? [];
  const [id, title, make] = VIEWS.find(([id]) => id === name) ?? VIEWS[0];
  shown?.leave?.();
  shown = make(state, argument);
  show(main, h("h1", { class: "hidden" }, title), shown.element);
  document.title = `${title} · Rekindle`;
  for (const link of document.querySelectorAll("#tabs a")) {
    if (link.dataset.view === id) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  if (state.server) shown.update?.(new Set(rows.keys()));
}

function connected(text, kind) {
  if (connection.dataset.state !== kind) { connection.textContent = text; connection.dataset.state = kind; }
}

function take(item) {
  if (item.first) rows.clear();
  for (const row of item.rows) rows.set(row.id, row);
  while (rows.size > 10_000) rows.delete(rows.keys().next().value);
  state.server = item.server;
  connected(item.server.loaded ? "live" : "live, model unloaded", item.server.loaded ? "live" : "resting");
  shown?.update?.(new Set(item.rows.map(row => row.id)), item.first);
}

async function follow() {
  let pause = 250;
  for (;;) {
    try {
      for await (const item of live()) { take(item); pause = 250; }
      connected("server stopped, trying again", "lost");
    } catch (error) {
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) await askKey(error.status);
      else connected("no connection, trying again", "lost");
    }
    await new Promise(done => setTimeout(done, pause));
    pause = Math.min(pause * 2, 5000);
  }
}

function askKey(status) {
  connected("needs a key", "key");
  const dialog = document.getElementById("key"), field = document.getElementById("key-field");
  if (status === 403) document.getElementById("key-why").textContent = "That key is not the operator's: it does not open this page.";
  field.value = "";
  dialog.showModal();
  return new Promise(done => dialog.addEventListener("close", () => { setKey(field.value.trim()); done(); }, { once: true }));
}

document.getElementById("tabs").append(...VIEWS.map(([id, title], index) =>
  h("a", { href: `#/${id}`, data: { view: id }, "aria-keyshortcuts": String(index + 1) }, title)));
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const next = (root.dataset.theme ?? (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  root.dataset.theme = next;
  try { localStorage.setItem("theme", next); } catch { /* it lasts until the page is left */ }
});
document.addEventListener("keydown", event => {
  const typing = event.target.closest("input, textarea, select, dialog");
  if (!typing && !event.ctrlKey && !event.metaKey && !event.altKey && VIEWS[event.key - 1]) location.hash = `#/${VIEWS[event.key - 1][0]}`;
});
addEventListener("hashchange", () => { route(); main.focus({ preventScroll: true }); scrollTo(0, 0); });
route();
follow();
