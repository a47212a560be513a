// What happened: a strip of marks on the charts' time axis, and the newest in words.

import { clock } from "./format.js";
import { SPAN_S } from "./past.js";

const SVG = "http://www.w3.org/2000/svg";
const [LEFT, RIGHT, HEIGHT] = [58, 10, 24];
const LISTED = 6;
const NAMES = {
  settings: "settings",
  models: "models",
  reloaded: "files",
  refused: "refused",
  evicted: "evicted",
  workers: "workers",
};

export class Events {
  #strip = document.getElementById("strip");
  #list = document.getElementById("event-list");
  #shown = "";
  #events = [];
  #newest = null;

  constructor() {
    new ResizeObserver(() => this.#draw()).observe(this.#strip);
  }

  // `events` of the last minutes, the oldest first; `newest` is the newest sample.
  show(events = [], newest) {
    this.#events = events;
    this.#newest = newest;
    this.#draw();
    const words = JSON.stringify(events.slice(-LISTED));
    if (words === this.#shown) return;
    this.#shown = words;
    this.#list.replaceChildren(...events.slice(-LISTED).reverse().map(item));
    if (!events.length) this.#list.append(text("li", "Nothing in the last five minutes.", "none"));
  }

  #draw() {
    const width = this.#strip.clientWidth;
    if (!width || !this.#newest) return;
    this.#strip.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const x = (at) =>
      LEFT + Math.min(1, Math.max(0, 1 - (this.#newest.time_s - at) / SPAN_S)) * (width - LEFT - RIGHT);
    const line = node("path", { class: "base", d: `M${LEFT},${HEIGHT / 2}H${width - RIGHT}` });
    const marks = this.#events.map((event) => {
      const [from, to] = [x(event.time_s), x(event.until_s)];
      const mark = node("rect", {
        class: `event ${event.kind}`,
        x: from - 3,
        y: HEIGHT / 2 - 7,
        width: Math.max(6, to - from + 6),
        height: 14,
        rx: 3,
      });
      const title = node("title");
      title.textContent = `${clock(event.time_s)} ${event.text}`;
      mark.append(title);
      return mark;
    });
    this.#strip.replaceChildren(line, ...marks);
  }
}

function item(event) {
  const line = text("li", "");
  line.append(
    text("time", clock(event.time_s)),
    text("b", NAMES[event.kind] ?? event.kind, `event ${event.kind}`),
    text("span", event.text),
  );
  return line;
}

function text(tag, words, className = "") {
  const made = document.createElement(tag);
  made.textContent = words;
  if (className) made.className = className;
  return made;
}

function node(tag, attributes = {}) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
