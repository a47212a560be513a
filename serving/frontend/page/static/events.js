// What happened: a strip of marks on the charts' time axis, and the newest in words.

import { html, make } from "./chart.js";
import { clock } from "./format.js";
import { SPAN_S } from "./past.js";

const [LEFT, RIGHT, HEIGHT] = [58, 10, 24];
const LISTED = 6;

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
    if (!events.length) this.#list.append(html("li", "none", "Nothing in the last five minutes."));
  }

  #draw() {
    const width = this.#strip.clientWidth;
    if (!width || !this.#newest) return;
    this.#strip.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const x = (at) =>
      LEFT + Math.min(1, Math.max(0, 1 - (this.#newest.time_s - at) / SPAN_S)) * (width - LEFT - RIGHT);
    const line = make("path", { class: "base", d: `M${LEFT},${HEIGHT / 2}H${width - RIGHT}` });
    const marks = this.#events.map((event) => {
      const [from, to] = [x(event.time_s), x(event.until_s)];
      const at = { x: from - 3, y: HEIGHT / 2 - 7 };
      const size = { width: Math.max(6, to - from + 6), height: 14, rx: 3 };
      const title = make("title", {}, `${clock(event.time_s)} ${event.text}`);
      return make("rect", { class: `event ${event.kind}`, ...at, ...size }, title);
    });
    this.#strip.replaceChildren(line, ...marks);
  }
}

function item(event) {
  const line = html("li", "");
  line.append(
    html("time", "", clock(event.time_s)),
    html("b", `event ${event.kind}`, event.kind === "reloaded" ? "files" : event.kind),
    html("span", "", event.text),
  );
  return line;
}
