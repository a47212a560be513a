// A chart of the last minutes: time from left to right, now at the right edge, plain SVG.

const SVG = "http://www.w3.org/2000/svg";
const [LEFT, RIGHT, TOP] = [58, 10, 6];
const GAP_S = 3; // without a sample for longer than this, a line is interrupted
const CAP = 3; // times the limit, above which a latency is cut off and written at the edge

export function make(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function html(tag, className, text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}

// The smallest of 1, 2 and 4 times a power of ten that is not below `value`: halves are short, too.
function nice(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 10].find((step) => step * unit >= value * 0.9999) * unit;
}

// `spec`: title; format(value); series [{name, style, kind, of(sample)}] of the kinds line, step,
// bars, and area, areas on top of each other; limit(sample), where there is one, and what it is called; top, a fixed end of the axis, or
// least, the smallest; marks(sample), a word that is written where it changes; axis: whether time
// is written below.
export class Chart {
  log = false; // latencies on a log scale
  #spec;
  #svg = make("svg", { role: "img" });
  #values = [];
  #width = 0;
  #height = 0;

  constructor(parent, spec) {
    this.#spec = spec;
    const figure = html("figure", `chart${spec.axis ? " axis" : ""}`);
    const head = html("figcaption", "");
    const values = html("span", "values");
    head.append(html("span", "title", spec.title), values);
    for (const series of spec.series) {
      const value = html("b", "");
      this.#values.push(value);
      const label = html("span", "value");
      label.append(
        html("i", `swatch ${series.style} ${series.kind}`),
        series.name ? `${series.name} ` : "",
        value,
      );
      values.append(label);
    }
    if (spec.limit) {
      const value = html("b", "");
      this.#values.push(value);
      const label = html("span", "value");
      label.append(html("i", "swatch limit line"), `${spec.limitName ?? "SLO"} `, value);
      values.append(label);
    }
    figure.append(head, this.#svg);
    parent.append(figure);
    new ResizeObserver(() => this.#fit()).observe(this.#svg);
  }

  #fit() {
    this.#width = this.#svg.clientWidth;
    this.#height = this.#svg.clientHeight;
    this.#svg.setAttribute("viewBox", `0 0 ${this.#width} ${this.#height}`);
    this.redraw?.();
  }

  // Seconds before now at a place on the screen; null beside the plot.
  ago(clientX, spanS) {
    const box = this.#svg.getBoundingClientRect();
    const part = (clientX - box.left - LEFT) / (this.#width - LEFT - RIGHT);
    return part < 0 || part > 1 ? null : (1 - part) * spanS;
  }

  // `look`: the sample that is looked at, or null; `spanS`: seconds from left to right.
  draw(samples, look, spanS) {
    this.redraw = () => this.draw(samples, look, spanS);
    const shown = look ?? samples.at(-1);
    this.#write(shown);
    if (!this.#width || !samples.length) return;
    const { series, limit, marks } = this.#spec;
    const bottom = this.#height - (this.#spec.axis ? 20 : 6);
    const now = samples.at(-1).time_s;
    const x = (s) => LEFT + (1 - (now - s.time_s) / spanS) * (this.#width - LEFT - RIGHT);
    const logs = this.log && this.#spec.latency;
    const most = logs ? this.#highest(samples) : this.#top(samples);
    const least = logs ? this.#lowest(samples, most) : 0;
    const part = logs
      ? (value) => Math.log(Math.max(value, least) / least) / Math.log(most / least)
      : (value) => Math.min(value, most) / most;
    const y = (value) => TOP + (1 - part(value)) * (bottom - TOP);
    const marked = limit?.(samples.at(-1)) ?? null;
    const plain = marked === null ? [0, most / 2, most] : [0, marked];
    const ticks = logs ? decades(least, most) : plain;
    const parts = [this.#grid(ticks, y, bottom, spanS)];
    let below = samples.map(() => 0);
    for (const one of series) {
      const values = samples.map(one.of);
      if (one.kind === "area") {
        const above = values.map((value, i) => below[i] + (value ?? 0));
        parts.push(...area(samples, x, y, below, above, values, one.style));
        below = above;
      } else if (one.kind === "bars") {
        const wide = (0.7 * (this.#width - LEFT - RIGHT)) / spanS;
        parts.push(bars(samples, x, y, bottom, values, one.style, wide));
      } else {
        if (limit) parts.push(late(samples, x, y, values, samples.map(limit)));
        parts.push(line(samples, x, y, values, one.style, one.kind === "step"));
      }
    }
    if (limit) {
      parts.push(line(samples, x, y, samples.map(limit), "limit", true));
      parts.push(...this.#cut(samples, x, most));
    }
    if (marks) parts.push(...this.#marks(samples, x, bottom));
    if (look)
      parts.push(
        make("path", { class: "cross", d: `M${x(look)},${TOP}V${bottom}` }),
        ...this.#dots(look, x, y),
      );
    this.#svg.replaceChildren(...parts);
  }

  #write(sample) {
    const { series, limit, format, title } = this.#spec;
    const texts = series.map((one) => (one.format ?? format)(sample ? one.of(sample) : null));
    const names = series.map((one, i) => `${one.name} ${texts[i]}`.trim());
    if (limit) texts.push(format(sample ? limit(sample) : null));
    texts.forEach((text, i) => (this.#values[i].textContent = text));
    const slo = limit ? `, ${this.#spec.limitName ?? "SLO"} ${texts.at(-1)}` : "";
    this.#svg.setAttribute("aria-label", `${title}: ${names.join(", ")}${slo}`);
  }

  #top(samples) {
    const { series, limit, top, least } = this.#spec;
    if (top) return top;
    let most = least ?? 1;
    for (const sample of samples) {
      const values = series.map((one) => one.of(sample) ?? 0);
      const stacked =
        series[0].kind === "area" ? values.reduce((a, b) => a + b) : Math.max(...values);
      most = Math.max(most, stacked);
    }
    if (!limit) return nice(most);
    const limits = samples.map(limit).filter((value) => value !== null);
    const now = limits.length ? Math.max(...limits) : most;
    return Math.min(Math.max(most * 1.05, now * 1.5), now * CAP);
  }

  // On a log scale nothing is cut off: from below the least value to above the largest.
  #highest(samples) {
    const { series, limit, least } = this.#spec;
    const all = samples.flatMap((s) => [...series.map((one) => one.of(s)), limit?.(s) ?? 0]);
    return 1.2 * Math.max(10 * least, ...all.map((value) => value ?? 0));
  }

  #lowest(samples, most) {
    const { series } = this.#spec;
    const all = samples.flatMap((s) => series.map((one) => one.of(s))).filter((value) => value > 0);
    return Math.min(most / 10, 0.8 * Math.min(most, ...all));
  }

  #grid(ticks, y, bottom, spanS) {
    const group = make("g", { class: "grid" });
    const right = this.#width - RIGHT;
    for (const value of ticks) {
      group.append(
        make("path", { d: `M${LEFT},${y(value)}H${right}` }),
        make("text", { x: LEFT - 8, y: y(value) + 4, class: "left" }, this.#spec.format(value)),
      );
    }
    const each = this.#width < 500 ? 120 : 60;
    for (let ago = 0; ago <= spanS; ago += each) {
      const at = LEFT + (1 - ago / spanS) * (right - LEFT);
      group.append(make("path", { d: `M${at},${TOP}V${bottom}` }));
      if (!this.#spec.axis) continue;
      const text = ago ? `−${ago / 60} min` : "now";
      group.append(make("text", { x: at, y: bottom + 15, class: ago ? "mid" : "end" }, text));
    }
    return group;
  }

  // Where a latency is above the axis, how far it went.
  #cut(samples, x, most) {
    const [series] = this.#spec.series;
    const above = samples.filter((sample) => (series.of(sample) ?? 0) > most);
    if (!above.length) return [];
    const far = above.reduce((a, b) => (series.of(b) > series.of(a) ? b : a));
    const at = Math.min(Math.max(x(far), LEFT + 60), this.#width - RIGHT - 60);
    return [
      make(
        "text",
        { x: at, y: TOP + 10, class: "cut" },
        `↑ up to ${this.#spec.format(series.of(far))}`,
      ),
    ];
  }

  #marks(samples, x, bottom) {
    const parts = [];
    let last = null;
    let free = 0; // where the last word ended
    for (const sample of samples) {
      const word = this.#spec.marks(sample);
      if (word === last || !word) continue;
      last = word;
      const at = x(sample);
      parts.push(make("path", { class: "mark", d: `M${at},${TOP}V${bottom}` }));
      if (at >= free) parts.push(make("text", { x: at + 4, y: bottom - 5, class: "word" }, word));
      free = at + 8 + 7 * word.length;
    }
    return parts;
  }

  #dots(look, x, y) {
    const lines = this.#spec.series.filter((one) => one.kind !== "area" && one.kind !== "bars");
    return lines
      .filter((one) => one.of(look) !== null)
      .map((one) =>
        make("circle", { class: `dot ${one.style}`, cx: x(look), cy: y(one.of(look)), r: 3.5 }),
      );
  }
}

// Powers of ten within the axis, and 2 and 5 times them where there are few.
function decades(least, most) {
  const found = [];
  const steps = most / least > 300 ? [1] : most / least > 30 ? [1, 3] : [1, 2, 5];
  for (let unit = 10 ** Math.floor(Math.log10(least)); unit <= most; unit *= 10)
    found.push(...steps.map((step) => step * unit).filter((at) => at >= least && at <= most));
  return found;
}

// Runs of samples that have values, without a gap between them.
function runs(samples, values) {
  const found = [];
  let run = null;
  samples.forEach((sample, i) => {
    const near = i && sample.time_s - samples[i - 1].time_s <= GAP_S;
    if (values[i] === null || values[i] === undefined) run = null;
    else if (run && near) run.push(i);
    else found.push((run = [i]));
  });
  return found;
}

const point = (x, y) => `${x.toFixed(1)},${y.toFixed(1)}`;

function line(samples, x, y, values, style, steps) {
  let d = "";
  for (const run of runs(samples, values)) {
    run.forEach((i, nth) => {
      if (nth && steps) d += `H${x(samples[i]).toFixed(1)}`;
      d += `${nth ? "L" : "M"}${point(x(samples[i]), y(values[i]))}`;
    });
    if (run.length === 1) d += "h0.1";
  }
  return make("path", { class: `line ${style}`, d });
}

function area(samples, x, y, below, above, values, style) {
  let [fill, edge] = ["", ""];
  for (const run of runs(samples, values)) {
    const top = run.map((i) => point(x(samples[i]), y(above[i])));
    const floor = run.map((i) => point(x(samples[i]), y(below[i]))).reverse();
    fill += `M${top.join("L")}L${floor.join("L")}Z`;
  }
  for (const run of runs(
    samples,
    values.map((value) => value || null),
  )) {
    edge += `M${run.map((i) => point(x(samples[i]), y(above[i]))).join("L")}`;
  }
  return [
    make("path", { class: `area ${style}`, d: fill }),
    make("path", { class: `line thin ${style}`, d: edge }),
  ];
}

function bars(samples, x, y, bottom, values, style, wide) {
  const d = samples.map((sample, i) =>
    values[i] ? `M${x(sample).toFixed(1)},${bottom}V${y(values[i]).toFixed(1)}` : "",
  );
  return make("path", { class: `bars ${style}`, d: d.join(""), "stroke-width": wide.toFixed(2) });
}

// What is above the limit.
function late(samples, x, y, values, limits) {
  let d = "";
  const over = values.map((value, i) =>
    value === null || limits[i] === null ? null : Math.max(value, limits[i]),
  );
  for (const run of runs(samples, over)) {
    const top = run.map((i) => point(x(samples[i]), y(over[i])));
    const floor = run.map((i) => point(x(samples[i]), y(limits[i]))).reverse();
    d += `M${top.join("L")}L${floor.join("L")}Z`;
  }
  return make("path", { class: "late", d });
}
