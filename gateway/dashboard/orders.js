// Morphs and drains by hand, with their outcomes. The gateway's table of morphs names the kinds.

import { Refused, call } from "./api.js";
import { $, attribute, children, h, options, say, text } from "./dom.js";
import { inWords, markChosen } from "./devices.js";
import { field, notice, number, select } from "./form.js";
import { count, seconds } from "./format.js";
import { store } from "./store.js";
import { fill, morphEntry, progressOf, tables } from "./tables.js";
import { chip } from "./why.js";

const WAIT_S = 5; // how long a morph may wait for memory
const KEPT = 2; // outcomes shown under each form
const ARMED_MS = 6000; // how long a drain waits to be confirmed

const view = { orders: [], rows: new Map(), forms: {}, lists: new Map() };

export function startOrders() {
  for (const entry of tables.morphs.filter(({ target }) => target)) view.forms[entry.name] = morphForm(entry);
  view.forms.drain = drainForm();
  $("panel-orders").append(...Object.values(view.forms).map(({ element }) => element));
}

/** Puts layers that were chosen in a strip into the form of the morph that takes layers. */
export function chooseLayers(instanceId, layers) {
  const form = Object.values(view.forms).find(({ inputs }) => inputs?.layers);
  if (!form) return;
  form.instance.input.value = instanceId;
  form.inputs.layers.input.value = layers.join(", ");
  markChosen(instanceId, layers);
}

export function drawOrders(state) {
  for (const form of Object.values(view.forms)) form.draw(state);
  for (const order of view.orders) {
    const morph = state.morphs.find(({ id }) => id === order.morph?.id);
    if (morph) order.morph = morph;
  }
  drawOutcomes();
}

const chosenInstance = (instance) => store.state?.instances.find(({ id }) => id === instance.input.value);

// ---------------------------------------------------------------------------- the forms

/** The form of a kind of morph: an input for each field of its table, by the field's type. */
function morphForm({ name, label, summary, target, fields }) {
  const instance = target === "instance" ? field("Instance", select()) : null;
  const shown = fields.filter((one) => one.is_shown);
  const inputs = Object.fromEntries(shown.map((one) => [one.name, (INPUTS[one.type] ?? numberInput)(one, instance)]));
  const all = [...(instance ? [instance] : []), ...Object.values(inputs)];
  const form = order(label, sentence(summary), all, () => ({
    path: instance ? `/admin/instances/${encodeURIComponent(instance.input.value)}/${name}` : `/admin/instances/${name}`,
    body: Object.assign({ wait_s: WAIT_S }, ...Object.entries(inputs).map(([key, one]) => one.read(key))),
  }), { ...inputs, count: inputs.layers, ...(instance && { instance }) });
  return {
    ...form, instance, inputs,
    draw(state) {
      if (instance) options(instance.input, state.instances.map((one) => [one.id, one.id]));
      for (const one of Object.values(inputs)) one.draw?.(state, instance && chosenInstance(instance));
    },
  };
}

const sentence = (words) => words[0].toUpperCase() + words.slice(1);
const asNumber = (made) => ({ ...made, read: (key) => ({ [key]: made.input.valueAsNumber || 0 }) });

function numberInput({ label, summary, minimum }) {
  return asNumber(field(label, number({ min: minimum }), summary));
}

/** Shows the instance's number of blocks until something is typed. */
function blocksInput({ label, minimum }) {
  const made = asNumber(field(label, number({ min: minimum, step: 1 })));
  made.input.addEventListener("input", () => { made.input.dataset.touched = "yes"; });
  return { ...made, draw(_, one) {
    if (!one) return;
    const { blocks: now, used } = one.kv;
    const most = one.max_blocks ? `, at most ${count(one.max_blocks)}` : "";
    text(made.help, `now ${count(now)}, ${count(used)} in use; at least ${count(one.min_blocks)}${most}`);
    if (document.activeElement !== made.input && !made.input.dataset.touched) made.input.value = now ?? "";
  } };
}

function layersInput({ label }, instance) {
  const made = field(label, h("input", { type: "text", placeholder: "next 2", autocomplete: "off" }),
    "“next 2” in the model's order, or numbers: 0, 4, 5-7. Or point at columns above.");
  made.input.addEventListener("input", () => markChosen(instance.input.value, whichLayers(made.input.value).layers ?? []));
  return { ...made, read: () => whichLayers(made.input.value || "next 2") };
}

/** Starts with the policy's precision. */
function precisionInput({ label }) {
  const made = field(label, select());
  return { ...made, read: (key) => ({ [key]: made.input.value }), draw(state, one) {
    const isFirst = !made.input.options.length;
    options(made.input, (one?.variants ?? []).map((name) => [name, name]));
    if (isFirst && made.input.options.length) made.input.value = state.policy.precision;
  } };
}

function partsInput({ label }) {
  const made = field(label, select([["", "both halves"], ["attention", "attention"], ["ffn", "FFN"]]));
  return { ...made, read: (key) => (made.input.value ? { [key]: [made.input.value] } : {}) };
}

function workersInput({ label, summary }) {
  const boxes = h("div.checks", { role: "group", "aria-label": sentence(summary) });
  const made = field(label, h("input", { type: "hidden" }));
  made.input.before(boxes);
  const chosen = () => [...boxes.querySelectorAll(":checked")].map(({ value }) => value);
  return { ...made, read: (key) => ({ [key]: chosen() }), draw(state) {
    const ids = [...new Set(state.instances.flatMap((one) => one.workers))]; // one may serve several models
    if (boxes.dataset.ids === ids.join()) return;
    boxes.dataset.ids = ids.join();
    const before = new Set(chosen());
    boxes.replaceChildren(...ids.map((id) =>
      h("label", {}, h("input", { type: "checkbox", value: id, checked: before.size ? before.has(id) : true }), id)));
  } };
}

function degreeInput({ label }) {
  const made = field(label, select());
  return { ...made, read: (key) => ({ [key]: Number(made.input.value) }), draw(state) {
    const degrees = [...new Set(state.instances.flatMap((one) => one.degrees))].sort((a, b) => a - b);
    options(made.input, degrees.map((degree) => [degree, `tp${degree}`]));
  } };
}

function choiceInput({ label, summary, choices }) {
  const made = field(label, select(Object.keys(choices).map((one) => [one, one])), summary);
  return { ...made, read: (key) => ({ [key]: made.input.value }) };
}

const INPUTS = {
  choice: choiceInput, layers: layersInput, precision: precisionInput, parts: partsInput, blocks: blocksInput, workers: workersInput,
  degree: degreeInput,
};

/** "next 3" -> {count}, "0, 4-6" -> {layers}. Other text is sent as it is: the server says what is wrong. */
export function whichLayers(words) {
  const next = /^\s*(?:next\s+)?(\d+)\s*(?:more|layers?)?\s*$/i.exec(words);
  if (next && /next|more/i.test(words)) return { count: Number(next[1]) };
  const layers = [];
  for (const piece of words.split(/[,\s]+/).filter(Boolean)) {
    const [, first, last] = /^(\d+)-(\d+)$/.exec(piece) ?? [];
    if (first === undefined) layers.push(/^\d+$/.test(piece) ? Number(piece) : piece);
    else for (let layer = Number(first); layer <= Number(last) && layers.length < 4096; layer += 1) layers.push(layer);
  }
  return { layers };
}

/** The models that no worker would serve without this one. Of a group the others serve on; what is divided for good ends. */
function onlyIts(state, id) {
  const isStaying = (name) => name !== id && state.workers.find((one) => one.id === name)?.state !== "draining";
  const serves = ({ stages, workers }) => (stages?.length ? workers.every(isStaying) : workers.some(isStaying));
  const models = new Set(state.instances.filter(({ workers }) => workers.includes(id)).map(({ model }) => model));
  return [...models].filter((model) => !state.instances.some((one) => one.model === model && serves(one)));
}

/** Asks before the order, and again if the gateway says which models nobody would serve. */
function drainForm() {
  const worker = field("Worker", select());
  const asked = { worker: "", force: "" };
  const ask = (label, force) => {
    Object.assign(asked, { worker: worker.input.value, force });
    text(form.go, label);
    clearTimeout(asked.timer);
    asked.timer = setTimeout(disarm, ARMED_MS);
  };
  const disarm = () => {
    asked.worker = "";
    text(form.go, "Drain");
  };
  const form = order("Drain", "Let a worker finish what it runs, and leave", [worker], () => {
    const id = worker.input.value;
    if (asked.worker !== id) {
      ask(`Yes, drain ${id}`, "");
      return null;
    }
    disarm();
    return { path: `/admin/workers/${encodeURIComponent(id)}/drain${asked.force}` };
  }, { worker }, ({ code }) => code === "last_worker" && ask(`Drain ${worker.input.value} all the same`, "?force=true"));
  const warn = () => {
    const models = store.state ? onlyIts(store.state, worker.input.value) : [];
    text(worker.help, models.length ? `the last worker that serves ${models.join(", ")}: without it no request for that is served` : "");
  };
  worker.input.addEventListener("change", () => { disarm(); warn(); });
  return { ...form, draw(state) {
    options(worker.input, state.workers.map(({ id }) => [id, id]));
    warn();
  } };
}

/** `make()`: {path, body}, or null to ask again. `onRefused(error)`: the gateway refused the order. */
function order(title, hint, fields, make, byParam, onRefused = () => {}) {
  const go = h("button.primary", { type: "submit" }, title);
  const outcome = notice();
  const list = h("ol.outcomes", { "aria-label": `Outcomes: ${title}`, "aria-live": "polite" });
  view.lists.set(title, list);
  const element = h("form.order", { noValidate: true, "aria-label": title },
    h("h3", {}, title, h("span.fine", {}, hint)),
    h("div.fields", {}, ...fields.map((one) => one.element)), h("div.row", {}, go), outcome.element, list);
  element.addEventListener("submit", async (event) => {
    event.preventDefault();
    const made = make();
    fields.forEach((one) => one.clear());
    outcome.show("", "");
    if (!made) return;
    go.disabled = true;
    try {
      await send(title, made);
      markChosen("", []);
    } catch (error) {
      refuse(error, byParam, outcome);
      onRefused(error);
    } finally {
      go.disabled = false;
    }
  });
  return { element, go };
}

function refuse(error, byParam, outcome) {
  const message = error instanceof Refused ? error.message : "the gateway does not answer; the order may not have arrived";
  const at = error instanceof Refused && byParam[error.param?.split(".")[0]];
  if (at) at.fail(message);
  else outcome.show("bad", message);
  say(message);
}

// ---------------------------------------------------------------------------- outcomes

async function send(title, { path, body }) {
  const answer = await call("POST", path, body);
  const isMorph = "kind" in answer;
  view.orders.unshift({ id: answer.id, title, morph: isMorph ? answer : null, worker: answer.worker, at: store.now() });
  const same = view.orders.filter((order) => order.title === title).slice(KEPT);
  view.orders = view.orders.filter((order) => !same.includes(order));
  drawOutcomes();
}

function drawOutcomes() {
  for (const [title, list] of view.lists) {
    children(list, view.orders.filter((order) => order.title === title).map(drawOutcome));
  }
  for (const id of view.rows.keys()) if (!view.orders.some((order) => order.id === id)) view.rows.delete(id);
}

function drawOutcome(made) {
  if (!view.rows.has(made.id)) view.rows.set(made.id, outcomeRow(made));
  const row = view.rows.get(made.id);
  const { morph } = made;
  if (!morph) {
    const left = !store.state?.workers.some(({ id }) => id === made.worker);
    chip(row.chip, left ? "applied" : "running");
    text(row.words, left ? `${made.worker} has left` : `${made.worker} finishes what it runs`);
    return row.element;
  }
  chip(row.chip, morph.state);
  const isRunning = morph.state === "running";
  row.cancel.hidden = !isRunning;
  row.bar.hidden = !isRunning;
  const progress = progressOf(morph);
  attribute(row.bar, "value", progress);
  text(row.words, isRunning ? inWords(morph) : ended(morph));
  return row.element;
}

function ended(morph) {
  const { reason, started, ended: at, kind } = morph;
  const took = at ? `after ${seconds(Math.max(0, at - started))}` : "";
  return [reason || fill(morphEntry(kind)?.applied, morph), took].filter(Boolean).join(" · ");
}

function outcomeRow(made) {
  const row = { chip: h("span.chip"), words: h("p.fine"), bar: h("progress", { max: 1, hidden: true }) };
  row.cancel = h("button.quiet", { type: "button", hidden: true, onclick: () => cancel(made, row) }, "Give up");
  attribute(row.bar, "aria-label", `progress of ${made.title}`);
  const what = made.morph?.decided?.replace("ordered by hand: ", "") ?? made.worker;
  row.element = h("li", {}, h("div.row", {}, h("span", {}, what), row.chip, row.cancel), row.bar, row.words);
  return row;
}

async function cancel(made, row) {
  try {
    made.morph = await call("DELETE", `/admin/morphs/${encodeURIComponent(made.id)}?wait=true`);
    drawOutcomes();
  } catch (error) {
    text(row.words, error.message);
  }
}
