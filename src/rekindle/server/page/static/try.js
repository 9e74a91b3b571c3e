// Try it: a chat that shows the reuse of each turn; beside it, if wanted, the same chat without the cache.
import { events, Refused } from "/page/api.js";
import { h, show, count, percent, time } from "/page/dom.js";
import { countBar, reading } from "/page/bars.js";

function sources(about) {
  const { engine, memory, disk } = about.loaded_from, found = { engine, memory, disk, remote: about.streamed };
  let left = about.quantized;
  for (const place of ["disk", "memory", "remote", "engine"]) { const taken = Math.min(found[place], left); found[place] -= taken; left -= taken; }
  return { ...found, quantized: about.quantized - left, passages: about.from_chunks - about.recomputed, recomputed: about.recomputed, computed: about.computed - about.recomputed };
}

const EXAMPLE = Array.from({ length: 12 }, (_, n) => `Rule ${n + 1}: the log of the lighthouse is the only source; quote it word by word, wind first, then sea, then visibility, and say so where two entries contradict each other.`).join(" ");

const QUESTION = "What does the log say of the wind?";

class Chat {
  constructor(title, cached) {
    Object.assign(this, { cached, messages: [], stop: null });
    this.log = h("div", { class: "log", role: "log", "aria-label": title });
    this.element = h("section", { class: "panel chat", data: { cached: String(cached) } }, h("div", { class: "panel-head" }, h("h2", {}, title)), this.log);
  }

  clear() { this.stop?.abort(); this.messages = []; show(this.log, h("p", { class: "empty" }, this.cached ? "What is said here is kept: the next turn reads only what is new." : "Every turn reads the whole chat again.")); }

  async ask(text, options) {
    if (!this.messages.length) show(this.log);
    this.messages.push({ role: "user", content: text });
    const said = h("p", { class: "said" }), foot = h("div", { class: "turn-foot" }, "reading…"), strip = h("div", {});
    this.log.append(h("div", { class: "turn", data: { role: "user" } }, h("p", { class: "said" }, text)), h("div", { class: "turn", data: { role: "assistant" } }, said, strip, foot));
    const started = performance.now(), body = { ...options, messages: [...(options.system ? [{ role: "system", content: options.system }] : []), ...this.messages], stream: true, return_progress: true, app_id: this.cached ? "page" : "page, cache off", cache_prompt: this.cached };
    delete body.system;
    let reply = "", firstAt = null;
    this.stop = new AbortController();
    try {
      for await (const item of events("/v1/chat/completions", { method: "POST", body, signal: this.stop.signal })) {
        if (item.error) throw new Refused(500, item.error.message);
        if (item.prompt_progress) { foot.textContent = reading(item); continue; }
        const choice = item.choices?.[0], piece = choice?.delta?.content ?? choice?.delta?.reasoning_content;
        if (piece) { firstAt ??= performance.now(); reply += piece; said.textContent = reply; foot.textContent = `first token ${time(firstAt - started)}`; }
        if (item.rekindle) this.told(item, strip, foot);
      }
    } catch (error) {
      foot.textContent = error.name === "AbortError" ? "stopped" : error.message;
    }
    this.stop = null;
    this.messages.push({ role: "assistant", content: reply });
  }

  told({ rekindle, timings }, strip, foot) {
    const found = sources(rekindle), total = Object.values(found).reduce((all, n) => all + n, 0);
    show(strip, countBar(found));
    show(foot, h("span", {}, "first token ", h("b", {}, time(timings.prompt_ms))), h("span", {}, h("b", {}, percent(timings.cache_n / (total || 1))), ` of ${count(total)} tokens reused`),
      h("span", {}, h("b", {}, timings.predicted_per_second ? timings.predicted_per_second.toFixed(1) : "–"), " tokens/s"), rekindle.cold_ms && this.cached ? h("span", {}, `without the cache about ${time(rekindle.cold_ms)}`) : null);
  }
}

export function tryView(state) {
  const warm = new Chat("With the cache", true), cold = new Chat("Cache off", false), chats = h("div", { class: "chats" }, warm.element);
  const model = h("select", { "aria-label": "Model" }), length = h("input", { type: "number", min: 1, max: 4096, value: 128, "aria-label": "Longest reply, in tokens" });
  const system = h("textarea", { rows: 2, placeholder: "System message (optional). A long one shows the most.", "aria-label": "System message" });
  const field = h("textarea", { rows: 2, placeholder: "Ask something, then ask again", "aria-label": "Message", required: true });
  const both = h("input", { type: "checkbox", onchange: () => { show(chats, both.checked ? [warm.element, cold.element] : [warm.element]); } });
  const send = h("button", { type: "submit", class: "main" }, "Send"), halt = h("button", { type: "button", disabled: true, onclick: () => { warm.stop?.abort(); cold.stop?.abort(); } }, "Stop");
  const form = h("form", { class: "panel" }, system, field, h("div", { class: "actions" }, model, h("label", { class: "note" }, "at most ", length, " tokens"),
    h("label", { class: "note" }, both, " beside it, the cache off"), h("button", { type: "button", onclick: () => { warm.clear(); cold.clear(); } }, "New chat"), h("button", { type: "button", onclick: () => { system.value = EXAMPLE; field.value ||= QUESTION; field.focus(); } }, "A long example"), h("span", { style: { flex: "1" } }), halt, send));
  form.addEventListener("submit", async event => {
    event.preventDefault();
    const text = field.value.trim();
    if (!text || send.disabled) return;
    const options = { model: model.value || undefined, max_tokens: Number(length.value) || 128, temperature: 0, system: system.value };
    field.value = "";
    [send.disabled, halt.disabled] = [true, false];
    await warm.ask(text, options);
    if (both.checked) {
      await cold.ask(text, options);  // one after the other: they would slow each other
      const [one, other] = [warm, cold].map(chat => chat.messages[chat.messages.length - 1].content);
      note.textContent = one === other ? "" : state.server.reuse === "exact" ? "The replies differ by rounding: the prompt was computed in other pieces. See --deterministic."
        : `The replies differ: reuse is ${state.server.reuse}.`;
    }
    [send.disabled, halt.disabled] = [false, true];
    field.focus();
  });
  field.addEventListener("keydown", event => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); form.requestSubmit(); } });
  const note = h("p", { class: "note", role: "status" });
  warm.clear();
  cold.clear();
  let known = "";
  return {
    element: h("div", { class: "stack" }, chats, note, form),
    leave() { warm.stop?.abort(); cold.stop?.abort(); },
    update() {
      const names = [state.server.model, ...state.server.adapters.map(one => one.name)];
      if (names.join("\n") !== known) { known = names.join("\n"); show(model, names.map(name => h("option", { value: name }, name))); }
    },
  };
}
