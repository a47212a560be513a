// The brownout form: what is in force, what somebody edits, and what the server said of that.

import { fixed, percent, seconds } from "./format.js";

const FIELDS = [
  "strategy",
  "keep",
  "way",
  "salc_enabled",
  "controller",
  "prefill_threshold_percent",
  "decode_threshold_percent",
  "ttft_slo_s",
  "itl_slo_s",
  "max_expected_loss",
];
const OWN = ["ttft_slo_s", "itl_slo_s", "floor_percent", "ceiling_percent"]; // that a model may have
const MS = new Set(["ttft_slo_s", "itl_slo_s"]);

// A value as its control has it, and back.
function shown(name, value) {
  if (MS.has(name)) return String(Number((1000 * value).toPrecision(6)));
  return name.endsWith("percent") ? String(Math.round(value)) : String(value);
}

function meant(name, text) {
  if (name === "salc_enabled") return text === "true";
  if (["strategy", "keep", "controller"].includes(name)) return text;
  if (text.trim() === "" || !Number.isFinite(Number(text))) return null;
  return MS.has(name) ? Number(text) / 1000 : Number(text);
}

export class Controls {
  #form = document.getElementById("brownout");
  #apply = document.getElementById("apply");
  #reset = document.getElementById("reset");
  #outcome = document.getElementById("outcome");
  #refusal = document.getElementById("refusal");
  #try = document.getElementById("try");
  #back = document.getElementById("undo");
  #whatif = document.getElementById("whatif");
  #before = null; // what the last change was made from
  #edited = new Set();
  #state = null; // in force
  #model = ""; // whose settings these are; empty: all models'
  #busy = false;
  #headers;

  constructor(headers) {
    this.#headers = headers; // () => what a request has to carry
    this.#form.addEventListener("input", (event) => this.#edit(event.target));
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.#apply.disabled) this.#send();
    });
    this.#reset.addEventListener("click", () => this.#undo());
    this.#try.addEventListener("click", () => this.#ask());
    this.#back.addEventListener("click", () => this.#post(this.#before, true));
  }

  // What may be chosen.
  offer({ ways, controllers, own_strategy }) {
    fill(
      this.#form.elements.way,
      ways.length ? ways.map((way) => [way, `${way} experts as one`]) : [[0, "none"]],
    );
    fill(
      this.#form.elements.controller,
      controllers.map((name) => [name, name]),
    );
    const { strategy } = this.#form.elements;
    const chosen = strategy.value;
    strategy.querySelector("[value=partial]").disabled = !ways.length;
    strategy.options.length = 3; // without a user's own
    if (own_strategy) strategy.add(new Option(own_strategy, own_strategy));
    strategy.value = chosen;
    if (this.#state) this.show(this.#state);
  }

  // What is in force; what somebody edits stays as it is.
  show(state) {
    this.#state = state;
    for (const control of this.#form.elements) control.disabled = !state;
    if (state) {
      this.#offerModels(state.models.map(({ name }) => name));
      for (const name of this.#fields)
        if (!this.#edited.has(name)) this.#put(name, shown(name, this.#inForce[name]));
    }
    this.#enable();
  }

  #offerModels(names) {
    const select = this.#form.elements.model;
    if (this.#model && !names.includes(this.#model)) this.#choose("");
    const there = Array.from(select.options, ({ value }) => value).filter(Boolean);
    if (there.join("\n") !== names.join("\n"))
      fill(select, [["", "all models"], ...names.map((name) => [name, name])]);
    select.value = this.#model;
    select.closest(".field").hidden = names.length < 2;
  }

  #choose(model) {
    this.#model = model;
    this.#edited.clear();
    this.#clear();
    for (const part of this.#form.querySelectorAll("[data-of]"))
      part.hidden = (part.dataset.of === "model") !== Boolean(model);
  }

  get #fields() {
    return this.#model ? OWN : FIELDS;
  }

  // What the form's model has of its own, or what all have.
  get #inForce() {
    return ownOf(this.#state, this.#model);
  }

  #put(name, text) {
    const control = this.#form.elements[name];
    if (control.value !== text) control.value = text;
  }

  #edit({ name, value }) {
    if (name === "model") {
      this.#choose(value);
      this.show(this.#state);
      return;
    }
    const text = this.#form.elements[name].value;
    if (text === shown(name, this.#inForce[name])) this.#edited.delete(name);
    else this.#edited.add(name);
    this.#clear();
    this.#enable();
  }

  #undo() {
    this.#edited.clear();
    this.#clear();
    this.show(this.#state);
  }

  #clear() {
    this.#outcome.textContent = "";
    this.#whatif.hidden = true;
    this.#say("", null);
  }

  #enable() {
    const { elements } = this.#form;
    const byHand = elements.salc_enabled.value === "false";
    elements.prefill_threshold_percent.disabled = elements.decode_threshold_percent.disabled =
      !byHand || !this.#state;
    elements.controller.disabled = byHand || !this.#state;
    elements.way.disabled = elements.way.options.length < 2 || !this.#state;
    for (const name of [...FIELDS, ...OWN])
      labelled(elements[name])?.classList.toggle("edited", this.#edited.has(name));
    const waits = this.#busy || !this.#state; // of a server that starts again nothing is known
    this.#apply.disabled = this.#reset.disabled = this.#try.disabled = waits || !this.#edited.size;
    this.#back.hidden = !this.#before;
    this.#back.disabled = waits;
  }

  // What is edited; null where a number is missing, which is said.
  #change() {
    const change = this.#model ? { model: this.#model } : {};
    for (const name of this.#fields) {
      const control = this.#form.elements[name];
      if (!this.#edited.has(name) || control.disabled) continue;
      change[name] = meant(name, control.value);
      if (change[name] === null) return this.#say("This needs a number.", name) ?? null;
    }
    return change;
  }

  #send() {
    const change = this.#change();
    if (change) this.#post(change, false);
  }

  // What the edits let expect; nothing is changed.
  async #ask() {
    const change = this.#change();
    if (!change) return;
    this.#say("", null);
    const [ok, body] = await this.#fetch("api/whatif", change);
    if (!ok) return this.#say(body.error, body.field);
    this.#whatif.replaceChildren(expected(body));
    this.#whatif.hidden = false;
  }

  async #post(change, undoes) {
    // Thresholds of their own turn the controller off already.
    this.#say("", null);
    this.#busy = true;
    this.#enable();
    this.#outcome.textContent = "way" in change ? "Loading the way …" : "Applying …";
    const before = undone(change, this.#state);
    const [ok, body] = await this.#fetch("api/brownout", change);
    if (!ok) this.#say(body.error, body.field);
    else {
      this.#before = undoes ? null : before;
      this.#edited.clear();
      this.#whatif.hidden = true;
      this.show(body);
      this.#outcome.textContent = undoes ? "Undone." : "Applied.";
    }
    if (this.#outcome.textContent.endsWith("…")) this.#outcome.textContent = "";
    this.#busy = false;
    this.#enable();
  }

  async #fetch(path, body) {
    try {
      const answer = await fetch(path, {
        method: "POST",
        headers: { "Content-Type": "application/json", ...this.#headers() },
        body: JSON.stringify(body),
      });
      return [answer.ok, await answer.json()];
    } catch {
      const error = "The server did not answer; whether the change was made, the page will show.";
      return [false, { error, field: null }];
    }
  }

  // A refusal, beside the control that it is about.
  #say(text, field) {
    for (const control of this.#form.querySelectorAll("[aria-invalid]")) {
      control.removeAttribute("aria-invalid");
      control.removeAttribute("aria-describedby");
    }
    this.#refusal.textContent = text;
    const control = field ? this.#form.querySelector(`[name=${field}]`) : null;
    const place = [".fields", ".field", "fieldset"]
      .map((kind) => control?.closest(kind))
      .find(Boolean);
    if (place) place.after(this.#refusal);
    else this.#apply.parentElement.before(this.#refusal);
    if (!text || !control) return;
    control.setAttribute("aria-invalid", "true");
    control.setAttribute("aria-describedby", "refusal");
    control.focus();
  }
}

// The change that takes another one back: with a controller it sets no thresholds, which are that
// one's to move, and under zero brownout those that were set are not known.
function undone({ model, ...change }, state) {
  const own = Object.keys(change).map((name) => [name, ownOf(state, model)[name]]);
  if (model) return { model, ...Object.fromEntries(own) };
  const names = new Set([...Object.keys(change), "salc_enabled"]);
  const thresholds = ["prefill_threshold_percent", "decode_threshold_percent"];
  const shows = !state.salc_enabled && state.strategy !== "zero"; // which has 100 in force
  if (shows) thresholds.forEach((name) => names.add(name));
  else thresholds.forEach((name) => names.delete(name));
  const whole = (name) => (name.endsWith("percent") ? Math.round(state[name]) : state[name]);
  return Object.fromEntries([...names].map((name) => [name, whole(name)]));
}

// A table of what a change lets expect, a column for each phase.
function expected(phases) {
  const each = Object.values(phases);
  const rows = [
    ["", ...Object.keys(phases)],
    [
      "threshold",
      ...each.map((e) => `${percent(e.threshold_now_percent)} → ${percent(e.threshold_percent)}`),
    ],
    ["step", ...each.map((e) => `${seconds(e.step_now_s)} → ${seconds(e.step_s)}`)],
    ["loss", ...each.map((e) => `${fixed(e.loss_now)} → ${fixed(e.loss)}`)],
  ];
  const table = document.createElement("table");
  rows.forEach((row, at) => {
    const line = table.insertRow();
    row.forEach((words, column) =>
      line.append(
        Object.assign(document.createElement(at && column ? "td" : "th"), { textContent: words }),
      ),
    );
  });
  const missed = Object.entries(phases).filter(([, e]) => e.is_kept === false);
  const caption = table.createCaption();
  caption.textContent = "Expected at the present load, now → then; loss in nats a token.";
  if (missed.length) {
    const names = missed.map(([name]) => name).join(" and ");
    const note = document.createElement("b");
    note.textContent = ` The objective of ${names} would not be kept.`;
    caption.append(note);
  }
  return table;
}

function ownOf(state, model) {
  if (!model) return state;
  return state.models.find(({ name }) => name === model) ?? {}; // it may have been unloaded
}

function fill(select, options) {
  const before = select.value;
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  select.value = before;
}

function labelled(control) {
  return control instanceof RadioNodeList
    ? control[0].closest("fieldset")
    : control.closest(".field");
}
