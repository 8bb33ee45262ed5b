// Swap, resize, transform and drain by hand, each with what became of it.

import { Refused, call } from "./api.js";
import { $, attribute, children, h, options, say, text } from "./dom.js";
import { inWords, markChosen } from "./devices.js";
import { field, notice, number, select } from "./form.js";
import { bytes, count, seconds } from "./format.js";
import { progressOf } from "./shape.js";
import { store } from "./store.js";
import { chip } from "./why.js";

const KEPT = 2; // outcomes under each form
const ARMED_MS = 6000; // for so long a drain that was asked for can be confirmed

const view = { orders: [], rows: new Map(), forms: {}, lists: new Map() };

export function startOrders() {
  view.forms = { swap: swapForm(), resize: resizeForm(), transform: transformForm(), drain: drainForm() };
  $("panel-orders").append(...Object.values(view.forms).map(({ element }) => element));
}

/** Layers that were chosen in a picture. */
export function chooseLayers(instanceId, layers) {
  const { instance, layers: input } = view.forms.swap;
  instance.input.value = instanceId;
  input.input.value = layers.join(", ");
  markChosen(instanceId, layers);
}

export function drawOrders(state) {
  const ids = state.instances.map((one) => [one.id, one.id]);
  for (const { instance } of [view.forms.swap, view.forms.resize]) options(instance.input, ids);
  for (const form of Object.values(view.forms)) form.draw?.(state);
  for (const order of view.orders) {
    const morph = state.morphs.find(({ id }) => id === order.morph?.id);
    if (morph) order.morph = morph;
  }
  drawOutcomes();
}

const chosenInstance = (instance) => store.state?.instances.find(({ id }) => id === instance.input.value);

// ---------------------------------------------------------------------------- the forms

function swapForm() {
  const instance = field("Instance", select());
  const layers = field("Layers", h("input", { type: "text", placeholder: "next 2", autocomplete: "off" }),
    "“next 2” in the model's order, or numbers: 0, 4, 5-7. Or point at columns above.");
  const precision = field("To", select());
  const part = field("Part", select([["", "both halves"], ["attention", "attention"], ["ffn", "FFN"]]));
  const form = order("Swap", "Hold layers in another precision", [instance, layers, precision, part], () => {
    const body = { precision: precision.input.value, wait_s: 5, ...whichLayers(layers.input.value || "next 2") };
    if (part.input.value) body.parts = [part.input.value];
    return { path: `/admin/instances/${encodeURIComponent(instance.input.value)}/swap`, body };
  }, { layers, count: layers, precision, parts: part, instance });
  layers.input.addEventListener("input", () => {
    const { layers: numbers } = whichLayers(layers.input.value);
    markChosen(instance.input.value, numbers ?? []);
  });
  return {
    ...form, instance, layers,
    draw(state) {
      const isFirst = !precision.input.options.length;
      options(precision.input, (chosenInstance(instance)?.variants ?? []).map((name) => [name, name]));
      if (isFirst && precision.input.options.length) precision.input.value = state.policy.precision;
    },
  };
}

/** "next 3" -> {count}, "0, 4-6" -> {layers}. What is neither goes as it is: the server says what is wrong. */
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

function resizeForm() {
  const instance = field("Instance", select());
  const blocks = field("KV blocks", number({ min: 1, step: 1 }));
  const form = order("Resize", "Give pages to the KV cache, or take them back", [instance, blocks], () => ({
    path: `/admin/instances/${encodeURIComponent(instance.input.value)}/resize`,
    body: { blocks: blocks.input.valueAsNumber || 0, wait_s: 5 },
  }), { blocks, instance });
  return { ...form, instance, draw() {
    const one = chosenInstance(instance);
    if (!one) return;
    const { blocks: now, used } = one.kv;
    text(blocks.help, `now ${count(now)}, ${count(used)} in use; at least ${count(one.min_blocks)}${one.max_blocks ? `, at most ${count(one.max_blocks)}` : ""}`);
    if (document.activeElement !== blocks.input && !blocks.input.dataset.touched) blocks.input.value = now ?? "";
    blocks.input.oninput = () => { blocks.input.dataset.touched = "yes"; };
  } };
}

function transformForm() {
  const boxes = h("div.checks", { role: "group", "aria-label": "Workers that take part" });
  const workers = field("Workers", h("input", { type: "hidden" }));
  workers.element.querySelector("input").before(boxes);
  const tp = field("Degree", select());
  const form = order("Transform", "Serve on several workers as one, or part again", [workers, tp], () => ({
    path: "/admin/instances/transform",
    body: { workers: [...boxes.querySelectorAll(":checked")].map(({ value }) => value), tp: Number(tp.input.value), wait_s: 5 },
  }), { workers, tp });
  return { ...form, draw(state) {
    const ids = [...new Set(state.instances.flatMap((one) => one.workers))]; // one may serve several models
    if (boxes.dataset.ids !== ids.join()) {
      boxes.dataset.ids = ids.join();
      const chosen = new Set([...boxes.querySelectorAll(":checked")].map(({ value }) => value));
      boxes.replaceChildren(...ids.map((id) =>
        h("label", {}, h("input", { type: "checkbox", value: id, checked: chosen.size ? chosen.has(id) : true }), id)));
    }
    const degrees = [...new Set(state.instances.flatMap((one) => one.degrees))].sort((a, b) => a - b);
    options(tp.input, degrees.map((degree) => [degree, `tp${degree}`]));
  } };
}

/** Asks twice: before the order, and where the gateway says what nobody would serve any more. */
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
  worker.input.addEventListener("change", disarm);
  return { ...form, draw: (state) => options(worker.input, state.workers.map(({ id }) => [id, id])) };
}

/** `make()`: {path, body}, or null to be asked again. `onRefused(error)`: the gateway refused the order. */
function order(title, hint, fields, make, byParam, onRefused = () => {}) {
  const go = h("button.primary", { type: "submit" }, title);
  const told = notice();
  const list = h("ol.outcomes", { "aria-label": `What became of it: ${title}`, "aria-live": "polite" });
  view.lists.set(title, list);
  const element = h("form.order", { noValidate: true, "aria-label": title },
    h("h3", {}, title, h("span.fine", {}, hint)),
    h("div.fields", {}, ...fields.map((one) => one.element)), h("div.row", {}, go), told.element, list);
  element.addEventListener("submit", async (event) => {
    event.preventDefault();
    const made = make();
    fields.forEach((one) => one.clear());
    told.show("", "");
    if (!made) return;
    go.disabled = true;
    try {
      await send(title, made);
      markChosen("", []);
    } catch (error) {
      refuse(error, byParam, told);
      onRefused(error);
    } finally {
      go.disabled = false;
    }
  });
  return { element, go };
}

function refuse(error, byParam, told) {
  const message = error instanceof Refused ? error.message : "the gateway does not answer; the order may not have arrived";
  const at = error instanceof Refused && byParam[error.param?.split(".")[0]];
  if (at) at.fail(message);
  else told.show("bad", message);
  say(message);
}

// ---------------------------------------------------------------------------- what became of them

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

function ended({ reason, numbers, started, ended: at, kind }) {
  const took = at ? `after ${seconds(Math.max(0, at - started))}` : "";
  const said = {
    swap: () => `${numbers.halves_applied ?? 0} halves, ${bytes(numbers.bytes_copied ?? 0)} copied, ${numbers.pages_unmapped ?? 0} pages freed`,
    resize: () => `${numbers.blocks_before} → ${numbers.blocks_after} blocks`,
    transform: () => `tp${numbers.tp_before} → tp${numbers.tp_after}`,
  };
  return [reason || (numbers && said[kind]?.()), took].filter(Boolean).join(" · ");
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
