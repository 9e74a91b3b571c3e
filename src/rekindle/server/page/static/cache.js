// The cache: a map of prefixes, and what belongs to it: apps, adapters, documents, answers, origins, idle work.
import { own } from "/page/api.js";
import { h, show, count, percent, bytes, time, ago, tooltip, VirtualList } from "/page/dom.js";

const ROW = 34, MIN_WIDTH = 0.15, MAX_DEPTH = 400;  // height of a level in pixels; thinner blocks, in percent, are not drawn
const SIZES = { bytes: "bytes", saved: "tokens saved" };
const COLOURS = { worth: "worth", age: "last use", app: "app", adapter: "adapter", tenant: "tenant" };
const HUES = ["--memory", "--remote", "--engine", "--recomputed", "--quantized", "--disk", "--computed", "--passages"];

const sizeOf = { bytes: entry => entry.bytes, saved: entry => entry.hits * entry.tokens };
const worth = entry => entry.bytes ? entry.saved_ms / (entry.bytes / 1e6) : 0;  // saved time for each MB
const titleOf = entry => entry.text || `${count(entry.tokens)} tokens`;

// Entries as trees: a model with its adapter and tenant, then prefixes and what continues them.
function trees(entries, size) {
  const nodes = new Map(entries.map(entry => [entry.name, { entry, children: [], own: sizeOf[size](entry) }]));
  const groups = new Map();
  for (const node of nodes.values()) {
    const parent = nodes.get(node.entry.parent);
    if (parent && parent !== node) { parent.children.push(node); continue; }
    const { model, adapter, tenant } = node.entry, key = JSON.stringify([model, adapter, tenant]);
    if (!groups.has(key)) groups.set(key, { title: [model, adapter, tenant].filter(Boolean).join(" · "), children: [], own: 0 });
    groups.get(key).children.push(node);
  }
  const add = (node, depth) => {
    if (depth > MAX_DEPTH) return node.sum = 0;
    node.sum = node.own + node.children.reduce((all, child) => all + add(child, depth + 1), 0);
    node.children.sort((a, b) => b.sum - a.sum);
    return node.sum;
  };
  const roots = [...groups.values()];
  roots.forEach(root => add(root, 0));
  return roots.sort((a, b) => b.sum - a.sum);
}

function painter(entries, by) {
  if (by === "worth" || by === "age") {
    const value = by === "worth" ? entry => Math.log1p(worth(entry)) : entry => -Math.log1p(Math.max(0, Date.now() / 1000 - entry.used));
    const all = entries.map(value), low = Math.min(...all), high = Math.max(...all);
    return entry => shade((value(entry) - low) / (high - low || 1));
  }
  const key = { app: entry => entry.apps[0] ?? "none", adapter: entry => entry.adapter ?? "none", tenant: entry => entry.tenant }[by];
  const known = [...new Set(entries.map(key))];
  return entry => ({ background: `var(${HUES[known.indexOf(key(entry)) % HUES.length]})`, color: "#fff" });
}

// From hardly to most.
const shade = share => ({ background: `color-mix(in oklab, var(--disk) ${Math.round(18 + 82 * share)}%, var(--surface))`, color: share > 0.45 ? "#fff" : "var(--text)" });

function scale(by, entries) {
  if (by === "worth" || by === "age") return h("p", { class: "scale" }, by === "worth" ? "saves little" : "long ago", h("i", { style: { background: `linear-gradient(to right, ${shade(0).background}, ${shade(1).background})` } }), by === "worth" ? "saves most for its bytes" : "just used");
  const paint = painter(entries, by), names = new Map(entries.map(entry => [{ app: entry.apps[0] ?? "no app", adapter: entry.adapter ?? "no adapter", tenant: entry.tenant }[by], paint(entry).background]));
  return h("ul", { class: "legend" }, [...names].slice(0, HUES.length).map(([name, background]) => h("li", {}, h("i", { class: "dot", style: { background } }), name)));
}

function words(entry) {
  return `${entry.text ? `“${entry.text}…” ` : ""}${count(entry.tokens)} tokens, ${bytes(entry.bytes)}, used ${count(entry.hits)} ×, last use ${ago(entry.used)}, saved ${time(entry.saved_ms)}${entry.pinned ? ", pinned" : ""}`;
}

function drawMap(map, roots, paint, picked, pick) {
  const total = roots.reduce((all, root) => all + root.sum, 0), blocks = [];
  let deepest = 0;
  const place = (node, left, width, depth) => {
    if (width < MIN_WIDTH) return;
    deepest = Math.max(deepest, depth);
    const position = { left: `${left}%`, width: `${width}%`, top: `${depth * ROW}px`, height: `${ROW - 2}px` };
    if (node.entry) {
      const { entry } = node, block = h("button", { type: "button", class: entry.pinned ? "block pinned" : "block", data: { name: entry.name },
        "aria-pressed": String(entry.name === picked), "aria-label": words(entry), style: { ...position, ...paint(entry) }, onclick: () => pick(entry.name) },
        width > 4 ? titleOf(entry) : "");
      blocks.push(tooltip(block, words(entry)));
    } else blocks.push(h("div", { class: "block group", style: { ...position, background: "var(--line)" } }, node.title));
    let at = left;
    for (const child of node.children) {
      const share = node.sum ? width * child.sum / node.sum : 0;
      place(child, at, share, depth + 1);
      at += share;
    }
  };
  let at = 0;
  for (const root of roots) { const width = total ? 100 * root.sum / total : 100 / roots.length; place(root, at, width, 0); at += width; }
  map.style.height = `${(deepest + 1) * ROW}px`;
  show(map, blocks);
}

function table(title, note, head, rows, empty) {
  return h("section", { class: "panel" }, h("div", { class: "panel-head" }, h("h2", {}, title), h("span", { class: "muted" }, note ?? "")),
    rows.length ? h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head.map((name, i) => h("th", { class: i ? "num" : "" }, name)))),
      h("tbody", {}, rows.map(row => h("tr", {}, row.map((cell, i) => h("td", { class: i ? "num" : "" }, cell))))))) : h("p", { class: "empty" }, empty));
}

function warmDialog(done) {
  const system = h("textarea", { rows: 5, id: "warm-text", required: true }), problem = h("p", { class: "note", role: "status" });
  const form = h("form", { method: "dialog" }, h("h2", {}, "Warm a prompt"),
    h("p", { class: "note" }, "It is read now, and its KV is kept: requests that begin with this system message start fast."),
    h("label", {}, "System message", system), problem,
    h("div", { class: "actions end" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), h("button", { type: "submit", class: "main" }, "Warm")));
  const dialog = h("dialog", { class: "wide", "aria-label": "Warm a prompt", onclose: () => dialog.remove() }, form);
  form.addEventListener("submit", async event => {
    event.preventDefault();
    problem.textContent = "Reading…";
    try {
      const found = await own("/warm", { method: "POST", body: { messages: [{ role: "system", content: system.value }, { role: "user", content: "" }], app_id: "page" } });
      dialog.close();
      done(`Warm: ${count(found.usage.prompt_tokens)} tokens are kept.`);
    } catch (error) { problem.textContent = error.message; }
  });
  document.body.append(dialog);
  dialog.showModal();
}

export function cacheView(state) {
  const element = h("div", { class: "stack" }), map = h("div", { class: "map", role: "group", "aria-label": "Map of stored prefixes" });
  const picked = h("div", {}), legend = h("div", {}), status = h("p", { class: "note", role: "status" }), summary = h("span", { class: "muted" }), side = h("div", { class: "columns" });
  let found = null, apps = [], documents = [], stats = null, chosen = null, size = "bytes", colour = "worth", left = false;
  const choice = (label, names, value, set) => h("label", {}, label, h("select", { onchange: event => { set(event.target.value); draw(); } },
    Object.entries(names).map(([name, text]) => h("option", { value: name, selected: name === value }, text))));
  const list = new VirtualList({
    label: "Entries", head: ["text", "model", "apps", "tokens", "bytes", "saved", "last use"], height: 48, key: entry => entry.name,
    open: entry => pick(entry.name), empty: "Nothing is stored yet.",
    draw: entry => [
      h("span", { role: "gridcell" }, h("b", {}, (entry.pinned ? "● " : "") + titleOf(entry)), h("small", {}, `${entry.name.slice(0, 10)} · ${entry.coding} · ${entry.tenant}`)),
      h("span", { role: "gridcell" }, entry.model, h("small", {}, entry.adapter ?? "")), h("span", { role: "gridcell" }, entry.apps.join(", ") || "–"),
      h("span", { class: "num", role: "gridcell" }, count(entry.tokens)), h("span", { class: "num", role: "gridcell" }, bytes(entry.bytes)),
      h("span", { class: "num", role: "gridcell" }, time(entry.saved_ms), h("small", {}, `${count(entry.hits)} hits`)), h("span", { class: "num", role: "gridcell" }, ago(entry.used))],
  });
  list.element.classList.add("entries");

  async function act(path, method, said) {
    try { const answer = await own(path, { method }); status.textContent = said(answer); } catch (error) { status.textContent = error.message; }
    await load();
  }

  function pick(name) { chosen = name; draw(); picked.scrollIntoView({ block: "nearest", behavior: "smooth" }); }

  function drawPicked() {
    const entry = found.entries.find(one => one.name === chosen);
    if (!entry) return show(picked);
    const path = `/entries/${encodeURIComponent(entry.name)}`;
    return show(picked, h("div", { class: "picked", data: { name: entry.name } },
      h("h3", {}, `Entry ${entry.name}`), entry.text ? h("p", { class: "prompt-text" }, entry.text, "…") : null,
      h("p", {}, words({ ...entry, text: null }), `. ${entry.model}${entry.adapter ? ` with ${entry.adapter}` : ""}, tenant ${entry.tenant}, ${entry.apps.length ? `apps ${entry.apps.join(", ")}` : "no app"}; kept ${ago(entry.kept)}; ${time(worth(entry))} saved for each MB.`),
      h("div", { class: "actions" },
        h("button", { type: "button", onclick: () => act(`${path}/pin`, entry.pinned ? "DELETE" : "PUT", () => entry.pinned ? "It may be evicted again." : "Pinned: it is never evicted.") }, entry.pinned ? "Unpin" : "Pin"),
        h("button", { type: "button", class: "danger", onclick: () => act(path, "DELETE", answer => `Removed: ${count(answer.removed)} entries, with those that depended on it.`) }, "Remove"))));
  }

  function drawSide() {
    const idle = found.idle, hits = idle.reduce((all, one) => all + one.uses, 0);
    show(side,
      table("Apps", "", ["app", "state", "requests"], apps.map(app => [app.id || "without a name", app.state, count(app.requests)]), "No app asked yet."),
      table("Models and adapters", "", ["model", "adapter", "tenant", "entries", "bytes"], (stats?.models ?? []).map(one => [one.model || one.identity.slice(0, 8), one.adapter ?? "–", one.tenant, count(one.entries), bytes(one.bytes)]), "Nothing is stored yet."),
      table("Documents", `${count(documents.length)}`, ["document", "passages", "characters"], documents.map(one => [one.title || one.source, count(one.chunks), count(one.characters)]), "The library is empty: rekindle ingest FOLDER."),
      table("Answers", "", ["question", "from", "state", "used", "saved"], found.answers.map(one => [one.question, one.origin, one.state, count(one.uses), time(1000 * one.saved_seconds)]), "No answer is stored yet."),
      table("Origins", "", ["origin", "bandwidth"], found.origins.map(one => [one.url, one.speed ? `${bytes(one.speed)}/s` : "not measured"]), "No origin is set."),
      table("Idle work", idle.length ? `${count(hits)} of what it foresaw was asked` : found.idle_on ? "on" : "off", ["action", "count", "took", "used", "saved"], idle.map(one => [one.action, count(one.count), time(1000 * one.seconds), count(one.uses), time(1000 * one.saved_seconds)]), found.idle_on ? "Nothing was foreseen yet." : "Off. Start the server with --idle."),
      found.idle_actions.length ? table("Foreseen", "the last first", ["question", "action", "took", "asked", "saved"], found.idle_actions.filter(one => one.question).map(one => [one.question, one.action, time(1000 * one.seconds), one.uses ? `${count(one.uses)} times` : "not yet", time(1000 * (one.saved_seconds ?? 0))]), "Nothing was foreseen yet.") : null);
  }

  function draw() {
    if (!found) return;
    const entries = found.entries, total = entries.reduce((all, one) => all + one.bytes, 0);
    summary.textContent = `${count(entries.length)} entries, ${bytes(total)}, ${time(entries.reduce((all, one) => all + one.saved_ms, 0))} saved`;
    map.hidden = !entries.length;
    drawMap(map, trees(entries, size), painter(entries, colour), chosen, pick);
    show(legend, entries.length ? scale(colour, entries) : null);
    drawPicked();
    list.set([...entries].sort((a, b) => sizeOf[size](b) - sizeOf[size](a)));
    drawSide();
  }

  async function load() {
    try {
      const [tree, known, library, totals] = await Promise.all([own("/map"), own("/apps"), own("/documents?limit=1000").catch(() => ({ data: [] })), own("/stats").catch(() => null)]);
      if (left) return;
      [found, apps, documents, stats] = [tree, known.data, library.data, totals];
      draw();
    } catch (error) { if (!left) status.textContent = error.message; }
  }

  show(element, h("section", { class: "panel" },
    h("div", { class: "panel-head" }, h("h2", {}, "Prefixes"), summary,
      h("div", { class: "controls" }, choice("size", SIZES, size, value => { size = value; }), choice("colour", COLOURS, colour, value => { colour = value; }),
        h("button", { type: "button", onclick: load }, "Refresh"), h("button", { type: "button", class: "main", onclick: () => warmDialog(text => { status.textContent = text; load(); }) }, "Warm a prompt"))),
    map, legend, status, picked, list.element), side);
  let loaded = false;
  return { element, leave() { left = true; }, update(_, first) { if (!loaded || first) { loaded = true; load(); } } };
}
