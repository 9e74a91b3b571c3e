// Over time: what was computed and spared, in the last hour and the last month.
import { own } from "/page/api.js";
import { h, svg, show, count, percent, bytes, time, tooltip } from "/page/dom.js";
import { MISSES, SOURCES } from "/page/bars.js";

const WIDTH = 560, HEIGHT = 180, LEFT = 52, BOTTOM = 20;
const EVICTED = { new: "for something new", limit: "the limit", expired: "too old", killed: "of killed apps" };
const MISS_COLOURS = { off: "--quiet", unknown: "--computed", differs: "--recomputed", slower: "--memory", lost: "--remote", late: "--disk", checkpoint: "--quantized" };
const EVICTED_COLOURS = { new: "--memory", limit: "--disk", expired: "--quiet", killed: "--computed" };

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 5, 10].map(step => step * power).find(step => step >= value) ?? 1;
}

// Bars (stacked) or lines: `series` are { name, colour, value(row) }.
function chart({ title, rows, window, series, format, lines = false, figure }) {
  const shown = series.filter(one => rows.some(row => one.value(row)));
  const head = h("div", { class: "panel-head" }, h("h2", {}, title), figure ? h("b", {}, figure) : null);
  if (!shown.length) return h("section", { class: "panel" }, head, h("p", { class: "empty" }, "Nothing in this time."));
  const values = rows.map(row => shown.map(one => one.value(row) ?? 0));
  const top = nice(Math.max(...values.map(list => lines ? Math.max(0, ...list) : list.reduce((a, b) => a + b, 0)), 0) || 1);
  const x = at => LEFT + (WIDTH - LEFT) * (at - window.from) / (window.to - window.from), y = value => (HEIGHT - BOTTOM) * (1 - value / top) + 6;
  const words = row => `${window.name(row.at)}: ${shown.map(one => `${one.name} ${format(one.value(row) ?? 0)}`).join(", ")}`;
  const totals = shown.map(one => `${one.name} ${format(lines ? one.value(rows[rows.length - 1]) ?? 0 : rows.reduce((all, row) => all + (one.value(row) ?? 0), 0))}`);
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT + 8}`, role: "img", "aria-label": `${title}: ${totals.join(", ") || "nothing"}` });
  for (const part of [0, 0.5, 1]) picture.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: y(top * part), y2: y(top * part) }),
    svg("text", { x: LEFT - 8, y: y(top * part) + 4, "text-anchor": "end" }, format(top * part)));
  for (const at of window.ticks) picture.append(svg("text", { x: x(at), y: HEIGHT + 4, "text-anchor": at >= window.to ? "end" : at <= window.from ? "start" : "middle" }, window.name(at)));
  const width = Math.max(1.5, (WIDTH - LEFT) * window.step / (window.to - window.from) - 1);
  if (lines) for (const one of shown) {
    const points = rows.filter(row => one.value(row) !== null && one.value(row) !== undefined).map(row => [x(row.at + window.step / 2), y(one.value(row))]);
    picture.append(svg("path", { d: points.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join(""), style: { stroke: `var(${one.colour})` } }));
    for (const [a, b] of points.length < 40 ? points : points.slice(-1)) picture.append(svg("circle", { cx: a, cy: b, r: 2.5, style: { fill: `var(${one.colour})` } }));
  } else rows.forEach((row, index) => {
    let below = 0;
    shown.forEach((one, which) => {
      const value = values[index][which];
      if (value) picture.append(svg("rect", { x: x(row.at), y: y(below + value), width, height: Math.max(0.5, y(below) - y(below + value)), rx: 1, style: { fill: `var(${one.colour})` } }));
      below += value;
    });
  });
  for (const row of rows) picture.append(tooltip(svg("rect", { class: "hit", x: x(row.at), y: 0, width: Math.max(width, 3), height: HEIGHT - BOTTOM + 6 }), () => words(row)));
  return h("section", { class: "panel" }, head, picture,
    h("ul", { class: "legend" }, shown.map(one => h("li", {}, h("i", { class: "dot", style: { background: `var(${one.colour})` } }), one.name))));
}

function hourWindow() {
  const to = Math.ceil(Date.now() / 60_000) * 60, from = to - 3600;
  return { from, to, step: 60, ticks: [0, 1, 2, 3, 4].map(n => from + 900 * n), name: at => new Date(1000 * at).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" }) };
}

function monthWindow() {
  const to = Math.ceil(Date.now() / 86_400_000) * 86_400, from = to - 31 * 86_400;
  return { from, to, step: 21_600, ticks: [0, 1, 2, 3, 4].map(n => from + 31 * 21_600 * n), name: at => new Date(1000 * at).toLocaleDateString("en-GB", { day: "numeric", month: "short" }) };
}

// Hours of the month in fours a day.
function merged(rows, step) {
  const found = new Map();
  for (const row of rows) {
    const at = Math.floor(row.at / step) * step, into = found.get(at) ?? { at };
    for (const [name, value] of Object.entries(row)) if (name !== "at") into[name] = name.startsWith("bytes.") ? Math.max(into[name] ?? 0, value) : (into[name] ?? 0) + value;
    found.set(at, into);
  }
  return [...found.values()];
}

function charts(rows, window) {
  const of = name => row => row[name], sum = name => rows.reduce((all, row) => all + (row[name] ?? 0), 0);
  const tokens = Object.keys(SOURCES).map(source => ({ name: SOURCES[source], colour: `--${source}`, value: of(`tokens.${source}`) }));
  const all = Object.keys(SOURCES).reduce((total, source) => total + sum(`tokens.${source}`), 0), computed = sum("tokens.computed") + sum("tokens.recomputed");
  const mean = name => row => row.timed ? row[name] / row.timed : null, timed = sum("timed");
  return [
    chart({ title: "Prompt tokens, computed and spared", rows, window, series: tokens, format: count, figure: all ? `${percent(1 - computed / all)} spared` : null }),
    chart({ title: "First token, with and without the cache", rows, window, lines: true, format: value => time(1000 * value), figure: timed ? `${time(1000 * sum("first") / timed)}, without ${time(1000 * sum("cold") / timed)}` : null,
      series: [{ name: "with, as measured", colour: "--engine", value: mean("first") }, { name: "without, as expected", colour: "--computed", value: mean("cold") }] }),
    chart({ title: "Bytes kept", rows, window, lines: true, format: bytes, series: [{ name: "disk", colour: "--disk", value: of("bytes.disk") }, { name: "memory", colour: "--memory", value: of("bytes.memory") }] }),
    chart({ title: "Evicted", rows, window, format: bytes, series: Object.keys(EVICTED).map(reason => ({ name: EVICTED[reason], colour: EVICTED_COLOURS[reason], value: of(`evicted.${reason}`) })) }),
    chart({ title: "Why prompts were not fully reused", rows, window, format: count, figure: `${count(sum("requests"))} requests`,
      series: Object.keys(MISSES).map(reason => ({ name: MISSES[reason], colour: MISS_COLOURS[reason], value: of(`miss.${reason}`) })) }),
    chart({ title: "Tokens written", rows, window, format: count, series: [{ name: "written", colour: "--engine", value: of("written") }] }),
  ];
}

export function timeView() {
  const columns = h("div", { class: "columns charts" }), status = h("p", { class: "note", role: "status" });
  let found = null, which = "hour", left = false, last = 0;
  const buttons = { hour: "The last hour", month: "The last month" };
  const segments = h("div", { class: "segments", role: "group", "aria-label": "How far back" }, Object.entries(buttons).map(([name, text]) =>
    h("button", { type: "button", data: { window: name }, "aria-pressed": String(name === which), onclick: () => { which = name; draw(); } }, text)));

  function draw() {
    for (const button of segments.children) button.setAttribute("aria-pressed", String(button.dataset.window === which));
    if (!found) return;
    const window = which === "hour" ? hourWindow() : monthWindow();
    show(columns, charts(merged(found[which], window.step), window));
  }

  async function load() {
    last = Date.now();
    try { found = await own("/usage"); if (!left) { status.textContent = ""; draw(); } } catch (error) { status.textContent = error.message; }
  }

  return {
    element: h("div", { class: "stack" }, h("div", { class: "panel-head" }, segments, h("span", { class: "note" }, "Numbers only: no text is kept, and nothing older than a month."), status), columns),
    leave() { left = true; },
    update() { if (Date.now() - last > 5000) load(); },
  };
}
