// Expert load: a cell for each expert of each layer, darker for more rows.

import { rate } from "./format.js";

const LEVELS = 255;
const HINT = "Point at a cell, or go from one to the next with the arrow keys.";
const UNITED_GAP = 6; // between routed and united experts

export class Heat {
  #canvas = document.getElementById("heat");
  #cell = document.getElementById("experts-cell");
  #load = null; // the newest, with `levels`, a byte for each expert
  #at = null; // [layer, expert] that is looked at

  constructor() {
    this.#canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.#canvas.addEventListener("pointerleave", () => this.#look(null));
    this.#canvas.addEventListener("blur", () => this.#look(null));
    this.#canvas.addEventListener("keydown", (event) => this.#step(event));
    new ResizeObserver(() => this.draw()).observe(this.#canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(load) {
    this.#load = { ...load, levels: Uint8Array.from(atob(load.load), (c) => c.charCodeAt(0)) };
    const united = load.experts - load.routed;
    const kinds = united
      ? `${load.routed} routed and ${united} united experts`
      : `${load.experts} experts`;
    document.getElementById("experts").hidden = false;
    this.#cell.textContent = this.#at ? this.#words(...this.#at) : HINT;
    document.getElementById("experts-note").textContent =
      `${load.layers} layers of ${kinds}, the last four seconds`;
    document.getElementById("ramp-most").textContent = `${rate(load.most_rows_per_s)} rows/s`;
    this.#canvas.setAttribute(
      "aria-label",
      `Rows per second of ${load.layers} layers of ${kinds}; arrow keys go from cell to cell`,
    );
    this.draw();
  }

  draw() {
    if (!this.#load) return;
    const { layers, experts, routed, levels } = this.#load;
    const width = this.#canvas.parentElement.clientWidth - 32;
    const gap = experts > routed ? UNITED_GAP : 0;
    const [w, h] = [(width - gap) / experts, Math.max(4, Math.min(12, 400 / layers))];
    const scale = devicePixelRatio;
    this.#canvas.width = Math.round(width * scale);
    this.#canvas.height = Math.round(layers * h * scale);
    this.#canvas.style.height = `${layers * h}px`;
    const context = this.#canvas.getContext("2d");
    context.scale(scale, scale);
    const colours = ramp();
    const inset = w > 5 ? 1 : 0;
    for (let layer = 0; layer < layers; layer += 1) {
      for (let expert = 0; expert < experts; expert += 1) {
        context.fillStyle = colours[levels[layer * experts + expert]];
        const left = expert * w + (expert >= routed ? gap : 0);
        context.fillRect(left, layer * h, w - inset || w, h - inset);
      }
    }
    this.#geometry = { w, h, gap };
    if (this.#at) this.#frame(context);
    legend(colours);
  }

  #geometry = null;

  #frame(context) {
    const [layer, expert] = this.#at;
    const { w, h, gap } = this.#geometry;
    context.strokeStyle = getComputedStyle(document.body).color;
    context.lineWidth = 2;
    context.strokeRect(
      expert * w + (expert >= this.#load.routed ? gap : 0) - 1,
      layer * h - 1,
      w + 1,
      h + 1,
    );
  }

  #point(event) {
    if (!this.#geometry) return;
    const { w, h, gap } = this.#geometry;
    const { layers, experts, routed } = this.#load;
    const [x, y] = [event.offsetX, event.offsetY];
    const expert = Math.floor((x > routed * w ? x - gap : x) / w);
    const layer = Math.floor(y / h);
    const inside = expert >= 0 && expert < experts && layer >= 0 && layer < layers;
    this.#look(inside ? [layer, expert] : null);
  }

  #step(event) {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[
      event.key
    ];
    if (event.key === "Escape") this.#look(null);
    if (!by || !this.#load) return;
    event.preventDefault();
    const { layers, experts } = this.#load;
    const [layer, expert] = this.#at ?? [0, 0];
    const [down, right] = this.#at ? by : [0, 0];
    this.#look([
      Math.min(layers - 1, Math.max(0, layer + down)),
      Math.min(experts - 1, Math.max(0, expert + right)),
    ]);
  }

  #look(at) {
    this.#at = at;
    this.#cell.textContent = at ? this.#words(...at) : HINT;
    this.draw();
  }

  #words(layer, expert) {
    const { experts, routed, levels, most_rows_per_s: most } = this.#load;
    const of = (i) => most * (levels[i] / LEVELS) ** 2;
    let total = 0;
    for (let i = 0; i < routed; i += 1) total += of(layer * experts + i);
    const rows = of(layer * experts + expert);
    const name = expert < routed ? `expert ${expert}` : `united expert ${expert - routed}`;
    const times = total
      ? `, ${((rows * routed) / total).toFixed(1)} times the mean of the layer's routed experts`
      : "";
    return `Layer ${layer}, ${name}: about ${rate(rows)} rows/s${times}`;
  }
}

// A colour for each level, from the panel's own to the darkest (or, in the dark, the brightest).
function ramp() {
  const style = getComputedStyle(document.body);
  const stops = ["--heat-0", "--heat-1", "--heat-2", "--heat-3"].map((name) =>
    rgb(style.getPropertyValue(name)),
  );
  return Array.from({ length: LEVELS + 1 }, (_, level) => {
    const at = (level / LEVELS) * (stops.length - 1);
    const i = Math.min(Math.floor(at), stops.length - 2);
    return `rgb(${stops[i].map((from, c) => Math.round(from + (at - i) * (stops[i + 1][c] - from))).join(",")})`;
  });
}

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.trim().slice(i, i + 2), 16));

function legend(colours) {
  const canvas = document.getElementById("ramp");
  const context = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x += 1) {
    context.fillStyle = colours[Math.round((x / (canvas.width - 1)) * LEVELS)];
    context.fillRect(x, 0, 1, canvas.height);
  }
}
