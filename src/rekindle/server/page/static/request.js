// A request: when what happened, where each part of its prompt came from, and why not more was reused.
import { own } from "/page/api.js";
import { h, svg, show, count, percent, time, clock, tooltip } from "/page/dom.js";
import { bar, counts, legend, MISSES, SOURCES, STATES } from "/page/bars.js";
import { firstMs, isRunning } from "/page/now.js";



function fact(name, value, note) {
  return h("div", { class: "fact" }, h("dt", {}, name), h("dd", {}, value, note ? h("small", {}, note) : null));
}

// Lanes of [start, stop, colour, words] in seconds.
function timeline(found) {
  const marks = found.marks, end = Math.max(...Object.values(marks)), ended = marks.done ?? marks.cancelled ?? marks.failed ?? end;
  const from = name => marks[name], lanes = [];
  const add = (name, ...parts) => { if (parts.length) lanes.push([name, parts]); };
  const firstAt = from("decode") ?? ended, reuse = found.reuse ?? {};
  if (from("lookup") > 0.0005) add("line", [0, from("lookup"), "var(--muted)", `waited ${time(1000 * from("lookup"))}`]);
  if (from("prefill") !== undefined) {
    const began = from("prefill");
    add("lookup", [from("lookup") ?? 0, began, "var(--quiet)", `tokenized, looked up and planned in ${time(1000 * (began - (from("lookup") ?? 0)))}`]);
    const events = reuse.timeline ?? [], shift = began;
    const lane = which => events.filter(event => event.lane === which);
    if (reuse.load_seconds) add("load", [began, Math.min(firstAt, began + reuse.load_seconds), `var(--${reuse.disk ? "disk" : "memory"})`, `loaded in ${time(1000 * reuse.load_seconds)}, most of it while computing`]);
    if (events.length) {
      add("stream", ...lane("link").map(e => [shift + e.start, shift + e.stop, "var(--remote)", `chunk ${e.chunk}, layers ${e.first_layer} to ${e.stop_layer}, from the origin`]));
      add("compute", ...lane("compute").map(e => [shift + e.start, shift + e.stop, "var(--computed)", `chunk ${e.chunk}, layers ${e.first_layer} to ${e.stop_layer}, computed`]));
    } else {
      const again = reuse.recomputed ? `, ${count(reuse.recomputed)} of them recomputed tokens of passages` : "";
      add(reuse.recomputed ? "recompute" : "compute", [began, firstAt, `var(--${reuse.recomputed ? "recomputed" : "computed"})`, `${count(reuse.computed)} tokens computed${again} in ${time(1000 * (firstAt - began))}`]);
    }
  }
  if (from("decode") !== undefined) add("decode", [from("decode"), ended, "var(--engine)", `${count(found.written)} tokens written in ${time(1000 * (ended - from("decode")))}`]);
  const height = 30 * lanes.length + 26, span = ended || 1, wide = innerWidth > 720 ? 1000 : 420, x = at => 80 + (wide - 90) * at / span;
  const picture = svg("svg", { class: "timeline", viewBox: `0 0 ${wide} ${height}`, role: "img", "aria-label": `Timeline of ${time(1000 * span)}: ${lanes.map(([, parts]) => parts[0][3]).join("; ")}` });
  for (let tick = 0; tick <= 4; tick++) {
    const at = span * tick / 4;
    picture.append(svg("line", { class: "tick", x1: x(at), x2: x(at), y1: 0, y2: height - 22 }),
      svg("text", { class: "tick-name", x: x(at), y: height - 6, "text-anchor": tick === 4 ? "end" : tick ? "middle" : "start" }, time(1000 * at)));
  }
  lanes.forEach(([name, parts], index) => {
    picture.append(svg("text", { class: "lane-name", x: 0, y: 30 * index + 19 }, name));
    for (const [start, stop, colour, words] of parts) {
      picture.append(tooltip(svg("rect", { x: x(start), y: 30 * index + 5, width: Math.max(2, x(stop) - x(start)), height: 20, rx: 3, style: { fill: colour } }), words));
    }
  });
  return picture;
}

function difference(found) {
  const one = found.explanation?.difference;
  if (!one) return null;
  const side = (name, text) => h("div", { class: "side" }, h("h3", {}, name),
    h("p", { class: "prompt-text" }, h("span", { class: "muted" }, one.before ? `…${one.before}` : ""), h("mark", {}, text)));
  return h("section", { class: "panel" }, h("div", { class: "panel-head" }, h("h2", {}, "The first token that differed")),
    h("p", { class: "note" }, one.position ? `Token ${count(one.position)} of ${count(found.tokens)}.` : "The very first token.", one.only_in ? ` They differ only in ${one.only_in}, which makes other tokens of them.` : ""),
    h("div", { class: "sides" }, side("This prompt", one.ours), side("Earlier", one.known)));
}

function advice(found) {
  const change = found.explanation?.change;
  if (!change) return null;
  const saved = change.saved_seconds ? `, saving about ${time(1000 * change.saved_seconds)} per request` : "";
  return h("div", { class: "advice" }, h("h3", {}, "What would help"),
    h("p", {}, "This text changes with every request: ", h("mark", {}, change.now), change.earlier.some(Boolean) ? [" (earlier: ", change.earlier.filter(Boolean).map((text, i) => [i ? ", " : "", h("q", {}, text)]), ")"] : null,
      `. Move it behind the ${count(change.shared_tokens)} tokens that stay the same: they are then reused${saved}.`));
}

function why(found) {
  const reason = found.explanation?.reason, origin = found.explanation?.origin;
  return h("section", { class: "panel" }, h("div", { class: "panel-head" }, h("h2", {}, "Why not more")),
    h("p", { class: "lead" }, reason?.sentence ?? (found.problem ? `It ended with ${found.problem}.` : found.miss ? `${MISSES[found.miss] ?? found.miss}.` : isRunning(found) ? "It is still on its way." : "Everything but the last token was reused.")),
    reason?.differs_in?.length ? h("p", { class: "note" }, `What differs: ${reason.differs_in.join(", ")}.`) : null,
    origin?.miss ? h("p", { class: "note" }, `Origin: ${origin.miss}.`) : null,
    advice(found),
    found.summary ? h("p", { class: "note" }, found.summary, ".") : null,
    found.explanation ? h("details", {}, h("summary", { class: "note" }, "As rekindle explain says it"), h("p", { class: "prompt-text" }, found.explanation.text)) : null);
}

function passages(found) {
  const chunks = found.reuse?.chunks ?? [], sources = found.sources ?? [];
  if (!chunks.length && !sources.length) return null;
  const names = { exact: "in this very context", reused: "from another prompt", computed: "computed after reused ones" };
  return h("section", { class: "panel" }, h("div", { class: "panel-head" }, h("h2", {}, "Passages"),
      found.retrieval ? h("span", { class: "muted" }, `${found.retrieval.method}, ${time(found.retrieval.ms)}`) : null),
    chunks.length ? h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["passage", "tokens", "its KV", "recomputed", "changed"].map(t => h("th", {}, t)))),
      h("tbody", {}, chunks.map(c => h("tr", {}, h("td", {}, c.number ? `[${c.number}]` : "text"), h("td", { class: "num" }, `${count(c.start)}–${count(c.stop)}`),
        h("td", {}, names[c.source], c.streamed ? ", by the origin" : ""), h("td", { class: "num" }, count(c.recomputed)), h("td", { class: "num" }, c.change === null ? "–" : percent(c.change))))))) : null,
    found.quote ? h("blockquote", {}, `[${found.quote.number}] `, h("q", {}, found.quote.text)) : null,
    found.retrieval?.uncertain ? h("p", { class: "note" }, "Uncertain: no passage is clearly about the question; this is the nearest one.") : null,
    sources.map(source => h("details", { class: "source" }, h("summary", {}, h("b", {}, `[${source.number}] ${source.title || source.document}`), h("span", { class: "muted" }, source.source)),
      h("p", { class: "prompt-text" }, source.text))));
}

function stood(found) {
  const drafts = found.usage && (found.usage.drafted_tokens || found.usage.refused_tokens), stored = found.stored;
  if (!drafts && !stored && !found.refused) return null;
  return h("section", { class: "panel" }, h("div", { class: "panel-head" }, h("h2", {}, "What the answer stood on")),
    drafts ? h("p", {}, h("b", {}, count(found.usage.drafted_tokens)), " tokens of drafts accepted, ", h("b", {}, count(found.usage.refused_tokens)), " refused.") : null,
    stored ? h("p", {}, stored.way === "direct" ? "A stored answer was given without the model, to " : "Checked against the stored answer to ", h("q", {}, stored.question), ` (${percent(stored.similarity)} alike, ${stored.origin}).`) : null,
    found.refused ? h("p", { class: "note" }, `No stored answer was given: ${found.refused}.`) : null);
}

function prompt(found) {
  if (!found.prompt) {
    return h("section", { class: "panel" }, h("div", { class: "panel-head" }, h("h2", {}, "Prompt")),
      h("p", { class: "empty" }, found.has_text === false && !isRunning(found) ? "Its text is not shown: another tenant or salt asked, or it is too long ago." : "Its text is not here yet."));
  }
  const text = h("p", { class: "prompt-text", tabindex: "0", "aria-label": "The prompt" }, found.prompt.map(part => {
    const piece = h("span", { class: "run", data: { source: part.source } }, part.text);
    piece.style.setProperty("--source", `var(--${part.source})`);
    return tooltip(piece, SOURCES[part.source]);
  }));
  const warm = h("button", { type: "button", onclick: async () => {
    warm.disabled = true;
    try {
      const done = await own("/warm", { method: "POST", body: { prompt: found.prompt_tokens, model: found.model } });
      warm.textContent = `Warm: ${count(done.usage.cached_tokens)} of ${count(done.usage.prompt_tokens)} reused`;
    } catch (error) { warm.textContent = error.message; }
  } }, "Warm this prompt");
  return h("section", { class: "panel" }, h("div", { class: "panel-head" }, h("h2", {}, "Prompt"), legend(counts(found.spans)), warm), text,
    found.reply ? [h("h3", {}, "Reply"), h("p", { class: "prompt-text reply" }, found.reply)] : null);
}

function drawRequest(found) {
  const first = firstMs(found), faster = found.cold_ms && first ? found.cold_ms / first : null;
  return [
    h("section", { class: "panel" },
      h("div", { class: "panel-head" }, h("h2", {}, `Request ${found.id}`), h("span", { class: "muted" }, `${found.app || "a client"} · ${found.model} · ${clock(found.at)} · ${found.tenant}`), h("span", { class: "state", data: { state: found.state } }, STATES[found.state])),
      bar(found.spans, { total: found.tokens, tall: true, present: found.state === "prefill" ? found.present : undefined }),
      h("dl", { class: "facts" },
        fact("prompt", `${count(found.tokens)} tokens`), fact("reused", found.tokens ? percent((found.reused ?? 0) / found.tokens) : "–", `${count(found.reused)} tokens`),
        fact("first token", time(first), found.cold_ms ? `without the cache about ${time(found.cold_ms)}` : null),
        faster && faster > 1.05 && found.reused ? fact("sooner", `${faster.toFixed(faster < 10 ? 1 : 0)} ×`) : null,
        fact("written", `${count(found.written)} tokens`, found.rate ? `${found.rate.toFixed(1)} tokens/s` : null),
        fact("level", found.level ?? "–"))),
    h("section", { class: "panel" }, h("div", { class: "panel-head" }, h("h2", {}, "Timeline")), h("div", { class: "scroll" }, timeline(found))),
    why(found), difference(found), stood(found), passages(found), prompt(found),
  ];
}

export function requestView(state, id) {
  const element = h("div", { class: "stack" }, h("p", { class: "empty" }, "Loading…"));
  let wanted = id ? Number(id) : null, loading = false, again = false, left = false;
  const newest = () => [...state.rows.values()].filter(row => !isRunning(row)).pop()?.id ?? [...state.rows.keys()].pop();

  async function load() {
    if (loading) { again = true; return; }
    loading = true;
    try {
      const found = await own(`/requests/${wanted}`);
      if (!left) { show(element, drawRequest(found)); if (!isRunning(found)) element.dataset.ended = ""; }
    } catch (error) {
      if (!left) show(element, h("p", { class: "empty" }, error.message));
    }
    loading = false;
    if (again && !left) { again = false; load(); }
  }

  return {
    element,
    leave() { left = true; },
    update(changed, first) {
      if (wanted === null) {
        wanted = newest() ?? null;
        if (wanted === null) { show(element, h("p", { class: "empty" }, "Nothing was asked yet. Open Try it, or point a client at this server.")); return; }
        load();
      } else if (first || (changed.has(wanted) && !("ended" in element.dataset))) load();
    },
  };
}
