// One palette for where KV came from, and the bars, legends and texts that use it.
import { h, count, time, tooltip } from "/page/dom.js";

export const SOURCES = {
  engine: "still in the engine",
  memory: "from memory",
  disk: "from disk",
  remote: "from an origin",
  quantized: "quantized KV",
  passages: "from another prompt",
  recomputed: "recomputed passage",
  computed: "computed",
};

export const MISSES = {
  off: "reuse is off", unknown: "nothing stored begins like it", differs: "differs from stored prompts",
  slower: "reuse would take longer", lost: "KV could not be read", late: "the cache was late", checkpoint: "ends at a checkpoint",
};

export const STATES = {
  queued: "waiting in the line", lookup: "looking up", prefill: "reading the prompt", decode: "writing", done: "done",
  cancelled: "cancelled", failed: "failed",
};

// How far a prompt is read, from an item of a stream with `return_progress`.
export function reading({ prompt_progress: { processed, total, cache, time_ms }, rekindle: { expected_ms, kept } }) {
  const cached = cache ? `, ${count(cache)} of them from the cache` : "", about = expected_ms > time_ms ? ` of about ${time(expected_ms)}` : "";
  return `reading the prompt: ${count(processed)} of ${count(total)} tokens${cached}, ${time(time_ms)}${about}${kept ? "; the next time at once" : ""}`;
}

export function counts(spans) {
  const found = {};
  for (const [start, stop, source] of spans) found[source] = (found[source] ?? 0) + stop - start;
  return found;
}

export function sentence(found) {
  const parts = Object.keys(SOURCES).filter(source => found[source]).map(source => `${count(found[source])} ${SOURCES[source]}`);
  return parts.join(", ") || "no prompt yet";
}

// One element whatever the number of spans: ten thousand rows stay smooth.
export function bar(spans, { present, total, tall = false } = {}) {
  const all = total || (spans.length ? spans[spans.length - 1][1] : 0);
  const stops = spans.map(([start, stop, source]) => `var(--${source}) ${100 * start / all}% ${100 * stop / all}%`);
  const words = `${count(all)} tokens: ${sentence(counts(spans))}`;
  const strip = h("div", { class: tall ? "bar tall" : "bar", role: "img", "aria-label": words });
  if (stops.length) strip.style.backgroundImage = `linear-gradient(to right, ${stops.join(", ")})`;
  if (present !== undefined && present < all) {
    strip.append(h("i", { class: "bar-rest", style: { left: `${100 * present / all}%` } }));
    strip.classList.add("filling");
  }
  return tooltip(strip, words);
}

export function countBar(found, options) {
  const spans = [];
  let at = 0;
  for (const source of Object.keys(SOURCES)) if (found[source]) spans.push([at, at += found[source], source]);
  return bar(spans, options);
}

export const dot = source => h("i", { class: "dot", style: { background: `var(--${source})` } });

export function legend(found) {
  const shown = Object.keys(SOURCES).filter(source => !found || found[source]);
  return h("ul", { class: "legend" }, shown.map(source =>
    h("li", {}, dot(source), found ? h("b", {}, count(found[source])) : null, found ? " " : null, SOURCES[source])));
}
