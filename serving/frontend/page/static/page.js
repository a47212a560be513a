// The page: who is served, how it goes, and the form for the key where one is asked for.

import { Controls } from "./controls.js";
import { Events } from "./events.js";
import { Feed } from "./feed.js";
import { NONE, count, duration, fixed, percent, rate, seconds, share } from "./format.js";
import { Heat } from "./heat.js";
import { Past } from "./past.js";

const KEY = "jmoe-admin-key"; // in this tab's storage, and nowhere else
const byId = (id) => document.getElementById(id);
const key = () => sessionStorage.getItem(KEY) ?? "";

const past = new Past();
const heat = new Heat();
const events = new Events();
const controls = new Controls(() => (key() ? { Authorization: `Bearer ${key()}` } : {}));
const feed = new Feed({ open: () => past.begin([]), line, link, refused }, key);
let about = null;

const SAYS = {
  starting: "The server is loading its model; it takes requests when it is ready.",
  draining: "The server is draining: it takes no more requests, and finishes those it has.",
  stopped: "The server has stopped.",
};

function line(message) {
  byId("key").hidden = true;
  byId("main").hidden = false;
  byId("forget").hidden = !key();
  if (message.about) {
    about = message.about;
    controls.offer(about);
    byId("window").textContent = `P90 over ${about.window_s} s, of latency-sensitive requests`;
  }
  past.add(message.samples);
  status(message.now);
  controls.show(message.now.brownout);
  if (past.newest) tiles(past.newest);
  events.show(message.now.events, past.newest);
  table("who", WHO, message.now.who);
  table("oldest", OLDEST, message.now.oldest);
  table("family", MODELS, message.now.models);
  table("audits", AUDITS, message.now.audits);
  table("workers", WORKERS, message.now.workers);
  if (message.experts) heat.show(message.experts);
  past.draw();
}

function status({ status: word, failure, brownout, uptime_s: up }) {
  const names = about.models;
  byId("model").textContent = names.length > 1 ? `${names.length} models` : names[0];
  byId("status").textContent = word;
  byId("status").dataset.status = word;
  byId("facts").textContent = up === null ? "" : `up ${duration(up)} · version ${about.version}`;
  const state = brownout?.objective_state ?? "";
  const vain = state && (state.startsWith("overloaded") ? `${state}.` : `In vain: ${state}.`);
  const text = failure ? `The engine failed: ${failure}.` : (SAYS[word] ?? vain);
  if (byId("banner").textContent !== text) byId("banner").textContent = text;
  byId("banner").hidden = !text;
  byId("banner").classList.toggle("bad", Boolean(failure));
  document.title = `${word} · ${names.join(", ")} · jmoe`;
}

// ---- now --------------------------------------------------------------------------------------

function tiles(s) {
  const list = [
    [
      "TTFT P90",
      seconds(s.ttft_p90_s),
      slo(s.ttft_slo_s, s.ttft_late_share),
      verdict(s.ttft_p90_s, s.ttft_slo_s),
    ],
    [
      "ITL P90",
      seconds(s.itl_p90_s),
      slo(s.itl_slo_s, s.itl_late_share),
      verdict(s.itl_p90_s, s.itl_slo_s),
    ],
    ["Degraded visits", share(s.degraded_share), s.strategy ? `strategy ${s.strategy}` : "", ""],
    [
      "Expected loss",
      fixed(s.expected_loss),
      s.max_expected_loss ? `nats a token · at most ${fixed(s.max_expected_loss)}` : "nats a token",
      "",
    ],
    ["Running", count(s.running_ls + s.running_be), `${count(s.running_be)} best effort`, ""],
    ["Waiting", count(s.waiting_ls + s.waiting_be), `${count(s.waiting_be)} best effort`, ""],
    [
      "Output tokens",
      rate(s.output_tokens_per_s, "/s"),
      `prompt ${rate(s.prompt_tokens_per_s, "/s")}`,
      "",
    ],
    [
      "KV pages",
      s.kv_pages_total ? share(s.kv_pages_used / s.kv_pages_total) : NONE,
      `${count(s.kv_pages_used)} of ${count(s.kv_pages_total)}`,
      "",
    ],
    ["Machine speed", share(s.machine_speed), "of that at first", ""],
  ];
  const root = byId("tiles");
  if (!root.children.length) {
    for (const _ of list) {
      const tile = document.createElement("div");
      tile.append(...["dt", "dd", "dd"].map((tag) => document.createElement(tag)));
      root.append(tile);
    }
  }
  list.forEach((texts, i) => {
    const tile = root.children[i];
    tile.className = texts[3];
    [...tile.children].forEach((node, part) => {
      if (node.textContent !== texts[part]) node.textContent = texts[part];
    });
  });
}

const slo = (slo_s, late) => (slo_s === null ? "" : `SLO ${seconds(slo_s)} · ${share(late)} late`);
const verdict = (p90, limit) =>
  p90 === null || limit === null ? "" : p90 > limit ? "bad" : "good";

const WHO = [
  ["Key", (w) => w.key || NONE],
  ["Model", (w) => w.model || NONE],
  ["Answered", (w) => count(w.requests)],
  ["Late", (w) => share(w.late_share)],
  ["Degraded", (w) => share(w.degraded_share)],
  ["Refused", (w) => count(w.refused)],
];
const OLDEST = [
  ["Request", (r) => cut(r.id)],
  ["Key, model", (r) => [r.key, r.model].filter(Boolean).join(", ") || NONE],
  ["For", (r) => seconds(r.age_s)],
  ["Tokens in", (r) => count(r.prompt_tokens)],
  ["Out", (r) => count(r.output_tokens)],
  ["Degraded", (r) => share(r.degraded_share)],
];
const cut = (id) => (id.length > 14 ? `…${id.slice(-12)}` : id); // ids begin alike
const MODELS = [
  ["Model", (m) => m.name],
  ["Weights", (m) => (m.resident ? "on the device" : "on the host")],
  ["Running", (m) => count(m.running)],
  ["Waiting", (m) => count(m.waiting)],
  ["Finished", (m) => count(m.finished)],
  ["TTFT objective", (m) => (m.ttft_slo_s ? seconds(m.ttft_slo_s) : COMMON)],
  ["ITL objective", (m) => (m.itl_slo_s ? seconds(m.itl_slo_s) : COMMON)],
  ["Thresholds", (m) => `${percent(m.floor_percent)} to ${percent(m.ceiling_percent)}`],
];
const COMMON = "as all";
const AUDITS = [
  ["Model", (a) => a.model],
  ["Key", (a) => a.key || NONE],
  ["Answers scored again", (a) => count(a.num_scored)],
  ["Nats a token, expected", (a) => fixed(a.expected_nats)],
  ["Measured", (a) => span(a.excess_nats, a.excess_low_nats, a.excess_high_nats, fixed)],
  [
    "Other greedy tokens",
    (a) => span(a.disagreement, a.disagreement_low, a.disagreement_high, share),
  ],
  ["Brownout", (a) => (a.is_exempt ? "exempt: costs more than the bound" : "allowed")],
];
const span = (value, low, high, text) =>
  low === null ? text(value) : `${text(value)} (${text(low)} to ${text(high)})`;
const WORKERS = [
  ["Worker", (w) => w.name],
  ["State", (w) => (w.is_up ? "up" : "gone")],
  ["Rows waiting", (w) => count(w.rows)],
  ["Oldest waits", (w) => (w.rows ? seconds(w.oldest_s) : NONE)],
  ["Stages run", (w) => count(w.stages)],
];

function table(id, columns, rows) {
  const section = byId(id);
  section.hidden = !rows.length;
  if (!rows.length) return;
  const made = document.createElement("table");
  made
    .createTHead()
    .insertRow()
    .append(
      ...columns.map(([title]) =>
        Object.assign(document.createElement("th"), { textContent: title, scope: "col" }),
      ),
    );
  const body = made.createTBody();
  for (const row of rows) {
    const cells = body.insertRow();
    if (row.is_up === false) cells.className = "bad";
    for (const [, of] of columns) cells.insertCell().textContent = of(row);
  }
  made.setAttribute("aria-labelledby", `${id}-title`);
  section.querySelector(".scroll").replaceChildren(made);
}

// ---- connection and key -----------------------------------------------------------------------

function link(text, waiting) {
  if (byId("link").textContent !== text) byId("link").textContent = text;
  byId("retry").hidden = !waiting;
  document.body.classList.toggle("stale", waiting);
}

function refused(code, text) {
  byId("main").hidden = true;
  byId("key").hidden = false;
  byId("forget").hidden = true;
  byId("banner").hidden = true;
  byId("status").textContent = "key needed";
  byId("status").dataset.status = "";
  byId("key-refusal").textContent = key() ? text : "";
  byId("key-value").setAttribute("aria-invalid", String(Boolean(key())));
  sessionStorage.removeItem(KEY);
  byId("key-value").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const value = byId("key-value").value.trim();
  if (!value) {
    byId("key-refusal").textContent = "Type the key first.";
    return;
  }
  sessionStorage.setItem(KEY, value);
  byId("key-value").value = "";
  feed.retry();
});

byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  feed.retry();
});

byId("retry").addEventListener("click", () => feed.retry());

feed.run();
