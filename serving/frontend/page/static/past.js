// The charts of the last minutes, and the moment that is looked at in all of them.

import { Chart } from "./chart.js";
import { clock, count, fixed, percent, rate, seconds, share } from "./format.js";

export const SPAN_S = 300;

const SPECS = [
  {
    title: "Requests that arrive",
    format: (v) => rate(v, "/s"),
    least: 1,
    series: [{ name: "", style: "ink", kind: "bars", of: (s) => s.requests_per_s }],
  },
  {
    title: "Running and waiting",
    format: count,
    least: 4,
    series: [
      { name: "running", style: "run", kind: "area", of: (s) => s.running_ls },
      { name: "best effort", style: "run be", kind: "area", of: (s) => s.running_be },
      { name: "waiting", style: "wait", kind: "area", of: (s) => s.waiting_ls },
      { name: "best effort", style: "wait be", kind: "area", of: (s) => s.waiting_be },
    ],
  },
  {
    title: "Time to first token, P90",
    format: seconds,
    least: 0.001,
    latency: true,
    limit: (s) => s.ttft_slo_s,
    series: [{ name: "", style: "prefill", kind: "line", of: (s) => s.ttft_p90_s }],
  },
  {
    title: "Time between tokens, P90",
    format: seconds,
    least: 0.001,
    latency: true,
    limit: (s) => s.itl_slo_s,
    series: [{ name: "", style: "decode", kind: "line", of: (s) => s.itl_p90_s }],
  },
  {
    title: "Thresholds: expert visits kept exact, at least",
    format: percent,
    top: 100,
    marks: (s) => s.strategy,
    series: [
      { name: "prefill", style: "prefill", kind: "step", of: (s) => s.prefill_threshold_percent },
      { name: "decode", style: "decode", kind: "step", of: (s) => s.decode_threshold_percent },
    ],
  },
  {
    title: "Expert visits degraded",
    format: percent,
    top: 100,
    axis: true,
    series: [
      {
        name: "",
        style: "degraded",
        kind: "area",
        of: (s) => (s.degraded_share === null ? null : 100 * s.degraded_share),
      },
    ],
  },
];

const MORE = [
  {
    title: "Expected loss, nats a token",
    format: fixed,
    least: 0.001,
    limit: (s) => s.max_expected_loss || null,
    limitName: "at most",
    series: [{ name: "", style: "degraded", kind: "line", of: (s) => s.expected_loss }],
  },
  {
    title: "Tokens",
    format: (v) => rate(v, "/s"),
    least: 10,
    axis: true,
    series: [
      { name: "prompt", style: "prefill", kind: "line", of: (s) => s.prompt_tokens_per_s },
      { name: "output", style: "decode", kind: "line", of: (s) => s.output_tokens_per_s },
    ],
  },
  {
    title: "KV pages used",
    format: percent,
    top: 100,
    axis: true,
    series: [
      {
        name: "",
        style: "ink",
        kind: "area",
        of: (s) => (s.kv_pages_total ? (100 * s.kv_pages_used) / s.kv_pages_total : null),
      },
    ],
  },
];

export class Past {
  #samples = [];
  #charts;
  #hover = null; // seconds before now, under the pointer
  #back = document.getElementById("back");
  #moment = document.getElementById("moment");

  constructor() {
    const [charts, more] = [document.getElementById("charts"), document.getElementById("more")];
    this.#charts = [
      ...SPECS.map((spec) => new Chart(charts, spec)),
      ...MORE.map((spec) => new Chart(more, spec)),
    ];
    charts.addEventListener("pointermove", (event) => {
      this.#hover = this.#charts[0].ago(event.clientX, SPAN_S);
      this.draw();
    });
    charts.addEventListener("pointerleave", () => {
      this.#hover = null;
      this.draw();
    });
    this.#back.addEventListener("input", () => this.draw());
    document.getElementById("log").addEventListener("change", (event) => {
      for (const chart of this.#charts) chart.log = event.target.checked;
      this.draw();
    });
    this.#back.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      this.#back.value = 0;
      this.draw();
    });
  }

  get newest() {
    return this.#samples.at(-1) ?? null;
  }

  begin(samples) {
    this.#samples = samples;
  }

  add(samples) {
    // The server's clock was set back: what was before has no place any more.
    if (samples.length && this.newest && samples[0].time_s < this.newest.time_s) this.#samples = [];
    this.#samples.push(...samples);
    const since = this.newest ? this.newest.time_s - SPAN_S : 0;
    while (this.#samples.length && this.#samples[0].time_s < since) this.#samples.shift();
  }

  draw() {
    const look = this.#look();
    for (const chart of this.#charts) chart.draw(this.#samples, look, SPAN_S);
    const when = look ? `${clock(look.time_s)}, ${this.#age(look)} s ago` : "";
    this.#moment.textContent = when;
    this.#back.setAttribute("aria-valuetext", look ? `${when}: ${words(look)}` : "now");
  }

  // The sample that the pointer or the slider is at; null: now.
  #look() {
    const ago = this.#hover ?? -Number(this.#back.value);
    if (!this.newest || ago < 0.5) return null;
    const at = this.newest.time_s - ago;
    return this.#samples.reduce((a, b) =>
      Math.abs(b.time_s - at) < Math.abs(a.time_s - at) ? b : a,
    );
  }

  #age(sample) {
    return Math.round(this.newest.time_s - sample.time_s);
  }
}

function words(s) {
  return (
    `TTFT P90 ${seconds(s.ttft_p90_s)}, ITL P90 ${seconds(s.itl_p90_s)}, ` +
    `thresholds prefill ${percent(s.prefill_threshold_percent)}, decode ${percent(s.decode_threshold_percent)}, ` +
    `${share(s.degraded_share)} degraded`
  );
}
