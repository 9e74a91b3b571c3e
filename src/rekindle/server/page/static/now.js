// Now: what runs and waits, what was answered last, and what the machine has left.
import { h, show, count, percent, bytes, time, clock, VirtualList } from "/page/dom.js";
import { bar, counts, countBar, dot, legend, MISSES, STATES } from "/page/bars.js";

const RUNNING = new Set(["queued", "lookup", "prefill", "decode"]);
const AVERAGED = 100;  // of the last requests

export const isRunning = row => RUNNING.has(row.state);

export function firstMs(row) {
  if (row.first_ms !== undefined) return row.first_ms;
  return row.marks.decode === undefined ? null : 1000 * (row.marks.decode - (row.marks.lookup ?? 0));
}

function median(values) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

function meter(label, used, limit) {
  const share = limit ? Math.min(1, used / limit) : 0;
  return h("div", { class: "meter" },
    h("span", {}, label), h("b", {}, bytes(used)), h("small", {}, limit ? `of ${bytes(limit)}` : "no limit"),
    h("div", { class: "gauge", role: "meter", "aria-label": label, "aria-valuenow": Math.round(100 * share), "aria-valuemin": "0", "aria-valuemax": "100" },
      h("i", { style: { width: `${100 * share}%` } })));
}

function tile(title, value, note, ...more) {
  return h("section", { class: "tile" }, h("h2", {}, title), h("p", { class: "figure" }, value), h("p", { class: "note" }, note), ...more);
}

function withAndWithout(first, cold) {
  const longest = Math.max(first ?? 0, cold ?? 0) || 1;
  const line = (name, value, source) => h("div", { class: "versus" },
    h("span", {}, name), h("i", { style: { width: `${Math.max(2, 100 * (value ?? 0) / longest)}%`, background: `var(--${source})` } }), h("b", {}, time(value)));
  return [line("with", first, "engine"), line("without", cold, "computed")];
}

const since = (row, state) => (performance.timeOrigin + performance.now()) / 1000 - row.at - row.marks[state];  // in seconds

function card(row) {
  const first = firstMs(row), rate = row.state === "decode" && row.written > 1
    ? (row.written - 1) / Math.max(0.001, since(row, "decode")) : null;
  const read = row.state === "prefill" ? 1000 * since(row, "prefill") : 0;
  const expected = row.predicted_ms > read && read ? `, ${time(read)} of about ${time(row.predicted_ms)}` : "";
  const done = row.tokens ? `${count(row.present)} of ${count(row.tokens)} prompt tokens${expected}` : "prompt not read yet";
  return h("a", { class: "card", href: `#/request/${row.id}`, data: { id: row.id, state: row.state } },
    h("div", { class: "card-head" },
      h("b", {}, row.app || "a client"), h("span", { class: "muted" }, row.model),
      h("span", { class: "state" }, STATES[row.state])),
    bar(row.spans, { present: row.state === "prefill" ? row.present : undefined, total: row.tokens, tall: true }),
    h("div", { class: "card-foot" },
      h("span", {}, done),
      h("span", {}, "first token ", h("b", {}, time(first)), row.cold_ms ? h("span", { class: "muted" }, ` without the cache about ${time(row.cold_ms)}`) : null),
      h("span", {}, h("b", {}, count(row.written)), " written", rate ? `, ${rate.toFixed(1)} tokens/s` : "")));
}

export function requestCells(row) {
  const failed = row.state === "failed" || row.state === "cancelled";
  return [
    h("span", { class: "when", role: "gridcell" }, clock(row.at)),
    h("span", { class: "who", role: "gridcell" }, h("b", {}, row.app || "a client"), h("small", {}, row.model)),
    h("span", { class: "what", role: "gridcell" }, bar(row.spans, { total: row.tokens })),
    h("span", { class: "num", role: "gridcell" }, h("b", {}, row.tokens ? percent((row.reused ?? 0) / row.tokens) : "–"), h("small", {}, `of ${count(row.tokens)}`)),
    h("span", { class: "num", role: "gridcell" }, h("b", {}, time(firstMs(row))), h("small", {}, row.cold_ms ? `without ${time(row.cold_ms)}` : "")),
    h("span", { class: "num rate", role: "gridcell" }, row.rate ? row.rate.toFixed(1) : "–"),
    h("span", { class: "why", role: "gridcell" }, failed ? STATES[row.state] : isRunning(row) ? STATES[row.state] : row.miss ? MISSES[row.miss] ?? row.miss : "all of it reused"),
  ];
}

export const requestHead = ["at", "who", "prompt", "reused", "first token", "tokens/s", "why not more"];

export function now(state) {
  const tiles = h("div", { class: "tiles" });
  const flight = h("div", { class: "cards" });
  const flightTitle = h("h2", {}, "In flight");
  const list = new VirtualList({
    label: "The last requests", head: requestHead, height: matchMedia("(max-width: 720px)").matches ? 76 : 48, draw: requestCells,
    open: row => { location.hash = `#/request/${row.id}`; }, empty: "Nothing was asked yet.",
  });
  list.element.classList.add("requests");

  function drawTiles(done) {
    const { server } = state, recent = done.slice(0, AVERAGED), sum = {};
    for (const row of recent) for (const [source, n] of Object.entries(counts(row.spans))) sum[source] = (sum[source] ?? 0) + n;
    const total = recent.reduce((all, row) => all + row.tokens, 0), reused = recent.reduce((all, row) => all + (row.reused ?? 0), 0);
    const timed = recent.filter(row => row.cold_ms && Number.isFinite(row.first_ms));
    const first = median(timed.map(row => row.first_ms)), cold = median(timed.map(row => row.cold_ms));
    show(tiles,
      tile("Reused", total ? percent(reused / total) : "–", total ? `${count(reused)} of ${count(total)} prompt tokens, last ${recent.length} requests` : "no request yet", countBar(sum)),
      tile("First token", time(first ?? median(recent.map(firstMs))), cold ? "median, beside what it would have taken" : "median", cold ? withAndWithout(first, cold) : null),
      tile("Writing", h("span", {}, median(recent.map(row => row.rate))?.toFixed(1) ?? "–", h("small", {}, " tokens/s")),
        `${server.running} of ${server.parallel} places taken, ${server.waiting} of ${server.queue} waiting`),
      h("section", { class: "tile" }, h("h2", {}, "Room"),
        server.memory ? meter("Memory", server.memory.bytes, server.memory.limit_bytes) : null,
        server.disk ? meter("Disk", server.disk.bytes, server.disk.limit_bytes) : h("p", { class: "note" }, "The cache is off."),
        h("p", { class: "note" }, `the process has ${bytes(server.process_bytes)}`)),
      h("section", { class: "tile" }, h("h2", {}, "Model"), h("p", { class: "figure name" }, server.model),
        h("p", { class: "note" }, `${server.engine} on ${server.device}, ${count(server.context_tokens)} tokens of context, reuse ${server.reuse}`),
        server.adapters.length ? h("ul", { class: "chips" }, server.adapters.map(one => h("li", { class: one.loaded ? "on" : "" }, one.name))) : null));
  }

  let pending = false;
  function draw() {
    pending = false;
    const all = [...state.rows.values()].reverse(), running = all.filter(isRunning), done = all.filter(row => row.state === "done");
    drawTiles(done);
    flightTitle.textContent = running.length ? `In flight (${running.length})` : "In flight";
    show(flight, running.length ? running.slice(0, 50).reverse().map(card)
      : h("p", { class: "empty" }, `Nothing runs. Requests to ${location.origin}/v1 appear here as they come.`));
    list.set(all);
  }

  return {
    element: h("div", { class: "stack" }, tiles,
      h("section", { class: "panel", "aria-label": "Requests in flight" }, h("div", { class: "panel-head" }, flightTitle, legend()), flight),
      h("section", { class: "panel" }, h("div", { class: "panel-head" }, h("h2", {}, "Last requests")), list.element)),
    update() { if (!pending) { pending = true; requestAnimationFrame(draw); } },
  };
}
