// Elements, numbers for people, and long lists. Text only ever becomes text: nothing here parses HTML.

export function h(name, options = {}, ...children) {
  const element = document.createElement(name);
  fill(element, options, children);
  return element;
}

export function svg(name, options = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  fill(element, options, children);
  return element;
}

function fill(element, options, children) {
  for (const [key, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, one] of Object.entries(value)) element.style.setProperty(name, one);
    else if (key === "data") Object.assign(element.dataset, value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
}

export const show = (parent, ...children) => { parent.replaceChildren(...children.flat(Infinity).filter(Boolean)); return parent; };

const whole = new Intl.NumberFormat("en");
export const count = value => value === null || value === undefined ? "–" : whole.format(Math.round(value));
export const percent = share => Number.isFinite(share) ? `${Math.round(share * 100)} %` : "–";

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (value < 1000) return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

export function time(ms) {
  if (ms === null || ms === undefined || !Number.isFinite(ms)) return "–";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  return `${Math.floor(ms / 60_000)} min ${Math.round(ms % 60_000 / 1000)} s`;
}

export function ago(seconds) {
  const age = Math.max(0, Date.now() / 1000 - seconds);
  if (age < 60) return "just now";
  if (age < 3600) return `${Math.floor(age / 60)} min ago`;
  if (age < 86_400) return `${Math.floor(age / 3600)} h ago`;
  return `${Math.floor(age / 86_400)} d ago`;
}

export const clock = seconds => new Date(seconds * 1000).toLocaleTimeString("en-GB");

// What a pointer or the keyboard rests on, in words.
const tip = document.getElementById("tip");
export function tooltip(element, text) {
  const open = event => {
    tip.textContent = typeof text === "function" ? text() : text;
    tip.hidden = false;
    const box = element.getBoundingClientRect(), x = event.clientX || box.left + box.width / 2;
    tip.style.left = `${Math.max(8, Math.min(innerWidth - tip.offsetWidth - 8, x - tip.offsetWidth / 2))}px`;
    tip.style.top = `${box.top - tip.offsetHeight - 8 > 0 ? box.top - tip.offsetHeight - 8 : box.bottom + 8}px`;
  };
  const close = () => { tip.hidden = true; };
  element.addEventListener("pointermove", open);
  element.addEventListener("pointerleave", close);
  element.addEventListener("focus", open);
  element.addEventListener("blur", close);
  return element;
}

// A list of any length: only the rows that are seen exist. `draw(item)` makes the cells of a row, `open(item)` opens it.
export class VirtualList {
  constructor({ label, head, height = 44, draw, open, key = item => item.id, empty = "Nothing yet." }) {
    Object.assign(this, { height, draw, open, key, items: [], active: null, made: new Map() });
    this.space = h("div", { class: "list-space", role: "rowgroup" });
    this.empty = h("p", { class: "empty" }, empty);
    this.scroller = h("div", { class: "list-scroll", tabindex: "0", onscroll: () => this.draw_seen(), onkeydown: e => this.press(e) }, this.space);
    this.element = h("div", { class: "list", role: "grid", "aria-label": label },
      h("div", { class: "list-head", role: "row" }, head.map(text => h("span", { role: "columnheader" }, text))), this.scroller, this.empty);
    this.watch = new ResizeObserver(() => this.draw_seen());
    this.watch.observe(this.scroller);
  }

  set(items) {
    this.items = items;
    this.empty.hidden = items.length > 0;
    this.scroller.hidden = items.length === 0;
    this.space.style.height = `${items.length * this.height}px`;
    this.element.setAttribute("aria-rowcount", items.length + 1);
    this.scroller.style.height = `${Math.min(items.length, 14) * this.height}px`;
    this.draw_seen();
  }

  draw_seen() {
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / this.height) - 4);
    const last = Math.min(this.items.length, Math.ceil((this.scroller.scrollTop + this.scroller.clientHeight) / this.height) + 4);
    const wanted = new Map();
    for (let index = first; index < last; index++) wanted.set(this.key(this.items[index]), index);
    for (const [key, row] of this.made) if (!wanted.has(key)) { row.element.remove(); this.made.delete(key); }
    for (const [key, index] of wanted) {
      const item = this.items[index];
      let row = this.made.get(key);
      if (!row) {
        const made = row = { element: h("div", { class: "list-row", role: "row", id: `row-${key}`, onclick: () => this.press_row(made) }) };
        this.made.set(key, row);
      }
      const place = this.space.children[index - first] ?? null;  // a screen reader reads them in this order
      if (place !== row.element) this.space.insertBefore(row.element, place);
      if (row.item !== item) { show(row.element, this.draw(item)); row.item = item; }
      if (row.index !== index) {
        row.element.style.transform = `translateY(${index * this.height}px)`;
        row.element.setAttribute("aria-rowindex", index + 2);
        row.index = index;
      }
      row.element.classList.toggle("active", this.active === key);
    }
  }

  press_row(row) {
    this.choose(row.index);
    this.open(this.items[row.index]);
  }

  choose(index) {
    if (!this.items.length) return;
    const at = Math.max(0, Math.min(this.items.length - 1, index));
    this.active = this.key(this.items[at]);
    const top = at * this.height, view = this.scroller;
    if (top < view.scrollTop) view.scrollTop = top;
    if (top + this.height > view.scrollTop + view.clientHeight) view.scrollTop = top + this.height - view.clientHeight;
    this.draw_seen();
    view.setAttribute("aria-activedescendant", `row-${this.active}`);
  }

  press(event) {
    const at = this.items.findIndex(item => this.key(item) === this.active);
    const page = Math.floor(this.scroller.clientHeight / this.height);
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: this.items.length - 1 };
    if (event.key in moves) { this.choose(moves[event.key]); event.preventDefault(); }
    else if (event.key === "Enter" && at >= 0) this.open(this.items[at]);
  }
}
